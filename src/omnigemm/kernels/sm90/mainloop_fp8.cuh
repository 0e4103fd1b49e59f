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

    // Two waves' sums leave no registers for a scale of each column: these are read when they are needed, and their
    // stage is given back after that.
    static constexpr bool LATE = RIGHT_SCALE == PER_ROW && WAVES == 2;
    static_assert(!LATE || FOURS, "as they are read");

    // Of the thread's rows, two eight apart in each wave, and of its columns: one or two for all, or one for each.
    struct Scales {
        static constexpr int PAIRS = RIGHT_SCALE == PER_ROW && !LATE ? REGS / 4 : 1;
        float rows[WAVES][2];
        float2 cols[PAIRS];
        const float* late;  // where the columns' are, if they are read late
        float4 soon;        // the first four of those, read while their products are waited for

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
            if constexpr (LATE) {
                late = stage + LEFT_SCALES + lane * 4;
            } else if constexpr (RIGHT_SCALE == PER_ROW && FOURS) {
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

    // By descriptors, or by their lower halves.
    template <class Descriptor>
    static __device__ __forceinline__ void multiply(float (&part)[REGS], Descriptor left, Descriptor right) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k)
            wgmma(part, wgmma_descriptor(left + k * LEFT_STEP), wgmma_descriptor(right + k * RIGHT_STEP), k != 0);
        wgmma_commit_group();
    }

    // Add a block's products to the sums; the first ones are the sums.
    template <bool first>
    static __device__ __forceinline__ void add_one(float& sum, float scale, float part) {
        sum = first ? scale * part : sum + scale * part;
    }
    template <bool first>
    __device__ __forceinline__ void promote(float (&sum)[REGS], const float (&part)[REGS], const Scales& s,
                                            int wave) const {
        const float above = s.rows[wave][0], below = s.rows[wave][1];
        if constexpr (LEFT_SCALE == NO_SCALE) {
#pragma unroll
            for (int j = 0; j < REGS; ++j) sum[j] = first ? part[j] : sum[j] + part[j];
        } else if constexpr (RIGHT_SCALE == PER_BLOCK) {
#pragma unroll
            for (int from = 0; from < TILE_COLS; from += GROUP) {
                const float scale = RIGHT_FOLDED ? 1.0f : from >= part_at ? s.cols[0].y : s.cols[0].x;
#pragma unroll
                for (int j = from / 2; j < (from + GROUP) / 2; ++j)
                    add_one<first>(sum[j], (j % 4 < 2 ? above : below) * scale, part[j]);
            }
        } else if constexpr (LATE) {
#pragma unroll
            for (int i = 0; i < REGS; i += 8) {
                const float4 four = i == 0 ? s.soon : ld_shared_v4(s.late + 2 * i);
#pragma unroll
                for (int j = i; j < i + 8; ++j) {
                    const float2 scales = j < i + 4 ? make_float2(four.x, four.y) : make_float2(four.z, four.w);
                    add_one<first>(sum[j], (j % 4 < 2 ? above : below) * (j % 2 ? scales.y : scales.x), part[j]);
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < REGS; ++j) {
                const float2 scales = s.cols[j / 4];
                add_one<first>(sum[j], (j % 4 < 2 ? above : below) * (j % 2 ? scales.y : scales.x), part[j]);
            }
        }
    }

    __device__ __forceinline__ Mainloop(const char* stages, int row_group, int row)
        : Operands(stages, row_group), row(row) {}

    // Where a stage's operands lie is worked out anew for each block, or carried along, which is less to do before its
    // first product. With one wave the compiler then begins products further apart, and that was up to 12 % slower.
    static constexpr bool CARRIES = WAVES == 2;

    // One block of K. Answers whether the next one is there. `right_at`, carried along: where its right operand lies.
    template <int waves, bool first, class Ring, class At>
    __device__ __forceinline__ bool block(Sums& sums, Ring* ring, At& at, u32& right_at, const float* scales,
                                          int share_rank, bool ready) const {
        const At now = at;
        if (!ready) mbarrier_wait(&ring->full[now.stage], now.phase);
        at.advance();
        float part[REGS];
        const auto begin = [&, lower = right_at](int wave) {
            if constexpr (CARRIES)
                multiply(part, lower + u32(left - right) + wave * WAVE_STEP, lower);
            else
                multiply(part, left + now.stage * STAGE_STEP + wave * WAVE_STEP, right + now.stage * STAGE_STEP);
        };
        right_at = at.stage == 0 ? u32(right) : right_at + STAGE_STEP;
        begin(0);
        Scales s(scales + now.stage * STAGE_SCALES, row);
#pragma unroll
        for (int wave = 0; wave < waves; ++wave) {
            if (wave > 0) begin(wave);
            if constexpr (LATE) s.soon = ld_shared_v4(s.late);
            wgmma_wait_group<0>();
            settle(part);
            if (wave == waves - 1) {
                if constexpr (!LATE) release(&ring->empty[now.stage], share_rank);
                ready = mbarrier_test(&ring->full[at.stage], at.phase);  // asked early, for the answer takes time
            }
            promote<first>(sums[wave], part, s, wave);
        }
        if constexpr (LATE) release(&ring->empty[now.stage], share_rank);
        return ready;
    }

    static __device__ __forceinline__ void clear(Sums& sums, int from) {
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
#pragma unroll
            for (int j = 0; j < REGS; ++j)
                if (wave >= from) sums[wave][j] = 0.0f;
    }

    // Whether the first block's products become the sums, instead of being added to zeros: nobody multiplies while sums
    // are made zero. It takes some registers.
    static constexpr bool ASSIGNS = !REBALANCE || MATH_REGISTERS >= 224;

    // The sums of a tile, or of its first waves: the others' are zero. No product is left running across the end of an
    // iteration: ptxas would then run them one by one.
    template <int waves, class Ring, class At>
    __device__ __forceinline__ void run(Sums& sums, Ring* ring, At& at, const float* scales, const Tile& tile,
                                        int blocks, int share_rank, const Turns&) {
        part_at = 128 - tile.col * TILE_COLS % 128;
        if constexpr (DEPTH == 1) {
            // A loop whose length is known may be unrolled, and registers are too few for that.
            computed(blocks);
            bool ready = false;
            u32 right_at = right + at.stage * STAGE_STEP;
            clear(sums, ASSIGNS ? waves : 0);
            if constexpr (ASSIGNS) {
                // A product of a list may have no K, and a block no part of one that is split.
                if ((LIST || SPLIT > 1) && blocks == 0) return clear(sums, 0);
                ready = block<waves, true>(sums, ring, at, right_at, scales, share_rank, ready);
                --blocks;
            }
#pragma unroll 1
            for (; blocks > 0; --blocks)
                ready = block<waves, false>(sums, ring, at, right_at, scales, share_rank, ready);
        } else {  // DEPTH blocks are multiplied together and then added one by one
            clear(sums, 0);
#pragma unroll 1
            for (int i = 0; i < blocks; i += DEPTH) {
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
        promote<false>(sum, parts[d], s, 0);
        at.advance();
        if constexpr (d + 1 < DEPTH) add<d + 1>(sum, parts, ring, at, scales, share_rank);
    }
};
