"""A tensor as a BLAS takes it: column by column, with a leading dimension. Transposition is read off the strides."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LIMIT = 2**31 - 1  # of sizes, leading dimensions and batches, which are C ints


class Matrices(NamedTuple):
    """[.., R, C] as C by R column by column (`rowwise`), or as R by C."""

    rowwise: bool
    leading: int
    step: int  # elements from one matrix of the batch to the next; 0: the same for all

    @staticmethod
    def of(x: Tensor) -> Matrices | None:
        """None where neither dimension is dense, or its step is too large: such a matrix must be copied."""
        rows, columns = x.shape[-2:]
        down, across = x.stride()[-2:]
        step = x.stride(0) if x.dim() == 3 and x.size(0) > 1 else 0
        # A dimension of 1 has a stride that means nothing.
        if columns == 1 or across == 1:
            leading = columns if rows == 1 else down
            if columns <= leading <= LIMIT:
                return Matrices(True, leading, step)
        if (rows == 1 or down == 1) and rows <= across <= LIMIT:
            return Matrices(False, across, step)
        return None


def readable(x: Tensor) -> Tensor:
    """The tensor itself if a BLAS can read it, else a copy."""
    return x if Matrices.of(x) is not None else x.contiguous()
