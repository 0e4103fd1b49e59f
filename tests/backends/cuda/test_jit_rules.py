"""Rules of the JIT and its cache, one by one, without a compiler: forks, locks, options, failures, strangers."""

from __future__ import annotations

import _thread
import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from omnigemm.backends.cuda.jit import Compiled, KernelSpec, cache, get_or_compile, nvrtc, owned, store, warm
from omnigemm.core.dispatch import Support

SPEC = KernelSpec("add", "source", "sm_90a")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelSpec]]:
    """An empty cache and no memory; the list counts what would be compiled."""
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "version", lambda: "0.0")
    calls: list[KernelSpec] = []

    def made(spec: KernelSpec) -> Compiled:
        calls.append(spec)
        return Compiled(spec, b"cubin", "log", 0.1)

    monkeypatch.setattr(cache, "compile_cubin", made)
    cache.forget()
    yield calls
    cache.forget()


def in_time(work: Callable[[], object], otherwise: Callable[[], object]) -> list[object]:
    """What it returns; if it has not after some seconds, `otherwise` sets it free, and nothing is returned."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(10)
    if thread.is_alive():
        otherwise()
        thread.join()
        return []
    return found


# ------------------------------------------------------------------------------------------------ forks and locks


FORK = """
import os, signal, threading
from omnigemm.backends.cuda.jit import Compiled, KernelSpec, cache, get_or_compile, nvrtc
nvrtc.version = lambda: "0.0"
cache.compile_cubin = lambda spec: Compiled(spec, b"cubin", "log", 0.1)
spec = KernelSpec("add", "source", "sm_90a")
lock = cache._locks[spec.key] = threading.Lock()
lock.acquire()          # as if threads were at it,
cache._guard.acquire()  # which a forked process does not have
child = os.fork()
if child == 0:
    signal.alarm(20)
    get_or_compile(spec)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def test_forked_process_does_not_wait_for_threads_it_has_not() -> None:
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("0\n", "")


def test_lock_ends_with_its_block_also_in_forked_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "LOCK_SECONDS", 0.2)
    wait, go = os.pipe()
    with owned.lock(tmp_path / "folder", "key") as held:
        assert held
        child = os.fork()
        if child == 0:  # has the descriptor too
            os.close(go)
            os.read(wait, 1)
            os._exit(0)
    try:
        with owned.lock(tmp_path / "folder", "key") as held:
            assert held
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(wait)


def test_lock_that_stays_taken_is_given_up(monkeypatch: pytest.MonkeyPatch, compiled: list[KernelSpec]) -> None:
    monkeypatch.setattr(owned, "LOCK_SECONDS", 0.2)
    with owned.lock(store.root(), SPEC.key):
        pass
    with (store.root() / owned.LOCKS / SPEC.key).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.monotonic()

        def free() -> None:
            fcntl.flock(file, fcntl.LOCK_UN)

        (made,) = in_time(lambda: get_or_compile(SPEC), free) or [None]
        assert made is not None, "it waits for ever"
        assert time.monotonic() - start >= 0.2
    assert compiled == [SPEC]
    assert (store.root() / SPEC.entry).is_dir()


# ------------------------------------------------------------------------------------------------ what is compiled


@pytest.mark.parametrize(
    "option",
    [
        "-I/usr/include",
        "--include-path=/usr/include",
        "-include=x.h",
        "--pre-include=x.h",
        "--gpu-architecture=sm_80",
        "-arch=sm_80",
        "--use-pch=x",
        "-use-pch=x",
    ],
)
def test_options_that_the_key_cannot_see(option: str) -> None:
    with pytest.raises(ValueError, match=f"options holds '{option}', which the cache key cannot account for"):
        KernelSpec("add", "source", "sm_90a", ("-G", option))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Stand-in bindings whose nvrtcVersion is the given function."""

    def use(version: Callable[[], object]) -> None:
        monkeypatch.setattr(nvrtc.importlib, "import_module", lambda _: SimpleNamespace(nvrtcVersion=version))
        nvrtc._library.cache_clear()

    yield use
    monkeypatch.undo()
    nvrtc._library.cache_clear()


def test_nvrtc_that_cannot_be_loaded(library: Callable[[Callable[[], object]], None]) -> None:
    def fail() -> object:
        raise RuntimeError("Failure finding\n  libnvrtc.so")

    library(fail)
    assert nvrtc.available() == Support(False, "NVRTC cannot be loaded: Failure finding libnvrtc.so")


def test_nvrtc_without_a_version(library: Callable[[Callable[[], object]], None]) -> None:
    class Status(int):
        name = "NVRTC_ERROR"

    library(lambda: (Status(1), 0, 0))
    assert nvrtc.available() == Support(False, "NVRTC does not give its version: NVRTC_ERROR")


@pytest.mark.parametrize(("minor", "told"), [(4, "13.4.92"), (5, "13.5")])
def test_build_of_the_compiler_is_a_part_of_its_version(
    library: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch, minor: int, told: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "13.4.92")
    library(lambda: (0, 13, minor))
    assert nvrtc.available() == Support(True, f"NVRTC {told}")


# ------------------------------------------------------------------------------------------------ many at once


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("how", ["Ctrl-C", "an error of who looks on"])
def test_who_stops_waits_only_for_what_is_being_compiled(
    compiled: list[KernelSpec], monkeypatch: pytest.MonkeyPatch, how: str, jobs: int
) -> None:
    make = cache.compile_cubin

    def slow(spec: KernelSpec) -> Compiled:
        made = make(spec)
        if how == "Ctrl-C" and len(compiled) == 3:
            _thread.interrupt_main()
        time.sleep(0.1)
        return made

    def fail(_: object) -> None:
        if how != "Ctrl-C":
            raise ZeroDivisionError

    monkeypatch.setattr(cache, "compile_cubin", slow)
    with pytest.raises(KeyboardInterrupt if how == "Ctrl-C" else ZeroDivisionError):
        warm([KernelSpec("add", f"source {i}", "sm_90a") for i in range(20)], jobs, fail)
    begun = len(compiled)
    assert begun < 10
    assert len(list(store.root().glob("add-*"))) == begun, "they are done when the call returns"
    time.sleep(0.3)
    assert len(compiled) == begun


# ------------------------------------------------------------------------------------------------ what failed


def failing(number: int) -> KernelSpec:
    return KernelSpec("bad", f"source {number}", "sm_90a")


def test_the_last_failures_are_kept() -> None:
    folder = store.root() / store.FAILED
    for i in range(store.FAILED_KEPT + 5):
        assert str(folder / failing(i).entry) in store.keep_failed(failing(i), "log")
        os.utime(folder / failing(i).entry, (i, i))
    # The newest are those that were kept last.
    last = range(5, store.FAILED_KEPT + 5)
    assert sorted(one.name for one in folder.iterdir()) == sorted(failing(i).entry for i in last)


def test_what_failed_is_private() -> None:
    store.keep_failed(SPEC, "log")
    folder = store.root() / store.FAILED
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / SPEC.entry)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in (folder / SPEC.entry).iterdir()} == {0o600}
    folder.chmod(0o770)
    told = store.keep_failed(failing(0), "log")
    assert told == f"the source could not be kept: {folder} can be written by others (mode 0770)"
    assert [one.name for one in folder.iterdir()] == [SPEC.entry]


# ------------------------------------------------------------------------------------------------ what is on the disk


def test_folders_are_made_private(tmp_path: Path) -> None:
    get_or_compile(SPEC)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache", store.root())} == {0o700}


def test_folders_on_the_way_are_made_private_and_old_ones_left_alone(tmp_path: Path) -> None:
    before = tmp_path / "old"
    before.mkdir()
    before.chmod(0o755)
    folder = before / "a" / "b" / "c"
    mask = os.umask(0)  # so that a mode that nobody chose shows
    try:
        for _ in range(2):
            assert owned.make_folder(folder) == folder
    finally:
        os.umask(mask)
    assert [path.stat().st_mode & 0o777 for path in (before, folder.parents[1], folder.parent, folder)] == [
        0o755,
        *[0o700] * 3,
    ]


def test_entry_with_half_of_its_key_is_not_taken(compiled: list[KernelSpec]) -> None:
    """Its name is right, and so are its digests."""
    get_or_compile(SPEC)
    place = store.root() / SPEC.entry
    about = json.loads((place / "spec.json").read_text()) | {"key": SPEC.key[:16] + "0" * 48}
    digests = json.loads((place / "digests.json").read_text())
    (place / "spec.json").write_text(json.dumps(about))
    digests["spec.json"] = store.digest((place / "spec.json").read_bytes())
    (place / "digests.json").write_text(json.dumps(digests))
    cache.forget()
    assert not get_or_compile(SPEC).from_disk
    assert len(compiled) == 2


def test_pipe_in_a_files_place_does_not_block(compiled: list[KernelSpec]) -> None:
    get_or_compile(SPEC)
    cubin = store.root() / SPEC.entry / "kernel.cubin"
    cubin.unlink()
    os.mkfifo(cubin, 0o600)
    cache.forget()

    def free() -> None:
        with cubin.open("wb"):
            cubin.unlink()

    (found,) = in_time(lambda: get_or_compile(SPEC), free) or [None]
    assert isinstance(found, Compiled)
    assert len(compiled) == 2


def test_folder_that_is_refused_late_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise owned.Refused("somebody was faster")

    monkeypatch.setattr(store, "publish", refuse)
    assert get_or_compile(SPEC).cubin
    assert "cannot be kept" in caplog.text
    assert "somebody was faster" in caplog.text


@as_root
def test_what_others_left_is_not_ours_to_remove(tmp_path: Path) -> None:
    ours, theirs = tmp_path / ".tmp-1-a", tmp_path / ".tmp-1-b"
    for path in (ours, theirs):
        path.mkdir()
        os.utime(path, (0, 0))
    os.chown(theirs, 12345, -1)
    owned.remove_stale(tmp_path)
    assert (ours.exists(), theirs.exists()) == (False, True)
