"""D = alpha A B + beta C by cuBLASLt, which is asked for an algorithm once and then only runs it.

cuBLAS's own functions choose anew in each call, and that is most of the host's time there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.plan import AddressLaunch
from .caller import Caller, may_reduce_in_16_bits, tf32_allowed
from .choices import REDUCED_IN_FP32, TF32, UNALIGNED, USUAL, Choices, Layout, Opaque, Product, key_of
from .library import LtLibrary
from .matrices import Matrices
from .values import TYPES, address, number
from .workspaces import NO_ROOM, Workspaces

_KEPT = 1024  # products whose algorithms are remembered beyond the plans that use them


def settings(dtype: torch.dtype) -> Callable[[], int]:
    """Tells what torch's switches ask for at the time."""
    if dtype == torch.float32:
        return lambda: TF32 if tf32_allowed() else USUAL
    allowed = may_reduce_in_16_bits[dtype]
    return lambda: USUAL if allowed() else REDUCED_IN_FP32


class Device:
    """What one device has: a handle for all threads and streams, because cuBLASLt's are safe to share, and keep neither
    a stream nor a workspace; and rooms to work in."""

    def __init__(self, library: LtLibrary, device: torch.device, caller: Caller, first: Callable[[], None]) -> None:
        self._library, self._capturing, self._first = library, caller.capturing, first
        self._handle: Opaque | None = None
        self._making = threading.Lock()
        self.rooms = Workspaces(library.vendor.workspace_bytes, device, caller)

    def handle(self) -> Opaque | None:
        """To choose with: None while a CUDA graph is captured. No version can make a handle then, and not all choose
        (docs/decisions.md). So a capture takes what was chosen before it, and has run before, or goes the other way."""
        if self._capturing():
            return None
        if self._handle is None:
            with self._making:
                if self._handle is None:
                    self._first()
                    self._handle = Opaque(self._library, "")
        return self._handle


class LtGemm:
    """Products by one library. What it has no algorithm for is left to another launch, which `first` gets ready on a
    device, before this library is used there: a capture may need it."""

    def __init__(self, library: LtLibrary, caller: Caller, first: Callable[[torch.device], None]) -> None:
        self.library, self._caller, self._first = library, caller, first
        self._devices: dict[int, Device] = {}
        self._choices: dict[Any, Choices] = {}
        self._keeping = threading.Lock()

    def device(self, device: torch.device) -> Device:
        index = device.index or 0
        found = self._devices.get(index)
        if found is None:
            made = Device(self.library, device, self._caller, lambda: self._first(device))
            found = self._devices.setdefault(index, made)
        return found

    def bind_addresses(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, beta: float, otherwise: AddressLaunch
    ) -> AddressLaunch:
        """The launch for matrices that lie like these, which `otherwise` can do without this library."""
        d, left, right = Matrices.of(out), Matrices.of(a), Matrices.of(b)
        assert d is not None
        assert left is not None
        assert right is not None
        swap, index, adds = d.rowwise, out.device.index or 0, c is not None and beta != 0.0
        added = _added(out, c, d) if adds else None
        apart = added is not None
        choices = self._chosen_for(out, a, (d, left, right, added or d))
        rooms = self.device(out.device).rooms
        multiply, wanted, take, give = self.library.function("multiply"), settings(a.dtype), rooms.take, rooms.give
        current_device, current_stream = self._caller.device, self._caller.stream
        first, second, third, fourth = choices.a, choices.b, choices.c, choices.d

        def at(
            alpha: float, beta: float, to: int, a: int, b: int, c: int = 0, before: Callable[[], None] | None = None
        ) -> bool:
            """`before` is done first, if there is room to work in, and puts C into `out`."""
            if before is None and (current_device() != index or (adds and c != to and not apart)):
                return False
            if apart and before is not None:  # the layout of C here is that of its own place
                return otherwise(alpha, beta, to, a, b, c, before)
            x, y = (b, a) if swap else (a, b)
            source = c if apart else to
            setting = wanted()
            aligned = not (x | y | source | to) & UNALIGNED
            chosen = choices[setting if aligned else key_of(setting, x, y, source, to)]
            if chosen is None:
                return otherwise(alpha, beta, to, a, b, c, before)
            handle, operation, algorithm, size = chosen
            stream = current_stream(index)
            room = take(stream, size) if size else NO_ROOM
            try:
                if before is not None:
                    before()
                status = multiply(
                    handle, operation,
                    number(alpha), address(x), first, address(y), second,
                    number(beta), address(source), third, address(to), fourth,
                    algorithm, room.address, room.size, address(stream),
                )  # fmt: skip
            finally:
                if size:
                    give(room)
            if status:
                raise self.library.failure("multiply", status)
            return True

        return at

    def _chosen_for(self, out: Tensor, a: Tensor, forms: tuple[Matrices, Matrices, Matrices, Matrices]) -> Choices:
        """Shared by all plans of one product: groups are often bound anew for the same sizes."""
        d, left, right, added = forms
        swap, k = d.rowwise, a.size(-1)
        rows, columns = out.shape[-2:]
        m, n = (columns, rows) if swap else (rows, columns)
        first, second = (right, left) if swap else (left, right)
        # A matrix that lies as D does is taken as it is, another one transposed.
        transa, transb = first.rowwise != swap, second.rowwise != swap
        operands, result = TYPES[a.dtype], TYPES[out.dtype]
        product = Product(
            transa,
            transb,
            Layout(operands, *((k, m) if transa else (m, k)), first.leading, first.step),
            Layout(operands, *((n, k) if transb else (k, n)), second.leading, second.step),
            Layout(result, m, n, added.leading, added.step),
            Layout(result, m, n, d.leading, d.step),
            out.size(0) if out.dim() == 3 else 1,
        )
        key = out.device.index or 0, product
        found = self._choices.get(key)
        if found is None:
            there = self.device(out.device)
            found = Choices(self.library, product, there.rooms.most, there.handle)
            with self._keeping:
                found = self._choices.setdefault(key, found)
                if len(self._choices) > _KEPT:
                    del self._choices[next(iter(self._choices))]  # the oldest
        return found


def _added(out: Tensor, c: Tensor | None, d: Matrices) -> Matrices | None:
    """C as the library reads it in its place, apart from D: of the same type and lying the same way, or else None."""
    if c is None or c.dtype != out.dtype or c.shape[-2:] != out.shape[-2:]:
        return None
    form = Matrices.of(c)
    return form if form is not None and form.rowwise == d.rowwise else None
