"""`fp8_gemm`, `int8_gemm` and `gemm` on Hopper: a problem and a config to a compiled kernel and its launch."""

from __future__ import annotations

import copy
import dataclasses
import logging
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dispatch import Support
from ...core.dtypes import name_of
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.settings import current
from ..blas import estimate
from . import arguments, choice, sm90
from .by_layout import ByLayout
from .empty import Empty
from .gpu import Gpu
from .jit import KernelSpec
from .jit.loader import Loaded, check_capture, load
from .launch import Launcher, Matrix, raw_stream

_log = logging.getLogger("omnigemm")
ALIGN = 16  # bytes: where the copy engine wants rows to begin
# With many rows our kernels and cuBLAS are within a few hundredths of each other: ours has to be clearly ahead by the
# model, unless both were measured.
_MODELLED_ROWS, _DOUBT = 256, 1.1
_DOUBT_BATCH = 1.3  # of 48 batches that were measured none was then slower than by cuBLAS


ROW_SUMS = KernelSpec(
    "omnigemm_row_sums",
    '#define KERNEL omnigemm_row_sums\n#include "common/row_sums.cuh"\n',
    sm90.ARCH,
    sm90.OPTIONS,
)


def variant_of(problem: Problem) -> sm90.Variant:
    """What the kernel computes; results go out by the copy engine where rows of a dense one begin right for it."""
    return sm90.Variant(
        problem.n,
        problem.k,
        problem.a_dtype,
        problem.b_dtype,
        problem.a_scale,
        problem.b_scale,
        problem.out_dtype,
        problem.bias,
        problem.zero_points,
        out_by_tma=sm90.whole_rows(problem.n, problem.out_dtype),
        a_turned=problem.op == "gemm" and problem.a_layout == "col",
        b_turned=problem.op == "gemm" and problem.b_layout == "row",  # [K, N]
        c=problem.c,
        batched=problem.batch > 1,
    )


def spec(config: sm90.Config, variant: sm90.Variant) -> KernelSpec:
    return KernelSpec(sm90.name(config, variant), sm90.source(config, variant), sm90.ARCH, sm90.OPTIONS)


def loaded(problem: Problem, config: sm90.Config, variant: sm90.Variant, index: int, shared_bytes: int) -> Loaded:
    """The kernel, compiled if need be, on that GPU."""
    return loaded_spec(problem, spec(config, variant), index, shared_bytes)


def loaded_spec(problem: Problem, wanted: KernelSpec, index: int, shared_bytes: int) -> Loaded:
    """The same for any kernel that the problem needs."""
    who = f"{problem.op}: the kernel {wanted.name} for {problem}"
    remedy = f"call {problem.op} once with such operands, or make the plan with omnigemm.plan"
    check_capture(wanted, index, shared_bytes, who, remedy)
    found = load(wanted, index, shared_bytes)
    if found.local_bytes:  # slower, but right
        _log.warning("kernel %s spills %d bytes of registers", wanted.name, found.local_bytes)
    return found


def pitch(x: Tensor, straight: bool = True) -> int | None:
    """The bytes from row to row, or None where the copy engine cannot address the matrix (or, if not `straight`, where
    a row's elements do not lie side by side)."""
    size = x.element_size()
    if x.size(1) > 1 and x.stride(1) != 1:
        return None
    if x.size(0) == 1:
        return -(-x.size(1) * size // ALIGN) * ALIGN
    step = x.stride(0) * size
    if step < x.size(1) * size or (straight and step % ALIGN):
        return None
    return step


def stored(out: Tensor, variant: sm90.Variant, config: sm90.Config) -> Matrix | None:
    """Results as the copy engine writes them; None where it does not."""
    step = pitch(out)
    if step is None or not variant.stores_by_tma(config):
        return None
    return Matrix(out.size(1), out.size(0), variant.out_bytes, step, (variant.slab(config), 64))


def aligned(x: Tensor) -> Tensor:
    """A tensor of the same shape whose rows the copy engine can address."""
    step = ALIGN // x.element_size()
    return x.new_empty(*x.shape[:-1], -(-x.size(-1) // step) * step)[..., : x.size(-1)]


def aligned_copy(x: Tensor) -> Tensor:
    copied = aligned(x)
    if x.element_size() == 1:  # not all of these types have a copy of their own
        copied.view(torch.uint8).copy_(x.view(torch.uint8))
    else:
        copied.copy_(x)
    return copied


class LoadsEarly(Protocol):
    """A launch that reads so many stages of B before the work before it is done."""

    early: int


L = TypeVar("L", bound=LoadsEarly)


def for_what_is_read(launch: L, given: Tensor, read: Tensor) -> L:
    """The launch, or for a copy of B one that waits: that nothing writes it shortly before its use was said of B."""
    if read.data_ptr() == given.data_ptr():
        return launch
    late = copy.copy(launch)
    late.early = 0
    return late


class Launch:
    """Runs one problem with one kernel. Strides and addresses may differ from call to call; odd ones cost a copy."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int, early: int = 0) -> None:
        self._config, self._variant, self.early = config, variant_of(problem), early
        self._m, self._n, self._k = problem.m, problem.n, problem.k
        self._index, self._multiprocessors = index, multiprocessors
        self._shared_bytes = self._variant.shared_bytes(config)
        self._loaded = loaded(problem, config, self._variant, index, self._shared_bytes)
        self._launchers: ByLayout[Launcher | None] = ByLayout()

    def __call__(self, out: Tensor, *operands: Any) -> None:
        self.bind(out, *operands)(out, *operands)

    def bind(self, out: Tensor, *operands: Any) -> core_plan.Launch:
        """The launch for tensors with these strides, which it does not look at again."""
        at = self.bind_addresses(out, *operands)
        if at is None:
            return self._with_copies
        index, current_device = self._index, torch._C._cuda_getDevice

        def run(out: Tensor, *operands: Tensor | None) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, *operands)
            if not at(*(one.data_ptr() for one in (out, *operands) if one is not None)):
                self._with_copies(out, *operands)
            return None

        return run

    def bind_addresses(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        bias: Tensor | None,
        a_zero: Tensor | None = None,
        b_sums: Tensor | None = None,
    ) -> core_plan.AddressLaunch | None:
        """The same for addresses that are multiples of 16 bytes, on the current device; None if some are copied. There
        are b_sums if there is an a_zero."""
        strides = out.stride(), a.stride(), b.stride(), a_scale.stride(), b_scale.stride()
        launcher = self._launchers.get(strides, lambda: self._prepare(out, a, b, a_scale, b_scale))
        if launcher is None or not all(one is None or one.is_contiguous() for one in (bias, a_zero, b_sums)):
            return None
        index, swap, current_device = self._index, self._config.swap, torch._C._cuda_getDevice
        kind = 0 if bias is None else sm90.TYPES[name_of(bias.dtype)]
        fixed = out.stride(0), self._m, kind, self.early, int(a_zero is not None and a_zero.numel() > 1)
        no_bias: tuple[int, ...] = () if bias is not None else (0,)
        no_zeros: tuple[int, ...] = () if a_zero is not None else (0, 0)

        def at(to: int, a: int, b: int, a_scale: int, b_scale: int, *others: int) -> bool:
            if (to | a | b | a_scale | b_scale) % ALIGN or current_device() != index:
                return False
            bias, a_zero, b_sums = (*no_bias, *others, *no_zeros)
            values = (a_scale, b_scale, bias, to, *fixed, a_zero, b_sums)
            launcher.launch(raw_stream(index), (b, a, to) if swap else (a, b, to), values)
            return True

        return at

    def _prepare(self, out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Launcher | None:
        """The launch for matrices that lie like these; None if some must be copied first."""
        config, variant = self._config, self._variant
        pitches = pitch(a), pitch(b), pitch(out, straight=variant.needs_whole_rows(config))
        if None in pitches or not (a_scale.is_contiguous() and b_scale.is_contiguous()):
            return None
        rows = {"left": config.rows // config.left_share, "right": config.cols // config.right_share}
        a_side, b_side = ("right", "left") if config.swap else ("left", "right")
        boxes = {side: (sm90.BLOCK_K, count) for side, count in rows.items()}
        left = Matrix(self._k, self._m, 1, pitches[0] or 0, boxes[a_side], fetch=config.fetch)
        right = Matrix(self._k, self._n, 1, pitches[1] or 0, boxes[b_side], fetch=config.fetch)
        store = stored(out, variant, config)
        return Launcher(
            self._loaded.kernel,
            grid=config.grid(self._m, self._n, self._multiprocessors),
            threads=config.threads,
            shared_bytes=self._shared_bytes,
            cluster=config.cluster,
            matrices=(right, left, store) if config.swap else (left, right, store),
            values=arguments.of_product(1),
        )

    def _with_copies(self, out: Tensor, *operands: Any) -> None:
        """Copy what the kernel cannot read or write in its place."""
        with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(self._index):
            self._copy_and_run(out, *operands)

    def _copy_and_run(
        self, out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *others: Tensor | None
    ) -> None:
        target = out
        if pitch(out) is None or out.data_ptr() % ALIGN:
            target = aligned(out)
        left, right = (x if pitch(x) is not None and x.data_ptr() % ALIGN == 0 else aligned_copy(x) for x in (a, b))
        a_scale, b_scale = (
            x if x.is_contiguous() and x.data_ptr() % ALIGN == 0 else x.clone(memory_format=torch.contiguous_format)
            for x in (a_scale, b_scale)
        )
        added = (None if one is None else one.contiguous() for one in others)
        for_what_is_read(self, b, right)(target, left, right, a_scale, b_scale, *added)
        if target is not out:
            out.copy_(target)


class RowSums:
    """The sums of an int8 matrix's rows, made anew in each call that has none: nothing can go stale."""

    def __init__(self, problem: Problem, index: int) -> None:
        self._loaded = loaded_spec(problem, ROW_SUMS, index, 0)
        self._launchers: dict[int, Launcher] = {}

    def __call__(self, matrix: Tensor) -> Tensor:
        if matrix.size(1) > 1 and matrix.stride(1) != 1:
            matrix = matrix.contiguous()
        rows, columns = matrix.shape
        sums = torch.empty(rows, dtype=torch.int32, device=matrix.device)
        launcher = self._launchers.get(rows)
        if launcher is None:
            launcher = self._launchers[rows] = Launcher(
                self._loaded.kernel,
                grid=-(-rows // 8),
                threads=256,
                shared_bytes=0,
                cluster=1,
                matrices=(),
                values="PPqii",
            )
        stream = raw_stream(matrix.device.index or 0)
        launcher(stream, (), matrix.data_ptr(), sums.data_ptr(), matrix.stride(0), rows, columns)
        return sums


class Int8:
    """`int8_gemm` by the launch of one product: it has zero points besides."""

    def __init__(self, launch: Launch, row_sums: RowSums | None) -> None:
        self._launch, self._row_sums = launch, row_sums

    def __call__(self, out: Tensor, *operands: Any) -> None:
        self.bind(out, *operands)(out, *operands)

    def bind(self, out: Tensor, *operands: Any) -> core_plan.Launch:
        a, b, a_scale, b_scale, a_zero, bias, b_sums = operands
        if out.dim() == 3:
            return self._only
        if a_zero is not None and b_sums is None:
            return self._with_zeros
        zeros = () if a_zero is None else (a_zero, b_sums)
        launch = self._launch.bind(out, a, b, a_scale, b_scale, bias, *zeros)

        def run(
            out: Tensor,
            a: Tensor,
            b: Tensor,
            a_scale: Tensor,
            b_scale: Tensor,
            a_zero: Tensor | None,
            bias: Tensor | None,
            b_sums: Tensor | None,
        ) -> None:
            launch(out, a, b, a_scale, b_scale, bias, *(() if a_zero is None else (a_zero, b_sums)))

        return run

    def bind_addresses(self, out: Tensor, *operands: Any) -> core_plan.AddressLaunch | None:
        """Where row sums need not be made, and none are given for nothing, the addresses are those of the product."""
        a, b, a_scale, b_scale, a_zero, bias, b_sums = operands
        if out.dim() == 3 or (a_zero is None) != (b_sums is None):
            return None
        zeros = () if a_zero is None else (a_zero, b_sums)
        at = self._launch.bind_addresses(out, a, b, a_scale, b_scale, bias, *zeros)
        if at is None or a_zero is None or bias is None:
            return at
        launch = at
        # The bias comes before the zero points there.
        return lambda *given: launch(*given[:5], given[6], given[5], given[7])

    def _with_zeros(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        a_zero: Tensor | None,
        bias: Tensor | None,
        b_sums: Tensor | None,
    ) -> None:
        if self._row_sums is not None and b_sums is None:
            with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(out.device):
                b_sums = self._row_sums(b)
        self._launch(out, a, b, a_scale, b_scale, bias, *(() if a_zero is None else (a_zero, b_sums)))

    def _only(self, out: Tensor, *operands: Any) -> None:
        """The product of a batch of one."""
        a, b, a_scale, b_scale, a_zero, bias, b_sums = operands
        with torch._C._AutoDispatchBelowAutograd():
            left, right = (x[0] if x.dim() == 3 else x for x in (a, b))
            rows, columns = (x[0] if x.dim() > 1 and x.numel() > 1 else x for x in (a_scale, b_scale))
            zero = a_zero[0] if a_zero is not None and a_zero.dim() > 1 and a_zero.numel() > 1 else a_zero
            sums = b_sums[0] if b_sums is not None and b_sums.dim() > 1 else b_sums
            self._with_zeros(out[0], left, right, rows, columns, zero, bias, sums)


def _copied(problem: Problem) -> tuple[bool, bool]:
    """Whether A and B must be copied, as far as their sizes tell."""
    layouts = problem.a_layout, problem.b_layout
    if problem.op != "gemm":
        a, b = (problem.k % ALIGN != 0 or layout != "row" for layout in layouts)
        return a, b
    lines = problem.m if problem.a_layout == "col" else problem.k, problem.n if problem.b_layout == "row" else problem.k
    a, b = (layout == "strided" or 2 * line % ALIGN != 0 for layout, line in zip(layouts, lines, strict=True))
    return a, b


@dataclasses.dataclass(frozen=True)
class Sm90Dense:
    """One config for one problem, as dispatch sees it."""

    problem: Problem
    choice: choice.Choice
    gpu: Gpu

    @property
    def name(self) -> str:
        return sm90.name(self.choice.config, variant_of(self.problem)).removeprefix("omnigemm_")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        words = self.choice.config.words
        if problem.batch > 1:
            words.append(f"one launch for {problem.batch} products")
        words += self.choice.early_words(_copied(problem)[1])
        how = "measured here" if self.choice.here else "measured" if self.choice.measured else "modelled"
        words.append(f"{self.choice.seconds * 1e6:.1f} us {how}")
        if any(_copied(problem)):
            words.append("operands are copied first: their rows do not begin at multiples of 16 bytes")
        return Support(True, ", ".join(words))

    def cost(self, problem: Problem, device: torch.device) -> float:
        seconds = self.choice.seconds
        if problem.op != "gemm":
            return seconds
        # In 16 bits there is cuBLAS to compete with.
        library = estimate.seconds(problem)
        if self.choice.against_blas is not None:
            seconds = library * self.choice.against_blas
        elif problem.batch > 1:
            seconds *= _DOUBT_BATCH
        elif problem.m > _MODELLED_ROWS:
            seconds *= _DOUBT
        if any(_copied(problem)):
            seconds += 2.0 * problem.batch * (problem.m + problem.n) * problem.k * 2 / self.gpu.memory + 10e-6
        return seconds

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        from . import batches
        from .gemm import Gemm

        index = torch.cuda.current_device() if device.index is None else device.index
        how = problem, self.choice.config, index, self.gpu.multiprocessors, self.choice.early
        config = dataclasses.asdict(self.choice.config)
        run: Launch | Int8 | Gemm
        if problem.batch > 1:
            many = batches.GemmBatch(*how) if problem.op == "gemm" else batches.Int8Batch(*how)
            return Plan(problem, device, "cuda", self.name, many, config, bind=many.bind, uses_torch=False)
        if problem.op == "gemm":
            run = Gemm(*how)
        elif problem.op == "int8_gemm":
            run = Int8(Launch(*how), RowSums(problem, index) if problem.zero_points else None)
        else:
            run = Launch(*how)
        parts = problem, device, "cuda", self.name, run, config
        return Plan(*parts, bind=run.bind, bind_addresses=run.bind_addresses, uses_torch=False)


_ADDED = {"gemm": 2, "int8_gemm": 5, "fp8_gemm": 4}  # which operand is C, or the bias


def _fill(problem: Problem, out: Tensor, *operands: Any) -> None:
    added = operands[_ADDED[problem.op]] if problem.c or problem.op != "gemm" else None
    if added is None:
        out.zero_()
    else:
        # In fp32, as kernels do: C may have another type than the result, which beta C then fits and C does not.
        out.copy_((added.float() * operands[-1] if problem.c else added).expand_as(out))


def kernels(problem: Problem, gpu: Gpu) -> tuple[Sm90Dense | Empty, ...]:
    """The choice and its runners-up."""
    if 0 in (problem.batch, problem.m, problem.n, problem.k):
        words = "a dimension is 0: the result is zero, the bias, beta C, or empty"
        return (Empty("fill", words, partial(_fill, problem)),)
    ranked = choice.choices(variant_of(problem), problem.m, gpu, current().constant_weights, problem.batch)
    return tuple(Sm90Dense(problem, one, gpu) for one in ranked)


def specs(problem: Problem, gpu: Gpu) -> tuple[KernelSpec, ...]:
    """What must be compiled to run the problem on such a GPU."""
    chosen = kernels(problem, gpu)[0]
    if isinstance(chosen, Empty):
        return ()
    sums = (ROW_SUMS,) if problem.zero_points else ()
    return (spec(chosen.choice.config, variant_of(problem)), *sums)
