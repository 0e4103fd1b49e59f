"""int4_gemm: 16-bit activations times a 4-bit weight with group scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import HALVES, name_of
from ..core.errors import DTypeError, ShapeError
from ..core.problem import Problem, layout_of
from ..core.strided import need_strided
from ..core.weights import Int4Parts
from ..quant import Int4Weight
from ._again import ANEW
from ._library import call, register
from ._operation import Operands, Operation
from ._recent import repeated
from .checks import (
    OutSpec,
    need_backend,
    need_bias,
    need_dim,
    need_distinct,
    need_dtype,
    need_one_device,
    need_tensor,
    result,
    show,
)

_OP = "int4_gemm"
SCHEMA = "Tensor qweight, Tensor scales, Tensor? zeros, Tensor? perm, int n, int k, int group_size"
PARTS = len(Int4Parts._fields)


def parts_of(weight: Int4Weight) -> Int4Parts:
    return Int4Parts(weight.qweight, weight.scales, weight.zeros, weight.perm, weight.n, weight.k, weight.group_size)


def tensors_of(name: str, parts: Int4Parts) -> dict[str, Tensor | None]:
    """The weight's tensors as a message names them."""
    return {f"{name}.{field}": getattr(parts, field) for field in ("qweight", "scales", "zeros", "perm")}


def need_weight(op: str, name: str, weight: object, experts: bool) -> None:
    if not isinstance(weight, Int4Weight):
        raise DTypeError(f"{op}: {name} is a {type(weight).__name__}, expected an Int4Weight")
    if (weight.experts is not None) != experts:
        form = "a weight of G experts, shape (G, N, K)" if experts else "one weight, shape (N, K)"
        raise ShapeError(f"{op}: {name} has shape {weight.shape}, expected {form}")


def _check(operands: Operands, out: Tensor | None, out_dtype: torch.dtype | None) -> OutSpec:
    a, w, bias = operands
    need_strided(_OP, a=a, bias=bias)
    need_dtype(_OP, "a", a, HALVES)
    need_dim(_OP, "a", a, (2,), "(M, K)")
    if a.size(1) != w.k:
        raise ShapeError(f"{_OP}: a has shape {show(a)}, expected (M, K) with K = {w.k}, the columns of w")
    device = need_one_device(_OP, "a", a, w=w.qweight, bias=bias)
    need_bias(_OP, bias, w.n)
    return result(_OP, (a.size(0), w.n), a.dtype, out, out_dtype, device)


def _describe(operands: Operands, spec: OutSpec) -> Problem:
    a, w, bias = operands
    return Problem(
        op=_OP,
        m=spec.shape[0],
        n=w.n,
        k=w.k,
        a_dtype=name_of(a.dtype),
        b_dtype="int4",
        out_dtype=name_of(spec.dtype),
        group_size=w.group_size,
        zero_points=w.zeros is not None,
        act_order=w.perm is not None,
        bias=bias is not None,
        a_layout=layout_of(a),
    )


def _collect(a: Any, w: Any, *, bias: Any = None) -> Operands:
    need_tensor(_OP, a=a, **({} if bias is None else {"bias": bias}))
    need_weight(_OP, "w", w, experts=False)
    return a, parts_of(w), bias


def _distinct(operands: Operands, out: Tensor) -> None:
    a, w, bias = operands
    need_distinct(_OP, out, {"a": a, **tensors_of("w", w), "bias": bias})


INT4_GEMM = Operation(_OP, _check, _describe, _collect, _distinct)
_ops = register(
    INT4_GEMM,
    _OP,
    f"Tensor a, {SCHEMA}, Tensor? bias",
    lambda a, *rest: (a, Int4Parts(*rest[:PARTS]), rest[PARTS]),
)


def int4_gemm(
    a: Tensor,
    w: Int4Weight,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A W^T + bias for fp16 or bf16 A [M, K] and an Int4Weight of [N, K], in A's dtype unless `out` has another."""
    if backend is not None:
        need_backend(_OP, backend)
    done: Any = ANEW
    if isinstance(w, Int4Weight):
        parts = parts_of(w)
        done = repeated(_OP, a, parts[0], (out, None, backend, a, *parts, bias))
    if done is ANEW:
        a, parts, bias = _collect(a, w, bias=bias)
        done = call(_ops, (a, *parts, bias), out, None, backend)
    returned: Tensor = done
    return returned
