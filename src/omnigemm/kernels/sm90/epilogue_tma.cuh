// Sums to bf16, through shared memory, out by the copy engine, which runs on while the next tile is multiplied.
#pragma once
#include "common/ptx.cuh"

struct TmaEpilogue {
    static constexpr int SLAB = 64;  // columns of bf16 in the 128 bytes that one swizzled row holds
    static constexpr int SLAB_BYTES = BLOCK_M * SLAB * 2;
    static constexpr int BYTES = BLOCK_N / SLAB * SLAB_BYTES;
    static_assert(BLOCK_N % SLAB == 0, "a tile is whole slabs");

    static __device__ __forceinline__ bool storing_thread() { return threadIdx.x % 128 == 0; }

    static __device__ __forceinline__ void wait_until_read() {
        if (storing_thread()) bulk_wait_group_read<0>();
    }

    template <int halves, int regs>
    static __device__ __forceinline__ void store(const float (&sum)[halves][regs], char* out, const TensorMap* map,
                                                 int math_group, int first_row, int first_column) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int row = math_group * 64 + warp * 16 + lane % 16;
        wait_until_read();
        named_barrier_sync(1 + math_group, 128);
#pragma unroll
        for (int j = 0; j < BLOCK_N / 16; ++j) {
            constexpr int PER_HALF = regs / 8;
            const float* v = sum[j / PER_HALF] + 8 * (j % PER_HALF);
            const int chunk = j % 4 * 2 + lane / 16;  // of 16 bytes; swizzled as TMA expects
            char* target = out + j / 4 * SLAB_BYTES + row * 128 + ((chunk ^ row % 8) * 16);
            stmatrix_x4(target, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                        pack_bf16(v[6], v[7]));
        }
        fence_proxy_async();
        named_barrier_sync(1 + math_group, 128);
        if (storing_thread()) {
#pragma unroll
            for (int slab = 0; slab < BLOCK_N / SLAB; ++slab)
                tma_store_2d(map, out + slab * SLAB_BYTES + math_group * 64 * 128, first_column + slab * SLAB,
                             first_row + math_group * 64);
            bulk_commit_group();
        }
    }
};
