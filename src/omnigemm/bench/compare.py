"""Ours against the peers, in turns: one workload, or several cases over many row counts with the same weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from . import timing
from .workloads import OURS, Case, Dense, Size, Workload, dense, drawn


def compare(work: Workload, *, seconds: float, cold_bytes: int = timing.COLD_BYTES) -> dict[str, timing.Timing]:
    """Time one workload against its peers."""
    contenders = {OURS: work.ours(), **work.peers()}
    calls = {name: timing.bind(one, timing.rotate(one, cold_bytes)) for name, one in contenders.items()}
    return timing.measure(calls, seconds=seconds)


def sweep(
    cases: Mapping[str, Case],
    weight: Size,
    rows: Sequence[int],
    *,
    seconds: float,
    cold_bytes: int = timing.COLD_BYTES,
) -> Iterator[tuple[dict[str, Workload], dict[str, timing.Timing]]]:
    """Time dense cases and torch together, for each number of rows, on one weight of `weight`'s N and K.

    The weight is drawn, quantised and copied once; only the activations change with the rows.
    """
    given = dense(next(iter(cases.values())), dataclasses.replace(weight, m=1))
    quantised = {name: Workload(one, dataclasses.replace(weight, m=1), given).b for name, one in cases.items()}
    copies: dict[str, list[object]] = {}
    for count in rows:
        size = dataclasses.replace(weight, m=count)
        x = drawn((count, size.k), torch.Generator("cpu").manual_seed(count))
        works = {name: Workload(one, size, Dense(x, given.w), quantised[name]) for name, one in cases.items()}
        contenders = {name: work.ours() for name, work in works.items()}
        contenders |= next(iter(works.values())).peers()
        for name, one in contenders.items():
            if name not in copies:
                copies[name] = timing.rotate(one, cold_bytes)
        calls = {name: timing.bind(one, copies[name]) for name, one in contenders.items()}
        yield works, timing.measure(calls, seconds=seconds)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
