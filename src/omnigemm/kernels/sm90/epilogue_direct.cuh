// Straight from the registers, for fp32 results and for rows that the copy engine cannot address.
#pragma once
#include "sm90/epilogue.cuh"

struct Epilogue {
    static constexpr bool USES_MAP = false;
    static constexpr int BYTES = 0;
    static constexpr int AT_ONCE = 8;  // pairs of columns

    static __device__ __forceinline__ void init(u64*) {}
    static __device__ __forceinline__ void finish() {}
    static constexpr __device__ bool storing_thread() { return false; }

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], char*, char*, u64*, const TensorMap*,
                                                 const Arguments& arguments, int, const Place& tile, int row_in_tile) {
        const int first_col = tile.col * TILE_COLS, offset = threadIdx.x % 4 * 2;
        const Columns columns(arguments, tile, first_col);
#pragma unroll
        for (int wave = 0; wave < waves; ++wave)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = tile.row * TILE_ROWS + row_in_tile + wave * WAVE_ROWS + half * 8;
                const Row row = row_of(arguments, tile, tile.a_scale_row(arguments) + min(m, tile.rows(arguments) - 1));
#pragma unroll
                for (int from = 0; from < regs / 4; from += AT_ONCE) {
                    // C may be D itself, and what is read after a write has to wait for it: so some are read before.
                    float2 c[AT_ONCE];
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j)
                        c[j] = two_of_c(arguments, tile, m, first_col + 8 * (from + j) + offset);
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j) {
                        if (from + j >= regs / 4) break;
                        const int eight = 8 * (from + j);
                        const Sum* v = sums[wave] + 4 * (from + j) + 2 * half;
                        // All lanes take part in the shuffles, also those with nothing to write.
                        const float left = columns.finish(v[0], row, eight, offset);
                        const float right = columns.finish(v[1], row, eight, offset + 1);
                        if (m < tile.rows(arguments))
                            store_two(arguments, tile, tile.out_row(arguments) + m, first_col + eight + offset,
                                      make_float2(plus_c(left, arguments, tile, c[j].x),
                                                  plus_c(right, arguments, tile, c[j].y)));
                    }
                }
            }
    }
};
