"""Where a vendor's library is. The one that torch itself has loaded comes first: two in one process would each hold
their own kernels and memory."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .vendors import Lt, Vendor


def candidates(vendor: Vendor) -> Iterator[str]:
    """Paths and names to try, the best first; each once."""
    seen = set()
    for one in _search(vendor):
        if one not in seen:
            seen.add(one)
            yield one


def lt_candidates(vendor: Vendor, lt: Lt, library: str, named: bool) -> Iterator[str]:
    """The same for the second library, of the first one's version: beside it; elsewhere if nobody named the first."""
    if not lt.libraries:
        yield library
        return
    names = _of_version(lt.libraries, Path(library).name)
    seen = set()
    if Path(library).is_absolute():
        for name in names:
            if (file := Path(library).parent / name).is_file():
                seen.add(str(file))
                yield str(file)
    if not named:
        second = dataclasses.replace(vendor, libraries=names, pathfinder=lt.pathfinder)
        yield from (one for one in candidates(second) if one not in seen)


def runtime_candidates(vendor: Vendor, library: str) -> Iterator[str]:
    """The same for the runtime: beside the library, in its own place below the vendor's folder, or by the loader."""
    runtime = dataclasses.replace(vendor, libraries=vendor.runtime, folders=vendor.runtime_folders)
    beside = (Path(library).parent / name for name in vendor.runtime)
    yield from (str(file) for file in beside if file.is_file())
    if home := os.environ.get(vendor.home or ""):
        yield from _files(runtime, [home])
    yield from vendor.runtime


def _of_version(names: tuple[str, ...], library: str) -> tuple[str, ...]:
    """libcublasLt.so.12 for libcublas.so.12 and libcublas.so.12.9.1; every name for a library without a version."""
    version = library.partition(".so")[2]
    same = tuple(name for name in names if f"{version}.".startswith(f"{name.partition('.so')[2] or version}."))
    return same if version else names


def _search(vendor: Vendor) -> Iterator[str]:
    if vendor.home is not None:
        if home := os.environ.get(vendor.home):
            yield from _files(vendor, [home])
        return
    yield from loaded(vendor.libraries)
    yield from _files(vendor, sys.path)
    if vendor.pathfinder is not None:
        yield from _found_by_pathfinder(vendor.pathfinder)
    yield from vendor.libraries  # where the system's loader looks


def _files(vendor: Vendor, roots: list[str]) -> Iterator[str]:
    for root in roots:
        for folder in vendor.folders:
            for name in vendor.libraries:
                if (file := Path(root) / folder / name).is_file():
                    yield str(file)


def loaded(names: tuple[str, ...], maps: Path = Path("/proc/self/maps")) -> Iterator[str]:
    """Libraries of these names that are in this process already; on systems that do not tell, none."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        path = line.split(maxsplit=5)[5:]
        # A file may carry its whole version: libcublas.so.13.1.0.3 is libcublas.so.13.
        if path and any(f"{Path(path[0]).name}.".startswith(f"{name}.") for name in names):
            yield path[0]


def _found_by_pathfinder(name: str) -> Iterator[str]:
    """It loads what it finds."""
    try:
        path = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib(name).abs_path
    except (ImportError, RuntimeError):  # its own error for what it does not find is a RuntimeError
        return
    if path is not None:
        yield str(path)
