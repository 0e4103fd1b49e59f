"""What is dear to make and belongs to one stream, and there to one call at a time."""

from __future__ import annotations

from itertools import count
from typing import Generic, TypeVar

from torch import Tensor

# How many may lie idle, each with 32 MiB on NVIDIA's GPUs: twice as many as torch has streams of one priority.
IDLE = 64
_ages = count()


class One:
    """The stream that it is kept for (None: it is not kept for one), and the memory that it works in."""

    def __init__(self, stream: int | None = None, workspace: Tensor | None = None) -> None:
        self.keep_for(stream, workspace)

    def keep_for(self, stream: int | None, workspace: Tensor | None) -> None:
        self.stream, self.workspace, self.age = stream, workspace, next(_ages)


T = TypeVar("T", bound=One)


class Kept(Generic[T]):
    """Taken and given back without waiting: a list's pop and append are atomic, so no two calls get the same one.

    Memory may still be in use on its stream when the call that took it is long over. It came from torch's allocator on
    that stream, where it is handed out again to later work of that stream alone: so it goes back without waiting. A
    vendor that asks to be waited for keeps all that was made: the stream may be gone.
    """

    def __init__(self, shrinks: bool) -> None:
        self._free: dict[int | None, list[T]] = {}
        self._shrinks = shrinks

    def give(self, one: T) -> None:
        if one.stream is None:
            one.workspace = None  # back to the graph's memory, for what is captured next
        try:
            self._free[one.stream].append(one)
        except KeyError:
            self._free.setdefault(one.stream, []).append(one)

    def _oldest(self) -> T | None:
        """Away from its stream, if so many lie idle that it should serve another one."""
        if not self._shrinks:
            return None
        idle = [(one, free) for of, free in tuple(self._free.items()) if of is not None for one in tuple(free)]
        if len(idle) < IDLE:
            return None
        for one, free in sorted(idle, key=lambda pair: pair[0].age):
            try:
                free.remove(one)
            except ValueError:  # another thread has it by now
                continue
            return one
        return None
