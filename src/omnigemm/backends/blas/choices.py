"""What cuBLASLt is told about a product, and the algorithms it chooses for it, once for each way it may run."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .library import LtLibrary

# Values of enums in NVIDIA's cublasLt.h: attributes of an operation, of a layout and of a preference.
_TRANSA, _TRANSB = 3, 4  # int32
_BATCH_COUNT, _BATCH_STEP = 5, 6  # int32, int64
_MOST_WORKSPACE, _REDUCTIONS = 1, 3  # uint64, uint32
_ALIGNMENTS = (5, 6, 7, 8)  # uint32, in bytes: of A, B, C and D
# How an algorithm may add up the parts of a split K: in any way, or only in the compute type.
_ANY_REDUCTION, _IN_COMPUTE_TYPE = 7, 2
# For fp32 products with so short a K and so small a result, the library is asked for several algorithms. Its first one
# splits K, in two kernels. One alone took the GPU 0.35 to 0.87 of that time, the host 0.8; with a longer K up to 2.3.
_SHORT_K, _SMALL_RESULT, _PROPOSALS = 512, 8192, 8
# What torch's switches ask for: another compute type, or other reductions.
USUAL, TF32, REDUCED_IN_FP32 = 0, 1, 2
_ALIGNED = 256  # bytes: no algorithm asks for more
UNALIGNED = _ALIGNED - 1  # bits that an address has if it is not
# The library has no way for a product; the first one may, or else says what is wrong.
NO_WAY = ("INVALID_VALUE", "NOT_SUPPORTED")


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Opaque:
    """Something that the library keeps for us, until nobody here holds it any more, or until exit."""

    def __init__(self, library: LtLibrary, kind: str, *arguments: Any) -> None:
        value = ctypes.c_void_p()
        suffix = f"_{kind}" if kind else ""
        library.call(f"create{suffix}", ctypes.byref(value), *arguments)
        self.parameter = ctypes.c_void_p.from_param(value.value)
        self._library, self._setter = library, f"set{suffix}"
        self._end = weakref.finalize(self, library.end, f"destroy{suffix}", value.value)

    def set(self, attribute: int, value: Any) -> None:
        """`value` is a C value of just the size that the attribute has."""
        self._library.call(self._setter, self.parameter, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def destroy(self) -> None:
        self._end()


class Layout(NamedTuple):
    """A matrix, or a batch of them, column by column."""

    type: int
    rows: int
    columns: int
    leading: int
    step: int


class Described(NamedTuple):
    """All that a choice depends on, besides torch's switches and where matrices begin."""

    transa: bool
    transb: bool
    a: Layout
    b: Layout
    c: Layout
    d: Layout
    batch: int


class Chosen(NamedTuple):
    """An algorithm, and what it runs with, as C values."""

    handle: Any
    operation: Any
    algorithm: Any  # None: the library's own choice, in each call
    workspace_bytes: int


# A switch's setting alone, for matrices that begin at multiples of 256 bytes; else with an alignment for each.
Key = int | tuple[int, int, int, int, int]


def key_of(setting: int, a: int, b: int, c: int, d: int) -> Key:
    """For the addresses of four matrices. An algorithm is only used again where every one is aligned as it was."""
    if not (a | b | c | d) & UNALIGNED:
        return setting
    return setting, _alignment(a), _alignment(b), _alignment(c), _alignment(d)


def _alignment(address: int) -> int:
    """The largest power of two up to 256 that divides it."""
    capped = address | _ALIGNED
    return capped & -capped


def _in_one_kernel(proposals: list[_Result]) -> _Result:
    """The library's first proposal, or one that keeps as much of the chip busy without the workspace in which a second
    kernel adds up the parts of a split K."""
    first = proposals[0]
    return next((one for one in proposals if not one.workspace_bytes and one.waves >= first.waves), first)


class Choices(dict[Key, "Chosen | None"]):
    """The algorithms of one product. Looking one up that is not there yet chooses it; None: the library has none.

    Without a handle, None is the answer for now. Two threads that choose at once choose the same. Layouts and
    operations are only read once they are here, by any number of threads.
    """

    def __init__(
        self, library: LtLibrary, product: Described, most_workspace: int, handle: Callable[[], Opaque | None]
    ) -> None:
        super().__init__()
        self._library, self._product, self._most_workspace, self._handle = library, product, most_workspace, handle
        self._operations: dict[int, Opaque] = {}
        self._layouts = [self._layout(one) for one in (product.a, product.b, product.c, product.d)]
        self.a, self.b, self.c, self.d = (one.parameter for one in self._layouts)

    def __missing__(self, key: Key) -> Chosen | None:
        handle = self._handle()
        if handle is None:
            return None
        setting, *alignments = (key, *[_ALIGNED] * 4) if isinstance(key, int) else key
        vendor = self._library.vendor
        compute = vendor.compute_tf32 if setting == TF32 else vendor.compute
        operation = self._operations.get(compute) or self._operations.setdefault(compute, self._operation(compute))
        if self._library.chooses:
            self[key] = self._asked(handle, operation, setting, alignments)
        else:
            self[key] = Chosen(handle.parameter, operation.parameter, None, self._most_workspace)
        return self[key]

    def _asked(self, handle: Opaque, operation: Opaque, setting: int, alignments: list[int]) -> Chosen | None:
        preference = Opaque(self._library, "preference")
        preference.set(_MOST_WORKSPACE, ctypes.c_uint64(self._most_workspace))
        preference.set(_REDUCTIONS, ctypes.c_uint32(_IN_COMPUTE_TYPE if setting == REDUCED_IN_FP32 else _ANY_REDUCTION))
        for attribute, bytes_ in zip(_ALIGNMENTS, alignments, strict=True):
            preference.set(attribute, ctypes.c_uint32(bytes_))
        asked = _PROPOSALS if setting == USUAL and self._small else 1
        results, count = (_Result * asked)(), ctypes.c_int()
        status = self._library.function("choose")(
            handle.parameter, operation.parameter, self.a, self.b, self.c, self.d, preference.parameter,
            asked, results, ctypes.byref(count),
        )  # fmt: skip
        preference.destroy()
        if status and not self._library.means(status, *NO_WAY):
            raise self._library.failure("choose", status)
        usable = [] if status else [one for one in results[: count.value] if not one.state]
        if not usable:
            return None
        result = _in_one_kernel(usable)
        algorithm = ctypes.byref(result.algorithm)
        return Chosen(handle.parameter, operation.parameter, algorithm, result.workspace_bytes)

    @property
    def _small(self) -> bool:
        product = self._product
        k = product.a.rows if product.transa else product.a.columns
        fp32 = product.a.type == self._library.vendor.codes["fp32"]
        return fp32 and k <= _SHORT_K and product.d.rows * product.d.columns * product.batch <= _SMALL_RESULT

    def _operation(self, compute: int) -> Opaque:
        numbers = self._library.vendor.codes["fp32"]  # the type of alpha and beta
        made = Opaque(self._library, "operation", compute, numbers)
        made.set(_TRANSA, ctypes.c_int32(self._product.transa))
        made.set(_TRANSB, ctypes.c_int32(self._product.transb))
        return made

    def _layout(self, of: Layout) -> Opaque:
        made = Opaque(self._library, "layout", of.type, of.rows, of.columns, of.leading)
        if self._product.batch > 1:
            made.set(_BATCH_COUNT, ctypes.c_int32(self._product.batch))
            made.set(_BATCH_STEP, ctypes.c_int64(of.step))
        return made
