// One scale for a whole tensor, by two kernels. The first (MEASURE) leaves a span for each of its blocks; every block
// of the second puts all of these together, and then converts. Nothing has to be set to zero before, nothing is shared
// between calls, and no order of events changes the result. A grid has at most as many blocks as there are units of
// work.
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

// A unit of work is EACH vectors of a row for each thread of a block: where this thread's are.
struct Unit {
    const char* x;
    char* codes;
    long long first, k;

    __device__ __forceinline__ Unit(const Arguments& arguments, long long unit, long long across) {
        // Most tensors are one long row, and then nothing is divided.
        const long long row = arguments.rows == 1 ? 0 : unit / across;
        x = arguments.x + row * arguments.pitch;
        codes = arguments.codes + row * arguments.k;
        first = ((unit - row * across) * EACH * THREADS + threadIdx.x) * VALUES;
        k = arguments.k;
    }
    __device__ __forceinline__ void load(Vector (&vectors)[EACH]) const {
#pragma unroll
        for (int j = 0; j < EACH; ++j) vectors[j] = load_vector<true>(x, first + j * THREADS * VALUES, k);
    }
    __device__ __forceinline__ void store(const Vector (&vectors)[EACH], const Encoder<CODEC>& encoder) const {
#pragma unroll
        for (int j = 0; j < EACH; ++j) store_codes(codes, first + j * THREADS * VALUES, k, vectors[j], encoder);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) KERNEL(const __grid_constant__ Arguments arguments) {
    __shared__ Spans spans;
    constexpr int WIDTH = THREADS * EACH * VALUES;
    const long long across = (arguments.k + WIDTH - 1) / WIDTH, units = across * arguments.rows;
    u32* parts = arguments.parts;
    const int count = arguments.part_count;
    Span span;
    Vector vectors[EACH];
#if MEASURE
    // In this order: when the second kernel starts, x is what it will be.
    wait_for_previous();
    let_next_start();
    for (long long unit = blockIdx.x; unit < units; unit += gridDim.x) {
        Unit(arguments, unit, across).load(vectors);
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
    let_next_start();
    // From the end: what was measured last is still in L2. The first unit is read while the last ones are measured.
    long long unit = units - 1 - blockIdx.x;
    Unit(arguments, unit, across).load(vectors);
    wait_for_previous();
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
    while (true) {
        Unit(arguments, unit, across).store(vectors, encoder);
        unit -= gridDim.x;
        if (unit < 0) break;
        Unit(arguments, unit, across).load(vectors);
    }
#endif
}
