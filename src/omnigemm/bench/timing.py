"""The timing method: one for the command line, the demo and the records.

Each contender cycles through copies of its weights, so that the weights come from memory and not from a cache, as they
do in a model with many layers. Every copy is used once before the clock starts: a one-time preparation of weights is
not timed. Then the contenders take turns, one call each per round, so that noise of the machine hits all alike. The
figure is the median over the rounds.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.memory import physical_bytes

Call = Callable[[], object]

COLD_BYTES = 256_000_000  # all copies of one weight together, so that no usual cache holds them
MIN_COPIES = 3
MAX_COPIES = 128  # small weights would take thousands, and longer to copy than to time
MIN_ROUNDS = 5
MAX_ROUNDS = 1000


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time: `call(weights)` runs it, `nbytes` is what the weights take as they are stored.

    `footprint` is what a copy may take once a kernel has prepared it; it limits how many copies fit in memory.
    """

    call: Callable[[Any], object]
    weights: Any
    nbytes: int
    footprint: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over the rounds, and the two quartiles around it."""

    us: float
    low_us: float
    high_us: float
    rounds: int


def method(cold_bytes: int = COLD_BYTES) -> str:
    """The method in words, for records and reports."""
    return (
        "median over rounds of single calls, time.perf_counter_ns; contenders take turns within each round; each "
        f"cycles through copies of its weights (together at least {cold_bytes // 10**6} MB, {MIN_COPIES} to "
        f"{MAX_COPIES} copies, fewer if memory is short), while activations stay warm; every copy is used once before "
        "timing, so one-time weight preparation is not timed"
    )


def copies_needed(nbytes: int, footprint: int, cold_bytes: int = COLD_BYTES) -> int:
    """How many copies of a weight of `nbytes` the method asks for, within an eighth of the machine's memory."""
    wanted = min(max(MIN_COPIES, -(-cold_bytes // max(1, nbytes))), MAX_COPIES)
    return max(1, min(wanted, physical_bytes() // 8 // max(1, footprint)))


def rotate(contender: Contender, cold_bytes: int = COLD_BYTES) -> list[Any]:
    """The contender's weights and as many copies of them as the method asks for."""
    count = copies_needed(contender.nbytes, contender.footprint, cold_bytes)
    return [contender.weights, *(copy.deepcopy(contender.weights) for _ in range(count - 1))]


def bind(contender: Contender, weights: Sequence[Any]) -> list[Call]:
    """One call per copy."""

    def once(one: Any) -> Call:
        return lambda: contender.call(one)

    return [once(one) for one in weights]


def measure(
    contenders: Mapping[str, Sequence[Call]],
    *,
    seconds: float = 1.0,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
) -> dict[str, Timing]:
    """Time the contenders, each given as one call per copy of its weights, for about `seconds` in all."""
    for calls in contenders.values():
        for call in calls:
            call()
    samples: dict[str, list[int]] = {name: [] for name in contenders}
    clock = time.perf_counter_ns
    end = clock() + seconds * 1e9
    for turn in range(max_rounds):
        if turn >= min_rounds and clock() >= end:
            break
        for name, calls in contenders.items():
            call = calls[turn % len(calls)]
            start = clock()
            call()
            samples[name].append(clock() - start)
    return {name: _summary(taken) for name, taken in samples.items()}


def _summary(nanoseconds: Sequence[int]) -> Timing:
    micro = [one / 1e3 for one in nanoseconds]
    if len(micro) == 1:
        return Timing(micro[0], micro[0], micro[0], 1)
    low, middle, high = statistics.quantiles(micro, n=4, method="inclusive")
    return Timing(middle, low, high, len(micro))
