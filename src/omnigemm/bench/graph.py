"""The GPU timing method: calls back to back inside a CUDA graph, each with another copy of the weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

COLD_BYTES = 256_000_000  # all copies of one weight together, so that weights come from HBM
REPLAY_SECONDS = 0.025
REPLAYS = 5
METHOD = (
    f"microseconds per call in a CUDA graph that replays calls back to back for at least {REPLAY_SECONDS * 1e3:.0f} "
    f"ms, each call with another copy of the weights (together at least {COLD_BYTES // 10**6} MB, at least 2) while "
    f"activations stay warm; median of {REPLAYS} replays; random data; contenders one after the other for each shape"
)


def copies_needed(nbytes: int) -> int:
    return max(2, -(-COLD_BYTES // max(1, nbytes)))


def microseconds(
    call: Callable[[Any], object],
    copies: Sequence[Any],
    replay_seconds: float = REPLAY_SECONDS,
    replays: int = REPLAYS,
) -> float:
    """Time `call(copy)`. Every copy is used once before, so that nothing compiles or allocates in the capture."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for one in copies:
            call(one)
        start.record()
        for one in copies:
            call(one)
        stop.record()
        stop.synchronize()
        rounds = max(1, int(replay_seconds * 1e3 / start.elapsed_time(stop)) + 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for one in copies:
                    call(one)
        graph.replay()
        times: list[float] = []
        for _ in range(replays):
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / rounds / len(copies))
    return statistics.median(times)
