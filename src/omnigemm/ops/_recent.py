"""Plain eager calls without torch's dispatcher, and calls like one before without even a look at their signature.

The dispatcher costs two microseconds, and changes nothing where nobody watches, no tensor is of a subclass, and no
gradients are recorded. A signature costs more: instead, the last call with a weight and number of rows (of lists: with
such sizes) is found by these, and one check of all its tensors tells whether this is the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.settings import Settings, current
from ..core.watched import PLAIN, dispatch_modes, function_modes, watched
from ._operation import ListTensors, Operands, Operators
from ._run import Call, call_for, kinds, launch, write
from .overlap import reach


class Recent(NamedTuple):
    """A call to recognise: of what is given, (out, out_dtype, backend, *arguments), all must be as then."""

    call: Call
    tensors: Callable[[Operands], Operands]  # all of them, also those in lists
    same: Callable[..., bool]  # their types, shapes, strides, dtypes, devices and gradients
    others: Callable[[Operands], Operands]
    values: Operands  # of the others
    numbers: tuple[float, ...]  # those of them that are operands
    room: int  # bytes from the first element of `out` to its last
    apart: tuple[tuple[int, int], ...]  # the same of all that must not overlap it, by their places among the tensors
    settings: Settings
    gradients: bool  # of some tensor: not for us while gradients are recorded


class RecentCalls:
    """By operator, weight and number of rows, or by operator and sizes; emptied rather than left to grow."""

    LIMIT = 65536  # tensors of all calls, of which lists have many

    def __init__(self) -> None:
        self.by_place: dict[tuple[Any, ...], Recent] = {}
        self._tensors = 0

    def remember(self, place: tuple[Any, ...], recent: Recent, tensors: int) -> None:
        if place not in self.by_place:
            if self._tensors + tensors > self.LIMIT:
                self.clear()
            self._tensors += tensors
        self.by_place[place] = recent

    def clear(self) -> None:
        self.by_place.clear()
        self._tensors = 0


recent_calls = RecentCalls()

ANEW = object()  # what was not done, and must be done from the start
_WORDS = 3  # of (out, out_dtype, backend, *arguments), those before the arguments

# torch.compile's check that tensors are what they were: one call for all of them. It also compares what torch's
# dispatcher would see here and now, so a tracer or a transform does not pass; modes may.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

# Found once: looking each of them up costs as much as calling it.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_size, _address = Tensor.size, Tensor.data_ptr


def repeated(ops: Operators, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Run a call like the last one with its weight and number of rows, or answer ANEW: then it must be looked at.

    Public functions ask this first, with their arguments as they are. Written out in one piece, because each call of a
    function costs a tenth of a microsecond.
    """
    if _is_compiling() or dispatch_modes() or function_modes():  # first: nobody who looks must see what was remembered
        return ANEW
    first = arguments[0]
    try:
        if type(first) is list:
            recent = recent_calls.by_place[_list_place(ops, first)]
        else:
            recent = recent_calls.by_place[ops.name, id(arguments[1]), first.shape[-2]]
    except (KeyError, AttributeError, IndexError, TypeError):  # unknown, or not even a matrix
        return ANEW
    call, pick, same, others, values, numbers, room, apart, settings, gradients = recent
    given = (out, out_dtype, backend, *arguments)
    tensors, now = pick(given), current()
    if (
        others(given) != values
        or not same(*tensors)
        or not (settings is now or settings == now)
        or (gradients and _is_grad_enabled())
    ):
        return ANEW
    launch_at = call.launch_at
    if launch_at is None:
        return launch(ops.operation, call, ops.gather(*arguments), out)
    if out is None:
        out = call.fresh()
        addresses = [out.data_ptr(), *map(_address, tensors)]
    else:
        addresses = list(map(_address, tensors))
        start = addresses[0]
        end = start + room
        for i, size in apart:
            other = addresses[i]
            if other < end and start < other + size:  # a closer look
                return launch(ops.operation, call, ops.gather(*arguments), out)
    return out if launch_at(*numbers, *addresses) else write(call, ops.gather(*arguments), out)


def shortcut(ops: Operators, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Run a call without torch's dispatcher and remember it, or answer ANEW if the dispatcher must see it."""
    if watched():
        return ANEW
    operation = ops.operation
    given = (out, out_dtype, backend, *arguments)
    if operation.tensors is None:
        tensors = [i for i, one in enumerate(given) if type(one) in PLAIN]
        others = [i for i in range(len(given)) if i not in tensors]
        if out is not None and type(out) not in PLAIN:
            return ANEW
        if any(i >= _WORDS and given[i] is not None and type(given[i]) not in (float, int) for i in others):
            return ANEW
        pick, rest = _picker(tensors), _picker(others)
        picked = pick(given)
    else:
        pick, rest = _list_picker(ops, operation.tensors), _list_others
        picked = pick(given)
        if not PLAIN.issuperset(map(type, picked)):
            return ANEW
    gradients = any(one.requires_grad for one in picked)
    if gradients and _is_grad_enabled():
        return ANEW
    operands = ops.gather(*arguments)
    # An out says its type itself.
    found = call_for(operation, operands, out, out_dtype if out is None else None, backend)
    result = launch(operation, found, operands, out)
    if _TensorGuards is not None:
        room, apart = (0, ()) if found.launch_at is None else _spans(ops, given)
        recent = Recent(
            call=found,
            tensors=pick,
            same=_guard(picked),
            others=rest,
            values=rest(given),
            numbers=tuple(one for one in arguments if type(one) is float),
            room=room,
            apart=apart,
            settings=current(),
            gradients=gradients,
        )
        first = arguments[0]
        place = _list_place(ops, first) if operation.tensors else (ops.name, id(arguments[1]), first.size(-2))
        recent_calls.remember(place, recent, len(picked))
    return result


def _spans(ops: Operators, given: Operands) -> tuple[int, tuple[tuple[int, int], ...]]:
    """`room` and `apart` of Recent."""
    out, c = given[0], ops.operation.may_be_out
    if out is None:
        return 0, ()
    tensors = [i for i, one in enumerate(given) if type(one) in PLAIN]
    itself = [i == 0 or (c is not None and i == _WORDS + c and given[i] is out) for i in tensors]
    return reach(out), tuple((at, reach(given[i])) for at, i in enumerate(tensors) if not itself[at])


def _guard(tensors: Operands) -> Callable[..., bool]:
    """Whether tensors are like these. Torch's guard refuses one that comes twice, such as a C that is `out` or a weight
    of several products: it gets each once, and the others are compared with it."""
    first = {id(one): i for i, one in reversed(list(enumerate(tensors)))}
    once = _picker(sorted(first.values()))
    same: Callable[..., bool] = _TensorGuards(*once(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    again = [i for i, one in enumerate(tensors) if first[id(one)] != i]
    if not again:
        return same
    firsts, twins = _picker([first[id(tensors[i])] for i in again]), _picker(again)
    return lambda *given: all(map(is_, firsts(given), twins(given))) and same(*once(given))


def _picker(places: Sequence[int]) -> Callable[[Operands], Operands]:
    """What is at these places, always as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda given: tuple(given[i] for i in places)


def _list_place(ops: Operators, matrices: Sequence[Tensor]) -> tuple[Any, ...]:
    """Lists are made anew for every call, so they are found by what they hold."""
    return (ops.name, *map(_size, matrices))


def _list_picker(ops: Operators, tensors: ListTensors) -> Callable[[Operands], Operands]:
    return lambda given: tensors(given[0] or (), ops.gather(*given[_WORDS:]))


def _list_others(given: Operands) -> Operands:
    """What else a call with lists depends on: how many tensors each of them has, kinds of numbers, and words."""
    found: list[Any] = []
    for value in given:
        kind = type(value)
        if kind is list:
            found.append(kinds(value) if value and type(value[0]) is float else len(value))
        else:
            found.append(Tensor if kind in PLAIN else value)
    return tuple(found)
