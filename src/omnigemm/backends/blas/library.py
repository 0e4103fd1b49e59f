"""A vendor's library, opened: its functions with their C types, and its statuses as our errors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Set
from ctypes import POINTER, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ...core.errors import DeviceError, LayoutError, OmniGemmError, UnsupportedError
from .vendors import OPTIONAL, STATUSES, Lt, Vendor

# Of the functions that manage handles. Products are called with arguments that are C values already: converting twenty
# of them would take longer than the rest of a call.
_TYPES: dict[str, list[Any]] = {
    "create": [POINTER(c_void_p)],
    "destroy": [c_void_p],
    "set_stream": [c_void_p, c_void_p],
    "set_workspace": [c_void_p, c_void_p, c_size_t],
    "set_math_mode": [c_void_p, c_int],
}


_SET = [c_void_p, c_int, c_void_p, c_size_t]
_LT_TYPES: dict[str, list[Any]] = {
    "create": [POINTER(c_void_p)],
    "destroy": [c_void_p],
    "version": [],
    "create_operation": [POINTER(c_void_p), c_int, c_int],
    "set_operation": _SET,
    "destroy_operation": [c_void_p],
    "create_layout": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "set_layout": _SET,
    "destroy_layout": [c_void_p],
    "create_preference": [POINTER(c_void_p)],
    "set_preference": _SET,
    "destroy_preference": [c_void_p],
    "choose": [*[c_void_p] * 7, c_int, c_void_p, POINTER(c_int)],
}


class Functions:
    """A library's functions. `call` runs one and raises what it answers; `has` tells about the optional ones."""

    def __init__(
        self, vendor: Vendor, path: str, symbols: Mapping[str, str], types: dict[str, list[Any]], optional: Set[str]
    ) -> None:
        self.vendor, self.path = vendor, path
        self._symbols = symbols
        loaded = _open(vendor, path)
        self._functions: dict[str, Any] = {}
        for name, symbol in symbols.items():
            try:
                function = loaded[symbol]  # an object of its own, whose types nobody else changes
            except AttributeError:
                if name in optional:
                    continue
                raise DeviceError(f"{vendor.title}: {path} lacks the function {symbol}") from None
            function.restype = c_int
            if name in types:
                function.argtypes = types[name]
            self._functions[name] = function

    def has(self, name: str) -> bool:
        return name in self._functions

    def function(self, name: str) -> Any:
        """The C function itself, which answers a status."""
        return self._functions[name]

    def call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise self.failure(name, status)

    def failure(self, name: str, status: int, hint: str = "") -> OmniGemmError:
        return failure(self.vendor, self._symbols[name], status, hint)


class Library(Functions):
    """The vendor's first library, which every product can go through."""

    def __init__(self, vendor: Vendor, path: str) -> None:
        super().__init__(vendor, path, vendor.symbols, _TYPES, OPTIONAL)
        self._wait = _wait(vendor, path) if vendor.wait else None

    def wait(self, stream: int) -> None:
        """Until the stream is done, where the vendor asks for that before memory is given back."""
        if self._wait is not None:
            status = self._wait(stream)
            if status:
                raise failure(self.vendor, str(self.vendor.wait), status)


class LtLibrary(Functions):
    """The vendor's second library, which chooses apart from running."""

    def __init__(self, vendor: Vendor, lt: Lt, path: str) -> None:
        super().__init__(vendor, path, lt.symbols, _LT_TYPES, frozenset({"version"}))
        self.title = lt.title
        if self.has("version"):
            version = self.function("version")
            version.restype = c_size_t  # the only function that does not answer a status
            self.title = f"{lt.title} {version()}"


def failure(vendor: Vendor, symbol: str, status: int, hint: str = "") -> OmniGemmError:
    """A status as an error of ours, with the vendor's name and code."""
    text = f"{vendor.title}: {symbol} answers {STATUSES.get(status, 'an unknown status')} ({status}){hint}"
    return {7: LayoutError, 15: UnsupportedError}.get(status, DeviceError)(text)


def _open(vendor: Vendor, path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise DeviceError(f"{vendor.title}: {path} cannot be loaded: {error}") from error


def _wait(vendor: Vendor, path: str) -> Any:
    """The function that waits, from the runtime next to the library, or wherever the loader finds it."""
    problems = []
    for name in vendor.runtime:
        beside = Path(path).parent / name
        try:
            function = getattr(ctypes.CDLL(str(beside) if beside.exists() else name), str(vendor.wait))
        except (OSError, AttributeError) as error:
            problems.append(f"{name}: {error}")
            continue
        function.argtypes, function.restype = [c_void_p], c_int
        return function
    raise DeviceError(f"{vendor.title}: {vendor.wait} is not found, {'; '.join(problems) or 'no runtime is named'}")
