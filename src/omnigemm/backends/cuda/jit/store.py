"""The folder of compiled kernels: reading entries, every file of them checked, and publishing whole ones."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....core.settings import cache_dir
from . import owned
from .owned import Damaged, Refused
from .spec import KernelSpec, digest

FILES = ("kernel.cu", "spec.json", "log.txt", "kernel.cubin")
DIGESTS = "digests.json"
ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*-[0-9a-f]{16}")
FAILED = ".failed"
FAILED_KEPT = 20


def root() -> Path:
    return cache_dir() / "kernels"


def read_entry(folder: Path, name: str) -> dict[str, bytes] | None:
    """The files of an entry, every one checked; None when there is no such entry."""
    try:
        with owned.open_folder(folder) as base, contextlib.ExitStack() as stack:
            try:
                fd = stack.enter_context(owned.open_folder(name, base))
            except NotADirectoryError as error:
                raise Damaged(f"{name} is not a folder") from error
            digests = owned.parse_json(DIGESTS, owned.read_file(DIGESTS, fd))
            files = {one: owned.read_file(one, fd) for one in FILES}
    except FileNotFoundError:
        return None
    for one, data in files.items():
        if digests.get(one) != digest(data):
            raise Damaged(f"{one} does not match its digest")
    about = owned.parse_json("spec.json", files["spec.json"])
    if not isinstance(about.get("key"), str) or about["key"][:16] != name[-16:]:
        raise Damaged("spec.json has another key")
    return files


def about_entry(files: Mapping[str, bytes]) -> dict[str, Any]:
    return owned.parse_json("spec.json", files["spec.json"])


def make_root() -> Path:
    return owned.make_folder(root())


def _write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    os.mkdir(path, 0o700)
    for name, data in files.items():
        owned.write_file(path / name, data)
    owned.sync(path)


def publish(spec: KernelSpec, cubin: bytes, log: str, seconds: float) -> None:
    """Write an entry aside and rename it into place. OSError or Refused when that cannot be done."""
    folder = make_root()
    owned.remove_stale(folder)
    about = {**spec.ingredients, "key": spec.key, "seconds": round(seconds, 6)}
    files = {
        "kernel.cu": spec.source.encode(),
        "spec.json": json.dumps(about, indent=2).encode(),
        "log.txt": log.encode(),
        "kernel.cubin": cubin,
    }
    digests = json.dumps({name: digest(data) for name, data in files.items()}, indent=2).encode()
    aside = owned.temporary(folder)
    try:
        _write_folder(aside, {**files, DIGESTS: digests})
        os.rename(aside, folder / spec.entry)
        owned.sync(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        # Without locks another process may have been first; its entry is as good.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def keep_failed(spec: KernelSpec, log: str) -> str:
    """Keep the source and log of a failed compilation; a sentence that says where."""
    try:
        folder = make_root() / FAILED
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        with owned.open_folder(folder):
            place = folder / spec.entry
            shutil.rmtree(place, ignore_errors=True)
            _write_folder(place, {"kernel.cu": spec.source.encode(), "log.txt": log.encode()})
            kept = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime)
            for old in kept[:-FAILED_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, Refused) as error:
        return f"the source could not be kept: {error}"
    return f"the source and the whole log are in {place}"
