"""What a product by cuBLAS is expected to take, so that dispatch can weigh it against our own kernels."""

from __future__ import annotations

from ...core.problem import Problem

# On an H200, where they compete: benchmarks/tune.py measures both in one run.
_CALL_SECONDS = 4.5e-6
_MEMORY = 4.25e12  # bytes a second
_MATH = 6.9e14  # 16-bit operations a second
_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


def seconds(problem: Problem, calls: int = 1) -> float:
    """For the whole problem, in so many calls of the library."""
    copies = max(1, problem.batch, problem.groups)
    shapes = problem.shapes or ((problem.m, problem.n, problem.k),) * copies
    size, out = _SIZES.get(problem.a_dtype, 2), _SIZES.get(problem.out_dtype, 2)
    weights = sum(size * k * n for _, n, k in shapes)
    rows = shapes[:1] if problem.op == "grouped_gemm_contiguous" else shapes  # there, M is that of all groups
    moved = weights + sum(size * m * k + out * m * n for m, n, k in rows)
    return calls * _CALL_SECONDS + max(moved / _MEMORY, problem.flops / _MATH)
