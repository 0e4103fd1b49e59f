"""Lint, format, types and the size of files are part of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=lambda command: " ".join(command),
)
def test_tool_is_content(command: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_kernels_are_formatted() -> None:
    files = sorted(str(path) for path in (ROOT / "src").rglob("*.cuh"))
    assert files
    command = [str(Path(sys.executable).with_name("clang-format")), "--dry-run", "-Werror", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_files_hold_one_idea() -> None:
    long = {str(path): lines for path in (ROOT / "src").rglob("*.py") if (lines := path.read_text().count("\n")) > 600}
    assert not long
