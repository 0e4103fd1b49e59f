"""The backend of whatever library with the cuBLAS ABI the machine has: NVIDIA's, Kunlun's, and others by a record.

Without a word, it is the cuBLAS that torch itself uses; OMNIGEMM_BLAS_LIBRARY names another vendor or another file.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ...core.dispatch import Kernel, Support
from ...core.errors import OmniGemmError
from ...core.plan import Plan
from ...core.problem import Problem
from . import estimate
from .caller import Caller, cuda_caller
from .discovery import candidates, lt_candidates
from .gemm import Gemm
from .grouped import Grouped
from .library import Library, LtLibrary
from .matrices import LIMIT
from .vendors import VENDORS, Vendor

VARIABLE = "OMNIGEMM_BLAS_LIBRARY"
_FLOATS = ("fp16", "bf16", "fp32")
_ROWS = ("grouped_gemm_contiguous", "grouped_gemm_masked", "grouped_gemm_k_contiguous")
_OPS = ("gemm", "grouped_gemm", *_ROWS)
# Our own gemm is taken where it is ahead by more than the times of one run differ from the next one's.
_DOUBT = 0.97


@dataclasses.dataclass(frozen=True)
class BlasKernel:
    """A vendor's product, and groups of them."""

    name: str
    vendor: Vendor
    product: Gemm
    groups: Grouped
    without_lt: str = ""  # why the vendor's second library is not used, if it has one

    def supports(self, problem: Problem, device: torch.device) -> Support:
        words = [f"{self.vendor.title} ({self.product.library.path})"]
        if problem.op == "gemm" or not self._at_once(problem):
            words += self.way()
        if problem.op != "gemm":
            words.append("one call for all groups" if self._at_once(problem) else "one call for each group")
        awaited = {
            "alpha and beta": problem.device_factors,
            "sizes": problem.device_sizes,
            "the rows of each group": problem.op in _ROWS,
        }
        words += [f"after waiting for the device, to read {what}" for what, there in awaited.items() if there]
        if problem.a_dtype == "bf16" and not self.vendor.native_bf16:
            words.append("bf16 through fp32 copies")
        return Support(True, ", ".join(words), waits=any(awaited.values()))

    def way(self) -> list[str]:
        """Which library single products go through, where a vendor has two."""
        if self.product.lt is not None:
            library = self.product.lt.library
            return [f"by {library.title} ({library.path}) where it has an algorithm"]
        return [f"without {self.without_lt}"] if self.without_lt else []

    def cost(self, problem: Problem, device: torch.device) -> float:
        if problem.op == "grouped_gemm":
            return estimate.list_seconds(problem, self._at_once(problem))
        if problem.op == "gemm":
            return _DOUBT * estimate.seconds(problem)
        return estimate.seconds(problem, 1 if self._at_once(problem) else max(1, problem.groups))

    def _at_once(self, problem: Problem) -> bool:
        mean = problem.flops / max(1, problem.groups)
        return self.groups.in_one_call(problem.a_dtype, problem.out_dtype, mean)

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        parts: dict[str, Any] = {"workspace_bytes": self._workspace(problem), "uses_torch": False}
        if problem.op in _ROWS:
            return Plan(problem, device, "blas", self.name, self.groups.rows(problem.op), **parts)
        if problem.op == "gemm":
            parts["bind_addresses"] = self.product.bind_addresses
        run = self.product if problem.op == "gemm" else self.groups
        return Plan(problem, device, "blas", self.name, run, bind=run.bind, **parts)

    def _workspace(self, problem: Problem) -> int:
        """What a call takes from torch's allocator besides the handle's own: fp32 copies where bf16 needs them."""
        if problem.a_dtype != "bf16" or self.vendor.native_bf16:
            return 0
        shapes = problem.shapes or ((problem.m, problem.n, problem.k),)
        return 4 * problem.batch * max(m * k + k * n + m * n for m, n, k in shapes)


def takes(vendor: Vendor, problem: Problem) -> Support:
    """Whether the vendor's library has such a product at all."""
    if problem.op not in _OPS:
        return Support(False, f"a BLAS has {', '.join(_OPS)}, not {problem.op}")
    if problem.a_dtype not in _FLOATS or problem.b_dtype != problem.a_dtype:
        operands = f"{problem.a_dtype} x {problem.b_dtype}"
        return Support(False, f"a BLAS multiplies {', '.join(_FLOATS)} with the same type, not {operands}")
    if problem.out_dtype not in (problem.a_dtype, "fp32"):
        return Support(False, f"{vendor.title} has no {problem.out_dtype} result of {problem.a_dtype}")
    if problem.batch > LIMIT:
        return Support(False, f"batch is {problem.batch}, expected at most {LIMIT}")
    return Support(True, vendor.title)


class BlasBackend:
    """One vendor's library. Without arguments, the one that the environment names, or else NVIDIA's."""

    name = "blas"

    def __init__(self, vendor: Vendor | None = None, path: str | None = None, caller: Caller | None = None) -> None:
        self._given = vendor, path
        self._caller = caller
        self._kernel: BlasKernel | None = None
        self._refusal: Support | None = None
        self._opening = threading.Lock()

    def available(self) -> Support:
        if self._kernel is None and self._refusal is None:
            with self._opening:  # threads that raced for it would have pools of handles of their own
                if self._kernel is None and self._refusal is None:
                    self._open()
        if self._refusal is not None:
            return self._refusal
        assert self._kernel is not None
        words = [f"{self._kernel.vendor.title} from {self._kernel.product.library.path}", *self._kernel.way()]
        return Support(True, ", ".join(words))

    def _open(self) -> None:
        """Once, whatever comes of it."""
        vendor, path = self._given if self._given[0] is not None else _named()
        if vendor is None:
            if not torch.cuda.is_available():
                self._refusal = Support(
                    False,
                    f"torch finds no GPU; {VARIABLE} names the library of another vendor, as vendor or vendor:path",
                )
                return
            vendor = VENDORS["nvidia"]
        reasons = []
        for one in [path] if path else candidates(vendor):
            try:
                library, caller = Library(vendor, one), self._caller or cuda_caller()
                second, missing = _lt(library, named=path is not None)
                product = Gemm(library, caller, second)
                self._kernel = BlasKernel(vendor.name, vendor, product, Grouped(product), missing)
                return
            except OmniGemmError as error:
                reasons.append(str(error))
        where = f"${vendor.home} does not hold {' or '.join(vendor.libraries)}"
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
        if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
            return Support(False, f"there is no {device}: torch finds {count} GPUs")
        return takes(vendor, problem)

    def kernels(self, problem: Problem, device: torch.device) -> Sequence[Kernel]:
        return () if self._kernel is None else (self._kernel,)


def _lt(library: Library, named: bool) -> tuple[LtLibrary | None, str]:
    """The vendor's second library, or why it is not used."""
    vendor, lt = library.vendor, library.vendor.lt
    if lt is None:
        return None, ""
    reasons = []
    for one in lt_candidates(vendor, lt, library.path, named):
        try:
            return LtLibrary(vendor, lt, one), ""
        except OmniGemmError as error:
            reasons.append(str(error))
    return None, f"{lt.title}: {'; '.join(reasons) or f'there is none beside {library.path}'}"


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
