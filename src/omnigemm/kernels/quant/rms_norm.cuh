// x / sqrt(mean(x^2) + epsilon) * weight, in fp32, of a row. With RESIDUAL, x is first added to the row of that name,
// which then holds the sum.
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
        : x(arguments.x + share.row * arguments.pitch),
          weight(arguments.weight),
          residual(arguments.residual + share.row * arguments.residual_pitch),
          share(share) {
        if constexpr (EACH > 0)
            if (arguments.early) load_weights();
    }
    __device__ __forceinline__ void load_weights() {
        share.each([&](int j) { weights[j] = load_vector(weight, share.first(j), share.k); });
    }

    // What kernels before wrote may be read from here on.
    __device__ __forceinline__ void begin(const Arguments& arguments) {
        __shared__ float sums[32];
        float sum = 0.0f;
        if constexpr (EACH > 0) {
            // Everything is on its way before the first sum is written: what is read after that waits for it.
            Vector added[HELD];
            share.each([&](int j) { rows[j] = load_vector(x, share.first(j), share.k); });
            if constexpr (RESIDUAL)
                share.each([&](int j) { added[j] = load_vector(residual, share.first(j), share.k); });
            if (!arguments.early) load_weights();
            share.each([&](int j) {
                if constexpr (RESIDUAL) rows[j] = write_total(j, rows[j], added[j]);
                sum += squares(rows[j]);
            });
        } else {
            share.each([&](int j) {
                Vector v = load_vector(x, share.first(j), share.k);
                if constexpr (RESIDUAL) v = write_total(j, v, load_vector(residual, share.first(j), share.k));
                sum += squares(v);
            });
        }
        sum = WARP_ROWS ? sum_over_warp(sum) : sum_over_block(sum, sums);
        // Squares that overflow would make every value a quiet 0.
        const bool fine = bits_of(sum) < INFINITE;
        reciprocal = fine ? 1.0f / sqrtf(sum / float(share.k) + arguments.epsilon) : float_of(0x7fc00000);
    }

    static __device__ __forceinline__ float squares(const Vector& v) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sum = fma_of(v.value(i), v.value(i), sum);
        return sum;
    }
    __device__ __forceinline__ Vector write_total(int j, const Vector& v, const Vector& added) const {
        Vector total;
#pragma unroll
        for (int i = 0; i < VALUES; i += 2)
            total.set_two(i, v.value(i) + added.value(i), v.value(i + 1) + added.value(i + 1));
        store_vector(residual, share.first(j), share.k, total);
        return total;
    }

    __device__ __forceinline__ Piece piece(int j) const {
        Vector v, w;
        if constexpr (EACH > 0) {
            v = rows[j], w = weights[j];
        } else {
            // The sum is there by now, written by this very thread.
            v = load_vector(RESIDUAL ? residual : x, share.first(j), share.k);
            w = load_vector(weight, share.first(j), share.k);
        }
        Piece piece;
        // Past the end this is 0, or NaN where every value of the row is infinite or NaN.
#pragma unroll
        for (int i = 0; i < VALUES; ++i) piece.values[i] = v.value(i) * reciprocal * w.value(i);
        return piece;
    }
};
