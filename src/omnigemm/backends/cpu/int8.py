"""`int8_gemm`: integers all the way, then one scaling and one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.dispatch import Support
from ...core.plan import Launch
from ...core.problem import Problem
from .isa import int8_products_are_exact
from .kernel import CpuKernel, blocks, no, yes

# 128 * 128 * K stays below 2**31 up to here; longer sums are cut and added in 64 bits.
INT32_K = (2**31 - 1) // (128 * 128)
# 128 * 128 * K stays below 2**24 up to here, so an fp32 sum of integer products is exact in any order.
FP32_K = 2**24 // (128 * 128)
# Rows are scaled in blocks that stay in a core's second-level cache from one step to the next.
EPILOGUE_ELEMENTS = 1 << 16


def _integer_product(a: Tensor, b: Tensor) -> Tensor:
    """A B^T as int32, or int64 when K is so long that 32 bits could overflow."""
    k = a.size(1)
    if k == 1:  # torch._int_mm leaves its result unwritten when the right side has strides (1, 1)
        return a.int() * b.t().int()
    if k <= INT32_K:
        return torch._int_mm(a, b.t())
    total = torch.zeros(a.size(0), b.size(0), dtype=torch.int64)
    for start in range(0, k, INT32_K):
        part = slice(start, start + INT32_K)
        total += torch._int_mm(a[:, part], b[:, part].t())
    return total


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """A B^T as float64 holding integers, from fp32 products short enough to be exact."""
    k = a.size(1)
    total = torch.zeros(a.size(0), b.size(0), dtype=torch.float64)
    for start in range(0, k, FP32_K):
        part = slice(start, start + FP32_K)
        total += torch.mm(a[:, part].float(), b[:, part].float().t())
    return total


def multiply(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None,
    bias: Tensor | None,
    *,
    exact_int_mm: bool,
) -> None:
    """out [M, N] from a [M, K], b [N, K]; scales are one value or a vector."""
    m = a.size(0)
    if a_zero is not None:
        # A row of ones rides along, and its product is the row sums of B: nothing to prepare, nothing to go stale.
        a = torch.cat([a, torch.ones(1, a.size(1), dtype=torch.int8)])
    acc = _integer_product(a, b) if exact_int_mm else _fp32_product(a, b)
    sums = acc[m].long() if a_zero is not None else None
    # fp64 holds every integer sum, and neither a bias that cancels nor scales of any size can show its rounding.
    column = b_scale.reshape(-1).double()
    row = a_scale.reshape(-1, 1).double().expand(m, 1)
    offset = None if bias is None else bias.double()
    parts = blocks(m, out.size(1), EPILOGUE_ELEMENTS, least=1)
    scratch = torch.empty(parts[0].stop if parts else 0, out.size(1), dtype=torch.float64)
    for part in parts:
        block = acc[part]
        if a_zero is not None and sums is not None:
            zero = a_zero.reshape(-1, 1).long().expand(m, 1)[part]
            block = block.long() - zero * sums
        value = scratch[: block.size(0)].copy_(block)
        value *= column
        value *= row[part]
        if offset is not None:
            value += offset
        out[part].copy_(value)


def _bind(exact_int_mm: bool) -> Launch:
    def launch(
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        a_zero: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        if out.dim() == 2:
            multiply(out, a, b, a_scale, b_scale, a_zero, bias, exact_int_mm=exact_int_mm)
            return
        batch = out.size(0)
        for i in range(batch):
            multiply(
                out[i],
                _item(a, i, 3),
                _item(b, i, 3),
                _item(a_scale, i, 2),
                _item(b_scale, i, 2),
                None if a_zero is None else _item(a_zero, i, 2),
                bias,
                exact_int_mm=exact_int_mm,
            )

    return launch


def _item(tensor: Tensor, i: int, batched_dim: int) -> Tensor:
    """Batch item i of an operand that may be shared by the whole batch."""
    if tensor.dim() < batched_dim:
        return tensor
    return tensor[i if tensor.size(0) > 1 else 0]


def _int_mm_accepts(problem: Problem) -> Support:
    if not int8_products_are_exact():
        return no("oneDNN's int8 products saturate on this processor (no VNNI), so they are not exact")
    return yes("oneDNN int8 product, exact in 32 bits")


KERNELS = (
    CpuKernel("int_mm", _int_mm_accepts, lambda p: p.flops * 2e-12, lambda p: _bind(True)),
    CpuKernel(
        "fp32_exact",
        lambda p: yes(f"fp32 products of at most {FP32_K} columns, which are exact"),
        lambda p: p.flops * 8e-12 + p.batch * p.n * p.k * 1e-9,
        lambda p: _bind(False),
    ),
)
