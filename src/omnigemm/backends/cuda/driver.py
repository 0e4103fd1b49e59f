"""The NVIDIA driver through cuda.bindings, and its answers as results or as our errors."""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any

from ...core.errors import DeviceError


@cache
def bindings() -> Any:
    """The driver's functions, started. DeviceError where there is no driver."""
    # Asked without the bindings first: where there is no driver, some of their calls never return.
    _library()
    driver = importlib.import_module("cuda.bindings.driver")
    checked(driver.cuInit(0), "the NVIDIA driver does not start")
    return driver


@cache
def version() -> int:
    """Which CUDA the driver knows, 13020 for 13.2; it need not be started for that. DeviceError where there is none."""
    found = ctypes.c_int()
    status = _library().cuDriverGetVersion(ctypes.byref(found))
    if status != 0:
        raise DeviceError(f"the NVIDIA driver does not tell its version ({status})")
    return found.value


def in_words(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"the NVIDIA driver is not installed: {error}") from error


def checked(answer: tuple[Any, ...], what: str) -> Any:
    """What a call returned, or an error with the driver's name and code for it."""
    if int(answer[0]) != 0:
        raise DeviceError(f"{what}: {answer[0].name} ({int(answer[0])})")
    return answer[1] if len(answer) > 1 else None
