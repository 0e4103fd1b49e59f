"""D = alpha A B + beta C by a BLAS whose matrices are column by column.

A row-major matrix is the transpose of a column-major one, so D^T = B^T A^T computes a row-major D without a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.plan import AddressLaunch, Launch
from .caller import Caller, allows, switches
from .library import Library, LtLibrary
from .lt import LtGemm
from .matrices import Matrices, readable
from .pool import Pool
from .values import TYPES, address, number

_int, _long = ctypes.c_int.from_param, ctypes.c_longlong.from_param
_ALGORITHM = _int(-1)  # the library's own choice
# A compute type (CUBLAS_COMPUTE_32F or CUBLAS_COMPUTE_32F_FAST_TF32), and a math mode (the default, or
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION).
_USUAL, _TF32, _REDUCED_IN_FP32 = (_int(68), 0), (_int(77), 0), (_int(68), 16)

# Seen of cuBLAS with a product that it had never run; perhaps it had a kernel to load.
_EXECUTION_FAILED, _CAPTURED = 13, " while a CUDA graph is captured: run the same product once before"


class Gemm:
    """Runs products with a library's handles, or by the vendor's second library where it has one (`lt`).

    Wherever copies were made, the vendor is waited for (if it asks for that) before they go back to torch's allocator.
    """

    def __init__(self, library: Library, caller: Caller, lt: LtLibrary | None = None) -> None:
        self.library, self.caller = library, caller
        self.lt = None if lt is None else LtGemm(lt, caller, lambda device: self.pool(device).prepare())
        self._pools: dict[int, Pool] = {}

    def pool(self, device: torch.device) -> Pool:
        index = device.index or 0
        found = self._pools.get(index)
        return found or self._pools.setdefault(index, Pool(self.library, device, self.caller))

    def precision(self, dtype: torch.dtype) -> Callable[[], tuple[Any, int]]:
        """Tells the compute type and the math mode that torch's switches ask for at the time."""
        answer = switches[dtype]
        if dtype == torch.float32:
            return lambda: _TF32 if allows(answer()) else _USUAL
        if not self.library.has("set_math_mode"):
            return lambda: _USUAL
        return lambda: _USUAL if allows(answer()) else _REDUCED_IN_FP32

    def wait(self, device: torch.device) -> None:
        self.library.wait(self.caller.stream(device.index or 0))

    def __call__(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        """out = alpha a b + beta c; [.., M, K] times [.., K, N], a batch of 1 broadcasts."""
        self.bind(out, a, b, c, alpha, beta)(out, a, b, c, alpha, beta)

    def bind(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Launch:
        """The launch for tensors that lie like these, with a C or without."""
        if out.numel() == 0:
            return _nothing
        if a.size(-1) == 0:
            return _scaled_c
        if self._wants_fp32(a):
            return self._through_fp32
        at = self.bind_addresses(out, a, b, c, alpha, beta)
        if at is None:
            return self._with_copies
        index, adds, current_device = out.device.index or 0, c is not None and beta != 0.0, self.caller.device

        def run(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, c, alpha, beta)
            # A C that begins where `out` does is `out`: any other overlap was refused.
            addresses = out.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr() if adds and c is not None else 0
            if not at(alpha, beta, *addresses):
                assert c is not None
                at(alpha, beta, *addresses, before=partial(_copy, out, c))
            return None

        return run

    def bind_addresses(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> AddressLaunch | None:
        """The launch for matrices that lie like these, if the library reads and writes all of them in their place.
        Everything but the addresses and the factors is worked out once."""
        d, left, right = Matrices.of(out), Matrices.of(a), Matrices.of(b)
        if d is None or left is None or right is None or self._wants_fp32(a) or 0 in (out.numel(), a.size(-1)):
            return None
        at = self._by_handles(out, a, (d, left, right), c is not None and beta != 0.0)
        return at if self.lt is None else self.lt.bind_addresses(out, a, b, c, beta, at)

    def _by_handles(
        self, out: Tensor, a: Tensor, forms: tuple[Matrices, Matrices, Matrices], adds: bool
    ) -> AddressLaunch:
        d, left, right = forms
        rows, columns = out.shape[-2:]
        swap, dtype, index = d.rowwise, a.dtype, out.device.index or 0
        first, second = (right, left) if swap else (left, right)
        sizes = (columns, rows, a.size(-1)) if swap else (rows, columns, a.size(-1))
        # A matrix that lies as D does is taken as it is, another one transposed.
        head = tuple(_int(value) for value in (first.rowwise != swap, second.rowwise != swap, *sizes))
        batch = out.size(0) if out.dim() == 3 else 1
        single = batch == 1 and self.library.has("gemm_single")
        name = "gemm_single" if single else "gemm"

        def layout(of: torch.dtype, one: Matrices) -> tuple[Any, ...]:
            kind = _int(TYPES[of]), _int(one.leading)
            return kind if single else (*kind, _long(one.step))

        first_layout, second_layout, out_layout = layout(dtype, first), layout(dtype, second), layout(out.dtype, d)
        count = () if single else (_int(batch),)
        function, pool = self.library.function(name), self.pool(out.device)
        current_device, take, give = self.caller.device, pool.take, pool.give
        precision = self.precision(dtype)

        def at(
            alpha: float, beta: float, to: int, a: int, b: int, c: int = 0, before: Callable[[], None] | None = None
        ) -> bool:
            """`before` is done first, if there is a handle. Without it, a C must be `out` already."""
            if before is None and (current_device() != index or (adds and c != to)):
                return False
            x, y = (b, a) if swap else (a, b)
            compute, mode = precision()
            handle = take()  # before anything is written: there may be none
            try:
                if before is not None:
                    before()
                if handle.math_mode != mode:
                    handle.set_math_mode(mode)
                status = function(
                    handle.parameter, *head,
                    number(alpha), address(x), *first_layout, address(y), *second_layout,
                    number(beta), address(to), *out_layout,
                    *count, compute, _ALGORITHM,
                )  # fmt: skip
            finally:
                give(handle)
            if status:
                unprepared = status == _EXECUTION_FAILED and self.caller.capturing()
                raise self.library.failure(name, status, _CAPTURED if unprepared else "")
            return True

        return at

    def _wants_fp32(self, a: Tensor) -> bool:
        return a.dtype == torch.bfloat16 and not self.library.vendor.native_bf16

    def _with_copies(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        """Copy what the library cannot read or write in its place."""
        with torch._C._AutoDispatchBelowAutograd():
            left, right, target = readable(a), readable(b), out
            if Matrices.of(out) is None:
                target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self(target, left, right, c, alpha, beta)
            if target is not out:
                out.copy_(target)
            self.wait(out.device)

    def _through_fp32(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            self(wide, a.float(), b.float(), c, alpha, beta)
            out.copy_(wide)
            self.wait(out.device)


def _nothing(*_: Any) -> None:
    """For a result without elements, or with nothing to copy."""


def _copy(out: Tensor, c: Tensor) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        out.copy_(c.expand_as(out))


def _scaled_c(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
    """With nothing to add up, the result is beta C, or zero."""
    with torch._C._AutoDispatchBelowAutograd():
        if c is None or beta == 0.0:
            out.zero_()
        else:
            out.copy_(c.expand_as(out).float().mul(beta))
