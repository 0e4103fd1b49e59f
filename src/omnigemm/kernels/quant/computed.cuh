// As many values as a vector has, in fp32: computed, and too dear to be computed twice.
#pragma once

struct Piece {
    float values[VALUES];

    __device__ __forceinline__ float value(int i) const { return values[i]; }
    template <Codec codec>
    __device__ __forceinline__ void measure(Span& span) const {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) span.include<codec>(values[i]);
    }
};
