"""Which config runs groups of rows: the legal ones, scored by a model of the chip for the rows that groups may have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import lru_cache

from .choice import EARLY_ROWS, RUNNERS_UP, Choice
from .gpu import Gpu
from .sm90 import BLOCK_K, FETCHES, SHARED_BYTES, SHARED_PER_SM, Config, Variant

GROUP_LIMIT = 8192  # lines of the table that every block makes of the groups
_LINE, _NUMBER = 8, 2  # bytes of the table for a group, and of the list of those with a short last tile
_HANDOVER = 152  # bytes: what work_groups.cuh hands tiles over in, and a barrier
_TABLE_STEP = 1024  # kernels for up to 88 groups are the same
_SPREAD = (0.7, 0.85, 1.0, 1.15, 1.3)  # groups are not alike
_TOKENS = (8, 16, 24, 32, 48, 64, 96, 128)  # widths of the right operand when operands are swapped
_FEW_TOKENS = 16
_EVEN_TOKENS, _EVEN_STAGES = 32, 10  # for up to so many tokens, stages: more gain nothing, and odd numbers lose 1 %
_COLUMNS = (96, 112, 128, 144, 160, 192)
_WIDEST = 256  # that has the registers for it if there are no products besides the sums
# The model's constants: seconds, cycles, and parts of a whole.
_START, _OVERLAP, _TRAFFIC = 4.8e-6, 0.156, 0.106
_LAST_ROUND = 0.972  # of a whole one's time is what its empty places cost
_SHORT, _TAIL = 0.5, 0.1  # of a whole tile's time: what one without rows would take; what blocks wait for the last
_BUSY, _BUSY_STRAIGHT, _BUSY_STRAIGHT_2, _BUSY_PINGPONG, _BUSY_SWAP = 0.79, 0.82, 0.72, 0.81, 0.579
_CHAIN, _PROMOTION, _BLOCK, _CROSSING, _TURNED, _TILE = 557.0, 2.9, 39.1, 13.0, 1.82, 1700.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the host knows of the groups: how many there are, how many are not empty, and how many rows those have."""

    groups: int
    used: float
    rows: float

    @classmethod
    def by_chance(cls, groups: int, rows: int) -> Sizes:
        """So many rows, each in any of the groups."""
        used = max(1.0, groups * -math.expm1(-rows / groups))
        return cls(groups, used, rows / used)

    def spread(self) -> list[int]:
        return [max(1, round(self.rows * part)) for part in _SPREAD]


def table_bytes(config: Config, groups: int) -> int:
    """Shared memory for the table of the groups, and for tiles that are handed over. With swapped operands all tiles
    are alike, and there is no list."""
    listed = 0 if config.swap else (groups + 1) * _NUMBER
    return -(-(_HANDOVER + max(1, groups) * _LINE + listed) // _TABLE_STEP) * _TABLE_STEP


def choices(variant: Variant, sizes: Sizes, gpu: Gpu, constant_weights: bool = False) -> tuple[Choice, ...]:
    """The best configs for such groups, best first."""
    found = _choices(variant, sizes, gpu)
    if not constant_weights or sizes.rows > EARLY_ROWS:
        return found
    # Blocks that share loads cannot begin before the others of their cluster have.
    return tuple(dataclasses.replace(one, early=one.config.stages) if one.config.cluster == 1 else one for one in found)


@lru_cache(maxsize=4096)
def _choices(variant: Variant, sizes: Sizes, gpu: Gpu) -> tuple[Choice, ...]:
    return tuple(modelled(variant, sizes, gpu)[: 1 + RUNNERS_UP])


def modelled(variant: Variant, sizes: Sizes, gpu: Gpu) -> list[Choice]:
    """Every config that is worth a thought, with the model's time for it, best first."""
    legal_here = (config for config in legal(variant, sizes) if gpu.has_room(config.cluster))
    found = {config: seconds(config, variant, sizes, gpu) for config in legal_here}
    return [Choice(one, found[one]) for one in sorted(found, key=lambda one: found[one])]


def deepest(config: Config, variant: Variant, groups: int) -> Config:
    """With as many stages as fit besides the table, and are of use, and the fetch that goes with them."""
    room = min(SHARED_BYTES, SHARED_PER_SM // config.blocks_per_sm - 1024) - table_bytes(config, groups)
    fixed = variant.shared_bytes(dataclasses.replace(config, stages=0))
    each = variant.shared_bytes(dataclasses.replace(config, stages=1)) - fixed
    stages = max(0, min((room - fixed) // each, 16))
    if config.swap and config.cols <= _EVEN_TOKENS and stages > 2:
        stages = min(stages, _EVEN_STAGES) // 2 * 2
    # Tiles by rows lost up to 5 % where L2 takes from memory only what is asked for.
    return dataclasses.replace(config, stages=stages, fetch=min(FETCHES) if config.swap else max(FETCHES))


def legal(variant: Variant, sizes: Sizes) -> Iterator[Config]:
    for config in (*_swapped(sizes), *_by_rows(variant, sizes)):
        whole = deepest(config, variant, sizes.groups)
        if variant.fault(whole) is None and whole.stages >= _stages_needed(config, variant):
            yield whole


def _stages_needed(config: Config, variant: Variant) -> int:
    """Two stages hide nothing from another block on the same multiprocessor. And where tensor cores add up all of K,
    those that are being multiplied are not free for loads: three besides them are enough, two were not."""
    if config.swap and variant.straight:
        return config.depth + 3
    return 3 if config.blocks_per_sm > 1 else 2


def _swapped(sizes: Sizes) -> Iterator[Config]:
    most = max(sizes.spread())
    if most > 2 * _TOKENS[-1]:
        return
    for cols in _TOKENS:
        if cols > 8 and cols >= 2 * most:
            break
        few = cols <= _FEW_TOKENS
        for depth in (2,) if few else (4, 2, 1):
            for blocks_per_sm in (2,) if few else (1, 2):
                yield Config(True, 1, 1, cols, 0, depth=depth, blocks_per_sm=blocks_per_sm)
            yield Config(True, 2, 1, cols, 0, depth=depth)


def _by_rows(variant: Variant, sizes: Sizes) -> Iterator[Config]:
    most = max(sizes.spread())
    if most <= _FEW_TOKENS:
        return
    for cols in (*_COLUMNS, *((_WIDEST,) if variant.straight else ())):
        if most <= 64:
            yield Config(False, 1, 1, cols, 0)
            yield Config(False, 1, 1, cols, 0, blocks_per_sm=2)
        else:
            # Results of wide tiles in parts leave room for a fourth stage.
            buffers, parts = (2, 4) if cols == _WIDEST else (1, 1)
            for share in (1, 2):
                yield Config(False, 2, 1, cols, 0, right_share=share, band=16, out_buffers=buffers, out_parts=parts)
    if most > 128:
        yield Config(False, 2, 2, 128, 0, left_share=2, out_buffers=2)
        yield Config(False, 2, 2, 128, 0, out_buffers=2)
    if variant.straight and variant.whole_lines and most > 64:  # as in choice.py
        for left, right in ((1, 2), (2, 1)):
            yield Config(
                False, 2, 2, 128, 0, left_share=left, right_share=right, out_buffers=2, out_parts=2, pingpong=True
            )


def _whole(size: int, part: int) -> int:
    """How many parts it takes."""
    return -(-size // part)


def seconds(config: Config, variant: Variant, sizes: Sizes, gpu: Gpu) -> float:
    """The model: a start, and then whichever takes longest: memory, L2, or the multiprocessors.

    The sizes are the chip's; the times were set on sweeps of fp8 groups on an H200.
    """
    n, spread = variant.n, sizes.spread()
    down = config.tile_m * (config.left_share if config.swap else config.right_share)
    across = config.tile_n * (config.right_share if config.swap else config.left_share)
    each_row = sizes.used / len(spread) * _whole(n, across)
    packs = each_row * sum(_whole(rows, down) for rows in spread)
    work = each_row * sum(_whole_tiles(rows, down, config, variant) for rows in spread)
    rows = sizes.used * sizes.rows
    out_bytes = rows * n * (4 if variant.out_dtype == "fp32" else 2)
    memory = (variant.element_bytes * (sizes.used * n + rows) * variant.k + out_bytes) / gpu.memory
    places = gpu.multiprocessors // config.cluster * config.blocks_per_sm
    exact = max(1.0, work / places)
    rounds = exact + (_TAIL if exact > 1.0 and work < packs else _LAST_ROUND * (1 - exact % 1.0))
    # Math groups with tiles of their own write results while the other multiplies.
    each = variant.k_blocks * _block_cycles(config, variant) + (0.0 if config.pingpong else _TILE)
    slow = 2 * rows * n * variant.k / gpu.multiprocessors / (8192 // variant.element_bytes) / gpu.clock > memory
    compute = rounds * each / (gpu.dense_clock if slow else gpu.clock)
    if slow and variant.straight:
        # The chip is at its power limit, and what empty places of the last round save, the clock makes use of.
        compute = max(exact * each / gpu.dense_clock, math.ceil(exact) * each / gpu.clock)
    # What blocks of a cluster share comes from L2 once.
    loaded = config.rows / config.left_share + config.cols / config.right_share
    traffic = packs * config.share * variant.k_blocks * loaded * BLOCK_K / gpu.l2
    return _START + max(memory, compute) + _OVERLAP * min(memory, compute) + _TRAFFIC * traffic


def _whole_tiles(rows: int, down: int, config: Config, variant: Variant) -> float:
    """What a group's rows take, in times of a tile that has all of its own: of the last, each 64 rows count."""
    whole, left = divmod(rows, down)
    if config.swap or left == 0 or variant.straight:
        return _whole(rows, down)
    return whole + _SHORT + (1 - _SHORT) * min(1.0, _whole(left, 64) * 64 / config.rows)


def _block_cycles(config: Config, variant: Variant) -> float:
    """Cycles for a block of K of a tile, or of as many tiles as a multiprocessor has at a time."""
    products = 64 * config.waves * config.cols * BLOCK_K / 4096
    sums = 0.0 if variant.straight else config.waves * config.cols / 2
    tensor = config.math_groups * products
    if config.swap:
        chain = products + _PROMOTION * sums + _CHAIN / config.depth
        return max(chain, config.blocks_per_sm * (tensor / _BUSY_SWAP + _TURNED * sums))
    whole = tensor / _BUSY + _BLOCK * (1 + config.waves)
    if config.pingpong:
        whole = products / _BUSY_PINGPONG
    elif variant.straight:
        whole = tensor / (_BUSY_STRAIGHT if config.waves == 1 else _BUSY_STRAIGHT_2)
    if variant.b_scale == "128x128" and BLOCK_K % config.cols:  # columns of two blocks of scales, told apart in parts
        whole += _CROSSING * config.waves * (config.cols / (config.cols & -config.cols) - 2)
    return max(products + _PROMOTION * sums, config.blocks_per_sm * whole)
