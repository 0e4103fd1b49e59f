"""Handles of a vendor's library. They are expensive to make, and one belongs to one call at a time.

A handle is kept for its stream: its workspace may still be in use there when the call that used it is long over.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes

import torch

from ...core.errors import DeviceError, OmniGemmError
from .caller import Caller
from .library import Library


class Handle:
    """A handle, the stream that it is bound to (None: to another one in each call), and its workspace."""

    def __init__(self, library: Library) -> None:
        value = ctypes.c_void_p()
        library.call("create", ctypes.byref(value))
        self._library = library
        self.parameter = ctypes.c_void_p.from_param(value.value)
        self.stream: int | None = None
        self.workspace: torch.Tensor | None = None
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
        self._library.call("destroy", self.parameter)


class Pool:
    """Handles of one device. Taken and given back without waiting: a list's pop and append are atomic, so no two calls
    get the same handle.

    What is captured into a CUDA graph may be replayed beside anything, so it shares no workspace with a stream: a free
    handle is bound just for the call, to memory of the graph's own.
    """

    def __init__(self, library: Library, device: torch.device, caller: Caller) -> None:
        self._library, self._device = library, device
        self._index = device.index or 0
        self._stream, self._capturing = caller.stream, caller.capturing
        self._free: dict[int | None, list[Handle]] = {}
        atexit.register(self.close)

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

    def give(self, handle: Handle) -> None:
        if handle.stream is None:
            handle.workspace = None  # back to the graph's memory, for what is captured next
        try:
            self._free[handle.stream].append(handle)
        except KeyError:
            self._free.setdefault(handle.stream, []).append(handle)

    def _made(self, stream: int) -> Handle:
        self.prepare()
        workspace = self._workspace()  # first: if memory is out, no handle is lost
        made = Handle(self._library)
        try:
            made.bind(stream, workspace)
        except OmniGemmError:
            made.destroy()
            raise
        made.stream = stream
        return made

    def _bound_for_capture(self, stream: int) -> Handle:
        workspace = self._workspace()
        for free in (self._free.get(None, []), *tuple(self._free.values())):
            try:
                taken = free.pop()
            except IndexError:
                continue
            taken.stream = None
            try:
                taken.bind(stream, workspace)
            except OmniGemmError:
                self.give(taken)
                raise
            return taken
        raise DeviceError(
            f"{self._library.vendor.title}: no handle is ready on {self._device}, and a CUDA graph is being captured; "
            f"call the operation once before the capture"
        )

    def _workspace(self) -> torch.Tensor | None:
        size = self._library.vendor.workspace_bytes
        if not size or not self._library.has("set_workspace"):
            return None
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Destroy every handle that is not in use."""
        for free in self._free.values():
            while free:
                with contextlib.suppress(OmniGemmError):  # at exit, the driver may be gone already
                    free.pop().destroy()
