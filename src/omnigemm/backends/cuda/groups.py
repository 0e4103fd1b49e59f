"""`grouped_gemm_contiguous` and `grouped_gemm_masked` on Hopper: one launch that reads the groups' sizes on the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dispatch import Support
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.settings import current
from ..blas import estimate
from . import arguments, choice, dense, group_choice, sm90
from .by_layout import ByLayout
from .empty import Empty
from .gpu import Gpu
from .jit import KernelSpec
from .launch import Launcher, Matrix, raw_stream

_ALIGN = 16  # bytes: where the copy engine wants rows to begin
_NO_BIAS, _NO_ZEROS = 0, (0, 0, 0)
_FACTORS = {1: (), 2: (1.0, 0.0, 0, 0, 0, 0)}  # alpha and beta, and no C

OPS = {"grouped_gemm_contiguous": "contiguous", "grouped_gemm_masked": "masked"}


def supports(problem: Problem) -> Support:
    """Whether there are kernels for such operands and so many groups."""
    if problem.is_int4:
        return Support(False, "the grouped kernels here so far take fp8, int8, bf16 and fp16, not int4 weights")
    if problem.groups > group_choice.GROUP_LIMIT:
        return Support(False, f"{problem.groups} groups, expected at most {group_choice.GROUP_LIMIT}")
    rows = problem.m * (problem.groups if problem.op == "grouped_gemm_masked" else 1)
    for name, count in (("a", rows), ("b", problem.groups * problem.n)):
        if count >= 2**31:
            return Support(False, f"{name} has {count} rows in all groups together, expected fewer than 2^31")
    return Support(True, "")


def variant_of(problem: Problem) -> sm90.Variant:
    return dataclasses.replace(dense.variant_of(problem), grouping=OPS[problem.op], b_turned=_turned(problem))


def _turned(problem: Problem) -> bool:
    """Whether weights are read as [K, N]: 16-bit ones that lie so. Where K ends within a block, the next group's lines
    would be read along, and others are copied."""
    wide = problem.a_dtype in ("bf16", "fp16")
    return wide and problem.b_layout == "col" and 2 * problem.k % sm90.BLOCK_K == 0 and 2 * problem.n % _ALIGN == 0


def sizes_of(problem: Problem) -> group_choice.Sizes:
    """For contiguous groups, the mean; for masked ones what the caller expects, or else all that fit."""
    if problem.op == "grouped_gemm_masked":
        rows = min(problem.expected_m, problem.m) or problem.m
        return group_choice.Sizes(problem.groups, problem.groups, rows)
    return group_choice.Sizes.by_chance(problem.groups, choice.alike(problem.m))


@dataclasses.dataclass(frozen=True)
class Slabs:
    """Matrices of one shape, one behind the other, as a single matrix: `step` rows from each to the next."""

    count: int
    rows: int
    columns: int
    element_bytes: int
    pitch: int  # bytes from row to row
    step: int

    @classmethod
    def of(cls, x: Tensor, straight: bool = True) -> Slabs | None:
        """None where no such matrix is there; if `straight`, also where the copy engine cannot address it."""
        if x.dim() == 2:
            x = x.unsqueeze(0)
        (count, rows, columns), size = x.shape, x.element_size()
        jump, pitch = x.stride(0) * size, x.stride(1) * size
        if columns > 1 and x.stride(2) != 1:
            return None
        if rows == 1:
            pitch = jump if count > 1 and jump else -(-columns * size // _ALIGN) * _ALIGN
        if pitch < columns * size or (straight and pitch % _ALIGN) or pitch % size:
            return None
        if count > 1 and jump % pitch:
            return None
        return cls(count, rows, columns, size, pitch, jump // pitch if count > 1 else rows)

    def matrix(self, box: tuple[int, int], fetch: int = 256) -> Matrix:
        rows = (self.count - 1) * self.step + self.rows
        return Matrix(self.columns, rows, self.element_bytes, self.pitch, box, fetch=fetch)


def _readable(x: Tensor) -> Tensor:
    """The tensor, or a copy if the copy engine cannot address it."""
    return x if Slabs.of(x) is not None and x.data_ptr() % _ALIGN == 0 else dense.aligned_copy(x)


def _at_hand(scale: Tensor | None) -> Tensor | None:
    if scale is None or (scale.is_contiguous() and scale.data_ptr() % _ALIGN == 0):
        return scale
    return scale.clone(memory_format=torch.contiguous_format)


class Launch:
    """Runs one problem with one kernel. Strides and addresses may differ from call to call; odd ones cost a copy."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int, early: int = 0) -> None:
        self._problem, self._config, self._variant, self.early = problem, config, variant_of(problem), early
        self._index, self._multiprocessors = index, multiprocessors
        self._shared_bytes = self._variant.shared_bytes(config) + group_choice.table_bytes(config, problem.groups)
        self._loaded = dense.loaded(problem, config, self._variant, index, self._shared_bytes)
        self._prepared: ByLayout[tuple[Launcher, tuple[int, ...]] | None] = ByLayout()

    def __call__(self, out: Tensor, *operands: Any) -> None:
        self.bind(out, *operands)(out, *operands)

    def bind(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        groups: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        expected_m: int | None = None,
    ) -> core_plan.Launch:
        """The launch for tensors with these strides, which it does not look at again. `groups`: ends or counts."""
        scales = tuple(None if one is None else one.stride() for one in (a_scale, b_scale))
        strides = out.stride(), a.stride(), b.stride(), groups.stride(), scales
        prepared = self._prepared.get(strides, lambda: self._prepare(out, a, b, groups, a_scale, b_scale))
        if prepared is None:
            return self._with_copies
        launcher, steps = prepared
        problem, index, swap = self._problem, self._index, self._config.swap
        m, count, out_stride = problem.m, problem.groups, steps[0]
        # Of scales that hold for all of K: one for all groups, one for each, or one for each row of B.
        scale_step = problem.n if problem.b_scale == "channel" else int(b_scale is not None and b_scale.numel() > 1)
        fixed = out_stride, m, _NO_BIAS, self.early, *_NO_ZEROS, *_FACTORS[self._variant.element_bytes]
        rest = count, *steps[1:], scale_step
        current_device = torch._C._cuda_getDevice

        def run(
            out: Tensor,
            a: Tensor,
            b: Tensor,
            groups: Tensor,
            a_scale: Tensor | None,
            b_scale: Tensor | None,
            expected_m: int | None = None,
        ) -> None:
            to, left, right = out.data_ptr(), a.data_ptr(), b.data_ptr()
            scales = (0, 0) if a_scale is None or b_scale is None else (a_scale.data_ptr(), b_scale.data_ptr())
            if (to | left | right | scales[0] | scales[1]) % _ALIGN:
                return self._with_copies(out, a, b, groups, a_scale, b_scale)
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, groups, a_scale, b_scale)
            addresses = (right, left, to) if swap else (left, right, to)
            values = (*scales, 0, to, *fixed, groups.data_ptr(), *rest)
            return launcher(raw_stream(index), addresses, *values)

        return run

    def _prepare(
        self, out: Tensor, a: Tensor, b: Tensor, groups: Tensor, a_scale: Tensor | None, b_scale: Tensor | None
    ) -> tuple[Launcher, tuple[int, ...]] | None:
        """The launch for tensors that lie like these, with the steps of their rows; None if some must be copied."""
        config, variant = self._config, self._variant
        target = Slabs.of(out, straight=variant.needs_whole_rows(config))
        left, right = Slabs.of(a), Slabs.of(self._lines(b))
        if target is None or left is None or right is None:
            return None
        if not all(one is None or one.is_contiguous() for one in (groups, a_scale, b_scale)):
            return None
        rows = config.rows // config.left_share, config.cols // config.right_share
        a_rows, b_rows = reversed(rows) if config.swap else rows
        block = sm90.BLOCK_K // self._variant.element_bytes
        turned = self._variant.b_turned
        b_box = (sm90.SLAB, sm90.SLAB) if turned else (block, b_rows)
        maps = left.matrix((block, a_rows), config.fetch), right.matrix(b_box, config.fetch)
        by_tma = variant.stores_by_tma(config) and target.pitch % _ALIGN == 0
        store = target.matrix((variant.slab(config), 64)) if by_tma else None
        launcher = Launcher(
            self._loaded.kernel,
            grid=grid(config, self._problem, self._multiprocessors),
            threads=config.threads,
            shared_bytes=self._shared_bytes,
            cluster=config.cluster,
            matrices=(*(reversed(maps) if config.swap else maps), store),
            values=arguments.of_groups(self._variant.element_bytes),
        )
        return launcher, (target.pitch // target.element_bytes, left.step, right.step, target.step)

    def _lines(self, b: Tensor) -> Tensor:
        """The weights as they lie in memory."""
        return b.transpose(-2, -1) if self._variant.b_turned else b

    def _with_copies(self, out: Tensor, *operands: Any) -> None:
        """Copy what the kernel cannot read or write in its place."""
        with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(self._index):
            self._copy_and_run(out, *operands)

    def _copy_and_run(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        groups: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        expected_m: int | None = None,
    ) -> None:
        target = out
        if Slabs.of(out) is None or out.data_ptr() % _ALIGN:
            target = dense.aligned(out)
            target.copy_(out)  # rows of no group stay as they were
        read = self._lines(_readable(self._lines(b)))
        launch = dense.for_what_is_read(self, b, read)
        launch(target, _readable(a), read, groups.contiguous(), _at_hand(a_scale), _at_hand(b_scale))
        if target is not out:
            out.copy_(target)


def grid(config: sm90.Config, problem: Problem, multiprocessors: int) -> int:
    """Persistent blocks: as many as run at a time, unless there cannot be so many tiles."""
    down = config.tile_m * (config.left_share if config.swap else config.right_share)
    across = config.tile_n * (config.right_share if config.swap else config.left_share)
    if problem.op == "grouped_gemm_masked":
        packs = problem.groups * -(-problem.m // down)
    else:
        packs = problem.m // down + min(problem.groups, problem.m)
    packs *= -(-problem.n // across)
    return min(packs, multiprocessors // config.cluster * config.blocks_per_sm) * config.cluster


@dataclasses.dataclass(frozen=True)
class Sm90Groups:
    """One config for one problem, as dispatch sees it."""

    problem: Problem
    choice: choice.Choice
    gpu: Gpu

    @property
    def name(self) -> str:
        return sm90.name(self.choice.config, variant_of(self.problem)).removeprefix("omnigemm_")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        words = [f"for {sizes_of(problem).rows:.4g} rows in a group", *self.choice.config.words]
        odd = problem.k * variant_of(problem).element_bytes % _ALIGN != 0
        a_copied = odd or problem.a_layout != "row"
        b_copied = not _turned(problem) and (odd or problem.b_layout != "row")
        words += self.choice.early_words(b_copied)
        words.append(f"{self.choice.seconds * 1e6:.1f} us modelled")
        if a_copied or b_copied:
            words.append("operands are copied first: their rows do not begin at multiples of 16 bytes")
        return Support(True, ", ".join(words))

    def cost(self, problem: Problem, device: torch.device) -> float:
        if variant_of(problem).element_bytes == 1:
            return self.choice.seconds
        # A BLAS has to wait for the device before it can start, and no graph can capture that.
        return min(self.choice.seconds, 0.99 * estimate.seconds(problem))

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        index = torch.cuda.current_device() if device.index is None else device.index
        launch = Launch(problem, self.choice.config, index, self.gpu.multiprocessors, self.choice.early)
        config = dataclasses.asdict(self.choice.config)
        return Plan(problem, device, "cuda", self.name, launch, config, bind=launch.bind, uses_torch=False)


def _fill(out: Tensor, a: Tensor, b: Tensor, groups: Tensor, *rest: Any) -> None:
    """Rows of groups become zero, the others stay."""
    if out.numel() == 0 or groups.numel() == 0:
        return
    last = groups.amax() if out.dim() == 2 else groups[:, None]
    ours = torch.arange(out.size(-2), device=out.device) < last
    out.masked_fill_(ours[..., None], 0.0)


def kernels(problem: Problem, gpu: Gpu) -> tuple[Sm90Groups | Empty, ...]:
    """The choice and its runners-up."""
    if 0 in (problem.m, problem.n, problem.k, problem.groups):
        return (Empty("fill", "a dimension is 0: rows of groups are zero, or there are none", _fill),)
    ranked = group_choice.choices(variant_of(problem), sizes_of(problem), gpu, current().constant_weights)
    return tuple(Sm90Groups(problem, one, gpu) for one in ranked)


def specs(problem: Problem, gpu: Gpu) -> tuple[KernelSpec, ...]:
    """What must be compiled to run the problem on such a GPU."""
    chosen = kernels(problem, gpu)[0]
    return () if isinstance(chosen, Empty) else (dense.spec(chosen.choice.config, variant_of(problem)),)
