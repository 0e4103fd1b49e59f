"""Kernels' headers compiled for the processor by the system's C++ compiler."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "src" / "omnigemm" / "kernels"
EMULATOR = Path(__file__).parent / "backends" / "cuda" / "emulator"  # stands in for some of their headers


def library(folder: Path, source: str, *options: str, only_gcc: bool = False, emulated: bool = False) -> ctypes.CDLL:
    """A shared library of that source. Without a compiler the test is skipped, but not in CI, which must have one."""
    compiler = shutil.which("g++") or (None if only_gcc else shutil.which("clang++"))
    if compiler is None:
        missing = f"no {'g++' if only_gcc else 'C++ compiler'} on this machine"
        if os.environ.get("CI"):
            pytest.fail(f"{missing}: CI must have one")
        pytest.skip(missing)
    (folder / "source.cpp").write_text(source)
    paths = [f"-I{EMULATOR}"] * emulated + [f"-I{KERNELS}"]
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *options, *paths, str(folder / "source.cpp")]
    shared = [_emulator(compiler)] * emulated
    subprocess.run([*command, *shared, "-o", str(folder / "built.so")], check=True)
    return ctypes.CDLL(str(folder / "built.so"))


@cache
def _emulator(compiler: str) -> str:
    """What of the emulator does not depend on a kernel: a library that all of them share."""
    folder = Path(tempfile.mkdtemp(prefix="omnigemm-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sources = [str(path) for path in sorted(EMULATOR.glob("*.cpp"))]
    options = "-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", f"-I{EMULATOR}", f"-I{KERNELS}"
    built = str(folder / "libemulator.so")
    subprocess.run([compiler, *options, *sources, "-o", built], check=True)
    return built
