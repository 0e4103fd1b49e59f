"""Grouped products: a list of unequal ones, rows sorted by group, and slabs with a row count per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import FLOATS, FP8, HALVES, name_of
from ..core.errors import DTypeError, ShapeError
from ..core.problem import Problem, layout_of
from ..core.watched import PLAIN
from ..core.weights import Int4Parts
from ..quant import Int4Weight
from ._library import call, register
from ._operation import Operands, Operation
from ._recent import ANEW, repeated
from .checks import (
    OutSpec,
    as_scale,
    need_all_distinct,
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
from .gemm import need_c, product_shape
from .int4 import PARTS, SCHEMA, need_weight, parts_of, tensors_of
from .overlap import same_memory

# ----------------------------------------------------------------------------- each group its own everything

_LIST = "grouped_gemm"


def _check_list(operands: Operands, out: Sequence[Tensor] | None, out_dtype: torch.dtype | None) -> list[OutSpec]:
    a, b, c, alpha, beta = operands
    if not a:
        raise ShapeError(f"{_LIST}: a has 0 matrices, expected at least one group")
    for name, given in (("b", b), ("c", c), ("out", out)):
        if given is not None and len(given) != len(a):
            raise ShapeError(f"{_LIST}: {name} has {len(given)} matrices, expected {len(a)}, one for each of a")
    for name, factors in (("alpha", alpha), ("beta", beta)):
        if isinstance(factors, Tensor):
            _check_factors(name, factors, a)
    if c is None and isinstance(beta, Tensor):
        raise ShapeError(f"{_LIST}: c is None, expected a list of matrices because beta is a tensor on the device")
    # What the device multiplies C by may be anything.
    beta = [1.0] * len(a) if isinstance(beta, Tensor) else beta
    specs = []
    for i in range(len(a)):
        need_dtype(_LIST, f"a[{i}]", a[i], FLOATS)
        need_same_dtype(_LIST, f"a[{i}]", a[i], "a[0]", a[0])
        need_same_dtype(_LIST, f"b[{i}]", b[i], "a[0]", a[0])
        need_dim(_LIST, f"a[{i}]", a[i], (2,), "(M, K)")
        need_dim(_LIST, f"b[{i}]", b[i], (2,), "(K, N)")
        shape = product_shape(_LIST, a[i], b[i], "(K, N)", f"[{i}]")
        mine = {f"a[{i}]": a[i], f"b[{i}]": b[i], f"c[{i}]": None if c is None else c[i]}
        device = need_one_device(_LIST, "a[0]", a[0], **mine)
        target = None if out is None else out[i]
        specs.append(result(_LIST, shape, a[0].dtype, target, out_dtype, device, f"out[{i}]"))
        if specs[i].dtype != specs[0].dtype:
            raise DTypeError(
                f"{_LIST}: out[{i}] has dtype {name_of(specs[i].dtype)}, expected {name_of(specs[0].dtype)} like out[0]"
            )
        need_c(_LIST, f"c[{i}]", None if c is None else c[i], beta[i], specs[i], a[0].dtype)
    return specs


def _check_factors(name: str, factors: Tensor, a: Sequence[Tensor]) -> None:
    """Numbers that stay on the device."""
    need_dtype(_LIST, name, factors, (torch.float32,))
    need_shape(_LIST, name, factors, [(), (1,), (len(a),)], "one number or one per group")
    need_one_device(_LIST, "a[0]", a[0], **{name: factors})


def _describe_list(operands: Operands, specs: list[OutSpec]) -> Problem:
    a, b, c, alpha, beta = operands
    shapes = tuple((x.size(0), y.size(1), x.size(1)) for x, y in zip(a, b, strict=True))
    return Problem(
        op=_LIST,
        m=max(shape[0] for shape in shapes),
        n=max(shape[1] for shape in shapes),
        k=max(shape[2] for shape in shapes),
        groups=len(shapes),
        a_dtype=name_of(a[0].dtype),
        b_dtype=name_of(b[0].dtype),
        out_dtype=name_of(specs[0].dtype),
        c=c is not None and (isinstance(beta, Tensor) or any(beta)),
        scaled=isinstance(alpha, Tensor) or any(value != 1.0 for value in alpha),
        a_layout=_common(a),
        b_layout=_common(b),
        shapes=shapes,
        device_factors=isinstance(alpha, Tensor) or isinstance(beta, Tensor),
    )


def _common(matrices: Sequence[Tensor]) -> str:
    """The layout that they have, or "mixed". A single row or column lies in any way."""
    layouts = {layout_of(x) for x in matrices if min(x.shape) > 1} or {layout_of(matrices[0])}
    return layouts.pop() if len(layouts) == 1 else "mixed"


def _numbers(name: str, value: Any, count: int) -> list[float] | Tensor:
    """One number for all groups, or one per group. A tensor on a device stays there: nobody waits for it."""
    if type(value) is float:
        return [value] * count
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            return value
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [float(value)] * count
    if not isinstance(value, Sequence) or not _NUMBERS.issuperset(map(type, value)):
        raise DTypeError(f"{_LIST}: {name} is {value!r}, expected a number or one per group")
    if len(value) != count:
        raise ShapeError(f"{_LIST}: {name} has {len(value)} numbers, expected one or {count}, one per group")
    return [*map(float, value)]


_NUMBERS = frozenset((int, float))


def _collect_list(a: Any, b: Any, c: Any = None, *, alpha: Any = 1.0, beta: Any = 0.0) -> Operands:
    for name, given in (("a", a), ("b", b), ("c", c)):
        if given is None and name == "c":
            continue
        if not isinstance(given, (list, tuple)):
            raise DTypeError(f"{_LIST}: {name} is a {type(given).__name__}, expected a list of matrices")
        if not PLAIN.issuperset(map(type, given)):
            for i, one in enumerate(given):
                need_tensor(_LIST, **{f"{name}[{i}]": one})
    count = len(a)
    return (
        list(a),
        list(b),
        None if c is None else list(c),
        _numbers("alpha", alpha, count),
        _numbers("beta", beta, count),
    )


def _distinct_list(operands: Operands, out: Sequence[Tensor]) -> None:
    a, b, c, alpha, beta = operands
    inputs = {f"{name}[{i}]": one for name, ones in (("a", a), ("b", b)) for i, one in enumerate(ones)}
    inputs |= {name: one for name, one in (("alpha", alpha), ("beta", beta)) if isinstance(one, Tensor)}
    for i, own in enumerate(c or ()):
        read = isinstance(beta, Tensor) or beta[i] != 0.0
        if read and not same_memory(own, out[i]):  # a group's C may be its out
            inputs[f"c[{i}]"] = own
    need_all_distinct(_LIST, {f"out[{i}]": one for i, one in enumerate(out)}, inputs)


def _list_tensors(out: Sequence[Tensor], operands: Operands) -> tuple[Tensor, ...]:
    a, b, c, alpha, beta = operands
    factors = [one for one in (alpha, beta) if type(one) is not list]  # on the device
    return (*out, *a, *b, *(c or ()), *factors)


def _gather_list(a: Any, b: Any, c: Any, alpha: Any, beta: Any, device_alpha: Any, device_beta: Any) -> Operands:
    return a, b, c, alpha if device_alpha is None else device_alpha, beta if device_beta is None else device_beta


def _spread_list(a: Any, b: Any, c: Any, alpha: Any, beta: Any) -> Operands:
    """The schema's arguments: numbers that are on the device have places of their own."""
    device_alpha = device_beta = None
    if type(alpha) is not list:
        alpha, device_alpha = [], alpha
    if type(beta) is not list:
        beta, device_beta = [], beta
    return a, b, c, alpha, beta, device_alpha, device_beta


GROUPED_GEMM = Operation(_LIST, _check_list, _describe_list, _collect_list, _distinct_list, tensors=_list_tensors)
_list_ops = register(
    GROUPED_GEMM,
    _LIST,
    "Tensor[] a, Tensor[] b, Tensor[]? c, float[] alpha, float[] beta, Tensor? device_alpha, Tensor? device_beta",
    _gather_list,
)


def grouped_gemm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    c: Sequence[Tensor] | None = None,
    *,
    alpha: float | Sequence[float] | Tensor = 1.0,
    beta: float | Sequence[float] | Tensor = 0.0,
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> list[Tensor]:
    """alpha A_i B_i + beta C_i for every group i, each with its own M, N, K and strides.

    alpha and beta: one number or one per group; as fp32 tensors on the GPU they are read there when the product runs.
    """
    arguments = _spread_list(*_collect_list(a, b, c, alpha=alpha, beta=beta))
    if out is not None and not isinstance(out, (list, tuple)):
        raise DTypeError(f"{_LIST}: out is a {type(out).__name__}, expected a list of matrices")
    target = None if out is None else list(out)
    done: Any = repeated(_list_ops, arguments, target, out_dtype, backend)
    if done is ANEW:
        done = call(_list_ops, arguments, target, out_dtype, backend)
    returned: list[Tensor] = done
    return returned


# ------------------------------------------------------------------- rows sorted by group, and slabs with counts


def _check_rows(op: str, operands: Operands, out: Tensor | None, out_dtype: torch.dtype | None) -> OutSpec:
    """Both row-grouped operations: `index` is ends or counts. For masked ones expected_m follows, which may be None."""
    a, b, index, a_scale, b_scale = operands[:5]
    masked = op == "grouped_gemm_masked"
    index_name = "counts" if masked else "ends"
    weight = b.qweight if isinstance(b, Int4Parts) else b
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
    _row_kinds(op, operands)
    eight_bit = a.dtype == torch.int8 or a.dtype in FP8
    usual = torch.bfloat16 if eight_bit else a.dtype
    return result(op, (*a.shape[:-1], n), usual, out, out_dtype, device)


def _row_kinds(op: str, operands: Operands) -> tuple[str, str]:
    a, b, _, a_scale, b_scale = operands[:5]
    scaled = a.dtype == torch.int8 or a.dtype in FP8
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scaled and scale is None:
            raise ShapeError(f"{op}: {name} is None, expected a tensor because a is {name_of(a.dtype)}")
        if not scaled and scale is not None:
            raise ShapeError(f"{op}: {name} has shape {show(scale)}, expected None because a is {name_of(a.dtype)}")
    if not scaled:
        return "none", "none"
    groups, n, k = b.shape
    return scale_kinds(op, a_scale, b_scale, tuple(a.shape[:-1]), (groups,), n, k, blockwise=a.dtype in FP8)


def _describe_rows(op: str, operands: Operands, spec: OutSpec) -> Problem:
    a, b, *_ = operands
    int4 = isinstance(b, Int4Parts)
    a_kind, b_kind = _row_kinds(op, operands)
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


def _collect_rows(op: str, a: Any, b: Any, index: Any, a_scale: Any, b_scale: Any) -> Operands:
    need_tensor(op, a=a, **{"counts" if op == "grouped_gemm_masked" else "ends": index})
    scales = [
        None if scale is None else as_scale(op, name, scale, a)
        for name, scale in (("a_scale", a_scale), ("b_scale", b_scale))
    ]
    if isinstance(b, Int4Weight):
        need_weight(op, "b", b, experts=True)
        return a, parts_of(b), index, *scales
    need_tensor(op, b=b)
    return a, b, index, *scales


def _distinct_rows(op: str, operands: Operands, out: Tensor) -> None:
    a, b, index, a_scale, b_scale = operands[:5]
    weight = tensors_of("b", b) if isinstance(b, Int4Parts) else {"b": b}
    name = "counts" if op == "grouped_gemm_masked" else "ends"
    need_distinct(op, out, {"a": a, **weight, name: index, "a_scale": a_scale, "b_scale": b_scale})


def _collect_contiguous(a: Any, b: Any, ends: Any, *, a_scale: Any = None, b_scale: Any = None) -> Operands:
    return _collect_rows("grouped_gemm_contiguous", a, b, ends, a_scale, b_scale)


def _collect_masked(
    a: Any, b: Any, counts: Any, *, a_scale: Any = None, b_scale: Any = None, expected_m: int | None = None
) -> Operands:
    whole = isinstance(expected_m, int) and not isinstance(expected_m, bool)
    if expected_m is not None and not (whole and expected_m >= 0):
        raise ShapeError(f"grouped_gemm_masked: expected_m is {expected_m!r}, expected None or a whole number >= 0")
    return *_collect_rows("grouped_gemm_masked", a, b, counts, a_scale, b_scale), expected_m


def _operation(op: str, collect: Any) -> Operation:
    return Operation(
        op,
        lambda operands, out, out_dtype: _check_rows(op, operands, out, out_dtype),
        lambda operands, spec: _describe_rows(op, operands, spec),
        collect,
        lambda operands, out: _distinct_rows(op, operands, out),
    )


GROUPED_CONTIGUOUS = _operation("grouped_gemm_contiguous", _collect_contiguous)
GROUPED_MASKED = _operation("grouped_gemm_masked", _collect_masked)


def _gather_int4(a: Any, *rest: Any) -> Operands:
    return a, Int4Parts(*rest[:PARTS]), rest[PARTS], None, None, *rest[PARTS + 1 :]


def _register_rows(operation: Operation, index: str, hint: str = "") -> tuple[Any, Any]:
    schema = f"Tensor a, Tensor b, Tensor {index}, Tensor? a_scale, Tensor? b_scale{hint}"
    dense = register(operation, operation.name, schema, lambda *ones: ones)
    name = f"{operation.name}_int4"
    return dense, register(operation, name, f"Tensor a, {SCHEMA}, Tensor {index}{hint}", _gather_int4)


_contiguous_ops = _register_rows(GROUPED_CONTIGUOUS, "ends")
_masked_ops = _register_rows(GROUPED_MASKED, "counts", ", int? expected_m")


def _call_rows(ops: tuple[Any, Any], operands: Operands, out: Any, out_dtype: Any, backend: str | None) -> Tensor:
    a, b, index, a_scale, b_scale, *hint = operands
    if isinstance(b, Int4Parts):
        if a_scale is not None or b_scale is not None:
            raise ShapeError(
                f"{ops[0].operation.name}: a_scale and b_scale are given, expected None because b has its own scales"
            )
        packed: Tensor = call(ops[1], (a, *b, index, *hint), out, out_dtype, backend)
        return packed
    returned: Tensor = call(ops[0], operands, out, out_dtype, backend)
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
    done: Tensor = repeated(_contiguous_ops[0], (a, b, ends, a_scale, b_scale), out, out_dtype, backend)
    if done is ANEW:
        operands = _collect_contiguous(a, b, ends, a_scale=a_scale, b_scale=b_scale)
        done = _call_rows(_contiguous_ops, operands, out, out_dtype, backend)
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
    done: Tensor = repeated(_masked_ops[0], (a, b, counts, a_scale, b_scale, expected_m), out, out_dtype, backend)
    if done is ANEW:
        operands = _collect_masked(a, b, counts, a_scale=a_scale, b_scale=b_scale, expected_m=expected_m)
        done = _call_rows(_masked_ops, operands, out, out_dtype, backend)
    return done
