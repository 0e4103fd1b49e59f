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


class Product(NamedTuple):
    """D = A B of matrices column by column; or D^T = B^T A^T (`swap`), where D lies row by row, so that it needs no
    copy. `a` and `b` are the operands as the library has them, `a` the first."""

    swap: bool
    m: int
    n: int
    k: int
    batch: int
    turn_a: bool
    turn_b: bool
    a: Matrices
    b: Matrices
    d: Matrices

    @staticmethod
    def of(out: Tensor, a: Tensor, b: Tensor) -> Product | None:
        """None where one of them must be copied."""
        d, left, right = Matrices.of(out), Matrices.of(a), Matrices.of(b)
        if d is None or left is None or right is None:
            return None
        swap, k, batch = d.rowwise, a.size(-1), out.size(0) if out.dim() == 3 else 1
        rows, columns = out.shape[-2:]
        m, n, first, second = (columns, rows, right, left) if swap else (rows, columns, left, right)
        # A matrix that lies as D does is taken as it is, another one transposed.
        return Product(swap, m, n, k, batch, first.rowwise != swap, second.rowwise != swap, first, second, d)


def readable(x: Tensor) -> Tensor:
    """The tensor itself if a BLAS can read it, else a copy."""
    return x if Matrices.of(x) is not None else x.contiguous()
