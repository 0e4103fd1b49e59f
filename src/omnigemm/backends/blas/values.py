"""Values as C functions take them. Those that are made once cost a call a third of what numbers cost it."""

from __future__ import annotations

import ctypes
from typing import Any

address = ctypes.c_void_p.from_param
_ONE, _ZERO = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))


def number(value: float) -> Any:
    """A factor as the library takes it: by its address on the host."""
    return _ONE if value == 1.0 else _ZERO if value == 0.0 else ctypes.byref(ctypes.c_float(value))
