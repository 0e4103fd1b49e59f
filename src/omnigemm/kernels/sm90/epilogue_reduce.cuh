// Swapped operands, one tile for a block. If K was split, the blocks of the cluster have a part of the sums each. The
// tile's tokens are dealt out to them in groups of 8, everyone sends its part of a group to the block that owns it, and
// the owner adds the parts, always in the same order.
#pragma once
#include "sm90/turned.cuh"

struct Epilogue : Turned {
    static constexpr int OWNED = (GROUPS + SPLIT - 1) / SPLIT;        // the most that a block has
    static constexpr int PART_BYTES = MATH_THREADS * sizeof(float4);  // of a group, as the threads have it
    static constexpr int BYTES = SPLIT > 1 ? OWNED * SPLIT * PART_BYTES : 0;
    // Turned rows take the place of the stages, for a block has one tile only.
    static_assert(OWNED * 8 * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums fit where the stages were");

    static __device__ __forceinline__ int split_rank() { return SPLIT > 1 ? cluster_ctarank() / SHARE : 0; }

    // By one thread, before anybody sends.
    static __device__ __forceinline__ void init(u64* arrived) {
        if constexpr (SPLIT > 1) {
            const int owned = (GROUPS + SPLIT - 1 - split_rank()) / SPLIT;
            mbarrier_init(arrived, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(arrived, owned * SPLIT * PART_BYTES);
        }
    }

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], char* parts, char* stages,
                                                 u64* arrived, const TensorMap*, const Arguments& arguments, int,
                                                 const Place& tile, int row_in_tile) {
        Sum* turned = reinterpret_cast<Sum*>(stages);
        const int mine = split_rank();
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
            totals[j] = col_total(arguments, min(n + j, SHAPE_N - 1));
        }
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const int m = tile.col * TILE_COLS + (i * SPLIT + mine) * 8 + in_group;
            rows[i] = row_of(arguments, min(m, arguments.shape_m - 1));
        }
        if constexpr (SPLIT > 1) {
            const int neighbours = cluster_ctarank() - mine * SHARE;
            if constexpr (SHARE == 1) cluster_wait();  // everyone is ready to receive
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const char* place = parts + (group / SPLIT * SPLIT + mine) * PART_BYTES + threadIdx.x * sizeof(float4);
                const int owner = neighbours + group % SPLIT * SHARE;
                const Sum* v = sums[0] + 4 * group;
                st_async_v4(mapa(place, owner), bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3]), mapa(arrived, owner));
            }
        }
        named_barrier_sync(1, MATH_THREADS);  // the last products are read
        if constexpr (SPLIT > 1) {
            mbarrier_wait(arrived, 0);
#pragma unroll
            for (int i = 0; i < OWNED; ++i) {
                if (i * SPLIT + mine >= GROUPS) break;
                Sum sum[4] = {};
#pragma unroll
                for (int part = 0; part < SPLIT; ++part) {
                    const Four<Sum> v = *reinterpret_cast<const Four<Sum>*>(parts + (i * SPLIT + part) * PART_BYTES +
                                                                            threadIdx.x * sizeof(float4));
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[j] += v.of[j];
                }
                turn(turned, sum, i, row_in_tile);
            }
        } else {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
                turn(turned,
                     {sums[0][4 * group], sums[0][4 * group + 1], sums[0][4 * group + 2], sums[0][4 * group + 3]},
                     group, row_in_tile);
        }
        named_barrier_sync(1, MATH_THREADS);

#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const int token = (i * SPLIT + mine) * 8 + in_group, m = tile.col * TILE_COLS + token;
            if (token >= TILE_COLS || m >= arguments.shape_m || n >= SHAPE_N) continue;
            const Four<Sum> sum = *reinterpret_cast<const Four<Sum>*>(turned + (i * 8 + in_group) * PITCH + col);
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v[j] = with_c(finished(sum.of[j], rows[i], col_scales[j], biases[j], totals[j]), arguments, m, n + j);
            store_four(arguments, m, n, v);
        }
    }
};
