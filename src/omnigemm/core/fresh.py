"""New memory, the quick way where torch has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# (shape, strides, dtype) on the current GPU: what torch.compile's own code allocates with, three microseconds less than
# torch.empty. None where torch has no such function.
empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def bytes_on(device: torch.device, size: int) -> Callable[[], Tensor]:
    """`torch.empty` of so many bytes, prepared. A GPU must be the current one whenever they are asked for."""
    if device.type == "cuda" and empty_strided_cuda is not None:
        return partial(empty_strided_cuda, (size,), (1,), torch.uint8)
    return partial(torch.empty, size, dtype=torch.uint8, device=device)
