// One scale for a whole tensor, by two kernels. The first (MEASURE) leaves a span for each of its blocks; every block
// of the second puts all of these together, and then converts. Nothing has to be set to zero before, nothing is shared
// between calls, and no order of events changes the result.
//
// The source that includes this (see quant.py) defines the constants in capitals that are not defined here.
#pragma once
#include "quant/team.cuh"
#include "quant/vector.cuh"

constexpr Codec CODEC = static_cast<Codec>(CODE_TYPE);
constexpr int THREADS = 256;

struct Arguments {
    const char* x;
    u32* parts;  // [3][part_count]: magnitudes, highs, lows of the first kernel's blocks
    char* codes;
    float* scale;
    int* zero;
    long long rows, k, pitch;  // the pitch in bytes
    int part_count;
};

// A unit of work is EACH vectors of a row for each thread of a block.
struct Units {
    long long across, count;

    __device__ __forceinline__ explicit Units(const Arguments& arguments) {
        constexpr int WIDTH = THREADS * EACH * VALUES;
        across = (arguments.k + WIDTH - 1) / WIDTH;
        count = across * arguments.rows;
    }
    __device__ __forceinline__ long long row(long long unit) const { return unit / across; }
    __device__ __forceinline__ long long first(long long unit, int j) const {
        return ((unit % across * EACH + j) * THREADS + threadIdx.x) * VALUES;
    }
    __device__ __forceinline__ void load(Vector (&vectors)[EACH], const Arguments& arguments, long long unit) const {
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            vectors[j] = load_vector(arguments.x + row(unit) * arguments.pitch, first(unit, j), arguments.k);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const __grid_constant__ Arguments arguments) {
    __shared__ Spans spans;
    join_queue();
    const Units units(arguments);
    u32* parts = arguments.parts;
    const int count = arguments.part_count;
    Span span;
    Vector vectors[EACH];
#if MEASURE
    for (long long unit = blockIdx.x; unit < units.count; unit += gridDim.x) {
        units.load(vectors, arguments, unit);
#pragma unroll
        for (int j = 0; j < EACH; ++j) vectors[j].measure<CODEC>(span);
    }
    span = over_block<CODEC>(span, spans);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = span.magnitude;
        parts[count + blockIdx.x] = u32(span.high);
        parts[2 * count + blockIdx.x] = span.low;
    }
#else
    for (int i = threadIdx.x; i < count; i += THREADS) {
        if constexpr (CODEC == INT8_ZERO)
            span.include<CODEC>(0, parts[count + i], parts[2 * count + i]);
        else
            span.include<CODEC>(parts[i], 0, 0);
    }
    const Scale scale = scale_of<CODEC>(over_block<CODEC>(span, spans));
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *arguments.scale = scale.value;
        if constexpr (CODEC == INT8_ZERO) *arguments.zero = scale.zero;
    }
    const Encoder<CODEC> encoder(scale);
    // From the end: what was measured last is still in L2.
    for (long long unit = units.count - 1 - blockIdx.x; unit >= 0; unit -= gridDim.x) {
        units.load(vectors, arguments, unit);
        char* codes = arguments.codes + units.row(unit) * arguments.k;
#pragma unroll
        for (int j = 0; j < EACH; ++j) store_codes(codes, units.first(unit, j), arguments.k, vectors[j], encoder);
    }
#endif
}
