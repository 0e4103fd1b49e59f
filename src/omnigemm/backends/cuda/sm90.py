"""The Hopper family's host side: what a config is, which ones are legal, and the source that a kernel is compiled from.

Pure functions of sizes: nothing here needs a GPU, so kernels are generated, compiled and checked on any machine.
"""

from __future__ import annotations

import dataclasses

from ...core.errors import OmniGemmError

BLOCK_K = 128  # bytes of K in a stage: one swizzled row of shared memory, and one block of scales
SHARED_BYTES = 227 * 1024  # what a block may have on sm_90
SHARED_PER_SM = (
    228 * 1024
)  # what the blocks of a multiprocessor have together, 1 KB for each block's own needs included
FETCHES = (128, 256)  # what L2 can be told to take from memory at a time, of those that are of use here
CLUSTER_LIMIT = 8  # that every sm_90 can launch
# A band's tiles are counted in 32 bits: the largest M has 2^25 rows of tiles. More waiting results were never of use,
# and no tile has more parts.
_MOST = {"band": 32, "out_buffers": 8, "out_parts": 32}
ARCH = "sm_90a"
OPTIONS = ("--std=c++17",)
SLAB = 64  # rows of a turned operand that one copy moves: one swizzled row of shared memory
_SCALES_AT_ONCE = 4  # blocks of K that one load reads, where rows of scales are whole multiples of so many
_SCALES = {"none": 0, "tensor": 0, "token": 0, "channel": 0, "1x128": 1, "128x128": 2}
# For sums, products and scales of a math warp, by math groups and blocks on a multiprocessor: what is left of its own.
_REGISTERS = {(1, 1): 224, (1, 2): 136, (1, 3): 80, (1, 4): 64, (2, 1): 196}
TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}  # as epilogue.cuh numbers them
OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_WHOLE = 16  # bytes that the copy engine writes at least, also at a row's end


class ConfigError(OmniGemmError, ValueError):
    """A config cannot compute what it was asked for."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What changes speed only. A tile is `rows` of the left operand by `cols` of the right one (see gemm.cuh)."""

    swap: bool  # B on the left: for few rows
    math_groups: int  # warpgroups that multiply
    waves: int  # times 64 rows for each of them
    cols: int
    stages: int
    left_share: int = 1  # blocks of a cluster that share a tile of the left operand,
    right_share: int = 1  # or of the right one
    split: int = 1  # blocks of a cluster that share a tile, each with a part of K
    depth: int = 1  # blocks of K that are multiplied together before their sums are scaled and added
    band: int = 8  # column tiles that are worked on together, for L2
    out_buffers: int = 1  # waves of results that may wait for the copy engine,
    out_parts: int = 1  # or parts of their columns: of 16-bit results, others see to it that they need no more room
    blocks_per_sm: int = 1
    pingpong: bool = False  # each of two math groups has tiles of its own: one multiplies, the other writes results
    fetch: int = 256  # bytes of an operand's row that L2 takes from memory at a time: the next block's too, or 128

    @property
    def rows(self) -> int:
        return 64 * self.waves * (1 if self.pingpong else self.math_groups)

    @property
    def threads(self) -> int:
        return 128 * self.math_groups + (128 if self.math_groups == 2 else 64)

    @property
    def share(self) -> int:
        return self.left_share * self.right_share

    @property
    def cluster(self) -> int:
        return self.share * self.split

    @property
    def persistent(self) -> bool:
        """Whether a block has one tile after the other, and not only one."""
        return not self.swap and self.split == 1

    @property
    def owned(self) -> int:
        """Groups of 8 columns whose parts one block of a split adds up, at most."""
        return -(-self.cols // 8 // self.split)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.cols) * BLOCK_K

    @property
    def tile_m(self) -> int:
        return self.cols if self.swap else self.rows

    @property
    def tile_n(self) -> int:
        return self.rows if self.swap else self.cols

    def shared_bytes(self, left_scale: int, right_scale: int, row_bytes: int) -> int:
        """Results on their way out, `row_bytes` of a row in each buffer, or sums from other blocks, the stages, the
        scales that come with them, two barriers for each stage, and one for the sums."""
        out = self.math_groups * self.out_buffers * 64 * row_bytes
        if self.split > 1:
            out = self.owned * self.split * self.math_groups * 128 * 16
        scales = (0, self.rows, 0)[left_scale] + (0, self.cols, 2 if 128 % self.cols else 0)[right_scale]
        stage = self.stage_bytes + -(-scales // 4) * 16 + 16
        return -(-out // 1024) * 1024 + self.stages * stage + 8

    def grid(self, m: int, n: int, multiprocessors: int, batch: int = 1) -> int:
        """Blocks: one for each tile when operands are swapped or K split; else as many as run at a time."""
        across = self.tile_n * (self.right_share if self.swap else self.left_share)
        down = self.tile_m * (self.left_share if self.swap else self.right_share)
        packs = batch * -(-m // down) * -(-n // across)
        if not self.persistent:
            return packs * self.cluster
        return min(packs, multiprocessors // self.cluster * self.blocks_per_sm) * self.cluster

    @property
    def words(self) -> list[str]:
        """What its name does not say, for people."""
        found = [f"{self.stages} stages"]
        if self.share > 1:
            found.append(f"clusters of {self.share} share loads")
        if self.depth > 1:
            found.append(f"{self.depth} blocks of K multiplied together")
        if self.blocks_per_sm > 1:
            found.append(f"{self.blocks_per_sm} blocks on a multiprocessor")
        if self.pingpong:
            found.append("a tile for each math group")
        if self.fetch > BLOCK_K:
            found.append("memory read two blocks at a time")
        return found

    def fault(self) -> str | None:
        """The constraint that this config breaks, in words, or None."""
        if (self.math_groups, self.blocks_per_sm) not in _REGISTERS:
            many = f"{self.math_groups} math groups and {self.blocks_per_sm} blocks on a multiprocessor"
            return f"{many}, expected 1 group and up to 4 blocks, or 2 groups and 1 block"
        if self.swap and self.waves != 1:
            return f"swapped with {self.waves} waves, expected 1"
        if self.waves not in (1, 2):
            return f"waves is {self.waves}, expected 1 or 2"
        step = 16 if self.persistent else 8
        if not 8 <= self.cols <= 256 or self.cols % step:
            return f"cols is {self.cols}, expected a multiple of {step} up to 256"
        if self.depth not in (1, 2, 4) or (self.depth > 1 and self.waves > 1):
            return f"depth is {self.depth}, expected 1, or 2 or 4 with one wave"
        if self.stages < self.depth:
            return f"stages is {self.stages}, expected at least the depth {self.depth}"
        if min(self.left_share, self.right_share) != 1 or self.share not in (1, 2, 4, 8):
            return (
                f"shares are {self.left_share} and {self.right_share}, expected one of them 1, the other 1, 2, 4 or 8"
            )
        if self.rows // self.left_share % 8 or self.cols // self.right_share % 8 or self.cols % self.right_share:
            return f"a share of {self.rows}x{self.cols} is not whole groups of 8 rows"
        if self.split > 1 and self.waves != 1:
            return f"split is {self.split} with {self.waves} waves, expected 1 wave"
        if self.cluster > CLUSTER_LIMIT:
            return f"the cluster has {self.cluster} blocks, expected at most {CLUSTER_LIMIT}"
        if self.stages < 2:
            return f"stages is {self.stages}, expected at least 2"
        for name in ("split", "band", "out_buffers", "out_parts"):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}, expected at least 1"
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                return f"{name} is {getattr(self, name)}, expected at most {most}"
        if self.pingpong and (self.math_groups != 2 or not self.persistent):
            return "pingpong is True, expected False if there is one math group, operands are swapped or K is split"
        if self.fetch not in FETCHES:
            return f"fetch is {self.fetch}, expected {' or '.join(map(str, FETCHES))}"
        if self.out_parts > 1 and not self.persistent:
            return f"out_parts is {self.out_parts}, expected 1 if operands are swapped or K is split"
        if self.swap and self.owned * 8 * (self.rows + 4) * 4 > self.stages * self.stage_bytes:
            return f"{self.stages} stages hold less than the sums of {self.owned * 8} columns"
        return None


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a kernel computes: of a problem, all but M."""

    n: int
    k: int
    a_dtype: str
    b_dtype: str
    a_scale: str
    b_scale: str
    out_dtype: str
    bias: bool = False
    zero_points: bool = False  # of int8 activations
    out_by_tma: bool = True  # the copy engine may write results: rows are whole multiples of 16 bytes
    a_turned: bool = False  # the rows of A, and not K, lie side by side in memory
    b_turned: bool = False
    c: bool = False  # beta C is added
    batched: bool = False  # products of one shape, as many as the launch says
    grouping: str = ""  # rows in groups with a weight each: contiguous, or masked slabs; or a list of products

    @property
    def int8(self) -> bool:
        return self.a_dtype == "int8"

    @property
    def element_bytes(self) -> int:
        return 2 if self.a_dtype in ("bf16", "fp16") else 1

    @property
    def straight(self) -> bool:
        """Whether the tensor cores add up all of K: fp8's sums are promoted every 128, and scaled there if need be."""
        return self.int8 or self.element_bytes == 2

    @property
    def whole_lines(self) -> bool:
        """Whether rows of K begin where lines of memory do, if the first one does."""
        return self.k * self.element_bytes % BLOCK_K == 0

    @property
    def k_blocks(self) -> int:
        return -(-self.k * self.element_bytes // BLOCK_K)

    def turned(self, swap: bool) -> tuple[bool, bool]:
        """The left and the right operand."""
        return (self.b_turned, self.a_turned) if swap else (self.a_turned, self.b_turned)

    def left_scale(self, swap: bool) -> int:
        return _SCALES[self.b_scale if swap else self.a_scale]

    def right_scale(self, swap: bool) -> int:
        return _SCALES[self.a_scale if swap else self.b_scale]

    @property
    def out_bytes(self) -> int:
        return OUT_BYTES[self.out_dtype]

    def stores_by_tma(self, config: Config) -> bool:
        # Zero points are finished in doubles, which with what that way out keeps are more registers than there are.
        possible = self.out_by_tma and config.persistent and not self.zero_points
        if self.out_bytes == 2:
            return possible
        # Who reads scales one by one leaves two waves of a group's sums too few registers (gemm.cuh) for this way.
        one_by_one = self.left_scale(config.swap) and self.k_blocks % _SCALES_AT_ONCE
        if self.grouping and config.waves == 2 and one_by_one:
            return False
        # epilogue_tma.cuh stages whole slabs of 32; of a batch it has no way to write fp32 rows that begin anywhere.
        return possible and self.slab(config) == 32 and not self.batched

    def needs_whole_rows(self, config: Config) -> bool:
        """Whether rows of results must begin at multiples of 16 bytes: fp32 ones that do not are written by element."""
        return self.stores_by_tma(config) and self.out_bytes == 2

    def slab(self, config: Config) -> int:
        """Columns that one store of the TMA epilogue writes: 128, 64 or 32 bytes of a row."""
        return next(size // self.out_bytes for size in (128, 64, 32) if config.cols * self.out_bytes % size == 0)

    def out_parts(self, config: Config) -> int:
        """Parts in which a wave's columns go out. fp32 takes as much room as 16 bits do, or less, in more of them;
        unless that would be less than a slab."""
        if self.out_bytes == 2 or not self.stores_by_tma(config):
            return config.out_parts
        slabs = config.cols // self.slab(config)
        return next((count for count in range(2 * config.out_parts, slabs) if slabs % count == 0), slabs)

    def shared_bytes(self, config: Config) -> int:
        waiting = config.cols // self.out_parts(config) * self.out_bytes if self.stores_by_tma(config) else 0
        size = config.shared_bytes(self.left_scale(config.swap), self.right_scale(config.swap), waiting)
        # A block with many tiles turns its results, up to 32 tokens at a time, in memory of their own.
        turned = -(-min(config.cols, 32) * (config.rows + 4) * 4 // 1024) * 1024
        return size + (turned if self.grouping and config.swap else 0)

    def fault(self, config: Config) -> str | None:
        """Why this config cannot compute this, in words, or None."""
        fault = config.fault()
        if fault is not None:
            return fault
        if self.grouping and config.split > 1:
            return f"split is {config.split}, expected 1 for groups"
        if config.pingpong and (not self.straight or self.grouping == "list"):
            return f"pingpong is True, expected False for {'a list' if self.grouping == 'list' else self.a_dtype}"
        if self.grouping == "list" and config.swap:
            return "swapped, expected operands as they are for a list"
        parts = self.out_parts(config)
        if self.stores_by_tma(config) and config.cols % (self.slab(config) * parts):
            return f"out_parts is {parts}, expected {config.cols} columns in whole parts of {self.slab(config)}"
        if self.straight and config.stages <= config.depth:
            return f"stages is {config.stages}, expected more than the depth {config.depth} for {self.a_dtype}"
        if self.int8 and config.cols % 16 and config.cols not in (8, 24):
            return f"cols is {config.cols}, expected 8, 24 or a multiple of 16 for int8"
        shares = config.rows // config.left_share, config.cols // config.right_share
        if any(turned and share % SLAB for turned, share in zip(self.turned(config.swap), shares, strict=True)):
            return f"a share of {shares[0]} by {shares[1]}, expected multiples of {SLAB} for turned operands"
        width = config.cols & -config.cols
        if not config.swap and self.b_scale == "128x128" and config.cols - min(width, 128) > 128:
            return f"a tile of {config.cols} columns can meet three blocks of scales, expected at most two"
        # Sums, products and the columns' scales, besides some thirty registers for addresses and the like.
        registers = (config.waves + (0 if self.straight else config.depth)) * config.cols // 2
        if self.straight and not config.swap:  # what the epilogue keeps of the columns meets all of the sums
            registers += 3 * config.cols // 32
        if self.int8 and self.out_bytes == 4 and self.stores_by_tma(config):  # products in two floats each
            registers += 4
        if self.right_scale(config.swap) == 1:  # with two waves they are read when they are needed
            registers += config.cols // 4 if config.waves == 1 else 4
            # Where rows of scales begin anywhere, those who read them take some that a bias needs.
            registers += 4 * (self.bias and config.waves == 2 and self.k_blocks % _SCALES_AT_ONCE != 0)
        limit = _REGISTERS[config.math_groups, config.blocks_per_sm]
        if registers > limit:
            return f"{registers} registers for sums, products and scales, expected at most {limit}"
        size = self.shared_bytes(config)
        if size > SHARED_BYTES:
            return f"shared memory is {size} bytes, expected at most {SHARED_BYTES}"
        if config.blocks_per_sm * (size + 1024) > SHARED_PER_SM:
            return f"{config.blocks_per_sm} blocks of {size} bytes, expected at most {SHARED_PER_SM} together"
        return None


def whole_rows(n: int, out_dtype: str) -> bool:
    """Whether the copy engine can write so many columns and nothing behind them."""
    return n * OUT_BYTES[out_dtype] % _WHOLE == 0


def name(config: Config, variant: Variant) -> str:
    """A name that says in a profile what runs."""
    kind = f"{variant.a_scale}_{variant.b_scale}".replace("1x128_128x128", "block").replace("1x128_1x128", "1x128")
    kind = kind.replace("token_channel", "token").replace("tensor_tensor", "tensor")
    if variant.element_bytes == 2:
        kind = "".join("tn"[not turned] for turned in (variant.a_turned, variant.b_turned))
    type_name = variant.a_dtype if variant.straight else "fp8"
    rows = "pingpong" if config.pingpong else "rows"
    way = f"swap_split{config.split}" if config.swap else rows if config.split == 1 else f"rows_split{config.split}"
    if variant.batched:
        way = f"batch_{way}"
    if variant.grouping:
        way = f"{variant.grouping}_{'swap' if config.swap else rows}"
    return f"omnigemm_sm90_{type_name}_{kind}_{way}_{config.tile_m}x{config.tile_n}"


def _wgmma(columns: int, left: str, right: str, turned: tuple[bool, bool]) -> str:
    """wgmma for 64 rows by `columns` as a function of the accumulators: the instruction names every register."""
    count = columns // 2
    left, right = (name.replace("fp16", "f16") for name in (left, right))
    wide = left in ("bf16", "f16")
    sums, constraint, kinds, ending = "float", "f", f"f32.{left}.{right}", ", 1, 1"  # no sign is turned
    if left == "int8":
        sums, constraint, kinds, ending = "int", "r", "s32.s8.s8", ""
    elif wide:
        ending += "".join(f", {int(one)}" for one in turned)
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k{16 if wide else 32}.{kinds}"
    return f"""
__device__ __forceinline__ void wgmma(
    {sums} (&d)[{count}], unsigned long long left, unsigned long long right, bool add
) {{
    asm volatile(
        "{{\\n"
        ".reg .pred add;\\n"
        "setp.ne.b32 add, %{count + 2}, 0;\\n"
        "{instruction} {{{registers}}}, %{count}, %{count + 1}, add{ending};\\n"
        "}}"
        : {operands}
        : "l"(left), "l"(right), "r"(static_cast<int>(add)));
}}
"""


def source(config: Config, variant: Variant) -> str:
    """The whole of a kernel's source, apart from our headers."""
    fault = variant.fault(config)
    if fault is not None:
        raise ConfigError(f"sm90: config is {config}, expected one that can compute {variant}: {fault}")
    whole = variant.a_scale in ("tensor", "token")  # scales that hold for all of K
    left_turned, right_turned = variant.turned(config.swap)
    constants = {
        "KERNEL": name(config, variant),
        "INT8": int(variant.int8),
        "GROUPED": int(variant.grouping in ("contiguous", "masked")),
        "LIST": int(variant.grouping == "list"),
        "BATCH": int(variant.batched),
        "SLABS": int(variant.grouping == "masked"),
        "SWAP": int(config.swap),
        "OUT_BY_TMA": int(variant.stores_by_tma(config)),
        "SHAPE_N": variant.n,
        "SHAPE_K": variant.k,
        "ELEMENT_BYTES": variant.element_bytes,
        "LEFT_TURNED": int(left_turned),
        "RIGHT_TURNED": int(right_turned),
        "MATH_GROUPS": config.math_groups,
        "WAVES": config.waves,
        "TILE_COLS": config.cols,
        "STAGES": config.stages,
        "LEFT_SHARE": config.left_share,
        "RIGHT_SHARE": config.right_share,
        "SPLIT": config.split,
        "DEPTH": config.depth,
        "BAND": config.band,
        "PINGPONG": int(config.pingpong),
        "OUT_BUFFERS": config.out_buffers,
        "OUT_PARTS": variant.out_parts(config),
        "BLOCKS_PER_SM": config.blocks_per_sm,
        "LEFT_SCALE": variant.left_scale(config.swap),
        "RIGHT_SCALE": variant.right_scale(config.swap),
        "OUT_TYPE": TYPES[variant.out_dtype],
        "OUT_BYTES": variant.out_bytes,
        "HAS_BIAS": int(variant.bias),
        "HAS_ZERO": int(variant.zero_points),
        "HAS_C": int(variant.c),
        "FINISH_SCALES": int(whole),
        "A_STEP": int(variant.a_scale == "token"),
        "B_STEP": int(variant.b_scale == "channel"),
    }
    lines = [f"#define {key} {value}" for key, value in constants.items()]
    left, right = (variant.b_dtype, variant.a_dtype) if config.swap else (variant.a_dtype, variant.b_dtype)
    return "\n".join(
        [*lines, _wgmma(config.cols, left, right, variant.turned(config.swap)), '#include "sm90/gemm.cuh"', ""]
    )
