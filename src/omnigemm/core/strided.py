"""Tensors that kernels can read: elements in memory, found by strides."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import LayoutError


def need_strided(op: str, **tensors: Tensor | None) -> None:
    """Of the other kinds some have no strides, some no memory, and none is what kernels read."""
    for name, one in tensors.items():
        if one is not None and (one.layout is not torch.strided or one.is_nested):
            kind = "nested" if one.is_nested else str(one.layout).removeprefix("torch.").removeprefix("_")
            raise LayoutError(f"{op}: {name} is a {kind} tensor, expected a dense one with strides")
