// fp8 operands with a scale for each 128 of K: A's per row, B's per 128 rows. Every 128 of K, what the tensor cores
// summed is scaled and added in fp32.
#pragma once
#include "common/pipeline.cuh"

// A tile's columns are multiplied in two halves: while one half's product runs, the other is scaled.
struct Fp8BlockMainloop {
    static constexpr int HALF = BLOCK_N / 2;
    static constexpr int REGS = HALF / 2;  // of 64 rows by HALF columns, per thread
    static constexpr int HALF_BYTES = HALF * BLOCK_K;
    static constexpr int SCALE_ROWS = (SHAPE_N + 127) / 128;

    // A tile of 192 columns meets two of B's scales, which part it at column 64 or at column 128.
    static_assert(BLOCK_N == 128 || BLOCK_N == 192, "scales of B are looked up for tiles of 128 or 192 columns");

    struct Scales {
        float top, bottom;  // of the two rows of A that a thread holds
        float left, right;  // of B
    };

    using Sums = float[2][REGS];

    // The compiler does not know that waiting for wgmma is what makes its registers readable.
    static __device__ __forceinline__ void settle(float (&part)[REGS]) {
#pragma unroll
        for (int i = 0; i < REGS; ++i) asm volatile("" : "+f"(part[i])::"memory");
    }

    static __device__ __forceinline__ void multiply(float (&part)[REGS], const char* a_tile, const char* b_tile) {
        const u64 a = wgmma_descriptor(a_tile), b = wgmma_descriptor(b_tile);
        wgmma_fence();
        // 32 of K are 32 bytes, and descriptors count 16 bytes.
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k) wgmma_fp8(part, a + 2 * k, b + 2 * k, k != 0);
        wgmma_commit_group();
    }

    template <int half>
    static __device__ __forceinline__ void promote(float (&sum)[REGS], const float (&part)[REGS], const Scales& s,
                                                   bool part_at_128) {
        const float column[3] = {s.left, BLOCK_N == 128 || part_at_128 ? s.left : s.right, s.right};
        float top[3], bottom[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            top[i] = s.top * column[i];
            bottom[i] = s.bottom * column[i];
        }
#pragma unroll
        for (int i = 0; i < REGS; i += 4) {
            const int third = (half * HALF + i * 2) / 64;
            sum[i] += top[third] * part[i];
            sum[i + 1] += top[third] * part[i + 1];
            sum[i + 2] += bottom[third] * part[i + 2];
            sum[i + 3] += bottom[third] * part[i + 3];
        }
    }

    // The sums of one tile. `row` is the first of the thread's two rows, eight apart; rows past M repeat the last one's
    // scale.
    template <class Ring, class At>
    static __device__ __forceinline__ void run(Sums& sum, Ring* ring, At& at, const char* stages, int math_group,
                                               int row, int shape_m, int first_column, const float* scale_a,
                                               const float* scale_b) {
        const float* a_top = scale_a + (long long)min(row, shape_m - 1) * K_BLOCKS;
        const float* a_bottom = scale_a + (long long)min(row + 8, shape_m - 1) * K_BLOCKS;
        const float* b_left = scale_b + (long long)(first_column / 128) * K_BLOCKS;
        const float* b_right = scale_b + (long long)min(first_column / 128 + 1, SCALE_ROWS - 1) * K_BLOCKS;
        const bool part_at_128 = first_column % 128 == 0;
        const auto scales_at = [&](int block) {
            return Scales{__ldg(a_top + block), __ldg(a_bottom + block), __ldg(b_left + block), __ldg(b_right + block)};
        };
#pragma unroll
        for (int i = 0; i < REGS; ++i) sum[0][i] = sum[1][i] = 0.0f;
        float part0[REGS], part1[REGS];
        Scales next = scales_at(0);
        // No product is left running across the end of an iteration: ptxas would then run them one by one.
#pragma unroll 1
        for (int block = 0; block < K_BLOCKS; ++block) {
            const Scales now = next;
            next = scales_at(min(block + 1, K_BLOCKS - 1));
            const char* stage = stages + at.stage * STAGE_BYTES;
            const char* a_tile = stage + math_group * 64 * BLOCK_K;
            mbarrier_wait(&ring->full[at.stage], at.phase);
            multiply(part0, a_tile, stage + A_BYTES);
            multiply(part1, a_tile, stage + A_BYTES + HALF_BYTES);
            wgmma_wait_group<1>();
            settle(part0);
            promote<0>(sum[0], part0, now, part_at_128);
            wgmma_wait_group<0>();
            settle(part1);
            // Each warp for itself: it waited for its own share of the products only.
            if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring->empty[at.stage]);
            promote<1>(sum[1], part1, now, part_at_128);
            at.advance();
        }
    }
};
