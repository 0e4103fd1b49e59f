from __future__ import annotations

import pytest
import torch

from omnigemm.bench import timing


class Clock:
    """A clock that only moves when a call is made."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_turns_copies_and_warm_up(clock):
    log: list[str] = []

    def call(name: str, us: int) -> timing.Call:
        def run() -> None:
            log.append(name)
            clock.now += us * 1000

        return run

    contenders = {"a": [call("a0", 10), call("a1", 30)], "b": [call("b0", 7)]}
    times = timing.measure(contenders, seconds=0.0, min_rounds=4)
    assert log[:3] == ["a0", "a1", "b0"]  # every copy once, untimed
    assert log[3:] == ["a0", "b0", "a1", "b0", "a0", "b0", "a1", "b0"]
    assert times["a"].us == 20.0  # the median of 10, 30, 10, 30
    assert (times["b"].us, times["b"].rounds) == (7.0, 4)


def test_budget_ends_the_rounds(clock):
    def slow() -> None:
        clock.now += 1_000_000

    assert timing.measure({"a": [slow]}, seconds=0.05, min_rounds=2)["a"].rounds == 50
    assert timing.measure({"a": [slow]}, seconds=9.0, max_rounds=12)["a"].rounds == 12
    assert timing.measure({"a": [slow]}, seconds=0.0, min_rounds=1)["a"].us == 1000.0


def test_median_ignores_a_disturbance(clock):
    lengths = iter([5, 5, 5, 900, 5, 5])

    def call() -> None:
        clock.now += next(lengths) * 1000

    taken = timing.measure({"a": [call]}, seconds=0.0, min_rounds=5)["a"]
    assert (taken.us, taken.low_us, taken.high_us) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("nbytes", "footprint", "memory", "copies"),
    [
        (50_000_000, 50_000_000, 64 << 30, 6),  # 300 MB reach 256
        (500_000_000, 500_000_000, 64 << 30, 3),  # never fewer than three
        (500_000_000, 500_000_000, 8 << 30, 2),  # unless memory is short
        (500_000_000, 500_000_000, 1 << 30, 1),
        (50_000_000, 400_000_000, 8 << 30, 2),  # prepared copies count
        (1000, 1000, 64 << 30, timing.MAX_COPIES),
        (0, 0, 64 << 30, timing.MAX_COPIES),
    ],
)
def test_copies(monkeypatch, nbytes, footprint, memory, copies):
    monkeypatch.setattr(timing, "physical_bytes", lambda: memory)
    assert timing.copies_needed(nbytes, footprint) == copies


def test_copies_are_memory_of_their_own():
    weight = torch.ones(4)
    contender = timing.Contender(lambda w: w, [weight], 16, 16)
    copies = timing.rotate(contender, cold_bytes=64)
    assert len(copies) == 4
    assert len({one[0].data_ptr() for one in copies}) == 4
    assert [call() for call in timing.bind(contender, copies)] == copies


def test_method_names_its_numbers():
    assert "256 MB" in timing.method()
    assert "7 MB" in timing.method(7_000_000)
