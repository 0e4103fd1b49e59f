"""gemm: D = alpha A B + beta C for fp16, bf16 and fp32 matrices, 2-D or batched."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import FLOATS, name_of
from ..core.errors import DTypeError, ShapeError
from ..core.problem import Problem, layout_of
from ..core.strided import need_strided
from ._again import ANEW
from ._library import call, register
from ._operation import Operands, Operation
from ._recent import repeated
from .checks import (
    MOST,
    OutSpec,
    need_backend,
    need_dim,
    need_distinct,
    need_dtype,
    need_number,
    need_one_device,
    need_same_dtype,
    need_tensor,
    result,
    show,
)


def product_shape(op: str, a: Tensor, b: Tensor, b_form: str, where: str = "") -> tuple[int, ...]:
    """The shape of A B, with a batch of 1 (or none) broadcast; `b_form` is '(K, N)' or '(N, K)'."""
    need_dim(op, f"a{where}", a, (2, 3), "(M, K) or (B, M, K)")
    need_dim(op, f"b{where}", b, (2, 3), f"{b_form} or (B, {b_form[1:]}")
    k_at, n_at = (-2, -1) if b_form == "(K, N)" else (-1, -2)
    if a.size(-1) != b.size(k_at):
        raise ShapeError(
            f"{op}: b{where} has shape {show(b)}, expected {b_form} with K = {a.size(-1)}, the columns of a{where}"
        )
    shape = (a.size(-2), b.size(n_at))
    if a.dim() == 2 and b.dim() == 2:
        return shape
    batches = [one.size(0) for one in (a, b) if one.dim() == 3]
    batch = batches[0] if batches[0] != 1 else batches[-1]
    if any(size not in (1, batch) for size in batches):
        raise ShapeError(
            f"{op}: b{where} has shape {show(b)}, expected a batch of 1 or {a.size(0)}, the batch of a{where}"
        )
    return (batch, *shape)


def need_c(op: str, name: str, c: Tensor | None, beta: float, spec: OutSpec, inputs: torch.dtype) -> None:
    if c is None:
        if beta != 0.0:
            raise ShapeError(f"{op}: {name} is None, expected a matrix because beta is {beta}")
        return
    if c.dtype not in (inputs, spec.dtype):
        raise DTypeError(
            f"{op}: {name} has dtype {name_of(c.dtype)}, expected {name_of(inputs)} like a or {name_of(spec.dtype)} "
            f"like the result"
        )
    fits = c.dim() <= len(spec.shape) and all(
        mine in (1, size) for mine, size in zip(reversed(c.shape), reversed(spec.shape), strict=False)
    )
    if not fits:
        raise ShapeError(f"{op}: {name} has shape {show(c)}, expected {spec.shape} or what broadcasts to it")


def _check(operands: Operands, out: Tensor | None, out_dtype: torch.dtype | None) -> OutSpec:
    a, b, c, _, beta = operands
    need_strided("gemm", a=a, b=b, c=c)
    need_dtype("gemm", "a", a, FLOATS)
    need_same_dtype("gemm", "b", b, "a", a)
    shape = product_shape("gemm", a, b, "(K, N)")
    device = need_one_device("gemm", "a", a, b=b, c=c)
    spec = result("gemm", shape, a.dtype, out, out_dtype, device)
    need_c("gemm", "c", c, beta, spec, a.dtype)
    return spec


def _describe(operands: Operands, spec: OutSpec) -> Problem:
    a, b, c, alpha, beta = operands
    return Problem(
        op="gemm",
        m=spec.shape[-2],
        n=spec.shape[-1],
        k=a.size(-1),
        batch=spec.shape[0] if len(spec.shape) == 3 else 1,
        a_dtype=name_of(a.dtype),
        b_dtype=name_of(b.dtype),
        out_dtype=name_of(spec.dtype),
        c=c is not None and beta != 0.0,
        scaled=alpha != 1.0,
        a_layout=layout_of(a),
        b_layout=layout_of(b),
    )


def _collect(a: Any, b: Any, c: Any = None, *, alpha: float = 1.0, beta: float = 0.0) -> Operands:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and (c is None or isinstance(c, Tensor))):
        need_tensor("gemm", a=a, b=b, **({} if c is None else {"c": c}))
    if type(alpha) is not float or type(beta) is not float or not math.hypot(alpha, beta) <= MOST:
        alpha, beta = need_number("gemm", "alpha", alpha), need_number("gemm", "beta", beta)
    return a, b, c, alpha, beta


def _distinct(operands: Operands, out: Tensor) -> None:
    a, b, c, _, beta = operands
    need_distinct("gemm", out, {"a": a, "b": b}, same_is_fine=c if beta != 0.0 else None)


GEMM = Operation("gemm", _check, _describe, _collect, _distinct, may_be_out=2)  # C
_ops = register(
    GEMM,
    "gemm",
    "Tensor a, Tensor b, Tensor? c, float alpha, float beta",
    lambda *operands: operands,
)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """alpha A B + beta C. A is [M, K] or [B, M, K], B is [K, N] or [B, K, N]; a batch of 1 broadcasts.

    Any strides; transposed views cost no copy. C is read only if beta is not 0.
    """
    if backend is not None:
        need_backend("gemm", backend)
    if type(alpha) is int and -MOST <= alpha <= MOST:
        alpha = float(alpha)
    if type(beta) is int and -MOST <= beta <= MOST:
        beta = float(beta)
    done: Any = ANEW
    if type(alpha) is float and type(beta) is float:  # True equals 1.0, but is no number to multiply by
        done = repeated("gemm", a, b, (out, out_dtype, backend, a, b, c, alpha, beta))
    if done is ANEW:
        done = call(_ops, _collect(a, b, c, alpha=alpha, beta=beta), out, out_dtype, backend)
    returned: Tensor = done
    return returned
