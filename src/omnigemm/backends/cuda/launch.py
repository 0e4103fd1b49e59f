"""Launches through the driver with everything prepared: a warm one only fills in addresses."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .driver import bindings, checked

# The stream that torch uses now; private in torch, but the public way costs as much as a launch.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)

_SWIZZLES = {32: "CU_TENSOR_MAP_SWIZZLE_32B", 64: "CU_TENSOR_MAP_SWIZZLE_64B", 128: "CU_TENSOR_MAP_SWIZZLE_128B"}
_ELEMENTS = {
    1: "CU_TENSOR_MAP_DATA_TYPE_UINT8",
    2: "CU_TENSOR_MAP_DATA_TYPE_UINT16",
    4: "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",  # results only: the copy engine adds to them
}


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A row-major matrix as the copy engine sees it; what lies outside it is read as zero and not written.

    `box` (columns, rows) is what one copy moves; its rows are swizzled over their whole length in shared memory.
    With a `count`, there are so many matrices, `step_bytes` apart, and copies have their number as a third coordinate.
    L2 takes `fetch` bytes of a row from memory at a time.
    """

    columns: int
    rows: int
    element_bytes: int
    pitch_bytes: int
    box: tuple[int, int]
    count: int = 0
    step_bytes: int = 0
    fetch: int = 256

    def encode(self, address: int) -> tuple[Any, ...]:
        """The driver's answer, with the tensor map in it."""
        driver = bindings()
        many = self.count > 0
        sizes = (self.columns, self.rows, *((self.count,) if many else ()))
        steps = (self.pitch_bytes, *((self.step_bytes,) if many else ()))
        box = (*self.box, *((1,) if many else ()))
        answer: tuple[Any, ...] = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, _ELEMENTS[self.element_bytes]),
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, _SWIZZLES[self.box[0] * self.element_bytes]),
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{self.fetch}B"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return answer


class _Slot:
    """The memory of one launch in flight on the host: the driver copies it before it returns."""

    def __init__(self, launcher: Launcher) -> None:
        self.maps: list[Any] = [None] * len(launcher.matrices)
        self.addresses: tuple[int, ...] = (0,) * len(launcher.matrices)
        self.values = ctypes.create_string_buffer(launcher.values.size)
        self.unread = ctypes.create_string_buffer(128)  # a map that the kernel has no use for
        self.parameters = (ctypes.c_void_p * (len(self.maps) + 1))(*[ctypes.addressof(self.unread)] * len(self.maps))
        self.parameters[len(self.maps)] = ctypes.addressof(self.values)
        self.at = ctypes.addressof(self.parameters)


class Launcher:
    """A kernel with its launch shape, its matrices (None: a parameter that the kernel does not read) and the format
    of its plain arguments, which come last, as one structure. `overlap`: it waits by itself for the kernel before it,
    which takes an sm_90."""

    SLOTS = 256  # that are kept, of some two kilobytes each

    def __init__(
        self,
        kernel: Any,
        *,
        grid: int,
        threads: int,
        shared_bytes: int,
        cluster: int,
        matrices: Sequence[Matrix | None],
        values: str,
        overlap: bool = True,
    ) -> None:
        self._driver = bindings()
        self._kernel = kernel  # kept alive
        self._function = self._driver.CUfunction(int(kernel.handle))  # a CUkernel serves as one in any context
        self._shape = grid, threads, shared_bytes, cluster
        self._overlap = overlap
        self.matrices = tuple(matrices)
        self.values = struct.Struct(values)
        self._configs: dict[int, Any] = {}  # by stream; the driver only reads them
        self._free: dict[tuple[int, ...], _Slot] = {}  # by the addresses that their maps point to

    def _config(self, stream: int) -> Any:
        driver = self._driver
        grid, threads, shared_bytes, cluster = self._shape
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        attributes = []
        if self._overlap:
            # The kernel may be set up while the one before it still runs.
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        if cluster > 1:
            together = driver.CUlaunchAttribute()
            together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
            attributes.append(together)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def __call__(self, stream: int, addresses: tuple[int, ...], *values: Any) -> None:
        """Launch on a stream, with an address for each matrix and the plain arguments."""
        self.launch(stream, addresses, values)

    def launch(self, stream: int, addresses: tuple[int, ...], values: tuple[Any, ...]) -> None:
        # Taken and given back without a lock: no two threads ever have the same one.
        slot = self._free.pop(addresses, None) or self._pointed(addresses)
        self.values.pack_into(slot.values, 0, *values)
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = self._config(stream)
        answer = self._driver.cuLaunchKernelEx(config, self._function, slot.at, 0)
        if answer[0]:
            return self._refused(answer, config, slot, addresses)
        self._free[addresses] = slot
        return None

    def _refused(self, answer: tuple[Any, ...], config: Any, slot: _Slot, addresses: tuple[int, ...]) -> None:
        try:
            again = partial(self._driver.cuLaunchKernelEx, config, self._function, slot.at, 0)
            self._settled(answer, again, "launching a kernel")
        finally:
            self._free[addresses] = slot

    def _settled(self, answer: tuple[Any, ...], again: Callable[[], tuple[Any, ...]], what: str) -> Any:
        """What a call returned, tried again where the calling thread has no context yet, because it did nothing with
        CUDA before: tensor maps need one as well as launches do."""
        if answer[0] and not int(checked(self._driver.cuCtxGetCurrent(), "asking for the context")):
            self._take_context(torch._C._cuda_getDevice())
            answer = again()
        return checked(answer, what)

    def _take_context(self, index: int) -> None:
        """Have the calling thread use the context that torch uses, the primary one of the device."""
        device = checked(self._driver.cuDeviceGet(index), f"device {index}")
        context = checked(self._driver.cuDevicePrimaryCtxRetain(device), f"the context of device {index}")
        try:
            checked(self._driver.cuCtxSetCurrent(context), f"using the context of device {index}")
        finally:
            self._driver.cuDevicePrimaryCtxRelease(device)  # whoever made the tensors keeps it

    def _pointed(self, addresses: tuple[int, ...]) -> _Slot:
        """A slot for other addresses: a new one, or, if there are many, the one that was used last."""
        slot = None
        if len(self._free) >= self.SLOTS:
            with contextlib.suppress(KeyError):  # other threads took them all
                slot = self._free.popitem()[1]
        slot = slot or _Slot(self)
        for i, address in enumerate(addresses):
            if address != slot.addresses[i]:
                self._point(slot, i, address)
        slot.addresses = addresses
        return slot

    def _point(self, slot: _Slot, i: int, address: int) -> None:
        matrix = self.matrices[i]
        if matrix is None:
            return
        if slot.maps[i] is None:
            encode = partial(matrix.encode, address)
            slot.maps[i] = self._settled(encode(), encode, f"encoding a tensor map of {matrix}")
            slot.parameters[i] = int(slot.maps[i].getPtr())
        else:
            replace = partial(self._driver.cuTensorMapReplaceAddress, slot.maps[i], address)
            self._settled(replace(), replace, "pointing a tensor map elsewhere")
