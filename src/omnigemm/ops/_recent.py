"""Plain eager calls without torch's dispatcher, and calls like one before without even a look at their signature.

The dispatcher costs two microseconds, and changes nothing where nobody watches, no tensor is of a subclass, and no
gradients are recorded. A signature costs more: instead, the last call with a weight and number of rows (of lists: with
such sizes) is found by these, and one check of all its tensors tells whether this is the same again (`_again.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..core.watched import PLAIN, dispatch_modes, function_modes, functions_watched, watched
from ._again import ANEW, WORDS, Again, Apart, Like, again
from ._operation import ListTensors, Operands, Operators
from ._run import call_for, kinds, launch
from .overlap import reach


class RecentCalls:
    """By operator, weight and elements of the first operand, of which a weight's calls have as many as they have rows;
    or by operator and sizes. Emptied rather than left to grow."""

    LIMIT = 65536  # tensors of all calls, of which lists have many

    def __init__(self) -> None:
        self.by_place: dict[tuple[Any, ...], Again] = {}
        self._tensors = 0

    def remember(self, place: tuple[Any, ...], again: Again, tensors: int) -> None:
        if place not in self.by_place:
            if self._tensors + tensors > self.LIMIT:
                self.clear()
            self._tensors += tensors
        self.by_place[place] = again

    def clear(self) -> None:
        self.by_place.clear()
        self._tensors = 0


recent_calls = RecentCalls()
_by_place = recent_calls.by_place  # the same dictionary for good

# torch.compile's check that tensors are what they were: one call for all of them. It also compares what torch's
# dispatcher would see here and now, so a tracer or a transform does not pass; modes may.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

# Found once: looking each of them up costs as much as calling it. The first knows only of Dynamo, which sees it as
# true; whatever else compiles, or exports, does it with modes.
_traced, _is_grad_enabled, _size = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled, Tensor.size


def repeated(name: str, first: Any, weight: Any, given: Operands) -> Any:
    """Run a call like the last one with its weight and number of rows, or answer ANEW: then it must be looked at.

    Public functions ask this before anything else, with the operator's name. What is given is (out, out_dtype, backend,
    first, weight, ..), all as it is.
    """
    # First: nobody who looks must see what was remembered.
    if _traced() or dispatch_modes() or (function_modes() and functions_watched()):
        return ANEW
    try:
        found = _by_place[name, id(weight), first.numel()]
    except (KeyError, AttributeError, TypeError):  # unknown, or not even a tensor
        return ANEW
    return found(given)


def repeated_list(name: str, given: Operands) -> Any:
    """The same for arguments that are lists, of matrices at least."""
    if _traced() or dispatch_modes() or (function_modes() and functions_watched()):
        return ANEW
    try:
        found = _by_place[_list_place(name, given[WORDS])]
    except (KeyError, TypeError):  # unknown, or with sizes that are no numbers
        return ANEW
    return found(given)


def shortcut(ops: Operators, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Run a call without torch's dispatcher and remember it, or answer ANEW if the dispatcher must see it."""
    if watched():
        return ANEW
    operation = ops.operation
    given = (out, out_dtype, backend, *arguments)
    places = None
    if operation.tensors is None:
        places = [i for i, one in enumerate(given) if type(one) in PLAIN]
        others = [i for i in range(len(given)) if i not in places]
        if out is not None and type(out) not in PLAIN:
            return ANEW
        if any(i >= WORDS and given[i] is not None and type(given[i]) not in (float, int) for i in others):
            return ANEW
        pick, rest = _picker(places), _picker(others)
        picked = pick(given)
    else:
        pick, rest = _list_picker(ops, operation.tensors), _list_others
        picked = pick(given)
        if not PLAIN.issuperset(map(type, picked)):
            return ANEW
    gradients = any(one.requires_grad for one in picked)
    if (gradients and _is_grad_enabled()) or any(one.is_neg() for one in picked):  # signs that are not in memory yet
        return ANEW
    operands = ops.gather(*arguments)
    # An out says its type itself.
    found = call_for(operation, operands, out, out_dtype if out is None else None, backend)
    result = launch(operation, found, operands, out)
    if _TensorGuards is not None:
        like = Like(places, pick, _guard(picked), _guard_onto(ops, given), rest, rest(given), gradients)
        apart = Apart(0, ()) if found.launch_at is None else _apart(ops, given)
        made = again(ops, found, like, apart, numbers=tuple(one for one in arguments if type(one) is float))
        first = arguments[0]
        place = _list_place(ops.name, first) if operation.tensors else (ops.name, id(arguments[1]), first.numel())
        recent_calls.remember(place, made, len(picked))
    return result


def _onto(ops: Operators, given: Operands) -> int | None:
    """The place of the operand that is `out` itself."""
    place = ops.operation.may_be_out
    there = None if place is None else WORDS + place
    return there if there is not None and given[0] is not None and given[there] is given[0] else None


def _apart(ops: Operators, given: Operands) -> Apart:
    out, itself = given[0], (0, _onto(ops, given))
    if out is None:
        return Apart(0, ())
    tensors = [i for i, one in enumerate(given) if type(one) in PLAIN]
    return Apart(reach(out), tuple((at, reach(given[i])) for at, i in enumerate(tensors) if i not in itself))


def _guard_onto(ops: Operators, given: Operands) -> Callable[..., bool] | None:
    itself = _onto(ops, given)
    if itself is None:
        return None
    return _guard(tuple(one for i, one in enumerate(given) if i != itself and type(one) in PLAIN))


def _guard(tensors: Operands) -> Callable[..., bool]:
    """Whether tensors are like these. Torch's guard refuses one that comes twice, such as a C that is `out` or a weight
    of several products: it gets each once, and the others are compared with it."""
    first = {id(one): i for i, one in reversed(list(enumerate(tensors)))}
    once = _picker(sorted(first.values()))
    same: Callable[..., bool] = _TensorGuards(*once(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    twice = [i for i, one in enumerate(tensors) if first[id(one)] != i]
    if not twice:
        return same
    if len(twice) == 1:
        twin, other = twice[0], first[id(tensors[twice[0]])]
        return lambda *given: given[twin] is given[other] and same(*once(given))
    firsts, twins = _picker([first[id(tensors[i])] for i in twice]), _picker(twice)
    return lambda *given: all(map(is_, firsts(given), twins(given))) and same(*once(given))


def _picker(places: Sequence[int]) -> Callable[[Operands], Operands]:
    """What is at these places, always as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda given: tuple(given[i] for i in places)


def _list_place(name: str, matrices: Sequence[Tensor]) -> tuple[Any, ...]:
    """Lists are made anew for every call, so they are found by what they hold."""
    return (name, *map(_size, matrices))


def _list_picker(ops: Operators, tensors: ListTensors) -> Callable[[Operands], Operands]:
    return lambda given: tensors(given[0] or (), ops.gather(*given[WORDS:]))


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
