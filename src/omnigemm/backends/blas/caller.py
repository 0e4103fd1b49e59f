"""What torch has in force for the thread that calls: device, stream, capture, and how exact products must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Caller:
    """Private functions of torch, because the public ones cost microseconds a call."""

    device: Callable[[], int]
    stream: Callable[[int], int]  # of a device, as the driver's address
    capturing: Callable[[], bool]  # whether the current stream's work goes into a CUDA graph


def cuda_caller() -> Caller:
    """On a torch without CUDA, one that will never be asked."""
    inner: Any = torch._C
    nothing = lambda *_: 0  # noqa: E731
    return Caller(
        getattr(inner, "_cuda_getDevice", nothing),
        getattr(inner, "_cuda_getCurrentRawStream", nothing),
        inner._cuda_isCurrentStreamCapturing,
    )


def tf32_allowed() -> bool:
    """As torch's own products see it. Reading `allow_tf32` is an error once somebody used torch's newer switch."""
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:  # before torch 2.9
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(precision("cuda", "matmul") == "tf32")


def _allowed(getter: Callable[[], Any]) -> bool:
    """Newer versions of torch answer with a second switch, about split K, which is the library's choice here."""
    found = getter()
    return bool(found[0] if isinstance(found, tuple) else found)


_REDUCTIONS: dict[torch.dtype, Callable[[], Any]] = {
    torch.float16: torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch.bfloat16: torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
}


def may_reduce_in_16_bits(dtype: torch.dtype) -> bool:
    """Whether partial sums of a split K may be added up in the type of the result."""
    return dtype in _REDUCTIONS and _allowed(_REDUCTIONS[dtype])
