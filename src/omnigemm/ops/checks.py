"""The checks that operations share. Each message names the argument, what it was and what it must be.

All but those of shared memory read metadata only, so they serve real tensors and torch.compile's fake ones alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import problem
from ..core.dtypes import FLOATS, name_of, names
from ..core.errors import DeviceError, DTypeError, LayoutError, ShapeError
from ..core.problem import blocks_of
from ..core.strided import need_strided
from .overlap import overlap, overlaps_itself, same_memory, span


class OutSpec(NamedTuple):
    """What the result is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def show(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def need_tensor(op: str, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise DTypeError(f"{op}: {name} is a {type(value).__name__}, expected a tensor")


def need_backend(op: str, backend: object) -> None:
    if not isinstance(backend, str):
        raise DTypeError(f"{op}: backend is {backend!r}, expected None or a name")


def need_words(op: str, out: Any, out_dtype: object, backend: object, many: bool) -> None:
    """What all operations take beside their operands; `many`: `out` is a list."""
    if backend is not None:
        need_backend(op, backend)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise DTypeError(f"{op}: out_dtype is {out_dtype!r}, expected None or a torch dtype")
    if out is None:
        return
    for i, one in enumerate(out) if many else ((0, out),):
        if not isinstance(one, Tensor):
            name = f"out[{i}]" if many else "out"
            raise DTypeError(f"{op}: {name} is a {type(one).__name__}, expected a tensor")
        if out_dtype is not None and one.dtype != out_dtype:
            name = f"out[{i}]" if many else "out"
            raise DTypeError(
                f"{op}: {name} has dtype {name_of(one.dtype)}, expected {name_of(out_dtype)}, the out_dtype given"
            )


def need_dtype(op: str, name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise DTypeError(f"{op}: {name} has dtype {name_of(tensor.dtype)}, expected {names(allowed)}")


def need_same_dtype(op: str, name: str, tensor: Tensor, like: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise DTypeError(
            f"{op}: {name} has dtype {name_of(tensor.dtype)}, expected {name_of(other.dtype)}, the dtype of {like}"
        )


def need_dim(op: str, name: str, tensor: Tensor, dims: tuple[int, ...], form: str) -> None:
    if tensor.dim() not in dims:
        raise ShapeError(f"{op}: {name} has shape {show(tensor)}, expected {form}")


def need_shape(op: str, name: str, tensor: Tensor, shapes: Iterable[tuple[int, ...]], form: str) -> None:
    """One of `shapes`; `form` says them in letters."""
    wanted = list(shapes)
    if not any(tuple(tensor.shape) == shape for shape in wanted):
        sizes = " or ".join(str(shape) for shape in dict.fromkeys(wanted))
        raise ShapeError(f"{op}: {name} has shape {show(tensor)}, expected {form} = {sizes}")


def need_one_device(op: str, first: str, reference: Tensor, **others: Tensor | None) -> torch.device:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != reference.device:
            raise DeviceError(f"{op}: {name} is on {tensor.device}, expected {reference.device}, the device of {first}")
    return reference.device


def need_bias(op: str, bias: Tensor | None, n: int) -> None:
    if bias is not None:
        need_dtype(op, "bias", bias, FLOATS)
        need_shape(op, "bias", bias, [(n,)], "(N,)")


def result(
    op: str,
    shape: tuple[int, ...],
    usual: torch.dtype,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    device: torch.device,
    name: str = "out",
) -> OutSpec:
    """The result's shape and dtype, after a check of `out` against them."""
    if out_dtype is not None and out_dtype not in FLOATS:
        raise DTypeError(f"{op}: out_dtype is {name_of(out_dtype)}, expected {names(FLOATS)}")
    if out is None:
        return OutSpec(shape, usual if out_dtype is None else out_dtype, device)
    need_strided(op, **{name: out})
    need_dtype(op, name, out, FLOATS if out_dtype is None else (out_dtype,))
    need_shape(op, name, out, [shape], "the shape of the result")
    if out.device != device:
        raise DeviceError(f"{op}: {name} is on {out.device}, expected {device}, the device of the operands")
    if overlaps_itself(out):
        raise LayoutError(
            f"{op}: {name} has strides {tuple(out.stride())}, expected memory of its own for every element"
        )
    return OutSpec(shape, out.dtype, device)


MOST = torch.finfo(torch.float32).max  # of the numbers that results are multiplied by


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def need_number(op: str, name: str, value: Any) -> float:
    """A number that fp32 has room for. Infinities and NaN it has."""
    if not is_number(value):
        raise DTypeError(f"{op}: {name} is {value!r}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        raise DTypeError(f"{op}: {name} has {value.bit_length()} bits, expected a number that fits fp32") from None
    if MOST < abs(number) < math.inf:
        raise DTypeError(f"{op}: {name} is {value!r}, expected a number that fits fp32, at most {MOST:.8g}")
    return number


def need_float32(op: str, name: str, tensor: Tensor) -> None:
    need_dtype(op, name, tensor, (torch.float32,))


def as_scale(op: str, name: str, scale: object, like: Tensor) -> Tensor:
    """A scale as a tensor; a plain number is one value for all."""
    if is_number(scale):
        return torch.full((), need_number(op, name, scale), dtype=torch.float32, device=like.device)
    if not isinstance(scale, Tensor):
        raise DTypeError(f"{op}: {name} is a {type(scale).__name__}, expected an fp32 tensor or a number")
    return scale


def scale_kinds(
    op: str,
    a_scale: Tensor,
    b_scale: Tensor,
    rows: tuple[int, ...],
    lead: tuple[int, ...],
    n: int,
    k: int,
    blockwise: bool,
) -> tuple[str, str]:
    """How both are laid out, after a check that they go together. `rows` are A's leading dimensions, `lead` B's."""
    need_float32(op, "a_scale", a_scale)
    need_float32(op, "b_scale", b_scale)
    a_kind, b_kind = problem.scale_kinds(tuple(a_scale.shape), tuple(b_scale.shape), rows, lead, n, k, blockwise)
    if a_kind is None:
        forms = [f"one value, {rows}", *([f"{(*rows, blocks_of(k))} for 1x128 blocks"] if blockwise else [])]
        raise ShapeError(f"{op}: a_scale has shape {show(a_scale)}, expected {' or '.join(forms)}")
    if b_kind is None:
        forms = ["one value", *([f"{lead}"] if lead else []), f"{(*lead, n)}"]
        if blockwise:
            squares, lines = (*lead, blocks_of(n), blocks_of(k)), (*lead, n, blocks_of(k))
            forms += [f"{squares} for 128x128 blocks", f"{lines} for 1x128 blocks"]
        raise ShapeError(f"{op}: b_scale has shape {show(b_scale)}, expected {' or '.join(forms)}")
    if (a_kind == "1x128") != (b_kind in ("128x128", "1x128")):
        raise ShapeError(
            f"{op}: a_scale has shape {show(a_scale)} ({a_kind}) and b_scale {show(b_scale)} ({b_kind}), expected both "
            f"in blocks of 128 along K or neither"
        )
    return a_kind, b_kind


def need_distinct(
    op: str, out: Tensor, inputs: Mapping[str, Tensor | None], same_is_fine: Tensor | None = None
) -> None:
    """`out` must not share memory with what is read while it is written; C may be `out` itself."""
    c = same_is_fine
    if c is not None and not same_memory(out, c):
        inputs = {**inputs, "c": c}
    for name, tensor in inputs.items():
        if tensor is not None and overlap(out, tensor):
            raise LayoutError(
                f"{op}: out {show(out)} shares memory with {name} {show(tensor)}, expected memory of its own"
            )


def need_all_distinct(op: str, outs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """The same for many results: none may overlap an input or another result. One sweep over addresses."""
    tensors = {**outs, **inputs}
    spans = sorted((*span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    active: list[tuple[int, str]] = []
    for start, end, name in spans:
        active = [(other_end, other) for other_end, other in active if other_end > start]
        for _, other in active:
            written, read = (name, other) if name in outs else (other, name)
            if written in outs and overlap(tensors[written], tensors[read]):
                raise LayoutError(f"{op}: {written} shares memory with {read}, expected memory of its own")
        active.append((end, name))
