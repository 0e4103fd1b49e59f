"""What an operation is: functions on its operands, and the two operators that torch knows it by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.problem import Problem

Operands = tuple[Any, ...]
ListTensors = Callable[[Any, Operands], tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Operation:
    """`check(operands, out, out_dtype)` validates metadata; `describe(operands, result)` names the problem.

    `collect` turns the public arguments (without out, out_dtype and backend) into operands; `distinct` refuses an
    `out` that shares memory with an input. The operand at `may_be_out` may be `out` itself. Operations on lists say
    what is in them: `tensors(out, operands)` has all tensors, results first.
    """

    name: str
    check: Callable[[Operands, Any, torch.dtype | None], Any]
    describe: Callable[[Operands, Any], Problem]
    collect: Callable[..., Operands]
    distinct: Callable[[Operands, Any], None]
    may_be_out: int | None = None
    tensors: ListTensors | None = None


def tensors_in(*values: Any) -> list[Tensor]:
    """Those among values and in the lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


class Operators(NamedTuple):
    """An operation in torch.library: one operator that returns and one that writes `out`."""

    name: str  # the operation's, or one for each form of its weight
    operation: Operation
    gather: Callable[..., Operands]  # from the arguments of the schema to operands
    function: Any
    writer: Any
