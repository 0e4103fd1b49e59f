// What threads find out together: spans and sums, over some lanes of a warp or over a block. Sums have a fixed order.
#pragma once
#include "common/ptx.cuh"
#include "quant/codec.cuh"

// The next kernel may be set up from here on, and what the one before wrote may be read: in every kernel the first
// thing, before it touches memory. Older GPUs run kernels one after the other.
__device__ __forceinline__ void join_queue() {
#if __CUDA_ARCH__ >= 900
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
#endif
}

template <Codec codec, int lanes>
__device__ __forceinline__ Span over_lanes(Span span) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) {
        Span other;
        other.magnitude = __shfl_xor_sync(~0u, span.magnitude, step);
        if constexpr (codec == INT8_ZERO) {
            other.high = __shfl_xor_sync(~0u, span.high, step);
            other.low = __shfl_xor_sync(~0u, span.low, step);
        }
        span.include<codec>(other);
    }
    return span;
}

// One for each warp. A block must not use the same ones twice.
struct Spans {
    u32 magnitude[32];
    float high[32], low[32];
};

template <Codec codec>
__device__ __forceinline__ Span over_block(Span span, Spans& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    span = over_lanes<codec, 32>(span);
    if (lane == 0) {
        shared.magnitude[warp] = span.magnitude;
        if constexpr (codec == INT8_ZERO) shared.high[warp] = span.high, shared.low[warp] = span.low;
    }
    __syncthreads();
    span = Span();
    if (lane < warps) {
        span.magnitude = shared.magnitude[lane];
        if constexpr (codec == INT8_ZERO) span.high = shared.high[lane], span.low = shared.low[lane];
    }
    return over_lanes<codec, 32>(span);
}

__device__ __forceinline__ float sum_over_warp(float sum) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

__device__ __forceinline__ float sum_over_block(float sum, float (&shared)[32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    sum = sum_over_warp(sum);
    if (lane == 0) shared[warp] = sum;
    __syncthreads();
    return sum_over_warp(lane < warps ? shared[lane] : 0.0f);
}
