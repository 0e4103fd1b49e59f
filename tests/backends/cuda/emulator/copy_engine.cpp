// What the copy engine does.
#include <common/ptx.cuh>  // found by the path, so that it finds the next one

namespace emulator {
int stored, added, worst_of_stores;
bool watches_stores;

// Bits 4 and up of an address are turned by bits 7 and up, as many as a row of the box has units of 16 bytes.
u32 swizzled(u32 address, int row_bytes) { return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; }

void check_map(const TensorMap* map) {
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
Piece piece(const TensorMap& map, int inner, int outer, int number, int row, int chunk) {
    const long long column = inner + chunk * 16 / int(map.element_bytes), line = outer + row;
    if (line < 0 || line >= map.rows || column < 0 || column >= map.columns) return {nullptr, 0};
    if (map.count && (number < 0 || number >= int(map.count))) return {nullptr, 0};
    const long long bytes = (map.columns - column) * map.element_bytes;
    return {reinterpret_cast<char*>(map.address) + number * map.step + line * map.pitch + column * map.element_bytes,
            int(std::min(bytes, 16ll))};
}

void load(Block& block, u32 target, const TensorMap& map, u32 barrier, int inner, int outer, int number) {
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
void load(void* target, const TensorMap* map, u64* barrier, int inner, int outer, int number, u32 blocks) {
    check_map(map);
    const u32 at = address_of(target), counts = address_of(barrier);
    for (u32 rank = 0; rank < self->block->cluster->blocks.size(); ++rank)
        if (blocks >> rank & 1) load(block_of_rank(rank), at, *map, counts, inner, outer, number);
    if (blocks >> self->block->cluster->blocks.size()) fault("a copy to blocks %x of a smaller cluster", blocks);
}

// Like the hardware it writes whole 16 bytes at a row's end.
void write(const Store& store, const Block& block) {
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
                for (int i = 0; i < 4; ++i)
                    reinterpret_cast<float*>(to.at)[i] += reinterpret_cast<const float*>(from)[i];
        }
}
void store(const TensorMap* map, const void* source, int inner, int outer, int number, bool adds) {
    check_map(map);
    if (address_of(source) % 128)
        return fault("a copy from address %u, expected a multiple of 128", address_of(source));
    if (adds && map->element_bytes != 4) return fault("sums of %u bytes, expected floats", map->element_bytes);
    if (self->stores.empty()) self->stores.emplace_back();
    ++(adds ? added : stored);
    self->stores.back().push_back({*map, static_cast<const char*>(source), inner, outer, number, adds});
}
void read_stores(size_t but) {
    auto& groups = self->stores;
    while (groups.size() > but + 1) {
        for (const Store& one : groups.front()) write(one, *self->block);
        groups.erase(groups.begin());
    }
    if (groups.size() == 1 && groups.front().empty()) groups.clear();
}

// Ordinary stores to shared memory, which the copy engine sees after a fence.
void wrote(void* target, int bytes) {
    const u32 first = address_of(target) - FIRST_ADDRESS;
    for (u32 at = first / 16; at <= (first + bytes - 1) / 16; ++at) {
        self->block->unfenced[at] = self->index + 1;
        self->unfenced.push_back(at);
    }
}
// For 16 lanes' stores of 8 bytes, at worst; 1 is the least.
void count_banks(const Block& block) {
    for (size_t first = 0; first + 16 <= block.threads.size(); first += 16)
        for (size_t i = 0; i < block.threads[first].addresses.size(); ++i) {
            int words[32] = {};
            for (size_t lane = first; lane < first + 16; ++lane)
                for (int word = 0; word < 2; ++word)
                    worst_of_stores =
                        std::max(worst_of_stores, ++words[(block.threads[lane].addresses[i] / 4 + word) % 32]);
        }
}
}  // namespace emulator
