// What becomes of a tile's sums: scales that hold for all of K, bias, alpha and beta C, the output's type, and the way
// out.
#pragma once
#include "common/ptx.cuh"

enum : int { BF16, FP16, FP32 };  // OUT_TYPE and Arguments::bias_type are one of these
#if OUT_BYTES == 4
using Out = float;
#else
using Out = unsigned short;
#endif

__device__ __forceinline__ u32 pack_out(float low, float high) {
    return OUT_TYPE == BF16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

// Scales of whole rows of A and B: FINISH_SCALES says whether there are any, A_STEP and B_STEP whether one for each (1)
// or one for all (0). They are plain loads, which stay before the next barrier: see Ahead.
struct Row {
    float scale;
    int zero;
};

__device__ __forceinline__ float row_scale(const Arguments& arguments, const Place& tile, int m) {
#if ELEMENT_BYTES == 2 || LIST
    return tile.alpha(arguments);
#else
    return FINISH_SCALES ? arguments.a_scale[(long long)m * A_STEP] : 1.0f;
#endif
}

__device__ __forceinline__ Row row_of(const Arguments& arguments, const Place& tile, int m) {
    return {row_scale(arguments, tile, m), HAS_ZERO ? arguments.a_zero[(long long)m * arguments.zero_step] : 0};
}

// The sum of a row of B, of which a zero point of A has added too many.
__device__ __forceinline__ int col_total(const Arguments& arguments, const Place& tile, int n) {
    return HAS_ZERO ? arguments.b_sums[tile.b_sum_row(arguments) + n] : 0;
}

__device__ __forceinline__ float col_scale(const Arguments& arguments, const Place& tile, int n) {
    return FINISH_SCALES ? arguments.b_scale[tile.b_whole_scale(arguments) + (long long)n * B_STEP] : 1.0f;
}

__device__ __forceinline__ float widened(const void* values, int type, long long at) {
    if (type == FP32) return static_cast<const float*>(values)[at];
    const unsigned short half = static_cast<const unsigned short*>(values)[at];
    return type == FP16 ? widen_fp16(half) : __uint_as_float(u32(half) << 16);
}

__device__ __forceinline__ float bias_at(const Arguments& arguments, int n) {
    return HAS_BIAS ? widened(arguments.bias, arguments.bias_type, n) : 0.0f;
}

// beta C is added last. C may be D itself: who reads an element is who writes it.
__device__ __forceinline__ float with_c(float value, const Arguments& arguments, const Place& tile, int m, int n) {
#if HAS_C
    if (!tile.adds_c()) return value;
    m = min(m, tile.rows(arguments) - 1), n = min(n, tile.columns() - 1);
    value += tile.beta(arguments) * widened(tile.c(arguments), tile.c_type(arguments), tile.c_at(arguments, m, n));
#endif
    return value;
}

// C of an element that may lie outside: nothing is done with it here, so that many may be on their way at a time.
__device__ __forceinline__ float c_near(const Arguments& arguments, const Place& tile, int m, int n) {
#if HAS_C
    if (!tile.adds_c()) return 0.0f;
    m = min(m, tile.rows(arguments) - 1), n = min(n, tile.columns() - 1);
    return widened(tile.c(arguments), tile.c_type(arguments), tile.c_at(arguments, m, n));
#else
    return 0.0f;
#endif
}

// A row of C from some even column of the tile on, if it is floats side by side that can be read in pairs; else null.
__device__ __forceinline__ const float2* c_pairs(const Arguments& arguments, const Place& tile, int m, int n) {
#if HAS_C
    m = min(m, tile.rows(arguments) - 1);
    const long long at = tile.c_at(arguments, m, n), next = tile.c_at(arguments, m, n + 1);
    const float* from = static_cast<const float*>(tile.c(arguments)) + at;
    const bool pairs = tile.c_type(arguments) == FP32 && next == at + 1 && reinterpret_cast<u64>(from) % 8 == 0;
    if (tile.adds_c() && pairs) return reinterpret_cast<const float2*>(from);
#endif
    return nullptr;
}

__device__ __forceinline__ bool has_c(const Place& tile) {
#if HAS_C
    return tile.adds_c();
#else
    return false;
#endif
}

// Whether C is D itself and its factor 1: the sums are then to be added to what is there, which the copy engine can do.
__device__ __forceinline__ bool adds_to_out(const Arguments& arguments, const Place& tile) {
#if HAS_C && OUT_BYTES == 4
    return tile.out_by_tma(arguments) && tile.adds_c() && tile.beta(arguments) == 1.0f &&
           tile.c(arguments) == tile.out(arguments) && tile.c_type(arguments) == FP32 &&
           tile.c_at(arguments, 1, 0) == tile.out_stride(arguments) && tile.c_at(arguments, 0, 1) == 1;
#else
    return false;
#endif
}

__device__ __forceinline__ float plus_c(float value, const Arguments& arguments, const Place& tile, float c) {
#if HAS_C
    if (tile.adds_c()) value += tile.beta(arguments) * c;
#endif
    return value;
}

__device__ __forceinline__ float finished(float sum, const Row& row, float col, float bias, int) {
    if constexpr (FINISH_SCALES) sum *= row.scale * col;
    if constexpr (ELEMENT_BYTES == 2 || LIST) sum *= row.scale;
    if constexpr (HAS_BIAS) sum += bias;
    return sum;
}

// Exact sums are to be right to one rounding of the result. In 16 bits the rounding of a float does not show, unless a
// bias cancels the product; where it would, the product is carried in two floats, and in a double if scales are so
// large or small that two floats do not hold it.
__device__ __forceinline__ float finished(int sum, const Row& row, float col, float bias, int total) {
    const float scale = row.scale * col;
    if constexpr (!HAS_BIAS && !HAS_ZERO && OUT_TYPE != FP32) return __int2float_rn(sum) * scale;
    if (HAS_ZERO || !(fabsf(scale) > 1e-25f && fabsf(scale) < 1e25f)) {
        const double whole = static_cast<double>(sum - static_cast<long long>(row.zero) * total);
        return static_cast<float>(whole * row.scale * col + static_cast<double>(bias));
    }
    const float high = __int2float_rn(sum), low = __int2float_rn(sum - __float2int_rn(high));  // together exact
    const float rest = fmaf(high, fmaf(row.scale, col, -scale), low * scale);
    if constexpr (!HAS_BIAS) return fmaf(high, scale, rest);
    // Rounded one by one: a product that is joined with the addition would not be the one whose rest is taken below.
    const float product = __fmul_rn(high, scale), whole = __fadd_rn(product, bias), part = whole - product;
    const float lost = fmaf(high, scale, -product) + ((product - (whole - part)) + (bias - part));
    return whole + (lost + rest);
}

// Sums travel between blocks as they are, whatever their type.
__device__ __forceinline__ float bits(float sum) { return sum; }
__device__ __forceinline__ float bits(int sum) { return __int_as_float(sum); }

__device__ __forceinline__ void store_one(const Arguments& arguments, const Place& tile, int m, int n, float value) {
    const long long at = m * tile.out_stride(arguments) + n;
    if constexpr (OUT_TYPE == FP32)
        static_cast<float*>(tile.out(arguments))[at] = value;
    else
        static_cast<unsigned short*>(tile.out(arguments))[at] = static_cast<unsigned short>(pack_out(value, 0.0f));
}

// What belongs to the tile's columns, where those are columns of D: read once, 32 columns by a warp, and handed round
// by shuffles. Read where they are used, they would take more registers than there are.
struct Columns {
    static constexpr int PARTS = (TILE_COLS + 31) / 32;
    float scale[PARTS], bias[PARTS];
    int total[PARTS];

    __device__ __forceinline__ Columns(const Arguments& arguments, const Place& tile, int first_col) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const int n = min(first_col + 32 * i + static_cast<int>(threadIdx.x % 32), tile.columns() - 1);
            scale[i] = col_scale(arguments, tile, n);
            bias[i] = bias_at(arguments, n);
            total[i] = col_total(arguments, tile, n);
        }
    }

    // What belongs to two columns side by side.
    struct Two {
        float scale[2], bias[2];
        int total[2];

        template <class Sum>
        __device__ __forceinline__ float finish(Sum sum, const Row& row, int which) const {
            return finished(sum, row, scale[which], bias[which], total[which]);
        }
    };

    // Of the columns at `offset` from `eight`, a multiple of 8 that is known when compiling. A shuffle for each: they
    // are few that a multiprocessor does at a time, so one is for all rows of a thread.
    __device__ __forceinline__ Two two(int eight, int offset) const {
        Two found;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int lane = eight % 32 + offset + i;
            found.scale[i] = FINISH_SCALES ? __shfl_sync(~0u, scale[eight / 32], lane) : 1.0f;
            found.bias[i] = HAS_BIAS ? __shfl_sync(~0u, bias[eight / 32], lane) : 0.0f;
            found.total[i] = HAS_ZERO ? __shfl_sync(~0u, total[eight / 32], lane) : 0;
        }
        return found;
    }
};

// What the sums of a tile are finished with, where its rows are rows of D. It is read before the products, and has come
// when they are done: read then, it would be waited for, and with few tiles to a block nothing goes on meanwhile.
struct Ahead {
    Columns columns;
    Row rows[WAVES][2];  // of a thread: 8 apart in each wave

    __device__ __forceinline__ Ahead(const Arguments& arguments, const Place& tile, int row_in_tile)
        : columns(arguments, tile, tile.col * TILE_COLS) {
#pragma unroll
        for (int i = 0; i < 2 * WAVES; ++i) {
            const int m = tile.row * TILE_ROWS + row_in_tile + i / 2 * WAVE_ROWS + i % 2 * 8;
            rows[i / 2][i % 2] =
                row_of(arguments, tile, tile.a_scale_row(arguments) + min(m, tile.rows(arguments) - 1));
        }
    }
};

#if SWAP && GROUPED
#include "sm90/epilogue_turn.cuh"
#elif SWAP
#include "sm90/epilogue_reduce.cuh"
#elif SPLIT > 1
#include "sm90/epilogue_split.cuh"
#elif OUT_BY_TMA
#include "sm90/epilogue_tma.cuh"
#else
#include "sm90/epilogue_direct.cuh"
#endif
