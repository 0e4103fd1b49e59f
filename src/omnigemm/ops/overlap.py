"""Whether tensors share memory: by addresses alone, which is quick, and closely where those do not settle it.

torch has no negative strides, so a tensor lies within its `reach` from the address of its first element. How far it
reaches follows from its signature: a call that comes again has only addresses to compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    """Whether two tensors share bytes. Column slices of one buffer are told apart; other interleavings are not."""
    if x.device != y.device or x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = span(x), span(y)
    if x1 <= y0 or y1 <= x0:
        return False
    # Rows of both lie at multiples of one pitch, so they meet only if their columns do.
    pitch = math.gcd(_pitch(x), _pitch(y))
    shift = (y0 - x0) % pitch if pitch else 0
    return shift < _row_bytes(x) or shift + _row_bytes(y) > pitch


def _row_bytes(tensor: Tensor) -> int:
    """From a row's first byte past its last."""
    steps = (tensor.size(-1) - 1) * tensor.stride(-1) if tensor.dim() else 0
    return (steps + 1) * tensor.element_size()


def _pitch(tensor: Tensor) -> int:
    """What all distances between rows are multiples of, in bytes; 0 for a single row."""
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return math.gcd(*(stride for size, stride in outer if size > 1)) * tensor.element_size()


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
