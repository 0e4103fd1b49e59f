"""The operations: one file each. A call is validated here, described as a Problem, planned once and launched."""

from __future__ import annotations

import inspect
from typing import Any

from ..core.errors import OmniGemmError
from ..core.plan import Plan
from . import _plans
from ._operation import Operation
from .fp8 import FP8_GEMM, fp8_gemm
from .gemm import GEMM, gemm
from .grouped_k import GROUPED_K_CONTIGUOUS, grouped_gemm_k_contiguous
from .grouped_list import GROUPED_GEMM, grouped_gemm
from .grouped_rows import GROUPED_CONTIGUOUS, GROUPED_MASKED, grouped_gemm_contiguous, grouped_gemm_masked
from .int4 import INT4_GEMM, int4_gemm
from .int8 import INT8_GEMM, int8_gemm

OPERATIONS = {
    operation.name: operation
    for operation in (
        GEMM,
        INT8_GEMM,
        FP8_GEMM,
        INT4_GEMM,
        GROUPED_GEMM,
        GROUPED_CONTIGUOUS,
        GROUPED_MASKED,
        GROUPED_K_CONTIGUOUS,
    )
}


def run_plan(plan: Plan, operands: tuple[Any, ...], named: dict[str, Any], out: Any, workspace: Any = None) -> Any:
    operation = OPERATIONS[plan.problem.op]
    try:
        given = operation.collect(*operands, **named)
    except TypeError:
        _need_arguments(operation, operands, named)
        raise
    try:
        return _plans.run_plan(operation, plan, given, out, workspace)
    except RuntimeError as error:
        if not isinstance(error, OmniGemmError):
            operation.check(given, out, None)  # as in `_library.call`
        raise


def _need_arguments(operation: Operation, operands: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Python's error for arguments that do not fit, with the operation's name in it."""
    try:
        inspect.signature(operation.collect).bind(*operands, **named)
    except TypeError as error:
        raise TypeError(f"{operation.name}: {error}") from None


__all__ = [
    "OPERATIONS",
    "fp8_gemm",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_contiguous",
    "grouped_gemm_k_contiguous",
    "grouped_gemm_masked",
    "int4_gemm",
    "int8_gemm",
    "run_plan",
]
