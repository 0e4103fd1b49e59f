// x / sqrt(mean(x^2) + epsilon) * weight, in fp32, of a row; x may first be added to a residual, which is written back.
#pragma once
#include "quant/computed.cuh"

struct Source {
    static constexpr bool KEEPS_ROW = EACH > 0;
    const char *x, *weight;
    char* residual;
    const Share& share;
    float reciprocal;
    Vector rows[HELD], weights[HELD];  // of this thread, where EACH says how many

    __device__ __forceinline__ Source(const Arguments& arguments, const Share& share)
        : x(arguments.x + share.row * arguments.pitch), weight(arguments.weight), share(share) {
        __shared__ float sums[32];
        residual = arguments.residual;
        if (residual != nullptr) residual += share.row * arguments.residual_pitch;
        float sum = 0.0f;
        share.each([&](int j) {
            const Vector v = first_read(j);
            if constexpr (EACH > 0) {
                rows[j] = v;
                weights[j] = load_vector(weight, share.first(j), share.k);
            }
#pragma unroll
            for (int i = 0; i < VALUES; ++i) sum = fma_of(v.value(i), v.value(i), sum);
        });
        sum = WARP_ROWS ? sum_over_warp(sum) : sum_over_block(sum, sums);
        // Squares that overflow would make every value a quiet 0.
        const bool fine = bits_of(sum) < INFINITE;
        reciprocal = fine ? 1.0f / sqrtf(sum / float(share.k) + arguments.epsilon) : float_of(0x7fc00000);
    }

    __device__ __forceinline__ Vector first_read(int j) const {
        const int first = share.first(j);
        const Vector v = load_vector(x, first, share.k);
        if (residual == nullptr) return v;
        const Vector other = load_vector(residual, first, share.k);
        Vector sum;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sum.set(i, v.value(i) + other.value(i));
        store_vector(residual, first, share.k, sum);
        return sum;
    }

    __device__ __forceinline__ Piece piece(int j) const {
        const int first = share.first(j);
        Vector v, w;
        if constexpr (EACH > 0) {
            v = rows[j], w = weights[j];
        } else {
            // The sum is there by now, written by this very thread.
            v = load_vector(residual != nullptr ? residual : x, first, share.k);
            w = load_vector(weight, first, share.k);
        }
        Piece piece;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const float normal = v.value(i) * reciprocal * w.value(i);
            // Past the end there are zeros, whatever the reciprocal is.
            piece.values[i] = first + i < share.k ? normal : 0.0f;
        }
        return piece;
    }
};
