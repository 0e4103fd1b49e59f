// D[M, N] = A[M, K] B[N, K]^T on Hopper: the skeleton. Some warps load, one or two warpgroups multiply by wgmma, with a
// ring of stages between them. A mainloop makes a tile's sums, an epilogue writes them.
//
// wgmma takes 64 rows of its left operand and any multiple of 8 of its right one. With many rows A is the left operand;
// with few (SWAP) B is, so that 64 rows are never padding: a tile's rows are then rows of B and its columns rows of A.
//
// A cluster of blocks works together in two ways. SHARE blocks have neighbouring tiles, and each loads its part of the
// operand that they have in common for all of them. SPLIT blocks have the same tile and a part of K each.
//
// A stage carries the operands of 128 of K, by TMA, and the scales that belong to them, by warps of their own.
//
// The source that includes this (see sm90.py) defines the constants in capitals that are not defined here.
#pragma once
#include "common/pipeline.cuh"
#include "common/scheduler.cuh"

constexpr int BLOCK_K = 128;  // bytes: one swizzled row, and one block of scales
constexpr int K_BLOCKS = (SHAPE_K + BLOCK_K - 1) / BLOCK_K;
constexpr int TILE_ROWS = 64 * WAVES * MATH_GROUPS;
constexpr int LEFT_BYTES = TILE_ROWS * BLOCK_K;
constexpr int RIGHT_BYTES = TILE_COLS * BLOCK_K;
constexpr int STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES;
constexpr int SHARE = LEFT_SHARE * RIGHT_SHARE;
constexpr int CLUSTER = SHARE * SPLIT;
static_assert(LEFT_SHARE == 1 || RIGHT_SHARE == 1, "blocks share one operand");
// Two math groups need more registers than a third of the file: the loaders' warpgroup gives its own back.
constexpr bool REBALANCE = MATH_GROUPS == 2;
constexpr int LOADER_WARPS = REBALANCE ? 4 : 2;
constexpr int THREADS = 128 * MATH_GROUPS + 32 * LOADER_WARPS;
constexpr int LOADER_REGISTERS = 56;
constexpr int MATH_REGISTERS = 224;

enum : int { NO_SCALE, PER_ROW, PER_BLOCK };      // of an operand: for each block of K, one per row or one per 128 rows
constexpr bool CROSSES = 128 % TILE_COLS != 0;    // a tile's columns may meet two blocks of scales
constexpr bool FOLDED = LEFT_SCALE == PER_BLOCK;  // the tile's rows have one scale: it goes into those of its columns
static_assert(!FOLDED || (RIGHT_SCALE == PER_ROW && 128 % TILE_ROWS == 0), "one scale for the tile's rows");
constexpr int LEFT_SCALES = LEFT_SCALE == PER_ROW ? TILE_ROWS : 0;
constexpr int RIGHT_SCALES = RIGHT_SCALE == NO_SCALE ? 0 : RIGHT_SCALE == PER_ROW ? TILE_COLS : CROSSES ? 2 : 1;
constexpr int STAGE_SCALES = (LEFT_SCALES + RIGHT_SCALES + 1) / 2 * 2;  // they come with the stage they belong to
constexpr int SCALES_AT_ONCE = 4;                                       // blocks of K, that is, of one row
static_assert(SCALES_AT_ONCE % DEPTH == 0, "parts of K are whole groups of DEPTH");
constexpr int SCALE_WARPS = STAGE_SCALES == 0 ? 0 : LOADER_WARPS - 1;

struct Arguments {
    const float* a_scale;
    const float* b_scale;
    const void* bias;
    void* out;
    long long out_stride;  // in elements
    int shape_m;
    int bias_type;  // of epilogue.cuh
};

#include "sm90/epilogue.cuh"
#include "sm90/mainloop_fp8.cuh"

using Ring = Pipeline<STAGES>;

struct Shared {
    char* out;
    char* stages;
    float* scales;  // [STAGES][STAGE_SCALES]
    Ring* ring;
};

// What a block works on: its tiles, one after the other, and its part of K.
struct Work {
    int left_rows, right_rows;
    int row_packs, col_packs;  // tiles, in packs of those that a cluster works on together
    int share_rank, first_block, end_block;

    __device__ __forceinline__ Work(int shape_m) {
        const int rank = CLUSTER > 1 ? cluster_ctarank() : 0, split_rank = rank / SHARE;
        left_rows = SWAP ? SHAPE_N : shape_m;
        right_rows = SWAP ? shape_m : SHAPE_N;
        row_packs = (left_rows + TILE_ROWS * RIGHT_SHARE - 1) / (TILE_ROWS * RIGHT_SHARE);
        col_packs = (right_rows + TILE_COLS * LEFT_SHARE - 1) / (TILE_COLS * LEFT_SHARE);
        share_rank = rank % SHARE;
        // Parts of K begin where scales are read, and are whole groups of DEPTH; what lies past K is zero.
        constexpr int groups = (K_BLOCKS + SCALES_AT_ONCE - 1) / SCALES_AT_ONCE;
        constexpr int end = (K_BLOCKS + DEPTH - 1) / DEPTH * DEPTH;
        first_block = groups * split_rank / SPLIT * SCALES_AT_ONCE;
        end_block = min(groups * (split_rank + 1) / SPLIT * SCALES_AT_ONCE, end);
    }
    __device__ __forceinline__ int blocks() const { return end_block - first_block; }
    __device__ __forceinline__ int first() const { return blockIdx.x / CLUSTER; }
    __device__ __forceinline__ int step() const { return gridDim.x / CLUSTER; }
    __device__ __forceinline__ bool has(int index) const { return index < row_packs * col_packs; }
    __device__ __forceinline__ Tile tile(int index) const {
        const Tile pack = dense_tile(index, row_packs, col_packs, BAND);
        return {pack.row * RIGHT_SHARE + (RIGHT_SHARE > 1 ? share_rank : 0),
                pack.col * LEFT_SHARE + (LEFT_SHARE > 1 ? share_rank : 0)};
    }
};

// One operand's tile; of a shared one, this block's part, to all blocks that share it.
template <int rows, int share>
__device__ __forceinline__ void load_operand(char* target, const TensorMap* map, u64* full, int block, int tile,
                                             const Work& work) {
    if constexpr (share == 1) {
        tma_load_2d(target, map, full, block * BLOCK_K, tile * rows);
    } else {
        constexpr int part = rows / share;
        const unsigned short sharers = ((1 << share) - 1) << (cluster_ctarank() - work.share_rank);
        tma_load_2d_multicast(target + work.share_rank * part * BLOCK_K, map, full, block * BLOCK_K,
                              tile * rows + work.share_rank * part, sharers);
    }
}

__device__ __forceinline__ void load_operands(const Work& work, const Shared& shared, const TensorMap* map_left,
                                              const TensorMap* map_right) {
    Position<STAGES> at;
    for (int index = work.first(); work.has(index); index += work.step()) {
        const Tile tile = work.tile(index);
        for (int block = work.first_block; block < work.end_block; ++block) {
            char* stage = shared.stages + at.stage * STAGE_BYTES;
            u64* full = &shared.ring->full[at.stage];
            mbarrier_wait(&shared.ring->empty[at.stage], at.phase ^ 1);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            load_operand<TILE_ROWS, LEFT_SHARE>(stage, map_left, full, block, tile.row, work);
            load_operand<TILE_COLS, RIGHT_SHARE>(stage + LEFT_BYTES, map_right, full, block, tile.col, work);
            at.advance();
        }
    }
}

// The scales of a row for a few blocks of K, in one read if their alignment allows it: each read of a warp touches as
// many cache lines as it has rows, and lines are what the way to shared memory has few of. Past the end of K they are
// zero.
__device__ __forceinline__ void read_scales(float (&values)[SCALES_AT_ONCE], const float* row, int block) {
    if constexpr (K_BLOCKS % 4 == 0) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(row + block));
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
#pragma unroll
        for (int b = 0; b < SCALES_AT_ONCE; ++b) values[b] = block + b < K_BLOCKS ? __ldg(row + block + b) : 0.0f;
    }
}

// The scales lie with K innermost, where the copy engine is of no use. Of the warps that bring them, each has every
// SCALE_WARPS-th 32 scales.
__device__ __forceinline__ void load_scales(const Work& work, const Shared& shared, const Arguments& arguments,
                                            int warp) {
    constexpr int STEP = 32 * (SCALE_WARPS + !SCALE_WARPS), EACH = STAGE_SCALES / STEP + 1;
    const float* left = SWAP ? arguments.b_scale : arguments.a_scale;
    const float* right = SWAP ? arguments.a_scale : arguments.b_scale;
    const int first = warp * 32 + threadIdx.x % 32;
    Position<STAGES> at;
    for (int index = work.first(); work.has(index); index += work.step()) {
        const Tile tile = work.tile(index);
        for (int block = work.first_block; block < work.end_block; block += SCALES_AT_ONCE) {
            float values[EACH][SCALES_AT_ONCE] = {}, folded[SCALES_AT_ONCE];
            if constexpr (FOLDED) {
                const int row = min(tile.row * TILE_ROWS, work.left_rows - 1) / 128;
                read_scales(folded, left + (long long)row * K_BLOCKS, block);
            }
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int entry = first + j * STEP;
                if (entry >= LEFT_SCALES + RIGHT_SCALES) continue;
                const bool on_left = entry < LEFT_SCALES;
                const int kind = on_left ? LEFT_SCALE : RIGHT_SCALE;
                const int base = on_left ? tile.row * TILE_ROWS : tile.col * TILE_COLS;
                const int last = (on_left ? work.left_rows : work.right_rows) - 1;
                const int inside = on_left ? entry : entry - LEFT_SCALES;
                // Rows past the end repeat the last one's.
                const int row = kind == PER_ROW ? min(base + inside, last) : min(base / 128 + inside, last / 128);
                read_scales(values[j], (on_left ? left : right) + (long long)row * K_BLOCKS, block);
                if constexpr (FOLDED)
#pragma unroll
                    for (int b = 0; b < SCALES_AT_ONCE; ++b) values[j][b] *= folded[b];
            }
#pragma unroll
            for (int b = 0; b < SCALES_AT_ONCE; ++b) {
                if (block + b >= work.end_block) break;
                mbarrier_wait(&shared.ring->empty[at.stage], at.phase ^ 1);
#pragma unroll
                for (int j = 0; j < EACH; ++j)
                    if (first + j * STEP < STAGE_SCALES)
                        shared.scales[at.stage * STAGE_SCALES + first + j * STEP] = values[j][b];
                __syncwarp();
                if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.ring->full[at.stage]);
                at.advance();
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ TensorMap map_left, const __grid_constant__ TensorMap map_right,
           const __grid_constant__ TensorMap map_out, const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    char* stages = memory + Epilogue::BYTES;
    float* scales = reinterpret_cast<float*>(stages + STAGES * STAGE_BYTES);
    const Shared shared{memory, stages, scales, reinterpret_cast<Ring*>(scales + STAGES * STAGE_SCALES)};
    const int warp = uniform(threadIdx.x / 32), group = warp / 4, loader = warp - 4 * MATH_GROUPS;
    const Work work(arguments.shape_m);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_left);
        prefetch_tensormap(&map_right);
        if (Epilogue::USES_MAP) prefetch_tensormap(&map_out);
        shared.ring->init(1 + SCALE_WARPS, 4 * MATH_GROUPS * SHARE);
    }
    if constexpr (SHARE > 1) cluster_sync_relaxed();  // others arrive at this block's barriers, and copy to it
    __syncthreads();
    // The next kernel may set up now; this one touches memory only after the one before it is done.
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    if (group == MATH_GROUPS) {
        if constexpr (REBALANCE) setmaxnreg_dec<LOADER_REGISTERS>();
        if (loader == 0 && threadIdx.x % 32 == 0) load_operands(work, shared, &map_left, &map_right);
        if (loader > 0 && loader <= SCALE_WARPS) load_scales(work, shared, arguments, loader - 1);
        __syncwarp();
        if constexpr (SPLIT > 1) cluster_sync();            // the parts of K lie ready
        if constexpr (CLUSTER > 1) cluster_sync_relaxed();  // nobody reads or signals here any more
    } else {
        if constexpr (REBALANCE) setmaxnreg_inc<MATH_REGISTERS>();
        const int row = group * 64 * WAVES + warp % 4 * 16 + threadIdx.x % 32 / 4;
        Mainloop mainloop(shared.stages, group, row);
        Position<STAGES> at;
        for (int index = work.first(); work.has(index); index += work.step()) {
            const Tile tile = work.tile(index);
            Mainloop::Sums sums;
            mainloop.run(sums, shared.ring, at, shared.scales, tile, work.blocks(), work.share_rank);
            Epilogue::store(sums, shared.out, shared.stages, &map_out, arguments, group, tile, row);
        }
        Epilogue::finish();
        if constexpr (CLUSTER > 1) cluster_sync_relaxed();
    }
}
