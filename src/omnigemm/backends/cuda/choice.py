"""Which config runs a product: the legal ones, scored by a model of the chip, unless one was measured to be best."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from .gpu import Gpu
from .sm90 import BLOCK_K, SHARED_BYTES, SHARED_PER_SM, Config, Variant

RUNNERS_UP = 3  # that explain shows besides the choice
_TOKENS = (8, 16, 32, 64, 128)  # widths of the right operand when operands are swapped
_COLUMNS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 192)
# How many blocks of K a warpgroup multiplies at a time for that many tokens, and how many such blocks a multiprocessor
# takes: what the registers allow.
_SWAP_DEPTHS = {
    8: ((4, 1), (4, 2), (4, 3)),
    16: ((4, 1), (4, 2), (4, 3)),
    32: ((4, 1), (4, 2)),
    64: ((4, 1), (2, 2)),
    128: ((2, 1),),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    config: Config
    seconds: float
    measured: bool = False  # in the GPU's table, or else by the model


def choices(variant: Variant, m: int, gpu: Gpu) -> tuple[Choice, ...]:
    """The best configs for M rows, best first; the measured one, if there is one, leads."""
    return _choices(variant, m, gpu)


@lru_cache(maxsize=4096)
def _choices(variant: Variant, m: int, gpu: Gpu) -> tuple[Choice, ...]:
    modelled = {config: seconds(config, variant, m, gpu) for config in _legal(variant, m)}
    ranked = [Choice(one, modelled[one]) for one in sorted(modelled, key=lambda one: modelled[one])]
    known = _measured(variant, m, gpu)
    if known is not None and variant.fault(known.config) is None:
        # The model may flatter what was tried and lost.
        others = (dataclasses.replace(one, seconds=max(one.seconds, known.seconds)) for one in ranked)
        ranked = [known, *(one for one in others if one.config != known.config)]
    return tuple(ranked[: 1 + RUNNERS_UP])


def _whole(size: int, part: int) -> int:
    """How many parts it takes."""
    return -(-size // part)


def deepest(config: Config, variant: Variant) -> Config:
    """With as many stages as fit, and no more than there are blocks of K for a tile."""
    room = min(SHARED_BYTES, SHARED_PER_SM // config.blocks_per_sm - 1024)
    fixed = variant.shared_bytes(dataclasses.replace(config, stages=0))
    each = variant.shared_bytes(dataclasses.replace(config, stages=1)) - fixed
    blocks = _whole(_whole(variant.k, BLOCK_K), config.split)
    useful = _whole(blocks, config.depth) * config.depth if config.swap else 16
    return dataclasses.replace(config, stages=min((room - fixed) // each, useful, 16))


def _legal(variant: Variant, m: int) -> Iterator[Config]:
    for config in (*_swapped(variant, m), *_by_rows(m)):
        whole = deepest(config, variant)
        # Sums of many tokens need more room than the stages of a short K would take.
        for one in (whole, dataclasses.replace(whole, stages=max(whole.stages, 4))):
            if variant.fault(one) is None:
                yield one
                break


def _swapped(variant: Variant, m: int) -> Iterator[Config]:
    if m > 2 * _TOKENS[-1]:
        return
    cols = next((width for width in _TOKENS if width >= m), _TOKENS[-1])
    # Blocks that share tokens wait for one another: worth it only where they then run for long.
    long = variant.k >= 8192
    groups_of_scales = _whole(variant.k, 4 * BLOCK_K)
    for split in range(1, min(8, groups_of_scales) + 1):
        for share in (1, 2, 4) if long else (1,):
            if share * split > 8 or cols // share % 8:
                continue
            for depth, blocks_per_sm in _SWAP_DEPTHS[cols]:
                yield Config(
                    True, 1, 1, cols, 0, right_share=share, split=split, depth=depth, blocks_per_sm=blocks_per_sm
                )
            if long:
                yield Config(True, 2, 1, cols, 0, right_share=share, split=split, depth=1 if cols == 128 else 4)


def _by_rows(m: int) -> Iterator[Config]:
    for cols in _COLUMNS:
        if m <= 64:
            yield Config(False, 1, 1, cols, 0)
        else:
            yield Config(False, 2, 1, cols, 0, band=16)
            if m > 128:
                yield Config(False, 2, 1, cols, 0, right_share=2, band=16)
    if m > 128:
        yield Config(False, 2, 2, 128, 0, out_buffers=2)
        yield Config(False, 2, 2, 128, 0, left_share=2, out_buffers=2)


def seconds(config: Config, variant: Variant, m: int, gpu: Gpu) -> float:
    """The model: a start, and then whichever takes longest: memory, L2, or the multiprocessor with most to do."""
    n, k = variant.n, variant.k
    k_blocks = _whole(k, BLOCK_K)
    tiles = _whole(m, config.tile_m) * _whole(n, config.tile_n)
    size = 4 if variant.out_dtype == "fp32" else 2
    memory = (n * k + m * k + size * m * n) / gpu.memory
    per_block = (config.rows / config.left_share + config.cols / config.right_share) * BLOCK_K
    l2 = tiles * k_blocks * per_block / gpu.l2
    groups = config.math_groups
    tensor = 64 * config.waves * config.cols * BLOCK_K / 4096 * groups  # cycles of the tensor cores for a block of K
    sums = config.waves * config.cols / 2
    # A warpgroup waits for its own products, then scales and adds them, three cycles each, and sees to barriers.
    chain = tensor / groups + 3.2 * sums + (250 / config.depth if config.swap else 60 * config.waves)
    if config.swap:
        blocks = tiles * config.split
        together = min(config.blocks_per_sm, _whole(blocks, gpu.multiprocessors))
        # A cluster lies in one of the chip's parts, of which at least seven have sixteen multiprocessors.
        places = 7 * (16 // config.cluster * config.cluster) if config.cluster > 2 else gpu.multiprocessors
        rounds = _whole(blocks, places * config.blocks_per_sm)
        math = rounds * _whole(k_blocks, config.split) * max(chain, together * tensor / 0.9) / gpu.clock
        # Blocks beyond one for each multiprocessor leave no room for the next kernel to begin early.
        late = (1.8e-6 if config.cluster > 2 else 0.6e-6) * (blocks > places)
        start = 2.3e-6 + 0.3e-6 * (config.split > 1) + late
        return start + max(memory, l2, math) + 0.35 * min(memory, math)
    rounds = _whole(tiles, gpu.multiprocessors // config.cluster * config.cluster)
    dense = m > 256
    epilogue = (400 + 6 * sums) * (0.5 if dense else 1.0)
    cycles = rounds * (k_blocks * max(chain, tensor / (0.85 if dense else 0.9)) + epilogue)
    math = cycles / (gpu.dense_clock if dense else gpu.clock)
    return (3.0e-6 if dense else 2.3e-6) + max(memory, l2, math) + 0.35 * min(memory, math)


def _measured(variant: Variant, m: int, gpu: Gpu) -> Choice | None:
    """The entry for this weight and number of rows."""
    for row in table(gpu).get((variant.n, variant.k), ()):
        if row["m_from"] <= m <= row["m_to"]:
            return Choice(Config(**row["config"]), row["us"] * 1e-6, measured=True)
    return None


@cache
def table(gpu: Gpu) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """tables/<gpu>.json by weight: configs with the numbers of rows that they are for."""
    file = resources.files(__package__) / "tables" / f"{gpu.table}.json"
    if not file.is_file():
        return {}
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in json.loads(file.read_text())["rows"]:
        found.setdefault((row["n"], row["k"]), []).append(row)
    return found
