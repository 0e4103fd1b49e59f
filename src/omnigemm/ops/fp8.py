"""fp8_gemm: e4m3 or e5m2 on either side, with scales per tensor, per row, or per block of 128."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import FP8, name_of
from ..core.problem import Problem, layout_of
from ..core.strided import need_strided
from ._again import ANEW
from ._library import call, register
from ._operation import Operands, Operation
from ._recent import repeated
from .checks import (
    OutSpec,
    as_scale,
    need_backend,
    need_bias,
    need_dim,
    need_distinct,
    need_dtype,
    need_one_device,
    need_tensor,
    result,
    scale_kinds,
)
from .gemm import product_shape

_OP = "fp8_gemm"


def _kinds(operands: Operands) -> tuple[str, str]:
    a, b, a_scale, b_scale, _ = operands
    return scale_kinds(_OP, a_scale, b_scale, (a.size(0),), (), b.size(0), a.size(1), blockwise=True)


def _check(operands: Operands, out: Tensor | None, out_dtype: torch.dtype | None) -> OutSpec:
    a, b, a_scale, b_scale, bias = operands
    need_strided(_OP, a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)
    need_dtype(_OP, "a", a, FP8)
    need_dtype(_OP, "b", b, FP8)
    need_dim(_OP, "a", a, (2,), "(M, K)")
    need_dim(_OP, "b", b, (2,), "(N, K)")
    shape = product_shape(_OP, a, b, "(N, K)")
    device = need_one_device(_OP, "a", a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)
    _kinds(operands)
    need_bias(_OP, bias, shape[-1])
    return result(_OP, shape, torch.bfloat16, out, out_dtype, device)


def _describe(operands: Operands, spec: OutSpec) -> Problem:
    a, b, _, _, bias = operands
    a_kind, b_kind = _kinds(operands)
    return Problem(
        op=_OP,
        m=spec.shape[0],
        n=spec.shape[1],
        k=a.size(1),
        a_dtype=name_of(a.dtype),
        b_dtype=name_of(b.dtype),
        out_dtype=name_of(spec.dtype),
        a_scale=a_kind,
        b_scale=b_kind,
        bias=bias is not None,
        a_layout=layout_of(a),
        b_layout=layout_of(b),
    )


def _collect(a: Any, b: Any, a_scale: Any, b_scale: Any, *, bias: Any = None) -> Operands:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and (bias is None or isinstance(bias, Tensor))):
        need_tensor(_OP, a=a, b=b, **({} if bias is None else {"bias": bias}))
    return a, b, as_scale(_OP, "a_scale", a_scale, a), as_scale(_OP, "b_scale", b_scale, a), bias


def _distinct(operands: Operands, out: Tensor) -> None:
    a, b, a_scale, b_scale, bias = operands
    need_distinct(_OP, out, {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "bias": bias})


FP8_GEMM = Operation(_OP, _check, _describe, _collect, _distinct)
_ops = register(
    FP8_GEMM,
    _OP,
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias",
    lambda *operands: operands,
)


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | float,
    b_scale: Tensor | float,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A B^T + bias for fp8 A [M, K] and B [N, K]; scales multiply, and their shapes choose the granularity.

    One value; [M] and [N]; [M, ceil(K/128)] with [ceil(N/128), ceil(K/128)] or with [N, ceil(K/128)].
    """
    if backend is not None:
        need_backend(_OP, backend)
    done: Tensor = repeated(_OP, a, b, (out, out_dtype, backend, a, b, a_scale, b_scale, bias))
    if done is ANEW:
        done = call(_ops, _collect(a, b, a_scale, b_scale, bias=bias), out, out_dtype, backend)
    return done
