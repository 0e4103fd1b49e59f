"""The scheduler of lists, compiled by the system's C++ compiler: every tile exactly once, whatever sizes and grid."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import pytest

import host_compiler

SHIM = """
#include "common/lists.cuh"
extern "C" int find(const int* ends, int count, int index, int from) {
    return Products{nullptr, ends, count, 1, 1}.find(index, from);
}
extern "C" void tile(const int* ends, int m, int n, int down, int across, int index, int which, int band, int* out) {
    const Tile one = Products{nullptr, ends, 0, down, across}.tile(index, which, Product{ends[which], m, n, 0}, band);
    out[0] = one.row, out[1] = one.col;
}
extern "C" int packs(int m, int n, int down, int across) { return packs_of(m, n, down, across); }
extern "C" int size_within(int given, int room) { return within(given, room); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_compiler.library(
        tmp_path_factory.mktemp("lists"), SHIM, "-O1", "-fsanitize=undefined", "-fno-sanitize-recover"
    )


Size = tuple[int, int]
Found = tuple[int, int, int]  # product, tile row and column


def walk(library: ctypes.CDLL, sizes: Sequence[Size], down: int, across: int, band: int, grid: int) -> list[Found]:
    """All tiles in the order of a persistent grid: each block takes every grid-th one, from the product before on."""
    total, ends = 0, (ctypes.c_int * len(sizes))()
    for i, (m, n) in enumerate(sizes):
        total += library.packs(m, n, down, across)
        ends[i] = total
    count, out, seen = len(sizes), (ctypes.c_int * 2)(), []
    for block in range(grid):
        which = 0
        for index in range(block, total, grid):
            which = library.find(ends, count, index, which)
            library.tile(ends, *sizes[which], down, across, index, which, band, out)
            seen.append((which, out[0], out[1]))
    return seen


def problems() -> list[tuple[list[Size], int, int, int, int]]:
    edges = [
        ([(1, 1)], 128, 256, 8, 132),
        ([(128, 256), (129, 257), (127, 255)], 128, 256, 16, 132),
        ([(8192, 8192)], 128, 128, 8, 132),
        ([(64, 64)] * 1024, 64, 64, 8, 264),
        ([(1, 5000), (5000, 1)] * 20, 256, 128, 8, 66),
        ([(300, 300)] * 7, 64, 64, 1, 1),
        # Sizes that only the device knows may be 0: of some products, of the first or last, of all.
        ([(0, 300), (300, 0), (130, 70), (0, 0), (0, 0), (1, 1), (5, 0)], 128, 128, 8, 3),
        ([(0, 5)] * 40 + [(64, 64)] + [(0, 0)] * 40, 64, 64, 8, 132),
        ([(0, 0), (7, 0)], 128, 128, 8, 132),
    ]
    source = random.Random(0)

    def some() -> list[Size]:
        least, most = source.choice([(1, 1), (0, 1), (0, 200), (1, 4000)])
        return [(source.randint(least, most), source.randint(least, most)) for _ in range(source.randint(1, 60))]

    tiles = [(64, 64), (128, 192), (128, 256), (256, 256), (512, 128)]
    return edges + [
        (some(), *source.choice(tiles), source.choice([1, 8, 16]), source.choice([1, 66, 132])) for _ in range(40)
    ]


@pytest.mark.parametrize(("sizes", "down", "across", "band", "grid"), problems())
def test_every_tile_exactly_once(
    library: ctypes.CDLL, sizes: list[Size], down: int, across: int, band: int, grid: int
) -> None:
    wanted = [
        (which, row, col)
        for which, (m, n) in enumerate(sizes)
        for row in range(-(-m // down))
        for col in range(-(-n // across))
    ]
    assert sorted(walk(library, sizes, down, across, band, grid)) == wanted


def test_a_product_after_the_other(library: ctypes.CDLL) -> None:
    """Blocks that run together share operands in L2, and the longest tiles, which the host puts first, begin first."""
    seen = walk(library, [(300, 700), (5, 9), (1000, 1000)], 128, 128, 8, 1)
    assert [one[0] for one in seen] == sorted(one[0] for one in seen)


def test_bands_are_about_equally_wide(library: ctypes.CDLL) -> None:
    """Of 9 columns of tiles not eight and one, whose tiles would share nothing but their B."""
    seen = walk(library, [(100 * 128, 9 * 128)], 128, 128, 8, 1)
    assert {col for _, _, col in seen[:500]} == {0, 1, 2, 3, 4}
    assert {col for _, _, col in seen[500:]} == {5, 6, 7, 8}


def test_sizes_are_taken_as_the_nearest_there_is_room_for(library: ctypes.CDLL) -> None:
    for room in (0, 1, 129, 2**31 - 4096):
        for given in (-(2**31), -1, 0, 1, 128, 129, 130, 2**31 - 4097, 2**31 - 4096, 2**31 - 1):
            assert library.size_within(given, room) == min(max(given, 0), room)
    assert library.packs(2**31 - 4096, 1, 512, 64) == 2**22 - 8  # counted in 32 bits, up to the end of a tile
