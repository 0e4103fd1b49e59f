// Swapped operands, one tile for a block.
#pragma once
#include "sm90/turned.cuh"

struct Epilogue : Turned {
    // Turned rows take the place of the stages, for a block has one tile only.
    static_assert(OWNED * 8 * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums fit where the stages were");

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], const Ahead&, char* parts,
                                                 char* stages, u64* arrived, const TensorMap*,
                                                 const Arguments& arguments, int, const Place& tile, int row_in_tile) {
        Sum* turned = reinterpret_cast<Sum*>(stages);
        const int first_token = first_group(rank()) * 8;
        // A thread finishes four columns of D, of one token in each group. Scales and bias are read now, for they take
        // as long to come as the others' sums.
        const int in_group = threadIdx.x / QUADS, col = threadIdx.x % QUADS * 4, n = tile.row * TILE_ROWS + col;
        float col_scales[4], biases[4];
        int totals[4];
        Row rows[OWNED];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            col_scales[j] = col_scale(arguments, tile, min(n + j, SHAPE_N - 1));
            biases[j] = bias_at(arguments, min(n + j, SHAPE_N - 1));
            totals[j] = col_total(arguments, tile, min(n + j, SHAPE_N - 1));
        }
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const int m = tile.col * TILE_COLS + first_token + i * 8 + in_group;
            rows[i] = row_of(arguments, tile, tile.a_scale_row(arguments) + min(m, arguments.shape_m - 1));
        }
        if constexpr (SPLIT > 1) send(sums[0], parts, arrived);
        named_barrier_sync(1, MATH_THREADS);  // the last products are read
        if constexpr (SPLIT > 1) {
            mbarrier_wait(arrived, 0);
#pragma unroll
            for (int i = 0; i < OWNED; ++i) {
                if (i >= owned()) break;
                turn(turned, added<Sum>(parts, i), i, row_in_tile);
            }
        } else {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const Sum* v = sums[0] + 4 * group;
                turn(turned, Four<Sum>{v[0], v[1], v[2], v[3]}, group, row_in_tile);
            }
        }
        named_barrier_sync(1, MATH_THREADS);

#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const int m = tile.col * TILE_COLS + first_token + i * 8 + in_group;
            if (i >= owned() || m >= arguments.shape_m || n >= SHAPE_N) continue;
            const Four<Sum> sum = *reinterpret_cast<const Four<Sum>*>(turned + (i * 8 + in_group) * PITCH + col);
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[j] = with_c(finished(sum.of[j], rows[i], col_scales[j], biases[j], totals[j]), arguments, tile, m,
                              n + j);
            store_four(arguments, tile, m, n, v);
        }
    }
};
