"""`gemm` in bf16 and fp16 on Hopper: the launch of D = alpha A B + beta C, with operands that lie either way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dtypes import name_of
from ...core.problem import Problem
from . import arguments, dense, sm90
from .by_layout import ByLayout
from .launch import Launcher, Matrix, raw_stream

_NO_SCALES = (0, 0, 0)  # nor a bias
_NO_ZEROS = (0, 0, 0)


class Gemm:
    """Runs one problem with one kernel. Strides and addresses may differ from call to call; odd ones cost a copy."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int, early: int = 0) -> None:
        self._config, self._variant, self.early = config, dense.variant_of(problem), early
        self._m, self._n, self._k = problem.m, problem.n, problem.k
        self._index, self._multiprocessors = index, multiprocessors
        self._shared_bytes = self._variant.shared_bytes(config)
        self._loaded = dense.loaded(problem, config, self._variant, index, self._shared_bytes)
        self._launchers: ByLayout[Launcher | None] = ByLayout()

    def __call__(self, out: Tensor, *operands: Any) -> None:
        self.bind(out, *operands)(out, *operands)

    def bind(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> core_plan.Launch:
        """The launch for tensors that lie like these."""
        if out.dim() == 3:
            return self._only
        at = self.bind_addresses(out, a, b, c, alpha, beta)
        if at is None:
            return self._with_copies
        index, current_device = self._index, torch._C._cuda_getDevice

        def run(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, c, alpha, beta)
            if not at(alpha, beta, *(one.data_ptr() for one in (out, a, b, c) if one is not None)):
                self._with_copies(out, a, b, c, alpha, beta)
            return None

        return run

    def bind_addresses(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> core_plan.AddressLaunch | None:
        """The same for addresses that are multiples of 16 bytes, on the current device; None if some are copied."""
        if out.dim() == 3:
            return None
        strides = out.stride(), a.stride(), b.stride()
        launcher = self._launchers.get(strides, lambda: self._prepare(out, a, b))
        if launcher is None:
            return None
        index, swap, adds, current_device = self._index, self._config.swap, self._variant.c, torch._C._cuda_getDevice
        of_c = (0, 0, 0)
        if adds and c is not None:
            spread = c.expand(out.shape)  # along dimensions of 1 by a stride of 0
            of_c = spread.stride(0), spread.stride(1), sm90.TYPES[name_of(c.dtype)]
        fixed = out.stride(0), self._m, 0, self.early, *_NO_ZEROS

        def at(alpha: float, beta: float, to: int, a: int, b: int, c: int = 0) -> bool:
            if (to | a | b) % dense.ALIGN or current_device() != index:
                return False
            values = (*_NO_SCALES, to, *fixed, alpha, beta, c if adds else 0, *of_c)
            launcher.launch(raw_stream(index), (b, a, to) if swap else (a, b, to), values)
            return True

        return at

    def _prepare(self, out: Tensor, a: Tensor, b: Tensor) -> Launcher | None:
        """The launch for matrices that lie like these; None if some must be copied first."""
        config, variant = self._config, self._variant
        rows = {"left": config.rows // config.left_share, "right": config.cols // config.right_share}
        a_side, b_side = ("right", "left") if config.swap else ("left", "right")
        left = _operand(a, variant.a_turned, rows[a_side], config.fetch)
        right = _operand(b.t(), variant.b_turned, rows[b_side], config.fetch)
        step = dense.pitch(out, straight=variant.needs_whole_rows(config))
        if left is None or right is None or step is None:
            return None
        store = dense.stored(out, variant, config)
        return Launcher(
            self._loaded.kernel,
            grid=config.grid(self._m, self._n, self._multiprocessors),
            threads=config.threads,
            shared_bytes=self._shared_bytes,
            cluster=config.cluster,
            matrices=(right, left, store) if config.swap else (left, right, store),
            values=arguments.of_product(2),
        )

    def _with_copies(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        """Copy what the kernel cannot read or write in its place."""
        with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(self._index):
            target = out
            if dense.pitch(out) is None or out.data_ptr() % dense.ALIGN:
                target = dense.aligned(out)
            left, right = readable(a, self._variant.a_turned), readable(b.t(), self._variant.b_turned).t()
            dense.for_what_is_read(self, b, right)(target, left, right, c, alpha, beta)
            if target is not out:
                out.copy_(target)

    def _only(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        """The product of a batch of one."""
        with torch._C._AutoDispatchBelowAutograd():
            added = c.expand(out.shape)[0] if self._variant.c and c is not None else None
            left, right = (x[0] if x.dim() == 3 else x for x in (a, b))
            self(out[0], left, right, added, alpha, beta)


def as_lines(x: Tensor, turned: bool) -> Tensor:
    """An operand [rows, K], or a batch of them, as it lies in memory, line by line."""
    return x.mT if turned else x


def _operand(x: Tensor, turned: bool, rows: int, fetch: int) -> Matrix | None:
    """[rows of the operand, K] as the copy engine sees it; None where it cannot address it."""
    lines = as_lines(x, turned)
    step = dense.pitch(lines)
    if step is None:
        return None
    box = (sm90.SLAB, sm90.SLAB) if turned else (sm90.BLOCK_K // 2, rows)
    return Matrix(lines.size(1), lines.size(0), 2, step, box, fetch=fetch)


def readable(x: Tensor, turned: bool) -> Tensor:
    lines = as_lines(x, turned)
    if dense.pitch(lines) is not None and lines.data_ptr() % dense.ALIGN == 0:
        return x
    return as_lines(dense.aligned_copy(lines), turned)
