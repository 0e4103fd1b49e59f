// fp8 operands. Every 128 of K, what the tensor cores summed (they keep some 13 bits) is scaled and added in fp32.
#pragma once
#include "sm90/mainloop.cuh"

struct Mainloop : Operands {
    // Columns in groups that lie in one block of 128, whatever the tile.
    static constexpr int GROUP = TILE_COLS & -TILE_COLS & 127 ? TILE_COLS & -TILE_COLS : 128;
    static_assert(RIGHT_SCALE != PER_BLOCK || (TILE_COLS - GROUP <= 128), "a tile meets at most two blocks of scales");
    static_assert(DEPTH == 1 || WAVES == 1, "several blocks at a time for one wave only");
    static_assert(!PINGPONG, "one group adds while the other multiplies: they need the same tile at the same time");

    using Sums = float[WAVES][REGS];

    // Of the thread's rows, two eight apart in each wave, and of its columns: one or two for all, or one for each.
    struct Scales {
        static constexpr int PAIRS = RIGHT_SCALE == PER_ROW ? REGS / 4 : 1;
        float rows[WAVES][2];
        float2 cols[PAIRS];

        __device__ __forceinline__ Scales(const float* stage, int row) {
            if constexpr (LEFT_SCALE == PER_ROW && WAVES == 2) {
                const float4 four = ld_shared_v4(stage + left_place(row));
                rows[0][0] = four.x, rows[0][1] = four.y, rows[1][0] = four.z, rows[1][1] = four.w;
            } else if constexpr (LEFT_SCALE == PER_ROW) {
                const float2 two = ld_shared_v2(stage + left_place(row));
                rows[0][0] = two.x, rows[0][1] = two.y;
            } else {
                rows[0][0] = rows[0][1] = 1.0f;
            }
            const int lane = threadIdx.x % 4;
            if constexpr (RIGHT_SCALE == PER_ROW && FOURS) {
#pragma unroll
                for (int i = 0; i < PAIRS; i += 2) {
                    const float4 four = ld_shared_v4(stage + LEFT_SCALES + 8 * i + lane * 4);
                    cols[i] = make_float2(four.x, four.y), cols[i + 1] = make_float2(four.z, four.w);
                }
            } else if constexpr (RIGHT_SCALE == PER_ROW) {
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) cols[i] = ld_shared_v2(stage + LEFT_SCALES + 8 * i + lane * 2);
            } else if constexpr (RIGHT_SCALES > 0) {
                cols[0] = ld_shared_v2(stage + LEFT_SCALES);
            }
        }
    };

    int row;      // the thread's first in the tile
    int part_at;  // the column at which the second block of the right operand's scales begins

    // The compiler does not know that waiting for wgmma is what makes its registers readable.
    static __device__ __forceinline__ void settle(float (&part)[REGS]) {
#pragma unroll
        for (int i = 0; i < REGS; ++i) asm volatile("" : "+f"(part[i])::"memory");
    }

    static __device__ __forceinline__ void multiply(float (&part)[REGS], u64 left, u64 right) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k) wgmma(part, left + k * LEFT_STEP, right + k * RIGHT_STEP, k != 0);
        wgmma_commit_group();
    }

    __device__ __forceinline__ void promote(float (&sum)[REGS], const float (&part)[REGS], const Scales& s,
                                            int wave) const {
        const float above = s.rows[wave][0], below = s.rows[wave][1];
        if constexpr (LEFT_SCALE == NO_SCALE) {
#pragma unroll
            for (int j = 0; j < REGS; ++j) sum[j] += part[j];
        } else if constexpr (RIGHT_SCALE == PER_BLOCK) {
#pragma unroll
            for (int first = 0; first < TILE_COLS; first += GROUP) {
                const float scale = RIGHT_FOLDED ? 1.0f : first >= part_at ? s.cols[0].y : s.cols[0].x;
#pragma unroll
                for (int j = first / 2; j < (first + GROUP) / 2; j += 4) {
                    sum[j] += above * scale * part[j];
                    sum[j + 1] += above * scale * part[j + 1];
                    sum[j + 2] += below * scale * part[j + 2];
                    sum[j + 3] += below * scale * part[j + 3];
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < REGS; j += 4) {
                sum[j] += above * s.cols[j / 4].x * part[j];
                sum[j + 1] += above * s.cols[j / 4].y * part[j + 1];
                sum[j + 2] += below * s.cols[j / 4].x * part[j + 2];
                sum[j + 3] += below * s.cols[j / 4].y * part[j + 3];
            }
        }
    }

    __device__ __forceinline__ Mainloop(const char* stages, int row_group, int row)
        : Operands(stages, row_group), row(row) {}

    // The sums of a tile, or of its first waves: the others' are zero.
    template <int waves, class Ring, class At>
    __device__ __forceinline__ void run(Sums& sums, Ring* ring, At& at, const float* scales, const Tile& tile,
                                        int blocks, int share_rank, const Turns&) {
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
                const u64 left_now = left + now.stage * STAGE_STEP, right_now = right + now.stage * STAGE_STEP;
                float part[REGS];
                multiply(part, left_now, right_now);
                const Scales s(scales + now.stage * STAGE_SCALES, row);
#pragma unroll
                for (int wave = 0; wave < waves; ++wave) {
                    if (wave > 0) multiply(part, left_now + wave * WAVE_STEP, right_now);
                    wgmma_wait_group<0>();
                    settle(part);
                    if (wave == waves - 1) {
                        release(&ring->empty[now.stage], share_rank);
                        ready =
                            mbarrier_test(&ring->full[at.stage], at.phase);  // asked early, for the answer takes time
                    }
                    promote(sums[wave], part, s, wave);
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
        promote(sum, parts[d], s, 0);
        at.advance();
        if constexpr (d + 1 < DEPTH) add<d + 1>(sum, parts, ring, at, scales, share_rank);
    }
};
