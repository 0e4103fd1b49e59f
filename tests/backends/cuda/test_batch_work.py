"""Which tiles of a batch a block works on, and where they lie (work_batch.cuh): the kernels' own header, on the grid
that the host launches, run by the emulator."""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import host_compiler
from omnigemm.backends.cuda.sm90 import Config

M, N, K_BLOCKS = 200, 333, 13
SHIM = """
#include "common/pipeline.cuh"
#define ELEMENT_BYTES 2
#define OUT_BYTES 2
{constants}
constexpr int SHARE = LEFT_SHARE * RIGHT_SHARE, CLUSTER = SHARE * SPLIT, SCALES_AT_ONCE = 4;
#define cluster_ctarank() (blockIdx.x % CLUSTER)
struct Arguments {{
    void* out;
    long long out_stride;
    int shape_m;
    float alpha, beta;
    const void* c;
    long long c_row, c_col;
    int c_type;
    long long out_step, c_step;
    int a_step, b_step, a_scale_step, b_scale_step, b_sum_step, batch;
}};
#include "sm90/work_batch.cuh"

static Arguments given;
static long long *found, seen, most;

static void kernel() {{
    Work work(given);
    if (threadIdx.x) return;
    for (int index = work.first(); work.has(index); index = work.next(index)) {{
        const Place tile = work.tile(index);
        if (seen++ >= most) return;
        const long long line[] = {{tile.product, tile.row, tile.col,
                                  work.first_block, work.first_block + work.blocks(tile),
                                  tile.a_number(given), tile.b_number(given), tile.out_number(),
                                  tile.a_scale_row(given), tile.b_whole_scale(given), tile.b_sum_row(given),
                                  static_cast<char*>(tile.out(given)) - static_cast<char*>(given.out),
                                  tile.c_at(given, 2, 3), tile.rows(given)}};
        for (long long value : line) *found++ = value;
    }}
}}
extern "C" long long walk(int m, int batch, const long long* steps, int grid, long long* lines, long long room) {{
    static char memory[1];
    given = {{memory, 0, m, 1.0f, 0.0f, nullptr, 1000, 7, 0, steps[0], steps[1], int(steps[2]), int(steps[3]),
              int(steps[4]), int(steps[5]), int(steps[6]), batch}};
    found = lines, seen = 0, most = room;
    emulator::launch(kernel, {{grid, 32}});
    return seen;
}}
"""
FIELDS = 14
CONFIGS = {
    "rows": Config(False, 1, 1, 96, 4, band=2),
    "rows, two on a multiprocessor": Config(False, 1, 1, 96, 4, blocks_per_sm=2),
    "rows share": Config(False, 2, 1, 64, 4, left_share=2),
    "rows, columns share": Config(False, 1, 1, 64, 4, right_share=4),
    "rows split": Config(False, 1, 1, 64, 4, split=3),
    "swapped": Config(True, 1, 1, 24, 4),
    "swapped, split and shared": Config(True, 1, 1, 64, 6, split=2, left_share=2),
}
STEPS = {  # D in bytes, C; A, B, their scales and sums of B's rows
    "each": (2**33 + 16, 2**32 + 5, 1, 1, M, N, N),
    "shared": (512, 0, 0, 0, 0, 0, 0),
}


def walk(folder: Path, config: Config, batch: int, steps: tuple[int, ...], multiprocessors: int = 20) -> list[Any]:
    names = {
        "SWAP": int(config.swap),
        "SHAPE_N": N,
        "K_BLOCKS": K_BLOCKS,
        "TILE_ROWS": config.rows,
        "TILE_COLS": config.cols,
        "LEFT_SHARE": config.left_share,
        "RIGHT_SHARE": config.right_share,
        "SPLIT": config.split,
        "DEPTH": config.depth,
        "WAVES": config.waves,
        "BAND": config.band,
    }
    constants = "\n".join(f"constexpr int {name} = {value};" for name, value in names.items())
    library = host_compiler.library(folder, SHIM.format(constants=constants), "-O1", emulated=True)
    library.walk.restype = ctypes.c_longlong
    room = 20000
    lines = (ctypes.c_longlong * (FIELDS * room))()
    given = (ctypes.c_longlong * len(steps))(*steps)
    grid = config.grid(M, N, multiprocessors, batch)
    seen = library.walk(M, batch, given, grid, lines, ctypes.c_longlong(room))
    assert 0 < seen <= room
    return [tuple(lines[FIELDS * i : FIELDS * (i + 1)]) for i in range(seen)]


@pytest.mark.parametrize("batch", [2, 37])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_part_of_every_product_exactly_once(tmp_path: Path, name: str, batch: int) -> None:
    config = CONFIGS[name]
    seen = walk(tmp_path, config, batch, STEPS["each"])
    # Blocks of a cluster whose pack reaches over the edge have tiles outside, which nobody writes.
    rows, cols = (N, M) if config.swap else (M, N)
    inside = Counter(
        (product, row, col, block)
        for product, row, col, first, end, *_ in seen
        if row * config.rows < rows and col * config.cols < cols
        for block in range(first, end)
    )
    tiles = range(-(-rows // config.rows)), range(-(-cols // config.cols))
    assert inside == Counter(itertools.product(range(batch), *tiles, range(K_BLOCKS)))
    if not config.persistent:
        assert len(seen) == config.grid(M, N, 20, batch), "one tile for a block"


@pytest.mark.parametrize("kind", STEPS)
def test_where_a_product_lies(tmp_path: Path, kind: str) -> None:
    out, c, a, b, a_scale, b_scale, b_sum = steps = STEPS[kind]
    seen = walk(tmp_path, CONFIGS["rows"], 5, steps)
    assert {line[0] for line in seen} == set(range(5))
    for product, _, _, _, _, *found in seen:
        numbers = [product * a, product * b, product]
        scales = [product * a_scale, product * b_scale, product * b_sum]
        assert found == [*numbers, *scales, product * out, product * c + 2 * 1000 + 3 * 7, M]
