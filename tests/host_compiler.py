"""Kernels' headers compiled for the processor by the system's C++ compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
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
    paths: Sequence[str] = [f"-I{EMULATOR}"] * emulated + [f"-I{KERNELS}"]
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *options, *paths]
    subprocess.run([*command, str(folder / "source.cpp"), "-o", str(folder / "built.so")], check=True)
    return ctypes.CDLL(str(folder / "built.so"))
