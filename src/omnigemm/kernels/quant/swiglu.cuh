// silu(gate) * up, in fp32, of rows that hold k gates and then k values.
#pragma once
#include "quant/computed.cuh"

struct Source {
    static constexpr bool KEEPS_ROW = false;
    const char *gate, *up;
    const Share& share;

    __device__ __forceinline__ Source(const Arguments& arguments, const Share& share)
        : gate(arguments.x + share.row * arguments.pitch),
          up(gate + (long long)arguments.k * VALUE_BYTES),
          share(share) {}
    __device__ __forceinline__ void begin(const Arguments&) {}

    __device__ __forceinline__ Piece piece(int j) const {
        const Vector gates = load_vector(gate, share.first(j), share.k);
        const Vector ups = load_vector(up, share.first(j), share.k);
        Piece piece;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const float g = gates.value(i);
            // The fast forms: the exponential is off by some units in the last place. Where it overflows, as on the
            // CPU, the quotient is 0.
            piece.values[i] = g * rcp_approx(1.0f + ex2_approx(g * -1.44269504f)) * ups.value(i);
        }
        return piece;
    }
};
