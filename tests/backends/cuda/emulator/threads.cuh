// Threads of a GPU as fibres of one processor's thread: a block's, or those of all blocks of some clusters, side by side.
// Each runs until it has to wait. Which warp goes on next is drawn by lot, so that roles meet in orders that a GPU shows
// once in a million launches; the same seed gives the same order. If nobody can go on, that is a fault, and so is all
// else that the hardware leaves undefined: the message says who, and what he waits for.
#pragma once

struct Coordinate {
    u32 x;
};
static Coordinate threadIdx, blockIdx, blockDim, gridDim;

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
    std::vector<u32> unfenced;           // 16 bytes of shared memory that were written and not yet shown to the copy engine
    std::vector<const void*> acquired;   // tensor maps in memory that the thread may use
    std::vector<u64> addresses;          // of its stores of 8 bytes, if somebody watches them
};
struct Warp {
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
// Memory that the kernel before this one writes: until it is done there is something else there.
struct Written {
    char* memory;
    u64 bytes;
};

struct Launch {
    int grid, threads, cluster = 1, shared_bytes = 0;
    int at_once = 1;  // clusters that run side by side
    u64 seed = 0;     // 0: everyone in turn, and everything as late as it may be
    const Written* before = nullptr;
    int written = 0;
};

static Launch launched;
static Thread* self;  // whose turn it is, or null
static jmp_buf scheduler;
static char message[512];
static bool failed;
static void (*body)();
static std::vector<Pending> pending;
static bool kernel_before_done;
static std::vector<std::vector<char>> until_then;
static std::vector<char*> free_stacks, free_memory;
static u64 lot;

// ---------------------------------------------------------------------------------------------------------- chance

inline u64 drawn() {
    lot ^= lot << 13, lot ^= lot >> 7, lot ^= lot << 17;
    return lot;
}
inline bool one_in(int times) { return launched.seed && drawn() % times == 0; }

// ----------------------------------------------------------------------------------------------------- going on

[[gnu::format(printf, 1, 2)]] inline void fault(const char* format, ...);

// Lets the others go on.
inline void pause(Wait wait) {
    self->wait = wait;
    if (!_setjmp(self->here)) _longjmp(scheduler, 1);
}
inline void meet() { pause(Wait::NOTHING); }
// Others may go on here, where it shows whether they were right to.
inline void perhaps_meet() {
    if (one_in(20)) meet();
}

inline void fault(const char* format, ...) {
    if (!failed) {
        failed = true;
        va_list values;
        va_start(values, format);
        int length = self ? snprintf(message, sizeof message, "block %u, thread %u: ", self->block->index, self->index) : 0;
        vsnprintf(message + length, sizeof message - length, format, values);
        va_end(values);
    }
    if (self) pause(Wait::ENDED);  // never to come back
}

inline void left_cluster_barrier(Cluster& cluster) {
    if (cluster.missing > 0) return;
    ++cluster.rounds;
    cluster.missing = cluster.alive;
    for (Block& block : cluster.blocks)
        for (Thread& thread : block.threads) thread.arrived_in_cluster = false;
}
inline void arrive_named(Block& block, int id, int threads) {
    Named& barrier = block.named[id];
    if (barrier.arrived > 0 && barrier.threads != threads)
        return fault("barrier %d is one of %d threads, and was one of %d", id, threads, barrier.threads);
    barrier.threads = threads;
    if (++barrier.arrived < threads) return;
    barrier.arrived = 0;
    ++barrier.rounds;
}

void block_ended(Block& block);
static bool watches_stores;  // of 8 bytes, to find
static int worst_of_stores;  // how often the banks of shared memory are gone through for one
void count_banks(const Block& block);

inline void thread_ended() {
    Thread& thread = *self;
    Block& block = *thread.block;
    Cluster& cluster = *block.cluster;
    --block.alive, --cluster.alive;
    if (!thread.arrived_in_cluster) --cluster.missing;
    left_cluster_barrier(cluster);
    // __syncthreads is for those that are still there.
    Named& all = block.named[0];
    if (all.arrived > 0 && all.arrived == block.alive) all.arrived = 0, ++all.rounds;
    if (block.alive == 0) block_ended(block);
    pause(Wait::ENDED);
}
inline void start() {
    body();
    thread_ended();
}

inline bool may_go_on(const Thread& thread) {
    switch (thread.wait) {
        case Wait::NOTHING: return true;
        case Wait::PHASE: return (*thread.barrier >> 63) != thread.parity;
        case Wait::NAMED: return thread.block->named[thread.id].rounds != thread.round;
        case Wait::WARP: return thread.block->warps[thread.index / WARP].rounds != thread.round;
        case Wait::CLUSTER: return thread.block->cluster->rounds != thread.round;
        case Wait::KERNEL_BEFORE: return kernel_before_done;
        case Wait::ENDED: return false;
    }
    return false;
}
inline void resume(Thread& thread) {
    self = &thread;
    threadIdx.x = thread.index, blockIdx.x = thread.block->index;
    if (!_setjmp(scheduler)) {
        if (thread.started) _longjmp(thread.here, 1);
        thread.started = true;
        setcontext(&thread.start);
    }
    self = nullptr;
}

// ------------------------------------------------------------------------------------------------------- a launch

inline char* from_pool(std::vector<char*>& pool, size_t bytes) {
    if (!pool.empty()) {
        char* found = pool.back();
        pool.pop_back();
        return found;
    }
    return static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}
constexpr size_t SHARED = 256 * 1024;
constexpr char UNWRITTEN = -1, GUARD = 77;  // NaN, in all types of floats

inline void begin(Cluster& cluster, int number) {
    cluster.blocks.resize(launched.cluster);
    cluster.alive = cluster.missing = launched.cluster * launched.threads;
    cluster.rounds = 0;
    for (int rank = 0; rank < launched.cluster; ++rank) {
        Block& block = cluster.blocks[rank];
        block.cluster = &cluster, block.rank = rank, block.index = number * launched.cluster + rank;
        block.alive = launched.threads;
        block.shared = from_pool(free_memory, SHARED);
        memset(block.shared, UNWRITTEN, launched.shared_bytes);
        memset(block.shared + launched.shared_bytes, GUARD, SHARED - launched.shared_bytes);
        block.threads = std::vector<Thread>(launched.threads);
        block.warps.assign((launched.threads + WARP - 1) / WARP, Warp{});
        block.unfenced.assign(SHARED / 16, 0);
        for (Named& one : block.named) one = {};
        for (int i = 0; i < launched.threads; ++i) {
            Thread& thread = block.threads[i];
            thread.block = &block, thread.index = i, thread.wait = Wait::NOTHING;
            thread.started = thread.arrived_in_cluster = false;
            getcontext(&thread.start);
            thread.start.uc_stack.ss_sp = from_pool(free_stacks, STACK);
            thread.start.uc_stack.ss_size = STACK;
            makecontext(&thread.start, start, 0);
        }
    }
}
inline void end(Cluster& cluster) {
    for (Block& block : cluster.blocks) {
        if (watches_stores) count_banks(block);
        for (size_t i = launched.shared_bytes; i < SHARED; ++i)
            if (block.shared[i] != GUARD) {
                fault("block %u wrote to byte %zu of its %d of shared memory", block.index, i, launched.shared_bytes);
                break;
            }
        free_memory.push_back(block.shared);
        for (Thread& thread : block.threads) free_stacks.push_back(static_cast<char*>(thread.start.uc_stack.ss_sp));
    }
    cluster.blocks.clear();
}

inline void finish_kernel_before() {
    kernel_before_done = true;
    for (int i = 0; i < launched.written; ++i)
        memcpy(launched.before[i].memory, until_then[i].data(), launched.before[i].bytes);
}
inline void complete_one() {
    const size_t which = launched.seed ? drawn() % pending.size() : 0;
    const Pending one = pending[which];
    pending.erase(pending.begin() + which);
    one.run();
}

inline void tell_who_waits(std::vector<Cluster>& clusters) {
    static const char* names[] = {"its turn",           "an mbarrier", "a named barrier", "the others of its warp",
                                  "the cluster's barrier", "the kernel before"};
    for (Cluster& cluster : clusters)
        for (Block& block : cluster.blocks)
            for (Thread& thread : block.threads) {
                if (thread.wait == Wait::ENDED) continue;
                char where[64] = "";
                if (thread.wait == Wait::PHASE)
                    snprintf(where, sizeof where, " at byte %d for phase %u",
                             int(reinterpret_cast<const char*>(thread.barrier) - block.shared), thread.parity);
                if (thread.wait == Wait::NAMED) snprintf(where, sizeof where, " %d", thread.id);
                return fault("nobody can go on: block %u, thread %u waits for %s%s", block.index, thread.index,
                             names[int(thread.wait)], where);
            }
}

inline void run_side_by_side() {
    const int count = launched.grid / launched.cluster;
    std::vector<Cluster> clusters(std::min(launched.at_once, count));
    int next = 0, left = count;
    for (Cluster& cluster : clusters) begin(cluster, next++);
    std::vector<std::pair<Block*, int>> order;
    for (int rounds = 0; left > 0 && !failed; ++rounds) {
        if (rounds == ROUNDS) return fault("this takes too long");
        order.clear();
        for (Cluster& cluster : clusters)
            for (Block& block : cluster.blocks)
                for (size_t warp = 0; warp < block.warps.size(); ++warp) order.emplace_back(&block, warp);
        if (launched.seed)
            for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[drawn() % i]);
        bool anybody = false;
        for (const auto& [block, warp] : order) {
            bool able = false;
            const size_t first = warp * WARP, last = std::min(first + WARP, block->threads.size());
            for (size_t i = first; i < last && !able; ++i) able = may_go_on(block->threads[i]);
            if (!able) continue;
            anybody = true;  // a warp may be late without need, but not all of them for ever
            if (one_in(3)) continue;
            for (size_t i = first; i < last && !failed; ++i) {
                if (may_go_on(block->threads[i])) resume(block->threads[i]);
                if (one_in(100)) break;  // lanes, too, may be late
            }
            while (!failed && !pending.empty() && launched.seed % 3 == 1 && one_in(2)) complete_one();
            if (failed) return;
        }
        if (!kernel_before_done && (one_in(8) || (!anybody && pending.empty()))) {
            finish_kernel_before();
            continue;
        }
        if (!pending.empty() && (!anybody || launched.seed % 3 == 2)) {
            complete_one();
            continue;
        }
        for (Cluster& cluster : clusters) {
            if (cluster.blocks.empty() || cluster.alive > 0) continue;
            end(cluster);
            --left, anybody = true;
            if (next < count) begin(cluster, next++);
        }
        if (!anybody && !failed) return tell_who_waits(clusters);
    }
}

// The message of a fault, or an empty one.
inline const char* launch(void (*kernel)(), const Launch& how) {
    launched = how, body = kernel, self = nullptr;
    failed = false, message[0] = 0;
    lot = 0x9e3779b97f4a7c15 ^ how.seed * 0xd1342543de82ef95;
    pending.clear();
    gridDim.x = how.grid, blockDim.x = how.threads;
    until_then.clear();
    for (int i = 0; i < how.written; ++i) {
        const auto [memory, bytes] = how.before[i];
        until_then.emplace_back(memory, memory + bytes);
        memset(memory, UNWRITTEN, bytes);
    }
    kernel_before_done = how.written == 0;
    run_side_by_side();
    if (!kernel_before_done) finish_kernel_before();
    return message;
}
inline char* shared_memory() { return self->block->shared; }
}  // namespace emulator
