"""The cache on disk: hits, races, damage, strangers, and disks that cannot be written. Real NVRTC, real processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nvrtc_here import needs_nvrtc
from omnigemm.backends.cuda.jit import KernelSpec, cache, get_or_compile, nvrtc, store

pytestmark = needs_nvrtc
SPEC = KernelSpec("add", 'extern "C" __global__ void add(float* a) { a[threadIdx.x] += 1.0f; }', "sm_90a")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away or mount")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache and no memory; the list counts what NVRTC is asked for."""
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()
    calls: list[str] = []
    real = nvrtc.run

    def counted(source, headers, options):
        calls.append(source)
        return real(source, headers, options)

    monkeypatch.setattr(nvrtc, "run", counted)
    return calls


@pytest.fixture
def place(compiled) -> Path:
    """The folder of an entry that is there."""
    get_or_compile(SPEC)
    compiled.clear()
    cache.forget()
    return store.root() / SPEC.entry


def temporaries() -> list[Path]:
    return list(store.root().glob(".tmp-*"))


def test_second_time_is_a_hit(compiled):
    first = get_or_compile(SPEC)
    assert get_or_compile(SPEC) is first
    cache.forget()
    again = get_or_compile(SPEC)
    assert len(compiled) == 1
    assert again.from_disk
    assert not first.from_disk
    assert (again.cubin, again.log, again.resources) == (first.cubin, first.log, first.resources)


def test_entry_describes_itself_and_is_private(place):
    assert sorted(one.name for one in place.iterdir()) == sorted([*store.FILES, store.DIGESTS])
    about = json.loads((place / "spec.json").read_text())
    assert (about["key"], about["arch"], about["nvrtc"]) == (SPEC.key, "sm_90a", nvrtc.version())
    assert (place / "kernel.cu").read_text() == SPEC.source
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (place, place.parent)} == {0o700}
    assert temporaries() == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("kernel.cubin", truncate),
        ("kernel.cubin", flip),
        ("kernel.cubin", Path.unlink),
        ("spec.json", lambda path: path.write_text("{")),
        ("digests.json", lambda path: path.write_text("[1]")),
        ("digests.json", Path.unlink),
        ("log.txt", lambda path: path.write_text("another log")),
    ],
)
def test_damaged_entry_is_built_again(compiled, place, name, harm, caplog):
    good = {path.name: path.read_bytes() for path in place.iterdir() if path.name == "kernel.cubin"}
    harm(place / name)
    made = get_or_compile(SPEC)
    assert len(compiled) == 1
    assert made.cubin == good["kernel.cubin"] == (place / "kernel.cubin").read_bytes()
    assert "damaged" in caplog.text
    cache.forget()
    assert get_or_compile(SPEC).from_disk
    assert temporaries() == []


def test_entry_of_another_kernel_is_not_taken(compiled, place):
    other = KernelSpec("add", SPEC.source + " // other", "sm_90a")
    place.rename(place.parent / other.entry)
    assert get_or_compile(other).cubin
    assert len(compiled) == 1
    assert json.loads((place.parent / other.entry / "spec.json").read_text())["key"] == other.key


@pytest.mark.parametrize("which", ["entry", "file", "root"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_what_others_can_write_is_not_loaded(compiled, place, which, mode, caplog):
    {"entry": place, "file": place / "kernel.cubin", "root": place.parent}[which].chmod(mode)
    assert not get_or_compile(SPEC).from_disk
    assert len(compiled) == 1
    assert "can be written by others" in caplog.text
    cache._memory.clear()
    get_or_compile(SPEC)
    assert caplog.text.count("can be written by others") == 1


@as_root
@pytest.mark.parametrize("which", ["entry", "file", "root"])
def test_what_belongs_to_others_is_not_loaded(compiled, place, which, caplog):
    os.chown({"entry": place, "file": place / "kernel.cubin", "root": place.parent}[which], 12345, -1)
    assert not get_or_compile(SPEC).from_disk
    assert len(compiled) == 1
    assert "belongs to user 12345" in caplog.text


@pytest.mark.parametrize("which", ["entry", "file", "root"])
def test_links_are_not_followed(compiled, place, which, tmp_path, caplog):
    target = {"entry": place, "file": place / "kernel.cubin", "root": place.parent}[which]
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    assert not get_or_compile(SPEC).from_disk
    assert len(compiled) == 1
    assert "is a symbolic link" in caplog.text


def test_read_only_cache_is_read_and_costs_only_time(compiled, place, monkeypatch, caplog):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    assert get_or_compile(SPEC).from_disk
    for i in range(2):
        assert get_or_compile(KernelSpec("add", f"{SPEC.source} // {i}", "sm_90a")).cubin
    assert len(compiled) == 2
    assert caplog.text.count("Read-only file system") == 1
    assert str(place.parent) in caplog.text


def test_file_where_the_folder_should_be(compiled, tmp_path, caplog):
    (tmp_path / "cache").write_text("in the way")
    assert get_or_compile(SPEC).cubin
    assert "cannot be read" in caplog.text
    assert "in memory" in caplog.text
    assert "damaged" not in caplog.text
    assert (tmp_path / "cache").read_text() == "in the way"


def test_file_where_the_entry_should_be(compiled, place):
    place.rename(place.parent / "aside")
    place.write_text("in the way")
    assert get_or_compile(SPEC).cubin
    assert len(compiled) == 1
    assert (place / "kernel.cubin").is_file()


@as_root
def test_full_disk(compiled, tmp_path, caplog):
    disk = tmp_path / "cache"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody mount")
    try:
        (disk / "filler").write_bytes(bytes(52 * 1024))
        big = KernelSpec("add", SPEC.source + "//" + "x" * 40_000, "sm_90a")
        assert get_or_compile(big).cubin
        assert "No space left" in caplog.text
        assert str(store.root()) in caplog.text
        assert temporaries() == []
        assert not (store.root() / big.entry).exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_locks_that_do_not_work_are_done_without(compiled, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert get_or_compile(SPEC).cubin
    assert (store.root() / SPEC.entry).is_dir()


def test_publishing_second_is_harmless(place):
    store.publish(SPEC, b"other", "", 0.0)
    assert (place / "kernel.cubin").read_bytes() != b"other"
    assert temporaries() == []


def test_only_old_temporaries_are_removed(place):
    old, new = place.parent / ".tmp-1-old", place.parent / ".tmp-2-new"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (time.time() - 4000,) * 2)
    get_or_compile(KernelSpec("add", SPEC.source + " // stale", "sm_90a"))
    assert temporaries() == [new]


def test_threads_compile_once(compiled):
    start = threading.Barrier(8)
    found = []

    def work() -> None:
        start.wait()
        found.append(get_or_compile(SPEC))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(compiled) == 1
    assert len(found) == 8
    assert len({id(one) for one in found}) == 1


RACE = """
import sys, time, pathlib
from omnigemm.backends.cuda.jit import KernelSpec, get_or_compile, nvrtc
folder, me, source = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
real = nvrtc.run
def slow(*args):
    (folder / f"compiled-{me}").touch()
    time.sleep(float(sys.argv[4]))
    return real(*args)
nvrtc.run = slow
spec = KernelSpec("add", source, "sm_90a")
spec.key
(folder / f"ready-{me}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
made = get_or_compile(spec)
(folder / f"cubin-{me}").write_bytes(made.cubin)
"""


def start(folder: Path, me: str, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RACE, str(folder), me, SPEC.source, str(seconds)])


def wait_for(folder: Path, pattern: str, count: int) -> None:
    end = time.monotonic() + 60
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < end, f"{pattern} did not come"
        time.sleep(0.01)


@pytest.mark.usefixtures("compiled")
def test_six_processes_compile_once(tmp_path):
    running = [start(tmp_path, str(i), 0.5) for i in range(6)]
    try:
        wait_for(tmp_path, "ready-*", 6)
        (tmp_path / "go").touch()
        assert [one.wait(timeout=60) for one in running] == [0] * 6
    finally:
        for one in running:
            one.kill()
    assert len(list(tmp_path.glob("compiled-*"))) == 1
    assert len({path.read_bytes() for path in tmp_path.glob("cubin-*")}) == 1
    assert len(list(tmp_path.glob("cubin-*"))) == 6


def test_lock_of_a_killed_process_is_free(compiled, tmp_path):
    (tmp_path / "go").touch()
    holder = start(tmp_path, "holder", 600)
    try:
        wait_for(tmp_path, "compiled-holder", 1)
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.append(get_or_compile(SPEC)))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "the lock did not hold"
        assert compiled == []
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    waiting.join(30)
    assert len(found) == len(compiled) == 1
    assert (store.root() / SPEC.entry).is_dir()


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="omnigemm")
