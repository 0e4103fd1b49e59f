"""benchmarks/tune.py: that the table in the tree is one that it makes, and what it says without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from omnigemm.backends.cuda import choice
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.tune import FEW

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "tune.py"


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_in_the_tree_is_of_this_make(tune: ModuleType) -> None:
    rows = [row for rows in choice.table(KNOWN["h200"]).values() for row in rows]
    assert {(row["n"], row["k"]) for row in rows} == {
        *(tuple(map(int, weight.split("x"))) for weight in (*tune.WEIGHTS, *tune.INT8_WEIGHTS)),
        (8192, 8192),
    }
    assert {row["m"] for row in rows} <= {*tune.SPANS, 8192}
    for row in rows:
        assert (row["m_from"], row["m_to"]) == tune.SPANS.get(row["m"], tune.LAST)
        assert ("constant_weights" in row) == (row["m"] <= FEW)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(FILE), "--out", str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 1
    assert "there is no NVIDIA GPU on this machine" in run.stderr
    assert not list(tmp_path.iterdir())
