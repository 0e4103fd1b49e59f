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
extern "C" int fill(const int* given, int count, int limit, int rows_each, int cols, bool slabs, int short_rows,
                    int lanes, Group* to, GroupNumber* list) {
    const Groups groups{given, 1, count, limit, rows_each, cols, slabs, short_rows};
    int row = 0, tile = 0;
    for (int lane = 0; lane < lanes; ++lane) {  // as the lanes of a warp do, with the two running values by shuffles
        const int own = groups.tiles(lane, lanes, row, 0, nullptr);
        const int end = groups.tiles(lane, lanes, row, tile, to);
        if (end != tile + own) return -1;
        const int last = groups.last_end(lane, lanes);
        row = last > row ? last : row;
        tile = end;
    }
    ShortPacks all = 0, before = 0;
    for (int lane = 0; lane < lanes; ++lane) all += groups.short_packs(lane, lanes, to);
    for (int lane = 0; lane < lanes; ++lane) {
        groups.list_short(lane, lanes, to, before, all, list);
        before += groups.short_packs(lane, lanes, to);
    }
    return groups.total(to, list);
}
extern "C" int next(int index, int blocks) { return there_and_back(index, blocks); }
extern "C" void fill_in_place(Group* table, int count, int limit, int rows_each, int cols, bool slabs, int short_rows) {
    Groups{&table->row_end, 2, count, limit, rows_each, cols, slabs, short_rows}.tiles(0, 1, 0, 0, table);
}
extern "C" bool stands(const Group* table, const int* now, int count, int limit, bool slabs, int lanes) {
    const Groups groups{nullptr, 1, count, limit, 8, 1, slabs, 0};
    bool all = true;
    for (int lane = 0; lane < lanes; ++lane) all &= groups.stands(table, now, lane, lanes);
    return all;
}
extern "C" void tile(const Group* table, const GroupNumber* list, int count, int rows_each, int cols, bool slabs,
                     int short_rows, int index, int band, bool turn, int* out) {
    const Groups groups{nullptr, 1, count, 0, rows_each, cols, slabs, short_rows};
    const GroupTile one = groups.tile(table, list, index, band, turn);
    out[0] = one.tile.row, out[1] = one.tile.col, out[2] = one.group, out[3] = one.first, out[4] = one.rows;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = host_compiler.library(
        tmp_path_factory.mktemp("groups"), SHIM, "-O1", "-fsanitize=undefined", "-fno-sanitize-recover"
    )
    built.stands.restype = ctypes.c_bool
    return built


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
    short_rows: int = 0,
) -> list[list[Found]]:
    """The tiles of each block of a persistent grid, in their order."""
    count = len(given)
    numbers, table, out = (ctypes.c_int * count)(*given), (ctypes.c_int * (2 * count))(), (ctypes.c_int * 5)()
    listed = (ctypes.c_ushort * (count + 1))()
    how = count, limit, rows_each, cols, slabs, short_rows
    total = library.fill(numbers, *how, 32, table, listed)
    assert total == table[2 * count - 1] + listed[0] * cols
    for lanes in (1, 5, 64):  # by whomever it is made
        again, same = (ctypes.c_int * (2 * count))(), (ctypes.c_ushort * (count + 1))()
        assert library.fill(numbers, *how, lanes, again, same) == total
        assert (list(again), list(same)) == (list(table), list(listed))
    for group in range(count):
        again[2 * group] = given[group]
    library.fill_in_place(again, *how)
    assert list(again) == list(table)
    seen: list[list[Found]] = [[] for _ in range(grid)]
    for block in range(grid):
        index = block
        while index < total:
            library.tile(table, listed, count, rows_each, cols, slabs, short_rows, index, band, turned, out)
            seen[block].append((out[0], out[1], out[2], out[3], out[4]))
            index = library.next(index, grid) if short_rows else index + grid
    return seen


def together(blocks: list[list[Found]]) -> list[Found]:
    return sorted(itertools.chain(*blocks))


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
    # With swapped operands all tiles take as long; else each 64 rows take their time.
    for short_rows in {0} if turned or rows_each % 64 else {0, max(0, rows_each - 64), max(0, rows_each // 2 - 64)}:
        seen = walk(library, given, limit, rows_each, cols, slabs, band, turned, grid, short_rows)
        assert together(seen) == sorted(wanted(sizes, rows_each, cols, slabs, turned))


def test_a_group_after_the_other(library: ctypes.CDLL) -> None:
    """Blocks that run together share a group's weight in L2."""
    (seen,) = walk(library, [300, 300, 700], 700, 128, 20, True, grid=1)
    assert [one[2] for one in seen] == sorted(one[2] for one in seen)


def grains(tile: Found, rows_each: int) -> int:
    """How much there is to multiply in a tile: 64 rows at a time."""
    row, _, _, _, rows = tile
    return -(-min(rows_each, rows - row * rows_each) // 64)


def test_short_tiles_come_last(library: ctypes.CDLL) -> None:
    sizes = [256, 800, 40, 0, 1000, 130, 512, 1217, 64, 868]
    (seen,) = walk(library, sizes, max(sizes), 256, 3, True, grid=1, short_rows=192)
    lengths = [grains(one, 256) for one in seen]
    assert lengths == sorted(lengths, reverse=True)
    assert set(lengths) == {1, 2, 3, 4}


def test_short_tiles_stay_where_weights_would_be_read_twice(library: ctypes.CDLL) -> None:
    (seen,) = walk(library, [140, 192, 300], 300, 128, 5, True, grid=1, short_rows=64)
    assert [one[2] for one in seen] == sorted(one[2] for one in seen)


def test_blocks_have_equally_much_to_do(library: ctypes.CDLL) -> None:
    """Six groups of about 1000 rows: in rounds of whole tiles the last block would be done after 40 grains."""
    sizes = [768, 870, 973, 1075, 1178, 1280]
    blocks = walk(library, sizes, max(sizes), 256, 24, True, grid=66, short_rows=192)
    work = [sum(grains(one, 256) for one in block) for block in blocks]
    mean = sum(work) / len(work)
    assert max(work) <= 1.06 * mean
    inorder = walk(library, sizes, max(sizes), 256, 24, True, grid=66)
    assert max(sum(grains(one, 256) for one in block) for block in inorder) > max(work)


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
    assert together(walk(library, given, limit, 8, 3, False)) == sorted(wanted(sizes, 8, 3, False, False))


@pytest.mark.parametrize("given", BAD)
def test_bad_counts_stay_inside(library: ctypes.CDLL, given: list[int]) -> None:
    sizes = [max(0, min(count, 40)) for count in given]
    assert together(walk(library, given, 40, 8, 3, True)) == sorted(wanted(sizes, 8, 3, True, False))


@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_a_table_stands_for_the_numbers_that_make_the_same(library: ctypes.CDLL, seed: int, slabs: bool) -> None:
    """Of numbers that were changed in some places, often to what means the same."""
    source, limit = random.Random(seed), 40
    count = source.choice([1, 2, 7, 31, 32, 33, 300])

    def table(numbers: Sequence[int]) -> list[int]:
        made, listed = (ctypes.c_int * (2 * count))(), (ctypes.c_ushort * (count + 1))()
        library.fill((ctypes.c_int * count)(*numbers), count, limit, 8, 1, slabs, 0, 32, made, listed)
        return list(made)

    before = [source.randint(-5, 50) for _ in range(count)]
    if seed % 3:
        before.sort()
    old, answers = table(before), set()
    for _ in range(30):
        now = list(before)
        for _ in range(source.choice([0, 1, 3])):
            at = source.randrange(count)
            now[at] = source.choice([now[at] - 1, now[max(0, at - 1)], limit, limit + 9, -(2**31), 0])
        same = table(now) == old
        for lanes in (1, 5, 32):
            given = (ctypes.c_int * (2 * count))(*old), (ctypes.c_int * count)(*now)
            assert library.stands(*given, count, limit, slabs, lanes) == same
        answers.add(same)
    assert answers == {True, False} or not seed % 3
