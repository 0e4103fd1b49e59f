"""A vendor's library, opened: its functions with their C types, and its statuses as our errors."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping, Set
from ctypes import POINTER, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from ...core.errors import DeviceError, LayoutError, OmniGemmError, UnsupportedError
from .discovery import runtime_candidates
from .vendors import LT_OPTIONAL, OPTIONAL, Lt, Vendor

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
        self._symbols, self._process = symbols, os.getpid()
        self.capturing: Callable[[], bool] = lambda: False  # whoever makes handles knows better
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

    def end(self, name: str, *arguments: Any) -> None:
        """The same for what is destroyed whatever comes of it: at exit, the driver may be gone already. After a fork,
        what the parent made is the parent's. Destroying a handle waits for the device, which spoils a capture: one that
        is collected in a capture is destroyed at exit."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(OmniGemmError, RuntimeError):  # torch's, if the device is broken
            if name == "destroy" and self.capturing():
                atexit.register(self.end, name, *arguments)
            else:
                self.call(name, *arguments)

    def means(self, status: int, *names: str) -> bool:
        return self.vendor.statuses.get(status) in names

    def failure(self, name: str, status: int, hint: str = "") -> OmniGemmError:
        """A status as an error of ours, with the vendor's name and code."""
        meaning = self.vendor.statuses.get(status, "an unknown status")
        kind = {"INVALID_VALUE": LayoutError, "NOT_SUPPORTED": UnsupportedError}.get(meaning, DeviceError)
        return kind(f"{self.vendor.title}: {self._symbols[name]} answers {meaning} ({status}){hint}")


class Library(Functions):
    """The vendor's first library, which every product can go through."""

    def __init__(self, vendor: Vendor, path: str) -> None:
        # First: the library may need it, and finds what is loaded already.
        wait, problems = _wait(vendor, path) if vendor.wait else (None, "")
        super().__init__(vendor, path, vendor.symbols, _TYPES, OPTIONAL)
        if problems:
            raise DeviceError(f"{vendor.title}: {vendor.wait} is not found, {problems}")
        self._wait = wait

    @property
    def waits(self) -> bool:
        """Whether the vendor asks for that before memory is given back."""
        return self._wait is not None

    def wait(self, stream: int) -> None:
        """Until the stream is done, where the vendor asks for it. The runtime's codes are not the library's."""
        status = 0 if self._wait is None else self._wait(stream)
        if status:
            raise DeviceError(f"{self.vendor.title}: {self.vendor.wait} answers {status}")


class LtLibrary(Functions):
    """The vendor's second library, which chooses apart from running."""

    def __init__(self, vendor: Vendor, lt: Lt, path: str) -> None:
        optional = frozenset({"version"}) if lt.chooses else LT_OPTIONAL
        super().__init__(vendor, path, lt.symbols, _LT_TYPES, optional)
        self.title, self.types, self.chooses = lt.title, lt.types, lt.chooses
        if self.has("version"):
            version = self.function("version")
            version.restype = c_size_t  # the only function that does not answer a status
            self.title = f"{lt.title} {version()}"


def _open(vendor: Vendor, path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise DeviceError(f"{vendor.title}: {path} cannot be loaded: {error}") from error


def _wait(vendor: Vendor, path: str) -> tuple[Any, str]:
    """The function that waits, or where it is not."""
    problems = []
    for one in runtime_candidates(vendor, path):
        try:
            function = getattr(ctypes.CDLL(one), str(vendor.wait))
        except (OSError, AttributeError) as error:
            problems.append(f"{one}: {error}")
            continue
        function.argtypes, function.restype = [c_void_p], c_int
        return function, ""
    return None, "; ".join(problems) or "no runtime is named"
