"""`gemm`: fp16, bf16 and fp32 products, 2-D and batched."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.dispatch import Support
from ...core.problem import Problem
from .isa import bf16_products_are_safe, has_amx_bf16, native_halves
from .kernel import CpuKernel, blocks, no, yes

_NO_ALPHA = 2.0**-150  # up to which fp32 has 0 for it


def product(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
    """out = alpha a b + beta c, by torch, in one rounding; any strides."""
    if a.size(-1) == 0 or abs(alpha) <= _NO_ALPHA:
        # torch would round beta to the type of C; and of batches in bf16 it may write nothing at all.
        if c is None or beta == 0.0:
            out.zero_()
        else:
            out.copy_(c.float() * beta)
    elif alpha != 1.0 and out.dtype == torch.float32:
        # The BLAS beneath may multiply an operand by alpha, which can overflow where the result does not.
        acc = torch.matmul(a, b).mul_(alpha)
        out.copy_(acc if c is None or beta == 0.0 else acc.add_(c, alpha=beta))
    elif a.dim() == 3 or b.dim() == 3:
        _batched(out, a, b, c, alpha, beta)
    elif beta == 0.0 or c is None:
        if alpha == 1.0:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(out, a, b, beta=0.0, alpha=alpha, out=out)
    else:
        torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)


def _batched(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
    batch, m, n = out.shape
    shared_b = b.dim() == 2 or b.size(0) == 1
    if shared_b and a.dim() == 3 and a.size(0) == batch and a.is_contiguous() and out.is_contiguous():
        # One weight for the whole batch: its rows are one tall matrix.
        tall = None if c is None else c.expand(batch, m, n).reshape(batch * m, n)
        rows = a.view(batch * m, a.size(2))
        product(out.view(batch * m, n), rows, b if b.dim() == 2 else b[0], tall, alpha, beta)
        return
    left, right = a.expand(batch, *a.shape[-2:]), b.expand(batch, *b.shape[-2:])
    if c is None or beta == 0.0:
        c, beta = out, 0.0
    torch.baddbmm(c.expand(batch, m, n), left, right, beta=beta, alpha=alpha, out=out)


def product_fp32(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
    """The same through fp32 copies, a block of columns at a time, always into the same memory."""
    if abs(alpha) <= _NO_ALPHA:
        product(out, a, b, c, alpha, beta)
        return
    wide = a.float()
    parts = blocks(b.size(-1), b.size(-2))
    # empty_like keeps the order of strides, so a transposed weight is copied along its rows.
    copy = torch.empty_like(b[..., parts[0]], dtype=torch.float32) if parts else None
    for part in parts:
        assert copy is not None
        right = b[..., part]
        acc = torch.matmul(wide, copy[..., : right.size(-1)].copy_(right))
        if alpha != 1.0:
            acc *= alpha
        if c is not None and beta != 0.0:
            acc += c.expand(out.shape)[..., part].float() * beta
        out[..., part].copy_(acc)


def _mm_accepts(problem: Problem) -> Support:
    if problem.out_dtype != problem.a_dtype:
        return no(f"torch's product of {problem.a_dtype} matrices has no {problem.out_dtype} output")
    if problem.a_dtype == "bf16" and not bf16_products_are_safe():
        return no("this machine's AMX is announced but faults, and torch's bf16 products would use it")
    return yes(f"torch's own {problem.a_dtype} product")


def _mm_seconds(problem: Problem) -> float:
    if problem.a_dtype != "fp32" and problem.a_dtype not in native_halves():
        return problem.flops * 1e-10
    # Without AMX, torch's bf16 products are slower than its fp32 ones.
    row = (1e-12 if has_amx_bf16() else 7e-12) if problem.a_dtype == "bf16" else 4.5e-12
    return problem.batch * problem.n * problem.k * 1e-10 + problem.flops * row


KERNELS = (
    CpuKernel("mm", _mm_accepts, _mm_seconds, lambda problem: product),
    CpuKernel(
        "mm_fp32",
        lambda problem: yes("fp32 product of converted blocks"),
        # Converting B costs as much as some fifty rows of product.
        lambda problem: problem.batch * problem.n * problem.k * 4.5e-10 + problem.flops * 4.5e-12,
        lambda problem: product_fp32,
    ),
)
