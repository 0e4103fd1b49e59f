// The ring of shared-memory stages between the warp that loads and the warps that multiply.
#pragma once
#include "common/ptx.cuh"

template <int stages>
struct Pipeline {
    u64 full[stages];   // the copy engine has written a stage
    u64 empty[stages];  // every math warp is done with it

    __device__ __forceinline__ void init(int math_warps) {
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(&full[i], 1);
            mbarrier_init(&empty[i], math_warps);
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
};
