"""Batches of `int8_gemm` and `gemm` on Hopper: one launch for many products of one shape, however they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dispatch import Support
from ...core.dtypes import name_of
from ...core.problem import Problem
from . import arguments, dense, sm90
from .by_layout import ByLayout
from .gemm import as_lines
from .launch import Launcher, Matrix, raw_stream

_LIMIT = 2**31 - 4096  # rows and tiles are counted in 32 bits, up to the end of a tile
_LEAST_ROWS, _LEAST_COLUMNS = 8, 16  # of D in a tile of any config


def supports(problem: Problem) -> Support:
    """Whether the kernels can count what there is."""
    for name, rows in (("a", problem.m), ("b", problem.n)):
        if problem.batch * rows > _LIMIT:
            return Support(False, f"{name} has {problem.batch * rows} rows in all products, expected at most {_LIMIT}")
    tiles = problem.batch * -(-problem.m // _LEAST_ROWS) * -(-problem.n // _LEAST_COLUMNS)
    if tiles > _LIMIT:
        return Support(False, f"the results of all products have up to {tiles} tiles, expected at most {_LIMIT}")
    return Support(True, "")


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape as the copy engine sees them: one for each product, or one for all."""

    rows: int
    columns: int
    element_bytes: int
    pitch: int  # bytes from row to row
    count: int
    step: int  # bytes from matrix to matrix

    @classmethod
    def of(cls, x: Tensor, straight: bool = True) -> Stack | None:
        """None where rows have gaps between their elements; if `straight`, also where rows or matrices do not begin at
        multiples of 16 bytes."""
        each, size = x.dim() == 3 and x.size(0) > 1 and x.stride(0) != 0, x.element_size()
        pitch = dense.pitch(x[0] if x.dim() == 3 else x, straight)
        step = x.stride(0) * size if each else dense.ALIGN
        if pitch is None or (straight and step % dense.ALIGN):
            return None
        return cls(x.size(-2), x.size(-1), size, pitch, x.size(0) if each else 1, step)

    def matrix(self, box: tuple[int, int], fetch: int = 256) -> Matrix:
        return Matrix(self.columns, self.rows, self.element_bytes, self.pitch, box, self.count, self.step, fetch)


class Prepared(NamedTuple):
    """The launch for tensors that lie alike."""

    launcher: Launcher
    out_step: int
    a_step: int
    b_step: int


class Batch:
    """Runs one problem with one kernel. Strides and addresses may differ from call to call; odd ones cost a copy."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int, early: int = 0) -> None:
        self._problem, self._config, self._variant = problem, config, dense.variant_of(problem)
        self._index, self.early = index, early
        self._grid = config.grid(problem.m, problem.n, multiprocessors, problem.batch)
        self._shared_bytes = self._variant.shared_bytes(config)
        self._loaded = dense.loaded(problem, config, self._variant, index, self._shared_bytes)
        self._prepared: ByLayout[Prepared | None] = ByLayout()

    def __call__(self, out: Tensor, *operands: Any) -> None:
        self.bind(out, *operands)(out, *operands)

    def bind(self, out: Tensor, *operands: Any) -> core_plan.Launch:
        """The launch for tensors with these strides, which it does not look at again."""
        raise NotImplementedError

    def _with_copies(self, out: Tensor, *operands: Any) -> None:
        """Copy what the kernel cannot read or write in its place."""
        with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(self._index):
            target = out
            if Stack.of(out) is None or out.data_ptr() % dense.ALIGN:
                target = dense.aligned(out)
            readable = self._readable(*operands)
            dense.for_what_is_read(self, operands[1], readable[1])(target, *readable)
            if target is not out:
                out.copy_(target)

    def _readable(self, *operands: Any) -> Sequence[Any]:
        """The operands, with copies for what cannot be read in its place."""
        raise NotImplementedError

    def _prepare(self, out: Tensor, a: Tensor, b: Tensor) -> Prepared | None:
        """For A [M, K] and B [N, K], or batches of them; None if some must be copied first."""
        key = out.stride(), a.shape, a.stride(), b.shape, b.stride()
        return self._prepared.get(key, lambda: self._launch_for(out, a, b))

    def _launch_for(self, out: Tensor, a: Tensor, b: Tensor) -> Prepared | None:
        config, variant = self._config, self._variant
        by_tma = variant.stores_by_tma(config)
        left, right = Stack.of(as_lines(a, variant.a_turned)), Stack.of(as_lines(b, variant.b_turned))
        target = Stack.of(out, straight=by_tma)
        if left is None or right is None or target is None:
            return None
        rows = config.rows // config.left_share, config.cols // config.right_share
        a_rows, b_rows = reversed(rows) if config.swap else rows
        boxes = self._box(variant.a_turned, a_rows), self._box(variant.b_turned, b_rows)
        maps = left.matrix(boxes[0], config.fetch), right.matrix(boxes[1], config.fetch)
        store = target.matrix((variant.slab(config), 64)) if by_tma else None
        launcher = Launcher(
            self._loaded.kernel,
            grid=self._grid,
            threads=config.threads,
            shared_bytes=self._shared_bytes,
            cluster=config.cluster,
            matrices=(*(reversed(maps) if config.swap else maps), store),
            values=arguments.of_batch(variant.element_bytes),
        )
        return Prepared(launcher, target.step, int(left.count > 1), int(right.count > 1))

    def _box(self, turned: bool, rows: int) -> tuple[int, int]:
        return (sm90.SLAB, sm90.SLAB) if turned else (sm90.BLOCK_K // self._variant.element_bytes, rows)


class GemmBatch(Batch):
    """D = alpha A B + beta C."""

    def bind(self, out: Tensor, *operands: Any) -> core_plan.Launch:
        a, b, c, _, _ = operands
        prepared = self._prepare(out, a, b.mT)
        if prepared is None:
            return self._with_copies
        launcher, out_step, a_step, b_step = prepared
        index, swap, adds, current_device = self._index, self._config.swap, self._variant.c, torch._C._cuda_getDevice
        c_step, of_c = 0, (0, 0, 0)
        if adds and c is not None:
            spread = c.expand(out.shape)  # along dimensions of 1 by a stride of 0
            c_step, of_c = spread.stride(0), (spread.stride(1), spread.stride(2), sm90.TYPES[name_of(c.dtype)])
        fixed = out.stride(1), self._problem.m, 0, self.early, 0, 0, 0  # no bias, no zero points
        steps = out_step, c_step, a_step, b_step, 0, 0, 0, self._problem.batch

        def run(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
            to, left, right = out.data_ptr(), a.data_ptr(), b.data_ptr()
            if (to | left | right) % dense.ALIGN:
                return self._with_copies(out, a, b, c, alpha, beta)
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, c, alpha, beta)
            added = c.data_ptr() if adds and c is not None else 0
            values = (0, 0, 0, to, *fixed, alpha, beta, added, *of_c, *steps)
            return launcher.launch(raw_stream(index), (right, left, to) if swap else (left, right, to), values)

        return run

    def _readable(self, *operands: Any) -> Sequence[Any]:
        a, b, *others = operands
        return (_stacked(a, self._variant.a_turned), _stacked(b.mT, self._variant.b_turned).mT, *others)


class Int8Batch(Batch):
    """`int8_gemm`: scales and zero points are those of all products, or of each."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int, early: int = 0) -> None:
        super().__init__(problem, config, index, multiprocessors, early)
        self._row_sums = dense.RowSums(problem, index) if problem.zero_points else None

    def bind(self, out: Tensor, *operands: Any) -> core_plan.Launch:
        a, b, a_scale, b_scale, a_zero, bias, _ = operands
        prepared = self._prepare(out, a, b)
        by_rows = [_each(one) for one in (a_scale, a_zero) if one is not None and one.numel() > 1]
        if prepared is None or not all(one is None or one.is_contiguous() for one in operands[2:]) or _mixed(by_rows):
            return self._with_copies
        problem, index, swap, current_device = (
            self._problem,
            self._index,
            self._config.swap,
            torch._C._cuda_getDevice,
        )
        launcher, out_step, a_step, b_step = prepared
        kind = 0 if bias is None else sm90.TYPES[name_of(bias.dtype)]
        zero_step = int(a_zero is not None and a_zero.numel() > 1)
        fixed = out.stride(1), problem.m, kind, self.early, zero_step
        scale_steps = problem.m * any(by_rows), problem.n * _each(b_scale)
        steps = out_step, 0, a_step, b_step, *scale_steps, problem.n * b_step, problem.batch

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
            to, left, right = out.data_ptr(), a.data_ptr(), b.data_ptr()
            if (to | left | right) % dense.ALIGN:
                return self._with_copies(out, a, b, a_scale, b_scale, a_zero, bias, b_sums)
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, a_scale, b_scale, a_zero, bias, b_sums)
            sums = self._sums_of(b) if b_sums is None else b_sums
            added, zeros, totals = (0 if one is None else one.data_ptr() for one in (bias, a_zero, sums))
            values = (a_scale.data_ptr(), b_scale.data_ptr(), added, to, *fixed, zeros, totals, *steps)
            return launcher.launch(raw_stream(index), (right, left, to) if swap else (left, right, to), values)

        return run

    def _sums_of(self, b: Tensor) -> Tensor | None:
        """With zero points, the sums of B's rows, of all products that have one of their own."""
        if self._row_sums is None:
            return None
        with torch._C._AutoDispatchBelowAutograd():
            return self._row_sums(_distinct(b).reshape(-1, b.size(-1)))

    def _readable(self, *operands: Any) -> Sequence[Any]:
        a, b, a_scale, b_scale, a_zero, bias, b_sums = operands
        by_rows = [one for one in (a_scale, a_zero) if one is not None and one.numel() > 1]
        if _mixed([_each(one) for one in by_rows]):
            shape = self._problem.batch, self._problem.m
            a_scale, a_zero = (one.reshape(-1, shape[1]).expand(shape) for one in (a_scale, a_zero))
        others = (None if one is None else one.contiguous() for one in (a_scale, b_scale, a_zero, bias, b_sums))
        return (_stacked(a, False), _stacked(b, False), *others)


def _each(values: Tensor) -> bool:
    """Whether each product has values of its own."""
    return values.dim() > 1 and values.numel() > 1


def _mixed(each: Sequence[bool]) -> bool:
    """Scales of rows and zero points are found by one step: all products have their own of both, or of neither."""
    return len(set(each)) > 1


def _distinct(x: Tensor) -> Tensor:
    """Without the copies of a batch that was expanded."""
    return x[:1] if x.dim() == 3 and x.stride(0) == 0 else x


def _stacked(x: Tensor, turned: bool) -> Tensor:
    """An operand [rows, K], or a batch of them; a copy if the copy engine cannot address it."""
    lines = as_lines(x, turned)
    if Stack.of(lines) is not None and lines.data_ptr() % dense.ALIGN == 0:
        return x
    return as_lines(dense.aligned_copy(_distinct(lines)), turned)
