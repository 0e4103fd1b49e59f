"""Files that only we can have written: folders for their owner alone, whole files, and locks among processes.

Everything is opened below an open folder and checked on the open file, so nothing can be swapped in between.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPORARY, LOCKS = ".tmp-", ".locks"
STALE_SECONDS = 3600.0  # nothing takes that long to write, so its process is dead
LOCK_SECONDS = 600.0  # a stopped process must not stop every other


class Damaged(Exception):
    """The entry is not what was published."""


class Refused(Exception):
    """Somebody else could have written it."""


def _check(what: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise Refused(f"{what} belongs to user {found.st_uid}, not to us ({os.geteuid()})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(f"{what} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})")


@contextlib.contextmanager
def open_folder(path: str | Path, inside: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is ours alone and no link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(path, inside)):
            raise Refused(f"{path} is a symbolic link") from error
        raise
    try:
        _check(str(path), os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


def _is_link(path: str | Path, inside: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(path, dir_fd=inside, follow_symlinks=False).st_mode)
    except OSError:
        return False


def read_file(name: str, inside: int) -> bytes:
    try:
        # Not blocking, because a pipe in the file's place would never answer.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused(f"{name} is a symbolic link") from error
        raise Damaged(f"{name}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        _check(name, found)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{name} is not a file")
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def parse_json(name: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not JSON") from error
    if not isinstance(value, dict):
        raise Damaged(f"{name} is not a JSON object")
    return value


def make_folder(folder: Path) -> Path:
    """The folder, made for us alone if it is not there, as are those that lead to it. Refused if it is there and is
    not."""
    missing: list[Path] = []
    for one in folder.parents:
        if one.exists():
            break
        missing.append(one)
    for one in reversed(missing):  # one by one: mkdir makes parents with the usual mode
        one.mkdir(0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    with open_folder(folder):
        return folder


def write_file(path: Path, data: bytes) -> None:
    """A new file, on the disk before this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Write aside and rename: who reads meanwhile finds all of the old or all of the new."""
    aside = temporary(path.parent)
    try:
        write_file(aside, data)
        os.rename(aside, path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some file systems cannot sync a folder; the digests find what a crash then leaves.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def temporary(folder: Path) -> Path:
    return folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"


def remove(folder: Path, name: str) -> None:
    """Take what has that name away in one step; readers see all of it or nothing."""
    aside = temporary(folder)
    os.rename(folder / name, aside)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    else:
        aside.unlink()


def remove_stale(folder: Path, older: float = STALE_SECONDS) -> None:
    """Remove what processes that died while writing have left."""
    now = time.time()
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.geteuid() or now - found.st_mtime <= older:
                continue
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(path)
            elif stat.S_ISREG(found.st_mode):
                path.unlink()


@contextlib.contextmanager
def lock(folder: Path, key: str) -> Iterator[bool]:
    """Hold the key's lock, a file in the folder's own folder of locks, among processes. False where that is
    impossible."""
    try:
        import fcntl

        folder = make_folder(folder) / LOCKS
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        with open_folder(folder) as base:
            fd = os.open(key, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=base)
    except (OSError, Refused, ImportError):
        yield False
        return
    try:
        held = _acquire(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield held
        finally:
            # Not left to close: a process forked meanwhile has the descriptor too, and with it the lock.
            if held:
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _acquire(flock: Any, fd: int, how: int) -> bool:
    end = time.monotonic() + LOCK_SECONDS
    pause = 0.005
    while True:
        try:
            flock(fd, how)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR) or time.monotonic() > end:
                return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
