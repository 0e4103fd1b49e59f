"""int8_gemm: exact integer accumulation, then scales, zero points and bias in one rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.dtypes import name_of
from ..core.errors import DTypeError, ShapeError
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
    need_distinct,
    need_dtype,
    need_one_device,
    need_shape,
    need_tensor,
    result,
    scale_kinds,
    show,
)
from .gemm import product_shape

_OP = "int8_gemm"


def _check(operands: Operands, out: Tensor | None, out_dtype: torch.dtype | None) -> OutSpec:
    a, b, a_scale, b_scale, a_zero, bias, b_sums = operands
    inputs = {"b": b, "a_scale": a_scale, "b_scale": b_scale, "a_zero": a_zero, "bias": bias, "b_sums": b_sums}
    need_strided(_OP, a=a, **inputs)
    need_dtype(_OP, "a", a, (torch.int8,))
    need_dtype(_OP, "b", b, (torch.int8,))
    shape = product_shape(_OP, a, b, "(N, K)")
    device = need_one_device(_OP, "a", a, **inputs)
    _kinds(operands, shape)
    if a_zero is not None:
        need_dtype(_OP, "a_zero", a_zero, (torch.int32,))
        rows = [shape[-2:-1], shape[:-1], (*shape[:-1], 1)]
        if a_zero.numel() != 1 and tuple(a_zero.shape) not in rows:
            raise ShapeError(f"{_OP}: a_zero has shape {show(a_zero)}, expected one value or {shape[:-1]}")
    need_bias(_OP, bias, shape[-1])
    if b_sums is not None:
        need_dtype(_OP, "b_sums", b_sums, (torch.int32,))
        need_shape(_OP, "b_sums", b_sums, [tuple(b.shape[:-1])], "a sum for each row of b")
    return result(_OP, shape, torch.bfloat16, out, out_dtype, device)


def _kinds(operands: Operands, shape: tuple[int, ...]) -> tuple[str, str]:
    """Scales belong to the rows and columns of one product, or to each product of the batch."""
    a, _, a_scale, b_scale, *_ = operands
    k, m, n = a.size(-1), shape[-2], shape[-1]
    rows: tuple[int, ...] = (m,)
    lead: tuple[int, ...] = ()
    if len(shape) == 3 and a_scale.dim() >= 2 and a_scale.numel() != 1:
        rows = (shape[0], m)
    if len(shape) == 3 and b_scale.dim() >= 2 and b_scale.numel() != 1:
        lead = (shape[0],)
    return scale_kinds(_OP, a_scale, b_scale, rows, lead, n, k, blockwise=False)


def _describe(operands: Operands, spec: OutSpec) -> Problem:
    a, b, _, _, a_zero, bias, _ = operands
    a_kind, b_kind = _kinds(operands, spec.shape)
    return Problem(
        op=_OP,
        m=spec.shape[-2],
        n=spec.shape[-1],
        k=a.size(-1),
        batch=spec.shape[0] if len(spec.shape) == 3 else 1,
        a_dtype="int8",
        b_dtype="int8",
        out_dtype=name_of(spec.dtype),
        a_scale=a_kind,
        b_scale=b_kind,
        zero_points=a_zero is not None,
        bias=bias is not None,
        a_layout=layout_of(a),
        b_layout=layout_of(b),
    )


def _zero(value: object) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise DTypeError(f"{_OP}: a_zero is a {type(value).__name__}, expected a tensor or a whole number")
    value = int(value)
    if not -(2**31) <= value < 2**31:
        what = f"is {value}" if abs(value) < 2**64 else f"has {value.bit_length()} bits"
        raise DTypeError(f"{_OP}: a_zero {what}, expected a whole number that fits int32")
    return value


def _flat(values: Tensor, rows: int) -> Tensor:
    """[rows, 1] as [rows]: in a batch, two dimensions would be values of each product."""
    return values.squeeze(1) if tuple(values.shape) == (rows, 1) else values


def _collect(
    a: Any, b: Any, a_scale: Any, b_scale: Any, *, a_zero: Any = None, bias: Any = None, b_sums: Any = None
) -> Operands:
    need_tensor(_OP, a=a, b=b)
    a_scale, b_scale = as_scale(_OP, "a_scale", a_scale, a), as_scale(_OP, "b_scale", b_scale, a)
    for name, given in (("bias", bias), ("b_sums", b_sums)):
        if given is not None:
            need_tensor(_OP, **{name: given})
    if a_zero is not None and not isinstance(a_zero, Tensor):
        a_zero = torch.full((), _zero(a_zero), dtype=torch.int32, device=a.device)
    if 3 in (a.dim(), b.dim()) and min(a.dim(), b.dim()) >= 2:
        a_scale, b_scale = _flat(a_scale, a.size(-2)), _flat(b_scale, b.size(-2))
        a_zero = None if a_zero is None else _flat(a_zero, a.size(-2))
    return a, b, a_scale, b_scale, a_zero, bias, b_sums


def _distinct(operands: Operands, out: Tensor) -> None:
    names = "a", "b", "a_scale", "b_scale", "a_zero", "bias", "b_sums"
    need_distinct(_OP, out, dict(zip(names, operands, strict=True)))


INT8_GEMM = Operation(_OP, _check, _describe, _collect, _distinct)
_ops = register(
    INT8_GEMM,
    _OP,
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? a_zero, Tensor? bias, Tensor? b_sums",
    lambda *operands: operands,
)


def int8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | float,
    b_scale: Tensor | float,
    *,
    a_zero: Tensor | int | None = None,
    bias: Tensor | None = None,
    b_sums: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """a_scale * b_scale * (A B^T - a_zero * rowsum(B)) + bias, right to one rounding of the output type.

    A is int8 [M, K] or [B, M, K], B is int8 [N, K] or [B, N, K]; scales are fp32, one value or [M] / [N]; a_zero is
    int32, one value or [M]. The output is bf16 unless `out` or `out_dtype` says fp16 or fp32.

    With zero points, the sums of B's rows are made in every call, unless they are given: `b_sums`, int32, is
    b.sum(-1, dtype=torch.int32), made once for a weight.
    """
    if backend is not None:
        need_backend(_OP, backend)
    done: Tensor = repeated(_OP, a, b, (out, out_dtype, backend, a, b, a_scale, b_scale, a_zero, bias, b_sums))
    if done is ANEW:
        operands = _collect(a, b, a_scale, b_scale, a_zero=a_zero, bias=bias, b_sums=b_sums)
        done = call(_ops, operands, out, out_dtype, backend)
    return done
