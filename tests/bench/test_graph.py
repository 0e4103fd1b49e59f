"""The order in which graphs of contenders are replayed; their times need a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from omnigemm.bench import graph


def test_contenders_take_turns_forth_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    took = {"a": [10.0, 30.0, 20.0, 60.0], "b": [2.0, 4.0, 6.0, 8.0], "c": [1.0] * 4}

    def captured(call, copies, *_):
        return SimpleNamespace(replay=lambda: call(copies)), 2

    def elapsed(replay) -> float:
        return took[replay()].pop(0)

    def contender(name: str):
        return lambda _: seen.append(name) or name

    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(graph, "_captured", captured)
    monkeypatch.setattr(graph, "_elapsed", elapsed)
    times = graph.in_turns({name: contender(name) for name in took}, [0], replays=4)
    assert "".join(seen) == "abccbaabccba"
    assert times == {"a": 12.5, "b": 2.5, "c": 0.5}  # medians, of two calls each


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError, ValueError, AssertionError])
def test_a_peer_that_refuses_is_not_here(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("for the GPU"))

    def refuses(_: object) -> None:
        raise error("not this shape")

    assert not graph.runs(refuses, 0)
    assert waited == ["for the GPU"]  # where a failure of the GPU itself would come up


def test_a_peer_that_runs_is_here_and_a_mistake_of_ours_is_seen() -> None:
    assert graph.runs(lambda copy: copy, 0)
    with pytest.raises(TypeError, match="argument"):
        graph.runs(lambda: None, 0)
