// Numbers of tiles, from the thread that asks for them to all who work on them. Blocks that take a fixed share of a
// long list drift apart, for tiles differ and so do multiprocessors; what they load is then no longer what others have
// just brought to L2. So a cluster asks for its next tile when it begins one, and all are always at about the same
// place.
#pragma once
#include "common/pipeline.cuh"

struct TileQueue {
    static constexpr int SLOTS = 4;
    using At = Position<SLOTS>;
    Pipeline<SLOTS> ring;
    int tiles[SLOTS];

    // The first block's barriers count everyone in the cluster who takes numbers.
    __device__ __forceinline__ void init(int takers) { ring.init(1, takers); }

    // By one thread of the cluster's first block: to the queues of all blocks.
    __device__ __forceinline__ void give(At& at, int tile, int first_rank) {
        mbarrier_wait(&ring.empty[at.stage], at.phase ^ 1);
        u64* full = &ring.full[at.stage];
        if constexpr (SHARE == 1) {  // without a cluster, no block has a rank to send to
            tiles[at.stage] = tile;
            mbarrier_arrive(full);
        } else {
            for (int rank = first_rank; rank < first_rank + SHARE; ++rank) {
                mbarrier_arrive_expect_tx_in(full, sizeof(int), rank);
                st_async(mapa(&tiles[at.stage], rank), tile, mapa(full, rank));
            }
        }
        at.advance();
    }

    // By a whole warp, or by a single thread that is its first.
    template <bool whole_warp>
    __device__ __forceinline__ int take(At& at, int first_rank) {
        mbarrier_wait(&ring.full[at.stage], at.phase);
        const int tile = *const_cast<volatile int*>(&tiles[at.stage]);
        if constexpr (whole_warp) __syncwarp();
        if (threadIdx.x % 32 == 0) {
            if constexpr (SHARE == 1)
                mbarrier_arrive(&ring.empty[at.stage]);
            else
                mbarrier_arrive_in(&ring.empty[at.stage], first_rank);
        }
        at.advance();
        return tile;
    }
};
