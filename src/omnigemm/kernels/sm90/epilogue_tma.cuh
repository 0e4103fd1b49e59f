// Through swizzled shared memory and out by the copy engine, which runs on while the next tile is multiplied. Where
// fp32 results are to be added to what is in D, it does that too, and nobody here reads C.
#pragma once
#include "sm90/epilogue.cuh"

struct Epilogue {
    using Ahead = ::Ahead;
    static constexpr bool USES_MAP = true;
    static constexpr int CHUNK = 16 / OUT_BYTES;  // columns in 16 bytes, the unit of swizzling
    // Columns that one store writes: 128, 64 or 32 bytes of a row, whichever divides the tile.
    static constexpr int WIDEST = 128 / OUT_BYTES;
    static constexpr int SLAB = TILE_COLS % WIDEST == 0         ? WIDEST
                                : TILE_COLS % (WIDEST / 2) == 0 ? WIDEST / 2
                                                                : WIDEST / 4;
    static constexpr int ROW_BYTES = SLAB * OUT_BYTES, SLAB_BYTES = 64 * ROW_BYTES;
    // A wave's columns may go out in parts: what they wait in is then smaller, and leaves room for a stage more.
    static constexpr int PART_COLS = TILE_COLS / OUT_PARTS;
    static constexpr int PART_BYTES = PART_COLS / SLAB * SLAB_BYTES;
    static constexpr int GROUP_BYTES = OUT_BUFFERS * PART_BYTES;
    static constexpr int BYTES = (MATH_GROUPS * GROUP_BYTES + 1023) / 1024 * 1024;
    static_assert(TILE_COLS % 16 == 0 && PART_COLS % SLAB == 0, "parts are whole slabs");
    static_assert(OUT_BYTES == 2 || SLAB == 32, "as they are staged");

    static __device__ __forceinline__ void init(u64*) {}
    static __device__ __forceinline__ bool storing_thread() { return threadIdx.x % 128 == 0; }

    static __device__ __forceinline__ void finish() {
        if (storing_thread()) bulk_wait_group_read<0>();
    }

    // Where 16 bytes of a row lie, swizzled as TMA expects.
    static __device__ __forceinline__ int place(int row, int col) {
        const int chunk = col % SLAB / CHUNK, swizzled = chunk ^ row * ROW_BYTES / 128 % (SLAB / CHUNK);
        return col / SLAB * SLAB_BYTES + row * ROW_BYTES + swizzled * 16;
    }

    static __device__ __forceinline__ void store_box(const TensorMap* map, const char* from, int col, int row,
                                                     int number, bool adds) {
        if constexpr (BATCH)
            tma_store_3d(map, from, col, row, number);
        else if (adds)
            tma_reduce_add_2d(map, from, col, row);
        else
            tma_store_2d(map, from, col, row);
    }

    // A wave's first rows, piece by piece, without the copy engine: it writes them all, and only where rows begin at
    // multiples of 16 bytes.
    template <class Piece>
    static __device__ __forceinline__ void store_rows(const char* buffer, const Arguments& arguments, const Place& tile,
                                                      int m, int rows, int first_col) {
        constexpr int COLS = sizeof(Piece) / OUT_BYTES, PIECES = PART_COLS / COLS;
        for (int i = threadIdx.x % 128; i < rows * PIECES; i += 128) {
            const int row = i / PIECES, col = i % PIECES * COLS;
            if (first_col + col < tile.columns())
                *reinterpret_cast<Piece*>(static_cast<Out*>(tile.out(arguments)) +
                                          (m + row) * tile.out_stride(arguments) + first_col + col) =
                    *reinterpret_cast<const Piece*>(buffer + place(row, col) + col % CHUNK * OUT_BYTES);
        }
    }

    // What a thread has of a wave: two rows, 8 apart, and of each two columns in every 8.
    struct Rows {
        int m;  // of the first
        Row of[2];
        bool reads_c;
        const float2* c[2];  // from the thread's first columns on, or null: one by one
    };

    // 16-bit results of a part's columns, to where they wait.
    template <class Sum, int regs>
    static __device__ __forceinline__ void stage(const Sum (&sums)[regs], char* buffer, unsigned short,
                                                 const Arguments& arguments, const Place& tile, const Columns& columns,
                                                 const Rows& rows, int first_col, int from) {
        const int lane = threadIdx.x % 32, offset = lane % 4 * 2;
        const int row = threadIdx.x / 32 % 4 * 16 + lane % 16;  // whose address this lane gives
#pragma unroll
        for (int j = 0; j < PART_COLS / 16; ++j) {
            u32 packed[4];
#pragma unroll
            for (int far = 0; far < 2; ++far) {
                const int eight = from + 16 * j + far * 8, n = first_col + eight + offset;
                const Columns::Two two = columns.two(eight, offset);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int m = rows.m + half * 8;
                    const Sum* v = sums + eight / 2 + half * 2;
                    const float left = two.finish(v[0], rows.of[half], 0), right = two.finish(v[1], rows.of[half], 1);
                    packed[2 * far + half] =
                        pack_out(with_c(left, arguments, tile, m, n), with_c(right, arguments, tile, m, n + 1));
                }
            }
            stmatrix_x4(buffer + place(row, 16 * j + lane / 16 * 8), packed[0], packed[1], packed[2], packed[3]);
        }
    }

    // The same in 32 bits. A half of a warp writes two columns in every 8 of four rows at a time. Swizzled, two rows'
    // are in the same banks, so every other row's second 16 columns go before its first.
    template <class Sum, int regs>
    static __device__ __forceinline__ void stage(const Sum (&sums)[regs], char* buffer, float,
                                                 const Arguments& arguments, const Place& tile, const Columns& columns,
                                                 const Rows& rows, int first_col, int from) {
        const int lane = threadIdx.x % 32, offset = lane % 4 * 2, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        const bool turn = row % 2;
#pragma unroll
        for (int slab = 0; slab < PART_COLS / SLAB; ++slab) {
            const int first = from + slab * SLAB;
            float2 c[2][4] = {};  // all read before any is used
            if (rows.reads_c) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int eight = 0; eight < 4; ++eight) {
                        const int m = rows.m + half * 8, n = first_col + first + eight * 8 + offset;
                        c[half][eight] = rows.c[half] ? rows.c[half][first / 2 + eight * 4]
                                                      : make_float2(c_near(arguments, tile, m, n),
                                                                    c_near(arguments, tile, m, n + 1));
                    }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Columns::Two two[2];
#pragma unroll
                for (int far = 0; far < 2; ++far) two[far] = columns.two(first + (i + 2 * far) * 8, offset);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float2 pair[2];
#pragma unroll
                    for (int far = 0; far < 2; ++far) {
                        const int eight = i + 2 * far, col = first + eight * 8;
                        const Sum* v = sums + col / 2 + half * 2;
                        pair[far].x = two[far].finish(v[0], rows.of[half], 0);
                        pair[far].y = two[far].finish(v[1], rows.of[half], 1);
                        if (rows.reads_c) {
                            pair[far].x = plus_c(pair[far].x, arguments, tile, c[half][eight].x);
                            pair[far].y = plus_c(pair[far].y, arguments, tile, c[half][eight].y);
                        }
                    }
#pragma unroll
                    for (int far = 0; far < 2; ++far) {
                        const int col = slab * SLAB + (i + 2 * (far != turn)) * 8 + offset;
                        const float2 now = turn ? pair[1 - far] : pair[far];
                        // 8 rows further on all is swizzled alike.
                        char* to = buffer + place(row, col) + col % CHUNK * OUT_BYTES + half * 8 * ROW_BYTES;
                        st_shared_v2(to, now.x, now.y);
                    }
                }
            }
        }
    }

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], const Ahead& ahead, char* out, char*,
                                                 u64*, const TensorMap* map, const Arguments& arguments, int math_group,
                                                 const Place& tile, int row_in_tile) {
        const int first_row = tile.row * TILE_ROWS + math_group * GROUP_ROWS, first_col = tile.col * TILE_COLS;
        const bool adds = adds_to_out(arguments, tile), inside = first_col + TILE_COLS <= tile.columns();
#pragma unroll
        for (int wave = 0; wave < waves; ++wave) {
            // Rows that are the product's own; in groups, those behind them are another's.
            const int left = tile.rows(arguments) - first_row - wave * WAVE_ROWS;
            if ((GROUPED || LIST) && left <= 0) break;
            Rows rows;
            rows.m = tile.row * TILE_ROWS + row_in_tile + wave * WAVE_ROWS;
            rows.reads_c = has_c(tile) && !adds;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int m = min(rows.m + half * 8, tile.rows(arguments) - 1);
                rows.of[half] = ahead.rows[wave][half];
                rows.c[half] = inside ? c_pairs(arguments, tile, m, first_col + threadIdx.x % 4 * 2) : nullptr;
            }
#pragma unroll
            for (int part = 0; part < OUT_PARTS; ++part) {
                const int step = wave * OUT_PARTS + part, from = part * PART_COLS;
                char* buffer = out + math_group * GROUP_BYTES + step % OUT_BUFFERS * PART_BYTES;
                // The buffer is free when all but the stores after its own have read theirs.
                if (step == 0 || step >= OUT_BUFFERS) {
                    if (storing_thread()) {
                        if (step == 0)
                            bulk_wait_group_read<0>();
                        else
                            bulk_wait_group_read<OUT_BUFFERS - 1>();
                    }
                    named_barrier_sync(1 + math_group, 128);
                }
                stage(sums[wave], buffer, Out{}, arguments, tile, ahead.columns, rows, first_col, from);
                fence_proxy_async();
                named_barrier_sync(1 + math_group, 128);
                const int to_row = tile.out_row(arguments) + first_row + wave * WAVE_ROWS, to_col = first_col + from;
                if (!tile.out_by_tma(arguments)) {
                    store_rows<Out>(buffer, arguments, tile, to_row, min(left, 64), to_col);
                } else if (GROUPED && left < 64) {
                    store_rows<uint4>(buffer, arguments, tile, to_row, left, to_col);
                } else if (storing_thread()) {
#pragma unroll
                    for (int slab = 0; slab < PART_COLS / SLAB; ++slab)
                        store_box(map, buffer + slab * SLAB_BYTES, to_col + slab * SLAB, to_row, tile.out_number(),
                                  adds);
                }
                if (storing_thread()) bulk_commit_group();  // also of nothing: each part's stores are a group
            }
        }
    }
};
