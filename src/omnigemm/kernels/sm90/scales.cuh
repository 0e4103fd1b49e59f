// How scales come to the stages they belong to: by warps of their own, since they lie with K innermost.
#pragma once
#include "common/sliding.cuh"

// The scales of a row for a few blocks of K, in one read if their alignment allows it. Past the end of K they are zero.
__device__ __forceinline__ void read_scales(float (&values)[SCALES_AT_ONCE], const Place& tile,
                                            const Arguments& arguments, const float* scales, int row, int block) {
    const float* from = scales + tile.scale_at(arguments, row) + block;
    if constexpr (ONE_READ) {
        const float4 four = block < tile.scale_end() ? __ldg(reinterpret_cast<const float4*>(from)) : float4{};
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
#pragma unroll
        for (int b = 0; b < SCALES_AT_ONCE; ++b) values[b] = block + b < tile.scale_end() ? __ldg(from + b) : 0.0f;
    }
}

// The scales lie with K innermost, where the copy engine is of no use. Each read of a warp touches as many cache lines
// as it has rows, and lines are what the way to shared memory has few of. So two lanes read a row, for eight blocks of
// K, unless that takes too long for a single warp or too many registers. Of the warps that bring scales, each has every
// SCALE_WARPS-th AT_ONCE of them.
template <int warp>
__device__ __forceinline__ void load_scales(const Work& work, const Shared& shared, const Arguments& arguments) {
    constexpr int LANES = SCALE_WARPS > 1 && !MANY_SCALES ? 2 : 1, AT_ONCE = 32 / LANES;
    constexpr int STEP = AT_ONCE * (SCALE_WARPS + !SCALE_WARPS), EACH = (SCALES + STEP - 1) / STEP;
    const float* left = SWAP ? arguments.b_scale : arguments.a_scale;
    const float* right = SWAP ? arguments.a_scale : arguments.b_scale;
    const int lane = threadIdx.x % 32, part = lane % LANES, inside = lane / LANES;
    griddepcontrol_wait();
    Position<STAGES> at;
    for (int index = work.first(); work.has(index); index = work.next(index)) {
        const Place tile = work.tile(index);
        work.leave();
        const int rows = tile.rows(arguments), a_before = tile.a_scale_row(arguments), b_before = tile.b_scale_row();
        const int first_row = tile.row * TILE_ROWS, last_row = (SWAP ? tile.columns() : rows) - 1;
        const int first_col = tile.col * TILE_COLS, last_col = (SWAP ? rows : tile.columns()) - 1;
        const int left_before = SWAP ? b_before : a_before, right_before = SWAP ? a_before : b_before;
        Sliding sliding[EACH + !EACH];
        const float *left_origin = left, *right_origin = right;
        if constexpr (SLIDES) {
            left_origin += tile.scale_at(arguments, left_before + min(first_row, last_row)) + work.first_block;
            right_origin += tile.scale_at(arguments, right_before + min(first_col, last_col)) + work.first_block;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int first = warp * AT_ONCE + j * STEP, inner = first + inside;
                if (first >= SCALES || work.first_block >= work.end(tile)) continue;
                // From the tile's first row to this one; those past the end repeat the last one's.
                if (first < LEFT_SCALES)
                    sliding[j].begin(left_origin,
                                     tile.scale_step(arguments) * max(0, min(inner, last_row - first_row)));
                else
                    sliding[j].begin(right_origin, tile.scale_step(arguments) *
                                                       max(0, min(inner - LEFT_SCALES, last_col - first_col)));
            }
        }
        for (int block = work.first_block; block < work.end(tile); block += LANES * SCALES_AT_ONCE) {
            const int from = block + part * SCALES_AT_ONCE;
            float values[EACH + !EACH][SCALES_AT_ONCE] = {}, folded[SCALES_AT_ONCE];
            if constexpr (LEFT_FOLDED)
                read_scales(folded, tile, arguments, left, left_before + min(first_row, last_row) / 128, from);
            if constexpr (RIGHT_FOLDED)
                read_scales(folded, tile, arguments, right, right_before + min(first_col, last_col) / 128, from);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int first = warp * AT_ONCE + j * STEP;
                if (first >= SCALES) continue;
                const bool on_left = first < LEFT_SCALES;
                const int row = first_row + first + inside, col = first - LEFT_SCALES + inside;
                // Rows past the end repeat the last one's.
                const int which = on_left                  ? left_before + min(row, last_row)
                                  : RIGHT_SCALE == PER_ROW ? right_before + min(first_col + col, last_col)
                                                           : right_before + min(first_col / 128 + col, last_col / 128);
                if constexpr (SLIDES)
                    sliding[j].next(on_left ? left_origin : right_origin, values[j], work.end(tile) - block);
                else
                    read_scales(values[j], tile, arguments, on_left ? left : right, which, from);
                if constexpr (LEFT_FOLDED || RIGHT_FOLDED)
#pragma unroll
                    for (int b = 0; b < SCALES_AT_ONCE; ++b) values[j][b] *= folded[b];
            }
#pragma unroll 1
            for (int now = 0; now < LANES; ++now) {
#pragma unroll
                for (int b = 0; b < SCALES_AT_ONCE; ++b) {
                    if (block + now * SCALES_AT_ONCE + b >= work.end(tile)) break;
                    mbarrier_wait(&shared.ring->empty[at.stage], at.phase ^ 1);
                    float* stage = shared.scales + at.stage * STAGE_SCALES;
#pragma unroll
                    for (int j = 0; j < EACH; ++j) {
                        const int first = warp * AT_ONCE + j * STEP;
                        if (first + inside >= SCALES || part != now) continue;
                        const int place = first < LEFT_SCALES
                                              ? left_place(first) + left_place(inside)
                                              : LEFT_SCALES + right_place(first - LEFT_SCALES) + right_place(inside);
                        stage[place] = values[j][b];
                    }
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(&shared.ring->full[at.stage]);
                    at.advance();
                }
            }
        }
    }
}
