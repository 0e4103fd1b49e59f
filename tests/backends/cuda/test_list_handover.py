"""How blocks share out the tiles of a list (work_list.cuh, tile_queue.cuh), run by the emulator: a thread that loads
asks for tiles and hands them over to warps that multiply. Each sees every tile of its block, and all of them end."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Sequence

import pytest

import host_compiler
from list_memory import BYTES

SHIM = """
#include "common/pipeline.cuh"
#define ELEMENT_BYTES 2
constexpr bool SWAP = false, INT8 = false, PINGPONG = false;
constexpr int SPLIT = 1, SHARE = 1, LEFT_SHARE = 1, RIGHT_SHARE = 1, CLUSTER = 1, DEPTH = 1, WAVES = 1, BAND = 8;
constexpr int MATH_GROUPS = 1, SCALE_WARPS = 0, THREADS = 160, TILE_ROWS = 64, TILE_COLS = 64, GROUP_ROWS = 64;
struct Arguments {
    char* list;
    int list_count;
};
#include "sm90/work_list.cuh"
#include "tile_walk.cuh"

static Arguments given;
constexpr int SHARED = sizeof(Work::Handover) + sizeof(TileNumbers) + 4 * 600;
static int *found, seen, most;

static void kernel() {
    Work work(given);
    work.prepare(emulator::shared_memory(), 0);
    __syncthreads();
    if (threadIdx.x == 128) load_tiles(work);
    if (threadIdx.x < 128)
        take_tiles(work, [](const Place& tile) {
            if (seen >= most) return;
            int* line = found + 6 * seen++;
            line[0] = threadIdx.x / 32, line[1] = tile.which, line[2] = tile.row, line[3] = tile.col;
            line[4] = tile.m, line[5] = tile.n;
        });
}
extern "C" const char* walk(char* memory, int count, int grid, int* lines, int room, int* tiles) {
    given = {memory, count};
    found = lines, seen = 0, most = room;
    const char* fault = emulator::launch(kernel, {grid, THREADS, 1, SHARED, 3, u64(count)});
    *tiles = seen;
    return fault;
}
"""
WARPS = 4
Size = tuple[int, int]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = host_compiler.library(
        tmp_path_factory.mktemp("handover"), SHIM, "-O1", "-Wno-psabi", only_gcc=True, emulated=True
    )
    built.walk.restype = ctypes.c_char_p
    return built


def walk(library: ctypes.CDLL, sizes: Sequence[Size], grid: int) -> list[list[tuple[int, ...]]]:
    """What each of the warps that multiply got, in all blocks: product, tile, and the product's sizes."""
    count, tiles = len(sizes), 0
    memory = ctypes.create_string_buffer(BYTES * count + 4 + 128)
    start = -(-ctypes.addressof(memory) // 128) * 128
    for i, (m, n) in enumerate(sizes):
        tiles += -(-m // 64) * -(-n // 64)
        ctypes.memmove(start + 384 * count + 16 * i, struct.pack("4i", tiles, m, n, 1), 16)
    room = WARPS * tiles + 8  # more than there should be
    lines = (ctypes.c_int * (6 * room))()
    seen = ctypes.c_int()
    fault = library.walk(ctypes.c_void_p(start), count, grid, lines, room, ctypes.byref(seen))
    assert not fault, fault.decode()
    every = [tuple(lines[6 * i : 6 * i + 6]) for i in range(seen.value)]
    return [sorted(one[1:] for one in every if one[0] == warp) for warp in range(WARPS)]


CASES: dict[str, tuple[list[Size], int]] = {
    "one": ([(1, 1)], 1),
    "fewer tiles than blocks": ([(64, 65)], 7),
    "a tile for each block": ([(64, 64)] * 5, 5),
    "many": ([(300, 500), (70, 1), (64, 640)], 3),
    "no tiles": ([(0, 5), (0, 0)], 4),
    "nothing in between": ([(0, 70), (130, 70), (0, 0), (5, 0), (1, 1), (0, 9)], 3),
    "nothing, and one at the end": ([(0, 0)] * 599 + [(64, 64)], 6),
}


def problems() -> dict[str, tuple[list[Size], int]]:
    source = random.Random(0)
    more = {
        f"random {i}": (
            [(source.randint(0, 300), source.randint(0, 300)) for _ in range(source.randint(1, 40))],
            source.choice([1, 2, 5, 40]),
        )
        for i in range(12)
    }
    return CASES | more


@pytest.mark.parametrize("name", problems())
def test_every_warp_gets_every_tile_once_and_ends(library: ctypes.CDLL, name: str) -> None:
    sizes, grid = problems()[name]
    wanted = [
        (which, row, col, m, n)
        for which, (m, n) in enumerate(sizes)
        for row in range(-(-m // 64))
        for col in range(-(-n // 64))
    ]
    assert walk(library, sizes, grid) == [wanted] * WARPS
