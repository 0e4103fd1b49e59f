"""What torch has in force for the thread that calls: device, stream, capture, and how exact products must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ...core.errors import DeviceError
from .vendors import Vendor


@dataclasses.dataclass(frozen=True)
class Caller:
    """What a vendor's record names of torch, found once."""

    device: Callable[[], int]
    stream: Callable[[int], int]  # of a device, as the driver's address
    capturing: Callable[[], bool]  # whether the current stream's work goes into a CUDA graph
    # Makes a device the current one for a while.
    on: Callable[[int], AbstractContextManager[Any]] = lambda index: torch.cuda.device(index)


def caller_of(vendor: Vendor) -> Caller:
    asks = vendor.asked
    stream, address = _of_torch(asks.stream), asks.stream_address
    return Caller(
        _of_torch(asks.device),
        stream if address is None else lambda index: int(getattr(stream(index), address)),
        _of_torch(asks.capturing, lambda: False),  # who cannot tell has no graphs
        _of_torch(f"{vendor.device_type}.device"),
    )


def _of_torch(name: str, otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """On a torch without it, one that says so; no tensor of the type will make it."""

    def missing(*_: Any) -> Any:
        raise DeviceError(f"torch has no {name}: it is not made for this vendor's devices")

    try:
        found: Callable[..., Any] = attrgetter(name)(torch)
    except AttributeError:
        return otherwise or missing
    return found


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
