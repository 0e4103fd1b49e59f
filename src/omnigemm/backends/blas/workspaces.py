"""Memory that products work in, where the library takes it with each product instead of keeping it in a handle."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from .caller import Caller
from .kept import Kept, One

_address, _size = ctypes.c_void_p.from_param, ctypes.c_size_t.from_param


class Room(One):
    """Memory as C values, and the stream that it is kept for (None: it is not kept)."""

    def __init__(self, memory: torch.Tensor | None, stream: int | None) -> None:
        super().__init__(stream, memory)
        self.address = _address(0 if memory is None else memory.data_ptr())
        self.size = _size(0 if memory is None else memory.numel())


NO_ROOM = Room(None, None)


class Workspaces(Kept[Room]):
    """Of one device. A product may be several kernels, so not even two calls on one stream have one room at once."""

    def __init__(self, size: int, device: torch.device, caller: Caller, shrinks: bool) -> None:
        super().__init__(shrinks)
        self.most = size
        self._device, self._capturing, self._apart = device, caller.capturing, caller.apart

    def take(self, stream: int, size: int) -> Room:
        """For the current device's current stream, which this is."""
        if self._capturing():
            # Of the graph's own memory, just as much as it needs: a replay shares it with nobody.
            return Room(self._memory(size), None)
        try:
            return self._free[stream].pop()
        except (KeyError, IndexError):
            made = Room(self._apart(partial(self._memory, self.most)), stream)
            if (other := self._oldest()) is not None:
                other.workspace = None  # launches may remember the room, and find that it is no longer there
            return made

    def give(self, room: Room) -> None:
        if room.stream is not None:
            super().give(room)

    def kept(self, stream: int) -> list[Room]:
        """Those of a stream that nobody has now. Whoever pops one appends it again."""
        return self._free[stream]

    def _memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)
