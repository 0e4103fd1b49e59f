"""D = alpha A B + beta C by a BLAS whose matrices are column by column.

A row-major matrix is the transpose of a column-major one, so D^T = B^T A^T computes a row-major D without a copy.
Transposition is read off the strides.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .library import Library
from .pool import Pool

LIMIT = 2**31 - 1  # of sizes and leading dimensions, which are C ints
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_COMPUTE_32F, _COMPUTE_TF32 = 68, 77
_ALGORITHM = -1  # the library's own choice


@dataclasses.dataclass(frozen=True)
class Matrices:
    """A tensor [.., R, C] as the library takes it: C by R column by column (`rowwise`), or R by C."""

    tensor: Tensor
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
                return Matrices(x, True, leading, step)
        if rows == 1 or down == 1:
            leading = rows if columns == 1 else across
            if rows <= leading <= LIMIT:
                return Matrices(x, False, leading, step)
        return None

    @staticmethod
    def readable(x: Tensor) -> Matrices:
        found = Matrices.of(x)
        if found is None:
            found = Matrices.of(x.contiguous())
        assert found is not None
        return found


def _writable(x: Tensor) -> Matrices | None:
    """As `of`, for a result: a batch that repeats one matrix cannot be written."""
    found = Matrices.of(x)
    return None if found is None or (x.dim() == 3 and x.size(0) > 1 and found.step == 0) else found


class Gemm:
    """Runs products with a library's handles. `stream_of(device)` is the caller's stream.

    Wherever copies were made, the vendor is waited for (if it asks for that) before they go back to torch's allocator.
    """

    def __init__(self, library: Library, stream_of: Callable[[torch.device], int]) -> None:
        self.library = library
        self.pool = Pool(library)
        self._stream_of = stream_of

    def __call__(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        """out = alpha a b + beta c; [.., M, K] times [.., K, N], a batch of 1 broadcasts."""
        if out.numel() == 0:
            return
        adds = c is not None and beta != 0.0
        if a.size(-1) == 0:
            out.copy_(
                c.expand_as(out).float().mul(beta) if adds and c is not None else torch.zeros((), device=out.device)
            )
            return
        if a.dtype == torch.bfloat16 and not self.library.vendor.native_bf16:
            self._through_fp32(out, a, b, c if adds else None, alpha, beta)
            return
        target = _writable(out)
        if target is None:
            fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self(fresh, a, b, c, alpha, beta)
            out.copy_(fresh)
            self.library.wait(self._stream_of(out.device))
            return
        if adds and c is not None and not _same(c, out):
            out.copy_(c.expand_as(out))
        left, right = Matrices.readable(a), Matrices.readable(b)
        self._run(target, left, right, alpha, beta if adds else 0.0)
        if left.tensor is not a or right.tensor is not b:
            self.library.wait(self._stream_of(out.device))

    def _run(self, d: Matrices, a: Matrices, b: Matrices, alpha: float, beta: float) -> None:
        rows, columns = d.tensor.shape[-2:]
        first, second, m, n = (b, a, columns, rows) if d.rowwise else (a, b, rows, columns)
        # A matrix that lies as D does is taken as it is, another one transposed.
        turned = [int(one.rowwise != d.rowwise) for one in (first, second)]
        kind = _TYPES[a.tensor.dtype]
        wide = a.tensor.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        batch = d.tensor.size(0) if d.tensor.dim() == 3 else 1
        device = d.tensor.device
        stream = self._stream_of(device)
        with self.pool.handle(device, stream) as handle:
            self.library.call(
                "gemm", handle.value, *turned, m, n, a.tensor.size(-1),
                ctypes.byref(ctypes.c_float(alpha)), first.tensor.data_ptr(), kind, first.leading, first.step,
                second.tensor.data_ptr(), kind, second.leading, second.step,
                ctypes.byref(ctypes.c_float(beta)), d.tensor.data_ptr(), _TYPES[d.tensor.dtype], d.leading, d.step,
                batch, _COMPUTE_TF32 if wide else _COMPUTE_32F, _ALGORITHM,
            )  # fmt: skip

    def _through_fp32(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self(wide, a.float(), b.float(), c, alpha, beta)
        out.copy_(wide)
        self.library.wait(self._stream_of(out.device))


def _same(x: Any, y: Tensor) -> bool:
    return bool(x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype)
