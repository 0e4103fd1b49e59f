// Where threads meet.
#include <common/ptx.cuh>  // found by the path, so that it finds the next one

namespace emulator {
void meet_warp(const char* at) {
    Warp& warp = self->block->warps[self->index / WARP];
    if (warp.arrived > 0 && strcmp(warp.at, at))
        return fault("lanes of a warp meet at %s, where others are at %s", at, warp.at);
    warp.at = at;
    self->round = warp.rounds;
    if (++warp.arrived < WARP) return pause(Wait::WARP);
    warp.arrived = 0;
    ++warp.rounds;
}
void left_cluster_barrier(Cluster& cluster) {
    if (cluster.missing > 0) return;
    ++cluster.rounds;
    cluster.missing = cluster.alive;
    for (Block& block : cluster.blocks)
        for (Thread& thread : block.threads) thread.arrived_in_cluster = false;
}
void arrive_named(Block& block, int id, int threads) {
    Named& barrier = block.named[id];
    if (barrier.arrived > 0 && barrier.threads != threads)
        return fault("barrier %d is one of %d threads, and was one of %d", id, threads, barrier.threads);
    barrier.threads = threads;
    if (++barrier.arrived < threads) return;
    barrier.arrived = 0;
    ++barrier.rounds;
}
void arrived(Barrier& barrier, int count, int bytes) {
    if (barrier.arrived + count > barrier.expected) return fault("more arrive at an mbarrier than it expects");
    barrier.arrived += count;
    barrier.bytes += bytes;
    if (barrier.arrived < barrier.expected || barrier.bytes != 0) return;
    barrier.arrived = 0;
    barrier.phase ^= 1;
}

Block& block_of_rank(u32 rank) {
    Cluster& cluster = *self->block->cluster;
    if (rank >= cluster.blocks.size()) fault("rank %u of a cluster of %zu", rank, cluster.blocks.size());
    Block& found = cluster.blocks[rank];
    if (found.alive == 0) fault("block %u of the cluster is touched, and is not there any more", rank);
    return found;
}
void send(Block& block, std::function<void()> run) { pending.push_back({&block, std::move(run)}); }
}  // namespace emulator

void named_barrier_arrive(int id, int threads) { emulator::arrive_named(*emulator::self->block, id, threads); }
void named_barrier_sync(int id, int threads) {
    using namespace emulator;
    self->id = id, self->round = self->block->named[id].rounds;
    arrive_named(*self->block, id, threads);
    if (self->block->named[id].rounds == self->round) pause(Wait::NAMED);
}
// For all threads that are still there.
void __syncthreads() {
    using namespace emulator;
    Named& all = self->block->named[0];
    self->id = 0, self->round = all.rounds;
    if (++all.arrived < self->block->alive) return pause(Wait::NAMED);
    all.arrived = 0;
    ++all.rounds;
}

// Whether something holds for all of them. The second barrier: nobody says so of the next time before all have heard.
int __syncthreads_and(int holds) {
    bool& all = emulator::self->block->all_hold;
    all &= holds != 0;
    __syncthreads();
    const bool found = all;
    __syncthreads();
    all = true;
    return found;
}

void cluster_arrive() {
    using namespace emulator;
    Cluster& cluster = *self->block->cluster;
    if (self->arrived_in_cluster) return fault("arrives at the cluster's barrier twice");
    self->arrived_in_cluster = true;
    self->round = cluster.rounds;
    --cluster.missing;
    left_cluster_barrier(cluster);
}
void cluster_wait() {
    using namespace emulator;
    // Whoever has not arrived since the last round was let through by all others.
    if (self->arrived_in_cluster) {
        self->round = self->block->cluster->rounds;
        pause(Wait::CLUSTER);
    }
}
