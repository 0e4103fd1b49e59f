"""A plan: a problem, the kernel chosen for it, and how to run it. Making one prepares; running one only launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .problem import Problem

# A launcher writes into `out`; the other operands are the op's own, in the order of its public signature.
Launch = Callable[..., None]
# The same for a caller that knows the addresses: the operands that are floats come first, then the addresses of `out`
# and of each operand that is a tensor. It answers whether it ran. If not, nothing was written, and the launch that sees
# the tensors must.
AddressLaunch = Callable[..., bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a call runs. `launch(out, *operands)` trusts its operands; `run(...)` checks them first."""

    problem: Problem
    device: torch.device
    backend: str
    kernel: str
    launch: Launch
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workspace_bytes: int = 0  # of device memory that a run takes, from torch's allocator or from its caller
    bind: Callable[..., Launch] | None = None  # (out, *operands) to a launch for tensors that lie just like these
    bind_addresses: Callable[..., AddressLaunch | None] | None = None  # the same, if addresses are all that it needs
    uses_torch: bool = True  # `launch` calls operations of torch, which then must not look for gradients
    # Keywords that `launch` and what `bind` makes have: memory to work in; for lists, the addresses of all tensors,
    # results first and then in the order of the operands, which were read to see that they do not overlap.
    takes_workspace: bool = False
    takes_addresses: bool = False

    def run(self, *operands: Any, out: Any = None, workspace: torch.Tensor | None = None, **named: Any) -> Any:
        """Run on operands as the op takes them (without backend and out_dtype), written to `out` if given.

        `workspace` is memory of `workspace_bytes` or more, which other runs may have used before and may use after on
        the same stream. Kernels that need none leave it alone; those that can only take their own refuse it.
        """
        from ..ops import run_plan  # late: the operations are built on plans

        return run_plan(self, operands, named, out, workspace)

    def __str__(self) -> str:
        config = ", ".join(f"{key}={value}" for key, value in self.config.items())
        kernel = f"{self.backend}/{self.kernel}" + (f" ({config})" if config else "")
        return f"{self.problem} on {self.device}: {kernel}, workspace {self.workspace_bytes} bytes"
