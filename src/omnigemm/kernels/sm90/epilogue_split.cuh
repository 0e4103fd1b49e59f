// Operands as they are, K split, one tile for a block: every block writes the columns of D that it owns, straight from
// the registers.
#pragma once
#include "sm90/parts.cuh"

struct Epilogue : Parts {
    static constexpr bool USES_MAP = false;

    static __device__ __forceinline__ void finish() {}
    static constexpr __device__ bool storing_thread() { return false; }

    static __device__ __forceinline__ void store_two(const Arguments& arguments, const Place& tile, int m, int n,
                                                     const float (&v)[2]) {
        constexpr int size = OUT_TYPE == FP32 ? 4 : 2;
        char* target = static_cast<char*>(tile.out(arguments)) + (m * tile.out_stride(arguments) + n) * size;
        if (n + 2 <= SHAPE_N && reinterpret_cast<u64>(target) % (2 * size) == 0) {
            if constexpr (OUT_TYPE == FP32)
                *reinterpret_cast<float2*>(target) = make_float2(v[0], v[1]);
            else
                *reinterpret_cast<u32*>(target) = pack_out(v[0], v[1]);
        } else {
            for (int i = 0; i < 2 && n + i < SHAPE_N; ++i) store_one(arguments, tile, m, n + i, v[i]);
        }
    }

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], const Ahead&, char* parts, char*,
                                                 u64* arrived, const TensorMap*, const Arguments& arguments, int,
                                                 const Place& tile, int row_in_tile) {
        send(sums[0], parts, arrived);
        // Scales and bias are read now, for they take as long to come as the others' sums.
        const int first = tile.col * TILE_COLS + first_group(rank()) * 8 + threadIdx.x % 4 * 2;
        const int first_row = tile.row * TILE_ROWS + row_in_tile;
        float col_scales[OWNED][2], biases[OWNED][2];
        int totals[OWNED][2];
        Row rows[2];
#pragma unroll
        for (int i = 0; i < 2 * OWNED; ++i) {
            const int n = min(first + i / 2 * 8 + i % 2, SHAPE_N - 1);
            col_scales[i / 2][i % 2] = col_scale(arguments, tile, n);
            biases[i / 2][i % 2] = bias_at(arguments, n);
            totals[i / 2][i % 2] = col_total(arguments, tile, n);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            rows[half] =
                row_of(arguments, tile, tile.a_scale_row(arguments) + min(first_row + half * 8, arguments.shape_m - 1));
        mbarrier_wait(arrived, 0);
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            if (i >= owned()) break;
            const Four<Sum> sum = added<Sum>(parts, i);
            const int n = first + i * 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = first_row + half * 8;
                if (m >= arguments.shape_m || n >= SHAPE_N) continue;
                float v[2];
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    v[j] =
                        with_c(finished(sum.of[2 * half + j], rows[half], col_scales[i][j], biases[i][j], totals[i][j]),
                               arguments, tile, m, n + j);
                store_two(arguments, tile, m, n, v);
            }
        }
    }
};
