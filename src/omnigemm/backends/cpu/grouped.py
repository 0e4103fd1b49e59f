"""Groups, as a loop of dense products: a processor gains nothing from one launch for all of them.

Each dense kernel becomes a kernel of the same name for the grouped operations, so `explain` says what a group runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ...core.dispatch import Support
from ...core.errors import ShapeError
from ...core.groups import one_by_one
from ...core.plan import Launch
from ...core.problem import Problem
from ...core.weights import Int4Parts
from . import k_groups
from .kernel import CpuKernel
from .prepared import store

_DENSE_OP = {"int8": "int8_gemm", "e4m3": "fp8_gemm", "e5m2": "fp8_gemm"}


def dense_op(problem: Problem) -> str:
    """The operation that one group is."""
    return "int4_gemm" if problem.is_int4 else _DENSE_OP.get(problem.a_dtype, "gemm")


def dense_problem(problem: Problem) -> Problem:
    """One group with its fair share of the rows, or of K."""
    rows, k = problem.m, problem.k
    if problem.op == "grouped_gemm_contiguous":
        rows = -(-rows // max(1, problem.groups))
    if problem.op == k_groups.OP:
        k = -(-k // max(1, problem.groups))
    return dataclasses.replace(problem, op=dense_op(problem), m=rows, k=k, groups=0, shapes=(), device_sizes=False)


# ------------------------------------------------------------------------------- each group its own everything


def _bind_list(kernel: CpuKernel, problem: Problem) -> Launch:
    return one_by_one(kernel.bind(dense_problem(problem)))


# ------------------------------------------------------------------------- rows of one matrix, or rows of a slab


def _experts(b: Tensor | Int4Parts) -> Sequence[Tensor | Int4Parts]:
    """The groups' weights, as objects that live as long as the whole: what is prepared for one is found again.

    Views of a detached alias, because a view of the weight itself would keep it, and so its own entry, alive.
    """
    if isinstance(b, Int4Parts):
        alias = b._replace(qweight=b.qweight.detach())
        return store.get(b.qweight, "experts", b.companions(), 0, alias.experts) or b.experts()
    return store.get(b, "experts", (), 0, lambda: b.detach().unbind(0)) or b.unbind(0)


def _group_scale(scale: Tensor | None, group: int) -> Tensor | None:
    """A group's scale of B; one value serves all groups."""
    return scale if scale is None or scale.numel() == 1 else scale[group]


def _one_group(
    one: Launch,
    problem: Problem,
    out: Tensor,
    a: Tensor,
    b: Tensor | Int4Parts,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
) -> None:
    if out.numel() == 0:
        return
    if isinstance(b, Int4Parts):
        one(out, a, b, None)
    elif problem.a_dtype == "int8":
        one(out, a, b, a_scale, b_scale, None, None, None)
    elif a_scale is not None:
        one(out, a, b, a_scale, b_scale, None)
    else:
        one(out, a, b.t(), None, 1.0, 0.0)


def contiguous_rows(ends: Tensor, total: int) -> Iterator[tuple[int, slice]]:
    """The non-empty groups and their rows, after a check of the whole list."""
    found = enumerate(k_groups.all_rows("grouped_gemm_contiguous", ends, total))
    return iter([(group, rows) for group, rows in found if rows.stop > rows.start])


def masked_rows(counts: Tensor, capacity: int) -> Iterator[tuple[int, slice]]:
    values = counts.tolist()
    for group, count in enumerate(values):
        if count < 0 or count > capacity:
            raise ShapeError(
                f"grouped_gemm_masked: counts[{group}] is {count}, expected 0 <= counts[{group}] <= Mmax = {capacity}"
            )
    return iter([(group, slice(0, count)) for group, count in enumerate(values) if count])


def _bind_contiguous(kernel: CpuKernel, problem: Problem) -> Launch:
    one = kernel.bind(dense_problem(problem))

    def launch(
        out: Tensor,
        a: Tensor,
        b: Tensor | Int4Parts,
        ends: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
    ) -> None:
        experts = _experts(b)
        for group, rows in contiguous_rows(ends, a.size(0)):
            scale = a_scale if a_scale is None or a_scale.numel() == 1 else a_scale[rows]
            _one_group(one, problem, out[rows], a[rows], experts[group], scale, _group_scale(b_scale, group))

    return launch


def _bind_masked(kernel: CpuKernel, problem: Problem) -> Launch:
    one = kernel.bind(dense_problem(problem))

    def launch(
        out: Tensor,
        a: Tensor,
        b: Tensor | Int4Parts,
        counts: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        expected_m: int | None = None,
    ) -> None:
        experts = _experts(b)
        # Told by the shape: a single row has a single scale per row, or per block.
        by_rows = None if a_scale is None or a_scale.shape[:2] != a.shape[:2] else a_scale
        for group, rows in masked_rows(counts, a.size(1)):
            scale = a_scale if by_rows is None else by_rows[group, rows]
            target, x = out[group, rows], a[group, rows]
            _one_group(one, problem, target, x, experts[group], scale, _group_scale(b_scale, group))

    return launch


_BINDERS: dict[str, Callable[[CpuKernel, Problem], Launch]] = {
    "grouped_gemm": _bind_list,
    "grouped_gemm_contiguous": _bind_contiguous,
    "grouped_gemm_masked": _bind_masked,
    k_groups.OP: lambda kernel, problem: k_groups.bind(kernel.bind(dense_problem(problem))),
}


def _lift(op: str, kernel: CpuKernel) -> CpuKernel:
    """A dense kernel as a kernel of a grouped operation."""

    def accepts(problem: Problem) -> Support:
        answer = kernel.accepts(dense_problem(problem))
        return dataclasses.replace(answer, reason=f"a loop over the groups: {answer.reason}") if answer else answer

    return CpuKernel(
        f"loop of {kernel.name}",
        accepts,
        lambda problem: max(1, problem.groups) * kernel.seconds(dense_problem(problem)),
        lambda problem: _BINDERS[op](kernel, problem),
    )


def in_groups(op: str, dense: Sequence[CpuKernel]) -> tuple[CpuKernel, ...]:
    """The kernels of a grouped operation, made from the dense ones of its groups."""
    return tuple(_lift(op, kernel) for kernel in dense)
