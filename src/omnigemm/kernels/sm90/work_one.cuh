// The tiles of one product, and a block's part of K: what single products and batches of like ones have in common.
#pragma once
#include "sm90/work_common.cuh"

struct WorkOfOne : WorkInOne {
    int row_packs, col_packs;  // tiles, in packs of those that a cluster works on together
    Divisor in_band;           // packs
    int share_rank, first_block, end_block;

    __device__ __forceinline__ WorkOfOne(const Arguments& arguments)
        : row_packs(packs(SWAP ? SHAPE_N : arguments.shape_m, TILE_ROWS * RIGHT_SHARE)),
          col_packs(packs(SWAP ? arguments.shape_m : SHAPE_N, TILE_COLS * LEFT_SHARE)),
          in_band(row_packs == 1 || col_packs == 1 ? 1 : BAND * row_packs) {  // not asked then, nor divided for
        const int rank = CLUSTER > 1 ? cluster_ctarank() : 0, split_rank = rank / SHARE;
        share_rank = rank % SHARE;
        // Parts of K begin where scales are read, and are whole groups of DEPTH; what lies past K is zero.
        constexpr int groups = (K_BLOCKS + SCALES_AT_ONCE - 1) / SCALES_AT_ONCE;
        constexpr int end = (K_BLOCKS + DEPTH - 1) / DEPTH * DEPTH;
        first_block = groups * split_rank / SPLIT * SCALES_AT_ONCE;
        end_block = min(groups * (split_rank + 1) / SPLIT * SCALES_AT_ONCE, end);
    }
    static __device__ __forceinline__ int packs(int lines, int each) { return (lines + each - 1) / each; }
    // This block's tile of a pack.
    __device__ __forceinline__ Tile own(Tile pack) const {
        return {pack.row * RIGHT_SHARE + (RIGHT_SHARE > 1 ? share_rank : 0),
                pack.col * LEFT_SHARE + (LEFT_SHARE > 1 ? share_rank : 0)};
    }
    __device__ __forceinline__ void prepare(void*, int) {}
    template <class Place>
    __device__ __forceinline__ int end(const Place&) const {
        return end_block;
    }
    template <class Place>
    __device__ __forceinline__ int blocks(const Place&) const {
        return end_block - first_block;
    }
    __device__ __forceinline__ int first() const { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ int next(int index) const { return index + gridDim.x / CLUSTER; }
    __device__ __forceinline__ int ask(int index) const { return next(index); }
    __device__ __forceinline__ int first_to_load() const { return first(); }
    static __device__ __forceinline__ int next_to_load(int asked) { return asked; }
    template <class Place>
    static constexpr __device__ int waves(const Place&, int) {
        return WAVES;
    }
};
