"""`omnigemm cache`: the folder of compiled kernels, each a sub-folder, and of measured tables, each a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.markup import escape

from ..backends.cuda import measured
from ..backends.cuda.jit import owned, store
from ..core.settings import cache_dir
from . import output

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
    kernels = folder / "kernels"
    if not kernels.is_dir():
        return []
    found = [_describe(one) for one in kernels.iterdir() if _is_entry(one)]
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
    place = folder / "tables"
    found = []
    for name in _table_names(place):
        rows = None
        # `verify` says what is wrong with it.
        with contextlib.suppress(owned.Damaged, owned.Refused, OSError):
            own = measured.read(place, name)
            rows = None if own is None else own.rows
        about = (place / f"{name}{measured.SUFFIX}").lstat()
        weights = None if rows is None else len({(row["n"], row["k"], row["scales"]) for row in rows})
        age = max(0.0, time.time() - about.st_mtime)
        found.append(Table(name, None if rows is None else len(rows), weights, about.st_size, age))
    return found


def _table_names(place: Path) -> list[str]:
    names = [one.stem for one in place.glob(f"*{measured.SUFFIX}")] if place.is_dir() else []
    return sorted(name for name in names if measured.NAME.fullmatch(name))


def clear_tables(folder: Path) -> list[str]:
    """Remove the measured tables, and nothing else. The removed ones."""
    check_safe(folder)
    place = folder / "tables"
    removed = []
    for name in _table_names(place):
        path = place / f"{name}{measured.SUFFIX}"
        if path.is_file() and not path.is_symlink():
            path.unlink()
            removed.append(name)
    owned.remove_stale(place)
    return removed


def clear(folder: Path) -> list[str]:
    """Remove every entry, and what failed or unfinished compilations left; all else stays. The removed entries."""
    check_safe(folder)
    kernels = folder / "kernels"
    removed = []
    for entry in entries(folder):
        # rmtree removes links found inside an entry, and never what they point at.
        shutil.rmtree(kernels / entry.name)
        removed.append(entry.name)
    failed = kernels / store.FAILED
    if failed.is_dir() and not failed.is_symlink():
        shutil.rmtree(failed)
    owned.remove_stale(kernels)
    return removed


def verify(folder: Path, *, repair: bool = False) -> list[Verdict]:
    """Check every kernel: digests, owner, permissions. With `repair`, those that fail are removed."""
    if repair:
        check_safe(folder)
    kernels = folder / "kernels"
    found = []
    # A link with an entry's name is reported too, because it is what a lookup would meet.
    names = [one.name for one in kernels.iterdir() if store.ENTRY.fullmatch(one.name)] if kernels.is_dir() else []
    for name in sorted(names):
        try:
            ok, reason = store.read_entry(kernels, name) is not None, "vanished"
        except (owned.Damaged, owned.Refused, OSError) as error:
            ok, reason = False, str(error)
        if ok:
            found.append(Verdict(name, True, "whole"))
            continue
        if repair:
            _remove(kernels, name)
        found.append(Verdict(name, False, reason, removed=repair))
    return found


def _remove(place: Path, name: str) -> None:
    try:
        owned.remove(place, name)
    except OSError as error:
        raise output.CommandError(f"{place / name} cannot be removed: {error.strerror}") from error


def verify_tables(folder: Path, *, repair: bool = False) -> list[Verdict]:
    """Check every measured table: owner, permissions, rows. With `repair`, what cannot be used is removed: the file, or
    the rows in it."""
    if repair:
        check_safe(folder)
    place = folder / "tables"
    found = []
    for name in _table_names(place):
        try:
            own = measured.read(place, name)
        except (owned.Damaged, owned.Refused, OSError) as error:
            if repair:
                _remove(place, f"{name}{measured.SUFFIX}")
            found.append(Verdict(name, False, str(error), removed=repair))
            continue
        faults = ["vanished"] if own is None else own.faults
        if faults and own is not None and repair:
            measured.add(name, ())
        found.append(Verdict(name, not faults, "; ".join(faults) or "whole", removed=repair and bool(faults)))
    return found


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
    """1 if an entry or a table is damaged, also when it has been removed: somebody should know."""
    folder = cache_dir()
    found, measured_here = verify(folder, repair=repair), verify_tables(folder, repair=repair)
    bad, bad_tables = ([one for one in verdicts if not one.ok] for verdicts in (found, measured_here))
    if as_json:
        kernels, rows = ([dataclasses.asdict(one) for one in verdicts] for verdicts in (found, measured_here))
        output.print_json({"path": str(folder), "ok": not bad and not bad_tables, "entries": kernels, "tables": rows})
        return 1 if bad or bad_tables else 0
    screen = output.console()
    for one in (*bad, *bad_tables):
        done = " (removed)" if one.removed else ""
        screen.print(f"{one.name}: {one.reason}{done}", soft_wrap=True, markup=False)
    screen.print(f"{len(found) - len(bad)} of {len(found)} kernels are whole.")
    if measured_here:
        screen.print(f"{len(measured_here) - len(bad_tables)} of {len(measured_here)} measured tables are whole.")
    if bad and not repair:
        screen.print("--repair removes the others; they are compiled again when they are needed.")
    if bad_tables and not repair:
        screen.print("--repair removes what cannot be used of tables; `omnigemm tune` measures it again.")
    return 1 if bad or bad_tables else 0


def run_clear(*, yes: bool = False, with_tables: bool = False, as_json: bool = False) -> int:
    """Measured tables stay unless they are named: kernels come back by themselves, and measurements do not."""
    folder = cache_dir()
    check_safe(folder)
    found, measured_here = len(entries(folder)), len(tables(folder))
    what = f"{found} compiled kernels"
    if with_tables:
        what += f" and {measured_here} measured tables"
    some = found or (with_tables and measured_here)
    if some and not yes and not _confirm(f"Remove {what} from {folder}?"):
        output.print_error("nothing was removed; --yes removes without asking")
        return 1
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
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 10**6 else f"{count / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
