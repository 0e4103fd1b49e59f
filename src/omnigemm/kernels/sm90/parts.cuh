// If K is split, the blocks of a cluster have a part of the sums of one tile each. The tile's columns are dealt out to
// them in groups of 8, side by side, everyone sends its part of a group to the block that owns it, and the owner adds
// the parts, always in the same order. What a block owns itself is not sent: some 13 bytes a cycle are all that one
// block gets to the others.
#pragma once
#include "sm90/epilogue.cuh"

template <class T>
struct alignas(16) Four {
    T of[4];
};

struct Parts {
    static_assert(WAVES == 1, "a thread has four sums in a group");
    static constexpr int MATH_THREADS = 128 * MATH_GROUPS;
    static constexpr int GROUPS = TILE_COLS / 8;
    static constexpr int OWNED = (GROUPS + SPLIT - 1) / SPLIT;        // the most that a block has
    static constexpr int PART_BYTES = MATH_THREADS * sizeof(float4);  // of a group, as the threads have it
    static constexpr int BYTES = SPLIT > 1 ? OWNED * SPLIT * PART_BYTES : 0;

    static __device__ __forceinline__ int rank() { return SPLIT > 1 ? cluster_ctarank() / SHARE : 0; }
    static constexpr __device__ int first_group(int owner) { return GROUPS * owner / SPLIT; }
    static __device__ __forceinline__ int owned() { return first_group(rank() + 1) - first_group(rank()); }

    static __device__ __forceinline__ char* place(char* parts, int slot, int part) {
        return parts + (slot * SPLIT + part) * PART_BYTES + threadIdx.x * sizeof(float4);
    }

    // By one thread, before anybody sends.
    static __device__ __forceinline__ void init(u64* arrived) {
        if constexpr (SPLIT > 1) {
            mbarrier_init(arrived, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(arrived, owned() * (SPLIT - 1) * PART_BYTES);
        }
    }

    template <class Sum, int regs>
    static __device__ __forceinline__ void send(const Sum (&sums)[regs], char* parts, u64* arrived) {
        const int mine = rank();
        if constexpr (GROUPS <= SPLIT) {
            send_as(mine, sums, parts, arrived);
        } else {  // one branch for all groups, and not one for each: nothing else goes on now
#pragma unroll
            for (int one = 0; one < SPLIT; ++one)
                if (one == mine) send_as(one, sums, parts, arrived);
        }
    }

    template <class Sum, int regs>
    static __device__ __forceinline__ void send_as(int mine, const Sum (&sums)[regs], char* parts, u64* arrived) {
        const int neighbours = cluster_ctarank() - mine * SHARE;
#pragma unroll
        for (int owner = 0; owner < SPLIT; ++owner) {
            const int to = neighbours + owner * SHARE;
#pragma unroll
            for (int group = first_group(owner); group < first_group(owner + 1); ++group) {
                const Sum* v = sums + 4 * group;
                char* at = place(parts, group - first_group(owner), mine);
                if (owner == mine)  // nobody but this thread will read it
                    *reinterpret_cast<Four<Sum>*>(at) = {v[0], v[1], v[2], v[3]};
                else
                    st_async_v4(mapa(at, to), bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3]), mapa(arrived, to));
            }
        }
    }

    // When all have arrived: the thread's four sums of a group that this block owns.
    template <class Sum>
    static __device__ __forceinline__ Four<Sum> added(char* parts, int slot) {
        Four<Sum> sum = {};
#pragma unroll
        for (int part = 0; part < SPLIT; ++part) {
            const Four<Sum> v = *reinterpret_cast<const Four<Sum>*>(place(parts, slot, part));
#pragma unroll
            for (int j = 0; j < 4; ++j) sum.of[j] += v.of[j];
        }
        return sum;
    }
};
