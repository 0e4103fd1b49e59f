"""What a compiled kernel is made of, and the key that names it: content only, never times or places."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from . import nvrtc

FORMAT = 1  # of a cache entry; a change makes every old entry a stranger
PACKAGE_HEADERS = str(Path(__file__).parents[3] / "kernels")
BASE_OPTIONS = ("--ptxas-options=-v",)  # registers and spills are read from the log

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?")
# The key could not see what these bring in, or they contradict `arch`.
_REFUSED = ("-I", "--include-path", "-include", "--pre-include", "--gpu-architecture", "-arch", "--use-pch", "-use-pch")


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One kernel: CUDA C++ that defines `name`, the architecture, and NVRTC's options in their order.

    Headers are included by their path below `header_root`, also from one another.
    """

    name: str
    source: str
    arch: str
    options: tuple[str, ...] = ()
    header_root: str = PACKAGE_HEADERS

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"KernelSpec: name is {self.name!r}, expected a C identifier")
        if not _ARCH.fullmatch(self.arch):
            raise ValueError(f"KernelSpec: arch is {self.arch!r}, expected one such as 'sm_90a'")
        if not isinstance(self.options, tuple) or not all(isinstance(one, str) for one in self.options):
            raise ValueError(f"KernelSpec: options is {self.options!r}, expected a tuple of strings")
        for one in self.options:
            if one.startswith(_REFUSED):
                raise ValueError(f"KernelSpec: options holds {one!r}, which the cache key cannot account for")

    @property
    def ingredients(self) -> dict[str, Any]:
        """All that the key is made of; texts as their SHA-256."""
        return {
            "format": FORMAT,
            "name": self.name,
            "source": digest(self.source.encode()),
            "headers": _headers_digest(self.header_root),
            "options": [*BASE_OPTIONS, *self.options],
            "arch": self.arch,
            "nvrtc": nvrtc.version(),
        }

    @property
    def key(self) -> str:
        """SHA-256 of the ingredients, as 64 hexadecimal digits."""
        return _key(self)

    @property
    def entry(self) -> str:
        """The name of its folder in the cache."""
        return f"{self.name[:100]}-{self.key[:16]}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@cache
def headers(root: str) -> dict[str, bytes]:
    """The headers below a folder by relative path; read once per process."""
    base = Path(root)
    return {path.relative_to(base).as_posix(): path.read_bytes() for path in sorted(base.rglob("*.cuh"))}


@cache
def _headers_digest(root: str) -> str:
    return digest(json.dumps(sorted((name, digest(data)) for name, data in headers(root).items())).encode())


# Outside the instance, so that a pickled spec does not carry a key made with another NVRTC.
@lru_cache(maxsize=4096)
def _key(spec: KernelSpec) -> str:
    return digest(json.dumps(spec.ingredients, sort_keys=True).encode())
