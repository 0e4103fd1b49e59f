"""`tune` on a GPU: one small weight at two numbers of rows, and that calls take what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import omnigemm
from omnigemm.backends.cuda import measured, tune
from omnigemm.backends.cuda.gpu import of
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.errors import DeviceError
from omnigemm.core.problem import describe

from .fp8_cases import close, operands, problem

N, K = 776, 1168  # that nobody else uses, so that no plan is there from before


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))


def test_plans_take_what_was_fastest_and_results_are_right() -> None:
    results = tune.tune([describe("fp8_gemm", m=m, n=N, k=K) for m in (5, 300)], count=4)
    assert [one.error for one in results] == [None, None]
    rows = json.loads((measured.root() / f"{of(0).table}.json").read_text())["rows"]
    assert [(row["m"], row.get("constant_weights")) for row in rows] == [(5, False), (5, True), (300, None)]
    for m in (5, 7, 300):  # 7 is in the span of 5
        row = next(row for row in rows if row["m_from"] <= m <= row["m_to"])
        plan = omnigemm.plan("fp8_gemm", m=m, n=N, k=K, device="cuda")
        assert Config(**plan.config) == Config(**row["config"])
        found = omnigemm.explain("fp8_gemm", m=m, n=N, k=K, device="cuda").chosen
        assert found is not None
        assert "us measured here" in found.reason
        given = operands(problem(m, N, K))
        close(omnigemm.fp8_gemm(*given[:4]), given)
    for one in results:
        assert one.times is not None
        assert 0 < one.times.us <= one.times.model_us
        assert one.times.tried[0] in {config for config, _ in one.times.took}


@pytest.mark.parametrize(
    ("kind", "n", "k"), [("int8", 264, 520), ("16", 264, 520), ("turned16", 264, 520), ("16", 100, 77)]
)
def test_every_kind_is_checked_and_measured(kind: str, n: int, k: int) -> None:
    """Also one whose rows begin at odd places."""
    made = tune.measure(tune.problem_of(kind, 40, n, k), count=2)
    assert all(us > 0 for us in made.took.values())
    assert (made.blas_us is not None) == (kind != "int8")
    assert {early for config, early in made.took if isinstance(config, Config)} >= {0, 2}
    assert all(isinstance(config, str) or (config, config.stages) in made.took for config, early in made.took if early)


def test_a_wrong_result_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tune.Bench.expected
    monkeypatch.setattr(tune.Bench, "expected", lambda bench: right(bench) * 1.02)
    (result,) = tune.tune([describe("fp8_gemm", m=5, n=N, k=K)], count=2)
    assert result.times is None
    assert "with an error of" in str(result.error)
    assert not (measured.root() / f"{of(0).table}.json").exists()


def test_nothing_is_measured_in_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(DeviceError, match="being captured"):
            tune.tune([describe("fp8_gemm", m=5, n=N, k=K)])
