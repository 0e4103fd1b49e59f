"""Every environment variable and every switch, in one place.

`settings(...)` is a context manager; it holds for the calling thread (or async task) until it is left.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import re
from contextlib import ContextDecorator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .errors import SettingsError, UnsupportedError

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
            raise SettingsError(f"settings: weight_cache_mib is {limit!r}, expected None or a whole number >= 0")
        for name in ("deterministic", "constant_weights"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SettingsError(f"settings: {name} is {value!r}, expected True or False")
        if self.blas_library is not None and not isinstance(self.blas_library, str):
            raise SettingsError(
                f"settings: blas_library is {self.blas_library!r}, expected None, vendor or vendor:path"
            )


def check_backend(where: str, name: object) -> None:
    if not isinstance(name, str) or name not in BACKEND_NAMES:
        raise UnsupportedError(f"{where}: backend is {name!r}, expected None or one of {', '.join(BACKEND_NAMES)}")


def _from_environment() -> Settings:
    backend = os.environ.get("OMNIGEMM_BACKEND") or None
    if backend is not None:
        check_backend("OMNIGEMM_BACKEND", backend)
    text = os.environ.get("OMNIGEMM_WEIGHT_CACHE_MIB", "")
    # Not isdigit, which takes digits of all scripts; and no machine has more than 15 of them.
    if text and not re.fullmatch("[0-9]{1,15}", text):
        raise SettingsError(f"OMNIGEMM_WEIGHT_CACHE_MIB is {text!r}, expected a whole number of MiB")
    level = os.environ.get("OMNIGEMM_LOG", "")
    if level not in ("", "off", "debug"):
        raise SettingsError(f"OMNIGEMM_LOG is {level!r}, expected debug or off")
    found = Settings(
        backend,
        _flag("OMNIGEMM_DETERMINISTIC"),
        int(text) if text else None,
        _flag("OMNIGEMM_CONSTANT_WEIGHTS"),
        os.environ.get("OMNIGEMM_BLAS_LIBRARY") or None,
    )
    if level == "debug":  # only now, when nothing is wrong: what fails is read again at the next call
        _start_log()
    return found


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise SettingsError(f"{name} is {value!r}, expected 0 or 1")
    return value == "1"


_handlers: dict[str, logging.Handler] = {}


def _start_log() -> None:
    """The library logs to the logger 'omnigemm'; the variable shows it to people who configure no logging."""
    made = logging.StreamHandler()
    made.setFormatter(logging.Formatter("omnigemm: %(message)s"))
    logger = logging.getLogger("omnigemm")
    # Threads may come here at once: one handler wins, and a logger, which has its own lock, takes it only once.
    logger.addHandler(_handlers.setdefault("debug", made))
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

    def __enter__(self) -> Settings:
        changed = dataclasses.replace(current(), **self._changes)
        _entered.set((*_entered.get(), (self, active())))
        _active.set(changed)
        return changed

    def __exit__(self, *_: object) -> None:
        entered = _entered.get()
        for i in reversed(range(len(entered))):
            if entered[i][0] is self:
                _entered.set(entered[:i])  # with all that was entered since: whoever leaves last, nothing stays
                _active.set(entered[i][1])
                return

    def __call__(self, function: Any) -> Any:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            expected = "expected a function that returns or a coroutine function; `with` works inside of a generator"
            raise SettingsError(f"settings: {function.__qualname__} is a generator function, {expected}")
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def inside(*arguments: Any, **named: Any) -> Any:
            with self:  # until it is done, and not only until it is made
                return await function(*arguments, **named)

        return inside


# Who was entered here, and what was in force before. Each thread and task has its own, so one object serves many.
_entered: ContextVar[tuple[tuple[settings, Settings | None], ...]] = ContextVar("omnigemm_entered", default=())


def home() -> Path | None:
    """The user's own folder. None for one who has none, as in containers that run under a bare number."""
    if os.environ.get("HOME") == "":  # which would mean the root of the file system
        return None
    try:
        found = Path.home()
    except RuntimeError:
        return None
    return found if found.is_absolute() else None


def cache_dir() -> Path:
    """Where compiled kernels and measured tables are kept: an absolute path. The folder need not exist."""
    chosen = os.environ.get("OMNIGEMM_CACHE_DIR")
    if chosen:
        return _chosen("OMNIGEMM_CACHE_DIR", chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore any other
        return Path(base, "omnigemm")
    own = home()
    # Without a home, below a folder that everybody can write to: nothing in it is used unless it is ours alone.
    return own / ".cache" / "omnigemm" if own is not None else Path("/tmp", f"omnigemm-{os.geteuid()}")


def _chosen(name: str, text: str) -> Path:
    if text.split("/", 1)[0] == "~" and home() is None:
        raise SettingsError(
            f"{name} is {text!r}, but there is no home folder; expected a path without ~, or HOME to be set"
        )
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{name} is {text!r}, expected a folder: there is no such user") from error
    try:
        return path if path.is_absolute() else _below_here(text)
    except OSError as error:
        raise SettingsError(f"{name} is {text!r}, but the working folder that it starts from is gone") from error


@functools.cache
def _below_here(text: str) -> Path:
    """A relative path, from where the process was when it was first asked for: it does not move when that changes."""
    return Path.cwd() / text
