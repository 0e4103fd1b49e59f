"""The folder of compiled kernels: reading what only we can have written, and publishing whole entries.

Everything is opened below an open folder and checked on the open file, so nothing can be swapped in between.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....core.settings import cache_dir
from .spec import KernelSpec, digest

FILES = ("kernel.cu", "spec.json", "log.txt", "kernel.cubin")
DIGESTS = "digests.json"
ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*-[0-9a-f]{16}")
TEMPORARY, LOCKS, FAILED = ".tmp-", ".locks", ".failed"
STALE_SECONDS = 3600.0  # no compilation takes that long, so its process is dead
FAILED_KEPT = 20
LOCK_SECONDS = 600.0  # a stopped process must not stop every other


class Damaged(Exception):
    """The entry is not what was published."""


class Refused(Exception):
    """Somebody else could have written it."""


def root() -> Path:
    return cache_dir() / "kernels"


def _check(what: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise Refused(f"{what} belongs to user {found.st_uid}, not to us ({os.geteuid()})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(f"{what} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})")


@contextlib.contextmanager
def _folder(path: str | Path, inside: int | None = None) -> Iterator[int]:
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


def _read(name: str, inside: int) -> bytes:
    try:
        # Not blocking, because a pipe in the file's place would never answer.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused(f"{name} is a symbolic link") from error
        raise Damaged(f"{name}: {error.strerror}") from error
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        _check(name, found)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{name} is not a file")
        return file.read()


def _json(name: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not JSON") from error
    if not isinstance(value, dict):
        raise Damaged(f"{name} is not a JSON object")
    return value


def read_entry(folder: Path, name: str) -> dict[str, bytes] | None:
    """The files of an entry, every one checked; None when there is no such entry."""
    try:
        with _folder(folder) as base, contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(_folder(name, base))
            except NotADirectoryError as error:
                raise Damaged(f"{name} is not a folder") from error
            digests = _json(DIGESTS, _read(DIGESTS, fd))
            files = {one: _read(one, fd) for one in FILES}
    except FileNotFoundError:
        return None
    for one, data in files.items():
        if digests.get(one) != digest(data):
            raise Damaged(f"{one} does not match its digest")
    about = _json("spec.json", files["spec.json"])
    if not isinstance(about.get("key"), str) or about["key"][:16] != name[-16:]:
        raise Damaged("spec.json has another key")
    return files


def about_entry(files: Mapping[str, bytes]) -> dict[str, Any]:
    return _json("spec.json", files["spec.json"])


def make_root() -> Path:
    folder = root()
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    with _folder(folder):
        return folder


def _write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    os.mkdir(path, 0o700)
    for name, data in files.items():
        fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
    _sync(path)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some file systems cannot sync a folder; the digests find what a crash then leaves.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(folder: Path) -> Path:
    return folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"


def publish(spec: KernelSpec, cubin: bytes, log: str, seconds: float) -> None:
    """Write an entry aside and rename it into place. OSError or Refused when that cannot be done."""
    folder = make_root()
    remove_stale(folder)
    about = {**spec.ingredients, "key": spec.key, "seconds": round(seconds, 6)}
    files = {
        "kernel.cu": spec.source.encode(),
        "spec.json": json.dumps(about, indent=2).encode(),
        "log.txt": log.encode(),
        "kernel.cubin": cubin,
    }
    digests = json.dumps({name: digest(data) for name, data in files.items()}, indent=2).encode()
    aside = _temporary(folder)
    try:
        _write_folder(aside, {**files, DIGESTS: digests})
        os.rename(aside, folder / spec.entry)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        # Without locks another process may have been first; its entry is as good.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def remove_entry(folder: Path, name: str) -> None:
    """Take an entry, or what is in its place, away in one step; readers see all of it or nothing."""
    aside = _temporary(folder)
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
            if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode) and now - found.st_mtime > older:
                shutil.rmtree(path)


def keep_failed(spec: KernelSpec, log: str) -> str:
    """Keep the source and log of a failed compilation; a sentence that says where."""
    try:
        folder = make_root() / FAILED
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        with _folder(folder):
            place = folder / spec.entry
            shutil.rmtree(place, ignore_errors=True)
            _write_folder(place, {"kernel.cu": spec.source.encode(), "log.txt": log.encode()})
            kept = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime)
            for old in kept[:-FAILED_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, Refused) as error:
        return f"the source could not be kept: {error}"
    return f"the source and the whole log are in {place}"


@contextlib.contextmanager
def lock(key: str) -> Iterator[bool]:
    """Hold the key's lock among processes. False where that is impossible: publishing is atomic anyway."""
    try:
        import fcntl

        folder = make_root() / LOCKS
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        with _folder(folder) as base:
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
