"""`int8_gemm`: integers all the way, then one scaling in fp64."""

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
    if k <= INT32_K:
        return _int32_product(a, b)
    total = torch.zeros(a.size(0), b.size(0), dtype=torch.int64, device=a.device)
    for start in range(0, k, INT32_K):
        part = slice(start, start + INT32_K)
        total += _int32_product(a[:, part], b[:, part])
    return total


def _int32_product(a: Tensor, b: Tensor) -> Tensor:
    if a.size(1) == 1:  # a column may have strides (1, 1), however it is copied
        return a.int() * b.t().int()
    return torch._int_mm(_readable(a), _readable(b).t())


def _readable(x: Tensor) -> Tensor:
    """x, of two columns or more, or a copy: with a stride of 0, or two of 1, torch._int_mm leaves its result unwritten.

    Rows or columns that lie one after another are fine; all else is slow there, and faster with a copy.
    """
    rows, columns = x.shape
    down, across = x.stride()
    if (across == 1 and down >= columns) or (down == 1 and across >= rows and across > 1):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)  # contiguous() keeps (1, 1) for a single row


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """A B^T as float64 holding integers, from fp32 products short enough to be exact."""
    k = a.size(1)
    total = torch.zeros(a.size(0), b.size(0), dtype=torch.float64, device=a.device)
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
    b_sums: Tensor | None,
    *,
    exact_int_mm: bool,
) -> None:
    """out [M, N] from a [M, K], b [N, K]; scales are one value or a vector."""
    m = a.size(0)
    if a_zero is not None and b_sums is None:
        # A row of ones rides along, and its product is the row sums of B: nothing to go stale.
        a = torch.cat([a, torch.ones(1, a.size(1), dtype=torch.int8, device=a.device)])
    acc = _integer_product(a, b) if exact_int_mm else _fp32_product(a, b)
    zero = sums = None
    if a_zero is not None:
        zero, sums, acc = a_zero.reshape(-1, 1).long(), (acc[m] if b_sums is None else b_sums).long(), acc[:m]
    # fp64 holds every integer sum, and neither a bias that cancels nor scales of any size can show its rounding. Torch
    # goes to 16 bits by way of fp32, where a value so close to a tie becomes one: 2^-14 of a unit in the last place.
    column = b_scale.reshape(-1).double()
    row = a_scale.reshape(-1, 1).double()
    offset = None if bias is None else bias.double()
    parts = blocks(m, out.size(1), EPILOGUE_ELEMENTS, least=1)
    scratch = None
    if len(parts) > 1:
        scratch = torch.empty(parts[0].stop, out.size(1), dtype=torch.float64, device=out.device)
    for part in parts:
        block = _rows(acc, part)
        if zero is not None and sums is not None:
            block = block.long() - _rows(zero, part) * sums
        value = block.double() if scratch is None else scratch[: block.size(0)].copy_(block)
        value *= column
        value *= _rows(row, part)
        if offset is not None:
            value += offset
        _rows(out, part).copy_(value)


def _rows(x: Tensor, part: slice) -> Tensor:
    """Some rows of x, or its only one for all. It is cut only if need be: that takes as long as to scale a few rows."""
    return x if x.size(0) in (1, part.stop - part.start) else x[part]


def _bind(exact_int_mm: bool) -> Launch:
    def launch(
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        a_zero: Tensor | None,
        bias: Tensor | None,
        b_sums: Tensor | None,
    ) -> None:
        if out.dim() == 2:
            multiply(out, a, b, a_scale, b_scale, a_zero, bias, b_sums, exact_int_mm=exact_int_mm)
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
                None if b_sums is None else _item(b_sums, i, 2),
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
