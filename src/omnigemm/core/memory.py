"""How much memory this machine has, for limits that scale with it."""

from __future__ import annotations

import os
from functools import cache


@cache
def physical_bytes() -> int:
    """Physical memory, or 8 GiB where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 << 30
