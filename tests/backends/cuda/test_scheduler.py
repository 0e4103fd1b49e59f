"""The tile scheduler, compiled by the system's C++ compiler: every tile exactly once, whatever the grid."""

from __future__ import annotations

import ctypes
import random

import pytest

import host_compiler

SHIM = """
#include "common/scheduler.cuh"
extern "C" void tile(int index, int tiles_m, int tiles_n, int band, int* m, int* n) {
    const Tile one = dense_tile(index, tiles_m, tiles_n, band, Divisor(band * tiles_m));
    *m = one.row;
    *n = one.col;
}
extern "C" void tile_of_batch(int index, int tiles_m, int tiles_n, int band, int* out) {
    const BatchTile one = batch_tile(index, tiles_m, tiles_n, band, Divisor(band * tiles_m),
                                     Divisor(tiles_m * tiles_n));
    out[0] = one.product, out[1] = one.tile.row, out[2] = one.tile.col;
}
extern "C" int even(int cols, int band) { return even_band(cols, band); }
extern "C" int quotient(int number, int by) { return Divisor(by).quotient(number); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_compiler.library(tmp_path_factory.mktemp("scheduler"), SHIM)


def walk(library: ctypes.CDLL, tiles_m: int, tiles_n: int, band: int, grid: int) -> list[tuple[int, int]]:
    """All tiles in the order of a persistent grid: each block takes every grid-th one."""
    m, n = ctypes.c_int(), ctypes.c_int()
    seen = []
    for block in range(grid):
        for index in range(block, tiles_m * tiles_n, grid):
            library.tile(index, tiles_m, tiles_n, band, ctypes.byref(m), ctypes.byref(n))
            seen.append((m.value, n.value))
    return seen


def test_a_divisor_divides_exactly(library: ctypes.CDLL) -> None:
    last, source = 2**31 - 1, random.Random(3)
    divisors = [1, 2, 3, 5, 7, 8, 641, 65535, 65536, 65537, 2**30 - 1, 2**30, last - 1, last]
    divisors += [source.randint(1, 2 ** source.randint(1, 31) - 1) for _ in range(300)]
    for by in divisors:
        whole = [by * source.randint(0, last // by) for _ in range(4)] + [last // by * by]
        numbers = [0, 1, by - 1, by, last, *whole, *(one - 1 for one in whole), *(one + 1 for one in whole)]
        for number in numbers:
            if 0 <= number <= last:
                assert library.quotient(number, by) == number // by, (number, by)


def problems() -> list[tuple[int, int, int, int]]:
    edges = [(1, 1, 1, 132), (1, 17, 16, 132), (33, 1, 8, 132), (5, 16, 16, 7), (3, 31, 8, 1), (64, 22, 16, 132)]
    source = random.Random(0)
    return edges + [
        (source.randint(1, 40), source.randint(1, 60), source.choice([1, 3, 8, 16]), source.randint(1, 140))
        for _ in range(60)
    ]


@pytest.mark.parametrize(("tiles_m", "tiles_n", "band", "grid"), problems())
def test_every_tile_exactly_once(library: ctypes.CDLL, tiles_m: int, tiles_n: int, band: int, grid: int) -> None:
    seen = walk(library, tiles_m, tiles_n, band, grid)
    assert sorted(seen) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]


@pytest.mark.parametrize("band", [1, 2, 8, 11, 16])
def test_even_bands_are_as_many_and_as_narrow_as_can_be(library: ctypes.CDLL, band: int) -> None:
    for cols in range(1, 100):
        width, bands = library.even(cols, band), -(-cols // band)
        assert bands * (width - 1) < cols <= bands * width
        assert width <= band


def test_neighbours_stay_in_a_band(library: ctypes.CDLL) -> None:
    """A wave of blocks touches few column tiles, and each of them for many rows."""
    wave = walk(library, 64, 40, 8, 1)[:128]
    assert {n for _, n in wave} == set(range(8))
    assert {m for m, _ in wave} == set(range(16))


def walk_batch(
    library: ctypes.CDLL, batch: int, tiles_m: int, tiles_n: int, band: int, grid: int
) -> list[tuple[int, int, int]]:
    out, seen = (ctypes.c_int * 3)(), []
    for block in range(grid):
        for index in range(block, batch * tiles_m * tiles_n, grid):
            library.tile_of_batch(index, tiles_m, tiles_n, band, out)
            seen.append((out[0], out[1], out[2]))
    return seen


@pytest.mark.parametrize("batch", [2, 3, 17, 129])
@pytest.mark.parametrize(("tiles_m", "tiles_n", "band", "grid"), problems()[:16])
def test_every_tile_of_every_product_exactly_once(
    library: ctypes.CDLL, batch: int, tiles_m: int, tiles_n: int, band: int, grid: int
) -> None:
    seen = walk_batch(library, batch, tiles_m, tiles_n, band, grid)
    assert sorted(seen) == [(i, m, n) for i in range(batch) for m in range(tiles_m) for n in range(tiles_n)]


def test_a_product_after_the_other(library: ctypes.CDLL) -> None:
    """Each in the order that it has by itself, so that blocks that run together share its operands in L2."""
    seen = walk_batch(library, 3, 5, 20, 8, 1)
    assert [one[0] for one in seen] == sorted(one[0] for one in seen)
    assert [one[1:] for one in seen[100:200]] == walk(library, 5, 20, 8, 1)


def test_the_last_tiles_of_the_largest_batch(library: ctypes.CDLL) -> None:
    """Numbers of tiles reach close to the end of 32 bits."""
    out, last = (ctypes.c_int * 3)(), 2**31 - 4097
    library.tile_of_batch(last, 7, 11, 8, out)
    index, inside = divmod(last, 77)
    assert (out[0], out[1], out[2]) == (index, *walk(library, 7, 11, 8, 1)[inside])
