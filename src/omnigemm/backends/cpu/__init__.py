"""The backend that is always there: exact semantics, on the fastest kernels that PyTorch has for a processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.dispatch import Support
from ...core.problem import OPERANDS, Problem
from .dense import KERNELS as GEMM_KERNELS
from .fp8 import KERNELS as FP8_KERNELS
from .grouped import dense_op, in_groups
from .int4 import KERNELS as INT4_KERNELS
from .int8 import KERNELS as INT8_KERNELS
from .kernel import CpuKernel


class CpuBackend:
    name = "cpu"

    def available(self) -> Support:
        return Support(True, "always there")

    def kernels(self, problem: Problem, device: torch.device) -> Sequence[CpuKernel]:
        dense: dict[str, tuple[CpuKernel, ...]] = {
            "gemm": GEMM_KERNELS,
            "int8_gemm": INT8_KERNELS,
            "fp8_gemm": FP8_KERNELS,
            "int4_gemm": INT4_KERNELS,
        }
        return dense.get(problem.op) or in_groups(problem.op, dense[dense_op(problem)])

    def supports(self, problem: Problem, device: torch.device) -> Support:
        if device.type != "cpu":
            return Support(False, f"the tensors are on {device}; this backend computes on cpu tensors")
        if problem.a_dtype not in OPERANDS[problem.op]:
            return Support(False, f"{problem.op} takes {', '.join(OPERANDS[problem.op])}, not {problem.a_dtype}")
        answers = [kernel.supports(problem, device) for kernel in self.kernels(problem, device)]
        return next((answer for answer in answers if answer), Support(False, "; ".join(a.reason for a in answers)))
