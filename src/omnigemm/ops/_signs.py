"""Negated views: torch keeps a sign apart from memory (the imaginary part of a conjugate), and kernels read memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.errors import LayoutError
from ..core.weights import Int4Parts
from ._operation import Operands


def with_signs(name: str, operands: Operands, out: Any) -> Operands:
    """Operands whose signs are in memory, copied where they were not; an `out` must be written as it is."""
    if any(isinstance(one, Tensor) and one.is_neg() for one in (out if isinstance(out, (list, tuple)) else [out])):
        raise LayoutError(f"{name}: out is a negated view, expected memory that is written as it is")
    return tuple(map(_resolved, operands))


def _resolved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.resolve_neg()
    if isinstance(value, Int4Parts):
        return Int4Parts(*map(_resolved, value))
    return [_resolved(one) for one in value] if isinstance(value, (list, tuple)) else value
