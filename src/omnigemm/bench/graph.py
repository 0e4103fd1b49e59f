"""The GPU timing method: calls back to back inside a CUDA graph, each with another copy of the weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
COLD_BYTES = 256_000_000  # all copies of one weight together, so that weights come from HBM
REPLAY_SECONDS = 0.025
REPLAYS = 6  # as many forth as back
METHOD = (
    f"microseconds per call in a CUDA graph that replays calls back to back for at least {REPLAY_SECONDS * 1e3:.0f} "
    f"ms, each call with another copy of the weights (together at least {COLD_BYTES // 10**6} MB, at least 2) while "
    f"activations stay warm; median of {REPLAYS} replays, contenders in turns; random data"
)


def copies_needed(nbytes: int) -> int:
    return max(2, -(-COLD_BYTES // max(1, nbytes)))


def runs(call: Callable[[Any], object], copy: Any) -> bool:
    """Whether a peer is here and takes these operands."""
    try:
        call(copy)
    except (ImportError, AttributeError, RuntimeError, ValueError, AssertionError):
        torch.cuda.synchronize()  # raises if the GPU itself failed: that is nobody's missing support
        return False
    return True


def microseconds(
    call: Callable[[Any], object],
    copies: Sequence[Any],
    replay_seconds: float = REPLAY_SECONDS,
    replays: int = REPLAYS,
) -> float:
    """Time `call(copy)`."""
    return in_turns({"": call}, copies, replay_seconds, replays)[""]


def in_turns(
    contenders: Mapping[Name, Callable[[Any], object]],
    copies: Sequence[Any],
    replay_seconds: float = REPLAY_SECONDS,
    replays: int = REPLAYS,
) -> dict[Name, float]:
    """Time each contender's `call(copy)`: all are captured first, then replayed one after the other, forth and back:
    at the chip's power limit, who comes after a kernel that left it some rest has an advantage. With an even number of
    replays each comes after either of its neighbours as often."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graphs = {name: _captured(call, copies, replay_seconds, stream) for name, call in contenders.items()}
        times: dict[Name, list[float]] = {name: [] for name in contenders}
        for i in range(replays):
            for name in graphs if i % 2 == 0 else reversed(graphs):
                graph, count = graphs[name]
                times[name].append(_elapsed(graph.replay) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _captured(
    call: Callable[[Any], object], copies: Sequence[Any], replay_seconds: float, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph that takes so long, and the calls in it. Every copy is used before, so that nothing compiles or allocates
    in the capture; and the graph is replayed once."""

    def all_copies() -> None:
        for one in copies:
            call(one)

    all_copies()
    rounds = max(1, int(replay_seconds * 1e6 / _elapsed(all_copies)) + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            all_copies()
    graph.replay()
    return graph, rounds * len(copies)


def _elapsed(work: Callable[[], object]) -> float:
    """Microseconds on the current stream."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
