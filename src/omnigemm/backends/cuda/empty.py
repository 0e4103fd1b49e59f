"""Problems with a dimension of 0: nothing is multiplied, and torch writes what there is to write."""

from __future__ import annotations

import dataclasses

import torch

from ...core.dispatch import Support
from ...core.plan import Launch, Plan
from ...core.problem import Problem


@dataclasses.dataclass(frozen=True)
class Empty:
    """The one candidate for such a problem, as dispatch sees it."""

    name: str
    words: str  # what the result is
    launch: Launch

    def supports(self, problem: Problem, device: torch.device) -> Support:
        return Support(True, self.words)

    def cost(self, problem: Problem, device: torch.device) -> float:
        return 0.0

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        return Plan(problem, device, "cuda", self.name, self.launch)
