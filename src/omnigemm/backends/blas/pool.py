"""Handles of a vendor's library. They are expensive to make, and one belongs to one call at a time.

A handle is kept for its stream: its workspace may still be in use there when the call that used it is long over.
"""

from __future__ import annotations

import ctypes
import time
import weakref

import torch

from ...core.errors import DeviceError, OmniGemmError
from .caller import Caller
from .kept import Kept, One
from .library import Functions, Library

# Seconds that a capture waits for a handle in use, which is for the time that the library takes to queue a product.
_PATIENCE, _NAP = 10.0, 0.0002


class Handle(One):
    """A handle, the stream that it is bound to (None: to another one in each call), and its workspace."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        value = ctypes.c_void_p()
        library.call("create", ctypes.byref(value))
        self._library = library
        self.parameter = ctypes.c_void_p.from_param(value.value)
        self.math_mode = 0  # the library's default

    def bind(self, stream: int, workspace: torch.Tensor | None) -> None:
        self._library.call("set_stream", self.parameter, stream)  # takes an earlier workspace away
        self.workspace = workspace
        if workspace is not None:
            self._library.call("set_workspace", self.parameter, workspace.data_ptr(), workspace.numel())

    def set_math_mode(self, mode: int) -> None:
        self._library.call("set_math_mode", self.parameter, mode)
        self.math_mode = mode

    def destroy(self) -> None:
        self._library.end("destroy", self.parameter)


class Pool(Kept[Handle]):
    """Handles of one device, taken and given back without waiting.

    What is captured into a CUDA graph may be replayed beside anything, so it shares no workspace with a stream: a free
    handle is bound just for the call, to memory of the graph's own.
    """

    def __init__(self, library: Library, device: torch.device, caller: Caller) -> None:
        super().__init__(shrinks=not library.waits)
        self._library, self._device = library, device
        self._index = device.index or 0
        self._stream, self._capturing, self._apart = caller.stream, caller.capturing, caller.apart
        weakref.finalize(self, _close, self._free)  # when nobody has the pool any more, or at exit

    def take(self) -> Handle:
        """For the current device's current stream."""
        stream = self._stream(self._index)
        if self._capturing():
            return self._bound_for_capture(stream)
        try:
            return self._free[stream].pop()
        except (KeyError, IndexError):
            return self._made(stream)

    def prepare(self) -> None:
        """Makes the handle that captures take, if this is the first call on the device."""
        if not self._free:
            self.give(Handle(self._library))

    def _made(self, stream: int) -> Handle:
        self.prepare()
        workspace = self._apart(self._workspace)  # first: if memory is out, no handle is lost
        made = self._oldest() or Handle(self._library)
        try:
            made.bind(stream, workspace)
        except OmniGemmError:
            made.destroy()
            raise
        made.keep_for(stream, workspace)
        return made

    def _bound_for_capture(self, stream: int) -> Handle:
        workspace = self._workspace()
        taken = self._free_one()
        taken.stream = None
        try:
            taken.bind(stream, workspace)
        except OmniGemmError:
            self.give(taken)
            raise
        return taken

    def _free_one(self) -> Handle:
        """Any that nobody has. None can be made now, so those in use are waited for."""
        since = time.monotonic()
        while self._free:
            for free in (self._free.get(None, []), *tuple(self._free.values())):
                try:
                    return free.pop()
                except IndexError:
                    continue
            if time.monotonic() - since > _PATIENCE:
                raise DeviceError(
                    f"{self._library.vendor.title}: all handles on {self._device} are in use, for {_PATIENCE:.0f} s by "
                    f"now, and a CUDA graph is being captured, in which none can be made"
                )
            time.sleep(_NAP)
        raise not_ready(self._library, self._device)

    def _workspace(self) -> torch.Tensor | None:
        size = self._library.vendor.workspace_bytes
        if not size or not self._library.has("set_workspace"):
            return None
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Destroy every handle that is not in use."""
        _close(self._free)


def not_ready(library: Functions, device: torch.device) -> DeviceError:
    return DeviceError(
        f"{library.vendor.title}: no handle is ready on {device}, and a CUDA graph is being captured; "
        f"call the operation once before the capture"
    )


def _close(kept: dict[int | None, list[Handle]]) -> None:
    for free in kept.values():
        while free:
            free.pop().destroy()
