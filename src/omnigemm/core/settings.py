"""Every environment variable and every switch, in one place.

`settings(...)` is a context manager; it holds for the calling thread (or async task) until it is left.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any

from .errors import UnsupportedError

# name -> (meaning, default in words). The command line and the docs print this table.
ENVIRONMENT: dict[str, tuple[str, str]] = {
    "OMNIGEMM_BACKEND": ("backend that every call uses unless it names one", "chosen per problem"),
    "OMNIGEMM_DETERMINISTIC": ("1: only kernels whose result does not depend on timing", "0"),
    "OMNIGEMM_WEIGHT_CACHE_MIB": (
        "memory for prepared copies of weights; 0 prepares them anew in every call",
        "a quarter of this machine's memory",
    ),
    "OMNIGEMM_CACHE_DIR": ("folder for compiled kernels and measured tables", "~/.cache/omnigemm"),
    "OMNIGEMM_BLAS_LIBRARY": (
        "the cuBLAS-compatible library to use: a vendor's name, with :path if it is elsewhere than usual",
        "on NVIDIA GPUs, the cuBLAS that torch uses",
    ),
    "OMNIGEMM_CONSTANT_WEIGHTS": (
        "1: no work on the GPU writes a weight shortly before it is used, so kernels may read weights early",
        "0",
    ),
    "OMNIGEMM_LOG": ("debug: print each new problem with the kernel that it got", "off"),
}

BACKEND_NAMES = ("cuda", "blas", "cpu")  # in the order of omnigemm.backends.backends()


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a call may be steered by. `weight_cache_mib=None` means a quarter of the machine's memory."""

    backend: str | None = None
    deterministic: bool = False
    weight_cache_mib: int | None = None
    constant_weights: bool = False
    blas_library: str | None = None  # vendor or vendor:path

    def __post_init__(self) -> None:
        if self.backend is not None:
            check_backend("settings", self.backend)
        limit = self.weight_cache_mib
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise ValueError(f"settings: weight_cache_mib is {limit!r}, expected None or a whole number >= 0")
        for name in ("deterministic", "constant_weights"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"settings: {name} is {value!r}, expected True or False")
        if self.blas_library is not None and not isinstance(self.blas_library, str):
            raise ValueError(f"settings: blas_library is {self.blas_library!r}, expected None, vendor or vendor:path")


def check_backend(where: str, name: str) -> None:
    if name not in BACKEND_NAMES:
        raise UnsupportedError(f"{where}: backend is {name!r}, expected None or one of {', '.join(BACKEND_NAMES)}")


def _from_environment() -> Settings:
    backend = os.environ.get("OMNIGEMM_BACKEND") or None
    if backend is not None:
        check_backend("OMNIGEMM_BACKEND", backend)
    text = os.environ.get("OMNIGEMM_WEIGHT_CACHE_MIB", "")
    if text and not text.isdigit():
        raise ValueError(f"OMNIGEMM_WEIGHT_CACHE_MIB is {text!r}, expected a whole number of MiB")
    _start_log(os.environ.get("OMNIGEMM_LOG", ""))
    return Settings(
        backend,
        _flag("OMNIGEMM_DETERMINISTIC"),
        int(text) if text else None,
        _flag("OMNIGEMM_CONSTANT_WEIGHTS"),
        os.environ.get("OMNIGEMM_BLAS_LIBRARY") or None,
    )


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}, expected 0 or 1")
    return value == "1"


def _start_log(level: str) -> None:
    """The library logs to the logger 'omnigemm'; the variable shows it to people who configure no logging."""
    if level not in ("", "off", "debug"):
        raise ValueError(f"OMNIGEMM_LOG is {level!r}, expected debug or off")
    if level == "debug":
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("omnigemm: %(message)s"))
        logger = logging.getLogger("omnigemm")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)


_active: ContextVar[Settings | None] = ContextVar("omnigemm_settings", default=None)
active = _active.get  # what `settings` has put in force here; None: nothing, and the environment holds
_base: Settings | None = None  # of the environment


def current() -> Settings:
    """The settings in force here; the environment is read at the first call, not at import."""
    changed = active()
    if changed is not None:
        return changed
    global _base
    if _base is None:
        _base = _from_environment()
    return _base


class settings(ContextDecorator):
    """Steer the calls made inside a `with` block (or a decorated function).

    >>> with omnigemm.settings(backend="cpu", deterministic=True):
    ...     y = omnigemm.gemm(a, b)
    """

    def __init__(self, **changes: Any) -> None:
        known = [field.name for field in dataclasses.fields(Settings)]
        for name in changes:
            if name not in known:
                raise TypeError(f"settings: {name!r} is not a setting, expected one of {', '.join(known)}")
        self._changes = changes
        # Checked here, so that a wrong value is reported where it was written.
        dataclasses.replace(Settings(), **changes)
        self._tokens: list[Token[Settings | None]] = []

    def __enter__(self) -> Settings:
        changed = dataclasses.replace(current(), **self._changes)
        self._tokens.append(_active.set(changed))
        return changed

    def __exit__(self, *_: object) -> None:
        _active.reset(self._tokens.pop())


def cache_dir() -> Path:
    """Where compiled kernels and measured tables are kept. The folder need not exist."""
    chosen = os.environ.get("OMNIGEMM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omnigemm"
