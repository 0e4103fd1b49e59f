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


def _answer(getter: Callable[[], Any]) -> Callable[[], bool]:
    """Newer versions of torch answer with a second switch, about split K, which is the library's choice here."""
    return (lambda: getter()[0]) if isinstance(getter(), tuple) else getter


# Whether partial sums of a split K may be added up in the type of the result.
may_reduce_in_16_bits: dict[torch.dtype, Callable[[], bool]] = {
    torch.float16: _answer(torch._C._get_cublas_allow_fp16_reduced_precision_reduction),
    torch.bfloat16: _answer(torch._C._get_cublas_allow_bf16_reduced_precision_reduction),
}

_fp32_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def tf32_allowed() -> bool:
    """As torch's own products see it. Reading `allow_tf32` is an error once somebody used torch's newer switch."""
    if _fp32_precision is None:  # before torch 2.9
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return _fp32_precision("cuda", "matmul") == "tf32"
