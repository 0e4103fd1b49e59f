// Before groups along K are multiplied: each becomes a product of a list (list_memory.cuh), whose K, addresses and
// bounds come from `ends`, which only the device knows. Rows behind a group's last lie outside of its maps, and are
// read as zero. A warp for each group; every block reads all ends up to its own.
//
// 16-bit operands lie row by row of K; fp8 ones with K side by side, and with a scale for each 128 of K, counted from
// the first group's beginning. A group of theirs that shares such a block with another has no right result: it is NaN.
//
// The source that includes this (see k_groups.py) defines KERNEL, ELEMENT_BYTES, and LIMIT, the most groups that there
// may be.
#pragma once
#include "common/k_groups.cuh"
#include "sm90/list_memory.cuh"

struct Arguments {
    char* memory;
    const int* ends;
    u64 a, b, c, out;
    u64 a_pitch, b_pitch;                                 // bytes from line to line
    long long out_group, out_row, c_group, c_row, c_col;  // in elements
    int first, here;                                      // this list's groups
    int total;                                            // rows of A and B
    int m, n, tiles;                                      // of each group's result
    int c_type;
    int out_bytes;  // of an element, and of one of C
    float beta;     // 0: there is no C
};
static_assert(sizeof(Arguments) == 144, "as k_groups.py packs them");

constexpr int WARPS = 4, BLOCK = 128 / ELEMENT_BYTES;  // of K

// A group's part of an operand.
__device__ __forceinline__ void point_at(TensorMap* map, u64 operand, u64 pitch, u32 side, int begin, u32 k) {
    if (ELEMENT_BYTES == 2)
        point(map, operand + begin * pitch, pitch, side, k);
    else
        point(map, operand + begin, pitch, k, side);
}

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
    const int group = arguments.first + line;
    // Scales cannot be told apart within a block: nothing is multiplied there.
    const bool shares = ELEMENT_BYTES == 1 && groups.shares_block(group, BLOCK, arguments.total);
    const int begin = shares ? 0 : groups.begin(group), k = shares ? 0 : groups.rows(group);
    const int which = __reduce_add_sync(~0u, groups.before(group, lane, 32));
    const u64 out = arguments.out + arguments.out_group * group * arguments.out_bytes;
    const u64 out_pitch = arguments.out_row * arguments.out_bytes;
    // At a row's end the copy engine writes whole 16 bytes.
    const bool straight = (out | out_pitch | u64(arguments.n) * arguments.out_bytes) % 16 == 0;
    if (lane == 0) {
        // Maps of nothing are not used, but stay well formed.
        point_at(&maps[0], arguments.a, arguments.a_pitch, arguments.m, begin, max(k, 1));
        point_at(&maps[1], arguments.b, arguments.b_pitch, arguments.n, begin, max(k, 1));
        if (straight) point(&maps[2], out, out_pitch, arguments.n, arguments.m);
    }
    __syncwarp();
    const ListMemory memory{arguments.memory, arguments.here};
#pragma unroll
    for (int i = 0; i < ListMemory::MAPS; ++i) tensormap_cp_fenceproxy(&memory.maps(which)[i], &maps[i]);
    if (lane == 0) {
        if (which == 0) *memory.taken() = 0;
        memory.table()[which] = {(which + 1) * arguments.tiles, arguments.m, arguments.n, (k + BLOCK - 1) / BLOCK};
        memory.endings()[which] = {
            reinterpret_cast<const void*>(arguments.c + arguments.c_group * group * arguments.out_bytes),
            reinterpret_cast<void*>(out),
            arguments.c_row,
            arguments.c_col,
            arguments.out_row,
            shares ? float_of(0x7fc00000) : 1.0f,  // NaN
            arguments.beta,
            arguments.c_type,
            straight,
            begin / BLOCK};
    }
}
