"""That nothing is skipped in CI because NVRTC is missing there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILING = (
    "tests/backends/cuda/test_arguments.py",
    "tests/backends/cuda/test_backend.py::test_what_is_supported_has_one_kernel_that_compiles",
    "tests/backends/cuda/test_jit_cache.py::test_second_time_is_a_hit",
    "tests/backends/cuda/test_jit_compile.py::test_unknown_option_is_a_compile_error",
    "tests/backends/cuda/test_quant_host.py::test_a_capture_that_would_compile_is_refused",
    "tests/cli/test_warm.py::test_compiles_then_finds",
)
WITHOUT = "import sys, pytest; sys.modules['cuda.bindings.nvrtc'] = None; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize(("ci", "outcome", "other"), [("1", "failed", "skipped"), ("", "skipped", "failed")])
def test_missing_nvrtc_fails_in_ci_alone(tmp_path: Path, ci: str, outcome: str, other: str) -> None:
    command = [sys.executable, "-c", WITHOUT, f"--basetemp={tmp_path / 'inner'}", "-p", "no:cacheprovider", *COMPILING]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "CI": ci}, capture_output=True, text=True)
    last = run.stdout.strip().splitlines()[-1]
    found = re.search(rf"(\d+) {outcome}", last)
    assert found is not None, run.stdout
    assert int(found[1]) >= len(COMPILING)
    assert other not in last
