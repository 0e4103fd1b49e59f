"""The package as a user gets it: the wheel, and an import that does no work."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import omnigemm

ROOT = Path(__file__).parents[1]

PROBE = """
import subprocess, sys, torch
before = set(sys.modules)
def refuse(*_, **__): raise AssertionError("import started a process")
subprocess.Popen.__init__ = refuse
import omnigemm
print(*sorted(name.split(".")[0] for name in set(sys.modules) - before))
assert not torch.cuda.is_initialized()
assert not omnigemm.ops._run.calls
assert not omnigemm.ops._recent.recent_calls.by_place
"""


def test_import_does_no_work() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "omnigemm" in loaded
    assert not loaded & {"typer", "rich", "click", "cuda", "triton", "safetensors", "html"}


def test_public_names() -> None:
    for name in omnigemm.__all__:
        assert getattr(omnigemm, name).__doc__, f"{name} has no docstring"


def test_wheel_is_pure_and_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f"omnigemm-{omnigemm.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "omnigemm/py.typed" in names
    for kind in ("*.py", "*.cuh"):
        files = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "omnigemm").rglob(kind)}
        assert files <= set(names)
    assert not [name for name in names if name.startswith("tests")]
