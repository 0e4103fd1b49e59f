"""The backend of our own kernels, compiled on first use for the GPU that is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...core.dispatch import Candidate, Explanation, Kernel, Support
from ...core.problem import Problem
from . import batches, dense, gpu, groups, jit, k_groups, lists
from .gpu import Gpu

_OPS = ("fp8_gemm", "int8_gemm", "gemm")
_EXACT_K = (2**31 - 1) // (128 * 128)


class CudaBackend:
    name = "cuda"

    def available(self) -> Support:
        if not torch.cuda.is_available():
            built = torch.version.cuda
            return Support(
                False, "this torch is built without CUDA" if built is None else "torch finds no usable NVIDIA GPU"
            )
        answer = jit.available()
        if not answer:
            return answer
        if fault := jit.driver_fault():
            return Support(False, fault)
        names = ", ".join(str(gpu.of(i)) for i in range(torch.cuda.device_count()))
        return Support(True, f"{names}; {answer.reason}")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        if device.type != "cuda":
            return Support(False, f"the tensors are on {device}; this backend computes on cuda tensors")
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            return Support(False, f"there is no {device}: torch finds {count} GPUs")
        return self.supports_on(problem, gpu.of(_index(device)))

    def supports_on(self, problem: Problem, which: Gpu) -> Support:
        """The same for a GPU that need not be here."""
        known = (*_OPS, *groups.OPS, lists.OP, k_groups.OP)
        if problem.op not in known:
            return Support(False, f"this backend has kernels for {', '.join(known)} so far")
        if problem.a_dtype == "fp32":
            return Support(False, "fp32 products are the blas backend's: tensor cores would round the operands")
        if problem.a_dtype == "int8" and problem.k > _EXACT_K:
            return Support(False, f"k is {problem.k}: sums of int8 products fit in 32 bits up to k = {_EXACT_K}")
        if which.capability != (9, 0):
            major, minor = which.capability
            return Support(False, f"{which.name} is sm_{major}{minor}; the kernels here so far are for sm_90 (Hopper)")
        if problem.batch > 1 and not (answer := batches.supports(problem)):
            return answer
        if problem.op in groups.OPS and not (answer := groups.supports(problem)):
            return answer
        if problem.op == lists.OP and not (answer := lists.supports(problem)):
            return answer
        if problem.op == k_groups.OP and not (answer := k_groups.supports(problem)):
            return answer
        return Support(True, f"wgmma kernels for {which}")

    def kernels(self, problem: Problem, device: torch.device) -> Sequence[Kernel]:
        return kernels_on(problem, gpu.of(_index(device)))

    def specs(self, problem: Problem, which: Gpu) -> tuple[jit.KernelSpec, ...]:
        """The kernels that the problem needs on such a GPU, for compiling ahead."""
        if not self.supports_on(problem, which):
            return ()
        found: tuple[jit.KernelSpec, ...] = _family(problem).specs(problem, which)
        return found


def kernels_on(problem: Problem, which: Gpu) -> Sequence[Kernel]:
    found: Sequence[Kernel] = _family(problem).kernels(problem, which)
    return found


def _family(problem: Problem) -> Any:
    """The module whose kernels the operation has."""
    families = {**dict.fromkeys(groups.OPS, groups), lists.OP: lists, k_groups.OP: k_groups}
    return families.get(problem.op, dense)


def explain_on(problem: Problem, which: Gpu) -> Explanation:
    """What this backend would run on a GPU that need not be here, and the runners-up."""
    device = torch.device("cuda")
    answer = CudaBackend().supports_on(problem, which)
    if not answer:
        return Explanation(problem, device, (Candidate("cuda", "*", False, answer.reason),))
    found = []
    for kernel in kernels_on(problem, which):
        answer = kernel.supports(problem, device)
        cost = kernel.cost(problem, device) if answer else None
        found.append(Candidate("cuda", kernel.name, answer.ok, answer.reason, cost))
    usable = [i for i, one in enumerate(found) if one.ok]
    if usable:
        best = min(usable, key=lambda i: found[i].cost or 0.0)
        found[best] = dataclasses.replace(found[best], chosen=True)
    return Explanation(problem, device, tuple(found))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
