"""Quantisers, and 4-bit weights from every checkpoint format."""

from __future__ import annotations

from .fused import rms_norm_quantize, swiglu_quantize
from .int4_weight import Int4Weight
from .quantizers import quantize_fp8, quantize_int4, quantize_int8

__all__ = ["Int4Weight", "quantize_fp8", "quantize_int4", "quantize_int8", "rms_norm_quantize", "swiglu_quantize"]
