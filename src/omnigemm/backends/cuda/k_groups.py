"""`grouped_gemm_k_contiguous` on Hopper: the kernel of lists (list_kernel.py), with one product for each group.

How many rows a group has is known on the GPU only. A small kernel (k_groups_setup.cuh) reads `ends` there and writes
what the small kernel of lists (list_setup.py) is told by the host; the kernel that multiplies is the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dispatch import Support
from ...core.dtypes import name_of
from ...core.fresh import bytes_on
from ...core.plan import Plan
from ...core.problem import Problem
from ..blas import estimate
from . import arguments, choice, dense, gemm, group_choice, list_choice, list_kernel, sm90
from .by_layout import ByLayout
from .empty import Empty
from .gpu import Gpu
from .jit import KernelSpec
from .launch import Launcher, raw_stream

OP = "grouped_gemm_k_contiguous"
_VALUES = "2P4Q2Q5q8if4x"  # struct Arguments of k_groups_setup.cuh
_WARPS = 4  # groups of one of its blocks


def supports(problem: Problem) -> Support:
    if problem.groups > group_choice.GROUP_LIMIT:
        return Support(False, f"{problem.groups} groups, expected at most {group_choice.GROUP_LIMIT}")
    tiles = min(problem.groups, list_choice.PRODUCT_LIMIT) * -(-problem.m // 64) * -(-problem.n // 64)
    if tiles >= list_kernel.TILE_LIMIT:
        return Support(False, f"the results have {tiles} tiles of 64x64, expected fewer than {list_kernel.TILE_LIMIT}")
    return Support(True, "")


def element_bytes(problem: Problem) -> int:
    return 1 if problem.a_dtype in ("e4m3", "e5m2") else 2


def turned(problem: Problem) -> list_kernel.Turned:
    """In 16 bits, the columns of A and B lie side by side, and K does not. Tensor cores take no fp8 like that."""
    wide = element_bytes(problem) == 2
    return wide, wide


def variant_of(problem: Problem) -> sm90.Variant:
    return list_kernel.variant_of(problem, turned(problem))


def setup_spec(size: int) -> KernelSpec:
    """For elements of that many bytes."""
    name = f"omnigemm_sm90_k_groups_setup_{size}"
    constants = {"KERNEL": name, "ELEMENT_BYTES": size, "LIMIT": group_choice.GROUP_LIMIT}
    lines = [f"#define {key} {value}" for key, value in constants.items()]
    source = "\n".join([*lines, '#include "sm90/k_groups_setup.cuh"', ""])
    return KernelSpec(name, source, sm90.ARCH, sm90.OPTIONS)


def shapes_of(problem: Problem) -> list[list_choice.Shape]:
    """What a config is chosen for: groups of equally many rows."""
    rows = choice.alike(-(-problem.k // max(1, problem.groups)))
    return [(problem.m, problem.n, rows)] * problem.groups


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of the groups: as many as one launch of the kernel that multiplies takes."""

    first: int
    count: int
    memory: int  # where its device memory begins
    setup: Launcher
    main: Launcher


class KGroups:
    """Runs one problem with one config. Strides and addresses may differ from call to call; odd ones cost a copy."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int) -> None:
        self._problem, self._config = problem, config
        self._index, self._device = index, torch.device("cuda", index)
        variant = variant_of(problem)
        self._fp8 = variant.element_bytes == 1
        shared_bytes = variant.shared_bytes(config) + list_choice.TABLE_BYTES
        main = dense.loaded(problem, config, variant, index, shared_bytes)
        setup = dense.loaded_spec(problem, setup_spec(variant.element_bytes), index, 0)
        down, across = config.tile_m * config.right_share, config.tile_n * config.left_share
        self._tiles = -(-problem.m // down) * -(-problem.n // across)
        self._parts, self._memory_bytes = [], 0
        for first in range(0, problem.groups, list_choice.PRODUCT_LIMIT):
            count = min(list_choice.PRODUCT_LIMIT, problem.groups - first)
            setup_launcher = Launcher(
                setup.kernel,
                grid=-(-count // _WARPS),
                threads=32 * _WARPS,
                shared_bytes=0,
                cluster=1,
                matrices=list_kernel.like_matrices(config, variant),
                values=_VALUES,
            )
            main_launcher = Launcher(
                main.kernel,
                grid=list_kernel.grid(config, count * self._tiles, multiprocessors),
                shared_bytes=shared_bytes,
                **list_kernel.shape(config),
                values=arguments.of_list(variant.element_bytes),
            )
            self._parts.append(Part(first, count, self._memory_bytes, setup_launcher, main_launcher))
            self._memory_bytes += list_kernel.memory_bytes(count)
        self._bound: ByLayout[core_plan.Launch] = ByLayout()
        # Tensor maps that are only copied must point somewhere.
        self._somewhere = torch.empty(1, dtype=torch.uint8, device=self._device).data_ptr()

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def __call__(self, out: Tensor, *operands: Any, workspace: Tensor | None = None) -> None:
        self.bind(out, *operands)(out, *operands, workspace=workspace)

    def bind(self, out: Tensor, *operands: Any) -> core_plan.Launch:
        """The launch for tensors with these strides, which it does not look at again."""
        key = tuple(None if one is None else one.stride() for one in (out, *operands))
        return self._bound.get(key, lambda: self._prepare(out, *operands))

    def _prepare(
        self, out: Tensor, a: Tensor, b: Tensor, ends: Tensor, c: Tensor | None, *scales: Tensor | None
    ) -> core_plan.Launch:
        problem, parts, tiles = self._problem, self._parts, self._tiles
        pitches = [dense.pitch(gemm.as_lines(x, self._fp8)) for x in (a, b)]
        out_pitch = dense.pitch(out[0], straight=False)
        if None in pitches or out_pitch is None or not all(_dense(one) for one in (ends, *scales)):
            return self._with_copies
        scale_pitch = (scales[0].size(1),) if self._fp8 and scales[0] is not None else ()
        size = out.element_size()
        of_c, kind, beta = ((0, 0, 0), 0, 0.0) if c is None else (c.stride(), sm90.TYPES[name_of(c.dtype)], 1.0)
        strides = *pitches, out.stride(0), out_pitch // size, *of_c
        sizes = problem.k, problem.m, problem.n, tiles, kind, size, beta
        like, none = (self._somewhere,) * 3, (0,) * 3
        index, current_device = self._index, torch._C._cuda_getDevice
        own_memory = bytes_on(self._device, self._memory_bytes)

        def run(
            out: Tensor,
            a: Tensor,
            b: Tensor,
            ends: Tensor,
            c: Tensor | None,
            *scales: Tensor | None,
            workspace: Tensor | None = None,
        ) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, ends, c, *scales, workspace=workspace)
            left, right = a.data_ptr(), b.data_ptr()
            if (left | right) % dense.ALIGN:
                return self._with_copies(out, a, b, ends, c, *scales, workspace=workspace)
            # From torch's allocator and for this call alone, so that calls on several streams do not meet.
            memory = own_memory() if workspace is None else workspace
            stream, start = raw_stream(index), memory.data_ptr()
            addresses = ends.data_ptr(), left, right, 0 if c is None else c.data_ptr(), out.data_ptr()
            for part in parts:
                some = part.first, part.count
                part.setup(stream, like, start + part.memory, *addresses, *strides, *some, *sizes)
            at = [one.data_ptr() for one in scales if one is not None]
            for part in parts:
                part.main(stream, none, *at, start + part.memory, part.count, *scale_pitch)
            return None

        return run

    def _with_copies(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        ends: Tensor,
        c: Tensor | None,
        *scales: Tensor | None,
        workspace: Tensor | None = None,
    ) -> None:
        """Copy what the kernel cannot read or write in its place."""
        with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(self._index):
            target = out
            if dense.pitch(out[0], straight=False) is None:
                target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            left, right = (gemm.readable(x, self._fp8) for x in (a, b))
            near = (None if one is None else one.contiguous() for one in scales)
            self(target, left, right, ends.contiguous(), c, *near, workspace=workspace)
            if target is not out:
                out.copy_(target)


def _dense(x: Tensor | None) -> bool:
    return x is None or x.is_contiguous()


def _copied(problem: Problem) -> bool:
    """Whether operands must be copied, as far as their sizes tell."""
    if element_bytes(problem) == 1:
        return problem.k % dense.ALIGN != 0 or (problem.a_layout, problem.b_layout) != ("col", "col")
    lines = (problem.a_layout, problem.m), (problem.b_layout, problem.n)
    return any(layout != "row" or 2 * line % dense.ALIGN for layout, line in lines)


@dataclasses.dataclass(frozen=True)
class Sm90KGroups:
    """One config for one problem, as dispatch sees it."""

    problem: Problem
    choice: choice.Choice
    gpu: Gpu

    @property
    def name(self) -> str:
        return sm90.name(self.choice.config, variant_of(self.problem)).removeprefix("omnigemm_")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        config = self.choice.config
        words = [f"for {problem.k / max(1, problem.groups):.4g} rows in a group", *config.words]
        words.append(f"{list_choice.used(config, shapes_of(problem)):.0%} of the tiles used")
        words.append(f"{self.choice.seconds * 1e6:.1f} us modelled")
        if _copied(problem):
            words.append("operands are copied first: their rows do not begin at multiples of 16 bytes")
        return Support(True, ", ".join(words))

    def cost(self, problem: Problem, device: torch.device) -> float:
        if element_bytes(problem) == 1:
            return self.choice.seconds
        # A BLAS has to wait for the device before it can start, and no graph can capture that.
        return min(self.choice.seconds, 0.99 * estimate.seconds(problem))

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        index = torch.cuda.current_device() if device.index is None else device.index
        run = KGroups(problem, self.choice.config, index, self.gpu.multiprocessors)
        return Plan(
            problem,
            device,
            "cuda",
            self.name,
            run,
            dataclasses.asdict(self.choice.config),
            workspace_bytes=run.memory_bytes,
            bind=run.bind,
            uses_torch=False,
            takes_workspace=True,
        )


def _fill(out: Tensor, a: Tensor, b: Tensor, ends: Tensor, c: Tensor | None, *scales: Any) -> None:
    if c is None:
        out.zero_()
    else:
        out.copy_(c)


def kernels(problem: Problem, gpu: Gpu) -> tuple[Sm90KGroups | Empty, ...]:
    """The choice and its runners-up."""
    if 0 in (problem.m, problem.n, problem.k, problem.groups):
        return (Empty("fill", "a dimension is 0: the result is zero, C, or empty", _fill),)
    ranked = list_choice.choices([variant_of(problem)], shapes_of(problem), gpu)
    return tuple(Sm90KGroups(problem, one, gpu) for one in ranked)


def specs(problem: Problem, gpu: Gpu) -> tuple[KernelSpec, ...]:
    """What must be compiled to run the problem on such a GPU."""
    chosen = kernels(problem, gpu)[0]
    if isinstance(chosen, Empty):
        return ()
    return dense.spec(chosen.choice.config, variant_of(problem)), setup_spec(element_bytes(problem))
