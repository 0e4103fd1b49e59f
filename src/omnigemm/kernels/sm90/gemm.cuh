// D[M, N] = A[M, K] B[N, K]^T on Hopper: the skeleton. Persistent blocks of one warpgroup that loads by TMA and BLOCK_M
// / 64 that multiply by wgmma, with a ring of stages between them. A mainloop makes a tile's sums, an epilogue writes
// them.
//
// The source that includes this defines SHAPE_N, SHAPE_K, BLOCK_M, BLOCK_N, STAGES, BAND and wgmma_fp8 (see sm90.py).
#pragma once
#include "common/pipeline.cuh"
#include "common/scheduler.cuh"

constexpr int BLOCK_K = 128;  // bytes: one swizzled row, and one block of scales
constexpr int MATH_GROUPS = BLOCK_M / 64;
constexpr int THREADS = 128 * (MATH_GROUPS + 1);
constexpr int A_BYTES = BLOCK_M * BLOCK_K;
constexpr int B_BYTES = BLOCK_N * BLOCK_K;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int K_BLOCKS = (SHAPE_K + BLOCK_K - 1) / BLOCK_K;
constexpr int TILES_N = (SHAPE_N + BLOCK_N - 1) / BLOCK_N;
// Entered with 168 registers a thread; the loader gives back what the math groups then take.
constexpr int LOADER_REGISTERS = 40;
constexpr int MATH_REGISTERS = 232;

#include "sm90/epilogue_tma.cuh"
#include "sm90/mainloop_fp8_block.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    omnigemm_sm90_fp8_block(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                            const __grid_constant__ TensorMap map_d, const float* __restrict__ scale_a,
                            const float* __restrict__ scale_b, int shape_m) {
    using Ring = Pipeline<STAGES>;
    extern __shared__ __align__(1024) char shared[];
    char* out = shared;
    char* stages = shared + TmaEpilogue::BYTES;
    Ring* ring = reinterpret_cast<Ring*>(stages + STAGES * STAGE_BYTES);
    const int group = threadIdx.x / 128;
    const int tiles_m = (shape_m + BLOCK_M - 1) / BLOCK_M;
    const int tiles = tiles_m * TILES_N;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        ring->init(4 * MATH_GROUPS);
    }
    __syncthreads();
    // The next kernel may set up now; this one touches memory only after the one before it is done.
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    if (group == MATH_GROUPS) {
        setmaxnreg_dec<LOADER_REGISTERS>();
        if (threadIdx.x != MATH_GROUPS * 128) return;
        Position<STAGES> at;
        for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
            const Tile tile = dense_tile(index, tiles_m, TILES_N, BAND);
            for (int block = 0; block < K_BLOCKS; ++block) {
                char* stage = stages + at.stage * STAGE_BYTES;
                u64* full = &ring->full[at.stage];
                mbarrier_wait(&ring->empty[at.stage], at.phase ^ 1);
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
                tma_load_2d(stage, &map_a, full, block * BLOCK_K, tile.m * BLOCK_M);
                tma_load_2d(stage + A_BYTES, &map_b, full, block * BLOCK_K, tile.n * BLOCK_N);
                at.advance();
            }
        }
    } else {
        setmaxnreg_inc<MATH_REGISTERS>();
        const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        Position<STAGES> at;
        for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
            const Tile tile = dense_tile(index, tiles_m, TILES_N, BAND);
            Fp8BlockMainloop::Sums sum;
            Fp8BlockMainloop::run(sum, ring, at, stages, group, tile.m * BLOCK_M + row, shape_m, tile.n * BLOCK_N,
                                  scale_a, scale_b);
            TmaEpilogue::store(sum, out, &map_d, group, tile.m * BLOCK_M, tile.n * BLOCK_N);
        }
        TmaEpilogue::wait_until_read();
    }
}
