"""Lint, format, types and the size of files are part of the tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What makes a tensor by torch's defaults, which are the user's, unless it is told a dtype and a device.
MAKERS = {"arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
# Those here name a device only: they count, or have no memory.
NEED_LESS = ("backends/cuda/groups.py", "ops/_results.py")


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=lambda command: " ".join(command),
)
def test_tool_is_content(command: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_kernels_are_formatted() -> None:
    emulator = ROOT / "tests" / "backends" / "cuda" / "emulator"
    files = sorted(
        str(path) for where in (ROOT / "src", emulator) for path in where.rglob("*.c*") if path.suffix != ".c"
    )
    assert files
    command = [str(Path(sys.executable).with_name("clang-format")), "--dry-run", "-Werror", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_files_hold_one_idea() -> None:
    long = {str(path): lines for path in (ROOT / "src").rglob("*.py") if (lines := path.read_text().count("\n")) > 600}
    assert not long


def test_new_tensors_say_their_dtype_and_device() -> None:
    package, found = ROOT / "src" / "omnigemm", []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        wanted = {"device"} if name.startswith(NEED_LESS) else {"dtype", "device"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and not wanted <= {one.arg for one in node.keywords}:
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found
