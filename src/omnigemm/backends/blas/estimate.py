"""What a product by cuBLAS is expected to take, so that dispatch can weigh it against our own kernels."""

from __future__ import annotations

from ...core.problem import Problem

# On an H200, where they compete: benchmarks/tune.py measures both in one run.
_CALL_SECONDS = 4.5e-6
_MEMORY = 4.25e12  # bytes a second
_MATH = 6.9e14  # 16-bit operations a second
_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


# Lists of products: the grouped function has half the speed of single products, but takes the host less than a loop.
_LIST_SPEED = 0.5
_LIST_HOST, _LIST_HOST_EACH, _LOOP_HOST_EACH = 70e-6, 1.5e-6, 19e-6
# A product of a loop ends when its last tiles do, on a part of the chip: so much of what a tile for everyone takes.
_LAST_TILES, _TILES = 0.25, 132 * 128 * 256


def list_seconds(problem: Problem, at_once: bool) -> float:
    """For a list, by one call or by a loop, whichever of host and device takes longer."""
    count = max(1, problem.groups)
    if at_once:
        return max(_LIST_HOST + count * _LIST_HOST_EACH, seconds(problem) / _LIST_SPEED)
    last = sum(_LAST_TILES * 2 * _TILES * k / _MATH for m, n, k in problem.shapes if 2 * m * n > _TILES)
    return max(count * _LOOP_HOST_EACH, seconds(problem, count) + last)


def seconds(problem: Problem, calls: int = 1) -> float:
    """For the whole problem, in so many calls of the library."""
    copies = max(1, problem.batch, problem.groups)
    # Of groups along K, K is that of all of them.
    each_k = -(-problem.k // copies) if problem.op == "grouped_gemm_k_contiguous" else problem.k
    shapes = problem.shapes or ((problem.m, problem.n, each_k),) * copies
    size, out = _SIZES.get(problem.a_dtype, 2), _SIZES.get(problem.out_dtype, 2)
    weights = sum(size * k * n for _, n, k in shapes)
    rows = shapes[:1] if problem.op == "grouped_gemm_contiguous" else shapes  # there, M is that of all groups
    moved = weights + sum(size * m * k + out * m * n for m, n, k in rows)
    return calls * _CALL_SECONDS + max(moved / _MEMORY, problem.flops / _MATH)
