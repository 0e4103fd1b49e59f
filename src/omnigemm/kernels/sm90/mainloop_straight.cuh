// Operands whose products the tensor cores add up over all of K: int8, exact in 32 bits, and 16-bit floats, in fp32.
// Nothing is scaled on the way, so the products of DEPTH blocks may be running while the next ones are begun.
#pragma once
#include "sm90/mainloop.cuh"

struct Mainloop : Operands {
#if INT8
    using Sums = int[WAVES][REGS];
#else
    using Sums = float[WAVES][REGS];
#endif
    static_assert(STAGES > DEPTH, "a stage more than there are products running");

    __device__ __forceinline__ Mainloop(const char* stages, int row_group, int) : Operands(stages, row_group) {}

    // The compiler does not know that waiting for wgmma is what makes its registers readable.
    static __device__ __forceinline__ void settle(Sums& sums) {
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
#pragma unroll
            for (int i = 0; i < REGS; ++i)
#if INT8
                asm volatile("" : "+r"(sums[wave][i])::"memory");
#else
                asm volatile("" : "+f"(sums[wave][i])::"memory");
#endif
    }

    // The sums of a tile, or of its first waves: the others' are zero.
    template <int waves, class Ring, class At>
    __device__ __forceinline__ void run(Sums& sums, Ring* ring, At& at, const float*, const Tile&, int blocks,
                                        int share_rank, const Turns& turns) {
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
#pragma unroll
            for (int i = 0; i < REGS; ++i) sums[wave][i] = 0;
        At done = at;
        settle(sums);
        turns.wait();
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            mbarrier_wait(&ring->full[at.stage], at.phase);
            wgmma_fence();
            const u64 left_now = left + at.stage * STAGE_STEP, right_now = right + at.stage * STAGE_STEP;
#pragma unroll
            for (int k = 0; k < BLOCK_K / 32; ++k)
#pragma unroll
                for (int wave = 0; wave < waves; ++wave)
                    wgmma(sums[wave], left_now + wave * WAVE_STEP + k * LEFT_STEP, right_now + k * RIGHT_STEP, true);
            wgmma_commit_group();
            at.advance();
            wgmma_wait_group<DEPTH>();
            if (i >= DEPTH) {
                release(&ring->empty[done.stage], share_rank);
                done.advance();
            }
        }
        turns.pass();
        wgmma_wait_group<0>();
        settle(sums);
        for (int i = min(blocks, DEPTH); i > 0; --i) {
            release(&ring->empty[done.stage], share_rank);
            done.advance();
        }
    }
};
