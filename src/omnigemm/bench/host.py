"""Host time of eager GPU calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

CALLS, TURNS = 300, 15


def in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of a warm call: many without waiting, the median of some turns. Contenders take turns, for a
    processor's speed changes from second to second. One call before each turn is not timed: a call is warm if it is
    like the last one with its weight and rows, and that may have been another contender's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + TURNS):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken = (time.perf_counter() - start) / CALLS * 1e6
            if turn:  # the first one warms up
                times[name].append(taken)
    return {name: round(statistics.median(taken), 2) for name, taken in times.items()}
