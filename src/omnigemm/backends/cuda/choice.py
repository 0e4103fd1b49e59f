"""Which config runs a product: the legal ones, scored by a model of the chip, unless one was measured to be best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache

from .gpu import Gpu
from .measured import table
from .sm90 import BLOCK_K, FETCHES, SHARED_BYTES, SHARED_PER_SM, Config, Variant

RUNNERS_UP = 3  # that explain shows besides the choice
_FEW_ROWS = 32
EARLY_ROWS, _EARLY_SPLIT = 512, 6  # up to which weights are loaded early
_TABLE_ROWS = 128  # from 33 to so many rows the table's entries hold for the number that was measured alone
_CALM = 150_000  # bytes on their way to a multiprocessor: with more, few rows were often slower
_SWAP_ROWS = 256  # up to which all rows of A can be the columns of one block
_COLUMNS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256)
_NARROW = 96  # columns up to which weights are not shared by tiles of other rows
_MORE_COLUMNS = (176, 208, 224)  # that have the registers for it if there are no products besides the sums
# How many blocks of K a warpgroup multiplies at a time for up to so many tokens, and how many such blocks a
# multiprocessor takes: what the registers allow.
_SWAP_DEPTHS = {
    16: ((4, 1), (4, 2), (4, 3)),
    32: ((4, 1), (4, 2), (2, 3)),
    64: ((4, 1), (2, 2), (1, 3)),
    96: ((4, 1), (2, 1), (1, 2)),
    _SWAP_ROWS: ((2, 1), (1, 1)),
}


# The model's constants: cycles, bytes a cycle, parts of a whole, seconds.
_CHAIN, _CHAIN_ROWS, _PROMOTION, _ADDITION = 163.0, 223.0, 3.4, 0.855
_BUSY, _BUSY_DENSE, _BUSY_DENSE_2, _BUSY_STRAIGHT_2 = 0.696, 0.884, 0.883, 0.771
# Where each math group has tiles of its own: what they load more than one tile of both would does not show in times.
_BUSY_PINGPONG, _PINGPONG_L2 = 0.838, 0.737
_ARRIVING, _SHARED, _SHARED_BY_TWO = 60.1, 136.0, 106.0
# Of operands whose rows begin at odd multiples of 16 bytes, or of 32 and more: how much more L2 has to do, and what two
# neighbouring multiprocessors get together, which share a way to L2, it seems: one alone gets nearly as much.
_ODD, _STRADDLING = 2.68, 1.01
_WAY_ODD, _WAY_STRADDLING = 73.8, 99.3
_ARRIVAL, _ARRIVAL_SPLIT = 3130.0, 1650.0  # from asking for a stage until it is there, when all do
_EVEN, _NEXT_BLOCK, _NEXT_TILE, _NEXT_TILE_DENSE = 0.352, 2240.0, 17.9, 15.4
_BLOCK_START = 1500.0  # from one block to the next that a multiprocessor begins, however many it has at a time
_TORN = 1.5  # of results that tiles cut within what memory writes at a time
_TOKEN_OUT, _TOKEN_SENT = 11.9, 6.89
_START_SWAP, _START_SPLIT, _START_LATE = 1.19e-6, 0.102e-6, 0.342e-6
_START_ROWS, _START_DENSE, _START_SPLIT_ROWS = 1.21e-6, 1.11e-6, 1.58e-6
# Of a K that is split without swapping: bytes of sums that a block gets to the others, and what a column costs.
_BETWEEN, _COLUMN_OUT = 11.9, 18.7
_CROWD, _CROWDED = 182000.0, 0.046  # bytes on their way, and how much longer memory takes for twice as many
_OVERLAP, _OF_MEMORY, _OF_L2 = 0.473, 1.1, 1.96


@dataclasses.dataclass(frozen=True)
class Choice:
    config: Config
    seconds: float
    measured: bool = False  # in one of the GPU's tables, or else by the model
    early: int = 0  # stages whose weights are loaded while the kernel before still runs: only if they are constant
    against_blas: float | None = None  # the time in parts of what cuBLAS took in the same run
    rows: int | None = None  # that were measured, or M where these are its like
    here: bool = False  # measured by `tune`, in the user's own table

    def early_words(self, b_copied: bool) -> list[str]:
        """Of a copy of B nothing is read early: it has just been written."""
        if not self.early or b_copied:
            return []
        return [f"{self.early} stages of weights are read before the work before is done"]


def choices(variant: Variant, m: int, gpu: Gpu, constant_weights: bool = False, batch: int = 1) -> tuple[Choice, ...]:
    """The best configs for M rows, best first; the measured one, if there is one, leads. Of batches none was."""
    ranked = list(_best(variant, alike(m), gpu, _alike_batch(batch)))
    if constant_weights:
        ranked = [dataclasses.replace(one, early=_early(one.config, m, batch)) for one in ranked]
    known = _measured(variant, m, gpu, constant_weights) if batch == 1 else None
    if known is not None and _FEW_ROWS < m <= _TABLE_ROWS and m != known.rows:
        # For fewer tokens than were measured the model's choice beat the table's, narrowed to them or not.
        ranked[0] = dataclasses.replace(ranked[0], against_blas=known.against_blas)
    elif known is not None and variant.fault(known.config) is None and gpu.has_room(known.config.cluster):
        # The model may flatter what was tried and lost.
        others = (dataclasses.replace(one, seconds=max(one.seconds, known.seconds)) for one in ranked)
        ranked = [known, *(one for one in others if one.config != known.config)]
    return tuple(ranked[: 1 + RUNNERS_UP])


def _early(config: Config, m: int, batch: int = 1) -> int:
    """How many stages of weights to load early. Few hide the way to memory; many were slower with more rows, we think
    because they are in the way of the kernel before, which has yet to finish."""
    if m <= _FEW_ROWS:
        return config.stages
    if m > EARLY_ROWS or batch > 1 or config.split > _EARLY_SPLIT:
        return 0
    return min(config.stages, 4 if m <= 64 else 2)


def alike(m: int) -> int:
    """The number of rows that the model is asked for, a little above M. An answer takes some milliseconds of the host,
    and M may be another in every call."""
    step = max(8, 1 << m.bit_length() >> 5)
    return _whole(m, step) * step


def _alike_batch(batch: int) -> int:
    """The same for the number of products: exact up to 31, then in steps of a sixteenth or less."""
    step = max(1, 1 << batch.bit_length() >> 5)
    return _whole(batch, step) * step


@lru_cache(maxsize=4096)
def _best(variant: Variant, m: int, gpu: Gpu, batch: int = 1) -> tuple[Choice, ...]:
    return tuple(modelled(variant, m, gpu, batch)[: 2 + RUNNERS_UP])


def modelled(variant: Variant, m: int, gpu: Gpu, batch: int = 1) -> list[Choice]:
    """Every config that is worth a thought, with the model's time for it, best first."""
    found = {config: seconds(config, variant, m, gpu, batch) for config in _legal(variant, m, gpu, batch)}
    return [Choice(one, found[one]) for one in sorted(found, key=lambda one: found[one])]


def _whole(size: int, part: int) -> int:
    """How many parts it takes."""
    return -(-size // part)


def deepest(config: Config, variant: Variant) -> Config:
    """With as many stages as fit, and no more than there are blocks of K for a tile."""
    room = min(SHARED_BYTES, SHARED_PER_SM // config.blocks_per_sm - 1024)
    fixed = variant.shared_bytes(dataclasses.replace(config, stages=0))
    each = variant.shared_bytes(dataclasses.replace(config, stages=1)) - fixed
    blocks = _whole(variant.k_blocks, config.split)
    useful = _whole(blocks, config.depth) * config.depth + variant.straight if not config.persistent else 16
    return dataclasses.replace(config, stages=min((room - fixed) // each, useful, 16))


def _legal(variant: Variant, m: int, gpu: Gpu, batch: int) -> Iterator[Config]:
    for config in (*_swapped(variant, m), *_by_rows(variant, m), *_split_rows(variant, m, gpu, batch)):
        if not gpu.has_room(config.cluster):
            continue
        # L2 takes what is asked for. More was 1 to 8 % slower in the mean where rows of K begin within lines of memory,
        # and elsewhere from 1 % faster to 4 % slower.
        asked = dataclasses.replace(config, fetch=min(FETCHES))
        for one in _staged(asked, variant, m):
            # Two stages hide nothing: one block with more was always better than two with two.
            if variant.fault(one) is None and (one.stages > 2 or one.blocks_per_sm == 1):
                yield one


def _staged(config: Config, variant: Variant, m: int) -> Iterator[Config]:
    """With as many stages as are of use; for few rows also with fewer, for too many loads at a time can be slower."""
    whole = deepest(config, variant)
    calm = _CALM // (config.blocks_per_sm * config.stage_bytes)
    if m <= _SWAP_ROWS and 2 * config.depth <= calm < whole.stages:
        yield dataclasses.replace(whole, stages=calm)
    # Sums of many tokens need more room than the stages of a short K would take.
    fits = variant.fault(whole) is None
    yield whole if fits else dataclasses.replace(whole, stages=max(whole.stages, 4))


def token_width(m: int, share: int = 1) -> int:
    """Columns of each of `share` blocks that have M tokens between them: 8, 16, 24, or a multiple of 16."""
    each = _whole(m, share)
    return 8 * _whole(each, 8) if each <= 24 else 16 * _whole(each, 16)


def _swapped(variant: Variant, m: int) -> Iterator[Config]:
    if m > _SWAP_ROWS:
        return
    tokens = token_width(m)
    # Blocks that share tokens wait for one another: worth it only where they then run for long.
    long = variant.k_blocks >= 64
    for split in range(1, min(8, _whole(variant.k_blocks, 4)) + 1):
        # All tokens in one block, or dealt out to blocks that share the weights.
        for share in (1, 2, 4):
            cols = token_width(m, share)
            if share * split > 8 or (share > 1 and cols < 32):
                continue
            for depth, blocks_per_sm in _depths(cols):
                if share == 4 and blocks_per_sm > 1:  # hardly ever came within 5 % of the best
                    continue
                yield Config(
                    True, 1, 1, cols, 0, left_share=share, split=split, depth=depth, blocks_per_sm=blocks_per_sm
                )
        for share in (1, 2, 4):
            if share * split > 8 or tokens // share % 8 or not (long or tokens > 128 or (share == 1 and tokens > 32)):
                continue
            if share > 1:
                for depth, blocks_per_sm in _depths(tokens):
                    yield Config(
                        True, 1, 1, tokens, 0, right_share=share, split=split, depth=depth, blocks_per_sm=blocks_per_sm
                    )
            yield Config(True, 2, 1, tokens, 0, right_share=share, split=split, depth=1 if tokens > 64 else 4)


def _depths(cols: int) -> tuple[tuple[int, int], ...]:
    return next(depths for most, depths in _SWAP_DEPTHS.items() if cols <= most)


def _by_rows(variant: Variant, m: int) -> Iterator[Config]:
    for cols in (*_COLUMNS, *(_MORE_COLUMNS if variant.straight else ())):
        if m <= 64:
            yield Config(False, 1, 1, cols, 0)
            if 96 <= cols <= 128:  # two with other columns hardly ever came within 5 % of the best
                yield Config(False, 1, 1, cols, 0, blocks_per_sm=2)
        else:
            # Of two that the model cannot tell apart the first is taken. To share a narrow tile saves little, and those
            # who share wait for one another.
            for share in (1,) if m <= 128 or cols <= _NARROW else (1, 2) if m <= 512 else (2, 1):
                yield Config(False, 2, 1, cols, 0, right_share=share, band=16)
                if m <= 128 and cols >= 64:
                    yield Config(False, 2, 1, cols, 0, left_share=2, band=16)
                if cols == 256 and m > 256:  # results in parts leave room for a fourth stage
                    yield Config(False, 2, 1, cols, 0, right_share=share, band=16, out_buffers=2, out_parts=4)
    if m > 128:
        yield Config(False, 2, 2, 128, 0, left_share=2, out_buffers=2)
        # Tiles of their own load more. Where rows begin anywhere, loads are what takes the time.
        if variant.straight and variant.whole_lines:
            for share in (1, 2) if m <= 512 else (2, 1):
                yield Config(False, 2, 2, 128, 0, right_share=share, band=16, out_buffers=2, out_parts=2, pingpong=True)


def _split_rows(variant: Variant, m: int, gpu: Gpu, batch: int) -> Iterator[Config]:
    """Operands as they are and K split: a tile has just as many columns as let all clusters run at a time."""
    if not _FEW_ROWS < m <= _SWAP_ROWS:
        return
    groups = 1 if m <= 64 else 2
    step = 16 if variant.int8 else 8
    for split in range(2, min(8, _whole(variant.k_blocks, 4)) + 1):
        for blocks_per_sm in (1, 2) if groups == 1 else (1,):
            fit = _clusters(split, gpu) * blocks_per_sm // (batch * _whole(m, 64 * groups))
            if fit == 0:
                continue
            cols = step * _whole(variant.n, step * fit)
            for depth in (1, 2, 4):
                yield Config(False, groups, 1, cols, 0, split=split, depth=depth, blocks_per_sm=blocks_per_sm)


def _clusters(blocks: int, gpu: Gpu) -> int:
    """How many clusters of so many blocks run at a time, if each block has a multiprocessor."""
    return min(gpu.multiprocessors // blocks, gpu.clusters[blocks - 1])


def seconds(config: Config, variant: Variant, m: int, gpu: Gpu, batch: int = 1) -> float:
    """The model: a start, whichever takes longest of memory, L2 and the multiprocessor with most to do, and a part of
    the second longest, which is not all hidden.

    The sizes are the chip's; the times, and how busy tensor cores get, were set on what benchmarks/tune.py measured.
    """
    n, k_blocks, dense = variant.n, variant.k_blocks, m > 256
    # What is left of a cluster's last pack of tiles is worked on all the same.
    down = config.tile_m * (config.left_share if config.swap else config.right_share)
    across = config.tile_n * (config.right_share if config.swap else config.left_share)
    tiles = batch * _whole(m, down) * _whole(n, across) * config.share
    out_size = 4 if variant.out_dtype == "fp32" else 2
    out_bytes = m * n * out_size * (1.0 if config.swap or config.cols * out_size % 64 == 0 else _TORN)
    memory = batch * (variant.element_bytes * (n + m) * variant.k + out_bytes) / (_OF_MEMORY * gpu.memory)
    loaded = (config.rows / config.left_share + config.cols / config.right_share) * BLOCK_K
    # Where rows begin anywhere, what should be one cache line is two, and at odd multiples of 16 bytes five sectors.
    odd = variant.k * variant.element_bytes % 32 != 0
    lines = 1.0 if variant.whole_lines else _ODD if odd else _STRADDLING
    l2 = tiles * k_blocks * loaded / (_OF_L2 * gpu.l2) * lines
    # Cycles of a block of K. A warpgroup waits for its own products, and sees to barriers; fp8's are then scaled and
    # added.
    products = 64 * config.waves * config.cols * BLOCK_K / 4096
    sums = config.waves * config.cols / 2
    chain = products
    if not config.pingpong:  # with tiles of their own they multiply one after the other, and none waits for its own
        chain += _CHAIN_ROWS * config.waves if config.persistent else _CHAIN / config.depth
    if not variant.straight:
        chain += (_PROMOTION if variant.a_scale == "1x128" else _ADDITION) * sums
    # Meanwhile the multiprocessor multiplies for all of them, fetches operands, writes and reads them.
    arriving = (config.rows + config.cols) * BLOCK_K
    read = config.math_groups * config.waves * (64 + config.cols) * BLOCK_K
    busy = _BUSY
    if dense:
        busy = _BUSY_DENSE if config.waves == 1 else _BUSY_STRAIGHT_2 if variant.straight else _BUSY_DENSE_2
    shared = _SHARED_BY_TWO if config.swap and config.math_groups == 2 else _SHARED
    unit = max(config.math_groups * products / busy, arriving / _ARRIVING, (arriving + read) / shared)
    if config.pingpong:
        unit, l2 = products / _BUSY_PINGPONG, l2 * _PINGPONG_L2
    blocks = tiles * config.split
    if not variant.whole_lines:
        neighbours = 2 if config.cluster > 1 or blocks > gpu.multiprocessors // 2 else 1
        unit = max(unit, neighbours * loaded / (_WAY_ODD if odd else _WAY_STRADDLING))
    together = min(config.blocks_per_sm, _whole(blocks, gpu.multiprocessors))
    clusters = gpu.multiprocessors // config.cluster if config.persistent else _clusters(config.cluster, gpu)
    places = clusters * config.cluster
    rounds = float(_whole(blocks, places * config.blocks_per_sm))
    # A ring of few stages waits for each of them.
    arrival = _ARRIVAL if config.swap or config.persistent else _ARRIVAL_SPLIT
    each = _whole(k_blocks, config.split) * max(chain, together * unit, arrival / config.stages)
    if not config.persistent:
        # Sums go to the blocks that own them, and out, of swapped operands after they are turned.
        if config.swap:
            each += (_TOKEN_OUT + (_TOKEN_SENT if config.split > 1 else 0.0)) * config.cols
        else:
            each += config.rows * config.cols * 4 * (1 - 1 / config.split) / _BETWEEN + _COLUMN_OUT * config.cols
        # Blocks of a later round begin when any of an earlier one is done, and fill the pipeline anew; others on the
        # same multiprocessor go on meanwhile.
        rounds = _EVEN * max(1.0, blocks / (places * config.blocks_per_sm)) + (1.0 - _EVEN) * rounds
        cycles = rounds * each + (rounds - 1.0) * _NEXT_BLOCK / config.blocks_per_sm
        cycles = max(cycles, blocks / gpu.multiprocessors * _BLOCK_START)
        start = _START_SWAP + _START_SPLIT * (config.split > 1) if config.swap else _START_SPLIT_ROWS
        if config.cluster > 2 and blocks > places:  # they leave no room for the next kernel to begin early
            start += _START_LATE
    else:
        # Math groups with tiles of their own write results while the other multiplies, but for the last ones.
        times = 1.0 if config.pingpong else rounds
        cycles = rounds * each + times * (_NEXT_TILE_DENSE if dense else _NEXT_TILE) * sums
        start = _START_DENSE if dense else _START_ROWS
    if not dense:
        waiting = together * min(config.stages, _whole(k_blocks, config.split)) * config.stage_bytes
        memory *= 1.0 + _CROWDED * max(0.0, waiting / _CROWD - 1.0)
    time = cycles / (gpu.dense_clock if dense else gpu.clock)
    _, second, longest = sorted((memory, l2, time))
    return start + longest + _OVERLAP * second


def kind_of(variant: Variant) -> str:
    """What the mainloop has to do with scales: tables tell these apart."""
    if variant.element_bytes == 2:
        return "turned16" if variant.a_turned or variant.b_turned else "16"
    return "int8" if variant.int8 else "block" if variant.a_scale == "1x128" else "whole"


def _measured(variant: Variant, m: int, gpu: Gpu, constant_weights: bool) -> Choice | None:
    """The entry for this weight, these scales and number of rows."""
    for row in table(gpu).get((variant.n, variant.k, kind_of(variant)), ()):
        if row["m_from"] <= m <= row["m_to"] and row.get("constant_weights", constant_weights) == constant_weights:
            blas, config = row.get("blas_us"), Config(**row["config"])
            if "constant_weights" in row:
                early = config.stages if row.get("early") is True else int(row.get("early", 0))
            else:
                early = _early(config, m) if constant_weights else 0
            return Choice(
                config,
                row["us"] * 1e-6,
                measured=True,
                early=early,
                against_blas=None if blas is None else row["us"] / blas,
                # Within one step of `alike` tiles are equally wide, and the row holds for all of its span.
                rows=m if alike(row["m_from"]) == alike(row["m_to"]) else row.get("m"),
                here=row.get("here", False),
            )
    return None
