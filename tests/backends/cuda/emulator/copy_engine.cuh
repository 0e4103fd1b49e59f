// What the copy engine does with tensor maps. A copy is done some time later: its target holds nothing of use from the
// moment it is asked for, and its source is read as late as it may be, or earlier. Who uses the one or writes to the
// other too soon is found out. Where bytes lie is worked out from the bits of addresses, as the swizzle is defined, and
// not as the kernels do it.
#pragma once
#include "meetings.cuh"

namespace emulator {
static int stored, added;  // copies of either kind

// Bits 4 and up of an address are turned by bits 7 and up, as many as a row of the box has units of 16 bytes.
inline u32 swizzled(u32 address, int row_bytes) { return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; }

inline void check_map(const TensorMap* map) {
    // A parameter lies with the thread's own variables; what other kernels made, a thread must ask for.
    const char *at = reinterpret_cast<const char*>(map), *stack = static_cast<const char*>(self->start.uc_stack.ss_sp);
    const auto& known = self->acquired;
    if ((at < stack || at >= stack + STACK) && std::find(known.begin(), known.end(), map) == known.end())
        return fault("a tensor map in memory is used before a fence that acquires it");
    if ((map->address | map->pitch | map->step) % 16) return fault("a tensor map of an odd address, pitch or step");
    const u32 row_bytes = map->box_columns * map->element_bytes;
    if ((row_bytes != 32 && row_bytes != 64 && row_bytes != 128) || map->box_rows < 1 || map->box_rows > 256)
        fault("a box of %u bytes by %u rows", row_bytes, map->box_rows);
}
// Where 16 bytes of a box lie in memory, and how many of them: none outside of the matrix.
struct Piece {
    char* at;
    int bytes;
};
inline Piece piece(const TensorMap& map, int inner, int outer, int number, int row, int chunk) {
    const long long column = inner + chunk * 16 / int(map.element_bytes), line = outer + row;
    if (line < 0 || line >= map.rows || column < 0 || column >= map.columns) return {nullptr, 0};
    if (map.count && (number < 0 || number >= int(map.count))) return {nullptr, 0};
    const long long bytes = (map.columns - column) * map.element_bytes;
    return {reinterpret_cast<char*>(map.address) + number * map.step + line * map.pitch + column * map.element_bytes,
            int(std::min(bytes, 16ll))};
}

inline void load(Block& block, u32 target, const TensorMap& map, u32 barrier, int inner, int outer, int number) {
    const int row_bytes = map.box_columns * map.element_bytes, bytes = row_bytes * map.box_rows;
    if (target % 128) return fault("a copy to address %u of shared memory, expected a multiple of 128", target);
    if (target - FIRST_ADDRESS + bytes > u32(launched.shared_bytes)) return fault("a copy past shared memory's end");
    memset(pointer_to(target, block), UNWRITTEN, bytes);
    Block* to = &block;
    send(block, [=] {
        for (int row = 0; row < int(map.box_rows); ++row)
            for (int chunk = 0; chunk < row_bytes / 16; ++chunk) {
                const Piece from = piece(map, inner, outer, number, row, chunk);
                char* at = pointer_to(swizzled(target + row * row_bytes + chunk * 16, row_bytes), *to);
                memset(at, 0, 16);
                memcpy(at, from.at, from.bytes);
            }
        arrived(barrier_at(reinterpret_cast<u64*>(pointer_to(barrier, *to))), 0, -bytes);
    });
}
inline void load(void* target, const TensorMap* map, u64* barrier, int inner, int outer, int number, u32 blocks) {
    check_map(map);
    const u32 at = address_of(target), counts = address_of(barrier);
    for (u32 rank = 0; rank < self->block->cluster->blocks.size(); ++rank)
        if (blocks >> rank & 1) load(block_of_rank(rank), at, *map, counts, inner, outer, number);
    if (blocks >> self->block->cluster->blocks.size()) fault("a copy to blocks %x of a smaller cluster", blocks);
}

// Like the hardware it writes whole 16 bytes at a row's end.
inline void write(const Store& store, const Block& block) {
    const TensorMap& map = store.map;
    const int row_bytes = map.box_columns * map.element_bytes;
    const u32 first = FIRST_ADDRESS + (store.source - block.shared);
    for (int row = 0; row < int(map.box_rows); ++row)
        for (int chunk = 0; chunk < row_bytes / 16; ++chunk) {
            const u32 at = swizzled(first + row * row_bytes + chunk * 16, row_bytes);
            if (const int thread = block.unfenced[(at - FIRST_ADDRESS) / 16])
                return fault("the copy engine reads what thread %d wrote without a fence", thread - 1);
            const Piece to = piece(map, store.inner, store.outer, store.number, row, chunk);
            if (!to.at) continue;
            const char* from = pointer_to(at, block);
            if (!store.adds)
                memcpy(to.at, from, 16);
            else
                for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(to.at)[i] += reinterpret_cast<const float*>(from)[i];
        }
}
inline void store(const TensorMap* map, const void* source, int inner, int outer, int number, bool adds) {
    check_map(map);
    if (address_of(source) % 128) return fault("a copy from address %u, expected a multiple of 128", address_of(source));
    if (adds && map->element_bytes != 4) return fault("sums of %u bytes, expected floats", map->element_bytes);
    if (self->stores.empty()) self->stores.emplace_back();
    ++(adds ? added : stored);
    self->stores.back().push_back({*map, static_cast<const char*>(source), inner, outer, number, adds});
}
// All but the last groups are read now, if they were not before.
inline void read_stores(size_t but) {
    auto& groups = self->stores;
    while (groups.size() > but + 1) {
        for (const Store& one : groups.front()) write(one, *self->block);
        groups.erase(groups.begin());
    }
    if (groups.size() == 1 && groups.front().empty()) groups.clear();
}

// Ordinary stores to shared memory, which the copy engine sees after a fence.
inline void wrote(void* target, int bytes) {
    const u32 first = address_of(target) - FIRST_ADDRESS;
    for (u32 at = first / 16; at <= (first + bytes - 1) / 16; ++at) {
        self->block->unfenced[at] = self->index + 1;
        self->unfenced.push_back(at);
    }
}
// How often the banks of shared memory are gone through for 16 lanes' stores of 8 bytes, at worst; 1 is the least.
inline void count_banks(const Block& block) {
    for (size_t first = 0; first + 16 <= block.threads.size(); first += 16)
        for (size_t i = 0; i < block.threads[first].addresses.size(); ++i) {
            int words[32] = {};
            for (size_t lane = first; lane < first + 16; ++lane)
                for (int word = 0; word < 2; ++word)
                    worst_of_stores = std::max(worst_of_stores,
                                               ++words[(block.threads[lane].addresses[i] / 4 + word) % 32]);
        }
}
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
