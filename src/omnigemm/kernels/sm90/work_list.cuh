// What a block works on, a list of products: each has its own sizes, matrices and factors. The kernel before this one
// has made the table of their tiles and their tensor maps (list_memory.cuh); clusters take tiles one after the other.
#pragma once
#include "sm90/list_memory.cuh"
#include "sm90/tile_queue.cuh"

// A tile, and what its product has.
struct Place : Tile {
    int number;  // among all tiles, or NONE: there are no more
    int which, m, n, k_blocks;
    Ending ending;

    __device__ __forceinline__ int rows(const Arguments&) const { return m; }
    __device__ __forceinline__ int columns() const { return n; }
    static constexpr __device__ int a_row(const Arguments&) { return 0; }
    static constexpr __device__ int b_row(const Arguments&) { return 0; }
    static constexpr __device__ int a_scale_row(const Arguments&) { return 0; }
    static constexpr __device__ int b_scale_row() { return 0; }
    static constexpr __device__ int b_whole_scale(const Arguments&) { return 0; }
    static constexpr __device__ int a_number(const Arguments&) { return 0; }
    static constexpr __device__ int b_number(const Arguments&) { return 0; }
    static constexpr __device__ int out_number() { return 0; }
    static constexpr __device__ int b_sum_row(const Arguments&) { return 0; }
#if ELEMENT_BYTES == 1
    __device__ __forceinline__ long long scale_at(const Arguments& arguments, int row) const {
        return (long long)row * arguments.scale_pitch + ending.first_block;
    }
    static __device__ __forceinline__ u32 scale_step(const Arguments& arguments) { return arguments.scale_pitch; }
    __device__ __forceinline__ int scale_end() const { return k_blocks; }
#else
    static constexpr __device__ int scale_at(const Arguments&, int) { return 0; }
    static constexpr __device__ u32 scale_step(const Arguments&) { return 0; }
    static constexpr __device__ int scale_end() { return 0; }
#endif
    static constexpr __device__ int out_row(const Arguments&) { return 0; }

    __device__ __forceinline__ bool out_by_tma(const Arguments&) const { return ending.straight; }
    __device__ __forceinline__ void* out(const Arguments&) const { return ending.out; }
    __device__ __forceinline__ long long out_stride(const Arguments&) const { return ending.out_stride; }
    __device__ __forceinline__ float alpha(const Arguments&) const { return ending.alpha; }
    // C of a product with a beta of 0 is not read: it may be anything.
    __device__ __forceinline__ bool adds_c() const { return ending.beta != 0.0f; }
    __device__ __forceinline__ float beta(const Arguments&) const { return ending.beta; }
    __device__ __forceinline__ const void* c(const Arguments&) const { return ending.c; }
    __device__ __forceinline__ int c_type(const Arguments&) const { return ending.c_type; }
    __device__ __forceinline__ long long c_at(const Arguments&, int m, int n) const {
        return m * ending.c_row + n * ending.c_col;
    }
};

struct Work {
    static_assert(SPLIT == 1 && !SWAP && !PINGPONG && !INT8, "what lists are made of");
    static_assert(ELEMENT_BYTES == 2 || DEPTH == 1, "K ends at any block");
    static constexpr bool OWN_MAPS = true;
    static constexpr int first_block = 0;
    using Handover = TileHandover<Place>;
    ListMemory memory;
    Products products;
    TileNumbers* numbers;
    Handover* handover;
    int share_rank, first_rank;  // in the cluster: this block, and the one that asks for tiles
    // Where this thread is: in the list, if it loads, and among what is handed over.
    mutable int which;
    mutable TileNumbers::At numbers_at;
    mutable Handover::At at;

    __device__ __forceinline__ Work(const Arguments& arguments)
        : memory{arguments.list, arguments.list_count},
          products{nullptr, nullptr, arguments.list_count, TILE_ROWS * RIGHT_SHARE, TILE_COLS * LEFT_SHARE},
          numbers(nullptr),
          handover(nullptr),
          share_rank(SHARE > 1 ? cluster_ctarank() % SHARE : 0),
          first_rank(cluster_ctarank() - share_rank),
          which(0) {}

    // By all threads; to be followed by a barrier.
    __device__ __forceinline__ void prepare(void* free, int) {
        handover = static_cast<Handover*>(free);
        numbers = reinterpret_cast<TileNumbers*>(handover + 1);
        int* ends = reinterpret_cast<int*>(numbers + 1);
        static_assert(sizeof(Handover) + sizeof(TileNumbers) == 528, "what list_choice.py sets aside");
        if (threadIdx.x == 0) {
            handover->init(4 * MATH_GROUPS + SCALE_WARPS);
            if constexpr (SHARE > 1) numbers->init();
        }
        products.table = memory.table();
        products.ends = ends;
        griddepcontrol_wait();
        for (int i = threadIdx.x; i < products.count; i += THREADS) ends[i] = products.table[i].tile_end;
    }

    // The thread that loads asks for tiles, finds out what they are and hands that over.
    __device__ __forceinline__ int first_to_load() const { return if_there(blockIdx.x / CLUSTER); }
    __device__ __forceinline__ int ask(int) const {
        return share_rank == 0 ? gridDim.x / CLUSTER + atomicAdd(memory.taken(), 1) : 0;
    }
    __device__ __forceinline__ Place to_load(int number) const {
        which = products.find(number, which);
        const Product one = products.table[which];
        const Tile pack = products.tile(number, which, one, BAND);
        const Place place{{pack.row * RIGHT_SHARE + (RIGHT_SHARE > 1 ? share_rank : 0),
                           pack.col * LEFT_SHARE + (LEFT_SHARE > 1 ? share_rank : 0)},
                          number,
                          which,
                          one.m,
                          one.n,
                          one.k_blocks,
                          memory.endings()[which]};
        handover->give(at, place);
        return place;
    }
    __device__ __forceinline__ int next_to_load(int asked) const {
        int number = asked;
        if constexpr (SHARE > 1) {
            if (share_rank == 0)
                numbers->give(numbers_at, number, first_rank);
            else
                number = numbers->take(numbers_at, first_rank);
        }
        return if_there(number);
    }
    // The number of a tile, or NONE, which the others are told. How many there are is known on the device only: there
    // may be fewer than blocks, or none at all.
    __device__ __forceinline__ int if_there(int number) const {
        if (number < products.ends[products.count - 1]) return number;
        handover->give(at, Place{{}, NONE});
        return NONE;
    }

    // The others work on what is handed over.
    __device__ __forceinline__ int first() const { return uniform(handover->look(at).number); }
    static __device__ __forceinline__ bool has(int number) { return number != NONE; }
    __device__ __forceinline__ int next(int) const { return first(); }
    __device__ __forceinline__ Place tile(int) const { return handover->look(at); }
    __device__ __forceinline__ void leave() const { handover->leave(at); }
    static __device__ __forceinline__ int end(const Place& tile) { return tile.k_blocks; }
    // Asked by whole warps, who thereby agree on it.
    static __device__ __forceinline__ int blocks(const Place& tile) { return uniform(tile.k_blocks); }
    // A math group that has no row of the product's at all has nothing to multiply.
    static __device__ __forceinline__ int waves(const Place& place, int math_group) {
        return uniform(place.row * TILE_ROWS + math_group * GROUP_ROWS >= place.m ? 0 : WAVES);
    }

    // The maps of a tile's product. A thread that comes to another's makes sure that it sees what was written there,
    // and not what the copy engine remembers of an earlier map in that place.
    __device__ __forceinline__ void enter(const Place& tile, const TensorMap*& left, const TensorMap*& right) const {
        const TensorMap* own = memory.maps(tile.which);
        if (own == left) return;
        left = own, right = own + 1;
        fence_proxy_tensormap_acquire(left);
        fence_proxy_tensormap_acquire(right);
    }
    // How to finish a tile is read only now, and where it is once more: registers are few while it is multiplied.
    __device__ __forceinline__ void enter_out(Place& tile, const TensorMap*& out, bool stores) const {
        tile = handover->look(at);
        const TensorMap* own = memory.maps(tile.which) + 2;
        if (own == out) return;
        out = own;
        if (stores) fence_proxy_tensormap_acquire(out);
    }
};
