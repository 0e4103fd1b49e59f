// Threads of a GPU as fibres of one processor's thread: a block's, or those of all blocks of some clusters, side by
// side. Each runs until it has to wait. Which warp goes on next is drawn by lot, so that roles meet in orders that a
// GPU shows once in a million launches; the same seed gives the same order. If nobody can go on, that is a fault, and
// so is all else that the hardware leaves undefined: the message says who waits, and for what.
#pragma once

struct Coordinate {
    u32 x;
};
extern Coordinate threadIdx, blockIdx, blockDim, gridDim;

// Maps that the host packs (emulated.py), and a test can read.
struct alignas(64) TensorMap {
    u64 address, pitch;  // bytes
    u32 columns, rows;
    u64 step;   // from a matrix to the next one,
    u32 count;  // of which there are so many, or 0: there is no third dimension
    u32 box_columns, box_rows, element_bytes;
    char rest[80];
};
static_assert(sizeof(TensorMap) == 128, "as the driver's");

namespace emulator {
constexpr int WARP = 32, STACK = 64 * 1024, ROUNDS = 2000000, NAMED_BARRIERS = 16;
constexpr char UNWRITTEN = -1;       // NaN, in all types of floats
constexpr u32 FIRST_ADDRESS = 1024;  // of dynamic shared memory: what lies before is the system's

enum class Wait { NOTHING, PHASE, NAMED, WARP, CLUSTER, KERNEL_BEFORE, ENDED };

struct Block;
struct Cluster;

// What a thread has of a product that the tensor cores were told to make.
struct Product {
    void* sums;
    u64 left, right;
    bool add;
    void (*make)(const Product&);
};
// What the copy engine was told to write.
struct Store {
    TensorMap map;
    const char* source;
    int inner, outer, number;
    bool adds;
};

struct Thread {
    Block* block;
    u32 index;
    Wait wait;
    const u64* barrier;  // of a PHASE
    u32 parity;
    int id, round;  // of a NAMED one, and which time it is; of a WARP or CLUSTER likewise
    bool started, arrived_in_cluster;
    ucontext_t start;
    jmp_buf here;
    std::vector<std::vector<Product>> products;  // groups that are committed, and the one that is not
    std::vector<std::vector<Store>> stores;
    std::vector<u32> unfenced;  // 16 bytes of shared memory that were written and not yet shown to the copy engine
    std::vector<const void*> acquired;  // tensor maps in memory that the thread may use
    std::vector<u64> addresses;         // of its stores of 8 bytes, if somebody watches them
};
struct Warp {
    int pace;  // one in so many times it goes on, on average
    int arrived, rounds;
    const char* at;  // where they meet
    u64 values[WARP];
};
struct Named {
    int arrived, rounds, threads;
};
struct Block {
    Cluster* cluster;
    u32 index, rank;
    int alive;
    char* shared;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Named named[NAMED_BARRIERS];
    bool all_hold = true;                  // what __syncthreads_and asks
    std::vector<unsigned short> unfenced;  // by 16 bytes: the thread that wrote them, counted from 1, or 0
};
struct Cluster {
    std::vector<Block> blocks;
    int alive, missing, rounds;  // threads that are not done, and those not yet at its barrier
};
// Something that happens some time later, in or with the shared memory of a block.
struct Pending {
    Block* block;
    std::function<void()> run;
};
// Memory that the kernel before this one writes: until it is done there is something else there, as given or no number.
struct Written {
    char* memory;
    u64 bytes;
    const char* instead;
};

struct Launch {
    int grid, threads, cluster = 1, shared_bytes = 0;
    int at_once = 1;  // clusters that run side by side
    u64 seed = 0;     // 0: everyone in turn, and everything as late as it may be
    const Written* before = nullptr;
    int written = 0;
};

extern Launch launched;
extern Thread* self;  // whose turn it is, or null
extern std::deque<Pending> pending;
extern bool kernel_before_done;

// The message of a fault, or an empty one.
const char* launch(void (*kernel)(), const Launch& how);

bool one_in(int times);  // under a seed; else never
void pause(Wait wait);   // lets the others go on
inline void meet() { pause(Wait::NOTHING); }
// Others may go on here, where it shows whether they were right to.
inline void perhaps_meet() {
    if (one_in(20)) meet();
}
[[gnu::format(printf, 1, 2)]] void fault(const char* format, ...);
inline char* shared_memory() { return self->block->shared; }
}  // namespace emulator
