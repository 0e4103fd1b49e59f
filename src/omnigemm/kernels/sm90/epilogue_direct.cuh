// Straight from the registers, for fp32 results and for rows that the copy engine cannot address.
#pragma once
#include "sm90/epilogue.cuh"

struct Epilogue {
    static constexpr bool USES_MAP = false;
    static constexpr int BYTES = 0;

    static __device__ __forceinline__ void init(u64*) {}
    static __device__ __forceinline__ void finish() {}

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
                const Row row = row_of(arguments, tile.a_scale_row(arguments) + min(m, tile.rows(arguments) - 1));
#pragma unroll
                for (int j = 0; j < regs / 4; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int n = first_col + 8 * j + offset + i;
                        // All lanes take part in the shuffles, also those with nothing to write.
                        const float value = columns.finish(sums[wave][4 * j + 2 * half + i], row, 8 * j, offset + i);
                        if (m < tile.rows(arguments) && n < SHAPE_N)
                            store_one(arguments, tile.out_row(arguments) + m, n, with_c(value, arguments, m, n));
                    }
            }
    }
};
