// 16-bit results through swizzled shared memory, out by the copy engine, which runs on while the next tile is
// multiplied.
#pragma once
#include "sm90/epilogue.cuh"

struct Epilogue {
    static constexpr bool USES_MAP = true;
    // Columns that one store writes: 128, 64 or 32 bytes of a row, whichever divides the tile.
    static constexpr int SLAB = TILE_COLS % 64 == 0 ? 64 : TILE_COLS % 32 == 0 ? 32 : 16;
    static constexpr int SLAB_BYTES = 64 * SLAB * 2;
    static constexpr int WAVE_BYTES = TILE_COLS / SLAB * SLAB_BYTES;
    static constexpr int GROUP_BYTES = OUT_BUFFERS * WAVE_BYTES;
    static constexpr int BYTES = (MATH_GROUPS * GROUP_BYTES + 1023) / 1024 * 1024;
    static_assert(TILE_COLS % 16 == 0, "a tile is whole slabs");

    static __device__ __forceinline__ void init(u64*) {}
    static __device__ __forceinline__ bool storing_thread() { return threadIdx.x % 128 == 0; }

    static __device__ __forceinline__ void finish() {
        if (storing_thread()) bulk_wait_group_read<0>();
    }

    // A wave's first rows only, without the copy engine, which writes them all.
    static __device__ __forceinline__ void store_rows(const char* buffer, const Arguments& arguments, int m, int rows,
                                                      int first_col) {
        constexpr int CHUNKS = TILE_COLS / 8;  // of 16 bytes
        for (int i = threadIdx.x % 128; i < rows * CHUNKS; i += 128) {
            const int row = i / CHUNKS, col = i % CHUNKS * 8, chunk = col % SLAB / 8;
            const int swizzled = chunk ^ row * (SLAB * 2) / 128 % (SLAB / 8);
            if (first_col + col < SHAPE_N)
                *reinterpret_cast<uint4*>(static_cast<unsigned short*>(arguments.out) +
                                          (m + row) * arguments.out_stride + first_col + col) =
                    *reinterpret_cast<const uint4*>(buffer + col / SLAB * SLAB_BYTES + row * SLAB * 2 + swizzled * 16);
        }
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
            if (GROUPED && left <= 0) break;
            char* buffer = out + math_group * GROUP_BYTES + wave % OUT_BUFFERS * WAVE_BYTES;
            if (wave % OUT_BUFFERS == 0) {
                finish();
                named_barrier_sync(1 + math_group, 128);
            }
            const int m = tile.row * TILE_ROWS + row_in_tile + wave * WAVE_ROWS;
            const Row top = row_of(arguments, tile.a_scale_row(arguments) + min(m, tile.rows(arguments) - 1));
            const Row bottom = row_of(arguments, tile.a_scale_row(arguments) + min(m + 8, tile.rows(arguments) - 1));
#pragma unroll
            for (int j = 0; j < TILE_COLS / 16; ++j) {
                u32 packed[4];
#pragma unroll
                for (int part = 0; part < 2; ++part) {  // 8 columns each
                    const Sum* v = sums[wave] + 8 * j + 4 * part;
                    const int eight = 16 * j + 8 * part;
                    const int n = first_col + eight + offset;
                    packed[2 * part] =
                        pack_out(with_c(columns.finish(v[0], top, eight, offset), arguments, m, n),
                                 with_c(columns.finish(v[1], top, eight, offset + 1), arguments, m, n + 1));
                    packed[2 * part + 1] =
                        pack_out(with_c(columns.finish(v[2], bottom, eight, offset), arguments, m + 8, n),
                                 with_c(columns.finish(v[3], bottom, eight, offset + 1), arguments, m + 8, n + 1));
                }
                const int col = 16 * j + lane / 16 * 8, chunk = col % SLAB / 8;  // of 16 bytes; swizzled as TMA expects
                const int swizzled = chunk ^ row * (SLAB * 2) / 128 % (SLAB / 8);
                stmatrix_x4(buffer + col / SLAB * SLAB_BYTES + row * SLAB * 2 + swizzled * 16, packed[0], packed[1],
                            packed[2], packed[3]);
            }
            fence_proxy_async();
            named_barrier_sync(1 + math_group, 128);
            if (GROUPED && left < 64) {
                store_rows(buffer, arguments, tile.out_row(arguments) + first_row + wave * WAVE_ROWS, left, first_col);
            } else if (storing_thread()) {
#pragma unroll
                for (int slab = 0; slab < TILE_COLS / SLAB; ++slab)
                    tma_store_2d(map, buffer + slab * SLAB_BYTES, first_col + slab * SLAB,
                                 tile.out_row(arguments) + first_row + wave * WAVE_ROWS);
                bulk_commit_group();
            }
        }
    }
};
