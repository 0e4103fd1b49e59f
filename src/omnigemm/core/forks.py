"""Locks in a process that was forked: another thread may have held one just then, and is not there to release it."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_children(renew: Callable[[], None]) -> None:
    """Do this in every child that is forked from now on; `renew` and what it belongs to are kept for good."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
