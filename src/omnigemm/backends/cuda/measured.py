"""Tables of measured configs: the one that the library brings for a GPU, and the user's own, which `tune` writes.

Both are JSON with a row for each weight, kind of scales and span of rows. The user's is in the cache folder and, like
all that is there, used only if nobody else can have written it. What is wrong with it costs a warning, never a call.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import OmniGemmError
from ...core.problem import SIZE_LIMIT
from ...core.settings import cache_dir
from .gpu import Gpu
from .jit import owned
from .sm90 import Config, Variant

_log = logging.getLogger("omnigemm")
Row = dict[str, Any]
SUFFIX = ".json"
NAME = re.compile(r"[a-z0-9-]+")  # as Gpu.table makes them
_MOST_US = 1e9  # no product takes that long
_MOST_STAGES = 64  # nor has that many
ABOUT = (
    "For a weight of N x K, the config that ran fastest. scales: block is fp8 with 1x128 and 128x128, and is used for "
    "1x128 with 1x128 too; whole is fp8 with one for each token and channel, and is used for single ones too; int8 is "
    "int8 with any; 16 is bf16 with a weight [N, K], and is used for fp16 too, turned16 the same with [K, N], both "
    "with what cuBLAS took in the same run as blas_us. constant_weights: as the setting of that name; if it is "
    "missing, both. early: of how many stages weights are loaded before the kernel before is done, or true, of all. "
    "Measured at m rows with bf16 results, used from m_from to m_to rows; us is microseconds."
)


class Kind(NamedTuple):
    """What is measured for a kind of scales."""

    op: str
    dtype: str
    a_scale: str
    b_scale: str
    b_layout: str = "row"


# By the names that choice.kind_of gives.
KINDS = {
    "block": Kind("fp8_gemm", "e4m3", "1x128", "128x128"),
    "whole": Kind("fp8_gemm", "e4m3", "token", "channel"),
    "int8": Kind("int8_gemm", "int8", "token", "channel"),
    "16": Kind("gemm", "bf16", "none", "none", "col"),  # a weight [N, K] is given as its transpose
    "turned16": Kind("gemm", "bf16", "none", "none"),
}


class NotKept(OmniGemmError):
    """The user's table cannot be written."""


class Own(NamedTuple):
    """A user's table as it is on the disk: the rows that can be used, what is wrong with each other one, and what it
    says of itself."""

    rows: list[Row]
    faults: list[str]
    about: str


# ------------------------------------------------------------------------------------------------ reading


def table(gpu: Gpu) -> dict[tuple[int, int, str], list[Row]]:
    """By weight and kind of scales, configs with the numbers of rows that they are for, the user's own first.

    A row that does not say whether weights were constant holds for both. Read once in a process.
    """
    return _by_weight(gpu.table, root())


def forget() -> None:
    """Read the tables again."""
    _by_weight.cache_clear()


@cache
def _by_weight(name: str, folder: Path) -> dict[tuple[int, int, str], list[Row]]:
    found: dict[tuple[int, int, str], list[Row]] = {}
    for row in (*_own(name, folder), *_shipped(name)):
        found.setdefault((row["n"], row["k"], row["scales"]), []).append(row)
    return found


def _shipped(name: str) -> list[Row]:
    file = resources.files(__package__) / "tables" / f"{name}{SUFFIX}"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.is_file() else []
    return rows


def _own(name: str, folder: Path) -> list[Row]:
    path = folder / f"{name}{SUFFIX}"
    try:
        found = read(folder, name)
    except owned.Damaged as error:
        _log.warning("the table %s is damaged and is not used: %s", path, error)
    except owned.Refused as error:
        _log.warning("the table %s is not used: %s", path, error)
    except OSError as error:
        _log.warning("the table %s cannot be read and is not used: %s", path, error)
    else:
        if found is not None:
            _warn_of(path, found.faults)
            return [{**row, "here": True} for row in found.rows]
    return []


def _warn_of(path: Path, faults: Sequence[str]) -> None:
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        _log.warning("the table %s has rows that are not used: %s%s", path, faults[0], more)


def root() -> Path:
    """The folder of the user's tables."""
    return cache_dir() / "tables"


def read(folder: Path, name: str) -> Own | None:
    """A user's table, checked; None if there is none. Damaged, Refused or OSError if it cannot be used."""
    file = f"{name}{SUFFIX}"
    try:
        with owned.open_folder(folder) as base:
            if file not in os.listdir(base):
                return None
            found = owned.parse_json(file, owned.read_file(file, base))
    except FileNotFoundError:
        return None
    if not isinstance(found.get("rows"), list):
        raise owned.Damaged(f"{file} has no list of rows")
    faults = [fault(row) for row in found["rows"]]
    good = [row for row, wrong in zip(found["rows"], faults, strict=True) if wrong is None]
    told = [f"row {i}: {wrong}" for i, wrong in enumerate(faults, 1) if wrong is not None]
    return Own(good, told, str(found.get("about", ABOUT)))


def fault(row: Any) -> str | None:
    """What is wrong with a row, in words, or None."""
    if not isinstance(row, dict):
        return "it is not an object"
    for name in ("n", "k", "m_from", "m", "m_to"):
        if type(row.get(name)) is not int or not 1 <= row[name] <= SIZE_LIMIT:
            return f"{name} is {row.get(name)!r}, expected a whole number from 1 to {SIZE_LIMIT}"
    if not row["m_from"] <= row["m"] <= row["m_to"]:
        return f"m is {row['m']}, expected one from m_from {row['m_from']} to m_to {row['m_to']}"
    if not isinstance(row.get("scales"), str) or row["scales"] not in KINDS:
        return f"scales is {row.get('scales')!r}, expected one of {', '.join(KINDS)}"
    for name in ("us", "blas_us"):
        value: Any = row.get(name, 1.0 if name == "blas_us" else None)
        if type(value) not in (int, float) or not 0 < value < _MOST_US:
            return f"{name} is {value!r}, expected a number above 0, of microseconds"
    if "constant_weights" in row and type(row["constant_weights"]) is not bool:
        return f"constant_weights is {row['constant_weights']!r}, expected true or false"
    early = row.get("early", False)
    if type(early) is not bool and (type(early) is not int or not 0 <= early <= _MOST_STAGES):
        return f"early is {early!r}, expected true, false or a number of stages up to {_MOST_STAGES}"
    return _config_fault(row)


def _config_fault(row: Row) -> str | None:
    given = row.get("config")
    if not isinstance(given, dict):
        return f"config is {given!r}, expected an object"
    fields = {one.name: one for one in dataclasses.fields(Config)}
    for name, value in given.items():
        if name not in fields:
            return f"config has {name!r}, expected names of {', '.join(fields)}"
        if type(value).__name__ != fields[name].type:
            return f"config has {name} = {value!r}, expected {fields[name].type}"
    missing = [name for name, one in fields.items() if one.default is dataclasses.MISSING and name not in given]
    if missing:
        return f"config has no {', '.join(missing)}"
    try:
        return variant_of(row["scales"], row["n"], row["k"]).fault(Config(**given))
    except Exception as error:  # limits are named for configs that code makes, and a file may hold any
        return f"config cannot be judged: {error!r}"


def variant_of(kind: str, n: int, k: int) -> Variant:
    """The variant that is measured for a weight."""
    what = KINDS[kind]
    types = what.dtype, what.dtype, what.a_scale, what.b_scale, "bf16"
    return Variant(n, k, *types, out_by_tma=n % 8 == 0, b_turned=what.op == "gemm" and what.b_layout == "row")


# ------------------------------------------------------------------------------------------------ writing


def check_folder() -> Path:
    """The folder of the user's tables, made if need be, before the work that fills it. NotKept if it cannot be."""
    try:
        folder = owned.make_folder(root())
        if not os.access(folder, os.W_OK | os.X_OK):
            raise NotKept(f"measured tables cannot be kept in {folder}: it cannot be written")
        return folder
    except (OSError, owned.Refused) as error:
        raise NotKept(f"measured tables cannot be kept in {root()}: {error}") from error


def add(name: str, rows: Iterable[Row], about: str | None = None) -> Path:
    """Put rows into the user's table, in the place of those for the same spans. NotKept if that cannot be done.

    A lock keeps the rows of another process that does the same. Old rows that cannot be used are left out.
    """
    folder = check_folder()
    path = folder / f"{name}{SUFFIX}"
    try:
        owned.remove_stale(folder)
        with owned.lock(folder, name) as held:
            if not held:
                _log.warning("the table %s is written without a lock: another process's rows may be lost", path)
            old = _kept(folder, name)
            owned.replace_file(path, to_json(about or old.about, merged(old.rows, rows)).encode())
    except (OSError, owned.Refused) as error:
        raise NotKept(f"the table {path} cannot be written: {error}") from error
    forget()
    return path


def _kept(folder: Path, name: str) -> Own:
    """What is there, to be written again."""
    try:
        return read(folder, name) or Own([], [], ABOUT)
    except owned.Damaged as error:
        _log.warning("the table %s is damaged (%s) and is written anew", folder / f"{name}{SUFFIX}", error)
        return Own([], [], ABOUT)


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """All rows of both, the new ones where both have some."""

    def place(row: Row) -> tuple[Any, ...]:
        return row["scales"], row["n"], row["k"], row["m_from"], row["m_to"]

    new = list(new)
    anew = {place(row) for row in new}
    return sorted([*(row for row in old if place(row) not in anew), *new], key=place)


def to_json(about: str, rows: Iterable[Row]) -> str:
    """A row in each line."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{\n "about": {json.dumps(about)},\n "rows": [\n{lines}\n ]\n}}\n'
