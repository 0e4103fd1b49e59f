"""Groups that follow one another along K: the weight gradients of a mixture-of-experts layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import FLOATS, FP8, name_of
from ..core.errors import DTypeError, ShapeError
from ..core.problem import Problem, blocks_of, layout_of
from ..core.strided import need_strided
from ._again import ANEW
from ._library import call, register
from ._operation import Operands, Operation
from ._recent import repeated
from .checks import (
    OutSpec,
    need_backend,
    need_dim,
    need_distinct,
    need_dtype,
    need_float32,
    need_one_device,
    need_same_dtype,
    need_shape,
    need_tensor,
    result,
    show,
)

OP = "grouped_gemm_k_contiguous"


def _check(operands: Operands, out: Tensor | None, out_dtype: torch.dtype | None) -> OutSpec:
    a, b, ends, c, a_scale, b_scale = operands
    need_strided(OP, a=a, b=b, ends=ends, c=c, a_scale=a_scale, b_scale=b_scale)
    need_dtype(OP, "a", a, (*FLOATS, *FP8))
    if a.dtype in FP8:
        need_dtype(OP, "b", b, FP8)
    else:
        need_same_dtype(OP, "b", b, "a", a)
    need_dim(OP, "a", a, (2,), "(T, M)")
    need_dim(OP, "b", b, (2,), "(T, N)")
    if b.size(0) != a.size(0):
        raise ShapeError(f"{OP}: b has shape {show(b)}, expected (T, N) with T = {a.size(0)}, the rows of a")
    need_dtype(OP, "ends", ends, (torch.int32,))
    need_dim(OP, "ends", ends, (1,), "(G,)")
    device = need_one_device(OP, "a", a, b=b, ends=ends, c=c, a_scale=a_scale, b_scale=b_scale)
    for name, scale, x in (("a_scale", a_scale, a), ("b_scale", b_scale, b)):
        _check_scale(name, scale, x)
    shape = (ends.size(0), a.size(1), b.size(1))
    if c is not None:
        need_dtype(OP, "c", c, FLOATS)
    # Gradients are added up over many steps and calls, and 16 bits would lose the small ones.
    spec = result(OP, shape, torch.float32 if c is None else c.dtype, out, out_dtype, device)
    if c is not None:
        need_shape(OP, "c", c, [shape], "(G, M, N)")
        if c.dtype != spec.dtype:
            raise DTypeError(
                f"{OP}: c has dtype {name_of(c.dtype)}, expected {name_of(spec.dtype)}, the dtype of the result"
            )
    return spec


def _check_scale(name: str, scale: Tensor | None, x: Tensor) -> None:
    if x.dtype not in FP8:
        if scale is not None:
            raise ShapeError(f"{OP}: {name} has shape {show(scale)}, expected None because a is {name_of(x.dtype)}")
        return
    total, rows = x.shape
    if scale is None:
        raise ShapeError(f"{OP}: {name} is None, expected a tensor because a and b are fp8")
    need_float32(OP, name, scale)
    letter = "M" if name == "a_scale" else "N"
    need_shape(OP, name, scale, [(rows, blocks_of(total))], f"({letter}, ceil(T/128))")


def _describe(operands: Operands, spec: OutSpec) -> Problem:
    a, b, _, c, a_scale, _ = operands
    scales = "none" if a_scale is None else "1x128"
    return Problem(
        op=OP,
        m=a.size(1),
        n=b.size(1),
        k=a.size(0),
        groups=spec.shape[0],
        a_dtype=name_of(a.dtype),
        b_dtype=name_of(b.dtype),
        out_dtype=name_of(spec.dtype),
        a_scale=scales,
        b_scale=scales,
        c=c is not None,
        a_layout=layout_of(a),
        b_layout=layout_of(b),
    )


def _collect(a: Any, b: Any, ends: Any, c: Any = None, *, a_scale: Any = None, b_scale: Any = None) -> Operands:
    optional = {"c": c, "a_scale": a_scale, "b_scale": b_scale}
    need_tensor(OP, a=a, b=b, ends=ends, **{name: one for name, one in optional.items() if one is not None})
    return a, b, ends, c, a_scale, b_scale


def _distinct(operands: Operands, out: Tensor) -> None:
    a, b, ends, c, a_scale, b_scale = operands
    inputs = {"a": a, "b": b, "ends": ends, "a_scale": a_scale, "b_scale": b_scale}
    need_distinct(OP, out, inputs, same_is_fine=c)


GROUPED_K_CONTIGUOUS = Operation(OP, _check, _describe, _collect, _distinct, may_be_out=3)  # C
_ops = register(
    GROUPED_K_CONTIGUOUS,
    OP,
    "Tensor a, Tensor b, Tensor ends, Tensor? c, Tensor? a_scale, Tensor? b_scale",
    lambda *operands: operands,
)


def grouped_gemm_k_contiguous(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    c: Tensor | None = None,
    *,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A[rows of g]^T B[rows of g] + C[g] for every group g: A is [T, M], B is [T, N], the result [G, M, N].

    Group g has the rows ends[g-1]..ends[g]. 16-bit, fp32, or fp8 with scales per 128 rows. C may be `out` itself.
    """
    if backend is not None:
        need_backend(OP, backend)
    done: Any = repeated(OP, a, b, (out, out_dtype, backend, a, b, ends, c, a_scale, b_scale))
    if done is ANEW:
        done = call(_ops, _collect(a, b, ends, c, a_scale=a_scale, b_scale=b_scale), out, out_dtype, backend)
    returned: Tensor = done
    return returned
