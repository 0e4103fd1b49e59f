"""The kernel that multiplies lists of products, which all lie in device memory: its variants and grid.

Who makes the list differs: list_setup.py packs what the host knows, k_groups.py reads on the GPU.
"""

from __future__ import annotations

from typing import Any

from ...core.problem import Problem
from . import sm90
from .launch import Matrix

MEMORY_BYTES = 464  # of device memory for a product: list_memory.cuh
_COUNTER_BYTES = 4  # after those of all products
_MEMORY_STEP = 512  # where the memory of each launch begins
TILE_LIMIT = 2**30  # that blocks can count

Turned = tuple[bool, bool]  # of A and of B: K does not lie side by side in memory


def variant_of(problem: Problem, turned: Turned) -> sm90.Variant:
    return sm90.Variant(
        0,
        0,
        problem.a_dtype,
        problem.b_dtype,
        problem.a_scale,
        problem.b_scale,
        problem.out_dtype,
        out_by_tma=True,  # of each product, the small kernel finds out
        a_turned=turned[0],
        b_turned=turned[1],
        c=problem.c,
        grouping="list",
    )


def memory_bytes(products: int) -> int:
    """Device memory of one launch, up to where that of the next may begin."""
    return -(-(products * MEMORY_BYTES + _COUNTER_BYTES) // _MEMORY_STEP) * _MEMORY_STEP


def shape(config: sm90.Config) -> dict[str, Any]:
    """Of a launch, what the config alone says."""
    matrices = (None, None, None)  # each product has its own, in device memory
    return {"threads": config.threads, "cluster": config.cluster, "matrices": matrices}


def grid(config: sm90.Config, tiles: int, multiprocessors: int) -> int:
    """Persistent blocks, or as many as there are tiles."""
    return min(tiles, multiprocessors // config.cluster * config.blocks_per_sm) * config.cluster


def like_matrices(config: sm90.Config, variant: sm90.Variant) -> list[Matrix | None]:
    """Matrices with the right boxes, whose maps the small kernel copies and points elsewhere."""
    sides = config.rows // config.left_share, config.cols // config.right_share
    size, turned = variant.element_bytes, variant.turned(config.swap)
    block = sm90.BLOCK_K // size
    boxes = [(sm90.SLAB, sm90.SLAB) if way else (block, rows) for way, rows in zip(turned, sides, strict=True)]
    store = None
    if variant.stores_by_tma(config):
        store = Matrix(64, 64, variant.out_bytes, 256, (variant.slab(config), 64))
    return [*(Matrix(128 // size, 64, size, 128, box, fetch=config.fetch) for box in boxes), store]
