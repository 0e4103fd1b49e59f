// Math groups with tiles of their own (PINGPONG) multiply in turns, a tile each: while one multiplies, the other
// finishes its sums and sends them out. A turn is over when its last products are begun. Turns are also what makes
// waiting for a stage safe: a barrier tells one round of the ring from the next, and not from the one after that.
#pragma once
#include "common/ptx.cuh"

struct Turns {
    static constexpr int FIRST_BARRIER = 3, BOTH = 256;
    int group;
    bool mine;  // the next tile

    __device__ __forceinline__ Turns(int group) : group(group), mine(group == 0) {
        if (PINGPONG && group == 1) pass();  // the first turn
    }
    // Whether a tile is this group's. Each group is asked about every tile.
    __device__ __forceinline__ bool take() {
        if (PINGPONG) mine = !mine;
        return !PINGPONG || !mine;
    }
    __device__ __forceinline__ void wait() const {
        if (PINGPONG) named_barrier_sync(FIRST_BARRIER + group, BOTH);
    }
    __device__ __forceinline__ void pass() const {
        if (PINGPONG) named_barrier_arrive(FIRST_BARRIER + (group ^ 1), BOTH);
    }
    // When there are no more tiles, one pass is left over.
    __device__ __forceinline__ void end() const {
        if (mine) wait();
    }
};
