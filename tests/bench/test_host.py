"""Host times: contenders take turns; the first turn, and the first call of each, do not count."""

from __future__ import annotations

import pytest
import torch

from omnigemm.bench import host


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "TURNS", 3)
    clock = iter(range(1000))
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock) * 1e-6)
    seen: list[str] = []
    times = host.in_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")})
    assert seen == ["a", "wait", "a", "a", "b", "wait", "b", "b"] * 4
    assert times == {"a": 0.5, "b": 0.5}
