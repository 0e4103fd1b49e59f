"""Math groups with tiles of their own (turns.cuh), run by the emulator: each gets every block of K of its own tiles
from the ring, in their order, and nothing of the other's, whatever the sizes; and all of them end."""

from __future__ import annotations

import ctypes

import pytest

import host_compiler

SHIM = """
#include "common/pipeline.cuh"
constexpr bool PINGPONG = true;
#include "sm90/turns.cuh"

static int tiles, blocks, most, seen, *found;

// As gemm.cuh has it, with a number for what a stage holds.
template <int stages>
void kernel() {
    auto& ring = *reinterpret_cast<Pipeline<stages>*>(emulator::shared_memory());
    static int held[stages];
    if (threadIdx.x == 0) ring.init(1, 4);
    __syncthreads();
    Position<stages> at;
    if (threadIdx.x == 256) {
        for (int i = 0; i < tiles * blocks; ++i, at.advance()) {
            mbarrier_wait(&ring.empty[at.stage], at.phase ^ 1);
            held[at.stage] = i;
            mbarrier_arrive(&ring.full[at.stage]);
        }
    } else if (threadIdx.x < 256) {
        const int group = threadIdx.x / 128;
        Turns turns(group);
        for (int tile = 0; tile < tiles; ++tile) {
            if (!turns.take()) {
                at.skip(blocks);
                continue;
            }
            turns.wait();
            for (int i = 0; i < blocks; ++i, at.advance()) {
                mbarrier_wait(&ring.full[at.stage], at.phase);
                if (threadIdx.x % 128 == 0 && seen < most) {
                    found[3 * seen] = group, found[3 * seen + 1] = tile * blocks + i;
                    found[3 * seen++ + 2] = held[at.stage];
                }
                __syncwarp();
                if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[at.stage]);
            }
            turns.pass();
            for (int i = 0; i < 20; ++i) emulator::meet();  // results are written
        }
        turns.end();
    }
}
extern "C" const char* run(int stages, int tile_count, int block_count, u64 seed, int* lines, int room, int* count) {
    tiles = tile_count, blocks = block_count, found = lines, most = room, seen = 0;
    void (*kernels[])() = {kernel<2>, kernel<5>, kernel<6>};
    const char* fault = emulator::launch(kernels[stages == 2 ? 0 : stages == 5 ? 1 : 2], {1, 288, 1, 1024, 1, seed});
    *count = seen;
    return fault;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = host_compiler.library(
        tmp_path_factory.mktemp("turns"), SHIM, "-O1", "-Wno-psabi", only_gcc=True, emulated=True
    )
    built.run.restype = ctypes.c_char_p
    return built


@pytest.mark.parametrize("stages", [2, 5, 6])
@pytest.mark.parametrize("blocks", [1, 2, 5, 6, 7, 12, 13])
@pytest.mark.parametrize("tiles", [1, 2, 3, 6])
def test_each_group_sees_the_blocks_of_its_own_tiles(
    library: ctypes.CDLL, stages: int, blocks: int, tiles: int
) -> None:
    room, count = tiles * blocks + 8, ctypes.c_int()
    lines = (ctypes.c_int * (3 * room))()
    for seed in range(4):
        fault = library.run(stages, tiles, blocks, ctypes.c_uint64(seed), lines, room, ctypes.byref(count))
        assert not fault, fault.decode()
        assert count.value == tiles * blocks
        seen = [tuple(lines[3 * i : 3 * i + 3]) for i in range(tiles * blocks)]
        assert all(wanted == held for _, wanted, held in seen)
        for group in (0, 1):
            mine = [wanted for which, wanted, _ in seen if which == group]
            assert mine == [tile * blocks + i for tile in range(group, tiles, 2) for i in range(blocks)]
