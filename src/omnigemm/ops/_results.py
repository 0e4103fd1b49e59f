"""New tensors for results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.fresh import empty_strided_cuda
from .checks import OutSpec


def allocate(spec: OutSpec | Sequence[OutSpec]) -> Any:
    if isinstance(spec, OutSpec):
        return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in spec]


def allocator(spec: OutSpec | Sequence[OutSpec]) -> Callable[[], Any]:
    """`allocate(spec)`, prepared."""
    specs: Sequence[OutSpec] = [spec] if isinstance(spec, OutSpec) else spec
    device = specs[0].device
    if device.type != "cuda" or empty_strided_cuda is None:
        return lambda: allocate(spec)
    index, current_device = device.index, torch._C._cuda_getDevice
    forms = [(tuple(one.shape), torch.empty(one.shape, device="meta").stride(), one.dtype) for one in specs]
    form = forms[0]
    if isinstance(spec, OutSpec) and torch.cuda.device_count() == 1:  # the current one, then
        return partial(empty_strided_cuda, *form)

    def fresh() -> Tensor:
        made: Tensor = empty_strided_cuda(*form) if current_device() == index else allocate(spec)
        return made

    def all_fresh() -> list[Tensor]:
        made: list[Tensor] = (
            [empty_strided_cuda(*one) for one in forms] if current_device() == index else allocate(spec)
        )
        return made

    return fresh if isinstance(spec, OutSpec) else all_fresh
