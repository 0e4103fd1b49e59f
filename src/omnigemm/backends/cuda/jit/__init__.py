"""CUDA C++ to a loaded kernel: compile with NVRTC, keep the result on disk, load it. CUDA is imported late."""

from __future__ import annotations

from .cache import Result, get_or_compile, warm
from .compiler import Compiled, compile_cubin
from .loader import available, driver_fault
from .spec import KernelSpec

__all__ = ["Compiled", "KernelSpec", "Result", "available", "compile_cubin", "driver_fault", "get_or_compile", "warm"]
