"""Groups of rows: sorted by group, or in slabs with a row count per group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import FLOATS, FP8, HALVES, name_of
from ..core.errors import ShapeError
from ..core.problem import Problem, layout_of
from ..core.strided import need_strided
from ..core.weights import Int4Parts
from ..quant import Int4Weight
from ._again import ANEW
from ._library import call, register
from ._operation import Operands, Operation, Operators
from ._recent import repeated
from .checks import (
    OutSpec,
    as_scale,
    need_backend,
    need_dim,
    need_distinct,
    need_dtype,
    need_one_device,
    need_same_dtype,
    need_shape,
    need_tensor,
    result,
    scale_kinds,
    show,
)
from .int4 import PARTS, SCHEMA, need_weight, parts_of, tensors_of

_CONTIGUOUS, _MASKED = "grouped_gemm_contiguous", "grouped_gemm_masked"
_INDEX = {_CONTIGUOUS: "ends", _MASKED: "counts"}  # what says where the rows of each group are


def _check(op: str, operands: Operands, out: Tensor | None, out_dtype: torch.dtype | None) -> OutSpec:
    """Of both operations. The operands of masked ones end with expected_m, which may be None."""
    a, b, index, a_scale, b_scale = operands[:5]
    masked, index_name = op == _MASKED, _INDEX[op]
    weight = b.qweight if isinstance(b, Int4Parts) else b
    need_strided(op, a=a, b=weight, **{index_name: index}, a_scale=a_scale, b_scale=b_scale)
    need_dtype(op, "a", a, HALVES if isinstance(b, Int4Parts) else (*FLOATS, *FP8, torch.int8))
    need_dim(op, "a", a, (3,) if masked else (2,), "(G, Mmax, K)" if masked else "(T, K)")
    if isinstance(b, Int4Parts):
        groups, n, k = weight.size(0), b.n, b.k
    else:
        need_dim(op, "b", b, (3,), "(G, N, K)")
        groups, n, k = b.shape
        if a.dtype in FP8:
            need_dtype(op, "b", b, FP8)
        else:
            need_same_dtype(op, "b", b, "a", a)
    if a.size(-1) != k:
        raise ShapeError(f"{op}: a has shape {show(a)}, expected K = {k} columns, as b has")
    if masked and a.size(0) != groups:
        raise ShapeError(f"{op}: a has shape {show(a)}, expected (G, Mmax, K) with G = {groups}, the groups of b")
    need_dtype(op, index_name, index, (torch.int32,))
    need_shape(op, index_name, index, [(groups,)], "(G,)")
    device = need_one_device(op, "a", a, b=weight, **{index_name: index}, a_scale=a_scale, b_scale=b_scale)
    _kinds(op, operands)
    usual = torch.bfloat16 if _is_scaled(a) else a.dtype
    return result(op, (*a.shape[:-1], n), usual, out, out_dtype, device)


def _is_scaled(a: Tensor) -> bool:
    """Whether it comes with scales: 8 bits have too little range without."""
    return a.dtype == torch.int8 or a.dtype in FP8


def _kinds(op: str, operands: Operands) -> tuple[str, str]:
    a, b, _, a_scale, b_scale = operands[:5]
    scaled = _is_scaled(a)
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scaled and scale is None:
            raise ShapeError(f"{op}: {name} is None, expected a tensor because a is {name_of(a.dtype)}")
        if not scaled and scale is not None:
            raise ShapeError(f"{op}: {name} has shape {show(scale)}, expected None because a is {name_of(a.dtype)}")
    if not scaled:
        return "none", "none"
    groups, n, k = b.shape
    return scale_kinds(op, a_scale, b_scale, tuple(a.shape[:-1]), (groups,), n, k, blockwise=a.dtype in FP8)


def _describe(op: str, operands: Operands, spec: OutSpec) -> Problem:
    a, b, *_ = operands
    int4 = isinstance(b, Int4Parts)
    a_kind, b_kind = _kinds(op, operands)
    return Problem(
        op=op,
        m=a.size(-2),
        n=spec.shape[-1],
        k=a.size(-1),
        groups=(b.qweight if int4 else b).size(0),
        a_dtype=name_of(a.dtype),
        b_dtype="int4" if int4 else name_of(b.dtype),
        out_dtype=name_of(spec.dtype),
        a_scale=a_kind,
        b_scale=b_kind,
        group_size=b.group_size if int4 else 0,
        zero_points=int4 and b.zeros is not None,
        act_order=int4 and b.perm is not None,
        a_layout=layout_of(a),
        b_layout="row" if int4 else layout_of(b),
        expected_m=(operands[5] or 0) if len(operands) > 5 else 0,
    )


def _collect(op: str, a: Any, b: Any, index: Any, a_scale: Any, b_scale: Any) -> Operands:
    need_tensor(op, a=a, **{_INDEX[op]: index})
    scales = [
        None if scale is None else as_scale(op, name, scale, a)
        for name, scale in (("a_scale", a_scale), ("b_scale", b_scale))
    ]
    if isinstance(b, Int4Weight):
        need_weight(op, "b", b, experts=True)
        return a, parts_of(b), index, *scales
    need_tensor(op, b=b)
    return a, b, index, *scales


def _distinct(op: str, operands: Operands, out: Tensor) -> None:
    a, b, index, a_scale, b_scale = operands[:5]
    weight = tensors_of("b", b) if isinstance(b, Int4Parts) else {"b": b}
    need_distinct(op, out, {"a": a, **weight, _INDEX[op]: index, "a_scale": a_scale, "b_scale": b_scale})


def _collect_contiguous(a: Any, b: Any, ends: Any, *, a_scale: Any = None, b_scale: Any = None) -> Operands:
    return _collect(_CONTIGUOUS, a, b, ends, a_scale, b_scale)


def _collect_masked(
    a: Any, b: Any, counts: Any, *, a_scale: Any = None, b_scale: Any = None, expected_m: int | None = None
) -> Operands:
    whole = isinstance(expected_m, int) and not isinstance(expected_m, bool)
    if expected_m is not None and not (whole and expected_m >= 0):
        raise ShapeError(f"{_MASKED}: expected_m is {expected_m!r}, expected None or a whole number >= 0")
    return *_collect(_MASKED, a, b, counts, a_scale, b_scale), expected_m


def _operation(op: str, collect: Callable[..., Operands]) -> Operation:
    return Operation(op, partial(_check, op), partial(_describe, op), collect, partial(_distinct, op))


GROUPED_CONTIGUOUS = _operation(_CONTIGUOUS, _collect_contiguous)
GROUPED_MASKED = _operation(_MASKED, _collect_masked)


def _gather_int4(a: Any, *rest: Any) -> Operands:
    return a, Int4Parts(*rest[:PARTS]), rest[PARTS], None, None, *rest[PARTS + 1 :]


def _register(operation: Operation, hint: str = "") -> tuple[Operators, Operators]:
    """For tensors, and for an Int4Weight in its parts."""
    name, index = operation.name, f"Tensor {_INDEX[operation.name]}"
    schema = f"Tensor a, Tensor b, {index}, Tensor? a_scale, Tensor? b_scale{hint}"
    dense = register(operation, name, schema, lambda *operands: operands)
    return dense, register(operation, f"{name}_int4", f"Tensor a, {SCHEMA}, {index}{hint}", _gather_int4)


_contiguous_ops = _register(GROUPED_CONTIGUOUS)
_masked_ops = _register(GROUPED_MASKED, ", int? expected_m")


def _call(
    ops: tuple[Operators, Operators],
    operands: Operands,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    dense, int4 = ops
    a, b, index, a_scale, b_scale, *hint = operands
    if isinstance(b, Int4Parts):
        for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
            if scale is not None:
                has = f"{name} has shape {show(scale)}"
                raise ShapeError(f"{dense.operation.name}: {has}, expected None because b has its own scales")
        packed: Tensor = call(int4, (a, *b, index, *hint), out, out_dtype, backend)
        return packed
    returned: Tensor = call(dense, operands, out, out_dtype, backend)
    return returned


def grouped_gemm_contiguous(
    a: Tensor,
    b: Tensor | Int4Weight,
    ends: Tensor,
    *,
    a_scale: Tensor | float | None = None,
    b_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Rows ends[g-1]..ends[g] of A [T, K] times B[g]^T of B [G, N, K] (or an Int4Weight of G experts).

    16-bit, fp32, fp8 or int8; scales as in the dense operation, per row of A and per group of B. Rows at or past
    ends[-1] are not written.
    """
    if backend is not None:
        need_backend(_CONTIGUOUS, backend)
    done: Tensor = repeated(_CONTIGUOUS, a, b, (out, out_dtype, backend, a, b, ends, a_scale, b_scale))
    if done is ANEW:
        operands = _collect_contiguous(a, b, ends, a_scale=a_scale, b_scale=b_scale)
        done = _call(_contiguous_ops, operands, out, out_dtype, backend)
    return done


def grouped_gemm_masked(
    a: Tensor,
    b: Tensor | Int4Weight,
    counts: Tensor,
    *,
    a_scale: Tensor | float | None = None,
    b_scale: Tensor | float | None = None,
    expected_m: int | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The first counts[g] rows of A[g] times B[g]^T; A is [G, Mmax, K], B [G, N, K] or an Int4Weight of G experts.

    Rows at or past counts[g] are neither read into results nor written. `expected_m` is a hint: rows of a usual group.
    """
    if backend is not None:
        need_backend(_MASKED, backend)
    done: Any = ANEW
    if expected_m is None or type(expected_m) is int:  # True and 1.0 equal 1, but are no numbers of rows
        done = repeated(_MASKED, a, b, (out, out_dtype, backend, a, b, counts, a_scale, b_scale, expected_m))
    if done is ANEW:
        operands = _collect_masked(a, b, counts, a_scale=a_scale, b_scale=b_scale, expected_m=expected_m)
        done = _call(_masked_ops, operands, out, out_dtype, backend)
    returned: Tensor = done
    return returned
