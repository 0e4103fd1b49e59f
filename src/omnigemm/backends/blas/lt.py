"""D = alpha A B + beta C by cuBLASLt, which is asked for an algorithm once and then only runs it.

cuBLAS's own functions choose anew in each call, and that is most of the host's time there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.dtypes import name_of
from ...core.plan import AddressLaunch
from .caller import Caller, allows, switches
from .choices import NO_WAY, REDUCED_IN_FP32, TF32, USUAL, Choices, Described, Layout, Opaque, key_of
from .library import LtLibrary
from .matrices import Matrices, Product
from .pool import not_ready
from .values import address, number
from .workspaces import NO_ROOM, Room, Workspaces

_KEPT = 1024  # products whose algorithms are remembered beyond the plans that use them

# What a launch did before, to do it again at the same addresses: the factors, the stream, what torch's switches
# answered, the stream's free rooms and the one it had (None: it needs none), and what it handed over.
_Done = tuple[float | None, float, int, Any, list[Room] | None, Room, tuple[Any, ...]]
_NOTHING: _Done = (None, 0.0, 0, None, None, NO_ROOM, ())  # None: no call has such a factor
_DONE = 256  # of which a launch, which serves all weights of a shape, keeps so many: some kilobyte each

_thread = threading.local()  # `bound` if it has the device's context, without which nothing can be launched


def setting_of(dtype: torch.dtype, answer: Any) -> int:
    """What torch's switches ask for by their answer."""
    if dtype == torch.float32:
        return TF32 if allows(answer) else USUAL
    return USUAL if allows(answer) else REDUCED_IN_FP32


class Device:
    """What one device has: a handle for all threads and streams, because cuBLASLt's are safe to share, and keep neither
    a stream nor a workspace; and rooms to work in."""

    def __init__(self, library: LtLibrary, device: torch.device, caller: Caller, first: Callable[[], None]) -> None:
        self._library, self._capturing, self._first, self._device = library, caller.capturing, first, device
        self._handle: Opaque | None = None
        self._making = threading.Lock()
        vendor = library.vendor
        self.rooms = Workspaces(vendor.workspace_bytes, device, caller, shrinks=vendor.wait is None)

    def handle(self) -> Opaque | None:
        """To choose with: None while a CUDA graph is captured. No version can make a handle then, and not all choose
        (docs/decisions.md). So a capture takes what was chosen before it, and has run before, or goes the other way.
        Where nothing is chosen, that handle is all that a capture needs."""
        if self._capturing():
            if self._library.chooses:
                return None
            if self._handle is None:
                raise not_ready(self._library, self._device)
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
        self, out: Tensor, a: Tensor, product: Product, c: Tensor | None, beta: float, otherwise: AddressLaunch
    ) -> AddressLaunch:
        """The launch for matrices that lie like these, which `otherwise` can do without this library, or refuses."""
        swap, index, adds = product.swap, out.device.index or 0, c is not None and beta != 0.0
        added = _added(out, c, product.d) if adds else None
        apart = added is not None
        choices = self._chosen_for(out, a, product, added or product.d)
        rooms = self.device(out.device).rooms
        multiply, dtype, answer = self.library.function("multiply"), a.dtype, switches[a.dtype]
        current_device, current_stream, capturing = self._caller.device, self._caller.stream, self._caller.capturing
        uncaptured = self._caller.uncaptured
        first, second, third, fourth = choices.a, choices.b, choices.c, choices.d
        done: dict[tuple[int, int, int, int], _Done] = {}  # by the addresses of `out`, A, B and C
        done_at = done.get

        def at(
            alpha: float, beta: float, to: int, a: int, b: int, c: int = 0, before: Callable[[], None] | None = None
        ) -> bool:
            """`before` is done first, if there is room to work in, and puts C into `out`.

            At addresses of before, what was handed over then is handed over again, if all that it depends on is as it
            was, and the room is free."""
            if before is not None:
                return anew(alpha, beta, to, a, b, c, before)
            if current_device() != index:
                return False
            last_alpha, last_beta, last_stream, answered, free, room, arguments = done_at((to, a, b, c), _NOTHING)
            if (
                alpha != last_alpha
                or beta != last_beta
                or current_stream(index) != last_stream
                or answer() != answered
                or (free is not None and last_stream != uncaptured and capturing())
            ):
                return anew(alpha, beta, to, a, b, c)
            if free is None:
                status = multiply(*arguments)
            else:
                try:
                    mine = free.pop()
                except IndexError:  # another thread has it
                    return anew(alpha, beta, to, a, b, c)
                if mine is not room:
                    free.append(mine)
                    return anew(alpha, beta, to, a, b, c)
                try:
                    status = multiply(*arguments)
                finally:
                    free.append(room)
            if status:
                if not hasattr(_thread, "bound"):
                    return anew(alpha, beta, to, a, b, c)
                raise self.library.failure("multiply", status)
            return True

        def anew(
            alpha: float, beta: float, to: int, a: int, b: int, c: int, before: Callable[[], None] | None = None
        ) -> bool:
            if before is None and adds and c != to and not apart:
                return False
            if apart and before is not None:  # the layout of C here is that of its own place
                return otherwise(alpha, beta, to, a, b, c, before)
            if not hasattr(_thread, "bound"):
                capturing()  # gives a thread that did nothing with CUDA before the device's context
                _thread.bound = True
            x, y = (b, a) if swap else (a, b)
            source = c if apart else to
            answered = answer()
            key = key_of(setting_of(dtype, answered), x, y, source, to)
            chosen = choices[key]
            if chosen is None:
                return otherwise(alpha, beta, to, a, b, c, before)
            handle, operation, algorithm, size = chosen
            stream = current_stream(index)
            room = rooms.take(stream, size) if size else NO_ROOM
            arguments = (
                handle, operation,
                number(alpha), address(x), first, address(y), second,
                number(beta), address(source), third, address(to), fourth,
                algorithm, room.address, room.size, address(stream),
            )  # fmt: skip
            try:
                if before is not None:
                    before()
                status = multiply(*arguments)
            finally:
                if size:
                    rooms.give(room)
            if status:
                if algorithm is None and self.library.means(status, *NO_WAY):
                    choices[key] = None
                    return otherwise(alpha, beta, to, a, b, c, before)
                raise self.library.failure("multiply", status)
            if before is None and (not size or room.stream is not None):  # a captured call's room is its own for good
                free = rooms.kept(stream) if size else None
                if len(done) >= _DONE and (to, a, b, c) not in done:
                    done.clear()
                done[to, a, b, c] = alpha, beta, stream, answered, free, room, arguments
            return True

        return at

    def _chosen_for(self, out: Tensor, a: Tensor, product: Product, added: Matrices) -> Choices:
        """Shared by all plans of one product: groups are often bound anew for the same sizes."""
        codes, (_, m, n, k, batch, turn_a, turn_b, first, second, d) = self.library.vendor.codes, product
        operands, result = codes[name_of(a.dtype)], codes[name_of(out.dtype)]
        described = Described(
            turn_a,
            turn_b,
            Layout(operands, *((k, m) if turn_a else (m, k)), first.leading, first.step),
            Layout(operands, *((n, k) if turn_b else (k, n)), second.leading, second.step),
            Layout(result, m, n, added.leading, added.step),
            Layout(result, m, n, d.leading, d.step),
            batch,
        )
        key = out.device.index or 0, described
        found = self._choices.get(key)
        if found is None:
            there = self.device(out.device)
            found = Choices(self.library, described, there.rooms.most, there.handle)
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
