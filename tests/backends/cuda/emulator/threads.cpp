// Who goes on.
#include <common/ptx.cuh>  // found by the path, so that it finds the next one

Coordinate threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
Launch launched;
Thread* self;
std::deque<Pending> pending;
bool kernel_before_done;

static jmp_buf scheduler;
static char message[512];
static bool failed;
static void (*body)();
static std::vector<std::vector<char>> until_then;  // what the kernel before leaves in memory
static std::vector<char*> free_stacks, free_memory;
static u64 lot;

// ---------------------------------------------------------------------------------------------------------- chance

u64 drawn() {
    lot ^= lot << 13, lot ^= lot >> 7, lot ^= lot << 17;
    return lot;
}
bool one_in(int times) { return launched.seed && drawn() % times == 0; }

// ----------------------------------------------------------------------------------------------------- going on

// Lets the others go on.
void pause(Wait wait) {
    self->wait = wait;
    if (!_setjmp(self->here)) _longjmp(scheduler, 1);
}

void fault(const char* format, ...) {
    if (!failed) {
        failed = true;
        va_list values;
        va_start(values, format);
        int length =
            self ? snprintf(message, sizeof message, "block %u, thread %u: ", self->block->index, self->index) : 0;
        vsnprintf(message + length, sizeof message - length, format, values);
        va_end(values);
    }
    if (self) pause(Wait::ENDED);  // never to come back
}

// --------------------------------------------------------------------------------------------------- a thread's end

void block_ended(Block& block) {
    for (const Pending& one : pending)
        if (one.block == &block) return fault("the block ends, and something is still on its way to it");
    for (int id = 0; id < NAMED_BARRIERS; ++id)
        if (block.named[id].arrived > 0)
            return fault("the block ends, and somebody's arrival at barrier %d is left over", id);
    for (const Thread& thread : block.threads) {
        if (thread.products.size() > 1)
            return fault("thread %u ends, and has products that nobody waited for", thread.index);
        if (!thread.stores.empty())
            return fault("thread %u ends, and the copy engine still reads what it stores", thread.index);
    }
}

void thread_ended() {
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
void start() {
    body();
    thread_ended();
}

bool may_go_on(const Thread& thread) {
    switch (thread.wait) {
        case Wait::NOTHING:
            return true;
        case Wait::PHASE:
            return (*thread.barrier >> 63) != thread.parity;
        case Wait::NAMED:
            return thread.block->named[thread.id].rounds != thread.round;
        case Wait::WARP:
            return thread.block->warps[thread.index / WARP].rounds != thread.round;
        case Wait::CLUSTER:
            return thread.block->cluster->rounds != thread.round;
        case Wait::KERNEL_BEFORE:
            return kernel_before_done;
        case Wait::ENDED:
            return false;
    }
    return false;
}
void resume(Thread& thread) {
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

char* from_pool(std::vector<char*>& pool, size_t bytes) {
    if (!pool.empty()) {
        char* found = pool.back();
        pool.pop_back();
        return found;
    }
    return static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}
constexpr size_t SHARED = 256 * 1024, BEHIND = 2048;  // bytes: what there is room for, and what is guarded
constexpr char GUARD = 77;

void begin(Cluster& cluster, int number) {
    cluster.blocks.resize(launched.cluster);
    cluster.alive = cluster.missing = launched.cluster * launched.threads;
    cluster.rounds = 0;
    for (int rank = 0; rank < launched.cluster; ++rank) {
        Block& block = cluster.blocks[rank];
        block.cluster = &cluster, block.rank = rank, block.index = number * launched.cluster + rank;
        block.alive = launched.threads;
        block.shared = from_pool(free_memory, SHARED);
        memset(block.shared, UNWRITTEN, launched.shared_bytes);
        memset(block.shared + launched.shared_bytes, GUARD, BEHIND);
        block.threads = std::vector<Thread>(launched.threads);
        block.warps.assign((launched.threads + WARP - 1) / WARP, Warp{});
        block.unfenced.assign(launched.shared_bytes / 16 + 1, 0);
        const int slow = one_in(4) ? 6 : 1;
        for (Warp& warp : block.warps) warp.pace = launched.seed ? slow * (1 + drawn() % 3) : 1;
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
void end(Cluster& cluster) {
    for (Block& block : cluster.blocks) {
        if (watches_stores) count_banks(block);
        for (size_t i = launched.shared_bytes; i < launched.shared_bytes + BEHIND; ++i)
            if (block.shared[i] != GUARD) {
                fault("block %u wrote to byte %zu of its %d of shared memory", block.index, i, launched.shared_bytes);
                break;
            }
        free_memory.push_back(block.shared);
        for (Thread& thread : block.threads) free_stacks.push_back(static_cast<char*>(thread.start.uc_stack.ss_sp));
    }
    cluster.blocks.clear();
}

void finish_kernel_before() {
    kernel_before_done = true;
    for (int i = 0; i < launched.written; ++i)
        memcpy(launched.before[i].memory, until_then[i].data(), launched.before[i].bytes);
}
void complete_one() {
    // By lot, or the oldest one.
    if (launched.seed) std::swap(pending[drawn() % pending.size()], pending.front());
    const Pending one = std::move(pending.front());
    pending.pop_front();
    one.run();
}

void tell_who_waits(std::vector<Cluster>& clusters) {
    static const char* names[] = {
        "its turn",         "an mbarrier", "a named barrier", "the others of its warp", "the cluster's barrier",
        "the kernel before"};
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

void run_side_by_side() {
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
            if (launched.seed && drawn() % block->warps[warp].pace) continue;
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

const char* launch(void (*kernel)(), const Launch& how) {
    launched = how, body = kernel, self = nullptr;
    failed = false, message[0] = 0;
    lot = 0x9e3779b97f4a7c15 ^ how.seed * 0xd1342543de82ef95;
    pending.clear();
    gridDim.x = how.grid, blockDim.x = how.threads;
    until_then.clear();
    for (int i = 0; i < how.written; ++i)
        until_then.emplace_back(how.before[i].memory, how.before[i].memory + how.before[i].bytes);
    for (int i = 0; i < how.written; ++i) {
        const Written& one = how.before[i];
        if (one.instead)
            memcpy(one.memory, one.instead, one.bytes);
        else
            memset(one.memory, UNWRITTEN, one.bytes);
    }
    kernel_before_done = how.written == 0;
    run_side_by_side();
    if (!kernel_before_done) finish_kernel_before();
    return message;
}
}  // namespace emulator
