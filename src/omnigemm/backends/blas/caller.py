"""What torch has in force for the thread that calls: device, stream, capture, and how exact products must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
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


def _tf32() -> Callable[[], Any]:
    """As torch's own products see it. Reading `allow_tf32` is an error once somebody used torch's newer switch."""
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:  # before torch 2.9
        return lambda: torch.backends.cuda.matmul.allow_tf32
    return partial(precision, "cuda", "matmul")


# What torch's switches answer for a type of operands, as it comes: whether it changed costs less to see than what it
# means. Of fp32, whether TF32 will do; else, whether partial sums of a split K may be added up in the result's type.
switches: dict[torch.dtype, Callable[[], Any]] = {
    torch.float32: _tf32(),
    torch.float16: torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch.bfloat16: torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
}


def allows(answer: Any) -> bool:
    """What an answer means. Newer versions of torch have the name of a precision, and for 16 bits a second switch,
    about split K, which is the library's choice here."""
    return bool(answer[0]) if isinstance(answer, tuple) else answer in (True, "tf32")
