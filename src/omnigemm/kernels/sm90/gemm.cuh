// D[M, N] = A[M, K] B[N, K]^T on Hopper: the skeleton. Some warps load, one or two warpgroups multiply by wgmma, with a
// ring of stages between them. A mainloop makes a tile's sums, an epilogue writes them.
//
// wgmma takes 64 rows of its left operand and any multiple of 8 of its right one. With many rows A is the left operand;
// with few (SWAP) B is, so that 64 rows are never padding: a tile's rows are then rows of B and its columns rows of A.
//
// Two math groups multiply the rows of one tile between them, or (PINGPONG) have tiles of their own.
//
// A cluster of blocks works together in two ways. SHARE blocks have neighbouring tiles, and each loads its part of the
// operand that they have in common for all of them. SPLIT blocks have the same tile and a part of K each.
//
// Which tiles there are is a header of its own: those of one product (work_dense.cuh), of many groups of rows
// (work_groups.cuh), each with its own weight, of a batch of products (work_batch.cuh), or of a list of products
// (work_list.cuh), each with its own everything: SHAPE_N and SHAPE_K are then 0, and what a tile's product has is asked
// of the tile.
//
// A stage carries 128 bytes of K of the operands, by TMA, and the scales that belong to them, by warps of their own. An
// operand is turned if its rows, and not K, lie side by side in memory: the tensor cores read 16-bit ones either way.
//
// The source that includes this (see sm90.py) defines the constants in capitals that are not defined here.
#pragma once
#include "common/pipeline.cuh"

constexpr int BLOCK_K = 128;                       // bytes: one swizzled row, and one block of scales
constexpr int ELEMENTS = BLOCK_K / ELEMENT_BYTES;  // of K in a block
constexpr int K_BLOCKS = (SHAPE_K + ELEMENTS - 1) / ELEMENTS;
constexpr int GROUPS_OF_TILE = PINGPONG ? 1 : MATH_GROUPS;  // that multiply it
constexpr int TILE_ROWS = 64 * WAVES * GROUPS_OF_TILE;
// From a math group's rows to the next one's, and from its first 64 to its next. In a group's last tile the rows that
// are missing are the last ones, so there the math groups take turns, and have equally much to do.
constexpr int GROUP_ROWS = PINGPONG ? 0 : GROUPED ? 64 : 64 * WAVES;
constexpr int WAVE_ROWS = GROUPED ? 64 * GROUPS_OF_TILE : 64;
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
enum : int { NO_SCALE, PER_ROW, PER_BLOCK };  // of an operand: for each block of K, one per row or one per 128 rows
constexpr bool MANY_SCALES = LEFT_SCALE == PER_ROW && RIGHT_SCALE == PER_ROW;

constexpr bool CROSSES = 128 % TILE_COLS != 0;  // a tile's columns may meet two blocks of scales
// Where one scale holds for all of the tile's rows or columns, it goes into those of the other side.
constexpr bool LEFT_FOLDED = LEFT_SCALE == PER_BLOCK;
constexpr bool RIGHT_FOLDED = RIGHT_SCALE == PER_BLOCK && !CROSSES;
static_assert(!LEFT_FOLDED || (RIGHT_SCALE == PER_ROW && 128 % TILE_ROWS == 0), "one scale for the tile's rows");
constexpr int LEFT_SCALES = LEFT_SCALE == PER_ROW ? TILE_ROWS : 0;
constexpr int RIGHT_SCALES = RIGHT_SCALE == PER_ROW ? TILE_COLS : RIGHT_SCALE == PER_BLOCK && CROSSES ? 2 : 0;
constexpr int SCALES = LEFT_SCALES + RIGHT_SCALES;
constexpr int STAGE_SCALES = (SCALES + 3) / 4 * 4;  // they come with the stage they belong to
constexpr int SCALES_AT_ONCE = 4;                   // blocks of K, that is, of one row: 16 bytes
static_assert(SCALES_AT_ONCE % DEPTH == 0, "parts of K are whole groups of DEPTH");
constexpr bool ONE_READ = !LIST && K_BLOCKS % SCALES_AT_ONCE == 0;  // each row of scales begins at 16 bytes
// Others, where all rows' and columns' are read and registers suffice, slide.
constexpr bool SLIDES = MANY_SCALES && !ONE_READ && DEPTH == 1 && REBALANCE;
constexpr int SCALE_WARPS = STAGE_SCALES == 0 ? 0 : LOADER_WARPS - 1;
// Who brings scales, or looks up the tiles of a list, needs some more.
constexpr int LOADER_REGISTERS = SCALE_WARPS == 0 && !LIST ? 40 : SCALE_WARPS == 0 || ONE_READ ? 56 : 72;
constexpr int MATH_REGISTERS = LOADER_REGISTERS == 40 ? 232 : LOADER_REGISTERS == 56 ? 224 : 216;

// Where a row's or column's scale lies in its stage: such that a math thread reads all of its rows' at once, and the
// columns' in fours. Every read takes its time on the way to shared memory, which is also that of the operands.
constexpr int ROWS_EACH = 2 * WAVES;  // of a thread: two of 16 in each wave
__device__ __forceinline__ int left_place(int row) {
    constexpr int each = GROUP_ROWS + PINGPONG;  // of which there are no scales
    const int group = GROUPED ? row / each % MATH_GROUPS : row / each;
    const int warp = group * 4 + row % 64 / 16, wave = row / WAVE_ROWS % WAVES;
    return (warp * 8 + row % 8) * ROWS_EACH + wave * 2 + row / 8 % 2;
}
constexpr bool FOURS = RIGHT_SCALE == PER_ROW && TILE_COLS % 16 == 0;
__device__ __forceinline__ int right_place(int col) {
    return FOURS ? col / 16 * 16 + col % 8 / 2 * 4 + col / 8 % 2 * 2 + col % 2 : col;
}

struct Arguments {
    const float* a_scale;
    const float* b_scale;
    const void* bias;
    void* out;
    long long out_stride;  // in elements
    int shape_m;
    int bias_type;      // of epilogue.cuh
    int early;          // stages of B to load at once: nothing that is queued before this kernel writes it
    int zero_step;      // 1: a zero point for each row of A, 0: one for all
    const int* a_zero;  // with HAS_ZERO
    const int* b_sums;  // of its rows
#if ELEMENT_BYTES == 2  // D = alpha A B + beta C
    float alpha, beta;
    const void* c;
    long long c_row, c_col;  // from element to element
    int c_type;              // of epilogue.cuh
#endif
#if GROUPED
    const int* groups;             // where each ends, or how many rows of its slab it has
    int group_count;               // shape_m is then the number of all rows, or of a slab's
    int a_slab, b_slab, out_slab;  // rows from a group's to the next one's, as the tensors lie
    int b_scale_step;              // the same of scales that hold for all of K
#endif
#if BATCH
    // From a product's to the next one's; 0 if all have the same.
    long long out_step, c_step;  // bytes and elements
    int a_step, b_step;          // 1 or 0
    int a_scale_step;            // rows of A, of which scales and zero points are
    int b_scale_step, b_sum_step;
    int batch;  // products
#endif
#if LIST
    char* list;  // what list_memory.cuh says
    int list_count;
#if ELEMENT_BYTES == 1
    int scale_pitch;  // blocks of K in a row of scales, those of all products
#endif
#endif
};

#if GROUPED
#include "sm90/work_groups.cuh"
#elif LIST
#include "sm90/work_list.cuh"
#elif BATCH
#include "sm90/work_batch.cuh"
#else
#include "sm90/work_dense.cuh"
#endif
#include "sm90/epilogue.cuh"
#if INT8 || ELEMENT_BYTES == 2
#include "sm90/mainloop_straight.cuh"
#else
#include "sm90/mainloop_fp8.cuh"
#endif

using Ring = Pipeline<STAGES>;

struct Shared {
    char* out;
    char* stages;
    float* scales;  // [STAGES][STAGE_SCALES]
    Ring* ring;
    u64* arrived;  // the parts of the sums that other blocks have
};

// One operand's tile; of a shared one, this block's part, to all blocks that share it.
template <int rows, int share, bool turned>
__device__ __forceinline__ void load_operand(char* target, const TensorMap* map, u64* full, int block, int before,
                                             int inside, int number, const Work& work) {
    constexpr int part = rows / share, copies = turned ? part / 64 : 1;
    // A group's operand begins `before` lines of memory further on.
    const int first = (turned ? 0 : before) + inside, k = (turned ? before : 0) + block * ELEMENTS;
    const int from = share > 1 ? work.share_rank * part : 0;
    const unsigned short sharers = share > 1 ? ((1 << share) - 1) << (cluster_ctarank() - work.share_rank) : 0;
#pragma unroll
    for (int copy = 0; copy < copies; ++copy) {
        const int row = first + from + copy * 64;
        char* to = target + (from + copy * 64) * BLOCK_K;
        const int inner = turned ? row : k, outer = turned ? k : row;
        if constexpr (BATCH && share > 1)
            tma_load_3d_multicast(to, map, full, inner, outer, number, sharers);
        else if constexpr (BATCH)
            tma_load_3d(to, map, full, inner, outer, number);
        else if constexpr (share > 1)
            tma_load_2d_multicast(to, map, full, inner, outer, sharers);
        else
            tma_load_2d(to, map, full, inner, outer);
    }
}

// Blocks of K whose weights were loaded for what is this block's first tile, unless numbers of groups' rows still
// change; and the place of those weights.
struct Guess {
    int blocks, group, place;
};

struct Loader {
    const Work& work;
    const Shared& shared;
    const TensorMap *left, *right;
    const Arguments& arguments;
#if GROUPED
    Guess guess;
#endif

    // Of a group's last tile the second half of the rows may be missing. The block that would load them for both that
    // share them then loads nothing.
    __device__ __forceinline__ bool half(const Place& tile) const {
        if constexpr (GROUPED && !SWAP && WAVES == 2 && LEFT_SHARE == 2)
            return tile.rows(arguments) - tile.row * TILE_ROWS <= TILE_ROWS / 2;
        return false;
    }
    __device__ __forceinline__ void load(bool the_left, int stage, int block, const Place& tile,
                                         u64* other = nullptr) const {
        if (the_left && work.share_rank == 1 && half(tile)) return;
        char* target = shared.stages + stage * STAGE_BYTES;
        u64* full = other ? other : &shared.ring->full[stage];
        const bool of_b = the_left == SWAP;
        const int before = of_b ? tile.b_row(arguments) : tile.a_row(arguments);
        const int number = of_b ? tile.b_number(arguments) : tile.a_number(arguments);
        if (the_left)
            load_operand<TILE_ROWS, LEFT_SHARE, LEFT_TURNED>(target, left, full, block, before, tile.row * TILE_ROWS,
                                                             number, work);
        else
            load_operand<TILE_COLS, RIGHT_SHARE, RIGHT_TURNED>(target + LEFT_BYTES, right, full, block, before,
                                                               tile.col * TILE_COLS, number, work);
    }
    __device__ __forceinline__ void load_weights(int stage, int block, const Place& tile) const {
        mbarrier_arrive_expect_tx(&shared.ring->full[stage], half(tile) ? STAGE_BYTES - LEFT_BYTES / 2 : STAGE_BYTES);
        load(SWAP, stage, block, tile);
    }

#if GROUPED
    // They come to a barrier of their own, for if the guess was wrong nobody must take them for others.
    static constexpr int WEIGHT_BYTES = SWAP ? LEFT_BYTES : RIGHT_BYTES;
    static __device__ __forceinline__ int weight_place(const Place& tile) { return SWAP ? tile.row : tile.col; }
    __device__ __forceinline__ Guess load_guessed() const {
        const int index = work.there(blockIdx.x);
        if (CLUSTER > 1 || arguments.early == 0 || !work.has(index)) return {};
        const Place tile = work.found(index);
        const int blocks = min(min(STAGES, arguments.early), work.blocks(tile));
        mbarrier_arrive_expect_tx(work.guessed, blocks * WEIGHT_BYTES);
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) load(SWAP, i, i, tile, work.guessed);
        return {blocks, tile.group, weight_place(tile)};
    }
    // Loads what goes with them, if they are those of the first tile, and answers how many blocks of K that has then.
    // Tokens are on their way before weights are waited for.
    __device__ __forceinline__ int take_guessed(Position<STAGES>& at, const Place& tile) {
        if (guess.blocks == 0) return 0;
        const bool right = guess.group == tile.group && guess.place == weight_place(tile);
        const int blocks = right ? guess.blocks : 0;
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) load(!SWAP, i, i, tile);
        mbarrier_wait(work.guessed, 0);
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            mbarrier_arrive_expect_tx(&shared.ring->full[i], STAGE_BYTES - WEIGHT_BYTES);
            at.advance();
        }
        guess.blocks = 0;
        return blocks;
    }
#endif

    // The first weights are loaded before the work before this kernel is done, if nothing in it writes them. Often not
    // as many as there is room for, which was slower; that work, we think, has loads of its own to wait for.
    __device__ __forceinline__ void run() {
        int ahead = 0;
#if !GROUPED && !LIST
        if (arguments.early && work.has(work.first()))
            ahead = min(min(STAGES, arguments.early), work.blocks(work.tile(work.first())));
#pragma unroll 1
        for (int i = 0; i < ahead; ++i) load_weights(i, work.first_block + i, work.tile(work.first()));
#endif
        griddepcontrol_wait();
        Position<STAGES> at;
        int index = work.first_to_load();
        Place tile = work.has(index) ? work.to_load(index) : Place{};
        while (work.has(index)) {
            const int asked = work.ask(index);  // the answer may take its time
            work.enter(tile, left, right);
            int block = work.first_block;
#if GROUPED
            block += take_guessed(at, tile);
#endif
            if (block < work.end(tile)) load_block(at, block++, tile, ahead);
            // The next tile is looked up when the first loads of this one are on their way, or, where that takes an
            // answer, when all are.
            Place next;
            if constexpr (!LIST) index = next_tile(asked, next);
#pragma unroll 1
            for (; block < work.end(tile); ++block) load_block(at, block, tile, ahead);
            if constexpr (LIST) index = next_tile(asked, next);
            tile = next;
        }
#if GROUPED
        if (guess.blocks > 0) mbarrier_wait(work.guessed, 0);  // there is no first tile
#endif
    }
    __device__ __forceinline__ int next_tile(int asked, Place& tile) const {
        const int index = work.next_to_load(asked);
        if (work.has(index)) tile = work.to_load(index);
        return index;
    }
    __device__ __forceinline__ void load_block(Position<STAGES>& at, int block, const Place& tile, int& ahead) const {
        if (ahead-- <= 0) {
            mbarrier_wait(&shared.ring->empty[at.stage], at.phase ^ 1);
            load_weights(at.stage, block, tile);
        }
        load(!SWAP, at.stage, block, tile);
        at.advance();
    }
};

#include "sm90/scales.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    KERNEL(const __grid_constant__ TensorMap map_left, const __grid_constant__ TensorMap map_right,
           const __grid_constant__ TensorMap map_out, const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) char memory[];
    char* stages = memory + Epilogue::BYTES;
    float* scales = reinterpret_cast<float*>(stages + STAGES * STAGE_BYTES);
    Ring* ring = reinterpret_cast<Ring*>(scales + STAGES * STAGE_SCALES);
    const Shared shared{memory, stages, scales, ring, reinterpret_cast<u64*>(ring + 1)};
    const int warp = uniform(threadIdx.x / 32), group = warp / 4, loader = warp - 4 * MATH_GROUPS;
    Work work(arguments);

    if (threadIdx.x == 0) {
        if constexpr (!Work::OWN_MAPS) {
            prefetch_tensormap(&map_left);
            prefetch_tensormap(&map_right);
            if (Epilogue::USES_MAP) prefetch_tensormap(&map_out);
        }
        shared.ring->init(1 + SCALE_WARPS, 4 * GROUPS_OF_TILE * SHARE);
        Epilogue::init(shared.arrived);
    }
    work.prepare(shared.arrived + 1, warp);
    __syncthreads();
#if GROUPED
    Guess guess{};
    if (loader == 0 && threadIdx.x % 32 == 0)
        guess = Loader{work, shared, &map_left, &map_right, arguments}.load_guessed();
    work.confirm(warp);
#endif
    // Others arrive at this block's barriers and write to it: at once, if they share loads, or else when they have
    // sums.
    if constexpr (CLUSTER > 1) cluster_arrive();
    if constexpr (SHARE > 1) cluster_wait();
    // The next kernel may set up now. Each role waits for the one before before it touches what that may have written.
    griddepcontrol_launch_dependents();

    if (group == MATH_GROUPS) {
        if constexpr (REBALANCE) setmaxnreg_dec<LOADER_REGISTERS>();
#if GROUPED
        if (loader == 0 && threadIdx.x % 32 == 0) Loader{work, shared, &map_left, &map_right, arguments, guess}.run();
#else
        if (loader == 0 && threadIdx.x % 32 == 0) Loader{work, shared, &map_left, &map_right, arguments}.run();
#endif
        if (SCALE_WARPS > 0 && loader == 1) load_scales<0>(work, shared, arguments);
        if (SCALE_WARPS > 1 && loader == 2) load_scales<1>(work, shared, arguments);
        if (SCALE_WARPS > 1 && loader == 3) load_scales<2>(work, shared, arguments);
        __syncwarp();
        if constexpr (CLUSTER > 1 && SHARE == 1) cluster_wait();
    } else {
        if constexpr (REBALANCE) setmaxnreg_inc<MATH_REGISTERS>();
        // Everyone in the cluster is ready to receive sums. Asked for now, when the first operands are waited for
        // anyhow.
        if constexpr (CLUSTER > 1 && SHARE == 1) cluster_wait();
        griddepcontrol_wait();
        const int row = group * GROUP_ROWS + warp % 4 * 16 + threadIdx.x % 32 / 4;
        Mainloop mainloop(shared.stages, group, row);
        Position<STAGES> at;
        Turns turns(group);
        const TensorMap* out_map = &map_out;
        for (int index = work.first(); work.has(index); index = work.next(index)) {
            Place tile = work.tile(index);
            if (!turns.take()) {
                at.skip(work.blocks(tile));
                work.leave();
                continue;
            }
            const int waves = work.waves(tile, group);
            if (waves == 0) {
                turns.wait();
                Mainloop::skip(shared.ring, at, work.blocks(tile), work.share_rank);
                turns.pass();
                work.leave();
                continue;
            }
            computed(tile.row), computed(tile.col);  // else their divisions may come again behind the products
            Epilogue::Ahead ahead(arguments, tile, row);
            Mainloop::Sums sums;
            if (WAVES == 1 || waves == WAVES)
                mainloop.run<WAVES>(sums, shared.ring, at, shared.scales, tile, work.blocks(tile), work.share_rank,
                                    turns);
            else
                mainloop.run<1>(sums, shared.ring, at, shared.scales, tile, work.blocks(tile), work.share_rank, turns);
            work.enter_out(tile, out_map, Epilogue::storing_thread());
            work.leave();
            Epilogue::store(sums, ahead, shared.out, shared.stages, shared.arrived, out_map, arguments, group, tile,
                            row);
        }
        turns.end();
        Epilogue::finish();
    }
    if constexpr (SHARE > 1) {  // nobody copies or signals here any more
        cluster_arrive();
        cluster_wait();
    }
}
