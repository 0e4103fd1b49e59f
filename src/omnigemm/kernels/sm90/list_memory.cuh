// What the kernel that prepares a list of products (list_setup.cuh) leaves in device memory for the one that multiplies
// them: tensor maps of A, B and D for each product, then a line of the table of tiles, then how to finish its sums; and
// after those of all products, how many tiles were taken since.
#pragma once
#include "common/lists.cuh"
#include "common/ptx.cuh"

struct Ending {
    const void* c;
    void* out;
    long long c_row, c_col, out_stride;  // in elements
    float alpha, beta;
    int c_type;       // of epilogue.cuh
    int straight;     // the copy engine can write D
    int first_block;  // of K, where the product's scales begin
    int unused;
};

struct ListMemory {
    char* start;
    int count;

    static constexpr int MAPS = 3;
    static constexpr int BYTES = MAPS * sizeof(TensorMap) + sizeof(Product) + sizeof(Ending);
    static_assert(BYTES == 464, "what list_kernel.py sets aside for a product");

    __device__ __forceinline__ TensorMap* maps(int which) const {
        return reinterpret_cast<TensorMap*>(start) + MAPS * which;
    }
    __device__ __forceinline__ Product* table() const { return reinterpret_cast<Product*>(maps(count)); }
    __device__ __forceinline__ Ending* endings() const { return reinterpret_cast<Ending*>(table() + count); }
    __device__ __forceinline__ int* taken() const { return reinterpret_cast<int*>(endings() + count); }
};

// A copy of a map that has the right box and swizzle, for another matrix.
__device__ __forceinline__ void point(TensorMap* map, u64 address, u64 pitch_bytes, u32 columns, u32 rows) {
    tensormap_replace_global_address(map, address);
    tensormap_replace_global_dim<0>(map, columns);
    tensormap_replace_global_dim<1>(map, rows);
    tensormap_replace_global_stride<0>(map, pitch_bytes);
}
