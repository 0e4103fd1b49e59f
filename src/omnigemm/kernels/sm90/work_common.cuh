// What dense products and groups of rows have in common: one result, and one map of each tensor, for all tiles.
#pragma once
#include "common/scheduler.cuh"

struct PlaceInOne : Tile {
    static constexpr __device__ int columns() { return SHAPE_N; }
    static __device__ __forceinline__ u32 scale_at(const Arguments&, int row) { return u32(row) * K_BLOCKS; }
    static constexpr __device__ u32 scale_step(const Arguments&) { return K_BLOCKS; }
    static constexpr __device__ int scale_end() { return K_BLOCKS; }
    // 16-bit results are given to kernels with this way out only if all rows are fit for it.
    static __device__ __forceinline__ bool out_by_tma(const Arguments& arguments) {
        return OUT_BYTES == 2 || (reinterpret_cast<u64>(arguments.out) | arguments.out_stride * OUT_BYTES) % 16 == 0;
    }
    // Which matrices of tensor maps with a third dimension: only batches have such.
    static constexpr __device__ int a_number(const Arguments&) { return 0; }
    static constexpr __device__ int b_number(const Arguments&) { return 0; }
    static constexpr __device__ int out_number() { return 0; }
    static constexpr __device__ int b_sum_row(const Arguments&) { return 0; }
    static __device__ __forceinline__ void* out(const Arguments& arguments) { return arguments.out; }
    static __device__ __forceinline__ long long out_stride(const Arguments& arguments) { return arguments.out_stride; }
#if ELEMENT_BYTES == 2
    static __device__ __forceinline__ float alpha(const Arguments& arguments) { return arguments.alpha; }
    static constexpr __device__ bool adds_c() { return true; }
    static __device__ __forceinline__ float beta(const Arguments& arguments) { return arguments.beta; }
    static __device__ __forceinline__ const void* c(const Arguments& arguments) { return arguments.c; }
    static __device__ __forceinline__ int c_type(const Arguments& arguments) { return arguments.c_type; }
    static __device__ __forceinline__ long long c_at(const Arguments& arguments, int m, int n) {
        return m * arguments.c_row + n * arguments.c_col;
    }
#endif
};

struct WorkInOne {
    static constexpr bool OWN_MAPS = false;
    template <class Place>
    static __device__ __forceinline__ void enter(const Place&, const TensorMap*&, const TensorMap*&) {}
    template <class Place>
    static __device__ __forceinline__ void enter_out(const Place&, const TensorMap*&, bool) {}
    static __device__ __forceinline__ void leave() {}
};
