// What a block works on, products in groups: rows of A that follow one another, or (SLABS) the first rows of slabs, and
// a weight for each. Every block makes a table of the groups' tiles, and takes its share of the whole list.
#pragma once
#include "common/groups.cuh"
#include "sm90/tile_queue.cuh"
#include "sm90/work_common.cuh"

// A tile, and where its group's rows and scales begin.
struct Place : PlaceInOne {
    int group;  // or NONE: there are no more
    int first, count;

    __device__ __forceinline__ int rows(const Arguments&) const { return count; }
    __device__ __forceinline__ int a_row(const Arguments& arguments) const {
        return SLABS ? group * arguments.a_slab : first;
    }
    __device__ __forceinline__ int b_row(const Arguments& arguments) const { return group * arguments.b_slab; }
    __device__ __forceinline__ int a_scale_row(const Arguments& arguments) const {
        return SLABS ? group * arguments.shape_m : first;
    }
    __device__ __forceinline__ int b_scale_row() const {
        constexpr bool per_block = (SWAP ? LEFT_SCALE : RIGHT_SCALE) == PER_BLOCK;
        return group * (per_block ? (SHAPE_N + 127) / 128 : SHAPE_N);
    }
    __device__ __forceinline__ int b_whole_scale(const Arguments& arguments) const {
        return group * arguments.b_scale_step;
    }
    __device__ __forceinline__ int out_row(const Arguments& arguments) const {
        return SLABS ? group * arguments.out_slab : first;
    }
};

struct Work : WorkInOne {
    static_assert(SPLIT == 1, "there are tiles enough");
    static_assert(TILE_ROWS <= 4 * Groups::GRAIN, "short tiles have up to three lengths");
    // Rows of a tile that are not there cost nothing, by the 64; columns do.
    static constexpr int SHORT_ROWS = SWAP ? 0 : TILE_ROWS - Groups::GRAIN;
    // fp8 is added in whole groups of DEPTH: what lies past K is zero. The others end where K does, for past it may lie
    // another group's weights, if they are turned.
    static constexpr bool STRAIGHT = INT8 || ELEMENT_BYTES == 2;
    static constexpr int end_block = STRAIGHT ? K_BLOCKS : (K_BLOCKS + DEPTH - 1) / DEPTH * DEPTH, first_block = 0;
    static constexpr int TABLE_WARP = 1;
    using Handover = TileHandover<Place>;
    Groups groups;
    const volatile int* numbers;  // of rows, which kernels before may be about to write
    Group* table;
    GroupNumber* short_ones;
    Handover* handover;
    u64* guessed;  // weights of the tile that was guessed at have come
    int share_rank;
    mutable Handover::At at;  // where this thread is among what is handed over

    __device__ __forceinline__ Work(const Arguments& arguments)
        : groups{arguments.groups,
                 1,
                 arguments.group_count,
                 arguments.shape_m,
                 SWAP ? TILE_COLS * LEFT_SHARE : TILE_ROWS * RIGHT_SHARE,
                 SWAP ? (SHAPE_N + TILE_ROWS * RIGHT_SHARE - 1) / (TILE_ROWS * RIGHT_SHARE)
                      : (SHAPE_N + TILE_COLS * LEFT_SHARE - 1) / (TILE_COLS * LEFT_SHARE),
                 SLABS != 0,
                 SHORT_ROWS},
          numbers(arguments.groups),
          table(nullptr),
          short_ones(nullptr),
          handover(nullptr),
          guessed(nullptr),
          share_rank(SHARE > 1 ? cluster_ctarank() % SHARE : 0) {}

    // The table, before the kernels before are done: by numbers that are most often there already, and at worst good
    // for a guess at what to load first. By all threads; to be followed by a barrier.
    __device__ __forceinline__ void prepare(void* memory, int warp) {
        handover = static_cast<Handover*>(memory);
        static_assert(sizeof(Handover) + sizeof(u64) == 152, "what group_choice.py sets aside");
        guessed = reinterpret_cast<u64*>(handover + 1);
        if (threadIdx.x == 0) {
            mbarrier_init(guessed, 1);
            handover->init(4 * MATH_GROUPS + SCALE_WARPS);
        }
        table = reinterpret_cast<Group*>(guessed + 1);
        short_ones = reinterpret_cast<GroupNumber*>(table + groups.count);
        if (warp == TABLE_WARP) make_table();
    }
    // The same, when they are done. Mostly all is as it was, which takes one way to L2 to see.
    __device__ __forceinline__ void confirm(int warp) {
        griddepcontrol_wait();
        const bool stands = warp != TABLE_WARP || groups.stands(table, numbers, threadIdx.x % 32, 32);
        if (__syncthreads_and(stands)) return;
        if (warp == TABLE_WARP) make_table();
        __syncthreads();
    }
    __device__ __forceinline__ void make_table() {
        Group* lines = table;
        GroupNumber* list = short_ones;
        const int lane = threadIdx.x % 32;
        // From far away all at once; what follows reads them one after the other.
#pragma unroll 8
        for (int g = lane; g < groups.count; g += 32) lines[g].row_end = numbers[g];
        groups.given = &lines->row_end;
        groups.stride = 2;
        __syncwarp();
        int row = 0;
        if constexpr (!SLABS) {
            row = groups.last_end(lane, 32);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, row, step);
                if (lane >= step) row = max(row, other);
            }
            row = __shfl_up_sync(~0u, row, 1);
            if (lane == 0) row = 0;
        }
        const int own = groups.tiles(lane, 32, row, 0, nullptr);
        int tile = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, tile, step);
            if (lane >= step) tile += other;
        }
        groups.tiles(lane, 32, row, tile - own, lines);
        if constexpr (SHORT_ROWS > 0) {
            __syncwarp();
            const ShortPacks mine = groups.short_packs(lane, 32, lines);
            ShortPacks up_to_here = mine;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const ShortPacks other = __shfl_up_sync(~0u, up_to_here, step);
                if (lane >= step) up_to_here += other;
            }
            const ShortPacks all = __shfl_sync(~0u, up_to_here, 31);
            groups.list_short(lane, 32, lines, up_to_here - mine, all, list);
        }
    }
    static constexpr __device__ int end(const Place&) { return end_block; }
    static constexpr __device__ int blocks(const Place&) { return end_block; }

    // The thread that loads finds out what tiles are, when the others are still busy with those before, and hands that
    // over: a search and two divisions, for which the tensor cores would else wait. Math groups with tiles of their own
    // look them up themselves, while the other one multiplies. So does everybody where there are scales and a K for
    // which registers are few.
    static constexpr bool HANDS_OVER = !PINGPONG && (SCALE_WARPS == 0 || ONE_READ);
    __device__ __forceinline__ int first_to_load() const { return given(there(blockIdx.x / CLUSTER)); }
    __device__ __forceinline__ int ask(int index) const {
        const int clusters = gridDim.x / CLUSTER;
        return SHORT_ROWS > 0 ? there_and_back(index, clusters) : index + clusters;
    }
    __device__ __forceinline__ int next_to_load(int asked) const { return given(there(asked)); }
    __device__ __forceinline__ Place to_load(int index) const {
        const Place place = found(index);
        if constexpr (HANDS_OVER) handover->give(at, place);
        return place;
    }
    __device__ __forceinline__ int given(int index) const {
        if (HANDS_OVER && index == NONE) handover->give(at, Place{{}, NONE});
        return index;
    }
    __device__ __forceinline__ int there(int index) const {
        return index < groups.total(table, short_ones) ? index : NONE;
    }
    __device__ __forceinline__ Place found(int index) const {
        const GroupTile one = groups.tile(table, short_ones, index, BAND, SWAP);
        return {{one.tile.row * RIGHT_SHARE + (RIGHT_SHARE > 1 ? share_rank : 0),
                 one.tile.col * LEFT_SHARE + (LEFT_SHARE > 1 ? share_rank : 0)},
                one.group,
                one.first,
                one.rows};
    }

    // The others: a tile's number, or, where it is handed over, that of its group.
    __device__ __forceinline__ int first() const {
        return HANDS_OVER ? uniform(handover->look(at).group) : there(blockIdx.x / CLUSTER);
    }
    static __device__ __forceinline__ bool has(int which) { return which != NONE; }
    __device__ __forceinline__ int next(int which) const { return HANDS_OVER ? first() : there(ask(which)); }
    __device__ __forceinline__ Place tile(int which) const {
        if constexpr (!HANDS_OVER) return found(which);
        const Place place = handover->look(at);
        return {{uniform(place.row), uniform(place.col)}, which, uniform(place.first), uniform(place.count)};
    }
    __device__ __forceinline__ void leave() const {
        if constexpr (HANDS_OVER) handover->leave(at);
    }
    // How many of a math group's waves have rows of the group: the others are not multiplied.
    static __device__ __forceinline__ int waves(const Place& place, int math_group) {
        if (SWAP) return WAVES;
        const int left = place.count - place.row * TILE_ROWS - math_group * GROUP_ROWS;
        return uniform(left <= 0 ? 0 : min(WAVES, (left + WAVE_ROWS - 1) / WAVE_ROWS));
    }
};
