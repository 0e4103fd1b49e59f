"""A call like one before: whether it is, and then straight to the launch, with all that was worked out at the time.

Calls are remembered as functions. Three kinds are written out, because a loop over tensors costs as much as its work,
and each call of a function a tenth of a microsecond: the product of two matrices, the one with C, and the one with two
scales. All others share one function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.plan import AddressLaunch
from ..core.settings import active, current
from ._operation import Operands, Operators
from ._run import Call, changed, launch, write

# From what is given, (out, out_dtype, backend, *arguments), to the result, or to ANEW.
Again = Callable[[Operands], Any]

ANEW = object()  # what was not done, and must be done from the start
WORDS = 3  # of what is given, those before the arguments

# Where tensors are among what is given, besides an `out`.
_PRODUCT, _PRODUCT_AND_C, _SCALED_PRODUCT = [3, 4], [3, 4, 5], [3, 4, 5, 6]

# Found once: looking each of them up costs as much as calling it.
_is_grad_enabled, _address = torch.is_grad_enabled, Tensor.data_ptr


class Like(NamedTuple):
    """What a call must be like to be the same again, in all of this."""

    places: list[int] | None  # of the tensors among what is given; None: some are in lists
    tensors: Callable[[Operands], Operands]  # all of them
    same: Callable[..., bool]  # their types, shapes, strides, dtypes, devices and gradients
    same_onto: Callable[..., bool] | None  # of all but an operand that is `out` itself; None: there is none
    others: Callable[[Operands], Operands]
    values: Operands  # of the others
    gradients: bool  # of some tensor: not for us while gradients are recorded


class Apart(NamedTuple):
    """How far `out` reaches, in bytes, and all that must not overlap it, by their places among the tensors."""

    out: int
    others: tuple[tuple[int, int], ...]


def again(ops: Operators, call: Call, like: Like, apart: Apart, numbers: tuple[float, ...]) -> Again:
    """For calls like one that was just run. `numbers` are those among its operands."""
    if call.launch_at is not None and like.places is not None:
        inputs = [place for place in like.places if place >= WORDS]
        if inputs == _PRODUCT and len(numbers) == 2:
            return _product(ops, call, call.launch_at, like, apart)
        if inputs == _PRODUCT_AND_C and len(numbers) == 2:
            return _product_and_c(ops, call, call.launch_at, like, apart)
        if inputs == _SCALED_PRODUCT and not numbers:
            return _scaled_product(ops, call, call.launch_at, like, apart)
    return _any(ops, call, like, apart, numbers)


def _product(ops: Operators, call: Call, launch_at: AddressLaunch, like: Like, apart: Apart) -> Again:
    same, gradients = like.same, like.gradients
    *_, out_dtype, backend, _, alpha, beta = like.values
    here, settings = active(), current()
    reach, fresh, make = apart.out, not apart.others, call.fresh
    a_reach, b_reach = (size for _, size in apart.others) if apart.others else (0, 0)

    def run(given: Operands) -> Any:
        out, its_dtype, its_backend, a, b, c, its_alpha, its_beta = given
        if (
            its_dtype is not out_dtype
            or its_backend != backend
            or c is not None
            or its_alpha != alpha
            or its_beta != beta
            or not (same(a, b) and out is None if fresh else same(out, a, b))
            or (active() is not here and current() != settings)
            or (gradients and _is_grad_enabled())
        ):
            return ANEW
        if fresh:
            out = make()
        to, x, y = _address(out), _address(a), _address(b)
        if not fresh:
            end = to + reach
            if (x < end and to < x + a_reach) or (y < end and to < y + b_reach):  # a closer look
                return launch(ops.operation, call, ops.gather(*given[WORDS:]), out)
        if not launch_at(alpha, beta, to, x, y):
            return write(call, ops.gather(*given[WORDS:]), out)
        if not fresh:
            changed((out,))
        return out

    return run


def _product_and_c(ops: Operators, call: Call, launch_at: AddressLaunch, like: Like, apart: Apart) -> Again:
    """C in a place of its own, or `out` itself."""
    same, gradients = like.same_onto or like.same, like.gradients
    *_, out_dtype, backend, alpha, beta = like.values
    here, settings = active(), current()
    reach, fresh, onto, make = apart.out, not apart.others, like.same_onto is not None, call.fresh
    a_reach, b_reach, c_reach = (*(size for _, size in apart.others), 0, 0, 0)[:3]  # 0: it overlaps nothing

    def run(given: Operands) -> Any:
        out, its_dtype, its_backend, a, b, c, its_alpha, its_beta = given
        if (
            its_dtype is not out_dtype
            or its_backend != backend
            or its_alpha != alpha
            or its_beta != beta
            or (c is not out if onto else fresh and out is not None)
            or not (same(out, a, b) if onto else same(a, b, c) if fresh else same(out, a, b, c))
            or (active() is not here and current() != settings)
            or (gradients and _is_grad_enabled())
        ):
            return ANEW
        if fresh:
            out = make()
        to, x, y = _address(out), _address(a), _address(b)
        z = to if onto else _address(c)
        if not fresh:
            end = to + reach
            if (x < end and to < x + a_reach) or (y < end and to < y + b_reach) or (z < end and to < z + c_reach):
                return launch(ops.operation, call, ops.gather(*given[WORDS:]), out)
        if not launch_at(alpha, beta, to, x, y, z):
            return write(call, ops.gather(*given[WORDS:]), out)
        if not fresh:
            changed((out,))
        return out

    return run


def _scaled_product(ops: Operators, call: Call, launch_at: AddressLaunch, like: Like, apart: Apart) -> Again:
    _, pick, same, _, others, values, gradients = like
    here, settings = active(), current()
    reach, fresh, make = apart.out, not apart.others, call.fresh
    a_reach, b_reach, a_scale_reach, b_scale_reach = (size for _, size in apart.others) if apart.others else (0,) * 4

    def run(given: Operands) -> Any:
        if (
            others(given) != values
            or not same(*(tensors := pick(given)))
            or (active() is not here and current() != settings)
            or (gradients and _is_grad_enabled())
        ):
            return ANEW
        if fresh:
            out, (a, b, a_scale, b_scale) = make(), tensors
        else:
            out, a, b, a_scale, b_scale = tensors
        to, x, y, s, t = _address(out), _address(a), _address(b), _address(a_scale), _address(b_scale)
        if not fresh:
            end = to + reach
            if (
                (x < end and to < x + a_reach)
                or (y < end and to < y + b_reach)
                or (s < end and to < s + a_scale_reach)
                or (t < end and to < t + b_scale_reach)
            ):
                return launch(ops.operation, call, ops.gather(*given[WORDS:]), out)
        if not launch_at(to, x, y, s, t):
            return write(call, ops.gather(*given[WORDS:]), out)
        if not fresh:
            changed((out,))
        return out

    return run


def _any(ops: Operators, call: Call, like: Like, apart: Apart, numbers: tuple[float, ...]) -> Again:
    _, pick, same, _, others, values, gradients = like
    here, settings, launch_at = active(), current(), call.launch_at
    reach, spans = apart

    def run(given: Operands) -> Any:
        if (
            others(given) != values
            or not same(*(tensors := pick(given)))
            or (active() is not here and current() != settings)
            or (gradients and _is_grad_enabled())
        ):
            return ANEW
        out = given[0]
        if launch_at is None:
            return launch(ops.operation, call, ops.gather(*given[WORDS:]), out)
        fresh = out is None
        if fresh:
            out = call.fresh()
            addresses = [_address(out), *map(_address, tensors)]
        else:
            addresses = list(map(_address, tensors))
            start = addresses[0]
            end = start + reach
            for i, size in spans:
                other = addresses[i]
                if other < end and start < other + size:
                    return launch(ops.operation, call, ops.gather(*given[WORDS:]), out)
        if not launch_at(*numbers, *addresses):
            return write(call, ops.gather(*given[WORDS:]), out)
        if not fresh:
            changed((out,))
        return out

    return run
