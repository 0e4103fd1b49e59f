"""`omnigemm cache`: the folder of compiled kernels, each a sub-folder, and of measured tables, each a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ..backends.cuda import measured
from ..backends.cuda.jit import owned, store
from ..core.settings import cache_dir, home
from . import folders, output
from .folders import KERNELS, TABLES, Place

WHY_EMPTY = "The CPU backend compiles nothing, so without a GPU the folder stays empty until `omnigemm warm` fills it."


@dataclasses.dataclass(frozen=True)
class Entry:
    """One folder of the cache. Kernel and architecture are None where spec.json does not tell."""

    name: str
    kernel: str | None
    arch: str | None
    bytes: int
    age_seconds: float


@dataclasses.dataclass(frozen=True)
class Table:
    """What `omnigemm tune` measured on one kind of GPU. Rows are None where the file cannot be used."""

    name: str
    rows: int | None
    weights: int | None
    bytes: int
    age_seconds: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    name: str
    ok: bool
    reason: str
    removed: bool = False


def _is_entry(path: Path) -> bool:
    # A link is not ours: what it points at may be anything. Nor is a folder that is not named as entries are.
    return bool(store.ENTRY.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def entries(folder: Path) -> list[Entry]:
    """The compiled kernels below the cache folder, newest first."""
    kernels = folder / KERNELS
    found = []
    for name in folders.names(kernels):
        with contextlib.suppress(FileNotFoundError):  # another process has taken it away
            if _is_entry(kernels / name):
                found.append(_describe(kernels / name))
    return sorted(found, key=lambda one: (one.age_seconds, one.name))


def _describe(folder: Path) -> Entry:
    about: Any = {}
    spec = folder / "spec.json"
    if spec.is_file():
        # `verify` says what is wrong with it.
        with contextlib.suppress(OSError, ValueError):
            about = json.loads(spec.read_bytes())
    kernel, arch = (about.get("name"), about.get("arch")) if isinstance(about, dict) else (None, None)
    age = max(0.0, time.time() - folder.lstat().st_mtime)
    return Entry(
        folder.name,
        kernel if isinstance(kernel, str) else None,
        arch if isinstance(arch, str) else None,
        _size(folder),
        age,
    )


def _size(folder: Path) -> int:
    return sum(one.lstat().st_size for one in folder.rglob("*") if one.is_file() and not one.is_symlink())


def tables(folder: Path) -> list[Table]:
    """The measured tables below the cache folder, by name."""
    place = folder / TABLES
    found = []
    for name in _table_names(place):
        rows = None
        # `verify` says what is wrong with it.
        with contextlib.suppress(owned.Damaged, owned.Refused, OSError):
            own = measured.read(place, name)
            rows = None if own is None else own.rows
        with contextlib.suppress(FileNotFoundError):
            about = (place / f"{name}{measured.SUFFIX}").lstat()
            weights = None if rows is None else len({(row["n"], row["k"], row["scales"]) for row in rows})
            age = max(0.0, time.time() - about.st_mtime)
            found.append(Table(name, None if rows is None else len(rows), weights, about.st_size, age))
    return found


def _table_names(place: Path) -> list[str]:
    found = [name.removesuffix(measured.SUFFIX) for name in folders.names(place) if name.endswith(measured.SUFFIX)]
    return [name for name in found if measured.NAME.fullmatch(name)]


def clear_tables(folder: Path) -> list[str]:
    """Remove the measured tables, and nothing else. The removed ones."""
    check_safe(folder, TABLES)
    place = folder / TABLES
    removed = []
    for name in _table_names(place):
        path = place / f"{name}{measured.SUFFIX}"
        if path.is_file() and not path.is_symlink() and _remove(place, path.name):
            removed.append(name)
    owned.remove_stale(place)
    return removed


def clear(folder: Path) -> list[str]:
    """Remove every entry, and what failed or unfinished compilations left; all else stays. The removed entries."""
    check_safe(folder, KERNELS)
    kernels = folder / KERNELS
    # Links found inside an entry are removed, and never what they point at.
    removed = [entry.name for entry in entries(folder) if _remove(kernels, entry.name)]
    failed = kernels / store.FAILED
    if failed.is_dir() and not failed.is_symlink():
        _remove(kernels, store.FAILED)
    owned.remove_stale(kernels)
    return removed


def verify(folder: Path, *, repair: bool = False) -> list[Verdict]:
    """Check every kernel: digests, owner, permissions. With `repair`, those that fail are removed."""
    if repair:
        check_safe(folder, KERNELS)
    kernels = folder / KERNELS
    found = []
    # A link with an entry's name is reported too, because it is what a lookup would meet.
    for name in folders.names(kernels):
        if not store.ENTRY.fullmatch(name):
            continue
        try:
            ok, reason = store.read_entry(kernels, name) is not None, "vanished"
        except (owned.Damaged, owned.Refused, OSError) as error:
            ok, reason = False, str(error)
        if ok:
            found.append(Verdict(name, True, "whole"))
        elif os.path.lexists(kernels / name):  # else another process has removed it, which is no damage
            found.append(Verdict(name, False, reason, removed=repair and _remove(kernels, name)))
    return found


def _remove(place: Path, name: str) -> bool:
    """False if another process was faster."""
    try:
        owned.remove(place, name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise output.CommandError(f"{place / name} cannot be removed: {error.strerror}") from error
    return True


def verify_tables(folder: Path, *, repair: bool = False) -> list[Verdict]:
    """Check every measured table: owner, permissions, rows. With `repair`, what cannot be used is removed: the file, or
    the rows in it."""
    if repair:
        check_safe(folder, TABLES)
    place = folder / TABLES
    found = []
    for name in _table_names(place):
        try:
            own = measured.read(place, name)
        except (owned.Damaged, owned.Refused, OSError) as error:
            removed = repair and _remove(place, f"{name}{measured.SUFFIX}")
            found.append(Verdict(name, False, str(error), removed))
            continue
        if own is None:  # another process has removed it
            continue
        if own.faults and repair:
            measured.add(name, ())
        found.append(Verdict(name, not own.faults, "; ".join(own.faults) or "whole", repair and bool(own.faults)))
    return found


def check_safe(folder: Path, *parts: str) -> None:
    """Refuse a folder that holds more than a cache, because a variable was set wrongly, and parts that are links."""
    real, own = Path(os.path.realpath(folder)), home()
    above = [] if own is None else [Path(os.path.realpath(own)), *Path(os.path.realpath(own)).parents]
    if real == Path(real.anchor) or real in above:
        raise output.CommandError(
            f"the cache folder is {folder}, which is the home folder or above it; nothing was removed"
        )
    for part in parts:
        if os.path.islink(folder / part):
            raise output.CommandError(f"{folder / part} is a symbolic link, which is not followed; nothing was removed")


def run_path(*, as_json: bool = False) -> int:
    folder = cache_dir()
    if as_json:
        output.print_json({"path": str(folder), "exists": os.path.isdir(folder)})
    else:
        output.print_line(str(folder))
    return 0


def _check_folder(folder: Path) -> None:
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise output.CommandError(f"the cache folder {folder} is not a folder")


def run_list(*, as_json: bool = False) -> int:
    folder = cache_dir()
    _check_folder(folder)
    with output.refusals("the cache folder cannot be read"):
        found, measured_here = entries(folder), tables(folder)
    if as_json:
        output.print_json(
            {
                "path": str(folder),
                "entries": [dataclasses.asdict(one) for one in found],
                "bytes": sum(one.bytes for one in found),
                "tables": [dataclasses.asdict(one) for one in measured_here],
            }
        )
        return 0
    screen = output.console()
    if not found and not measured_here:
        screen.print(f"{folder} is empty. {WHY_EMPTY}", soft_wrap=True, markup=False)
        return 0
    if found:
        table = output.table(escape(str(folder)), ("kernel", "arch", "entry", "size", "age"), right=("size", "age"))
        for one in found:
            kernel, arch = escape(one.kernel or "[unknown]"), escape(one.arch or "?")
            table.add_row(kernel, arch, escape(one.name), _bytes(one.bytes), _age(one.age_seconds))
        screen.print(table)
    screen.print(f"{len(found)} kernels, {_bytes(sum(one.bytes for one in found))}")
    for each in measured_here:
        what = "it cannot be used" if each.rows is None else f"{each.rows} rows for {each.weights} weights"
        text = f"Measured table {each.name}: {what}, {_age(each.age_seconds)} old"
        screen.print(text, soft_wrap=True, markup=False)
    return 0


def run_verify(*, repair: bool = False, as_json: bool = False) -> int:
    """1 if something cannot be used, also when it has been repaired or removed: somebody should know."""
    folder = cache_dir()
    if repair:
        check_safe(folder)
    # First the folders: what is in one that others can write is not used, however whole it is.
    places = [folders.judge(folder, part, repair=repair) for part in (KERNELS, TABLES)]
    with output.refusals("the cache folder cannot be read"):
        found = verify(folder, repair=repair) if places[0].usable else []
        measured_here = verify_tables(folder, repair=repair) if places[1].usable else []
    about: dict[str, Sequence[Place | Verdict]] = {"folders": places, "entries": found, "tables": measured_here}
    ok = all(one.ok for verdicts in about.values() for one in verdicts)
    if as_json:
        told = {name: [dataclasses.asdict(one) for one in verdicts] for name, verdicts in about.items()}
        output.print_json({"path": str(folder), "ok": ok, **told})
    else:
        _show_verdicts(places, found, measured_here, repair)
    return 0 if ok else 1


def _show_verdicts(
    places: Sequence[Place], found: Sequence[Verdict], measured_here: Sequence[Verdict], repair: bool
) -> None:
    screen = output.console()
    wrong = [one for one in places if not one.ok]
    bad, bad_tables = ([one for one in verdicts if not one.ok] for verdicts in (found, measured_here))
    # One fault of the cache folder itself is both parts' fault.
    for reason, repaired in dict.fromkeys((one.reason, one.repaired) for one in wrong):
        done = "made private again" if repaired else "nothing in it is used"
        screen.print(f"{reason} ({done})", soft_wrap=True, markup=False)
    for one in (*bad, *bad_tables):
        done = " (removed)" if one.removed else ""
        screen.print(f"{one.name}: {one.reason}{done}", soft_wrap=True, markup=False)
    if places[0].usable:
        screen.print(f"{len(found) - len(bad)} of {len(found)} kernels are whole.")
    if measured_here:
        screen.print(f"{len(measured_here) - len(bad_tables)} of {len(measured_here)} measured tables are whole.")
    if repair:
        return
    if wrong:
        screen.print("--repair makes a folder of yours that others can write private again.")
    if bad:
        screen.print("--repair removes the others; they are compiled again when they are needed.")
    if bad_tables:
        screen.print("--repair removes what cannot be used of tables; `omnigemm tune` measures it again.")


def run_clear(*, yes: bool = False, with_tables: bool = False, as_json: bool = False) -> int:
    """Measured tables stay unless they are named: kernels come back by themselves, and measurements do not."""
    folder = cache_dir()
    _check_folder(folder)
    check_safe(folder, KERNELS, *((TABLES,) if with_tables else ()))
    with output.refusals("the cache folder cannot be read"):
        found, measured_here = len(entries(folder)), len(tables(folder))
    what = f"{found} compiled kernels"
    if with_tables:
        what += f" and {measured_here} measured tables"
    some = found or (with_tables and measured_here)
    if some and not yes and not _confirm(f"Remove {what} from {folder}?"):
        output.print_error("nothing was removed; --yes removes without asking")
        return 1
    with output.refusals("the cache folder cannot be cleared"):
        removed = clear(folder)
        removed_tables = clear_tables(folder) if with_tables else []
    if as_json:
        output.print_json({"path": str(folder), "removed": removed, "removed_tables": removed_tables})
        return 0
    text = f"{len(removed)} kernels removed from {folder}."
    if with_tables:
        text = f"{len(removed)} kernels and {len(removed_tables)} measured tables removed from {folder}."
    elif measured_here:
        text += f" {measured_here} measured tables stay; --tables removes them too."
    output.console().print(text, soft_wrap=True, markup=False)
    return 0


def _confirm(question: str) -> bool:
    """Asked on stderr, so that stdout stays clean; silence means no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin is None:  # closed
        return False
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except (OSError, ValueError):  # nothing that can be read, or no text
        return False


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 10**6 else f"{count / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
