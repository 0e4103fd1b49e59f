"""Many products: one call of the vendor's where it has such a function and it takes these matrices, else a loop."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.dtypes import name_of
from ...core.errors import DeviceError
from ...core.groups import Factors, in_use, read_factors
from ...core.plan import Launch
from ..cpu import k_groups
from ..cpu.grouped import contiguous_rows, masked_rows
from .gemm import Gemm
from .matrices import Product
from .values import address

_ALIGN = 16  # bytes: where the grouped function wants matrices to begin
# Operations of a group from which on it is faster by itself: on an H200, cuBLAS's grouped function has half the speed
# of single products, but takes the host 70 us and 1.5 more for each group instead of 19 for each.
_OWN_CALL = 1e10

Tensors = Sequence[Tensor]
Numbers = Sequence[float]


class Grouped:
    """`grouped_gemm` as a launch; `rows` makes launches of the operations whose groups are rows of one tensor."""

    def __init__(self, product: Gemm) -> None:
        self._product = product

    def in_one_call(self, operands: str, result: str, mean_flops: float = 0.0) -> bool:
        """Whether groups of such types and size go to the vendor's function, if no matrix must be copied."""
        has = self._product.by_handles(operands) and self._product.library.has("gemm_grouped")
        # It has no wider results.
        return has and result == operands and mean_flops < _OWN_CALL

    def __call__(self, out: Tensors, *operands: Any) -> None:
        self.bind(out, *operands)(out, *operands)

    def bind(
        self,
        out: Tensors,
        a: Tensors,
        b: Tensors,
        c: Tensors | None,
        alpha: Factors,
        beta: Factors,
        sizes: Tensor | None = None,
    ) -> Launch:
        """The launch for lists of tensors that lie like these."""
        if sizes is not None or isinstance(alpha, Tensor) or isinstance(beta, Tensor):
            return self._with_read_numbers
        # Groups with nothing to add up are beta C, which is not the vendor's business.
        full = [i for i in range(len(out)) if out[i].numel() and a[i].size(1)]
        rest = [i for i in range(len(out)) if not (out[i].numel() and a[i].size(1))]
        forms = [Product.of(out[i], a[i], b[i]) for i in full]
        mean = sum(2.0 * out[i].numel() * a[i].size(1) for i in full) / max(1, len(full))
        one_call = self.in_one_call(name_of(a[0].dtype), name_of(out[0].dtype), mean)
        dense = [form for form in forms if form is not None]
        order = [*full, *rest]  # first those that need a handle: there may be none, and then nothing must be written
        if not one_call or not full or len(dense) < len(full):
            return self._loop(order, out, a, b, c, alpha, beta)
        return self._at_once(order, dense, out, a, self._loop(rest, out, a, b, c, alpha, beta))

    def _with_read_numbers(
        self,
        out: Tensors,
        a: Tensors,
        b: Tensors,
        c: Tensors | None,
        alpha: Factors,
        beta: Factors,
        sizes: Tensor | None = None,
    ) -> None:
        """Numbers that are on the device are the host's business here: it waits for them."""
        if self._product.caller.capturing():
            given = {"alpha": alpha, "beta": beta, "sizes": sizes}
            there = " and ".join(name for name, value in given.items() if isinstance(value, Tensor))
            raise DeviceError(
                f"grouped_gemm: {there} on the device must be read by the host, which a CUDA graph cannot capture; "
                "expected numbers, and parts of matrices instead of sizes, or backend='cuda' where it takes these "
                "products"
            )
        if sizes is not None:
            out, a, b, c = in_use(sizes, out, a, b, c)
        self(out, a, b, c, read_factors(alpha, len(out)), read_factors(beta, len(out)))

    def _loop(
        self,
        groups: Sequence[int],
        out: Tensors,
        a: Tensors,
        b: Tensors,
        c: Tensors | None,
        alpha: Numbers,
        beta: Numbers,
    ) -> Launch:
        own_c = [None] * len(out) if c is None else c
        product = self._product
        launches = [(i, product.bind(out[i], a[i], b[i], own_c[i], alpha[i], beta[i])) for i in groups]
        makes_copies = any(product.makes_copies(launch) for _, launch in launches)

        def run(
            out: Tensors,
            a: Tensors,
            b: Tensors,
            c: Tensors | None,
            alpha: Numbers,
            beta: Numbers,
            sizes: None = None,
        ) -> None:
            if makes_copies:
                product.need_no_capture()
            for i, launch in launches:
                launch(out[i], a[i], b[i], None if c is None else c[i], alpha[i], beta[i])

        return run

    def _at_once(
        self, order: Sequence[int], forms: Sequence[Product], out: Tensors, a: Tensors, others: Launch
    ) -> Launch:
        """One call for the first groups of `order`, those with a form. Sizes are arrays on the host, addresses an array
        on the device."""
        loops: list[Launch] = []  # made at the first call that needs one
        count, dtype, device = len(forms), a[0].dtype, out[0].device
        full, index = order[:count], device.index or 0
        swaps = [form.swap for form in forms]

        def ints(values: Any) -> Any:
            return (ctypes.c_int * count)(*values)

        turned = [ints(form.turn_a for form in forms), ints(form.turn_b for form in forms)]
        sizes_there = [ints(form.m for form in forms), ints(form.n for form in forms), ints(form.k for form in forms)]
        leads = [ints(getattr(form, name).leading for form in forms) for name in ("a", "b", "d")]
        product, library = self._product, self._product.library
        ones, kind = ints([1] * count), ctypes.c_int(library.vendor.codes[name_of(dtype)])
        function, pool = library.function("gemm_grouped"), product.pool(device)
        precision = product.precision(dtype)

        def run(
            out: Tensors,
            a: Tensors,
            b: Tensors,
            c: Tensors | None,
            alpha: Numbers,
            beta: Numbers,
            sizes: None = None,
        ) -> None:
            if product.caller.device() != index:
                with product.caller.on(index):
                    return run(out, a, b, c, alpha, beta)
            addresses = [(b if swap else a)[i].data_ptr() for i, swap in zip(full, swaps, strict=True)]
            addresses += [(a if swap else b)[i].data_ptr() for i, swap in zip(full, swaps, strict=True)]
            addresses += [out[i].data_ptr() for i in full]
            # A capture would record a copy from host memory that is gone when the graph is replayed.
            if product.caller.capturing() or any(one % _ALIGN for one in addresses):
                if not loops:
                    loops.append(self._loop(order, out, a, b, c, alpha, beta))
                return loops[0](out, a, b, c, alpha, beta)
            with torch._C._AutoDispatchBelowAutograd(), product.copies(device):
                # From ordinary memory, the driver takes its own copy before this returns.
                table = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
                start, size = table.data_ptr(), 8 * count
                factors = [(ctypes.c_float * count)(*(values[i] for i in full)) for values in (alpha, beta)]
                compute, mode = precision()
                handle = pool.take()  # before anything is written: there may be none
                try:
                    if handle.math_mode != mode:
                        handle.set_math_mode(mode)
                    others(out, a, b, c, alpha, beta)
                    for i in full:
                        if c is not None and beta[i] != 0.0 and c[i].data_ptr() != out[i].data_ptr():
                            out[i].copy_(c[i].expand_as(out[i]))
                    status = function(
                        handle.parameter, *turned, *sizes_there, factors[0], address(start), kind, leads[0],
                        address(start + size), kind, leads[1], factors[1], address(start + 2 * size), kind, leads[2],
                        count, ones, compute,
                    )  # fmt: skip
                finally:
                    pool.give(handle)
                if status:
                    raise library.failure("gemm_grouped", status)
            return None

        return run

    def rows(self, op: str) -> Launch:
        """Groups that are rows of one tensor: the host must know which rows, so it waits for them."""
        masked = op == "grouped_gemm_masked"

        def launch(out: Tensor, a: Tensor, b: Tensor, index: Tensor, *rest: Any) -> None:
            if self._product.caller.capturing():
                raise DeviceError(
                    f"{op}: {'counts' if masked else 'ends'} is on the device and must be read by the host, which a "
                    f"CUDA graph cannot capture; call {op} outside of the capture"
                )
            with torch._C._AutoDispatchBelowAutograd():
                if op == k_groups.OP:
                    return self._along_k(out, a, b, index, rest[0])
                if masked:
                    parts = [(group, out[group, rows], a[group, rows]) for group, rows in masked_rows(index, a.size(1))]
                else:
                    parts = [(group, out[rows], a[rows]) for group, rows in contiguous_rows(index, a.size(0))]
                if parts:
                    groups, outs, lefts = zip(*parts, strict=True)
                    count = len(groups)
                    self(outs, lefts, [b[group].t() for group in groups], None, [1.0] * count, [0.0] * count)
            return None

        return launch

    def _along_k(self, out: Tensor, a: Tensor, b: Tensor, ends: Tensor, c: Tensor | None) -> None:
        groups = k_groups.all_rows(k_groups.OP, ends, a.size(0))
        count, beta = len(groups), 0.0 if c is None else 1.0
        if count and out.numel():
            added = None if c is None else c.unbind(0)
            lefts, rights = [a[rows].t() for rows in groups], [b[rows] for rows in groups]
            self(out.unbind(0), lefts, rights, added, [1.0] * count, [beta] * count)
