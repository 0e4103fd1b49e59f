// What a block works on, one product: its tiles, one after the other, and its part of K.
#pragma once
#include "sm90/work_common.cuh"

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

struct Work : WorkInOne {
    static constexpr int TABLE_LINE = 0;
    int row_packs, col_packs;  // tiles, in packs of those that a cluster works on together
    int share_rank, first_block, end_block;

    __device__ __forceinline__ Work(const Arguments& arguments) {
        const int rank = CLUSTER > 1 ? cluster_ctarank() : 0, split_rank = rank / SHARE;
        const int left_rows = SWAP ? SHAPE_N : arguments.shape_m, right_rows = SWAP ? arguments.shape_m : SHAPE_N;
        row_packs = (left_rows + TILE_ROWS * RIGHT_SHARE - 1) / (TILE_ROWS * RIGHT_SHARE);
        col_packs = (right_rows + TILE_COLS * LEFT_SHARE - 1) / (TILE_COLS * LEFT_SHARE);
        share_rank = rank % SHARE;
        // Parts of K begin where scales are read, and are whole groups of DEPTH; what lies past K is zero.
        constexpr int groups = (K_BLOCKS + SCALES_AT_ONCE - 1) / SCALES_AT_ONCE;
        constexpr int end = (K_BLOCKS + DEPTH - 1) / DEPTH * DEPTH;
        first_block = groups * split_rank / SPLIT * SCALES_AT_ONCE;
        end_block = min(groups * (split_rank + 1) / SPLIT * SCALES_AT_ONCE, end);
    }
    __device__ __forceinline__ void prepare(void*, int) {}
    __device__ __forceinline__ int end(const Place&) const { return end_block; }
    __device__ __forceinline__ int blocks(const Place&) const { return end_block - first_block; }
    __device__ __forceinline__ int first() const { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ int next(int index) const { return index + gridDim.x / CLUSTER; }
    __device__ __forceinline__ int ask(int index) const { return next(index); }
    __device__ __forceinline__ int first_to_load() const { return first(); }
    __device__ __forceinline__ Place to_load(int index) const { return tile(index); }
    static __device__ __forceinline__ int next_to_load(int asked) { return asked; }
    __device__ __forceinline__ bool has(int index) const { return index < row_packs * col_packs; }
    __device__ __forceinline__ Place tile(int index) const {
        const Tile pack = dense_tile(index, row_packs, col_packs, BAND);
        return {{pack.row * RIGHT_SHARE + (RIGHT_SHARE > 1 ? share_rank : 0),
                 pack.col * LEFT_SHARE + (LEFT_SHARE > 1 ? share_rank : 0)}};
    }
    static constexpr __device__ int waves(const Place&, int) { return WAVES; }
};
