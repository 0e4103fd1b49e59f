// What a block works on, a batch of products of one shape: the tiles of all of them, one after the other. Tensor maps
// have the product as a third coordinate, so batches may lie any way, and nothing of the next product is read or
// written. An operand, scales or a C that all have in common have a step of 0.
#pragma once
#include "sm90/work_one.cuh"

struct Place : PlaceInOne {
    int product;

    __device__ __forceinline__ int rows(const Arguments& arguments) const { return arguments.shape_m; }
    __device__ __forceinline__ int a_number(const Arguments& arguments) const { return product * arguments.a_step; }
    __device__ __forceinline__ int b_number(const Arguments& arguments) const { return product * arguments.b_step; }
    __device__ __forceinline__ int out_number() const { return product; }
    static constexpr __device__ int a_row(const Arguments&) { return 0; }
    static constexpr __device__ int b_row(const Arguments&) { return 0; }
    __device__ __forceinline__ int a_scale_row(const Arguments& arguments) const {
        return product * arguments.a_scale_step;
    }
    static constexpr __device__ int b_scale_row() { return 0; }  // of scales in blocks, which batches do not have
    __device__ __forceinline__ int b_whole_scale(const Arguments& arguments) const {
        return product * arguments.b_scale_step;
    }
    __device__ __forceinline__ int b_sum_row(const Arguments& arguments) const {
        return product * arguments.b_sum_step;
    }
    static constexpr __device__ int out_row(const Arguments&) { return 0; }
    __device__ __forceinline__ void* out(const Arguments& arguments) const {
        return static_cast<char*>(arguments.out) + product * arguments.out_step;
    }
#if ELEMENT_BYTES == 2
    __device__ __forceinline__ long long c_at(const Arguments& arguments, int m, int n) const {
        return product * arguments.c_step + m * arguments.c_row + n * arguments.c_col;
    }
#endif
};

struct Work : WorkOfOne {
    Divisor in_product;  // packs
    int all_packs;

    __device__ __forceinline__ Work(const Arguments& arguments)
        : WorkOfOne(arguments), in_product(row_packs * col_packs), all_packs(in_product.by * arguments.batch) {}
    __device__ __forceinline__ bool has(int index) const { return index < all_packs; }
    __device__ __forceinline__ Place tile(int index) const {
        const BatchTile pack = batch_tile(index, row_packs, col_packs, BAND, in_band, in_product);
        return {{own(pack.tile)}, pack.product};
    }
    __device__ __forceinline__ Place to_load(int index) const { return tile(index); }
};
