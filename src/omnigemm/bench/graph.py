"""The GPU timing method: calls back to back inside a CUDA graph, each with another copy of the weights."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
COLD_BYTES = 256_000_000  # all copies of one weight together, so that weights come from HBM
REPLAY_SECONDS = 0.025
REPLAYS = 6  # even: as many in one direction as in the other
PAIR_SECONDS, PAIR_REPLAYS = 0.01, 4
METHOD = (
    f"microseconds per call in a CUDA graph that replays calls back to back for at least {REPLAY_SECONDS * 1e3:.0f} "
    f"ms, each call with another copy of the weights (together at least {COLD_BYTES // 10**6} MB, at least 2) while "
    f"activations stay warm; median of {REPLAYS} replays, contenders in turns; random data"
)

PAIRS = (
    f"`pairs`: ours and the time of the one named, in turns with nobody else, {PAIR_REPLAYS} replays of "
    f"{PAIR_SECONDS * 1e3:.0f} ms"
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
    """Time each contender's `call(copy)`: all are captured first, then replayed one after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.empty_cache()  # memory of graphs before these is of no use to any other
    with torch.cuda.stream(stream):
        graphs = {name: _captured(call, copies, replay_seconds) for name, call in contenders.items()}
        times: dict[Name, list[float]] = {name: [] for name in contenders}
        for name in chain.from_iterable(rounds(list(graphs), replays)):
            graph, count = graphs[name]
            times[name].append(_elapsed(graph.replay) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def rounds(names: Sequence[Name], count: int) -> Iterator[Sequence[Name]]:
    """Orders in which all take their turns: forwards, and with the first one first again backwards.

    At the chip's power limit, who comes after a kernel that left it some rest has an advantage. So nobody comes after
    himself, and everybody as often after the one as after the other of his two neighbours: of two or three contenders,
    each after each of the others.
    """
    for i in range(count):
        yield names if i % 2 == 0 else [names[0], *reversed(names[1:])]


def pairs(
    ours: Callable[[Any], object], others: Mapping[str, Callable[[Any], object]], copies: Sequence[Any]
) -> dict[str, list[float]]:
    """Ours and another's time, in turns with nobody else, for each of the others that runs here.

    For peers that may be missing: at the power limit a contender's time depends on its neighbours, so among those that
    are always there they would change all times, and records with and without them could not be compared.
    """
    found: dict[str, list[float]] = {}
    for name, other in others.items():
        if runs(other, copies[0]):
            times = in_turns({"ours": ours, name: other}, copies, PAIR_SECONDS, PAIR_REPLAYS)
            found[name] = [round(times["ours"], 2), round(times[name], 2)]
    return found


def _captured(
    call: Callable[[Any], object], copies: Sequence[Any], replay_seconds: float
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph that takes so long, and the calls in it. Every copy is used before, so that nothing compiles or allocates
    in the capture; and the graph is replayed once. On the current stream, which is not the default one."""

    def all_copies() -> None:
        for one in copies:
            call(one)

    all_copies()
    rounds = max(1, int(replay_seconds * 1e6 / _elapsed(all_copies)) + 1)
    graph = torch.cuda.CUDAGraph()
    with _capture(graph):
        for _ in range(rounds):
            all_copies()
    graph.replay()
    return graph, rounds * len(copies)


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As torch.cuda.graph does, which also waits for the device, collects garbage and empties the allocator's cache, in
    each of thousands of captures. Here no garbage is collected: what a capture must not do may be in it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


def _elapsed(work: Callable[[], object]) -> float:
    """Microseconds on the current stream."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
