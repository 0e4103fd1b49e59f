"""The backend of whatever library with the cuBLAS ABI the machine has: NVIDIA's, Kunlun's, and others by a record.

Without a word, it is the cuBLAS that torch itself uses, or the library below a vendor's own variable;
OMNIGEMM_BLAS_LIBRARY and settings(blas_library=..) name another vendor or another file.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...core.dispatch import Kernel, Support
from ...core.dtypes import BY_NAME
from ...core.errors import OmniGemmError
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.settings import current
from . import estimate
from .caller import Caller, caller_of
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
            words += self.way(problem.a_dtype)
        if problem.op != "gemm":
            words.append("one call for all groups" if self._at_once(problem) else "one call for each group")
            if self._at_once(problem) and "mixed" in (problem.a_layout, problem.b_layout):
                words[-1] += ", or for each if a matrix has no dense dimension"
        awaited = {
            "alpha and beta": problem.device_factors,
            "sizes": problem.device_sizes,
            "the rows of each group": problem.op in _ROWS,
        }
        words += [f"after waiting for the device, to read {what}" for what, there in awaited.items() if there]
        return Support(True, ", ".join(words), waits=any(awaited.values()))

    def way(self, kind: str | None = None) -> list[str]:
        """Which library single products of a type go through, where a vendor has two; and whether by copies."""
        lt, product = self.vendor.lt, self.product
        words = []
        if lt is not None and (kind is None or kind in lt.types):
            some = "" if lt.types == self.vendor.types else f"{', '.join(lt.types)} "
            if product.lt is None:
                words.append(f"without {self.without_lt}")
            else:
                library = product.lt.library
                words.append(f"{some}by {library.title} ({library.path}) where it has an algorithm")
        for one in _FLOATS if kind is None else (kind,):
            if not product.by_handles(one):
                words.append(f"{'else ' if product.by_lt(one) else ''}{one} through fp32 copies")
        return words

    def cost(self, problem: Problem, device: torch.device) -> float:
        if problem.op == "grouped_gemm":
            return estimate.list_seconds(problem, self._at_once(problem))
        if problem.op == "gemm":
            return _DOUBT * estimate.seconds(problem)
        return estimate.seconds(problem, 1 if self._at_once(problem) else max(1, problem.groups))

    def _at_once(self, problem: Problem) -> bool:
        # As the launch has it: of a list, empty groups do not count.
        groups = sum(0 not in shape for shape in problem.shapes) if problem.shapes else problem.groups
        if "strided" in (problem.a_layout, problem.b_layout):
            return False
        return self.groups.in_one_call(problem.a_dtype, problem.out_dtype, problem.flops / max(1, groups))

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        parts: dict[str, Any] = {"workspace_bytes": self._workspace(problem), "uses_torch": False}
        if problem.op in _ROWS:
            return Plan(problem, device, "blas", self.name, self.groups.rows(problem.op), **parts)
        if problem.op == "gemm":
            parts["bind_addresses"] = self.product.bind_addresses
        run = self.product if problem.op == "gemm" else self.groups
        return Plan(problem, device, "blas", self.name, run, bind=run.bind, **parts)

    def _workspace(self, problem: Problem) -> int:
        """The most that a call takes from torch's allocator besides what is kept, as far as the problem tells: fp32
        copies of a type that handles have no products of, and copies of operands without a dense dimension. Of a list,
        each group's go back before the next."""
        kind = problem.a_dtype
        wide = 0 if self.product.by_handles(kind) else 4
        narrow = 0 if wide and not self.product.by_lt(kind) else BY_NAME[kind].itemsize
        a, b = (narrow * (way in ("strided", "mixed")) for way in (problem.a_layout, problem.b_layout))
        shapes = problem.shapes or ((problem.m, problem.n, problem.k),)
        return problem.batch * max((wide + a) * m * k + (wide + b) * k * n + wide * m * n for m, n, k in shapes)


def takes(vendor: Vendor, problem: Problem) -> Support:
    """Whether the vendor's library has such a product at all."""
    if problem.op not in _OPS:
        return Support(False, f"a BLAS has {', '.join(_OPS)}, not {problem.op}")
    if problem.a_dtype not in _FLOATS or problem.b_dtype != problem.a_dtype:
        operands = f"{problem.a_dtype} x {problem.b_dtype}"
        return Support(False, f"a BLAS multiplies {', '.join(_FLOATS)} with the same type, not {operands}")
    if problem.a_dtype not in vendor.types and "fp32" not in vendor.types:
        return Support(False, f"{vendor.title} has no {problem.a_dtype} products")
    if problem.out_dtype not in (problem.a_dtype, "fp32"):
        return Support(False, f"{vendor.title} has no {problem.out_dtype} result of {problem.a_dtype}")
    if problem.batch > LIMIT:
        return Support(False, f"batch is {problem.batch}, expected at most {LIMIT}")
    return Support(True, vendor.title)


class BlasBackend:
    """One vendor's library. Without arguments, the one that settings name, or else that of the machine."""

    name = "blas"

    def __init__(self, vendor: Vendor | None = None, path: str | None = None, caller: Caller | None = None) -> None:
        self._given = vendor, path
        self._caller = caller
        self._opened: dict[str | None, BlasKernel | Support] = {}  # by what settings name
        self._opening = threading.Lock()

    def available(self) -> Support:
        found = self._found()
        if isinstance(found, Support):
            return found
        words = [f"{found.vendor.title} from {found.product.library.path}", *found.way()]
        return Support(True, ", ".join(words))

    def _found(self) -> BlasKernel | Support:
        """What is there, or why there is nothing: opened once, whatever comes of it."""
        named = None if self._given[0] is not None else current().blas_library
        found = self._opened.get(named)
        if found is None:
            with self._opening:  # threads that raced for it would have pools of handles of their own
                found = self._opened.get(named)
                if found is None:
                    found = self._opened[named] = self._open(named)
        return found

    def _open(self, named: str | None) -> BlasKernel | Support:
        vendor, path = self._given
        vendors = [vendor] if vendor is not None else list(_present())
        if named is not None:
            name, _, path = named.partition(":")
            if name not in VENDORS:
                expected = f"vendor or vendor:path with one of {', '.join(VENDORS)} as the vendor"
                return Support(False, f"{VARIABLE}, or blas_library, is {named!r}, expected {expected}")
            vendors = [VENDORS[name]]
        reasons = []
        for one in vendors:
            file = None
            for file in [path] if path else candidates(one):
                try:
                    return self._kernel(one, file, named=bool(path))
                except OmniGemmError as error:
                    reasons.append(str(error))
            if file is None:
                reasons.append(f"{one.title}: ${one.home} does not hold {' or '.join(one.libraries)}")
        if not vendors:
            homes = " or ".join(one.home for one in VENDORS.values() if one.home is not None)
            reasons.append(
                f"torch finds no GPU; {VARIABLE} names the library of another vendor, as vendor or vendor:path, or "
                f"{homes} its folder"
            )
        return Support(False, "; ".join(reasons))

    def _kernel(self, vendor: Vendor, path: str, named: bool) -> BlasKernel:
        library = Library(vendor, path)
        second, missing = _lt(library, named)
        product = Gemm(library, self._caller or caller_of(vendor), second)
        return BlasKernel(vendor.name, vendor, product, Grouped(product), missing)

    def supports(self, problem: Problem, device: torch.device) -> Support:
        found = self._found()
        if isinstance(found, Support):
            return found
        vendor = found.vendor
        if device.type != vendor.device_type:
            return Support(
                False, f"the tensors are on {device}; {vendor.title} computes on {vendor.device_type} tensors"
            )
        if (device.index or 0) >= (count := getattr(torch, device.type).device_count()):
            return Support(False, f"there is no {device}: torch finds {count} GPUs")
        return takes(vendor, problem)

    def kernels(self, problem: Problem, device: torch.device) -> Sequence[Kernel]:
        found = self._found()
        return () if isinstance(found, Support) else (found,)


def _present() -> Iterator[Vendor]:
    """Vendors that need not be named: torch finds their GPUs, or their own variable is set."""
    for vendor in VENDORS.values():
        module = getattr(torch, vendor.device_type, None)
        there = os.environ.get(vendor.home) if vendor.home else module is not None and module.is_available()
        if there:
            yield vendor


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
