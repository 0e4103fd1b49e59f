"""`fp8_gemm`: torch multiplies no fp8 on a processor at any speed, so both sides become fp32, scales applied.

Every fp8 value and every product of two is exact in fp32. The weight's fp32 copy is prepared once, while there is room
for it; otherwise blocks of rows are converted on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.plan import Launch
from ...core.problem import BLOCK, Problem
from .kernel import CpuKernel, blocks, finish, yes
from .prepared import store


def scale_blocks_(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply each run of 128 columns of x [R, K] by its scale [R, ceil(K/128)], in place."""
    whole = x.size(1) // BLOCK
    if whole:
        x[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).mul_(scale[:, :whole, None])
    if x.size(1) > whole * BLOCK:
        x[:, whole * BLOCK :].mul_(scale[:, whole:])
    return x


def activations(a: Tensor, a_scale: Tensor, kind: str) -> Tensor:
    """A as fp32 with its scales applied."""
    wide = a.float()
    return scale_blocks_(wide, a_scale) if kind == "1x128" else wide.mul_(a_scale.reshape(-1, 1))


def weight_rows(target: Tensor, b: Tensor, b_scale: Tensor, kind: str, rows: slice) -> Tensor:
    """Some rows of B as fp32 with their scales applied, written to `target`."""
    wide = target.copy_(b[rows])
    if kind == "tensor":
        return wide.mul_(b_scale.reshape(()))
    if kind == "channel":
        return wide.mul_(b_scale.reshape(-1, 1)[rows])
    if kind == "128x128":
        block = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=b.device) // BLOCK
        return scale_blocks_(wide, b_scale[block])
    return scale_blocks_(wide, b_scale[rows])


def _whole(b: Tensor, b_scale: Tensor, kind: str) -> Tensor:
    wide = torch.empty(b.shape, dtype=torch.float32, device=b.device)
    for rows in blocks(*b.shape):
        weight_rows(wide[rows], b, b_scale, kind, rows)
    return wide


def multiply(
    out: Tensor, a: Tensor, b: Tensor, wide: Tensor | None, b_scale: Tensor, kind: str, bias: Tensor | None
) -> None:
    """out = a b^T + bias, for fp32 a with its scales applied; `wide` is B prepared, if it is."""
    if wide is not None:
        finish(out, torch.mm(a, wide.t()), bias)
        return
    parts = blocks(*b.shape)
    target = torch.empty(parts[0].stop if parts else 0, b.size(1), dtype=torch.float32, device=b.device)
    for rows in parts:
        right = weight_rows(target[: rows.stop - rows.start], b, b_scale, kind, rows)
        finish(out[:, rows], torch.mm(a, right.t()), None if bias is None else bias[rows])


def _bind(problem: Problem) -> Launch:
    a_kind, b_kind = problem.a_scale, problem.b_scale

    def launch(out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> None:
        wide = store.get(b, ("fp32", b_kind), (b_scale,), 4 * b.numel(), lambda: _whole(b, b_scale, b_kind))
        multiply(out, activations(a, a_scale, a_kind), b, wide, b_scale, b_kind, bias)

    return launch


KERNELS = (
    CpuKernel(
        "fp32",
        lambda problem: yes("fp32 product; fp8 values are exact in it"),
        lambda problem: problem.flops * 5e-12 + problem.n * problem.k * 2e-10,
        _bind,
    ),
)
