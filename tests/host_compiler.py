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
    objects = _emulator(compiler) if emulated else ()
    subprocess.run([*command, *objects, "-o", str(folder / "built.so")], check=True)
    return ctypes.CDLL(str(folder / "built.so"))


@cache
def _emulator(compiler: str) -> tuple[str, ...]:
    """What of the emulator does not depend on a kernel, compiled once."""
    folder = Path(tempfile.mkdtemp(prefix="omnigemm-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found = []
    for source in sorted(EMULATOR.glob("*.cpp")):
        found.append(str(folder / f"{source.stem}.o"))
        options = "-std=c++17", "-c", "-O2", "-fPIC", "-fvisibility=hidden", "-w", "-U_FORTIFY_SOURCE"
        paths = f"-I{EMULATOR}", f"-I{KERNELS}"
        subprocess.run([compiler, *options, *paths, str(source), "-o", found[-1]], check=True)
    return tuple(found)
