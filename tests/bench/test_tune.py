"""benchmarks/tune.py: that the table in the tree is one that it makes, and what it says without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from omnigemm.backends.cuda import choice, measured
from omnigemm.backends.cuda import tune as package
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.backends.cuda.tune import FEW
from omnigemm.core.problem import Problem

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
        *((n, k) for _, n, k in tune.LARGE),
    }
    assert {row["m"] for row in rows} <= {*tune.SPANS, *(m for m, _, _ in tune.LARGE)}
    for row in rows:
        assert (row["m_from"], row["m_to"]) == tune.SPANS.get(row["m"], tune.LAST)
        assert ("constant_weights" in row) == (row["m"] <= FEW)


def test_the_driver_writes_a_table_and_all_times(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast = Config(True, 1, 1, 8, 8), Config(True, 1, 1, 8, 6)

    def made_up(problem: Problem, count: int, within: float) -> package.Times:
        assert (count, within) == (7, 1.2)
        return package.Times(problem, "block", (slow, fast), {(slow, False): 5.0, (fast, False): 4.0})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("omnigemm.backends.cuda.gpu.of", lambda _: KNOWN["h200"])
    monkeypatch.setattr(package, "measure", made_up)
    where = {"out": tmp_path, "weight": ["64x256"], "kind": ["block"], "candidates": 7, "random_shapes": 0}
    tune.main(**where, rows=[1, 4096])
    table = json.loads((tmp_path / "nvidia-h200.json").read_text())
    spans = [(row["m"], row["m_from"], row["m_to"]) for row in table["rows"]]
    assert spans == [(1, 1, 8), (1, 1, 8), (4096, 2049, 1 << 30)]
    assert [measured.fault(row) for row in table["rows"]] == [None] * 3
    assert "Method: " in table["about"]
    times = json.loads((tmp_path / "nvidia-h200-times.json").read_text())
    assert [one["us"] for one in times] == [5.0, 4.0] * 2
    told = capsys.readouterr().out
    assert "block 1x64x256: 4.0, 4.0; 1.25; " in told
    assert "4 times; the model's choice took 1.250x the best's in the mean, 1.25x at worst" in told
    tune.main(**where, rows=[64], keep=tmp_path / "nvidia-h200.json")
    kept = json.loads((tmp_path / "nvidia-h200.json").read_text())["rows"]
    assert [row["m"] for row in kept] == [1, 1, 64, 64, 4096]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(FILE), "--out", str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 1
    assert "there is no NVIDIA GPU on this machine" in run.stderr
    assert not list(tmp_path.iterdir())
