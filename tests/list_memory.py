"""What small kernels leave in memory for the one that multiplies a list (list_memory.cuh), read on the host."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

TYPES = {0: torch.bfloat16, 1: torch.float16, 2: torch.float32}
BYTES = 464  # for a product


class Map(NamedTuple):
    """As the emulator has them."""

    address: int
    pitch: int  # bytes
    columns: int
    rows: int

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """All that the copy engine would see."""
        return memory_at(self.address, self.rows, self.columns, self.pitch // dtype.itemsize, 1, dtype)


class Product(NamedTuple):
    maps: tuple[Map, Map, Map]  # of A, B and D
    tile_end: int
    m: int
    n: int
    k_blocks: int
    c: int
    out: int
    c_row: int
    c_col: int
    out_row: int
    alpha: float
    beta: float
    c_type: int
    straight: int
    first_block: int

    def added(self) -> Tensor | float:
        """beta C in float64."""
        if not self.beta:
            return 0.0
        return self.beta * memory_at(self.c, self.m, self.n, self.c_row, self.c_col, TYPES[self.c_type]).double()

    def check_store(self, dtype: torch.dtype) -> None:
        """The copy engine writes results with rows of whole 16 bytes, and no others: it would write behind them."""
        pitch, width = (dtype.itemsize * one for one in (self.out_row, self.n))
        assert self.straight == (not any(one % 16 for one in (self.out, pitch, width)))
        if self.straight:
            assert self.maps[2] == (self.out, pitch, self.n, self.m)


def memory_at(address: int, rows: int, cols: int, row: int, col: int, dtype: torch.dtype) -> Tensor:
    """What a kernel would see there: strides in elements."""
    count = (rows - 1) * row + (cols - 1) * col + 1
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided((rows, cols), (row, col))


def read(memory: int, count: int) -> list[Product]:
    """A list of so many products. No tile of it was taken yet."""
    assert struct.unpack("i", ctypes.string_at(memory + BYTES * count, 4)) == (0,), "none taken yet"
    found = []
    for which in range(count):
        maps = [Map(*struct.unpack("QQII", ctypes.string_at(memory + 384 * which + 128 * i, 24))) for i in range(3)]
        line = struct.unpack("4i", ctypes.string_at(memory + 384 * count + 16 * which, 16))
        ending = struct.unpack("PP3q2f3i4x", ctypes.string_at(memory + 400 * count + 64 * which, 64))
        found.append(Product((maps[0], maps[1], maps[2]), *line, *ending))
    return found
