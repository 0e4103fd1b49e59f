"""Groups along K, as a loop of dense products: A^T B of each group's rows, and C added before the only rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import ShapeError
from ...core.plan import Launch
from ...core.problem import BLOCK
from .fp8 import activations
from .kernel import finish

OP = "grouped_gemm_k_contiguous"


def all_rows(op: str, ends: Tensor, total: int) -> list[slice]:
    """The rows of every group, after a check of the whole list."""
    last, found = 0, []
    for group, end in enumerate(ends.tolist()):
        if end < last or end > total:
            raise ShapeError(f"{op}: ends[{group}] is {end}, expected {last} <= ends[{group}] <= T = {total}")
        found.append(slice(last, end))
        last = end
    return found


def rows_in_blocks(groups: list[slice], total: int) -> list[slice]:
    """The groups, after a check that none of them shares a block of scales with another."""
    for group, rows in enumerate(groups):
        if rows.stop % BLOCK and rows.stop != total:
            raise ShapeError(
                f"{OP}: ends[{group}] is {rows.stop}, expected a multiple of {BLOCK}, or T = {total}, because fp8 has "
                f"a scale for every {BLOCK} rows"
            )
    return groups


def bind(one: Launch) -> Launch:
    """`one` multiplies a group in 16 bits or fp32; fp8 is multiplied in fp32, where its values are exact."""

    def launch(
        out: Tensor,
        a: Tensor,
        b: Tensor,
        ends: Tensor,
        c: Tensor | None,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
    ) -> None:
        groups = all_rows(OP, ends, a.size(0))
        if a_scale is not None:
            groups = rows_in_blocks(groups, a.size(0))
        if not out.numel():
            return
        for group, rows in enumerate(groups):
            target, added = out[group], None if c is None else c[group]
            if rows.start == rows.stop:
                target.zero_() if added is None else target.copy_(added)
            elif a_scale is None or b_scale is None:
                one(target, a[rows].t(), b[rows], added, 1.0, 0.0 if added is None else 1.0)
            else:
                blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
                left = activations(a[rows].t(), a_scale[:, blocks], "1x128")
                right = activations(b[rows].t(), b_scale[:, blocks], "1x128")
                finish(target, torch.mm(left, right.t()), added)

    return launch
