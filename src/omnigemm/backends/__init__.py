"""The backends this version has, most specific first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ..core.dispatch import Backend


@cache
def backends() -> Sequence[Backend]:
    from .blas import BlasBackend
    from .cpu import CpuBackend
    from .cuda import CudaBackend

    return (CudaBackend(), BlasBackend(), CpuBackend())
