"""The small kernel that prepares a list of products (list_setup.cuh): what it is told, as kernel parameters."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from . import driver, sm90
from .jit import KernelSpec
from .launch import Launcher

# Products that one launch takes: within 4 KB of parameters, or (CUDA 12.1) within 32 KB.
LINES, SMALL_LINES = (36, 108, 324), 36
WARPS = 4  # of a block; each has a product
SIZES = struct.Struct("4i2I2i3q")  # struct Sizes
_ARGUMENTS = "8i3Q2q2i"  # struct Arguments between the memory and the sizes

Numbers = Sequence[float] | Tensor  # a tensor is read by the device

# What differs between calls with tensors that lie alike. Of all products: the addresses of D, then those of A, of B and
# of C, the alphas and the betas; then where alpha, beta and sizes are on the device (0: they are not), and the steps of
# sizes, of alpha and of beta.
Values = tuple[Any, ...]
_COLUMNS = (1, 2, 3, 0, 4, 5)  # in the order in which struct Arguments has them
_ON_DEVICE = 7


def spec(lines: int) -> KernelSpec:
    name = f"omnigemm_sm90_list_setup_{lines}"
    source = f'#define KERNEL {name}\n#define LINES {lines}\n#include "sm90/list_setup.cuh"\n'
    return KernelSpec(name, source, sm90.ARCH, sm90.OPTIONS)


def launches(products: int, most: int = LINES[-1]) -> list[tuple[int, int]]:
    """How often it is launched: (products, lines) of each time."""
    found = []
    while products > 0:
        here = min(products, most)
        found.append((here, next(lines for lines in LINES if lines >= here)))
        products -= here
    return found


def arguments(here: int, room: int) -> struct.Struct:
    """struct Arguments without the memory; `here` of its lines are used."""
    rest = room - here

    def some(code: str, size: int) -> str:
        return f"{here}{code}{rest * size}x"

    columns = 4 * some("Q", 8) + 2 * some("f", 4)
    return struct.Struct(f"{_ARGUMENTS}{here * SIZES.size}s{rest * SIZES.size}x{columns}")


def most_lines() -> int:
    return LINES[-1] if driver.version() >= 12010 else SMALL_LINES


def factors(numbers: Numbers) -> tuple[Sequence[float], int, int]:
    """Numbers, or where they are on the device and how far apart."""
    if not isinstance(numbers, Tensor):
        return numbers, 0, 0
    return (), numbers.data_ptr(), numbers.stride(0) if numbers.numel() > 1 else 0


def sizes_at(sizes: Tensor) -> tuple[int, int, int]:
    """Where they are on the device, and how far apart those of two products, and two of one."""
    return sizes.data_ptr(), sizes.stride(0), sizes.stride(1)


@dataclasses.dataclass(frozen=True)
class Setup:
    """One launch of it, for some of the products that are multiplied together."""

    launcher: Launcher
    arguments: struct.Struct  # all but the memory
    counts: tuple[int, ...]
    sizes: bytes
    on_device: Callable[[Values], Values]
    columns: Callable[[Values], Values]

    @classmethod
    def of(
        cls,
        launcher: Launcher,
        arguments: struct.Struct,
        counts: tuple[int, ...],
        sizes: bytes,
        products: Sequence[int],
        total: int,
    ) -> Setup:
        """For those products of a list of `total`."""
        columns = itemgetter(*(column * total + i for column in _COLUMNS for i in products))
        last = itemgetter(*range(len(_COLUMNS) * total, len(_COLUMNS) * total + _ON_DEVICE))
        return cls(launcher, arguments, counts, sizes, last, columns)

    def pack(self, values: Values) -> bytes:
        return self.arguments.pack(*self.counts, *self.on_device(values), self.sizes, *self.columns(values))
