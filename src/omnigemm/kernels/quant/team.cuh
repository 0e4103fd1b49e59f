// What threads find out together: spans and sums, over some lanes of a warp or over a block. Sums have a fixed order.
#pragma once
#include "common/ptx.cuh"
#include "quant/codec.cuh"

// The next kernel may be set up from here on. Older GPUs run kernels one after the other.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    griddepcontrol_launch_dependents();
#endif
}

// What the kernels before wrote may be read from here on.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    griddepcontrol_wait();
#endif
}

// In most kernels the first thing, before they touch memory.
__device__ __forceinline__ void join_queue() {
    let_next_start();
    wait_for_previous();
}

// Over the lanes of a warp, or over some of them that lie side by side.
template <int lanes, typename Integer>
__device__ __forceinline__ Integer largest(Integer value) {
#if __CUDA_ARCH__ >= 800
    if constexpr (lanes == 32) return __reduce_max_sync(~0u, value);
#endif
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) {
        const Integer other = __shfl_xor_sync(~0u, value, step);
        value = other > value ? other : value;
    }
    return value;
}

template <Codec codec, int lanes>
__device__ __forceinline__ Span over_lanes(Span span) {
    if constexpr (codec == INT8_ZERO) {
        span.high = largest<lanes>(span.high);
        span.low = largest<lanes>(span.low);
    } else {
        span.magnitude = largest<lanes>(span.magnitude);
    }
    return span;
}

// One for each warp. A block must not use the same ones twice.
struct Spans {
    u32 magnitude[32], low[32];
    int high[32];
};

template <Codec codec>
__device__ __forceinline__ Span over_block(Span span, Spans& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    span = over_lanes<codec, 32>(span);
    if (lane == 0) {
        if constexpr (codec == INT8_ZERO)
            shared.high[warp] = span.high, shared.low[warp] = span.low;
        else
            shared.magnitude[warp] = span.magnitude;
    }
    __syncthreads();
    span = Span();
    if (lane < warps) {
        if constexpr (codec == INT8_ZERO)
            span.high = shared.high[lane], span.low = shared.low[lane];
        else
            span.magnitude = shared.magnitude[lane];
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
