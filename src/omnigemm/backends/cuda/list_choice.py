"""Which config runs a list of unequal products: the legal ones, scored by a model of the chip for all their tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from .choice import RUNNERS_UP, Choice
from .gpu import Gpu
from .sm90 import BLOCK_K, SHARED_BYTES, SHARED_PER_SM, Config, Variant

PRODUCT_LIMIT = 600  # of a launch: ends of products that every block holds
QUEUE_BYTES = 528  # of shared memory: what tile_queue.cuh needs
TABLE_BYTES = 4 * PRODUCT_LIMIT + QUEUE_BYTES
_START = 6e-6  # two kernels, one after the other
_FIND_TILE = 500.0  # cycles, to find a tile and fetch its maps
# Bytes a cycle that a multiprocessor asks for by itself, where rows begin at odd multiples of 16 bytes, as they do in
# most lists: every line of 128 bytes lies in two cache lines. Set on lists of 10, 50 and 200 products.
_ASKED = 30.0
# As in choice.py when this was set; busy with one and with two waves.
_CHAIN, _PROMOTION, _BUSY, _BUSY_2, _ARRIVING, _SHARED = 179.5, 2.17, 0.84, 0.77, 57.0, 121.0
_NEXT_TILE, _OVERLAP = 18.4, 0.208

Shape = tuple[int, int, int]


def choices(variants: Sequence[Variant], shapes: Sequence[Shape], gpu: Gpu) -> tuple[Choice, ...]:
    """The best configs that are legal for all of the variants, best first."""
    return _choices(tuple(variants), tuple(shapes), gpu)


@lru_cache(maxsize=256)
def _choices(variants: tuple[Variant, ...], shapes: tuple[Shape, ...], gpu: Gpu) -> tuple[Choice, ...]:
    sizes = np.array([shape for shape in shapes if shape[0] and shape[1]], dtype=np.float64)
    legal_here = (config for config in legal(variants) if gpu.has_room(config.cluster))
    found = {config: seconds(config, variants[0], sizes, gpu) for config in legal_here}
    ranked = sorted(found, key=lambda one: found[one])
    return tuple(Choice(one, found[one]) for one in ranked[: 1 + RUNNERS_UP])


def legal(variants: Sequence[Variant]) -> Iterator[Config]:
    for config in _worth_a_thought():
        whole = _deepest(config, variants[0])
        if all(variant.fault(whole) is None for variant in variants):
            yield whole


def _worth_a_thought() -> Iterator[Config]:
    for share in (2, 1):  # of two that the model cannot tell apart the first is taken
        # Results in parts leave room for a fourth stage.
        yield Config(False, 2, 1, 256, 0, right_share=share, out_buffers=2, out_parts=4)
        for cols in (128, 192):
            yield Config(False, 2, 1, cols, 0, right_share=share)
        yield Config(False, 2, 2, 128, 0, left_share=share, out_buffers=2)
    for cols in (64, 128, 256):
        for blocks_per_sm in (1, 2):
            yield Config(False, 1, 1, cols, 0, blocks_per_sm=blocks_per_sm)


def _deepest(config: Config, variant: Variant) -> Config:
    """With as many stages as fit besides the table."""
    room = min(SHARED_BYTES, SHARED_PER_SM // config.blocks_per_sm - 1024) - TABLE_BYTES
    fixed = variant.shared_bytes(dataclasses.replace(config, stages=0))
    each = variant.shared_bytes(dataclasses.replace(config, stages=1)) - fixed
    return dataclasses.replace(config, stages=max(0, min((room - fixed) // each, 8)))


def _packs(config: Config, sizes: np.ndarray) -> np.ndarray:
    """Tiles of each product, or packs of those that a cluster works on together."""
    down, across = config.tile_m * config.right_share, config.tile_n * config.left_share
    return np.asarray(np.ceil(sizes[:, 0] / down) * np.ceil(sizes[:, 1] / across))


def used(config: Config, sizes: Sequence[Shape]) -> float:
    """Which part of what the tiles multiply is the products' own."""
    all_sizes = np.array(sizes, dtype=np.float64).reshape(-1, 3)
    area = _packs(config, all_sizes) * config.tile_m * config.tile_n * config.share
    spent = float((area * all_sizes[:, 2]).sum())
    return float(all_sizes.prod(axis=1).sum()) / spent if spent else 1.0


def seconds(config: Config, variant: Variant, sizes: np.ndarray, gpu: Gpu) -> float:
    """The model: a start, and then whichever takes longest: memory, L2, or the multiprocessors."""
    m, n, k = sizes.T
    out_bytes = 4 if variant.out_dtype == "fp32" else 2
    size = variant.element_bytes
    memory = float((size * (m + n) * k + out_bytes * m * n).sum()) / gpu.memory
    packs, k_blocks = _packs(config, sizes), np.ceil(size * k / BLOCK_K)
    loaded = config.rows / config.left_share + config.cols / config.right_share
    l2 = float((packs * k_blocks).sum()) * config.share * loaded * BLOCK_K / gpu.l2
    # Cycles of a block of K, much as in choice.py.
    products = 64 * config.waves * config.cols * BLOCK_K / 4096
    chain = products + _CHAIN * config.waves
    sums = config.waves * config.cols / 2
    if not variant.straight:
        chain += _PROMOTION * sums
    arriving = (config.rows + config.cols) * BLOCK_K
    read = config.math_groups * config.waves * (64 + config.cols) * BLOCK_K
    busy = _BUSY if config.waves == 1 else _BUSY_2
    unit = max(
        config.math_groups * products / busy,
        arriving / _ARRIVING,
        (arriving + read) / _SHARED,
        loaded * BLOCK_K / _ASKED,
    )
    each = k_blocks * max(chain, config.blocks_per_sm * unit) + _NEXT_TILE * sums + _FIND_TILE
    places = gpu.multiprocessors // config.cluster * config.blocks_per_sm
    # Long tiles come first, and blocks take turns: at the end they are about half a tile apart.
    even = float((packs * each).sum()) / places
    longest = float(each.max())
    cycles = max(longest, even + 0.5 * float((packs * each).sum() / packs.sum()))
    time = cycles / gpu.dense_clock
    return _START + max(memory, l2, time) + _OVERLAP * min(memory, time)
