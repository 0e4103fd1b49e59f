// How tiles reach those who work on them. Blocks that take a fixed share of a long list drift apart, for tiles differ
// and so do multiprocessors; what they load is then no longer what others have just brought to L2. So a cluster asks
// for its next tile when it begins one, and all are always at about the same place.
#pragma once
#include "common/pipeline.cuh"

constexpr int NONE = -1;  // instead of a tile's number, or of its group's

// Numbers of tiles, from the thread that asks for a cluster to those that load in its other blocks.
struct TileNumbers {
    static constexpr int SLOTS = 4;
    using At = Position<SLOTS>;
    Pipeline<SLOTS> ring;
    int numbers[SLOTS];

    // Of the barriers that count takers, only the first block's are used.
    __device__ __forceinline__ void init() { ring.init(1, SHARE - 1); }

    __device__ __forceinline__ void give(At& at, int number, int first_rank) {
        mbarrier_wait(&ring.empty[at.stage], at.phase ^ 1);
        u64* full = &ring.full[at.stage];
        for (int rank = first_rank + 1; rank < first_rank + SHARE; ++rank) {
            mbarrier_arrive_expect_tx_in(full, sizeof(int), rank);
            st_async(mapa(&numbers[at.stage], rank), number, mapa(full, rank));
        }
        at.advance();
    }
    __device__ __forceinline__ int take(At& at, int first_rank) {
        mbarrier_wait(&ring.full[at.stage], at.phase);
        const int number = *const_cast<volatile int*>(&numbers[at.stage]);
        mbarrier_arrive_in(&ring.empty[at.stage], first_rank);
        at.advance();
        return number;
    }
};

// Tiles, from the thread that loads to the warps that multiply or bring scales: all that it looked up while they were
// busy with others.
template <class Found>
struct TileHandover {
    static constexpr int SLOTS = 4;
    using At = Position<SLOTS>;
    Pipeline<SLOTS> ring;
    Found found[SLOTS];

    __device__ __forceinline__ void init(int warps) { ring.init(1, warps); }

    __device__ __forceinline__ void give(At& at, const Found& one) {
        mbarrier_wait(&ring.empty[at.stage], at.phase ^ 1);
        found[at.stage] = one;
        mbarrier_arrive(&ring.full[at.stage]);
        at.advance();
    }
    // By whole warps: look at the next one, as often as needed, then leave it.
    __device__ __forceinline__ const Found& look(const At& at) {
        mbarrier_wait(&ring.full[at.stage], at.phase);
        return found[at.stage];
    }
    __device__ __forceinline__ void leave(At& at) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[at.stage]);
        at.advance();
    }
};
