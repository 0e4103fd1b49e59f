// Before a list of products is multiplied: their tensor maps, and what else the blocks must know of each, written to
// device memory. A warp for each product. Everything comes as kernel parameters, which a CUDA graph keeps, so that no
// host memory must outlive the call; a list that is longer than they can hold takes several launches. Factors and sizes
// may also be numbers in device memory, which are then read when the kernel runs.
#pragma once
#include "sm90/list_memory.cuh"

struct Sizes {
    int m, n, k, tile_end;               // or, if sizes are in device memory, what there is room for
    u32 a_pitch, b_pitch;                // from line to line, in 16 bytes
    int c_type, place;                   // the place in the caller's list
    long long out_stride, c_row, c_col;  // in elements
};

struct Arguments {
    char* memory;
    int count;                                // products of the list
    int first, here;                          // where this launch's begin, and how many it has
    int a_turned, b_turned;                   // K does not lie side by side in memory
    int out_bytes;                            // of an element of D
    int rows_each, cols_each;                 // of D, in a tile or pack
    const float *device_alpha, *device_beta;  // or nullptr: then they are below
    const int* device_sizes;                  // M, N, K of each product of the caller's list, or nullptr
    long long size_row, size_col;             // from one product's to the next one's, and from M to N to K
    int alpha_step, beta_step;                // from one product's to the next one's; 0: one for all
    Sizes sizes[LINES];
    u64 a[LINES], b[LINES], c[LINES], out[LINES];
    float alpha[LINES], beta[LINES];
};
static_assert(sizeof(Sizes) == 56 && sizeof(Arguments) == 88 + 96 * LINES, "as list_setup.py packs them");

constexpr int WARPS = 4;

// What a product's matrices have in use.
__device__ __forceinline__ Extent extent_of(const Arguments& arguments, int line) {
    const Sizes& room = arguments.sizes[line];
    if (!arguments.device_sizes) return {room.m, room.n, room.k};
    const int* given = arguments.device_sizes + room.place * arguments.size_row;
    const long long step = arguments.size_col;
    return {within(given[0], room.m), within(given[step], room.n), within(given[2 * step], room.k)};
}

// Tiles of the products up to this one. What the host does not know, a warp adds up: the products of this launch, after
// those of the launches before it.
__device__ __forceinline__ int tile_end(const Arguments& arguments, const ListMemory& memory, int line, int lane) {
    if (!arguments.device_sizes) return arguments.sizes[line].tile_end;
    int tiles = 0;
    for (int other = lane; other <= line; other += 32) {
        const Extent one = extent_of(arguments, other);
        tiles += packs_of(one.m, one.n, arguments.rows_each, arguments.cols_each);
    }
    const int before = arguments.first > 0 ? memory.table()[arguments.first - 1].tile_end : 0;
    return before + __reduce_add_sync(~0u, tiles);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    KERNEL(const __grid_constant__ TensorMap like_a, const __grid_constant__ TensorMap like_b,
           const __grid_constant__ TensorMap like_out, const __grid_constant__ Arguments arguments) {
    alignas(128) __shared__ TensorMap made[WARPS][ListMemory::MAPS];
    griddepcontrol_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = blockIdx.x * WARPS + warp;
    const bool mine = line < arguments.here;
    TensorMap* maps = made[warp];
    // Sizes on the device may be what an earlier kernel still computes.
    if (arguments.device_sizes) griddepcontrol_wait();
    const Extent has = mine ? extent_of(arguments, line) : Extent{};
    if (mine) {
        const Sizes& sizes = arguments.sizes[line];
        const TensorMap* like[ListMemory::MAPS] = {&like_a, &like_b, &like_out};
#pragma unroll
        for (int i = 0; i < ListMemory::MAPS; ++i)
            reinterpret_cast<u32*>(&maps[i])[lane] = reinterpret_cast<const u32*>(like[i])[lane];
        __syncwarp();
        if (lane == 0) {
            // Maps of nothing are not used, but stay well formed.
            const u32 m = max(has.m, 1), n = max(has.n, 1), k = max(has.k, 1);
            point(&maps[0], arguments.a[line], u64(sizes.a_pitch) * 16, arguments.a_turned ? m : k,
                  arguments.a_turned ? k : m);
            point(&maps[1], arguments.b[line], u64(sizes.b_pitch) * 16, arguments.b_turned ? n : k,
                  arguments.b_turned ? k : n);
        }
    }
    const u64 out = mine ? arguments.out[line] : 0,
              out_pitch = mine ? arguments.sizes[line].out_stride * arguments.out_bytes : 0;
    // At a row's end the copy engine writes whole 16 bytes.
    const bool straight = (out | out_pitch | u64(has.n) * arguments.out_bytes) % 16 == 0;
    if (mine && straight && lane == 0) point(&maps[2], out, out_pitch, max(has.n, 1), max(has.m, 1));
    // The memory may be what an earlier kernel still works with, and factors what it computes.
    griddepcontrol_wait();
    if (!mine) return;
    __syncwarp();
    const ListMemory memory{arguments.memory, arguments.count};
    const int which = arguments.first + line;
#pragma unroll
    for (int i = 0; i < ListMemory::MAPS; ++i) tensormap_cp_fenceproxy(&memory.maps(which)[i], &maps[i]);
    const int end = tile_end(arguments, memory, line, lane);
    if (lane == 0) {
        if (which == 0) *memory.taken() = 0;
        const Sizes& sizes = arguments.sizes[line];
        const long long place = sizes.place;
        const float* alpha = arguments.device_alpha;
        const float* beta = arguments.device_beta;
        memory.table()[which] = {end, has.m, has.n, (has.k + 63) / 64};
        memory.endings()[which] = {reinterpret_cast<const void*>(arguments.c[line]),
                                   reinterpret_cast<void*>(out),
                                   sizes.c_row,
                                   sizes.c_col,
                                   sizes.out_stride,
                                   alpha ? alpha[place * arguments.alpha_step] : arguments.alpha[line],
                                   beta ? beta[place * arguments.beta_step] : arguments.beta[line],
                                   sizes.c_type,
                                   straight};
    }
}
