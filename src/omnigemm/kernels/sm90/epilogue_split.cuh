// Operands as they are, K split, one tile for a block: every block writes the columns of D that it owns, straight from
// the registers. Four lanes have two columns of each group of 8; where rows allow it they first deal the groups out
// among themselves, so that each writes 16 bytes of one group instead of 4 of each.
#pragma once
#include "sm90/parts.cuh"

struct Epilogue : Parts {
    static constexpr bool USES_MAP = false;
    static constexpr int SIZE = OUT_TYPE == FP32 ? 4 : 2;
    static constexpr bool DEALS = SIZE == 2 && OWNED >= 4;  // of fewer groups it is more to do, and was slower

    static __device__ __forceinline__ void finish() {}
    static constexpr __device__ bool storing_thread() { return false; }

    // What a thread finishes its sums with: two rows, 8 apart, and two columns in each group that the block owns.
    struct Ahead {
        // Where there are registers for it, read before the products; else while the sums travel, which takes about as
        // long.
        static constexpr bool EARLY = (1 + DEPTH) * TILE_COLS / 2 + 4 * OWNED <= 112;
        bool pairs, eights;  // of columns can all be written as such
        float col_scales[OWNED][2], biases[OWNED][2];
        int totals[OWNED][2];
        Row rows[2];

        __device__ __forceinline__ Ahead(const Arguments& arguments, const Place& tile, int row_in_tile)
            : pairs((tile.col + 1) * TILE_COLS <= SHAPE_N && tile.out_stride(arguments) % 2 == 0 &&
                    reinterpret_cast<u64>(tile.out(arguments)) % (2 * SIZE) == 0),
              eights(pairs && tile.out_stride(arguments) % 8 == 0 &&
                     reinterpret_cast<u64>(tile.out(arguments)) % (8 * SIZE) == 0) {
            if constexpr (EARLY) read(arguments, tile, row_in_tile);
        }
        __device__ __forceinline__ void read(const Arguments& arguments, const Place& tile, int row_in_tile) {
#pragma unroll
            for (int i = 0; i < 2 * OWNED; ++i) {
                const int n = min(first_col(tile) + i / 2 * 8 + i % 2, SHAPE_N - 1);
                col_scales[i / 2][i % 2] = col_scale(arguments, tile, n);
                biases[i / 2][i % 2] = bias_at(arguments, n);
                totals[i / 2][i % 2] = col_total(arguments, tile, n);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = min(tile.row * TILE_ROWS + row_in_tile + half * 8, arguments.shape_m - 1);
                rows[half] = row_of(arguments, tile, tile.a_scale_row(arguments) + m);
            }
        }
    };

    // Of this thread, in the first group that the block owns.
    static __device__ __forceinline__ int first_col(const Place& tile) {
        return tile.col * TILE_COLS + first_group(rank()) * 8 + threadIdx.x % 4 * 2;
    }

    static __device__ __forceinline__ void store_two(const Arguments& arguments, const Place& tile, int m, int n,
                                                     const float (&v)[2], bool pairs) {
        if (pairs) {
            char* target = static_cast<char*>(tile.out(arguments)) + (m * tile.out_stride(arguments) + n) * SIZE;
            if constexpr (OUT_TYPE == FP32)
                *reinterpret_cast<float2*>(target) = make_float2(v[0], v[1]);
            else
                *reinterpret_cast<u32*>(target) = pack_out(v[0], v[1]);
        } else {
            for (int i = 0; i < 2 && n + i < SHAPE_N; ++i) store_one(arguments, tile, m, n + i, v[i]);
        }
    }

    // Lane i of four has a word of each of four groups. Then it has group i's, of each lane.
    static __device__ __forceinline__ void deal(u32 (&words)[4]) {
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & bit) continue;
                const bool upper = threadIdx.x & bit;
                const u32 given = __shfl_xor_sync(~0u, upper ? words[i] : words[i + bit], bit);
                (upper ? words[i] : words[i + bit]) = given;
            }
    }

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], Ahead& ahead, char* parts, char*,
                                                 u64* arrived, const TensorMap*, const Arguments& arguments, int,
                                                 const Place& tile, int row_in_tile) {
        send(sums[0], parts, arrived);
        if constexpr (!Ahead::EARLY) ahead.read(arguments, tile, row_in_tile);
        const int first = first_col(tile), first_row = tile.row * TILE_ROWS + row_in_tile;
        mbarrier_wait(arrived, 0);
        // Two columns of a group, in the upper or the lower one of the thread's rows.
        const auto finish = [&](float (&v)[2], const Four<Sum>& sum, int i, int half) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                v[j] = with_c(finished(sum.of[2 * half + j], ahead.rows[half], ahead.col_scales[i][j],
                                       ahead.biases[i][j], ahead.totals[i][j]),
                              arguments, tile, first_row + half * 8, first + i * 8 + j);
        };
        const auto finish_all = [&](bool pairs) {
#pragma unroll
            for (int i = 0; i < OWNED; ++i) {
                if (i >= owned()) break;
                const Four<Sum> sum = added<Sum>(parts, i);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int m = first_row + half * 8;
                    if (m >= arguments.shape_m) continue;
                    float v[2];
                    finish(v, sum, i, half);
                    store_two(arguments, tile, m, first + i * 8, v, pairs);
                }
            }
        };
        const auto finish_eights = [&] {
            const int lane = threadIdx.x % 4;
#pragma unroll
            for (int from = 0; from < OWNED; from += 4) {
                if (from >= owned()) break;
                u32 words[2][4] = {};
#pragma unroll
                for (int i = from; i < OWNED && i < from + 4; ++i) {
                    if (i >= owned()) break;
                    const Four<Sum> sum = added<Sum>(parts, i);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float v[2];
                        finish(v, sum, i, half);
                        words[half][i - from] = pack_out(v[0], v[1]);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    deal(words[half]);
                    const int m = first_row + half * 8, n = first - 2 * lane + (from + lane) * 8;
                    if (from + lane >= owned() || m >= arguments.shape_m) continue;
                    const long long at = m * tile.out_stride(arguments) + n;
                    *reinterpret_cast<uint4*>(static_cast<char*>(tile.out(arguments)) + at * SIZE) =
                        uint4{words[half][0], words[half][1], words[half][2], words[half][3]};
                }
            }
        };
        // Told apart once, and not for every pair: nothing else goes on now.
        if (DEALS && ahead.eights)
            finish_eights();
        else if (ahead.pairs)
            finish_all(true);
        else
            finish_all(false);
    }
};
