"""benchmarks/gemm.py: which of its measurements count. The times need a GPU."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

GEMM = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "gemm.py"))
CALLS = dict.fromkeys(("ours", "torch.mm", "blas"))


def times(monkeypatch: pytest.MonkeyPatch, *measured: tuple[float, float, float]) -> tuple[dict[str, float], int]:
    """What counts of these, and how many were asked for."""
    left = list(measured)

    def in_turns(calls: Any, copies: Any) -> dict[str, float]:
        return dict(zip(calls, left.pop(0), strict=True))

    monkeypatch.setitem(GEMM["until_level"].__globals__, "in_turns", in_turns)
    found = GEMM["until_level"](CALLS, [0], ("blas", "torch.mm"))
    return found, len(measured) - len(left)


def test_what_is_level_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert times(monkeypatch, (5.0, 10.1, 10.0), (0.0, 0.0, 0.0)) == ({"ours": 5.0, "torch.mm": 10.1, "blas": 10.0}, 1)


@pytest.mark.parametrize("torch_mm", [10.3, 9.7])
def test_what_is_not_is_measured_three_times(monkeypatch: pytest.MonkeyPatch, torch_mm: float) -> None:
    """Whichever of the two was faster, and for all contenders."""
    found = times(monkeypatch, (5.0, torch_mm, 10.0), (7.0, 9.0, 8.0), (6.0, 8.5, 9.0), (0.0, 0.0, 0.0))
    assert found == ({"ours": 6.0, "torch.mm": 9.0, "blas": 9.0}, 3)
