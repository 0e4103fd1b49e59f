"""What a plan has prepared for tensors, by how they lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByLayout(Generic[T]):
    """Made once for each layout that is met. Slices of ever other tensors have ever other strides, so it is emptied
    rather than left to grow; whoever holds an entry keeps it."""

    LIMIT = 64  # launches of some hundred kilobytes each

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[T]] = {}

    def get(self, layout: Hashable, make: Callable[[], T]) -> T:
        found = self._made.get(layout)
        if found is None:
            found = (make(),)
            if len(self._made) >= self.LIMIT:
                self._made.clear()
            self._made[layout] = found
        return found[0]

    def __len__(self) -> int:
        return len(self._made)
