// fp8 operands. Every 128 of K, what the tensor cores summed (they keep some 13 bits) is scaled and added in fp32.
#pragma once
#include "common/pipeline.cuh"

struct Mainloop {
    static constexpr int REGS = TILE_COLS / 2;  // of 64 rows by TILE_COLS columns, per thread
    // Columns in groups that lie in one block of 128, whatever the tile.
    static constexpr int GROUP = TILE_COLS & -TILE_COLS & 127 ? TILE_COLS & -TILE_COLS : 128;
    static_assert(RIGHT_SCALE != PER_BLOCK || (TILE_COLS - GROUP <= 128), "a tile meets at most two blocks of scales");
    static_assert(DEPTH == 1 || WAVES == 1, "several blocks at a time for one wave only");

    using Sums = float[WAVES][REGS];

    // Of the thread's two rows, eight apart, and of its columns: one or two for all, or one for each.
    struct Scales {
        static constexpr int PAIRS = RIGHT_SCALE == PER_ROW ? REGS / 4 : 1;
        float top, bottom;
        float2 cols[PAIRS];

        __device__ __forceinline__ Scales(const float* stage, int row) : top(1.0f), bottom(1.0f) {
            if constexpr (LEFT_SCALE == PER_ROW) {
                top = ld_shared(stage + row);
                bottom = ld_shared(stage + row + 8);
            }
            if constexpr (RIGHT_SCALE == PER_ROW) {
#pragma unroll
                for (int i = 0; i < PAIRS; ++i)
                    cols[i] = ld_shared_v2(stage + LEFT_SCALES + 8 * i + threadIdx.x % 4 * 2);
            } else if constexpr (RIGHT_SCALE == PER_BLOCK) {
                cols[0].x = cols[0].y = ld_shared(stage + LEFT_SCALES);
                if constexpr (CROSSES) cols[0].y = ld_shared(stage + LEFT_SCALES + 1);
            }
        }
    };

    u64 left, right;  // of the first stage
    int row;          // the thread's first in the tile
    int part_at;      // the column at which the second block of the right operand's scales begins

    // The compiler does not know that waiting for wgmma is what makes its registers readable.
    static __device__ __forceinline__ void settle(float (&part)[REGS]) {
#pragma unroll
        for (int i = 0; i < REGS; ++i) asm volatile("" : "+f"(part[i])::"memory");
    }

    static __device__ __forceinline__ void multiply(float (&part)[REGS], u64 left, u64 right) {
        wgmma_fence();
        // 32 of K are 32 bytes, and descriptors count 16 bytes.
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k) wgmma_fp8(part, left + 2 * k, right + 2 * k, k != 0);
        wgmma_commit_group();
    }

    __device__ __forceinline__ void promote(float (&sum)[REGS], const float (&part)[REGS], const Scales& s) const {
        if constexpr (LEFT_SCALE == NO_SCALE) {
#pragma unroll
            for (int j = 0; j < REGS; ++j) sum[j] += part[j];
        } else if constexpr (RIGHT_SCALE == PER_BLOCK) {
#pragma unroll
            for (int first = 0; first < TILE_COLS; first += GROUP) {
                const float scale = CROSSES && first >= part_at ? s.cols[0].y : s.cols[0].x;
                const float above = s.top * scale, below = s.bottom * scale;
#pragma unroll
                for (int j = first / 2; j < (first + GROUP) / 2; j += 4) {
                    sum[j] += above * part[j];
                    sum[j + 1] += above * part[j + 1];
                    sum[j + 2] += below * part[j + 2];
                    sum[j + 3] += below * part[j + 3];
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < REGS; j += 4) {
                sum[j] += s.top * s.cols[j / 4].x * part[j];
                sum[j + 1] += s.top * s.cols[j / 4].y * part[j + 1];
                sum[j + 2] += s.bottom * s.cols[j / 4].x * part[j + 2];
                sum[j + 3] += s.bottom * s.cols[j / 4].y * part[j + 3];
            }
        }
    }

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

    __device__ __forceinline__ Mainloop(const char* stages, int row_group, int row)
        : left(wgmma_descriptor(stages + row_group * WAVES * 64 * BLOCK_K)),
          right(wgmma_descriptor(stages + LEFT_BYTES)),
          row(row) {}

    // The sums of a tile.
    template <class Ring, class At>
    __device__ __forceinline__ void run(Sums& sums, Ring* ring, At& at, const float* scales, const Tile& tile,
                                        int blocks, int share_rank) {
        constexpr int STAGE_STEP = STAGE_BYTES >> 4, WAVE_STEP = 64 * BLOCK_K >> 4;
        part_at = 128 - tile.col * TILE_COLS % 128;
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
#pragma unroll
            for (int j = 0; j < REGS; ++j) sums[wave][j] = 0.0f;
        bool ready = false;
        // DEPTH blocks are multiplied together and then added one by one. No product is left running across the end of
        // an iteration: ptxas would then run them one by one.
#pragma unroll 1
        for (int i = 0; i < blocks; i += DEPTH) {
            if constexpr (DEPTH == 1) {
                const At now = at;
                if (!ready) mbarrier_wait(&ring->full[now.stage], now.phase);
                at.advance();
#pragma unroll
                for (int wave = 0; wave < WAVES; ++wave) {
                    float part[REGS];
                    multiply(part, left + now.stage * STAGE_STEP + wave * WAVE_STEP, right + now.stage * STAGE_STEP);
                    const Scales s(scales + now.stage * STAGE_SCALES, row + 64 * wave);
                    wgmma_wait_group<0>();
                    settle(part);
                    if (wave == WAVES - 1) {
                        release(&ring->empty[now.stage], share_rank);
                        ready =
                            mbarrier_test(&ring->full[at.stage], at.phase);  // asked early, for the answer takes time
                    }
                    promote(sums[wave], part, s);
                }
            } else {
                float parts[DEPTH][REGS];
                At ahead = at;
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    mbarrier_wait(&ring->full[ahead.stage], ahead.phase);
                    multiply(parts[d], left + ahead.stage * STAGE_STEP, right + ahead.stage * STAGE_STEP);
                    ahead.advance();
                }
                add<0>(sums[0], parts, ring, at, scales, share_rank);
            }
        }
    }

    // Add the products of a group in their order, each as soon as it is there.
    template <int d, class Ring, class At>
    __device__ __forceinline__ void add(float (&sum)[REGS], float (&parts)[DEPTH][REGS], Ring* ring, At& at,
                                        const float* scales, int share_rank) const {
        const Scales s(scales + at.stage * STAGE_SCALES, row);
        wgmma_wait_group<DEPTH - 1 - d>();
        settle(parts[d]);
        release(&ring->empty[at.stage], share_rank);
        promote(sum, parts[d], s);
        at.advance();
        if constexpr (d + 1 < DEPTH) add<d + 1>(sum, parts, ring, at, scales, share_rank);
    }
};
