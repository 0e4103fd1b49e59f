"""What torch has in force for the thread that calls: device, stream, capture, and how exact products must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

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
    # Makes memory that is kept, where no pool of torch's that the caller is using gets it.
    apart: Callable[[Callable[[], Tensor | None]], Tensor | None] = lambda make: make()
    uncaptured: int | None = None  # the stream that no graph can capture, so that it need not be asked about


def caller_of(vendor: Vendor) -> Caller:
    asks = vendor.asked
    stream, address = _of_torch(asks.stream), asks.stream_address
    return Caller(
        _of_torch(asks.device),
        stream if address is None else lambda index: int(getattr(stream(index), address)),
        _of_torch(asks.capturing, lambda: False),  # who cannot tell has no graphs
        _of_torch(f"{vendor.device_type}.device"),
        _in_a_thread if vendor.device_type == "cuda" else Caller.apart,
        # CUDA refuses to begin a capture on its null stream, torch's default one, and to join it to another's.
        0 if vendor.device_type == "cuda" else None,
    )


def _in_a_thread(make: Callable[[], Tensor | None]) -> Tensor | None:
    """For the caller's device and stream. A pool (`torch.cuda.use_mem_pool`, or that of torch.compile's graphs) gets
    what one thread allocates, and hands the memory of what is kept there to others, or waits for it to end."""
    index, stream = torch.cuda.current_device(), torch.cuda.current_stream()

    def made() -> Tensor | None:
        with torch.cuda.device(index), torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(made).result()


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
