"""The backend of whatever library with the cuBLAS ABI the machine has: NVIDIA's, Kunlun's, and others by a record.

Not used by itself yet: OMNIGEMM_BLAS_LIBRARY names the vendor, and the file if it is not where the vendor puts it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import torch

from ...core.dispatch import Kernel, Support
from ...core.errors import OmniGemmError
from ...core.groups import one_by_one
from ...core.plan import Plan
from ...core.problem import Problem
from .gemm import Gemm
from .library import Library, candidates
from .vendors import VENDORS, Vendor

VARIABLE = "OMNIGEMM_BLAS_LIBRARY"
_OPS = ("gemm", "grouped_gemm")


def current_stream(device: torch.device) -> int:
    """The stream that torch uses on the device."""
    if device.type == "cuda":
        return int(torch.cuda.current_stream(device).cuda_stream)
    return 0


@dataclasses.dataclass(frozen=True)
class BlasKernel:
    """A vendor's product; groups one after the other."""

    name: str
    vendor: Vendor
    product: Gemm

    def supports(self, problem: Problem, device: torch.device) -> Support:
        words = f"{self.vendor.title} ({self.product.library.path})"
        if problem.op == "grouped_gemm":
            words += ", one call for each group"
        if problem.a_dtype == "bf16" and not self.vendor.native_bf16:
            words += ", bf16 through fp32 copies"
        return Support(True, words)

    def cost(self, problem: Problem, device: torch.device) -> float:
        return 5e-6 + problem.flops / 6e14

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        launch = self.product if problem.op == "gemm" else one_by_one(self.product)
        return Plan(problem, device, "blas", self.name, launch, workspace_bytes=self._workspace(problem))

    def _workspace(self, problem: Problem) -> int:
        """What a call takes from torch's allocator besides the handle's own: fp32 copies where bf16 needs them."""
        if problem.a_dtype != "bf16" or self.vendor.native_bf16:
            return 0
        shapes = problem.shapes or ((problem.m, problem.n, problem.k),)
        return 4 * problem.batch * max(m * k + k * n + m * n for m, n, k in shapes)


def takes(vendor: Vendor, problem: Problem) -> Support:
    """Whether the vendor's library has such a product at all."""
    if problem.op not in _OPS:
        return Support(False, f"a BLAS has {' and '.join(_OPS)}, not {problem.op}")
    if problem.out_dtype not in (problem.a_dtype, "fp32"):
        return Support(False, f"{vendor.title} has no {problem.out_dtype} result of {problem.a_dtype}")
    return Support(True, vendor.title)


class BlasBackend:
    """One vendor's library. Without arguments, the one that the environment names."""

    name = "blas"

    def __init__(
        self,
        vendor: Vendor | None = None,
        path: str | None = None,
        stream_of: Callable[[torch.device], int] = current_stream,
    ) -> None:
        self._given = vendor, path
        self._stream_of = stream_of
        self._kernel: BlasKernel | None = None
        self._refusal: Support | None = None

    def available(self) -> Support:
        if self._kernel is None and self._refusal is None:
            self._open()
        if self._refusal is not None:
            return self._refusal
        assert self._kernel is not None
        return Support(True, f"{self._kernel.vendor.title} from {self._kernel.product.library.path}")

    def _open(self) -> None:
        """Once, whatever comes of it."""
        vendor, path = self._given if self._given[0] is not None else _named()
        if vendor is None:
            wanted = f"set {VARIABLE} to vendor or vendor:path, with one of {', '.join(VENDORS)} as the vendor"
            self._refusal = Support(False, f"no library is named: {wanted}")
            return
        paths = [path] if path else list(candidates(vendor))
        reasons = []
        for one in paths:
            try:
                self._kernel = BlasKernel(vendor.name, vendor, Gemm(Library(vendor, one), self._stream_of))
                return
            except OmniGemmError as error:
                reasons.append(str(error))
        where = f"${vendor.home} does not hold {' or '.join(vendor.libraries)}" if vendor.home else "nowhere to look"
        self._refusal = Support(False, "; ".join(reasons) or f"{vendor.title}: {where}")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        answer = self.available()
        if self._kernel is None:
            return answer
        vendor = self._kernel.vendor
        if device.type != vendor.device_type:
            return Support(
                False, f"the tensors are on {device}; {vendor.title} computes on {vendor.device_type} tensors"
            )
        return takes(vendor, problem)

    def kernels(self, problem: Problem, device: torch.device) -> Sequence[Kernel]:
        return () if self._kernel is None else (self._kernel,)


def _named() -> tuple[Vendor | None, str | None]:
    """The vendor and the file that the environment names; an unknown vendor is the user's to correct."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None, None
    name, _, path = text.partition(":")
    if name not in VENDORS:
        raise ValueError(
            f"{VARIABLE} is {text!r}, expected vendor or vendor:path with one of {', '.join(VENDORS)} as the vendor"
        )
    return VENDORS[name], path or None
