"""The order in which graphs of contenders are replayed; their times need a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from omnigemm.bench import graph


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(graph, "_captured", captured)
    monkeypatch.setattr(graph, "_elapsed", elapsed)
    times = graph.in_turns({name: contender(name) for name in took}, [0], replays=4)
    assert "".join(seen) == "abcacbabcacb"
    assert times == {"a": 12.5, "b": 2.5, "c": 0.5}  # medians, of two calls each


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_each_comes_after_each_of_the_others_as_often(names: str) -> None:
    turns = [name for order in graph.rounds(names, 6) for name in order]
    after = Counter(pairwise(turns))
    for one in names:
        counts = [after[other, one] for other in names if other != one]
        assert max(counts) - min(counts) <= 1  # nobody comes before the first one
        assert after[one, one] == 0


@pytest.mark.parametrize(("names", "count"), [("a", 1), ("ab", 1), ("abc", 5), ("abcdefg", 6), ("abcdefg", 2)])
def test_all_take_part_in_every_round(names: str, count: int) -> None:
    orders = list(graph.rounds(names, count))
    assert len(orders) == count
    assert all(sorted(order) == list(names) for order in orders)


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


def test_others_are_measured_in_turns_with_ours_alone_if_they_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def missing(_: object) -> None:
        raise ImportError("no module of that name")

    def ours(_: object) -> None: ...

    def fast(_: object) -> None: ...

    def slow(_: object) -> None: ...

    took = {fast: 1.004, slow: 3.0}
    asked: list[list[object]] = []

    def in_turns(contenders, copies, seconds, replays):
        asked.append(list(contenders.values()))
        assert (copies, seconds, replays) == ([7], graph.PAIR_SECONDS, graph.PAIR_REPLAYS)
        beside = max(took.get(call, 0.0) for call in contenders.values())  # ours takes longer beside a slow one
        return {name: took.get(call, 2.0 + beside) for name, call in contenders.items()}

    monkeypatch.setattr(graph, "in_turns", in_turns)
    found = graph.pairs(ours, {"fast": fast, "missing": missing, "slow": slow}, [7])
    assert found == {"fast": [3.0, 1.0], "slow": [5.0, 3.0]}
    assert asked == [[ours, fast], [ours, slow]]


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    seen: list[object] = []

    def called(copy: int) -> None:
        seen.append((copy, gc.isenabled()))
        if fails and not gc.isenabled():
            raise ValueError("not in a capture")

    made = SimpleNamespace(
        capture_begin=lambda: seen.append("begin"),
        capture_end=lambda: seen.append("end"),
        replay=lambda: seen.append("replay"),
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(graph, "_elapsed", lambda work: work() or 10.0)
    with pytest.raises(ValueError, match="not in a capture") if fails else contextlib.nullcontext():
        assert graph._captured(called, [1, 2], 15e-6) == (made, 4)
    assert gc.isenabled()
    before = [(1, True), (2, True)] * 2 + ["begin"]
    assert seen == before + ([(1, False), "end"] if fails else [(1, False), (2, False)] * 2 + ["end", "replay"])
