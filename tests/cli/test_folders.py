"""`omnigemm cache` where the folders are not as they should be: links, strangers, files, disks that refuse, races."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from omnigemm.backends.cuda.jit import KernelSpec, nvrtc, store
from omnigemm.cli import cache
from omnigemm.cli.folders import judge, why_not_writable

CONTENT = ("list", "verify", "clear")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels and a table."""
    made = tmp_path / "cache"
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(made))
    monkeypatch.setattr(nvrtc, "version", lambda: "0.0")
    for i in range(2):
        publish(i)
    (made / "tables").mkdir(mode=0o700)
    (made / "tables" / "nvidia-h200.json").write_text('{"rows": []}')
    (made / "tables" / "nvidia-h200.json").chmod(0o600)
    return made


def publish(number: int) -> None:
    store.publish(KernelSpec("gemm", f"source {number}", "sm_90a"), b"cubin", "log", 0.5)


def kernels(folder: Path) -> int:
    return len(cache.entries(folder))


def words(command: str) -> list[str]:
    return ["cache", command, *(["--yes"] if command == "clear" else [])]


# -------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("part", ["kernels", "tables"])
def test_linked_folder_is_not_cleared(run, folder, tmp_path, part):
    (folder / part).rename(tmp_path / "elsewhere")
    (folder / part).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = sorted(one.name for one in (tmp_path / "elsewhere").iterdir())
    result = run("cache", "clear", "--yes", "--tables")
    assert (result.code, result.out) == (2, "")
    told = f"{folder / part} is a symbolic link, which is not followed; nothing was removed"
    assert result.err == f"omnigemm: error: {told}\n"
    assert run("cache", "verify", "--repair").code == 1
    assert sorted(one.name for one in (tmp_path / "elsewhere").iterdir()) == before


def test_linked_tables_do_not_keep_kernels(run, folder, tmp_path):
    (folder / "tables").rename(tmp_path / "elsewhere")
    (folder / "tables").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert run("cache", "clear", "--yes").code == 0
    assert kernels(folder) == 0


# -------------------------------------------------------------------------------------------- the folder's own fault


@pytest.mark.parametrize("part", ["kernels", "tables"])
def test_folder_that_others_can_write_is_made_private(run, folder, part):
    (folder / part).chmod(0o770)
    result = run("cache", "verify")
    assert result.code == 1
    assert f"{folder / part} can be written by others (mode 0770) (nothing in it is used)" in result.out
    assert "--repair makes a folder of yours that others can write private again." in result.out
    assert ("kernels are whole" in result.out) == (part == "tables")
    assert (folder / part).stat().st_mode & 0o777 == 0o770

    repaired = run("cache", "verify", "--repair", "--json")
    assert (repaired.code, repaired.json["ok"]) == (1, False)
    assert [(one["path"], one["ok"], one["repaired"]) for one in repaired.json["folders"]] == [
        (str(folder / name), name != part, name == part) for name in ("kernels", "tables")
    ]
    # What was whole is whole, and is still there.
    assert [one["ok"] for one in repaired.json["entries"]] == [True, True]
    assert [one["ok"] for one in repaired.json["tables"]] == [True]
    assert (folder / part).stat().st_mode & 0o777 == 0o750
    assert run("cache", "verify").code == 0


def test_repair_says_what_it_did(run, folder):
    (folder / "kernels").chmod(0o707)
    result = run("cache", "verify", "--repair")
    assert "can be written by others (mode 0707) (made private again)" in result.out
    assert "2 of 2 kernels are whole." in result.out


@as_root
def test_folder_of_another_user_is_left_alone(run, folder):
    os.chown(folder / "kernels", 12345, -1)
    (folder / "kernels").chmod(0o777)
    result = run("cache", "verify", "--repair")
    assert result.code == 1
    assert f"{folder / 'kernels'} belongs to user 12345" in result.out
    assert (folder / "kernels").stat().st_mode & 0o777 == 0o777
    assert kernels(folder) == 2


def test_file_in_the_folders_place(run, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    told = f"{tmp_path / 'cache'} is not a folder"
    for command in ("list", "clear"):
        result = run(*words(command))
        assert (result.code, result.out) == (2, "")
        assert told in result.err
    for more in ([], ["--repair"]):
        result = run("cache", "verify", *more)
        assert result.code == 1
        assert result.out.count(told) == 1
    assert run("cache", "path").code == 0
    assert (tmp_path / "cache").read_text() == "in the way"


def test_folders_that_are_not_there_are_no_fault(run):
    found = run("cache", "verify", "--json")
    assert (found.code, found.json["ok"]) == (0, True)
    assert [one["ok"] for one in found.json["folders"]] == [True, True]


# -------------------------------------------------------------------------------------------- what the system refuses


@pytest.fixture
def unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As of another user; root is refused too."""

    def refuse(real):
        def call(path, *args, **named):
            if str(path).startswith(str(folder)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *args, **named)

        return call

    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    return folder


def test_unreadable_folder(run, unreadable):
    for command in ("list", "clear"):
        result = run(*words(command))
        assert (result.code, result.out) == (2, "")
        told = f"the cache folder cannot be read: {unreadable / 'kernels'}: Permission denied"
        assert result.err == f"omnigemm: error: {told}\n"
    result = run("cache", "verify")
    assert result.code == 1
    assert f"{unreadable / 'kernels'} cannot be read: Permission denied" in result.out
    assert run("cache", "path", "--json").json == {"path": str(unreadable), "exists": False}
    assert "Permission denied" in why_not_writable(unreadable)


@pytest.mark.parametrize("command", CONTENT)
def test_name_that_is_too_long(run, monkeypatch, command):
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", "/tmp/" + "x" * 5000)
    result = run(*words(command))
    assert result.code == (1 if command == "verify" else 2)
    assert "File name too long" in result.out + result.err
    assert "Traceback" not in result.err
    assert run("cache", "path", "--json").json["exists"] is False


def test_disk_that_is_only_read(run, folder, monkeypatch):
    def refuse(old, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(old))

    monkeypatch.setattr(os, "rename", refuse)
    result = run("cache", "clear", "--yes")
    assert (result.code, result.out) == (2, "")
    assert "cannot be removed: Read-only file system" in result.err
    assert str(folder / "kernels") in result.err
    bad = folder / "kernels" / cache.entries(folder)[0].name
    (bad / "kernel.cubin").write_bytes(b"short")
    result = run("cache", "verify", "--repair")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"omnigemm: error: {bad} cannot be removed: Read-only file system\n"
    assert kernels(folder) == 2


def test_question_that_nobody_hears(run, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    result = run("cache", "clear")
    assert result.code == 1
    assert "nothing was removed" in result.err
    monkeypatch.setattr(sys, "stdin", open(folder / "tables" / "nvidia-h200.json", "w"))  # noqa: SIM115
    assert run("cache", "clear").code == 1
    assert kernels(folder) == 2


def test_without_a_home(run, folder, monkeypatch):
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")
    assert run("cache", "clear", "--yes").code == 0
    assert kernels(folder) == 0


def test_links_that_go_round(run, tmp_path):
    (tmp_path / "cache").symlink_to(tmp_path / "cache")
    result = run("cache", "clear", "--yes")
    assert (result.code, result.out) == (2, "")
    assert "is not a folder" in result.err


# -------------------------------------------------------------------------------------------- races


def test_entry_that_goes_while_it_is_looked_at(folder, monkeypatch):
    """Another process's `clear` at the worst moment of each."""
    first, second = (folder / "kernels" / one.name for one in cache.entries(folder))
    looked = cache._is_entry

    def vanishing(path: Path) -> bool:
        found = looked(path)
        if path == first:
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(cache, "_is_entry", vanishing)
    assert [one.name for one in cache.entries(folder)] == [second.name]
    monkeypatch.setattr(cache, "_is_entry", looked)

    read = store.read_entry
    for repair in (False, True):

        def vanished(place: Path, name: str) -> object:
            shutil.rmtree(place / name)
            return read(place, name)

        publish(1)
        monkeypatch.setattr(store, "read_entry", vanished)
        assert cache.verify(folder, repair=repair) == []
        monkeypatch.setattr(store, "read_entry", read)

    publish(1)
    found = cache.entries(folder)
    shutil.rmtree(folder / "kernels" / found[0].name)
    monkeypatch.setattr(cache, "entries", lambda _: found)
    assert cache.clear(folder) == []


def test_table_that_goes_while_it_is_looked_at(folder, monkeypatch):
    monkeypatch.setattr(cache, "_table_names", lambda _: ["nvidia-h100"])
    assert cache.tables(folder) == []
    assert cache.verify_tables(folder) == []
    assert cache.clear_tables(folder) == []


def test_many_clear_at_once(folder):
    together = threading.Barrier(4)
    told: list[object] = []

    def work() -> None:
        try:
            for _ in range(10):
                together.wait(30)
                for i in range(4):
                    publish(i)
                told.append((cache.entries(folder), cache.verify(folder), cache.clear(folder)))
        except Exception as error:
            together.abort()
            told.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one for one in told if isinstance(one, Exception)] == []


# -------------------------------------------------------------------------------------------- can more be kept?


def test_nearest_folder_decides(tmp_path, monkeypatch):
    assert why_not_writable(tmp_path / "not" / "there") == ""
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path / "file") == f"{tmp_path / 'file'} is not a folder"
    below = tmp_path / "file" / "below" / "kernels"
    assert why_not_writable(below.parent) == f"{below} cannot be read: Not a directory"
    assert "File name too long" in why_not_writable(tmp_path / ("x" * 300))
    monkeypatch.setattr(os, "access", lambda place, how: Path(place) != tmp_path)
    assert why_not_writable(tmp_path / "not") == f"{tmp_path} cannot be written"


def test_judge_tells_a_file_from_a_folder(tmp_path):
    (tmp_path / "kernels").write_text("in the way")
    place = judge(tmp_path, "kernels", repair=True)
    assert (place.ok, place.repaired) == (False, False)
    assert place.reason == f"{tmp_path / 'kernels'} cannot be read: Not a directory"
