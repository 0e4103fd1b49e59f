"""The Hopper family's host side: what a config is, which ones are legal, and the source that a kernel is compiled from.

Pure functions of sizes: nothing here needs a GPU, so kernels are generated, compiled and checked on any machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

BLOCK_K = 128  # bytes of K in a stage: one swizzled row of shared memory, and one block of scales
STORE_COLUMNS, STORE_ROWS = 64, 64  # what one store of the epilogue writes
SHARED_BYTES = 227 * 1024  # what a block may have on sm_90
KERNEL = "omnigemm_sm90_fp8_block"
OPTIONS = ("--std=c++17",)


@dataclasses.dataclass(frozen=True)
class Config:
    """What changes speed only."""

    block_m: int = 128
    block_n: int = 192
    stages: int = 4
    band: int = 16  # column tiles that are worked on together, for L2

    @property
    def threads(self) -> int:
        return 128 * (self.block_m // 64 + 1)

    @property
    def shared_bytes(self) -> int:
        """The output tile, the stages, and two barriers for each stage."""
        out = self.block_m * self.block_n * 2
        return out + self.stages * ((self.block_m + self.block_n) * BLOCK_K + 16)

    def fault(self) -> str | None:
        """The constraint that this config breaks, in words, or None."""
        if self.block_m != 128:
            return f"block_m is {self.block_m}, expected 128: two math warpgroups of 64 rows"
        if self.block_n not in (128, 192):
            return f"block_n is {self.block_n}, expected 128 or 192: tiles that meet at most two scales of B"
        if self.stages < 2:
            return f"stages is {self.stages}, expected at least 2"
        if self.band < 1:
            return f"band is {self.band}, expected at least 1"
        if self.shared_bytes > SHARED_BYTES:
            return f"shared memory is {self.shared_bytes} bytes, expected at most {SHARED_BYTES}"
        return None

    def grid(self, m: int, n: int, multiprocessors: int) -> int:
        """Persistent blocks: one for each multiprocessor, or for each tile if those are fewer."""
        return min(multiprocessors, -(-m // self.block_m) * -(-n // self.block_n))


def configs() -> Iterator[Config]:
    """Every legal config, each with as many stages as fit."""
    for block_n in (192, 128):
        for band in (8, 16):
            deepest = [one for stages in range(2, 9) if (one := Config(128, block_n, stages, band)).fault() is None]
            yield deepest[-1]


def _wgmma(columns: int, a: str, b: str) -> str:
    """wgmma for 64 rows by `columns` as a function of the accumulators: the instruction names every register."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.{a}.{b}"
    return f"""
__device__ __forceinline__ void wgmma_fp8(
    float (&d)[{count}], unsigned long long a, unsigned long long b, bool add
) {{
    asm volatile(
        "{{\\n"
        ".reg .pred add;\\n"
        "setp.ne.b32 add, %{count + 2}, 0;\\n"
        "{instruction} {{{registers}}}, %{count}, %{count + 1}, add, 1, 1;\\n"
        "}}"
        : {operands}
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}}
"""


def source(config: Config, n: int, k: int, a_dtype: str = "e4m3", b_dtype: str = "e4m3") -> str:
    """The whole of a kernel's source, apart from our headers."""
    fault = config.fault()
    if fault is not None:
        raise ValueError(f"sm90 config: {fault}")
    constants = {
        "SHAPE_N": n,
        "SHAPE_K": k,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "BAND": config.band,
    }
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    # A tile's columns are multiplied in two halves.
    return "\n".join([*lines, _wgmma(config.block_n // 2, a_dtype, b_dtype), '#include "sm90/gemm.cuh"', ""])
