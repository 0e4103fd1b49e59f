// Before a list of products is multiplied: their tensor maps, and what else the blocks must know of each, written to
// device memory. A warp for each product. Everything comes as kernel parameters, which a CUDA graph keeps, so that no
// host memory must outlive the call; a list that is longer than they can hold takes several launches. Factors may also
// be numbers in device memory, which are then read when the kernel runs.
#pragma once
#include "sm90/list_memory.cuh"

struct Sizes {
    int m, n, k, tile_end;
    u32 a_pitch, b_pitch;                // from line to line, in 16 bytes
    int c_type, place;                   // the place in the caller's list
    long long out_stride, c_row, c_col;  // in elements
};

struct Arguments {
    char* memory;
    int count;               // products of the list
    int first, here;         // where this launch's begin, and how many it has
    int a_turned, b_turned;  // K does not lie side by side in memory
    int out_by_tma;
    const float *device_alpha, *device_beta;  // or nullptr: then they are below
    int alpha_step, beta_step;                // from one product's to the next one's; 0: one for all
    Sizes sizes[LINES];
    u64 a[LINES], b[LINES], c[LINES], out[LINES];
    float alpha[LINES], beta[LINES];
};
static_assert(sizeof(Sizes) == 56 && sizeof(Arguments) == 56 + 96 * LINES, "as list_setup.py packs them");

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    KERNEL(const __grid_constant__ TensorMap like_a, const __grid_constant__ TensorMap like_b,
           const __grid_constant__ TensorMap like_out, const __grid_constant__ Arguments arguments) {
    __shared__ alignas(128) TensorMap made[WARPS][ListMemory::MAPS];
    griddepcontrol_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = blockIdx.x * WARPS + warp;
    const bool mine = line < arguments.here;
    TensorMap* maps = made[warp];
    if (mine) {
        const Sizes& sizes = arguments.sizes[line];
        const TensorMap* like[ListMemory::MAPS] = {&like_a, &like_b, &like_out};
#pragma unroll
        for (int i = 0; i < ListMemory::MAPS; ++i)
            reinterpret_cast<u32*>(&maps[i])[lane] = reinterpret_cast<const u32*>(like[i])[lane];
        __syncwarp();
        if (lane == 0) {
            // Maps of nothing are not used, but stay well formed.
            const u32 m = sizes.m, n = sizes.n, k = max(sizes.k, 1);
            point(&maps[0], arguments.a[line], u64(sizes.a_pitch) * 16, arguments.a_turned ? m : k,
                  arguments.a_turned ? k : m);
            point(&maps[1], arguments.b[line], u64(sizes.b_pitch) * 16, arguments.b_turned ? n : k,
                  arguments.b_turned ? k : n);
        }
    }
    const u64 out = mine ? arguments.out[line] : 0, out_pitch = mine ? arguments.sizes[line].out_stride * 2 : 0;
    // At a row's end the copy engine writes whole 16 bytes.
    const bool straight =
        arguments.out_by_tma && (out | out_pitch | u64(mine ? arguments.sizes[line].n * 2 : 0)) % 16 == 0;
    if (mine && straight && lane == 0)
        point(&maps[2], out, out_pitch, arguments.sizes[line].n, arguments.sizes[line].m);
    // The memory may be what an earlier kernel still works with, and factors what it computes.
    griddepcontrol_wait();
    if (!mine) return;
    __syncwarp();
    const ListMemory memory{arguments.memory, arguments.count};
    const int which = arguments.first + line;
#pragma unroll
    for (int i = 0; i < ListMemory::MAPS; ++i) tensormap_cp_fenceproxy(&memory.maps(which)[i], &maps[i]);
    if (lane == 0) {
        if (which == 0) *memory.taken() = 0;
        const Sizes& sizes = arguments.sizes[line];
        const long long place = sizes.place;
        const float* alpha = arguments.device_alpha;
        const float* beta = arguments.device_beta;
        memory.table()[which] = {sizes.tile_end, sizes.m, sizes.n, (sizes.k + 63) / 64};
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
