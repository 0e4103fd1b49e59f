// The ring of shared-memory stages between the warp that loads and the warps that multiply.
#pragma once
#include "common/ptx.cuh"

template <int stages>
struct Pipeline {
    u64 full[stages];   // a stage is written
    u64 empty[stages];  // every warp that reads it is done with it

    __device__ __forceinline__ void init(int writers, int readers) {
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(&full[i], writers);
            mbarrier_init(&empty[i], readers);
        }
        fence_mbarrier_init();
    }
};

// Where in the ring a role is. The phase flips with every round, and a barrier is waited for by its phase.
template <int stages>
struct Position {
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
    // Past stages that are another's.
    __device__ __forceinline__ void skip(int count) {
        const int all = stage + count;
        stage = all % stages;
        phase ^= all / stages % 2;
    }
};
