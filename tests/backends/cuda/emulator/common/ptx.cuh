// Enough of CUDA for the quantisers' kernels, for those that prepare lists of products, and for how the tiles of a list
// are handed out, to run on a processor, a block after the other. It takes the place of the wrappers of the same name.
//
// The threads of a block are fibres. Each runs up to the next point where they meet, a barrier or a shuffle, and then
// the next one does: all threads of these kernels pass the same points, so every such point is a barrier. Where roles
// differ, that holds for the threads of a warp.
#pragma once
#include <ucontext.h>

#include "common/both.cuh"

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks do not run side by side

struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct Coordinate {
    int x;
};
static Coordinate threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
constexpr int MOST = 512, STACK = 32 * 1024, ROUNDS = 100000;
static bool gave_up;  // threads wait for one another, and nobody comes
static ucontext_t outside, fibres[MOST];
static char stacks[MOST][STACK];
static bool done[MOST];
static u64 exchanged[MOST];
static void (*body)();

inline void meet() {
    const int self = threadIdx.x;
    swapcontext(&fibres[self], &outside);
    threadIdx.x = self;
}
inline void start() {
    const int self = threadIdx.x;
    body();
    done[self] = true;
    swapcontext(&fibres[self], &outside);
}
inline void run_block() {
    for (int i = 0; i < blockDim.x; ++i) {
        getcontext(&fibres[i]);
        fibres[i].uc_stack.ss_sp = stacks[i];
        fibres[i].uc_stack.ss_size = STACK;
        makecontext(&fibres[i], start, 0);
        done[i] = false;
    }
    int rounds = 0;
    for (bool any = true; any && !gave_up;) {
        any = false;
        gave_up = ++rounds > ROUNDS;
        for (int i = 0; i < blockDim.x; ++i) {
            if (done[i]) continue;
            threadIdx.x = i;
            swapcontext(&outside, &fibres[i]);
            any = true;
        }
    }
}
inline void launch(void (*kernel)(), int grid, int threads) {
    body = kernel;
    gridDim.x = grid, blockDim.x = threads;
    gave_up = false;
    for (blockIdx.x = 0; blockIdx.x < grid && !gave_up; ++blockIdx.x) run_block();
}
}  // namespace emulator

inline void __syncthreads() { emulator::meet(); }

// What another thread gives.
template <typename T>
T from_thread(int other, T value) {
    static_assert(sizeof(T) <= 8);
    __builtin_memcpy(&emulator::exchanged[threadIdx.x], &value, sizeof(T));
    emulator::meet();
    __builtin_memcpy(&value, &emulator::exchanged[other], sizeof(T));
    emulator::meet();  // nobody writes before all have read
    return value;
}
template <typename T>
T __shfl_xor_sync(u32, T value, int step) {
    return from_thread(threadIdx.x ^ step, value);
}
template <typename T>
T __shfl_sync(u32, T value, int lane) {
    return from_thread(threadIdx.x / 32 * 32 + lane, value);
}
template <typename T>
T __shfl_up_sync(u32, T value, int step) {
    return from_thread(threadIdx.x % 32 >= step ? threadIdx.x - step : threadIdx.x, value);
}

inline void __syncwarp() { emulator::meet(); }
inline int __reduce_add_sync(u32, int value) {
    emulator::exchanged[threadIdx.x] = value;
    emulator::meet();
    u32 sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += emulator::exchanged[threadIdx.x / 32 * 32 + lane];
    emulator::meet();
    return sum;
}

// Maps that a test can read.
struct alignas(64) TensorMap {
    u64 address, pitch;
    u32 columns, rows;
    char rest[104];
};
static_assert(sizeof(TensorMap) == 128, "as the driver's");
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
    if (threadIdx.x % 32 == 0) *target = *map;
}
inline void fence_proxy_tensormap_acquire(const TensorMap*) {}

// Barriers that count who arrives. Who waits for one lets the others go on; blocks are alone in their clusters.
struct Barrier {
    unsigned short expected, arrived;
    u32 phase;
};
inline void mbarrier_init(u64* at, int expected) {
    *reinterpret_cast<Barrier*>(at) = {static_cast<unsigned short>(expected), 0, 0};
}
inline void mbarrier_arrive(u64* at) {
    Barrier* barrier = reinterpret_cast<Barrier*>(at);
    if (++barrier->arrived < barrier->expected) return;
    barrier->arrived = 0;
    barrier->phase ^= 1;
}
inline void mbarrier_wait(u64* at, u32 phase) {
    while (reinterpret_cast<volatile Barrier*>(at)->phase == phase) emulator::meet();
}
inline void fence_mbarrier_init() {}
// Barriers with a number, of so many threads.
static int named_arrived[16], named_rounds[16];
inline void named_barrier_arrive(int id, int threads) {
    if (++named_arrived[id] < threads) return;
    named_arrived[id] = 0;
    ++named_rounds[id];
}
inline void named_barrier_sync(int id, int threads) {
    const int round = named_rounds[id];
    named_barrier_arrive(id, threads);
    while (*const_cast<volatile int*>(&named_rounds[id]) == round && !emulator::gave_up) emulator::meet();
}
inline u32 cluster_ctarank() { return 0; }
u32 mapa(const void*, u32);
void st_async(u32, int, u32);
void mbarrier_arrive_in(u64*, u32);
void mbarrier_arrive_expect_tx_in(u64*, u32, u32);
inline int atomicAdd(int* at, int value) {
    const int before = *at;
    *at += value;
    return before;
}
inline int uniform(int value) { return value; }

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

template <typename T>
T __ldcg(const T* from) {
    return *from;
}

inline u32 __vmaxu2(u32 a, u32 b) {
    const u32 low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
    const u32 high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return low | high << 16;
}
inline u32 __vmaxs2(u32 a, u32 b) { return __vmaxu2(a ^ 0x80008000, b ^ 0x80008000) ^ 0x80008000; }
inline float ex2_approx(float x) { return __builtin_exp2f(x); }
inline float rcp_approx(float x) { return 1.0f / x; }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }

// Through numbers that hold every half exactly, or are rounded once.
inline float widen_fp16(unsigned short half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float sign = half & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    return sign *
           (exponent ? __builtin_ldexpf(1024.0f + mantissa, exponent - 25) : __builtin_ldexpf(float(mantissa), -24));
}
inline unsigned short narrow_fp16(float value) {
    const unsigned short sign = __builtin_signbit(value) ? 0x8000 : 0;
    const float size = __builtin_fabsf(value);
    if (__builtin_isnan(value)) return 0x7fff;
    if (size == 0.0f) return sign;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent = 0;
    __builtin_frexpf(size, &exponent);
    const int step = exponent - 11 < -24 ? -24 : exponent - 11;
    const int steps = static_cast<int>(__builtin_nearbyintf(__builtin_ldexpf(size, -step)));
    return static_cast<unsigned short>(sign + (steps + ((step + 24) << 10)));
}
