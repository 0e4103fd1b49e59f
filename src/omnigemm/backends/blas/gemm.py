"""D = alpha A B + beta C by a BLAS whose matrices are column by column.

A row-major matrix is the transpose of a column-major one, so D^T = B^T A^T computes a row-major D without a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.dtypes import name_of
from ...core.errors import DeviceError, OmniGemmError
from ...core.plan import AddressLaunch, Launch
from .caller import Caller, allows, switches
from .library import Library, LtLibrary
from .lt import LtGemm
from .matrices import Matrices, Product, readable
from .pool import Pool
from .values import address, number

_int, _long = ctypes.c_int.from_param, ctypes.c_longlong.from_param
_ALGORITHM = _int(-1)  # the library's own choice
_REDUCED_IN_FP32 = 16  # the math mode CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION; 0 is the default

# Seen of cuBLAS with a product that it had never run; perhaps it had a kernel to load.
_CAPTURED = " while a CUDA graph is captured: run the same product once before"

# Most vendors' memory is given back in the order of its stream: nobody waits.
_AT_ONCE = contextlib.nullcontext()


class Gemm:
    """Runs products with a library's handles, or by the vendor's second library where it has one (`lt`).

    Wherever copies were made, the vendor is waited for (if it asks for that) before they go back to torch's allocator.
    """

    def __init__(self, library: Library, caller: Caller, lt: LtLibrary | None = None) -> None:
        self.library, self.caller = library, caller
        for one in (library, lt):
            if one is not None:
                one.capturing = caller.capturing
        self.lt = None if lt is None else LtGemm(lt, caller, lambda device: self.pool(device).prepare())
        self._pools: dict[int, Pool] = {}

    def pool(self, device: torch.device) -> Pool:
        index = device.index or 0
        found = self._pools.get(index)
        return found or self._pools.setdefault(index, Pool(self.library, device, self.caller))

    def precision(self, dtype: torch.dtype) -> Callable[[], tuple[Any, int]]:
        """Tells the compute type and the math mode that torch's switches ask for at the time."""
        answer, vendor = switches[dtype], self.library.vendor
        usual = _int(vendor.compute), 0
        if dtype == torch.float32:
            tf32 = _int(vendor.compute_tf32), 0
            return lambda: tf32 if allows(answer()) else usual
        if not self.library.has("set_math_mode"):
            return lambda: usual
        strict = _int(vendor.compute), _REDUCED_IN_FP32
        return lambda: usual if allows(answer()) else strict

    def by_lt(self, kind: str) -> bool:
        """Whether products of a type go through the vendor's second library."""
        return self.lt is not None and kind in self.lt.library.types

    def by_handles(self, kind: str) -> bool:
        """Whether the first library has them. What neither has goes through fp32 copies."""
        return kind in self.library.vendor.types

    def wait(self, device: torch.device) -> None:
        self.library.wait(self.caller.stream(device.index or 0))

    def copies(self, device: torch.device) -> AbstractContextManager[None]:
        """Around what uses memory that is given back afterwards."""
        return self._waited_for(device) if self.library.waits else _AT_ONCE

    @contextlib.contextmanager
    def _waited_for(self, device: torch.device) -> Iterator[None]:
        """Also after an error."""
        self.need_no_capture()
        try:
            yield
        except BaseException:
            with contextlib.suppress(OmniGemmError):  # the first error is the one to see
                self.wait(device)
            raise
        self.wait(device)

    def need_no_capture(self) -> None:
        """Before anything is written."""
        if self.library.waits and self.caller.capturing():
            vendor = self.library.vendor
            raise DeviceError(
                f"{vendor.title}: copies are made of what the library cannot take as it is, and {vendor.wait} must be "
                f"called before they are given back, which a CUDA graph cannot capture; expected another type, or "
                f"matrices with a dense dimension"
            )

    def makes_copies(self, launch: Launch) -> bool:
        return launch in (self._with_copies, self._through_fp32)

    def __call__(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        """out = alpha a b + beta c; [.., M, K] times [.., K, N], a batch of 1 broadcasts."""
        self.bind(out, a, b, c, alpha, beta)(out, a, b, c, alpha, beta)

    def bind(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Launch:
        """The launch for tensors that lie like these, with a C or without."""
        if out.numel() == 0:
            return _nothing
        if a.size(-1) == 0:
            return _scaled_c
        at = self.bind_addresses(out, a, b, c, alpha, beta)
        if at is None:
            kind = name_of(a.dtype)
            return self._with_copies if self.by_lt(kind) or self.by_handles(kind) else self._through_fp32
        index, adds, current_device = out.device.index or 0, c is not None and beta != 0.0, self.caller.device

        def run(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
            if current_device() != index:
                with self.caller.on(index):
                    return run(out, a, b, c, alpha, beta)
            # A C that begins where `out` does is `out`: any other overlap was refused.
            addresses = out.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr() if adds and c is not None else 0
            if at(alpha, beta, *addresses):
                return None
            if adds and c is not None and at(alpha, beta, *addresses, before=partial(_copy, out, c)):
                return None
            # The second library has no way for this product, and the first has not the type.
            return self._through_fp32(out, a, b, c, alpha, beta)

        return run

    def bind_addresses(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> AddressLaunch | None:
        """The launch for matrices that lie like these, if the library reads and writes all of them in their place.
        Everything but the addresses and the factors is worked out once."""
        product = None if 0 in (out.numel(), a.size(-1)) else Product.of(out, a, b)
        kind = name_of(a.dtype)
        if product is None or not (self.by_lt(kind) or self.by_handles(kind)):
            return None
        at = self._by_handles(out, a, product, c is not None and beta != 0.0) if self.by_handles(kind) else _refuse
        if self.lt is None or not self.by_lt(kind):
            return at
        return self.lt.bind_addresses(out, a, product, c, beta, at)

    def _by_handles(self, out: Tensor, a: Tensor, product: Product, adds: bool) -> AddressLaunch:
        swap, m, n, k, batch, turn_a, turn_b, first, second, d = product
        dtype, index = a.dtype, out.device.index or 0
        head = tuple(_int(value) for value in (turn_a, turn_b, m, n, k))
        codes = self.library.vendor.codes
        single = batch == 1 and self.library.has("gemm_single")
        name = "gemm_single" if single else "gemm"

        def layout(of: torch.dtype, one: Matrices) -> tuple[Any, ...]:
            lies = _int(codes[name_of(of)]), _int(one.leading)
            return lies if single else (*lies, _long(one.step))

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
                if handle.math_mode != mode:
                    handle.set_math_mode(mode)
                if before is not None:
                    before()
                status = function(
                    handle.parameter, *head,
                    number(alpha), address(x), *first_layout, address(y), *second_layout,
                    number(beta), address(to), *out_layout,
                    *count, compute, _ALGORITHM,
                )  # fmt: skip
            finally:
                give(handle)
            if status:
                unprepared = self.library.means(status, "EXECUTION_FAILED") and self.caller.capturing()
                raise self.library.failure(name, status, _CAPTURED if unprepared else "")
            return True

        return at

    def _with_copies(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        """Copy what the library cannot read or write in its place."""
        with torch._C._AutoDispatchBelowAutograd(), self.copies(out.device):
            left, right, target = readable(a), readable(b), out
            if Matrices.of(out) is None:
                target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self(target, left, right, c, alpha, beta)
            if target is not out:
                out.copy_(target)

    def _through_fp32(self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
        with torch._C._AutoDispatchBelowAutograd(), self.copies(out.device):
            # Dense whatever the strides were, so that nothing is copied twice.
            left, right = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (a, b))
            wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            self(wide, left, right, c, alpha, beta)
            out.copy_(wide)


def _nothing(*_: Any) -> None:
    """For a result without elements."""


def _refuse(*_: Any) -> bool:
    """For a type that handles have no products of."""
    return False


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
