"""Before any product runs, keep oneDNN off an AMX that faults and would end the process (see backends/cpu/isa.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnigemm.backends.cpu.isa import shield_onednn
from omnigemm.backends.cuda import measured
from omnigemm.core.settings import cache_dir

shield_onednn()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated", action="store_true", help="run the GPU's tests on an emulator, where they can")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_table_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What somebody tuned here must not decide what tests see. Those that have a cache folder of their own use it."""
    usual, root = cache_dir(), measured.root
    monkeypatch.setattr(measured, "root", lambda: tmp_path / "no tables" if cache_dir() == usual else root())
