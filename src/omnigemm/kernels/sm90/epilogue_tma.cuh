// 16-bit results through swizzled shared memory, out by the copy engine, which runs on while the next tile is
// multiplied.
#pragma once
#include "sm90/epilogue.cuh"

struct Epilogue {
    static constexpr bool USES_MAP = true;
    // Columns that one store writes: 128, 64 or 32 bytes of a row, whichever divides the tile.
    static constexpr int SLAB = TILE_COLS % 64 == 0 ? 64 : TILE_COLS % 32 == 0 ? 32 : 16;
    static constexpr int SLAB_BYTES = 64 * SLAB * 2;
    // A wave's columns may go out in parts: what they wait in is then smaller, and leaves room for a stage more.
    static constexpr int PART_COLS = TILE_COLS / OUT_PARTS;
    static constexpr int PART_BYTES = PART_COLS / SLAB * SLAB_BYTES;
    static constexpr int GROUP_BYTES = OUT_BUFFERS * PART_BYTES;
    static constexpr int BYTES = (MATH_GROUPS * GROUP_BYTES + 1023) / 1024 * 1024;
    static_assert(TILE_COLS % 16 == 0 && PART_COLS % SLAB == 0, "parts are whole slabs");

    static __device__ __forceinline__ void init(u64*) {}
    static __device__ __forceinline__ bool storing_thread() { return threadIdx.x % 128 == 0; }

    static __device__ __forceinline__ void finish() {
        if (storing_thread()) bulk_wait_group_read<0>();
    }

    // Where 8 columns of a row lie, swizzled as TMA expects.
    static __device__ __forceinline__ int place(int row, int col) {
        const int chunk = col % SLAB / 8, swizzled = chunk ^ row * (SLAB * 2) / 128 % (SLAB / 8);
        return col / SLAB * SLAB_BYTES + row * SLAB * 2 + swizzled * 16;
    }

    static __device__ __forceinline__ void store_box(const TensorMap* map, const char* from, int col, int row,
                                                     int number) {
        if constexpr (BATCH)
            tma_store_3d(map, from, col, row, number);
        else
            tma_store_2d(map, from, col, row);
    }

    // A wave's first rows only, without the copy engine, which writes them all.
    static __device__ __forceinline__ void store_rows(const char* buffer, const Arguments& arguments, int m, int rows,
                                                      int first_col) {
        constexpr int CHUNKS = PART_COLS / 8;  // of 16 bytes
        for (int i = threadIdx.x % 128; i < rows * CHUNKS; i += 128) {
            const int row = i / CHUNKS, col = i % CHUNKS * 8;
            if (first_col + col < SHAPE_N)
                *reinterpret_cast<uint4*>(static_cast<unsigned short*>(arguments.out) +
                                          (m + row) * arguments.out_stride + first_col + col) =
                    *reinterpret_cast<const uint4*>(buffer + place(row, col));
        }
    }

    // Rows that do not begin at multiples of 16 bytes.
    static __device__ __forceinline__ void store_elements(const char* buffer, const Arguments& arguments,
                                                          const Place& tile, int m, int rows, int first_col) {
        const int cols = min(PART_COLS, tile.columns() - first_col);
        unsigned short* to = static_cast<unsigned short*>(tile.out(arguments)) + first_col;
        for (int row = threadIdx.x % 128 / 32; row < rows; row += 4)
            for (int col = threadIdx.x % 32; col < cols; col += 32)
                to[(m + row) * tile.out_stride(arguments) + col] =
                    *reinterpret_cast<const unsigned short*>(buffer + place(row, col) + col % 8 * 2);
    }

    template <class Sum, int waves, int regs>
    static __device__ __forceinline__ void store(const Sum (&sums)[waves][regs], char* out, char*, u64*,
                                                 const TensorMap* map, const Arguments& arguments, int math_group,
                                                 const Place& tile, int row_in_tile) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int row = warp * 16 + lane % 16;  // that this lane writes, of the wave's 64
        const int first_row = tile.row * TILE_ROWS + math_group * GROUP_ROWS, first_col = tile.col * TILE_COLS;
        const Columns columns(arguments, tile, first_col);
        const int offset = lane % 4 * 2;
#pragma unroll
        for (int wave = 0; wave < waves; ++wave) {
            // Rows that are the product's own; in groups, those behind them are another's.
            const int left = tile.rows(arguments) - first_row - wave * WAVE_ROWS;
            if ((GROUPED || LIST) && left <= 0) break;
            const int m = tile.row * TILE_ROWS + row_in_tile + wave * WAVE_ROWS;
            const Row top = row_of(arguments, tile, tile.a_scale_row(arguments) + min(m, tile.rows(arguments) - 1));
            const Row bottom =
                row_of(arguments, tile, tile.a_scale_row(arguments) + min(m + 8, tile.rows(arguments) - 1));
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
#pragma unroll
                for (int j = 0; j < PART_COLS / 16; ++j) {
                    u32 packed[4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {  // 8 columns each
                        const int eight = from + 16 * j + 8 * half, n = first_col + eight + offset;
                        const Sum* v = sums[wave] + eight / 2;
                        packed[2 * half] =
                            pack_out(with_c(columns.finish(v[0], top, eight, offset), arguments, tile, m, n),
                                     with_c(columns.finish(v[1], top, eight, offset + 1), arguments, tile, m, n + 1));
                        packed[2 * half + 1] = pack_out(
                            with_c(columns.finish(v[2], bottom, eight, offset), arguments, tile, m + 8, n),
                            with_c(columns.finish(v[3], bottom, eight, offset + 1), arguments, tile, m + 8, n + 1));
                    }
                    stmatrix_x4(buffer + place(row, 16 * j + lane / 16 * 8), packed[0], packed[1], packed[2],
                                packed[3]);
                }
                fence_proxy_async();
                named_barrier_sync(1 + math_group, 128);
                const int to_row = tile.out_row(arguments) + first_row + wave * WAVE_ROWS, to_col = first_col + from;
                if (GROUPED && left < 64) {
                    store_rows(buffer, arguments, to_row, left, to_col);
                } else if (!tile.out_by_tma()) {
                    store_elements(buffer, arguments, tile, to_row, min(left, 64), to_col);
                } else if (storing_thread()) {
#pragma unroll
                    for (int slab = 0; slab < PART_COLS / SLAB; ++slab)
                        store_box(map, buffer + slab * SLAB_BYTES, to_col + slab * SLAB, to_row, tile.out_number());
                }
                if (storing_thread()) bulk_commit_group();  // also of nothing: each part's stores are a group
            }
        }
    }
};
