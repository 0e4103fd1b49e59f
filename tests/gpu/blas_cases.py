"""Matrices that lie in every way, the exact product and the check that the GPU's tests of the blas backend share."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["rows", "columns", "wide", "scattered"]
NAN = float("nan")
# One rounding of the result, and what sums of products may lose beside: 16-bit results may be reduced in their type.
ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}
LOST = {torch.float32: 2**-21, torch.float16: 2**-13, torch.bfloat16: 2**-12}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, NAN, device="cuda", dtype=dtype)


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same values with other strides, between NaNs."""
    if how == "columns":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "wide":  # rows of a wider matrix
        frame = poisoned(*x.shape[:-2], x.size(-2) + 2, x.size(-1) + 3, dtype=x.dtype)
        inside = frame[..., 1:-1, 1:-2]
    elif how == "scattered":  # no dimension is dense
        inside = poisoned(*x.shape[:-1], 2 * x.size(-1), dtype=x.dtype)[..., ::2]
    else:
        return x.contiguous()
    return inside.copy_(x)


def untouched(x: Tensor) -> bool:
    """Whether all that surrounds a tensor made by `laid_out` in its memory is NaN still."""
    whole = torch.empty(0, device=x.device, dtype=x.dtype).set_(x.untyped_storage())
    return int(whole.isnan().sum()) == whole.numel() - x.numel()


def exact(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    result = alpha * torch.matmul(a.double(), b.double())
    return result if c is None or beta == 0.0 else result + beta * c.double()


def limit(
    a: Tensor, b: Tensor, out: torch.dtype, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """How far from the exact result each element may be."""
    size = exact(a.abs(), b.abs(), None if c is None else c.abs(), abs(alpha), abs(beta))
    smallest = torch.finfo(out).tiny * torch.finfo(out).eps
    lost = LOST[a.dtype if out == torch.float32 else out]
    return exact(a, b, c, alpha, beta).abs() * ROUNDING[out] + size * lost + smallest


def close(result: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> None:
    error = (result.double() - exact(a, b, c, alpha, beta)).abs()
    allowed = limit(a, b, result.dtype, c, alpha, beta)
    assert bool((error <= allowed).all()), f"worst is {float((error / allowed).max()):.2f} of what is allowed"
