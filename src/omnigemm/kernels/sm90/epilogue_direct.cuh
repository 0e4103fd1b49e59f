// Straight from the registers, for rows that the copy engine cannot address and tiles that it would not take whole.
#pragma once
#include "sm90/epilogue.cuh"

struct Epilogue {
    using Ahead = ::Ahead;
    static constexpr bool USES_MAP = false;
    static constexpr int BYTES = 0;
    static constexpr int AT_ONCE = 8;  // pairs of columns

    static __device__ __forceinline__ void init(u64*) {}
    static __device__ __forceinline__ void finish() {}
    static constexpr __device__ bool storing_thread() { return false; }

    // A row of D from some even column of the tile on, if it can be written in pairs of floats; else null.
    static __device__ __forceinline__ float2* out_pairs(const Arguments& arguments, const Place& tile, int m, int n) {
        float* to = static_cast<float*>(tile.out(arguments)) + m * tile.out_stride(arguments) + n;
        return OUT_TYPE == FP32 && reinterpret_cast<u64>(to) % 8 == 0 ? reinterpret_cast<float2*>(to) : nullptr;
    }

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], const Ahead& ahead, char*, char*, u64*,
                                                 const TensorMap*, const Arguments& arguments, int, const Place& tile,
                                                 int row_in_tile) {
        const int first_col = tile.col * TILE_COLS, offset = threadIdx.x % 4 * 2, first = first_col + offset;
        const bool inside = first_col + TILE_COLS <= tile.columns();
#pragma unroll
        for (int wave = 0; wave < waves; ++wave)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = tile.row * TILE_ROWS + row_in_tile + wave * WAVE_ROWS + half * 8;
                const int out_m = tile.out_row(arguments) + m;
                const bool mine = m < tile.rows(arguments);
                const Row row = ahead.rows[wave][half];
                const float2* from_c = inside ? c_pairs(arguments, tile, m, first) : nullptr;
                float2* to = inside ? out_pairs(arguments, tile, out_m, first) : nullptr;
#pragma unroll
                for (int from = 0; from < regs / 4; from += AT_ONCE) {
                    // C may be D itself, and what is read after a write has to wait for it: so some are read before.
                    float2 c[AT_ONCE];
                    if (from_c) {
#pragma unroll
                        for (int j = 0; j < AT_ONCE && from + j < regs / 4; ++j) c[j] = from_c[4 * (from + j)];
                    } else {
#pragma unroll
                        for (int j = 0; j < AT_ONCE && from + j < regs / 4; ++j) {
                            const int n = first + 8 * (from + j);
                            c[j] = make_float2(c_near(arguments, tile, m, n), c_near(arguments, tile, m, n + 1));
                        }
                    }
#pragma unroll
                    for (int j = 0; j < AT_ONCE && from + j < regs / 4; ++j) {
                        const int eight = 8 * (from + j), n = first + eight;
                        const Sum* v = sums[wave] + 4 * (from + j) + 2 * half;
                        // All lanes take part in the shuffles, also those with nothing to write.
                        const Columns::Two two = ahead.columns.two(eight, offset);
                        const float left = two.finish(v[0], row, 0), right = two.finish(v[1], row, 1);
                        const float2 both =
                            make_float2(plus_c(left, arguments, tile, c[j].x), plus_c(right, arguments, tile, c[j].y));
                        if (mine && to) {
                            to[4 * (from + j)] = both;
                        } else if (mine) {
                            if (n < tile.columns()) store_one(arguments, tile, out_m, n, both.x);
                            if (n + 1 < tile.columns()) store_one(arguments, tile, out_m, n + 1, both.y);
                        }
                    }
                }
            }
    }
};
