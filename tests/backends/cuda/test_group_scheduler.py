"""The scheduler of groups, compiled by the system's C++ compiler: every tile exactly once, whatever sizes and grid."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Sequence

import pytest

import host_compiler

SHIM = """
#include "common/groups.cuh"
extern "C" int fill(const int* given, int count, int limit, int rows_each, int cols, bool slabs, int lanes, Group* to) {
    const Groups groups{given, 1, count, limit, rows_each, cols, slabs};
    int row = 0, tile = 0;
    for (int lane = 0; lane < lanes; ++lane) {  // as the lanes of a warp do, with the two running values by shuffles
        const int own = groups.tiles(lane, lanes, row, 0, nullptr);
        const int end = groups.tiles(lane, lanes, row, tile, to);
        if (end != tile + own) return -1;
        const int last = groups.last_end(lane, lanes);
        row = last > row ? last : row;
        tile = end;
    }
    return tile;
}
extern "C" void fill_in_place(Group* table, int count, int limit, int rows_each, int cols, bool slabs) {
    Groups{&table->row_end, 2, count, limit, rows_each, cols, slabs}.tiles(0, 1, 0, 0, table);
}
extern "C" void tile(const Group* table, int count, int rows_each, int cols, bool slabs, int index, int band, bool turn,
                     int* out) {
    const Groups groups{nullptr, 1, count, 0, rows_each, cols, slabs};
    const GroupTile one = groups.tile(table, index, band, turn);
    out[0] = one.tile.row, out[1] = one.tile.col, out[2] = one.group, out[3] = one.first, out[4] = one.rows;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_compiler.library(
        tmp_path_factory.mktemp("groups"), SHIM, "-O1", "-fsanitize=undefined", "-fno-sanitize-recover"
    )


Found = tuple[int, int, int, int, int]  # tile row and column, group, first row, rows


def walk(
    library: ctypes.CDLL,
    given: Sequence[int],
    limit: int,
    rows_each: int,
    cols: int,
    slabs: bool,
    band: int = 8,
    turned: bool = False,
    grid: int = 132,
) -> list[Found]:
    """All tiles in the order of a persistent grid: each block takes every grid-th one."""
    count = len(given)
    numbers, table, out = (ctypes.c_int * count)(*given), (ctypes.c_int * (2 * count))(), (ctypes.c_int * 5)()
    total = library.fill(numbers, count, limit, rows_each, cols, slabs, 32, table)
    assert total == (table[2 * count - 1] if count else 0)
    for lanes in (1, 5, 64):  # by whomever it is made
        again = (ctypes.c_int * (2 * count))()
        assert library.fill(numbers, count, limit, rows_each, cols, slabs, lanes, again) == total
        assert list(again) == list(table)
    for group in range(count):
        again[2 * group] = given[group]
    library.fill_in_place(again, count, limit, rows_each, cols, slabs)
    assert list(again) == list(table)
    seen = []
    for block in range(grid):
        for index in range(block, total, grid):
            library.tile(table, count, rows_each, cols, slabs, index, band, turned, out)
            seen.append((out[0], out[1], out[2], out[3], out[4]))
    return seen


def wanted(sizes: Sequence[int], rows_each: int, cols: int, slabs: bool, turned: bool) -> list[Found]:
    firsts = [0] * len(sizes) if slabs else [0, *itertools.accumulate(sizes)][:-1]
    return [
        (col, row, group, first, size) if turned else (row, col, group, first, size)
        for group, (first, size) in enumerate(zip(firsts, sizes, strict=True))
        for row in range(-(-size // rows_each))
        for col in range(cols)
    ]


def problems() -> list[tuple[list[int], int, int, int, int]]:
    edges = [
        ([0], 128, 4, 8, 132),
        ([1], 128, 1, 1, 132),
        ([0, 1, 3, 20000, 0], 128, 7, 8, 132),
        ([128, 129, 127, 0, 256], 128, 3, 16, 7),
        ([1] * 256, 8, 5, 8, 264),
        ([0] * 255 + [1], 16, 9, 8, 132),
        ([5] + [0] * 300, 16, 9, 8, 1),
    ]
    source = random.Random(0)

    def some() -> list[int]:
        most = source.choice([1, 20, 300])
        return [source.choice([0, 1, source.randint(0, most)]) for _ in range(source.randint(1, 100))]

    tiles, grids = [8, 24, 64, 128, 256], [1, 66, 264]
    return edges + [
        (some(), source.choice(tiles), source.randint(1, 9), source.choice([1, 8]), source.choice(grids))
        for _ in range(40)
    ]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.parametrize(("sizes", "rows_each", "cols", "band", "grid"), problems())
def test_every_tile_exactly_once(
    library: ctypes.CDLL,
    sizes: list[int],
    rows_each: int,
    cols: int,
    band: int,
    grid: int,
    slabs: bool,
    turned: bool,
) -> None:
    given = sizes if slabs else list(itertools.accumulate(sizes))
    limit = max(sizes) if slabs else sum(sizes)
    seen = walk(library, given, limit, rows_each, cols, slabs, band, turned, grid)
    assert sorted(seen) == sorted(wanted(sizes, rows_each, cols, slabs, turned))


def test_a_group_after_the_other(library: ctypes.CDLL) -> None:
    """Blocks that run together share a group's weight in L2."""
    seen = walk(library, [300, 300, 700], 700, 128, 20, True, grid=1)
    assert [one[2] for one in seen] == sorted(one[2] for one in seen)


BAD = [
    [5, -3, 2**31 - 1, 10],
    [-(2**31), -1, -1, 7],
    [100, 50, 60, 20],
    [2**31 - 1] * 4,
    [0, 0, 0, -5],
    [3, 9, 4, 12],
]


@pytest.mark.parametrize("given", BAD)
def test_bad_ends_stay_inside(library: ctypes.CDLL, given: list[int]) -> None:
    """Each is moved to the nearest that is neither outside nor before the group's predecessor."""
    limit, last, sizes = 40, 0, []
    for end in given:
        stop = max(last, min(end, limit))
        sizes.append(stop - last)
        last = stop
    assert sorted(walk(library, given, limit, 8, 3, False)) == sorted(wanted(sizes, 8, 3, False, False))


@pytest.mark.parametrize("given", BAD)
def test_bad_counts_stay_inside(library: ctypes.CDLL, given: list[int]) -> None:
    sizes = [max(0, min(count, 40)) for count in given]
    assert sorted(walk(library, given, 40, 8, 3, True)) == sorted(wanted(sizes, 8, 3, True, False))
