// A scale for each tile of 128 by 128: a block reads it once and keeps it in registers.
//
// The source that includes this (see quant.py) defines the constants in capitals that are not defined here.
#pragma once
#include "quant/team.cuh"
#include "quant/vector.cuh"

constexpr Codec CODEC = static_cast<Codec>(CODE_TYPE);
constexpr int LANES = 128 / VALUES;  // that read a row of the tile
constexpr int ROWS_AT_ONCE = THREADS / LANES;
constexpr int EACH = 128 / ROWS_AT_ONCE;
// Blocks on a multiprocessor that there must be registers for.
constexpr int RESIDENT = THREADS > 256 ? 1 : VALUES == 8 ? 4 : 2;

struct Arguments {
    const char* x;
    char* codes;
    float* scale;
    long long pitch;  // from row to row in bytes, through all matrices of a batch
    int m, k;         // of a matrix
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) KERNEL(const __grid_constant__ Arguments arguments) {
    __shared__ Spans spans;
    join_queue();
    const int m = arguments.m, k = arguments.k;
    const int across = (k + 127) / 128, down = (m + 127) / 128;
    const int strip = blockIdx.x / across, tile_row = strip % down;
    const int first = blockIdx.x % across * 128 + threadIdx.x % LANES * VALUES;
    const int row = tile_row * 128 + threadIdx.x / LANES;
    const long long top = (long long)(strip / down) * m + row;  // with the rows of the matrices before
    const char* x = arguments.x + top * arguments.pitch;
    char* codes = arguments.codes + top * k;
    Vector held[EACH];
    Span span;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        held[j] = row + j * ROWS_AT_ONCE < m ? load_vector(x, first, k) : Vector{};
        x += ROWS_AT_ONCE * arguments.pitch;
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) held[j].measure<CODEC>(span);
    const Scale scale = scale_of<CODEC>(over_block<CODEC>(span, spans));
    if (threadIdx.x == 0) arguments.scale[blockIdx.x] = scale.value;
    const Encoder<CODEC> encoder(scale);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        if (row + j * ROWS_AT_ONCE < m) store_codes(codes, first, k, held[j], encoder);
        codes += (long long)ROWS_AT_ONCE * k;
    }
}
