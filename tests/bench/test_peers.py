"""Building the peers that are compiled for benchmarks: what can be known without nvcc and a GPU."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
BUILD = runpy.run_path(str(PEERS / "build.py"))


def test_configs_are_numbered_without_gaps() -> None:
    """They are compiled one by one, and callers find them by their place in the list."""
    found = BUILD["configs"]((PEERS / "cutlass_int8.cu").read_text())
    assert found == list(range(len(found)))
    assert len(found) > 10


def build(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PEERS / "build.py"), *map(str, words)], capture_output=True, text=True, timeout=60
    )


def test_a_folder_without_the_headers_is_named(tmp_path: Path) -> None:
    run = build("--cutlass", tmp_path, "--out", tmp_path / "lib.so")
    assert run.returncode == 1
    assert run.stderr.strip() == f"--cutlass {tmp_path}: expected the folder that holds cutlass/cutlass.h"


@pytest.mark.parametrize("nvcc", ["false", "no-such-nvcc"])
def test_a_compiler_that_fails_is_reported(tmp_path: Path, nvcc: str) -> None:
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "cutlass.h").touch()
    run = build("--cutlass", tmp_path, "--out", tmp_path / "lib.so", "--nvcc", nvcc, "--jobs", 2)
    assert run.returncode == 1
    assert nvcc in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "lib.so").exists()
