"""benchmarks/tune.py: which configs become entries of a table, and that a table made so is one that is read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from omnigemm.backends.cuda import choice
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.sm90 import Config

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "tune.py"
SLOW, FAST = Config(True, 1, 1, 8, 8), Config(True, 1, 1, 8, 6, split=2, depth=4)


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_few_rows_have_an_entry_for_constant_weights(tune: ModuleType) -> None:
    took = {(SLOW, False): 5.0, (FAST, False): 4.0, (SLOW, True): 3.0, (FAST, True): 3.5}
    plain, constant = tune.entries(1, 576, 7168, "block", took)
    assert (plain["us"], plain["config"], plain["constant_weights"]) == (4.0, tune.compact(FAST), False)
    assert "early" not in plain
    assert (constant["us"], constant["config"], constant["early"]) == (3.0, tune.compact(SLOW), True)
    assert (plain["m_from"], plain["m_to"], plain["m"]) == (1, 8, 1)


def test_constant_weights_are_not_loaded_early_where_that_is_slower(tune: ModuleType) -> None:
    took = {(SLOW, False): 5.0, (FAST, False): 4.0, (FAST, True): 4.5}
    plain, constant = tune.entries(128, 576, 7168, "whole", took)
    assert plain["config"] == constant["config"] == tune.compact(FAST)
    assert plain["us"] == constant["us"] == 4.0
    assert constant["constant_weights"]
    assert "early" not in constant


def test_many_rows_have_one_entry_for_both(tune: ModuleType) -> None:
    (row,) = tune.entries(4096, 576, 7168, "block", {(SLOW, False): 5.0, (FAST, False): 4.0})
    assert "constant_weights" not in row
    assert (row["m_from"], row["m_to"]) == (2049, 1 << 30)


def test_configs_are_written_without_their_defaults(tune: ModuleType) -> None:
    assert tune.compact(SLOW) == {"swap": True, "math_groups": 1, "waves": 1, "cols": 8, "stages": 8}
    for config in (SLOW, FAST):
        assert Config(**json.loads(json.dumps(tune.compact(config)))) == config


def test_the_table_in_the_tree_is_of_this_make(tune: ModuleType) -> None:
    rows = [row for rows in choice.table(KNOWN["h200"]).values() for row in rows]
    assert {(row["n"], row["k"]) for row in rows} == {
        *(tuple(map(int, weight.split("x"))) for weight in (*tune.WEIGHTS, *tune.INT8_WEIGHTS)),
        (8192, 8192),
    }
    assert {row["m"] for row in rows} <= {*tune.SPANS, 8192}
    for row in rows:
        assert (row["m_from"], row["m_to"]) == tune.SPANS.get(row["m"], (4097, 1 << 30))
        assert ("constant_weights" in row) == (row["m"] <= tune.FEW)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(FILE), "--out", str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 1
    assert "there is no NVIDIA GPU on this machine" in run.stderr
    assert not list(tmp_path.iterdir())
