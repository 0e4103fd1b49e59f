// A row's values as they are.
#pragma once

using Piece = Vector;

struct Source {
    static constexpr bool KEEPS_ROW = false;
    const char* x;
    const Share& share;

    __device__ __forceinline__ Source(const Arguments& arguments, const Share& share)
        : x(arguments.x + share.row * arguments.pitch), share(share) {}
    __device__ __forceinline__ void begin(const Arguments&) {}
    __device__ __forceinline__ Piece piece(int j) const { return load_vector(x, share.first(j), share.k); }
};
