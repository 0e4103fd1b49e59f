"""Runs the Hopper fp8 kernel with block scales. Not a backend yet: `fp8_gemm` does not come here."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core.dtypes import name_of
from ...core.errors import CompileError
from . import sm90
from .jit import KernelSpec
from .jit.loader import Loaded, load
from .launch import launch, tensor_map


@cache
def kernel(config: sm90.Config, n: int, k: int, a_dtype: str, b_dtype: str, device: int) -> Loaded:
    spec = KernelSpec(sm90.KERNEL, sm90.source(config, n, k, a_dtype, b_dtype), "sm_90a", sm90.OPTIONS)
    loaded = load(spec, device, config.shared_bytes)
    if loaded.local_bytes:
        raise CompileError(f"kernel {spec.name} spills {loaded.local_bytes} bytes of registers, expected none")
    return loaded


def multiply(config: sm90.Config, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """out [M, N] in bf16 = A [M, K] B [N, K]^T with scales [M, ceil(K/128)] and [ceil(N/128), ceil(K/128)].

    The copy engine wants rows at multiples of 16 bytes: K a multiple of 16, N of 8, everything row-major.
    """
    (m, k), n = a.shape, b.size(0)
    index = a.device.index
    loaded = kernel(config, n, k, name_of(a.dtype), name_of(b.dtype), index)
    maps: list[Any] = [
        tensor_map(a.data_ptr(), "byte", (k, m), k, (sm90.BLOCK_K, config.block_m)),
        tensor_map(b.data_ptr(), "byte", (k, n), k, (sm90.BLOCK_K, config.block_n)),
        tensor_map(out.data_ptr(), "bf16", (n, m), 2 * out.stride(0), (sm90.STORE_COLUMNS, sm90.STORE_ROWS)),
    ]
    launch(
        loaded.handle,
        grid=config.grid(m, n, torch.cuda.get_device_properties(index).multi_processor_count),
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        stream=torch.cuda.current_stream(index).cuda_stream,
        arguments=[*maps, a_scale.data_ptr(), b_scale.data_ptr(), ctypes.c_int(m)],
    )
