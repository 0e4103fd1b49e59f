"""The GPU that a command is asked about, which need not be here."""

from __future__ import annotations

import torch

from ..backends.cuda import gpu
from . import output


def named_gpu(where: str, name: str) -> gpu.Gpu:
    found = gpu.KNOWN.get(name.lower())
    if found is None:
        raise output.CommandError(f"{where}: gpu is {name!r}, expected one of {', '.join(gpu.KNOWN)}")
    return found


def usual_gpu() -> gpu.Gpu:
    """The first one here, or the one that the kernels were measured on."""
    return gpu.of(0) if torch.cuda.is_available() else gpu.KNOWN["h200"]
