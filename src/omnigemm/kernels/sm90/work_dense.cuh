// What a block works on, one product: its tiles, one after the other.
#pragma once
#include "sm90/work_one.cuh"

// A tile with all that must be known to load and store it. Here rows and scales begin where the tensors do.
struct Place : PlaceInOne {
    __device__ __forceinline__ int rows(const Arguments& arguments) const { return arguments.shape_m; }
    static constexpr __device__ int a_row(const Arguments&) { return 0; }
    static constexpr __device__ int b_row(const Arguments&) { return 0; }
    static constexpr __device__ int a_scale_row(const Arguments&) { return 0; }
    static constexpr __device__ int b_scale_row() { return 0; }
    static constexpr __device__ int b_whole_scale(const Arguments&) { return 0; }
    static constexpr __device__ int out_row(const Arguments&) { return 0; }
};

struct Work : WorkOfOne {
    using WorkOfOne::WorkOfOne;
    __device__ __forceinline__ bool has(int index) const { return index < row_packs * col_packs; }
    __device__ __forceinline__ Place tile(int index) const {
        return {{own(dense_tile(index, row_packs, col_packs, BAND, in_band))}};
    }
    __device__ __forceinline__ Place to_load(int index) const { return tile(index); }
};
