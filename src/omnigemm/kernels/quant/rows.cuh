// Rows to codes: a scale for each row, or for each 128 values of one (BLOCKS). What is quantised are a row's values, or
// what a decoder computes from them right before a product: SOURCE is the header that says which. A row is read once
// and waits in registers for its scale, EACH vectors in a thread; longer rows (EACH is 0) are read again, from L2.
//
// A block has one row, or with WARP_ROWS each of its warps has one.
//
// The source that includes this (see quant.py) defines the constants in capitals that are not defined here.
#pragma once
#include "quant/team.cuh"
#include "quant/vector.cuh"

constexpr Codec CODEC = static_cast<Codec>(CODE_TYPE);
constexpr int HELD = EACH > 0 ? EACH : 1;
constexpr int MOST_THREADS = 512;

struct Arguments {
    const char* x;
    const char* weight;  // rms_norm: one factor for each column
    char* residual;      // rms_norm: null, or rows that x is added to
    char* codes;
    float* scale;
    int* zero;
    long long rows, pitch, residual_pitch;  // from row to row in bytes
    int k;
    float epsilon;
    int early;  // rms_norm: nothing that is queued before this kernel writes the weight
};

// A thread's share of a row: EACH vectors, each 32 after the one before, so that one address serves them all; or, if it
// is not known how many, every `lanes`-th.
struct Share {
    long long row;
    int k, start, lanes;
    bool leads;  // of all threads that have this row

    __device__ __forceinline__ explicit Share(const Arguments& arguments) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        k = arguments.k;
        row = WARP_ROWS ? (long long)blockIdx.x * (blockDim.x / 32) + warp : blockIdx.x;
        lanes = WARP_ROWS ? 32 : blockDim.x;
        start = (WARP_ROWS ? lane : EACH > 0 ? warp * 32 * EACH + lane : threadIdx.x) * VALUES;
        leads = start == 0;
    }
    // From one vector to the next: a multiple of 128 values.
    __device__ __forceinline__ int step() const { return (EACH > 0 ? 32 : lanes) * VALUES; }
    __device__ __forceinline__ int first(int j) const { return start + j * step(); }

    // As often for all threads, also for those whose last vector lies past the end: they take part in shuffles.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        if constexpr (EACH > 0) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) visit(j);
        } else {
            const int vectors = (k + VALUES - 1) / VALUES, count = (vectors + lanes - 1) / lanes;
            for (int j = 0; j < count; ++j) visit(j);
        }
    }
};

#include SOURCE

__device__ __forceinline__ void put_scale(const Arguments& arguments, long long at, const Scale& scale) {
    arguments.scale[at] = scale.value;
    if constexpr (CODEC == INT8_ZERO) arguments.zero[at] = scale.zero;
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, RESIDENT)
    KERNEL(const __grid_constant__ Arguments arguments) {
    __shared__ Spans spans;
    let_next_start();
    const Share share(arguments);
    char* codes = arguments.codes + share.row * arguments.k;
    Source source(arguments, share);
    wait_for_previous();
    if (share.row >= arguments.rows) return;  // all of a warp, and no block that works together
    source.begin(arguments);
    // Blocks of 128 need each piece only once: what the source keeps of it by itself is enough.
    constexpr bool HOLD = EACH > 0 && !(BLOCKS && Source::KEEPS_ROW);
    Piece held[HELD];
    if constexpr (HOLD) share.each([&](int j) { held[j] = source.piece(j); });
    const auto piece = [&](int j) {
        if constexpr (HOLD)
            return held[j];
        else
            return source.piece(j);
    };

    if constexpr (BLOCKS) {
        constexpr int LANES = 128 / VALUES;
        const long long block = share.row * ((arguments.k + 127) / 128) + share.start / 128;
        share.each([&](int j) {
            const Piece values = piece(j);
            const int first = share.first(j);
            Span span;
            values.template measure<CODEC>(span);
            const Scale scale = scale_of<CODEC>(over_lanes<CODEC, LANES>(span));
            if (share.start % 128 == 0 && first < share.k)
                put_scale(arguments, block + j * (share.step() / 128), scale);
            store_codes(codes, first, share.k, values, Encoder<CODEC>(scale));
        });
    } else {
        Span span;
        share.each([&](int j) { piece(j).template measure<CODEC>(span); });
        span = WARP_ROWS ? over_lanes<CODEC, 32>(span) : over_block<CODEC>(span, spans);
        const Scale scale = scale_of<CODEC>(span);
        if (share.leads) put_scale(arguments, share.row, scale);
        const Encoder<CODEC> encoder(scale);
        share.each([&](int j) { store_codes(codes, share.first(j), share.k, piece(j), encoder); });
    }
}
