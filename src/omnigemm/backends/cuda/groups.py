"""`grouped_gemm_contiguous` and `grouped_gemm_masked` on Hopper: one launch that reads the groups' sizes on the GPU."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dispatch import Support
from ...core.errors import DeviceError
from ...core.plan import Plan
from ...core.problem import Problem
from . import choice, dense, group_choice, sm90
from .gpu import Gpu
from .jit import KernelSpec
from .jit.loader import is_loaded, load
from .launch import Launcher, Matrix, raw_stream

_log = logging.getLogger("omnigemm")
_ALIGN = 16  # bytes: where the copy engine wants rows to begin
_VALUES = dense._VALUES + "Piiiii0P"  # struct Arguments of gemm.cuh with groups

OPS = {"grouped_gemm_contiguous": "contiguous", "grouped_gemm_masked": "masked"}


def supports(problem: Problem) -> Support:
    """Whether there are kernels for such operands and so many groups."""
    if problem.a_dtype not in ("e4m3", "e5m2", "int8"):
        kind = "int4 weights" if problem.is_int4 else problem.a_dtype
        return Support(False, f"the grouped kernels here so far take fp8 and int8, not {kind}")
    if problem.groups > group_choice.GROUP_LIMIT:
        return Support(False, f"{problem.groups} groups, expected at most {group_choice.GROUP_LIMIT}")
    rows = problem.m * (problem.groups if problem.op == "grouped_gemm_masked" else 1)
    if max(rows, problem.groups * problem.n) >= 2**31:
        return Support(False, "the groups have 2^31 rows or more together, expected fewer")
    return Support(True, "")


def variant_of(problem: Problem) -> sm90.Variant:
    return dataclasses.replace(dense.variant_of(problem), grouping=OPS[problem.op])


def sizes_of(problem: Problem) -> group_choice.Sizes:
    """For contiguous groups, the mean; for masked ones what the caller expects, or else all that fit."""
    if problem.op == "grouped_gemm_masked":
        return group_choice.Sizes(problem.groups, problem.groups, min(problem.expected_m, problem.m) or problem.m)
    return group_choice.Sizes.by_chance(problem.groups, problem.m)


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

    def matrix(self, box: tuple[int, int]) -> Matrix:
        return Matrix(self.columns, (self.count - 1) * self.step + self.rows, self.element_bytes, self.pitch, box)


def aligned(x: Tensor) -> Tensor:
    """A tensor of the same shape whose rows the copy engine can address."""
    step = _ALIGN // x.element_size()
    return x.new_empty(*x.shape[:-1], -(-x.size(-1) // step) * step)[..., : x.size(-1)]


def _aligned_copy(x: Tensor) -> Tensor:
    copied = aligned(x)
    copied.view(torch.uint8).copy_(x.view(torch.uint8))
    return copied


class Launch:
    """Runs one problem with one kernel. Strides and addresses may differ from call to call; odd ones cost a copy."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int) -> None:
        self._problem, self._config, self._variant = problem, config, variant_of(problem)
        self._index, self._multiprocessors = index, multiprocessors
        self._shared_bytes = self._variant.shared_bytes(config) + group_choice.table_bytes(problem.groups)
        wanted = dense.spec(config, self._variant)
        if torch.cuda.is_current_stream_capturing() and not is_loaded(wanted, index, self._shared_bytes):
            raise DeviceError(
                f"{problem.op}: the kernel for {problem} is not compiled yet, and a CUDA graph is being captured; call "
                f"{problem.op} once with such operands, or make the plan with omnigemm.plan, before the capture"
            )
        self._loaded = load(wanted, index, self._shared_bytes)
        if self._loaded.local_bytes:  # slower, but right
            _log.warning("kernel %s spills %d bytes of registers", wanted.name, self._loaded.local_bytes)
        self._prepared: dict[Any, tuple[Launcher, tuple[int, ...]] | None] = {}

    def __call__(self, out: Tensor, *operands: Any) -> None:
        self.bind(out, *operands)(out, *operands)

    def bind(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        groups: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        expected_m: int | None = None,
    ) -> core_plan.Launch:
        """The launch for tensors with these strides, which it does not look at again. `groups`: ends or counts."""
        strides = out.stride(), a.stride(), b.stride(), groups.stride(), a_scale.stride(), b_scale.stride()
        if strides not in self._prepared:
            self._prepared[strides] = self._prepare(out, a, b, groups, a_scale, b_scale)
        prepared = self._prepared[strides]
        if prepared is None:
            return self._with_copies
        launcher, steps = prepared
        problem, index, swap = self._problem, self._index, self._config.swap
        m, count, out_stride = problem.m, problem.groups, steps[0]
        # Of scales that hold for all of K: one for all groups, one for each, or one for each row of B.
        scale_step = problem.n if problem.b_scale == "channel" else int(b_scale.numel() > 1)
        rest = (count, *steps[1:], scale_step)
        current_device = torch._C._cuda_getDevice

        def run(
            out: Tensor,
            a: Tensor,
            b: Tensor,
            groups: Tensor,
            a_scale: Tensor,
            b_scale: Tensor,
            expected_m: int | None = None,
        ) -> None:
            to, left, right = out.data_ptr(), a.data_ptr(), b.data_ptr()
            scales = a_scale.data_ptr(), b_scale.data_ptr()
            if (to | left | right | scales[0] | scales[1]) % _ALIGN:
                return self._with_copies(out, a, b, groups, a_scale, b_scale)
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, groups, a_scale, b_scale)
            addresses = (right, left, to) if swap else (left, right, to)
            unused = (0, 0, 0, 0, 0)  # a bias's type, early weights and zero points
            values = (*scales, 0, to, out_stride, m, *unused, groups.data_ptr(), *rest)
            return launcher(raw_stream(index), addresses, *values)

        return run

    def _prepare(
        self, out: Tensor, a: Tensor, b: Tensor, groups: Tensor, a_scale: Tensor, b_scale: Tensor
    ) -> tuple[Launcher, tuple[int, ...]] | None:
        """The launch for tensors that lie like these, with the steps of their rows; None if some must be copied."""
        config, by_tma = self._config, self._variant.stores_by_tma(self._config)
        target, left, right = Slabs.of(out, straight=by_tma), Slabs.of(a), Slabs.of(b)
        if target is None or left is None or right is None:
            return None
        if not (a_scale.is_contiguous() and b_scale.is_contiguous() and groups.is_contiguous()):
            return None
        rows = config.rows // config.left_share, config.cols // config.right_share
        a_rows, b_rows = reversed(rows) if config.swap else rows
        maps = left.matrix((sm90.BLOCK_K, a_rows)), right.matrix((sm90.BLOCK_K, b_rows))
        store = target.matrix((config.slab, 64)) if by_tma else None
        launcher = Launcher(
            self._loaded.kernel,
            grid=grid(config, self._problem, self._multiprocessors),
            threads=config.threads,
            shared_bytes=self._shared_bytes,
            cluster=config.cluster,
            matrices=(*(reversed(maps) if config.swap else maps), store),
            values=_VALUES,
        )
        return launcher, (target.pitch // target.element_bytes, left.step, right.step, target.step)

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
        a_scale: Tensor,
        b_scale: Tensor,
        expected_m: int | None = None,
    ) -> None:
        target = out
        if Slabs.of(out) is None or out.data_ptr() % _ALIGN:
            target = aligned(out)
            target.copy_(out)  # rows of no group stay as they were
        a, b = (x if Slabs.of(x) is not None and x.data_ptr() % _ALIGN == 0 else _aligned_copy(x) for x in (a, b))
        a_scale, b_scale = (
            x if x.is_contiguous() and x.data_ptr() % _ALIGN == 0 else x.clone(memory_format=torch.contiguous_format)
            for x in (a_scale, b_scale)
        )
        self(target, a, b, groups.contiguous(), a_scale, b_scale)
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
        config = self.choice.config
        rows = sizes_of(problem).rows
        words = [f"for {rows:.4g} rows in a group", f"{config.stages} stages"]
        if config.share > 1:
            words.append(f"clusters of {config.share} share loads")
        if config.blocks_per_sm > 1:
            words.append(f"{config.blocks_per_sm} blocks on a multiprocessor")
        words.append(f"{self.choice.seconds * 1e6:.1f} us modelled")
        if problem.k % _ALIGN or problem.a_layout != "row" or problem.b_layout != "row":
            words.append("operands are copied first: their rows do not begin at multiples of 16 bytes")
        return Support(True, ", ".join(words))

    def cost(self, problem: Problem, device: torch.device) -> float:
        return self.choice.seconds

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        index = torch.cuda.current_device() if device.index is None else device.index
        launch = Launch(problem, self.choice.config, index, self.gpu.multiprocessors)
        config = dataclasses.asdict(self.choice.config)
        return Plan(problem, device, "cuda", self.name, launch, config, bind=launch.bind, uses_torch=False)


@dataclasses.dataclass(frozen=True)
class Empty:
    """Products with nothing to add up: rows of groups are zero, the others stay."""

    name: str = "fill"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        return Support(True, "a dimension is 0: rows of groups are zero, or there are none")

    def cost(self, problem: Problem, device: torch.device) -> float:
        return 0.0

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        def launch(out: Tensor, a: Tensor, b: Tensor, groups: Tensor, *rest: Any) -> None:
            if out.numel() == 0 or groups.numel() == 0:
                return
            last = groups.amax() if out.dim() == 2 else groups[:, None]
            ours = torch.arange(out.size(-2), device=out.device) < last
            out.masked_fill_(ours[..., None], 0.0)

        return Plan(problem, device, "cuda", self.name, launch)


def kernels(problem: Problem, gpu: Gpu) -> tuple[Sm90Groups | Empty, ...]:
    """The choice and its runners-up."""
    if 0 in (problem.m, problem.n, problem.k, problem.groups):
        return (Empty(),)
    ranked = group_choice.choices(variant_of(problem), sizes_of(problem), gpu)
    return tuple(Sm90Groups(problem, one, gpu) for one in ranked)


def specs(problem: Problem, gpu: Gpu) -> tuple[KernelSpec, ...]:
    """What must be compiled to run the problem on such a GPU."""
    chosen = kernels(problem, gpu)[0]
    return () if isinstance(chosen, Empty) else (dense.spec(chosen.choice.config, variant_of(problem)),)
