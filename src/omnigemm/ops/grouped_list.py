"""grouped_gemm: a list of products, each with its own M, N, K, strides, alpha, beta and C."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import FLOATS, name_of
from ..core.errors import DTypeError, ShapeError
from ..core.problem import Problem, layout_of
from ..core.strided import need_strided
from ..core.watched import PLAIN
from ._again import ANEW
from ._library import call, register
from ._operation import Operands, Operation
from ._recent import repeated_list
from .checks import (
    MOST,
    OutSpec,
    is_number,
    need_all_distinct,
    need_backend,
    need_dim,
    need_dtype,
    need_number,
    need_one_device,
    need_same_dtype,
    need_shape,
    need_tensor,
    result,
)
from .gemm import need_c, product_shape
from .overlap import same_memory

_OP = "grouped_gemm"
_NUMBERS = frozenset((int, float))  # and not bool, which is an int
_LEAST = -MOST


def _check(operands: Operands, out: Sequence[Tensor] | None, out_dtype: torch.dtype | None) -> list[OutSpec]:
    a, b, c, alpha, beta, sizes = operands
    if not a:
        raise ShapeError(f"{_OP}: a has 0 matrices, expected at least one group")
    for name, given in (("b", b), ("c", c), ("out", out)):
        if given is not None and len(given) != len(a):
            raise ShapeError(f"{_OP}: {name} has {len(given)} matrices, expected {len(a)}, one for each of a")
    _need_strided(operands)
    for name, factors in (("alpha", alpha), ("beta", beta)):
        if isinstance(factors, Tensor):
            _check_factors(name, factors, a)
    if sizes is not None:
        need_dtype(_OP, "sizes", sizes, (torch.int32,))
        need_shape(_OP, "sizes", sizes, [(len(a), 3)], "M, N, K of each group")
        need_one_device(_OP, "a[0]", a[0], sizes=sizes)
    if c is None and isinstance(beta, Tensor):
        raise ShapeError(f"{_OP}: c is None, expected a list of matrices because beta is a tensor on the device")
    # What the device multiplies C by may be anything.
    beta = [1.0] * len(a) if isinstance(beta, Tensor) else beta
    specs = []
    for i in range(len(a)):
        need_dtype(_OP, f"a[{i}]", a[i], FLOATS)
        need_same_dtype(_OP, f"a[{i}]", a[i], "a[0]", a[0])
        need_same_dtype(_OP, f"b[{i}]", b[i], "a[0]", a[0])
        need_dim(_OP, f"a[{i}]", a[i], (2,), "(M, K)")
        need_dim(_OP, f"b[{i}]", b[i], (2,), "(K, N)")
        shape = product_shape(_OP, a[i], b[i], "(K, N)", f"[{i}]")
        own_c = None if c is None else c[i]
        device = need_one_device(_OP, "a[0]", a[0], **{f"a[{i}]": a[i], f"b[{i}]": b[i], f"c[{i}]": own_c})
        target = None if out is None else out[i]
        specs.append(result(_OP, shape, a[0].dtype, target, out_dtype, device, f"out[{i}]"))
        if specs[i].dtype != specs[0].dtype:
            raise DTypeError(
                f"{_OP}: out[{i}] has dtype {name_of(specs[i].dtype)}, expected {name_of(specs[0].dtype)} like out[0]"
            )
        need_c(_OP, f"c[{i}]", own_c, beta[i], specs[i], a[0].dtype)
    return specs


def _need_strided(operands: Operands) -> None:
    a, b, c, alpha, beta, sizes = operands
    for name, matrices in (("a", a), ("b", b), ("c", c or ())):
        for i, one in enumerate(matrices):
            need_strided(_OP, **{f"{name}[{i}]": one})
    numbers = ("alpha", alpha), ("beta", beta), ("sizes", sizes)
    need_strided(_OP, **{name: one for name, one in numbers if isinstance(one, Tensor)})


def _check_factors(name: str, factors: Tensor, a: Sequence[Tensor]) -> None:
    """Numbers that stay on the device."""
    need_dtype(_OP, name, factors, (torch.float32,))
    need_shape(_OP, name, factors, [(), (1,), (len(a),)], "one number or one per group")
    need_one_device(_OP, "a[0]", a[0], **{name: factors})


def _describe(operands: Operands, specs: list[OutSpec]) -> Problem:
    a, b, c, alpha, beta, sizes = operands
    shapes = tuple((x.size(0), y.size(1), x.size(1)) for x, y in zip(a, b, strict=True))
    return Problem(
        op=_OP,
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
        device_sizes=sizes is not None,
        device_factors=isinstance(alpha, Tensor) or isinstance(beta, Tensor),
    )


def _common(matrices: Sequence[Tensor]) -> str:
    """The layout that they have, or "mixed". A single row or column lies in any way."""
    layouts = {layout_of(x) for x in matrices if min(x.shape) > 1} or {layout_of(matrices[0])}
    return layouts.pop() if len(layouts) == 1 else "mixed"


def _numbers(name: str, value: Any, a: Sequence[Tensor]) -> list[float] | Tensor:
    """One number for all groups, or one per group. A tensor on a device stays there: nobody waits for it."""
    count = len(a)
    if type(value) is float and _LEAST <= value <= MOST:
        return [value] * count
    if type(value) is list:
        return _each(name, value, count)
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            return value
        if torch.compiler.is_compiling():  # in a graph it has no numbers yet, so they go where the matrices are
            kept = value.dtype == torch.bool or value.is_complex()  # which are refused
            return value.to(a[0].device if a else "cpu", value.dtype if kept else torch.float32)
        value = value.item() if value.numel() == 1 else value.tolist()
    if is_number(value):
        return [need_number(_OP, name, value)] * count
    if not isinstance(value, Sequence):
        raise DTypeError(f"{_OP}: {name} is {value!r}, expected a number or one per group")
    return _each(name, value, count)


def _each(name: str, value: Sequence[Any], count: int) -> list[float]:
    if not _NUMBERS.issuperset(map(type, value)) and not all(map(is_number, value)):
        raise DTypeError(f"{_OP}: {name} is {value!r}, expected a number or one per group")
    if len(value) != count:
        raise ShapeError(f"{_OP}: {name} has {len(value)} numbers, expected one or {count}, one per group")
    try:
        numbers = [*map(float, value)]
        if math.hypot(*numbers) <= MOST:  # then each is; asked of all at once, for this is a part of every call
            return numbers
    except OverflowError:
        pass
    return [need_number(_OP, f"{name}[{i}]", one) for i, one in enumerate(value)]


def _collect(a: Any, b: Any, c: Any = None, *, alpha: Any = 1.0, beta: Any = 0.0, sizes: Any = None) -> Operands:
    for name, given in (("a", a), ("b", b), ("c", c)):
        if given is None and name == "c":
            continue
        if not isinstance(given, (list, tuple)):
            raise DTypeError(f"{_OP}: {name} is a {type(given).__name__}, expected a list of matrices")
        if not PLAIN.issuperset(map(type, given)):
            for i, one in enumerate(given):
                need_tensor(_OP, **{f"{name}[{i}]": one})
    if sizes is not None:
        need_tensor(_OP, sizes=sizes)
    return (
        list(a),
        list(b),
        None if c is None else list(c),
        _numbers("alpha", alpha, a),
        _numbers("beta", beta, a),
        sizes,
    )


def _distinct(operands: Operands, out: Sequence[Tensor]) -> None:
    a, b, c, alpha, beta, sizes = operands
    inputs = {f"{name}[{i}]": one for name, ones in (("a", a), ("b", b)) for i, one in enumerate(ones)}
    numbers = ("alpha", alpha), ("beta", beta), ("sizes", sizes)
    inputs |= {name: one for name, one in numbers if isinstance(one, Tensor)}
    for i, own in enumerate(c or ()):
        read = isinstance(beta, Tensor) or beta[i] != 0.0
        if read and not same_memory(own, out[i]):  # a group's C may be its out
            inputs[f"c[{i}]"] = own
    need_all_distinct(_OP, {f"out[{i}]": one for i, one in enumerate(out)}, inputs)


def _tensors(out: Sequence[Tensor], operands: Operands) -> tuple[Tensor, ...]:
    a, b, c, alpha, beta, sizes = operands
    numbers = [one for one in (alpha, beta) if type(one) is not list]  # on the device
    if sizes is not None:
        numbers.append(sizes)
    return (*out, *a, *b, *(c or ()), *numbers)


def _gather(a: Any, b: Any, c: Any, alpha: Any, beta: Any, device_alpha: Any, device_beta: Any, sizes: Any) -> Operands:
    alpha, beta = alpha if device_alpha is None else device_alpha, beta if device_beta is None else device_beta
    return a, b, c, alpha, beta, sizes


def _spread(a: Any, b: Any, c: Any, alpha: Any, beta: Any, sizes: Any) -> Operands:
    """The schema's arguments: numbers that are on the device have places of their own."""
    device_alpha = device_beta = None
    if type(alpha) is not list:
        alpha, device_alpha = [], alpha
    if type(beta) is not list:
        beta, device_beta = [], beta
    return a, b, c, alpha, beta, device_alpha, device_beta, sizes


GROUPED_GEMM = Operation(_OP, _check, _describe, _collect, _distinct, tensors=_tensors)
_ops = register(
    GROUPED_GEMM,
    _OP,
    "Tensor[] a, Tensor[] b, Tensor[]? c, float[] alpha, float[] beta, Tensor? device_alpha, Tensor? device_beta, "
    "Tensor? sizes",
    _gather,
)


def grouped_gemm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    c: Sequence[Tensor] | None = None,
    *,
    alpha: float | Sequence[float] | Tensor = 1.0,
    beta: float | Sequence[float] | Tensor = 0.0,
    sizes: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> list[Tensor]:
    """alpha A_i B_i + beta C_i for every group i, each with its own M, N, K and strides.

    alpha and beta: one number or one per group; as fp32 tensors on the GPU they are read there when the product runs.
    sizes: int32 [groups, 3] where the matrices are, the M, N, K of each group that are in use, read when the product
    runs. A[:M, :K], B[:K, :N] and C[:M, :N] are then all that counts, and out[:M, :N] all that is written.
    """
    arguments = _spread(*_collect(a, b, c, alpha=alpha, beta=beta, sizes=sizes))
    if out is not None and not isinstance(out, (list, tuple)):
        raise DTypeError(f"{_OP}: out is a {type(out).__name__}, expected a list of matrices")
    target = None if out is None else list(out)
    if backend is not None:
        need_backend(_OP, backend)
    done: Any = ANEW
    try:
        done = repeated_list(_OP, (target, out_dtype, backend, *arguments))
    except RuntimeError:
        _need_strided(_gather(*arguments))  # others have no sizes to be found by
        raise
    if done is ANEW:
        done = call(_ops, arguments, target, out_dtype, backend)
    returned: list[Tensor] = done
    return returned
