"""NVRTC through cuda.bindings, which cuda-core brings. Loaded at the first use."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ....core.dispatch import Support
from ....core.errors import CompileError

MISSING = "cuda.bindings, which calls NVRTC, is not installed: pip install 'omnigemm[cuda]'"


@cache
def _library() -> tuple[Any, str, str]:
    """The bindings, the version of NVRTC, and why they cannot be used (empty when they can)."""
    try:
        bindings = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        return None, "", MISSING
    try:
        status, major, minor = bindings.nvrtcVersion()
    except Exception as error:  # the loader of the bindings has its own kinds, which differ between versions
        return None, "", f"NVRTC cannot be loaded: {' '.join(str(error).split())}"
    if int(status) != 0:
        return None, "", f"NVRTC does not give its version: {status.name}"
    return bindings, _with_build(f"{major}.{minor}"), ""


def _with_build(version: str) -> str:
    """NVRTC tells no build number, but two builds may differ in code; the wheel knows it."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            build = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if build.startswith(version + "."):
            return build
    return version


def available() -> Support:
    """Whether kernels can be compiled here, and with which NVRTC, or why not."""
    _, found, reason = _library()
    return Support(not reason, reason or f"NVRTC {found}")


def version() -> str:
    _, found, reason = _library()
    if reason:
        raise CompileError(f"kernels cannot be compiled: {reason}")
    return found


@cache
def architectures() -> tuple[int, ...]:
    """What it compiles for: 75, 80 and so on; none where it cannot be used."""
    lib, _, _ = _library()
    if lib is None:
        return ()
    status, found = lib.nvrtcGetSupportedArchs()
    return tuple(found) if int(status) == 0 else ()


def run(source: str, headers: Mapping[str, bytes], options: Sequence[str]) -> tuple[bytes | None, str]:
    """The cubin, or None, and the log. The bindings release the GIL while NVRTC works."""
    version()
    lib, _, _ = _library()
    names = [name.encode() for name in headers]
    status, program = lib.nvrtcCreateProgram(source.encode(), b"kernel.cu", len(names), list(headers.values()), names)
    if int(status) != 0:
        return None, f"nvrtcCreateProgram: {status.name}"
    try:
        (status,) = lib.nvrtcCompileProgram(program, len(options), [one.encode() for one in options])
        _, size = lib.nvrtcGetProgramLogSize(program)
        buffer = bytearray(size)
        lib.nvrtcGetProgramLog(program, buffer)
        log = bytes(buffer).rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            return None, log or f"nvrtcCompileProgram: {status.name}"
        _, size = lib.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        (status,) = lib.nvrtcGetCUBIN(program, cubin)
        return (bytes(cubin), log) if int(status) == 0 and size else (None, f"{log}\nno cubin: {status.name}")
    finally:
        lib.nvrtcDestroyProgram(program)
