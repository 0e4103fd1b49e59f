// Before groups along K are multiplied: each becomes a product of a list (list_memory.cuh), whose K, addresses and
// bounds come from `ends`, which only the device knows. Rows behind a group's last lie outside of its maps, and are
// read as zero. A warp for each group; every block reads all ends up to its own.
//
// The source that includes this (see k_groups.py) defines KERNEL, and LIMIT, the most groups that there may be.
#pragma once
#include "common/k_groups.cuh"
#include "sm90/list_memory.cuh"

struct Arguments {
    char* memory;
    const int* ends;
    u64 a, b, c, out;
    u64 a_pitch, b_pitch;                                 // bytes from row to row
    long long out_group, out_row, c_group, c_row, c_col;  // in elements
    int first, here;                                      // this list's groups
    int total;                                            // rows of A and B
    int m, n, tiles;                                      // of each group's result
    int c_type;
    int out_bytes;  // of an element, and of one of C
    float beta;     // 0: there is no C
};
static_assert(sizeof(Arguments) == 144, "as k_groups.py packs them");

constexpr int WARPS = 4;

// The largest of the values of the lanes before.
__device__ __forceinline__ int largest_before(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value = max(value, other);
    }
    value = __shfl_up_sync(~0u, value, 1);
    return lane == 0 ? 0 : value;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    KERNEL(const __grid_constant__ TensorMap like_a, const __grid_constant__ TensorMap like_b,
           const __grid_constant__ TensorMap like_out, const __grid_constant__ Arguments arguments) {
    alignas(128) __shared__ TensorMap made[WARPS][ListMemory::MAPS];
    __shared__ int ends[LIMIT];
    griddepcontrol_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = blockIdx.x * WARPS + warp;
    const int known = arguments.first + arguments.here;
    TensorMap* maps = made[warp];
    const TensorMap* like[ListMemory::MAPS] = {&like_a, &like_b, &like_out};
#pragma unroll
    for (int i = 0; i < ListMemory::MAPS; ++i)
        reinterpret_cast<u32*>(&maps[i])[lane] = reinterpret_cast<const u32*>(like[i])[lane];
    // The ends may be what an earlier kernel still writes, and the memory what it still works with.
    griddepcontrol_wait();
    for (int g = threadIdx.x; g < known; g += 32 * WARPS) ends[g] = arguments.ends[g];
    __syncthreads();
    // What lies outside 0 .. total, or before the group's predecessor, is taken as the nearest that does not.
    const Groups given{ends, 1, known, arguments.total, 1, 1, false};
    int row = largest_before(given.last_end(lane, 32), lane);
    __syncthreads();
    if (warp == 0)
        for (int g = given.from(lane, 32); g < given.from(lane + 1, 32); ++g) ends[g] = row = given.end(g, row);
    __syncthreads();
    if (line >= arguments.here) return;

    const KGroups groups{ends, arguments.first, arguments.here};
    const int group = arguments.first + line, begin = groups.begin(group), k = groups.rows(group);
    const int which = __reduce_add_sync(~0u, groups.before(group, lane, 32));
    const u64 out = arguments.out + arguments.out_group * group * arguments.out_bytes;
    const u64 out_pitch = arguments.out_row * arguments.out_bytes;
    // At a row's end the copy engine writes whole 16 bytes.
    const bool straight = arguments.out_bytes == 2 && (out | out_pitch | u64(arguments.n * 2)) % 16 == 0;
    if (lane == 0) {
        // Maps of nothing are not used, but stay well formed.
        const u32 m = arguments.m, n = arguments.n, rows = max(k, 1);
        point(&maps[0], arguments.a + begin * arguments.a_pitch, arguments.a_pitch, m, rows);
        point(&maps[1], arguments.b + begin * arguments.b_pitch, arguments.b_pitch, n, rows);
        if (straight) point(&maps[2], out, out_pitch, n, m);
    }
    __syncwarp();
    const ListMemory memory{arguments.memory, arguments.here};
#pragma unroll
    for (int i = 0; i < ListMemory::MAPS; ++i) tensormap_cp_fenceproxy(&memory.maps(which)[i], &maps[i]);
    if (lane == 0) {
        memory.table()[which] = {(which + 1) * arguments.tiles, arguments.m, arguments.n, (k + 63) / 64};
        memory.endings()[which] = {
            reinterpret_cast<const void*>(arguments.c + arguments.c_group * group * arguments.out_bytes),
            reinterpret_cast<void*>(out),
            arguments.c_row,
            arguments.c_col,
            arguments.out_row,
            1.0f,
            arguments.beta,
            arguments.c_type,
            straight};
    }
}
