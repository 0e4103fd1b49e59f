// What the copy engine does with tensor maps. A copy is done some time later: its target holds nothing of use from the
// moment it is asked for, and its source is read as late as it may be, or earlier. Who uses the one or writes to the
// other too soon is found out. Where bytes lie is worked out from the bits of addresses, as the swizzle is defined, and
// not as the kernels do it.
#pragma once
#include "meetings.cuh"

namespace emulator {
extern int stored, added;    // copies of either kind
extern bool watches_stores;  // of 8 bytes, to find
extern int worst_of_stores;  // how often the banks of shared memory are gone through for one
void count_banks(const Block& block);

void load(void* target, const TensorMap* map, u64* barrier, int inner, int outer, int number, u32 blocks);
void store(const TensorMap* map, const void* source, int inner, int outer, int number, bool adds);
void read_stores(size_t but);         // all groups but the last ones are read now, if they were not before
void wrote(void* target, int bytes);  // to shared memory, by an ordinary store
}  // namespace emulator

inline void prefetch_tensormap(const TensorMap*) {}
inline void tensormap_replace_global_address(TensorMap* map, u64 address) { map->address = address; }
template <int dimension>
void tensormap_replace_global_dim(TensorMap* map, u32 size) {
    (dimension ? map->rows : map->columns) = size;
}
template <int dimension>
void tensormap_replace_global_stride(TensorMap* map, u64 bytes) {
    map->pitch = bytes;
}
inline void tensormap_cp_fenceproxy(TensorMap* target, const TensorMap* map) {
    emulator::meet_warp("tensormap.cp_fenceproxy");
    if (threadIdx.x % 32 == 0) *target = *map;
    emulator::meet_warp("tensormap.cp_fenceproxy");
}
inline void fence_proxy_tensormap_acquire(const TensorMap* map) { emulator::self->acquired.push_back(map); }

inline void tma_load_2d(void* target, const TensorMap* map, u64* barrier, int inner, int outer) {
    emulator::load(target, map, barrier, inner, outer, 0, 1 << cluster_ctarank());
}
inline void tma_load_2d_multicast(void* target, const TensorMap* map, u64* barrier, int inner, int outer,
                                  unsigned short blocks) {
    emulator::load(target, map, barrier, inner, outer, 0, blocks);
}
inline void tma_load_3d(void* target, const TensorMap* map, u64* barrier, int inner, int outer, int number) {
    emulator::load(target, map, barrier, inner, outer, number, 1 << cluster_ctarank());
}
inline void tma_load_3d_multicast(void* target, const TensorMap* map, u64* barrier, int inner, int outer, int number,
                                  unsigned short blocks) {
    emulator::load(target, map, barrier, inner, outer, number, blocks);
}
inline void tma_store_2d(const TensorMap* map, const void* source, int inner, int outer) {
    emulator::store(map, source, inner, outer, 0, false);
}
inline void tma_store_3d(const TensorMap* map, const void* source, int inner, int outer, int number) {
    emulator::store(map, source, inner, outer, number, false);
}
inline void tma_reduce_add_2d(const TensorMap* map, const void* source, int inner, int outer) {
    emulator::store(map, source, inner, outer, 0, true);
}
inline void bulk_commit_group() {
    auto& groups = emulator::self->stores;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
    if (emulator::one_in(2)) emulator::read_stores(0);
}
template <int pending>
void bulk_wait_group_read() {
    emulator::read_stores(pending);
}

inline void fence_proxy_async() {
    using namespace emulator;
    for (u32 at : self->unfenced)
        if (self->block->unfenced[at] == self->index + 1) self->block->unfenced[at] = 0;
    self->unfenced.clear();
}
inline void st_shared_v2(void* target, float x, float y) {
    const float both[2] = {x, y};
    memcpy(target, both, 8);
    emulator::wrote(target, 8);
    if (emulator::watches_stores) emulator::self->addresses.push_back(emulator::address_of(target));
}
inline float2 ld_shared_v2(const float* source) {
    emulator::address_of(source);
    return *reinterpret_cast<const float2*>(source);
}
inline float4 ld_shared_v4(const float* source) {
    if (emulator::address_of(source) % 16) emulator::fault("16 bytes are read at an odd address");
    return *reinterpret_cast<const float4*>(source);
}
// Four 8 by 8 matrices; lanes 8 i to 8 i + 7 have the addresses of the rows of the i-th.
inline void stmatrix_x4(void* target, u32 a, u32 b, u32 c, u32 d) {
    using namespace emulator;
    u64* targets = self->block->warps[self->index / WARP].values;
    targets[self->index % WARP] = reinterpret_cast<u64>(target);
    meet_warp("stmatrix");
    const u32 values[4] = {a, b, c, d};
    const int lane = self->index % WARP;
    for (int i = 0; i < 4; ++i) {
        char* to = reinterpret_cast<char*>(targets[8 * i + lane / 4]) + lane % 4 * 4;
        memcpy(to, &values[i], 4);
        wrote(to, 4);
    }
    meet_warp("stmatrix");
}
