"""Results that carry no gradients back: those in `out`, and those of plans. Of others torch knows, and warns."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedError
from ._operation import Operands


def look_for_gradients(name: str, operands: Operands, out: Any, depth: int) -> None:
    """While they are recorded: refuse an `out` that requires them, and warn of operands whose gradients end here.

    `depth`: how many calls up the user's line is."""
    if not torch.is_grad_enabled():
        return
    if any(one.requires_grad for one in _tensors(out)):
        raise UnsupportedError(f"{name}: out requires gradients, expected one that does not, or torch.no_grad()")
    if any(one.requires_grad for one in _tensors(operands)):
        words = f"omnigemm: {name}: an operand requires gradients, and none come back from out= and from plans"
        warnings.warn(f"{words}; torch.no_grad() says that none are wanted", UserWarning, stacklevel=depth)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
