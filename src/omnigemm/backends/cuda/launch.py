"""Tensor maps and launches through the driver, with nothing between us and it that costs time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .driver import bindings, checked


def tensor_map(address: int, element: str, shape: tuple[int, int], pitch_bytes: int, box: tuple[int, int]) -> Any:
    """A row-major matrix as the copy engine sees it; `shape` and `box` are (columns, rows), 128-byte swizzle.

    What lies outside the matrix is read as zero and not written.
    """
    driver = bindings()
    kinds = driver.CUtensorMapDataType
    kind = {
        "byte": kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[element]
    answer = driver.cuTensorMapEncodeTiled(
        kind,
        2,
        address,
        [driver.cuuint64_t(size) for size in shape],
        [driver.cuuint64_t(pitch_bytes)],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return checked(answer, f"encoding a tensor map of {shape} with boxes of {box}")


def launch(kernel: Any, *, grid: int, threads: int, shared_bytes: int, stream: int, arguments: Sequence[Any]) -> None:
    """Launch with programmatic dependent launch: the kernel may be set up while the one before it still runs.

    Arguments are tensor maps, addresses (a Python int) and 32-bit numbers (ctypes.c_int).
    """
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [overlap], 1
    values = tuple(one.value if isinstance(one, ctypes.c_int) else one for one in arguments)
    kinds = tuple(
        ctypes.c_int if isinstance(one, ctypes.c_int) else (ctypes.c_void_p if isinstance(one, int) else None)
        for one in arguments
    )
    function = driver.CUfunction(int(kernel))  # a CUkernel serves as one in the current context
    checked(driver.cuLaunchKernelEx(config, function, (values, kinds), 0), "launching a kernel")
