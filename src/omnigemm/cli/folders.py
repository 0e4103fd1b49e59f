"""The folders of the cache as commands meet them: whether what is in them is used, and whether more can be kept."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

from ..backends.cuda.jit import owned

KERNELS, TABLES = "kernels", "tables"


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder and what is wrong with it, in words that name it."""

    path: str
    ok: bool
    reason: str
    repaired: bool = False

    @property
    def usable(self) -> bool:
        return self.ok or self.repaired


def names(folder: Path) -> list[str]:
    """What is in a folder; nothing if it is not there."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def judge(folder: Path, part: str, *, repair: bool = False) -> Place:
    """Whether kernels or tables in the cache folder can be used at all. With `repair`, a folder of ours that others can
    write is made private."""
    path = folder / part
    reason = _fault(folder, path)
    if reason is None:
        return Place(str(path), True, "usable")
    return Place(str(path), False, reason, repair and _made_private(path) and _fault(folder, path) is None)


def _fault(folder: Path, path: Path) -> str | None:
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return f"{folder} is not a folder"
    try:
        with owned.open_folder(path):
            return None
    except FileNotFoundError:  # made when it is needed
        return None
    except owned.Refused as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def _made_private(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            return False
        os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def why_not_writable(folder: Path) -> str:
    """Why nothing new can be kept in the cache folder, in words; empty if it can."""
    for part in (KERNELS, TABLES):
        place = judge(folder, part)
        reason = _not_writable(folder / part) if place.ok else place.reason
        if reason:
            return reason
    return ""


def _not_writable(path: Path) -> str:
    """Of the folder, or of the nearest one above it that is there."""
    for place in (path, *path.parents):
        try:
            found = os.stat(place)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be reached: {error.strerror}"
        if not stat.S_ISDIR(found.st_mode):
            return f"{place} is not a folder"
        return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"
    return f"{path} has no folder above it"
