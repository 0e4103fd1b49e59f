"""Whether tensors share memory: by addresses alone, which is quick, and closely where those do not settle it.

torch has no negative strides, so a tensor lies within its `reach` from the address of its first element. How far it
reaches follows from its signature: a call that comes again has only addresses to compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


def reach(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def span(tensor: Tensor) -> tuple[int, int]:
    """First and past-the-end byte."""
    start = tensor.data_ptr()
    return start, start + reach(tensor)


# -------------------------------------------------------------------------------------------------- by addresses


class Reach(NamedTuple):
    """How far `out` and operands reach, for all tensors that lie like these."""

    out: int
    operands: tuple[tuple[int, int], ...]  # positions and bytes of those that have any

    @staticmethod
    def of(out: Tensor, operands: Sequence[Any]) -> Reach | None:
        """None if tensors are hidden in other operands: then each call takes a closer look."""
        if any(isinstance(one, (list, tuple)) for one in operands):
            return None
        found = ((i, reach(one)) for i, one in enumerate(operands) if isinstance(one, Tensor))
        return Reach(reach(out), tuple((i, size) for i, size in found if size))

    def far_apart(self, out: Tensor, operands: Sequence[Any], may_be_out: int | None) -> bool:
        """Whether `out` begins after or ends before each operand, but for the one that may be `out` itself."""
        start = out.data_ptr()
        end = start + self.out
        for i, size in self.operands:
            other = operands[i].data_ptr()
            if other < end and start < other + size and not (i == may_be_out and operands[i] is out):
                return False
        return True


class ListReach:
    """The same for lists of tensors, of which the first `outs` are results: those must be apart from all others."""

    def __init__(self, outs: int, tensors: Sequence[Tensor]) -> None:
        sizes = [reach(one) for one in tensors]
        self._used = np.array([i for i, size in enumerate(sizes) if size], dtype=np.int64)
        self._sizes = np.array(sizes, dtype=np.int64)[self._used]
        self._is_out = self._used < outs
        self._fine: list[int] = []  # the addresses that passed last

    def need_apart(self, starts: list[int], look_closer: Callable[[], None]) -> None:
        """`look_closer` raises if tensors that begin at `starts` do overlap; it is asked if that is not plain."""
        if starts != self._fine:
            if not self._far_apart(starts):
                look_closer()
            self._fine = starts

    def _far_apart(self, starts: list[int]) -> bool:
        """One sweep over addresses."""
        begins = np.array(starts, dtype=np.int64)[self._used]
        order = begins.argsort()
        begins, is_out = begins[order], self._is_out[order]
        ends = begins + self._sizes[order]
        # How far what came before reaches: all of it, and results alone.
        anything, written = np.maximum.accumulate(ends), np.maximum.accumulate(np.where(is_out, ends, 0))
        return not bool((begins[1:] < np.where(is_out[1:], anything[:-1], written[:-1])).any())


# ------------------------------------------------------------------------------------------------------- closely


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share bytes, as far as can be told: slices of one buffer along any dimension are told apart,
    however they are turned, and some other interleavings are not."""
    if x.device != y.device or x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = span(x), span(y)
    if x1 <= y0 or y1 <= x0:
        return False
    # Where rows of both lie at multiples of one pitch, they meet only if their columns do. A row may be any dimensions.
    pitches = {step for tensor in (x, y) for _, step in _steps(tensor)}
    pitches.add(math.gcd(*(step for tensor in (x, y) for _, step in _steps(tensor, rows=True))))
    return not any(_apart(x, y, (y0 - x0) % pitch, pitch) for pitch in pitches if pitch)


def _steps(tensor: Tensor, rows: bool = False) -> Iterator[tuple[int, int]]:
    """Size and stride in bytes of each dimension, or of those of `rows`: all but the last."""
    sizes, strides, item = tensor.shape, tensor.stride(), tensor.element_size()
    for i in range(tensor.dim() - rows):
        if sizes[i] > 1:
            yield sizes[i], strides[i] * item


def _apart(x: Tensor, y: Tensor, shift: int, pitch: int) -> bool:
    """Whether rows at multiples of the pitch, those of y by `shift` later than those of x, have no column in common."""
    first, second = (
        one.element_size() + sum((size - 1) * step for size, step in _steps(one) if step % pitch) for one in (x, y)
    )
    return first <= shift and shift + second <= pitch


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of its elements share memory; with three dimensions and more, whether they may."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    covered = 0
    for stride, size in dims:
        if stride <= covered:  # it does not step over all that the smaller ones span
            return _meet(dims) and tensor.numel() > 0
        covered += stride * (size - 1)
    return False


def _meet(dims: Sequence[tuple[int, int]]) -> bool:
    """Of two dimensions: the fewest steps of each that lead to one place must be there."""
    if len(dims) != 2:
        return True
    (s, m), (t, n) = dims
    common = math.gcd(s, t)
    return common == 0 or (t // common < m and s // common < n)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether they are one matrix: element by element at the same addresses."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
