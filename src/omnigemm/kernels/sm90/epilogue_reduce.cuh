// Swapped operands: a tile's rows are columns of D. The sums are laid out anew in shared memory; if K was split, the
// blocks of the cluster each add a part of the tile over all of them, always in the same order.
#pragma once
#include "sm90/epilogue.cuh"

struct Epilogue {
    static_assert(WAVES == 1, "64 columns of D for each math group");
    static constexpr int MATH_THREADS = 128 * MATH_GROUPS, QUADS = TILE_ROWS / 4;
    static constexpr bool USES_MAP = false;
    static constexpr int BYTES = 0;              // takes the place of the stages: a block has one tile only
    static constexpr int PITCH = TILE_ROWS + 4;  // of a row of D, in floats: no bank is written twice at a time
    static_assert(TILE_COLS * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums fit where the stages were");

    static __device__ __forceinline__ void finish() {}

    static __device__ __forceinline__ void store_four(const Arguments& arguments, int m, int n, const float (&v)[4]) {
        const long long at = m * arguments.out_stride + n;
        constexpr int size = OUT_TYPE == FP32 ? 4 : 2;
        char* target = static_cast<char*>(arguments.out) + at * size;
        if (n + 4 <= SHAPE_N && reinterpret_cast<u64>(target) % (4 * size) == 0) {
            if constexpr (OUT_TYPE == FP32)
                *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
            else
                *reinterpret_cast<uint2*>(target) = make_uint2(pack_out(v[0], v[1]), pack_out(v[2], v[3]));
        } else {
            for (int i = 0; i < 4 && n + i < SHAPE_N; ++i) store_one(arguments, m, n + i, v[i]);
        }
    }

    template <int waves, int regs>
    static __device__ __forceinline__ void store(const float (&sums)[waves][regs], char*, char* stages,
                                                 const TensorMap*, const Arguments& arguments, int, const Tile& tile,
                                                 int row_in_tile) {
        float* mine = reinterpret_cast<float*>(stages);
        const int lane = threadIdx.x % 32;
        named_barrier_sync(1, MATH_THREADS);  // the last products are read
#pragma unroll
        for (int j = 0; j < regs; ++j)
            mine[(j / 4 * 8 + lane % 4 * 2 + j % 2) * PITCH + row_in_tile + j / 2 % 2 * 8] = sums[0][j];
        if constexpr (SPLIT > 1)
            cluster_sync();
        else
            named_barrier_sync(1, MATH_THREADS);

        const int rank = CLUSTER > 1 ? cluster_ctarank() : 0, share_rank = rank % SHARE, split_rank = rank / SHARE;
        const int rows = min(TILE_COLS, arguments.shape_m - tile.col * TILE_COLS);
        for (int i = split_rank * MATH_THREADS + threadIdx.x; i < rows * QUADS; i += SPLIT * MATH_THREADS) {
            const int row = i / QUADS, col = i % QUADS * 4;
            const int m = tile.col * TILE_COLS + row, n = tile.row * TILE_ROWS + col;
            if (n >= SHAPE_N) continue;
            const float* from = mine + row * PITCH + col;
            float4 parts[SPLIT];
#pragma unroll
            for (int s = 0; s < SPLIT; ++s)
                parts[s] = SPLIT > 1 ? ld_shared_cluster_v4(mapa(from, s * SHARE + share_rank))
                                     : *reinterpret_cast<const float4*>(from);
            float v[4] = {};
#pragma unroll
            for (int s = 0; s < SPLIT; ++s) {
                v[0] += parts[s].x;
                v[1] += parts[s].y;
                v[2] += parts[s].z;
                v[3] += parts[s].w;
            }
            const float token = row_scale(arguments, m);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = min(n + j, SHAPE_N - 1);
                v[j] = finished(v[j], token, col_scale(arguments, at), bias_at(arguments, at));
            }
            store_four(arguments, m, n, v);
        }
    }
};
