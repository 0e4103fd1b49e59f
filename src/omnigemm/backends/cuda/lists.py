"""`grouped_gemm` in bf16 and fp16 on Hopper, as dispatch sees it: what is taken, at what cost, by which kernels."""

from __future__ import annotations

import dataclasses

import torch

from ...core.dispatch import Support
from ...core.plan import Plan
from ...core.problem import Problem
from . import choice, dense, list_choice, list_setup, sm90
from .empty import Empty
from .gpu import Gpu
from .jit import KernelSpec
from .list_kernel import MEMORY_BYTES, TILE_LIMIT, memory_bytes, variant_of
from .list_launch import Lists, layouts

OP = "grouped_gemm"


def supports(problem: Problem) -> Support:
    if sum(-(-m // 64) * -(-n // 64) for m, n, _ in problem.shapes) >= TILE_LIMIT:
        return Support(False, f"the results have {TILE_LIMIT} tiles of 64x64 or more together, expected fewer")
    return Support(True, "")


def _copied(problem: Problem) -> int:
    """How many products have an operand that must be copied, as far as sizes and layouts tell."""
    if "strided" in (problem.a_layout, problem.b_layout):
        return problem.groups
    found = 0
    for m, n, k in problem.shapes:
        lines = m if problem.a_layout == "col" else k, n if problem.b_layout == "row" else k
        found += k > 0 and any(2 * line % dense.ALIGN for line in lines)
    return found


@dataclasses.dataclass(frozen=True)
class Sm90List:
    """One config for one problem, as dispatch sees it."""

    problem: Problem
    choice: choice.Choice
    gpu: Gpu

    @property
    def name(self) -> str:
        variant = variant_of(self.problem, layouts(self.problem)[0])
        return sm90.name(self.choice.config, variant).removeprefix("omnigemm_")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        config, ways, count = self.choice.config, len(layouts(problem)), problem.groups
        launches = ways + max(0, count - 1) // list_choice.PRODUCT_LIMIT
        words = ["one launch for all products" if launches == 1 else f"up to {launches} launches for all products"]
        if problem.device_sizes:
            words.append("sizes are read on the GPU, and the config is for the largest there is room for")
        words.append(f"{config.stages} stages")
        if config.share > 1:
            words.append(f"clusters of {config.share} share loads")
        if config.blocks_per_sm > 1:
            words.append(f"{config.blocks_per_sm} blocks on a multiprocessor")
        words.append(f"{list_choice.used(config, problem.shapes):.0%} of the tiles used")
        words.append(f"{self.choice.seconds * 1e6:.1f} us modelled")
        if copied := _copied(problem):
            what = "operands of " + ("all products" if copied == count else f"{copied} of {count} products")
            words.append(f"{what} are copied first: their rows do not begin at multiples of 16 bytes")
        return Support(True, ", ".join(words))

    def cost(self, problem: Problem, device: torch.device) -> float:
        copied = _copied(problem)
        moved = sum(2.0 * 2 * (m * k + k * n) for m, n, k in problem.shapes) * copied / max(1, problem.groups)
        return self.choice.seconds + moved / self.gpu.memory + 10e-6 * copied

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        index = torch.cuda.current_device() if device.index is None else device.index
        run = Lists(problem, self.choice.config, index, self.gpu.multiprocessors)
        launches = len(layouts(problem)) + problem.groups // list_choice.PRODUCT_LIMIT
        return Plan(
            problem,
            device,
            "cuda",
            self.name,
            run,
            dataclasses.asdict(self.choice.config),
            workspace_bytes=problem.groups * MEMORY_BYTES + launches * memory_bytes(0),  # or a little less
            bind=run.bind,
            uses_torch=False,
            takes_workspace=True,
            takes_addresses=True,
        )


def kernels(problem: Problem, gpu: Gpu) -> tuple[Sm90List | Empty, ...]:
    """The choice and its runners-up."""
    if not any(m and n for m, n, _ in problem.shapes):
        return (Empty("nothing", "no result has elements", lambda *_: None),)
    variants = [variant_of(problem, turned) for turned in layouts(problem)]
    return tuple(Sm90List(problem, one, gpu) for one in list_choice.choices(variants, problem.shapes, gpu))


def specs(problem: Problem, gpu: Gpu) -> tuple[KernelSpec, ...]:
    """What must be compiled to run the problem on such a GPU."""
    chosen = kernels(problem, gpu)[0]
    if isinstance(chosen, Empty):
        return ()
    mains = (dense.spec(chosen.choice.config, variant_of(problem, turned)) for turned in layouts(problem))
    most = list_setup.launches(min(problem.groups, list_setup.LINES[-1]))[-1][1]
    return (*mains, *(list_setup.spec(lines) for lines in list_setup.LINES if lines <= most))
