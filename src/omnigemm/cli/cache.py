"""`omnigemm cache`: the folder of compiled kernels. Its entries are sub-folders, one per kernel."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path

from rich.markup import escape

from ..core.settings import cache_dir
from . import output

WHY_EMPTY = "The CPU backend compiles nothing, so on this machine the folder stays empty."


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    bytes: int
    age_seconds: float


def _is_entry(path: Path) -> bool:
    # A link is not ours: what it points at may be anything.
    return path.is_dir() and not path.is_symlink()


def entries(folder: Path) -> list[Entry]:
    """The compiled kernels in the folder, newest first."""
    if not folder.is_dir():
        return []
    now = time.time()
    found = [
        Entry(one.name, _size(one), max(0.0, now - one.lstat().st_mtime)) for one in folder.iterdir() if _is_entry(one)
    ]
    return sorted(found, key=lambda one: (one.age_seconds, one.name))


def _size(folder: Path) -> int:
    return sum(one.lstat().st_size for one in folder.rglob("*") if one.is_file() and not one.is_symlink())


def clear(folder: Path) -> list[str]:
    """Remove every entry of the folder; links and loose files stay. The names of what was removed."""
    check_safe(folder)
    removed = []
    for entry in entries(folder):
        # rmtree removes links found inside an entry, and never what they point at.
        shutil.rmtree(folder / entry.name)
        removed.append(entry.name)
    return removed


def check_safe(folder: Path) -> None:
    """Refuse a folder that holds more than a cache, because a variable was set wrongly."""
    real = folder.resolve()
    home = Path.home().resolve()
    if real == Path(real.anchor) or real == home or real in home.parents:
        raise output.CommandError(
            f"the cache folder is {folder}, which is the home folder or above it; nothing was removed"
        )


def run_path(*, as_json: bool = False) -> int:
    folder = cache_dir()
    if as_json:
        output.print_json({"path": str(folder), "exists": folder.is_dir()})
    else:
        print(folder)
    return 0


def run_list(*, as_json: bool = False) -> int:
    folder = cache_dir()
    found = entries(folder)
    if as_json:
        output.print_json(
            {
                "path": str(folder),
                "entries": [dataclasses.asdict(one) for one in found],
                "bytes": sum(one.bytes for one in found),
            }
        )
        return 0
    screen = output.console()
    if not found:
        screen.print(f"{folder} is empty. {WHY_EMPTY}", soft_wrap=True, markup=False)
        return 0
    table = output.table(escape(str(folder)), ("kernel", "size", "age"), right=("size", "age"))
    for one in found:
        table.add_row(escape(one.name), _bytes(one.bytes), _age(one.age_seconds))
    screen.print(table)
    screen.print(f"{len(found)} kernels, {_bytes(sum(one.bytes for one in found))}")
    return 0


def run_clear(*, yes: bool = False, as_json: bool = False) -> int:
    folder = cache_dir()
    check_safe(folder)
    found = entries(folder)
    if found and not yes and not _confirm(f"Remove {len(found)} compiled kernels from {folder}?"):
        output.print_error("nothing was removed; --yes removes without asking")
        return 1
    removed = clear(folder)
    if as_json:
        output.print_json({"path": str(folder), "removed": removed})
    else:
        output.console().print(f"{len(removed)} kernels removed from {folder}.", soft_wrap=True, markup=False)
    return 0


def _confirm(question: str) -> bool:
    """Asked on stderr, so that stdout stays clean; silence means no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 10**6 else f"{count / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
