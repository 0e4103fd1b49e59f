// Swapped operands, one tile for a block.
#pragma once
#include "sm90/turned.cuh"

struct Epilogue : Turned {
    // A thread finishes four columns of D, of one token in each group that the block owns.
    struct Ahead {
        // Where there are registers for it, read before the products; else before the sums are sent.
        static constexpr bool EARLY = OWNED <= 4;
        float col_scales[4], biases[4];
        int totals[4];
        Row rows[OWNED];

        __device__ __forceinline__ Ahead(const Arguments& arguments, const Place& tile, int) {
            if constexpr (EARLY) read(arguments, tile);
        }
        __device__ __forceinline__ void read(const Arguments& arguments, const Place& tile) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int n = min(first_col(tile) + j, SHAPE_N - 1);
                col_scales[j] = col_scale(arguments, tile, n);
                biases[j] = bias_at(arguments, n);
                totals[j] = col_total(arguments, tile, n);
            }
#pragma unroll
            for (int i = 0; i < OWNED; ++i) {
                const int m = min(first_row(tile) + i * 8, arguments.shape_m - 1);
                rows[i] = row_of(arguments, tile, tile.a_scale_row(arguments) + m);
            }
        }
    };
    static __device__ __forceinline__ int first_col(const Place& tile) {
        return tile.row * TILE_ROWS + threadIdx.x % QUADS * 4;
    }
    static __device__ __forceinline__ int first_row(const Place& tile) {
        return tile.col * TILE_COLS + first_group(rank()) * 8 + threadIdx.x / QUADS;
    }

    // Turned rows take the place of the stages, for a block has one tile only.
    static_assert(OWNED * 8 * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums fit where the stages were");

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], Ahead& ahead, char* parts,
                                                 char* stages, u64* arrived, const TensorMap*,
                                                 const Arguments& arguments, int, const Place& tile, int row_in_tile) {
        Sum* turned = reinterpret_cast<Sum*>(stages);
        if constexpr (!Ahead::EARLY) ahead.read(arguments, tile);
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

        const int in_group = threadIdx.x / QUADS, col = threadIdx.x % QUADS * 4, n = first_col(tile);
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const int m = first_row(tile) + i * 8;
            if (i >= owned() || m >= arguments.shape_m || n >= SHAPE_N) continue;
            const Four<Sum> sum = *reinterpret_cast<const Four<Sum>*>(turned + (i * 8 + in_group) * PITCH + col);
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[j] = with_c(finished(sum.of[j], ahead.rows[i], ahead.col_scales[j], ahead.biases[j], ahead.totals[j]),
                              arguments, tile, m, n + j);
            store_four(arguments, tile, m, n, v);
        }
    }
};
