"""Handles of a vendor's library. They are expensive to make, and one belongs to one call at a time.

A handle is kept for its stream: its workspace may still be in use there when the call that used it is long over.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
from collections.abc import Iterator

import torch

from ...core.errors import DeviceError, OmniGemmError
from .library import Library


class Handle:
    """A handle bound to a stream, with the workspace that it was given."""

    def __init__(self, library: Library, device: torch.device, stream: int) -> None:
        self.value = ctypes.c_void_p()
        library.call("create", ctypes.byref(self.value))
        self.workspace: torch.Tensor | None = None
        try:
            library.call("set_stream", self.value, stream)
            size = library.vendor.workspace_bytes
            if size and library.has("set_workspace"):
                self.workspace = torch.empty(size, dtype=torch.uint8, device=device)
                library.call("set_workspace", self.value, self.workspace.data_ptr(), size)
        except OmniGemmError:
            library.call("destroy", self.value)
            raise


class Pool:
    """Taken and given back without waiting: a list's pop and append are atomic, so no two calls get the same handle."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._free: dict[tuple[torch.device, int], list[Handle]] = {}
        atexit.register(self.close)

    @contextlib.contextmanager
    def handle(self, device: torch.device, stream: int) -> Iterator[Handle]:
        free = self._free.setdefault((device, stream), [])
        try:
            taken = free.pop()
        except IndexError:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise DeviceError(
                    f"{self._library.vendor.title}: no handle is ready for this stream, and a CUDA graph is being "
                    f"captured; call the operation once on the stream before the capture"
                ) from None
            taken = Handle(self._library, device, stream)
        try:
            yield taken
        finally:
            free.append(taken)

    def close(self) -> None:
        """Destroy every handle that is not in use."""
        for free in self._free.values():
            while free:
                with contextlib.suppress(OmniGemmError):  # at exit, the driver may be gone already
                    self._library.call("destroy", free.pop().value)
