"""Compile once: per process by memory and a lock per key, among processes by the disk and a lock file per key."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from ....core.errors import CompileError
from . import owned, store
from .compiler import Compiled, compile_cubin
from .spec import KernelSpec

_log = logging.getLogger("omnigemm")
_memory: dict[str, Compiled] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()
_warned: set[str] = set()


def get_or_compile(spec: KernelSpec) -> Compiled:
    """The kernel from memory, else from the disk, else compiled. A disk that cannot be used costs only time."""
    key = spec.key
    found = _memory.get(key)
    if found is not None:
        return found
    with _guard:
        mine = _locks.setdefault(key, threading.Lock())
    with mine:
        found = _memory.get(key)
        if found is None:
            found = _memory[key] = _from_disk_or_compiler(spec)
    return found


def forget() -> None:
    """Empty the memory, not the disk."""
    global _guard
    # Not emptied under the old locks: in a forked child they may be held by threads that it does not have.
    _guard = threading.Lock()
    _locks.clear()
    _memory.clear()
    _warned.clear()


os.register_at_fork(after_in_child=forget)


def _from_disk_or_compiler(spec: KernelSpec) -> Compiled:
    found, usable = _look(spec)
    if found is not None:
        return found
    if not usable:
        return compile_cubin(spec)
    with owned.lock(store.root(), spec.key):
        found, usable = _look(spec, remove=True)
        if found is not None:
            return found
        made = compile_cubin(spec)
        if usable:
            _publish(made)
        return made


def _look(spec: KernelSpec, *, remove: bool = False) -> tuple[Compiled | None, bool]:
    """The entry if it is whole and ours, and whether a new one may take its place."""
    try:
        files = store.read_entry(store.root(), spec.entry)
        if files is None:
            return None, True
        about = store.about_entry(files)
        if about["key"] != spec.key:
            raise owned.Damaged("spec.json has another key")
        log, seconds = files["log.txt"].decode(errors="replace"), float(about.get("seconds", 0.0))
        return Compiled(spec, files["kernel.cubin"], log, seconds, from_disk=True), True
    except owned.Damaged as error:
        if remove:
            _log.warning("cache entry %s is damaged (%s) and is built again", store.root() / spec.entry, error)
            _remove(spec.entry)
        return None, True
    except owned.Refused as error:
        _warn_once(f"cache entry {store.root() / spec.entry} is not used: {error}; the kernel is compiled in memory")
    except OSError as error:
        _warn_once(f"cache folder {store.root()} cannot be read: {error}; kernels are compiled in memory")
    return None, False


def _remove(entry: str) -> None:
    try:
        owned.remove(store.root(), entry)
    except OSError as error:
        _warn_once(f"damaged cache entry {store.root() / entry} cannot be removed: {error}")


def _publish(made: Compiled) -> None:
    try:
        store.publish(made.spec, made.cubin, made.log, made.seconds)
    except (OSError, owned.Refused) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _warn_once(f"compiled kernels cannot be kept in {store.root()}: {reason}; they stay in this process's memory")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


@dataclasses.dataclass(frozen=True)
class Result:
    """How one kernel of `warm` went: a cubin or an error."""

    spec: KernelSpec
    compiled: Compiled | None
    error: CompileError | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.compiled is not None


def warm(
    specs: Iterable[KernelSpec], jobs: int | None = None, progress: Callable[[Result], None] | None = None
) -> list[Result]:
    """Have every kernel ready, compiling `jobs` at a time (default: one per processor we may use).

    Results come in the order of the specs; `progress` gets each one, in the calling thread, as it is done.
    Ctrl-C, or an error in `progress`, waits for those that are being compiled, and not for the others.
    Threads do, because NVRTC runs without the GIL and side by side.
    """
    wanted = list(specs)
    if jobs is not None and jobs < 1:
        raise ValueError(f"warm: jobs is {jobs}, expected None or a whole number >= 1")
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)), thread_name_prefix="omnigemm-jit") as pool:
        try:
            running = {pool.submit(_one, spec): i for i, spec in enumerate(wanted)}
            for done in as_completed(running):
                results[running[done]] = done.result()
                if progress is not None:
                    progress(done.result())
        except BaseException:
            # What has not begun would be compiled before the pool lets go.
            pool.shutdown(cancel_futures=True)
            raise
    return [results[i] for i in range(len(wanted))]


def _one(spec: KernelSpec) -> Result:
    start = time.perf_counter()
    try:
        compiled, error = get_or_compile(spec), None
    except CompileError as failure:
        compiled, error = None, failure
    return Result(spec, compiled, error, time.perf_counter() - start)
