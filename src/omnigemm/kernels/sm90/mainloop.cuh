// What every mainloop has: where its operands lie in a stage, and how a stage is given back.
#pragma once
#include "common/pipeline.cuh"
#include "sm90/turns.cuh"

struct Operands {
    static constexpr int REGS = TILE_COLS / 2;  // of 64 rows by TILE_COLS columns, per thread
    static constexpr int STAGE_STEP = STAGE_BYTES >> 4,
                         WAVE_STEP = WAVE_ROWS * BLOCK_K >> 4;  // descriptors count 16 bytes
    // From one wgmma's share of K to the next: 32 bytes of a row, or 16 rows of a turned operand.
    static constexpr int LEFT_STEP = (LEFT_TURNED ? 16 * BLOCK_K : 32) >> 4;
    static constexpr int RIGHT_STEP = (RIGHT_TURNED ? 16 * BLOCK_K : 32) >> 4;

    u64 left, right;  // of the first stage

    __device__ __forceinline__ Operands(const char* stages, int row_group)
        : left(wgmma_descriptor(stages + row_group * GROUP_ROWS * BLOCK_K, LEFT_TURNED)),
          right(wgmma_descriptor(stages + LEFT_BYTES, RIGHT_TURNED)) {}

    // Each warp for itself, since it waited for its own share of the products only; to every block that filled the
    // stage.
    static __device__ __forceinline__ void release(u64* empty, int share_rank) {
        __syncwarp();
        if constexpr (SHARE > 1) {
            const int lane = threadIdx.x % 32;
            if (lane < SHARE) mbarrier_arrive_in(empty, cluster_ctarank() - share_rank + lane);
        } else if (threadIdx.x % 32 == 0) {
            mbarrier_arrive(empty);
        }
    }

    // Gives the stages of a tile back without a look at them.
    template <class Ring, class At>
    static __device__ __forceinline__ void skip(Ring* ring, At& at, int blocks, int share_rank) {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            mbarrier_wait(&ring->full[at.stage], at.phase);
            release(&ring->empty[at.stage], share_rank);
            at.advance();
        }
    }
};
