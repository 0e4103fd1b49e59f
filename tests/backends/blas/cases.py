"""What the tests of the blas backend share: a backend on a stand-in, products by it, and what they should give."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.blas import BlasBackend, BlasKernel
from omnigemm.backends.blas.caller import Caller
from omnigemm.backends.blas.pool import Pool
from omnigemm.backends.blas.vendors import VENDORS
from omnigemm.core.problem import describe

CPU = torch.device("cpu")
NVIDIA = dataclasses.replace(VENDORS["nvidia"], device_type="cpu", workspace_bytes=4096)
KUNLUN = dataclasses.replace(VENDORS["kunlun"], device_type="cpu", workspace_bytes=4096)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
STREAM = 0x70
LAYOUTS = ["rows", "columns", "wide", "scattered"]
# Written out here: the table that errors are made from is what tests look at.
STATUS_NAMES = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
    99: "an unknown status",
}


def error_of(status: int) -> type[omnigemm.OmniGemmError]:
    return {7: omnigemm.LayoutError, 15: omnigemm.UnsupportedError}.get(status, omnigemm.DeviceError)


def caller(stream: Callable[[], int] = lambda: STREAM, capturing: Callable[[], bool] = lambda: False) -> Caller:
    """As torch would have it on device 0."""
    return Caller(lambda: 0, lambda index: stream(), capturing)


def opened(standin: Any, vendor: Any = NVIDIA, by: Caller | None = None) -> BlasBackend:
    return BlasBackend(vendor, str(standin.path), by or caller())


def kernel(backend: BlasBackend) -> BlasKernel:
    answer = backend.available()
    assert answer, answer.reason
    (found,) = backend.kernels(describe("gemm", m=1, n=1, k=1), CPU)
    assert isinstance(found, BlasKernel)
    return found


def pool(backend: BlasBackend) -> Pool:
    return kernel(backend).product.pool(CPU)


def product(backend: BlasBackend, out: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    c, alpha, beta = rest or (None, 1.0, 0.0)
    kernel(backend).product(out, a, b, c, alpha, beta)
    return out


def twos(backend: BlasBackend) -> None:
    """The smallest product that can go wrong."""
    assert torch.equal(product(backend, torch.empty(2, 2), torch.ones(2, 2), torch.ones(2, 2)), torch.full((2, 2), 2.0))


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same values with other strides."""
    if how == "columns":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "wide":  # rows of a wider matrix
        wide = torch.full((*x.shape[:-1], x.size(-1) + 3), float("nan"), dtype=x.dtype)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if how == "scattered":  # no dimension is dense
        wide = torch.full((*x.shape[:-1], 2 * x.size(-1)), float("nan"), dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x.contiguous()


def exact(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    result = alpha * torch.matmul(a.double(), b.double())
    return result if c is None or beta == 0.0 else result + beta * c.double()


def products(log: list[str]) -> list[str]:
    """The lines of products, each a dictionary's worth of words."""
    return [line for line in log if line.startswith("gemm")]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def word(line: str, name: str) -> str:
    return next(part for part in line.split() if part.startswith(f"{name}=")).split("=")[1]
