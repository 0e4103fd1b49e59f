"""The command line: `omnigemm doctor`, `explain`, `bench`, `demo`, `warm`, `cache`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Nothing heavy is imported before this call."""
    try:
        from .app import run

        run(args)
    except KeyboardInterrupt:  # also while the rest is imported
        sys.exit(130)
