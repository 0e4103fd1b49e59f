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
    shapes = problem.shapes or ((problem.m, problem.n, problem.k),) * max(1, problem.batch, problem.groups)
    size, out = _SIZES.get(problem.a_dtype, 2), _SIZES.get(problem.out_dtype, 2)
    moved = sum(size * (m * k + k * n) + out * m * n for m, n, k in shapes)
    return calls * _CALL_SECONDS + max(moved / _MEMORY, problem.flops / _MATH)
