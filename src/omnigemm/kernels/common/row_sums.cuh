// The sums of an int8 matrix's rows, which zero points of the other operand are multiplied with. A warp for each row.
#pragma once
#include "common/ptx.cuh"

struct Arguments {
    const signed char* matrix;
    int* sums;
    long long pitch;  // bytes from row to row
    int rows, columns;
};

extern "C" __global__ void __launch_bounds__(256) KERNEL(const __grid_constant__ Arguments arguments) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= arguments.rows) return;
    const signed char* from = arguments.matrix + row * arguments.pitch;
    // Up to the first multiple of 16 bytes and after the last one, one by one.
    const int head = min(static_cast<int>(-reinterpret_cast<u64>(from) & 15), arguments.columns);
    const int wide = (arguments.columns - head) / 16, tail = head + wide * 16;
    int sum = 0;
    if (lane < head) sum += from[lane];
    for (int i = lane; i < wide; i += 32) {
        const int4 sixteen = __ldg(reinterpret_cast<const int4*>(from + head) + i);
        sum = __dp4a(sixteen.x, 0x01010101, sum);
        sum = __dp4a(sixteen.y, 0x01010101, sum);
        sum = __dp4a(sixteen.z, 0x01010101, sum);
        sum = __dp4a(sixteen.w, 0x01010101, sum);
    }
    if (tail + lane < arguments.columns) sum += from[tail + lane];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) arguments.sums[row] = sum;
}
