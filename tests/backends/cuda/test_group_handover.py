"""How the tiles of groups reach those who work on them (work_groups.cuh), run by the emulator: a thread that loads
looks them up and hands them over. Each warp that multiplies sees every tile of its block, and all of them end."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import pytest

import host_compiler

SHIM = """
#include "common/pipeline.cuh"
#include "common/both.cuh"
#define ELEMENT_BYTES 2
enum : int {{ NO_SCALE, PER_ROW, PER_BLOCK }};
constexpr bool SWAP = false, INT8 = false, ONE_READ = true, PINGPONG = {pingpong}, SLABS = {slabs};
constexpr int SPLIT = 1, SHARE = 1, LEFT_SHARE = 1, RIGHT_SHARE = 1, CLUSTER = 1, DEPTH = 1, WAVES = 1, BAND = 8;
constexpr int MATH_GROUPS = 2, SCALE_WARPS = 0, TILE_ROWS = 128, TILE_COLS = 64, GROUP_ROWS = 64, WAVE_ROWS = 128;
constexpr int SHAPE_N = 150, K_BLOCKS = 3, OUT_BYTES = 2, LEFT_SCALE = NO_SCALE, RIGHT_SCALE = NO_SCALE;
constexpr int THREADS = 32 * (4 * MATH_GROUPS + 1);
struct Arguments {{
    const int* groups;
    int group_count, shape_m, a_slab, b_slab, out_slab, b_scale_step;
    void* out;
    long long out_stride;
    float alpha, beta;
    const void* c;
    long long c_row, c_col;
    int c_type;
}};
#include "sm90/work_groups.cuh"
#include "tile_walk.cuh"

static Arguments given;
constexpr int SHARED = sizeof(Work::Handover) + sizeof(u64) + 10 * 600 + 2;
static int *found, seen, most;

static void kernel() {{
    Work work(given);
    work.prepare(emulator::shared_memory(), threadIdx.x / 32);
    __syncthreads();
    work.confirm(threadIdx.x / 32);
    if (threadIdx.x == 128 * MATH_GROUPS) load_tiles(work);
    if (threadIdx.x < 128 * MATH_GROUPS)
        take_tiles(work, [](const Place& tile) {{
            if (seen >= most) return;
            int* line = found + 6 * seen++;
            line[0] = threadIdx.x / 32, line[1] = tile.group, line[2] = tile.row, line[3] = tile.col;
            line[4] = tile.first, line[5] = tile.count;
        }});
}}
extern "C" const char* walk(const int* groups, int count, int limit, int grid, int* lines, int room, int* tiles) {{
    given = {{groups, count, limit}};
    found = lines, seen = 0, most = room;
    const char* fault = emulator::launch(kernel, {{grid, THREADS, 1, SHARED, 3, u64(count)}});
    *tiles = seen;
    return fault;
}}
"""
WARPS, ROWS, ACROSS = 8, 128, 3  # of tiles, as the constants above make them
LIMIT = 2000


@pytest.fixture(scope="module", params=[False, True], ids=["contiguous", "masked"])
def masked(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["handed over", "looked up by each"])
def pingpong(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, masked: bool, pingpong: bool) -> ctypes.CDLL:
    source = SHIM.format(slabs=str(masked).lower(), pingpong=str(pingpong).lower())
    folder = tmp_path_factory.mktemp("handover")
    built = host_compiler.library(folder, source, "-O1", "-Wno-psabi", only_gcc=True, emulated=True)
    built.walk.restype = ctypes.c_char_p
    return built


def walk(library: ctypes.CDLL, given: Sequence[int], grid: int, tiles: int) -> list[list[tuple[int, ...]]]:
    """What each of the warps that multiply got, in all blocks: group, tile, the group's first row and its rows."""
    numbers, room = (ctypes.c_int * len(given))(*given), WARPS * tiles + 8  # more than there should be
    lines = (ctypes.c_int * (6 * room))()
    seen = ctypes.c_int()
    fault = library.walk(numbers, len(given), LIMIT, grid, lines, room, ctypes.byref(seen))
    assert not fault, fault.decode()
    every = [tuple(lines[6 * i : 6 * i + 6]) for i in range(seen.value)]
    return [sorted(one[1:] for one in every if one[0] == warp) for warp in range(WARPS)]


def problems() -> dict[str, tuple[list[int], int]]:
    """Rows of each group, and blocks."""
    source = random.Random(1)
    more = {
        f"random {i}": (
            [source.choice([0, 1, 64, 65, source.randint(0, 700)]) for _ in range(source.randint(1, 70))],
            source.choice([1, 2, 5, 40]),
        )
        for i in range(8)
    }
    cases = {
        "one row": ([1], 1),
        "fewer tiles than blocks": ([100], 7),
        "no rows": ([0, 0, 0], 4),
        "one group of many": ([0] * 40 + [300] + [0] * 30, 3),
        "many short ones": ([1, 70, 130, 200, 1000], 6),
    }
    return cases | more


@pytest.mark.parametrize("name", problems())
def test_every_warp_gets_every_tile_once_and_ends(library: ctypes.CDLL, masked: bool, name: str) -> None:
    counts, grid = problems()[name]
    if not masked:  # as far as there are rows
        counts = [min(sum(counts[: i + 1]), LIMIT) - min(sum(counts[:i]), LIMIT) for i in range(len(counts))]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    wanted = [
        (group, row, col, 0 if masked else end - rows, rows)
        for group, (rows, end) in enumerate(zip(counts, ends, strict=True))
        for row in range(-(-rows // ROWS))
        for col in range(ACROSS)
    ]
    assert walk(library, counts if masked else ends, grid, len(wanted)) == [wanted] * WARPS
