// Swapped operands, many tiles for a block: the stages already hold the next one's operands, so some tokens at a time
// are turned in memory of their own.
#pragma once
#include "sm90/turned.cuh"

struct Epilogue : Turned {
    // What sums are finished with is read some tokens at a time, while the next tile's operands come.
    struct Ahead {
        __device__ __forceinline__ Ahead(const Arguments&, const Place&, int) {}
    };
    static constexpr int AT_ONCE = GROUPS < 4 ? GROUPS : 4;
    static constexpr int BYTES = (AT_ONCE * 8 * PITCH * 4 + 1023) / 1024 * 1024;

    static __device__ __forceinline__ void init(u64*) {}

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], const Ahead&, char* memory, char*,
                                                 u64*, const TensorMap*, const Arguments& arguments, int,
                                                 const Place& tile, int row_in_tile) {
        Sum* turned = reinterpret_cast<Sum*>(memory);
        // A thread finishes four columns of D, of one token in each group.
        const int in_group = threadIdx.x / QUADS, col = threadIdx.x % QUADS * 4, n = tile.row * TILE_ROWS + col;
        const int first = tile.col * TILE_COLS, rows = tile.rows(arguments);
        float col_scales[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) col_scales[j] = col_scale(arguments, tile, min(n + j, SHAPE_N - 1));
#pragma unroll
        for (int from = 0; from < GROUPS; from += AT_ONCE) {
            if (first + from * 8 >= rows) break;
            Row scales[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int m = first + (from + i) * 8 + in_group;
                scales[i] = row_of(arguments, tile, tile.a_scale_row(arguments) + min(m, rows - 1));
            }
            named_barrier_sync(1, MATH_THREADS);  // what was there before is read
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (from + i >= GROUPS) break;
                const Sum* v = sums[0] + 4 * (from + i);
                turn(turned, {v[0], v[1], v[2], v[3]}, i, row_in_tile);
            }
            named_barrier_sync(1, MATH_THREADS);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int m = first + (from + i) * 8 + in_group;
                if (from + i >= GROUPS || m >= rows || n >= SHAPE_N) continue;
                const Four<Sum> sum = *reinterpret_cast<const Four<Sum>*>(turned + (i * 8 + in_group) * PITCH + col);
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] = finished(sum.of[j], scales[i], col_scales[j], 0.0f, 0);
                store_four(arguments, tile, tile.out_row(arguments) + m, n, v);
            }
        }
    }
};
