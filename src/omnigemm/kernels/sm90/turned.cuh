// Swapped operands: a tile's rows are columns of D, and they are turned in shared memory on their way out.
#pragma once
#include "sm90/parts.cuh"

struct Turned : Parts {  // of tokens
    static constexpr int QUADS = TILE_ROWS / 4;
    static constexpr bool USES_MAP = false;
    static constexpr int PITCH = TILE_ROWS + 4;  // a row of D, in floats: no bank is written twice at a time
    static_assert(MATH_THREADS == 8 * QUADS, "a thread for each token of a group and four columns");

    static __device__ __forceinline__ void finish() {}
    static constexpr __device__ bool storing_thread() { return false; }

    static __device__ __forceinline__ void store_four(const Arguments& arguments, const Place& tile, int m, int n,
                                                      const float (&v)[4]) {
        const long long at = m * tile.out_stride(arguments) + n;
        constexpr int size = OUT_TYPE == FP32 ? 4 : 2;
        char* target = static_cast<char*>(tile.out(arguments)) + at * size;
        if (n + 4 <= SHAPE_N && reinterpret_cast<u64>(target) % (4 * size) == 0) {
            if constexpr (OUT_TYPE == FP32)
                *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
            else
                *reinterpret_cast<uint2*>(target) = make_uint2(pack_out(v[0], v[1]), pack_out(v[2], v[3]));
        } else {
            for (int i = 0; i < 4 && n + i < SHAPE_N; ++i) store_one(arguments, tile, m, n + i, v[i]);
        }
    }

    // Four sums of a thread: two tokens, of a group's 8, by two columns of D.
    template <class Sum>
    static __device__ __forceinline__ void turn(Sum* turned, const Four<Sum>& v, int group, int row_in_tile) {
        const int token = group * 8 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) turned[(token + j % 2) * PITCH + row_in_tile + j / 2 * 8] = v.of[j];
    }
};
