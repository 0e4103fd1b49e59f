from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest

from omnigemm.cli.cache import check_safe, clear, entries
from omnigemm.cli.output import CommandError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two kernels, a loose file, and links to what must never be touched."""
    made = tmp_path / "cache"
    for name, size in (("kernel-a", 1000), ("kernel-b", 3000)):
        (made / name).mkdir(parents=True)
        (made / name / "kernel.cubin").write_bytes(bytes(size))
    (made / "note.txt").write_text("loose")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    (made / "link").symlink_to(outside, target_is_directory=True)
    (made / "kernel-a" / "inner-link").symlink_to(outside, target_is_directory=True)
    return made


def test_path(run, tmp_path):
    assert run("cache", "path").out == f"{tmp_path / 'cache'}\n"
    assert run("cache", "path", "--json").json == {"path": str(tmp_path / "cache"), "exists": False}


def test_empty_says_why(run):
    result = run("cache", "list")
    assert result.code == 0
    assert "empty" in result.out
    assert "compiles nothing" in result.out
    assert run("cache", "list", "--json").json["entries"] == []


def test_list(run, folder):
    old = time.time() - 7200
    os.utime(folder / "kernel-b", (old, old))
    found = run("cache", "list", "--json").json
    assert [(one["name"], one["bytes"]) for one in found["entries"]] == [("kernel-a", 1000), ("kernel-b", 3000)]
    assert found["bytes"] == 4000
    assert found["entries"][1]["age_seconds"] == pytest.approx(7200, abs=60)
    table = run("cache", "list").out
    assert "3.0 kB" in table
    assert "2 h" in table


def test_clear_removes_entries_only(run, folder, tmp_path):
    result = run("cache", "clear", "--yes", "--json")
    assert result.code == 0
    assert sorted(result.json["removed"]) == ["kernel-a", "kernel-b"]
    assert sorted(one.name for one in folder.iterdir()) == ["link", "note.txt"]
    assert (tmp_path / "outside" / "precious").read_text() == "keep me"


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, 2), ("", 1, 2), ("y\n", 0, 0)])
def test_clear_asks(run, folder, monkeypatch, answer, code, left):
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    result = run("cache", "clear")
    assert result.code == code
    assert "[y/N]" in result.err
    assert len(entries(folder)) == left


def test_clear_of_nothing_does_not_ask(run):
    result = run("cache", "clear")
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("where", ["home", "above", "root", "link"])
def test_dangerous_folders_are_refused(run, monkeypatch, tmp_path, where):
    home = tmp_path / "people" / "me"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    link = tmp_path / "innocent"
    link.symlink_to(home, target_is_directory=True)
    place = {"home": home, "above": home.parent, "root": Path("/"), "link": link}[where]
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(place))
    result = run("cache", "clear", "--yes")
    assert result.code == 2
    assert "nothing was removed" in result.err
    assert (home / "work").is_dir()
    with pytest.raises(CommandError):
        clear(place)


def test_usual_folder_is_allowed(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    check_safe(tmp_path / ".cache" / "omnigemm")
