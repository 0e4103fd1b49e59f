// Results on their way out, as a processor can follow them: what the copy engine does with tensor maps of results, and
// what else an epilogue calls. To be included after the stand-in for common/ptx.cuh.
//
// A copy is done as late as it may be, when somebody waits for it: who writes to its source too early is found out.
// Like the hardware it writes whole 16 bytes at a row's end. Where bytes lie is worked out from the bits of addresses,
// as the swizzle is defined, and not as the kernels do it.
#pragma once
#include <cstdlib>
#include <vector>

struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __uint_as_float(u32 bits) { return float_of(bits); }
inline float __int_as_float(int bits) { return float_of(bits); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(__builtin_nearbyintf(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
template <typename T>
T __ldg(const T* from) {
    return *from;
}
inline void fence_proxy_async() {}

inline u32 rounded_bf16(float value) {
    const u32 bits = bits_of(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return rounded_bf16(low) | rounded_bf16(high) << 16; }
inline u32 pack_fp16(float low, float high) { return narrow_fp16(low) | u32(narrow_fp16(high)) << 16; }

namespace emulator {
struct Copy {
    const TensorMap* map;
    const char* source;
    int inner, outer;
    bool adds;
};
static std::vector<std::vector<Copy>> groups[MOST];  // of a thread: those that are committed, and the one that is not
static bool bad_address;
static int stored, added;  // copies of either kind
// Addresses of each thread's stores of 8 bytes, one after the other.
static std::vector<u64> stores[MOST];

// A map's box, behind what TensorMap names: columns and bytes of an element.
struct Box {
    int columns, element_bytes;
};
inline Box& box(const TensorMap* map) { return *reinterpret_cast<Box*>(const_cast<char*>(map->rest)); }

inline void move(const Copy& copy) {
    const TensorMap& map = *copy.map;
    const auto [columns, size] = box(copy.map);
    const int width = columns * size;
    bad_address |= (map.address | map.pitch) % 16 || reinterpret_cast<u64>(copy.source) % (width * 8);
    for (int row = 0; row < 64; ++row)
        for (int chunk = 0; chunk < width / 16; ++chunk) {
            const int col = copy.inner + chunk * 16 / size;
            if (copy.outer + row >= static_cast<int>(map.rows) || col >= static_cast<int>(map.columns)) continue;
            // Bits 4 and up of a byte's place are turned by bits 7 and up.
            const int linear = row * width + chunk * 16;
            const char* from = copy.source + (linear ^ ((linear >> 7) % (width / 16) << 4));
            char* to = reinterpret_cast<char*>(map.address) + (copy.outer + row) * map.pitch + u64(col) * size;
            if (!copy.adds)
                __builtin_memcpy(to, from, 16);
            else
                for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(to)[i] += reinterpret_cast<const float*>(from)[i];
        }
}
inline void copy(const TensorMap* map, const void* source, int inner, int outer, bool adds) {
    auto& mine = groups[threadIdx.x];
    if (mine.empty()) mine.emplace_back();
    ++(adds ? added : stored);
    mine.back().push_back({map, static_cast<const char*>(source), inner, outer, adds});
}
// How often the banks of shared memory are gone through for 16 lanes' stores of 8 bytes, at worst; 1 is the least.
inline int worst_store() {
    int worst = 0;
    for (int first = 0; first < MOST; first += 16)
        for (size_t i = 0; i < stores[first].size(); ++i) {
            int words[32] = {};
            for (int lane = first; lane < first + 16; ++lane)
                for (int word = 0; word < 2; ++word) {
                    const int times = ++words[(stores[lane][i] / 4 + word) % 32];
                    worst = times > worst ? times : worst;
                }
        }
    return worst;
}
}  // namespace emulator

inline void tma_store_2d(const TensorMap* map, const void* source, int inner, int outer) {
    emulator::copy(map, source, inner, outer, false);
}
inline void tma_store_3d(const TensorMap*, const void*, int, int, int) { std::abort(); }  // of batches
inline void tma_reduce_add_2d(const TensorMap* map, const void* source, int inner, int outer) {
    emulator::copy(map, source, inner, outer, true);
}
inline void bulk_commit_group() {
    auto& mine = emulator::groups[threadIdx.x];
    if (mine.empty()) mine.emplace_back();
    mine.emplace_back();
}
template <int pending>
void bulk_wait_group_read() {
    auto& mine = emulator::groups[threadIdx.x];
    while (mine.size() > pending + 1) {
        for (const auto& one : mine.front()) emulator::move(one);
        mine.erase(mine.begin());
    }
}

inline void st_shared_v2(void* target, float x, float y) {
    const float both[2] = {x, y};
    __builtin_memcpy(target, both, 8);
    emulator::stores[threadIdx.x].push_back(reinterpret_cast<u64>(target));
}
// Four 8 by 8 matrices; lanes 8 i to 8 i + 7 have the addresses of the rows of the i-th.
inline void stmatrix_x4(void* target, u32 a, u32 b, u32 c, u32 d) {
    static u64 targets[emulator::MOST];
    targets[threadIdx.x] = reinterpret_cast<u64>(target);
    emulator::meet();
    const u32 values[4] = {a, b, c, d};
    const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i)
        __builtin_memcpy(reinterpret_cast<char*>(targets[warp + 8 * i + lane / 4]) + lane % 4 * 4, &values[i], 4);
    emulator::meet();
}
