"""What a CPU kernel is, and the few moves that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ...core.dispatch import Support
from ...core.plan import Launch, Plan
from ...core.problem import Problem

# Weights are converted and multiplied in blocks of about this many elements, to stay in cache, but of no fewer rows
# than an efficient product needs.
BLOCK_ELEMENTS = 1 << 20
BLOCK_ROWS = 256


@dataclasses.dataclass(frozen=True)
class CpuKernel:
    """One way to run a problem on the processor.

    `accepts` answers for a problem, `seconds` estimates it (two AVX-512 cores; only the order matters), `bind`
    returns the launcher.
    """

    name: str
    accepts: Callable[[Problem], Support]
    seconds: Callable[[Problem], float]
    bind: Callable[[Problem], Launch]

    def supports(self, problem: Problem, device: torch.device) -> Support:
        return self.accepts(problem)

    def cost(self, problem: Problem, device: torch.device) -> float:
        return self.seconds(problem)

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        return Plan(problem, device, "cpu", self.name, self.bind(problem))


def yes(reason: str) -> Support:
    return Support(True, reason)


def no(reason: str) -> Support:
    return Support(False, reason)


def blocks(rows: int, row_elements: int, elements: int = BLOCK_ELEMENTS, least: int = BLOCK_ROWS) -> list[slice]:
    """Cut `rows` so that a block of them holds about `elements`, and at least `least` rows."""
    step = max(least, elements // max(1, row_elements))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def finish(out: Tensor, acc: Tensor, bias: Tensor | None) -> None:
    """Round the accumulator into `out`, after the bias."""
    if bias is not None:
        acc += bias
    out.copy_(acc)
