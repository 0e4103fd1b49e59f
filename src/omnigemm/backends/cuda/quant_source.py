"""The quantisers' host side that needs no GPU: what a kernel computes, how it is launched, and its source."""

from __future__ import annotations

import dataclasses

from ...core.dtypes import BY_NAME
from .jit import KernelSpec

# Contraction of a product and a sum would change bits; where the kernels want an fma, they say so.
OPTIONS = ("--std=c++17", "--fmad=false")
OLDEST = (7, 5)  # compute capability that NVRTC 13 still compiles for
TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}  # as vector.cuh numbers them
CODECS = {"int8": 0, "int8_zero": 1, "e4m3": 2, "e5m2": 3}  # as codec.cuh does; int8_zero has zero points
SOURCES = ("plain", "rms_norm", "swiglu")  # what is quantised: headers of these names

_THREADS = 512  # of a block, at most: MOST_THREADS of rows.cuh
_HELD = 16384  # values of a row that wait in a block's registers
_WARP_VECTORS = 4  # of a thread, up to which a warp alone has a row
_WARPS = 4  # with a row each in a block
# Blocks of _THREADS that a multiprocessor must have registers for: in the simple case, and in all others.
_RESIDENT = {"plain": (3, 2), "rms_norm": (2, 1), "swiglu": (2, 1)}
_MANY_ROWS = 1024  # from here on threads have more than one vector, for fewer and busier ones
_FEW_TILES = 256  # up to here a thread has 32 values, else 64
_TENSOR_THREADS = 256
_TENSOR_BLOCKS = 5  # on a multiprocessor, and all of them at once: none begins when the others are done


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a kernel computes. `aligned`: rows begin at multiples of 16 bytes and hold whole vectors of 16 bytes.
    `residual`: rms_norm adds to one."""

    source: str
    in_dtype: str
    codec: str
    granularity: str
    aligned: bool
    residual: bool = False

    @property
    def values(self) -> int:
        """In a vector of 16 bytes."""
        return 16 // BY_NAME[self.in_dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a kernel is launched, and the constants that go with it."""

    grid: int
    threads: int
    constants: tuple[tuple[str, int], ...] = ()


def rows(variant: Variant, m: int, k: int) -> Shape:
    """For scales per token and 1x128. A block has one row, or for short rows each of its warps."""
    vectors = -(-k // variant.values)
    simple = variant.aligned and variant.values == 8 and variant.codec != "int8_zero"
    resident = "RESIDENT", _RESIDENT[variant.source][not simple]
    most = _HELD // (_THREADS * variant.values)
    sizes = [size for size in (1, 2, 4, 8) if size <= most]
    if vectors <= 32 * _WARP_VECTORS:
        each = next(size for size in sizes if vectors <= 32 * size)
        return Shape(-(-m // _WARPS), 32 * _WARPS, (("EACH", each), ("WARP_ROWS", 1), resident))
    each = next((size for size in sizes if vectors <= _THREADS * size), 0)
    if each and m >= _MANY_ROWS:
        each = max(each, 4)
    threads = -(-vectors // (32 * each)) * 32 if each else _THREADS
    return Shape(m, threads, (("EACH", each), ("WARP_ROWS", 0), resident))


def tiles(m: int, k: int, batch: int) -> Shape:
    """A block has a tile. Where there are few, more threads with less to do each are faster."""
    grid = batch * -(-m // 128) * -(-k // 128)
    threads = 512 if grid <= _FEW_TILES else 256
    return Shape(grid, threads, (("THREADS", threads),))


def tensor(variant: Variant, m: int, k: int, multiprocessors: int) -> Shape:
    """For both kernels of a scale per tensor. Few values are spread over as many blocks as there are."""
    vectors = m * -(-k // variant.values)
    each = 1 if vectors < 4 * _TENSOR_THREADS * multiprocessors else 4
    units = m * -(-k // (variant.values * _TENSOR_THREADS * each))
    grid = min(units, _TENSOR_BLOCKS * multiprocessors)
    return Shape(grid, _TENSOR_THREADS, (("EACH", each), ("RESIDENT", _TENSOR_BLOCKS)))


def spec(variant: Variant, shape: Shape, arch: str, measure: bool = False) -> KernelSpec:
    """The kernel for an architecture; of the two for a whole tensor, the one that measures or the one that converts."""
    codec = variant.codec
    if measure:  # codes without zero points need the same of their values
        codec = codec if codec == "int8_zero" else "int8"
    words = [
        "omnigemm_quant",
        *(() if variant.source == "plain" else (variant.source,)),
        *(("residual",) if variant.residual else ()),
        variant.in_dtype,
        "measure" if measure else codec,
        variant.granularity,
    ]
    name = "_".join(words)
    constants: dict[str, object] = {
        "KERNEL": name,
        "IN_TYPE": TYPES[variant.in_dtype],
        "CODE_TYPE": CODECS[codec],
        "ALIGNED": int(variant.aligned),
        **dict(shape.constants),
    }
    header = {"tensor": "tensor", "128x128": "tiles"}.get(variant.granularity, "rows")
    if header == "tensor":
        constants["MEASURE"] = int(measure)
    if header == "rows":
        constants |= {"SOURCE": f'"quant/{variant.source}.cuh"', "BLOCKS": int(variant.granularity == "1x128")}
    if variant.source == "rms_norm":
        constants["RESIDUAL"] = int(variant.residual)
    lines = [f"#define {key} {value}" for key, value in constants.items()]
    return KernelSpec(name, "\n".join([*lines, f'#include "quant/{header}.cuh"', ""]), arch, OPTIONS)
