// Where threads meet: warps at shuffles, blocks and clusters at barriers, and whoever waits for a phase of an mbarrier.
#pragma once
#include "threads.cuh"

// ------------------------------------------------------------------------------------------------------------ warps

namespace emulator {
void meet_warp(const char* at);  // all 32 lanes come to the same point, or nobody goes on
void left_cluster_barrier(Cluster& cluster);
// What another lane gives.
template <typename T>
T from_lane(int lane, T value, const char* at) {
    static_assert(sizeof(T) <= 8);
    u64* values = self->block->warps[self->index / WARP].values;
    memcpy(&values[self->index % WARP], &value, sizeof(T));
    meet_warp(at);
    memcpy(&value, &values[lane], sizeof(T));
    meet_warp(at);  // nobody writes before all have read
    return value;
}
template <typename T, class Join>
T from_all(T value, const char* at, Join join) {
    u64* values = self->block->warps[self->index / WARP].values;
    memcpy(&values[self->index % WARP], &value, sizeof(T));
    meet_warp(at);
    memcpy(&value, &values[0], sizeof(T));
    for (int lane = 1; lane < WARP; ++lane) {
        T other;
        memcpy(&other, &values[lane], sizeof(T));
        value = join(value, other);
    }
    meet_warp(at);
    return value;
}
inline void whole_warp(u32 mask) {
    if (mask != ~0u) fault("a mask of %x, expected all lanes", mask);
}
}  // namespace emulator

inline void __syncwarp() { emulator::meet_warp("__syncwarp"); }
template <typename T>
T __shfl_xor_sync(u32 mask, T value, int step) {
    emulator::whole_warp(mask);
    return emulator::from_lane(threadIdx.x % 32 ^ step, value, "__shfl_xor_sync");
}
template <typename T>
T __shfl_sync(u32 mask, T value, int lane) {
    emulator::whole_warp(mask);
    return emulator::from_lane(lane % 32, value, "__shfl_sync");
}
template <typename T>
T __shfl_up_sync(u32 mask, T value, int step) {
    emulator::whole_warp(mask);
    const int lane = threadIdx.x % 32;
    return emulator::from_lane(lane >= step ? lane - step : lane, value, "__shfl_up_sync");
}
inline int __reduce_add_sync(u32 mask, int value) {
    emulator::whole_warp(mask);
    return emulator::from_all(value, "__reduce_add_sync", [](int a, int b) { return int(u32(a) + u32(b)); });
}

// -------------------------------------------------------------------------------------------- blocks and clusters

void named_barrier_arrive(int id, int threads);
void named_barrier_sync(int id, int threads);
void __syncthreads();
int __syncthreads_and(int holds);
inline u32 cluster_ctarank() { return emulator::self->block->rank; }
void cluster_arrive();
void cluster_wait();

// The kernel before writes what this one reads, and is done some time after this one has begun.
inline void griddepcontrol_wait() {
    if (!emulator::kernel_before_done) emulator::pause(emulator::Wait::KERNEL_BEFORE);
}
inline void griddepcontrol_launch_dependents() {}

// -------------------------------------------------------------------------------------------------------- mbarriers

namespace emulator {
constexpr u32 INITIALISED = 0x5a5a;
struct Barrier {
    u64 expected : 12, arrived : 12;
    long long bytes : 24;  // that are expected and have not come, or less than 0: the other way round
    u64 mark : 15, phase : 1;
};
static_assert(sizeof(Barrier) == 8);

inline Barrier& barrier_at(u64* at) {
    Barrier& found = *reinterpret_cast<Barrier*>(at);
    if (found.mark != INITIALISED) fault("an mbarrier that nobody has initialised");
    return found;
}
void arrived(Barrier& barrier, int count, int bytes);

// Addresses in shared memory, as instructions have them: of this block, or, with a mark, of the cluster's.
inline u32 address_of(const void* pointer) {
    const long long at = static_cast<const char*>(pointer) - self->block->shared;
    if (at < 0 || at >= launched.shared_bytes) fault("byte %lld of %d of shared memory", at, launched.shared_bytes);
    return FIRST_ADDRESS + at;
}
inline char* pointer_to(u32 address, const Block& block) { return block.shared + (address & 0xffffff) - FIRST_ADDRESS; }
Block& block_of_rank(u32 rank);
// Something is on its way to a block, and comes some time later.
void send(Block& block, std::function<void()> run);
}  // namespace emulator

inline u64 __cvta_generic_to_shared(const void* pointer) { return emulator::address_of(pointer); }
inline u64 __cvta_generic_to_global(const void* pointer) { return reinterpret_cast<u64>(pointer); }
inline u32 mapa(const void* pointer, u32 rank) {
    emulator::block_of_rank(rank);
    return emulator::address_of(pointer) | (rank + 1) << 24;
}

inline void mbarrier_init(u64* at, int expected) {
    *reinterpret_cast<emulator::Barrier*>(at) = {u64(expected), 0, 0, emulator::INITIALISED, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(u64* at, u32 bytes) {
    emulator::arrived(emulator::barrier_at(at), 1, bytes);
    emulator::perhaps_meet();
}
inline void mbarrier_arrive(u64* at) { mbarrier_arrive_expect_tx(at, 0); }
inline void mbarrier_arrive_expect_tx_in(u64* at, u32 bytes, u32 rank) {
    char* there = emulator::pointer_to(emulator::address_of(at), emulator::block_of_rank(rank));
    mbarrier_arrive_expect_tx(reinterpret_cast<u64*>(there), bytes);
}
inline void mbarrier_arrive_in(u64* at, u32 rank) {
    char* there = emulator::pointer_to(emulator::address_of(at), emulator::block_of_rank(rank));
    mbarrier_arrive(reinterpret_cast<u64*>(there));
}
inline bool mbarrier_test(u64* at, u32 parity) { return emulator::barrier_at(at).phase != parity; }
inline void mbarrier_wait(u64* at, u32 parity) {
    if (mbarrier_test(at, parity)) return;
    emulator::self->barrier = at, emulator::self->parity = parity;
    emulator::pause(emulator::Wait::PHASE);
}

namespace emulator {
template <class T>
void store_async(u32 target, T value, u32 barrier) {
    Block& block = block_of_rank((target >> 24) - 1);
    char* to = pointer_to(target, block);
    u64* counts = reinterpret_cast<u64*>(pointer_to(barrier, block));
    send(block, [=] {
        memcpy(to, &value, sizeof value);
        arrived(barrier_at(counts), 0, -int(sizeof value));
    });
}
}  // namespace emulator
inline void st_async_v4(u32 target, float a, float b, float c, float d, u32 barrier) {
    emulator::store_async(target, float4{a, b, c, d}, barrier);
}
inline void st_async(u32 target, int value, u32 barrier) { emulator::store_async(target, value, barrier); }
