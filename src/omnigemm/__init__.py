"""Every matrix product that a language model runs, at every precision it runs it, behind one call."""

from .core.dispatch import Explanation, explain, plan
from .core.errors import (
    CompileError,
    DeviceError,
    DTypeError,
    LayoutError,
    OmniGemmError,
    SettingsError,
    ShapeError,
    UnsupportedError,
    WorkspaceError,
)
from .core.plan import Plan
from .core.problem import Problem
from .core.settings import settings
from .ops import (
    fp8_gemm,
    gemm,
    grouped_gemm,
    grouped_gemm_contiguous,
    grouped_gemm_k_contiguous,
    grouped_gemm_masked,
    int4_gemm,
    int8_gemm,
)
from .quant import Int4Weight, quantize_fp8, quantize_int4, quantize_int8, rms_norm_quantize, swiglu_quantize

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "Int4Weight",
    "LayoutError",
    "OmniGemmError",
    "Plan",
    "Problem",
    "SettingsError",
    "ShapeError",
    "UnsupportedError",
    "WorkspaceError",
    "explain",
    "fp8_gemm",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_contiguous",
    "grouped_gemm_k_contiguous",
    "grouped_gemm_masked",
    "int4_gemm",
    "int8_gemm",
    "plan",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "rms_norm_quantize",
    "settings",
    "swiglu_quantize",
]
