from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from omnigemm.backends.cuda import measured
from omnigemm.backends.cuda.jit import KernelSpec, nvrtc, store
from omnigemm.cli.cache import check_safe, clear, entries
from omnigemm.cli.output import CommandError


def entry(source: str, size: int) -> str:
    """Publish an entry as the compiler would, without one."""
    spec = KernelSpec("gemm", source, "sm_90a")
    store.publish(spec, bytes(size), "log", 0.5)
    return spec.entry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels, and other files, folders and links that must never be touched."""
    made = tmp_path / "cache"
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(made))
    monkeypatch.setattr(nvrtc, "version", lambda: "0.0")
    names = [entry("cli a", 100_000), entry("cli b", 300_000)]
    kernels = made / "kernels"
    (made / "mine").mkdir()
    (kernels / "note.txt").write_text("loose")
    (kernels / "somebody's folder").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep me")
    (kernels / "link").symlink_to(outside, target_is_directory=True)
    (kernels / names[0] / "inner-link").symlink_to(outside, target_is_directory=True)
    return made


def names(folder: Path) -> list[str]:
    return [one.name for one in entries(folder)]


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
    last = names(folder)[-1]
    old = time.time() - 7200
    os.utime(folder / "kernels" / last, (old, old))
    found = run("cache", "list", "--json").json
    assert [(one["kernel"], one["arch"]) for one in found["entries"]] == [("gemm", "sm_90a")] * 2
    assert 400_000 < found["bytes"] == sum(one["bytes"] for one in found["entries"]) < 410_000
    assert found["entries"][1]["name"] == last
    assert found["entries"][1]["age_seconds"] == pytest.approx(7200, abs=60)
    table = run("cache", "list").out
    assert "sm_90a" in table
    assert "2 h" in table


@pytest.mark.parametrize("content", ["", "[]", '{"name": 1}'])
def test_list_survives_a_broken_entry(run, folder, content):
    (folder / "kernels" / names(folder)[0] / "spec.json").write_text(content)
    assert [one["kernel"] for one in run("cache", "list", "--json").json["entries"]].count(None) == 1
    assert "[unknown]" in run("cache", "list").out


def test_verify_and_repair(run, folder, tmp_path):
    assert run("cache", "verify").code == 0
    bad, good = sorted(names(folder))
    (folder / "kernels" / bad / "kernel.cubin").write_bytes(b"short")
    link = "gemm-" + "0" * 16
    (folder / "kernels" / link).symlink_to(tmp_path / "outside", target_is_directory=True)
    result = run("cache", "verify")
    assert result.code == 1
    assert f"{bad}: kernel.cubin does not match its digest" in result.out
    assert f"{link}: {link} is a symbolic link" in result.out
    assert "1 of 3 kernels are whole" in result.out
    assert sorted(names(folder)) == [bad, good]
    repaired = run("cache", "verify", "--repair", "--json")
    assert repaired.code == 1
    assert {one["name"]: (one["ok"], one["removed"]) for one in repaired.json["entries"]} == {
        bad: (False, True),
        link: (False, True),
        good: (True, False),
    }
    assert names(folder) == [good]
    assert (tmp_path / "outside" / "precious").read_text() == "keep me"
    assert run("cache", "verify", "--json").json["ok"] is True


def test_verify_finds_what_others_could_write(run, folder):
    name = names(folder)[0]
    (folder / "kernels" / name).chmod(0o777)
    result = run("cache", "verify")
    assert result.code == 1
    assert f"{name}: {name} can be written by others (mode 0777)" in result.out


def test_verify_of_nothing(run):
    assert run("cache", "verify", "--json").json["entries"] == []


def test_clear_removes_entries_only(run, folder, tmp_path):
    failed = folder / "kernels" / ".failed" / "x-0"
    failed.mkdir(parents=True)
    expected = sorted(names(folder))
    result = run("cache", "clear", "--yes", "--json")
    assert result.code == 0
    assert sorted(result.json["removed"]) == expected
    assert sorted(one.name for one in (folder / "kernels").iterdir()) == ["link", "note.txt", "somebody's folder"]
    assert (folder / "mine").is_dir()
    assert (tmp_path / "outside" / "precious").read_text() == "keep me"


def test_clear_leaves_what_failed_elsewhere(run, folder, tmp_path):
    (folder / "kernels" / ".failed").symlink_to(tmp_path / "outside", target_is_directory=True)
    assert run("cache", "clear", "--yes").code == 0
    assert (folder / "kernels" / ".failed").is_symlink()
    assert (tmp_path / "outside" / "precious").read_text() == "keep me"


def test_clear_removes_what_dead_processes_left(run, folder):
    old, new = folder / "kernels" / ".tmp-1-old", folder / "kernels" / ".tmp-2-new"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (time.time() - 4000,) * 2)
    assert run("cache", "clear", "--yes").code == 0
    assert not old.exists()
    assert new.is_dir()


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
    for place in (home, home.parent):
        (place / "kernels" / ("work-" + "0" * 16)).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    link = tmp_path / "innocent"
    link.symlink_to(home, target_is_directory=True)
    place = {"home": home, "above": home.parent, "root": Path("/"), "link": link}[where]
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(place))
    result = run("cache", "clear", "--yes")
    assert result.code == 2
    assert "nothing was removed" in result.err
    assert "nothing was removed" in run("cache", "verify", "--repair").err
    assert all(len(entries(one)) == 1 for one in (home, home.parent))
    with pytest.raises(CommandError):
        clear(place)


def test_usual_folder_is_allowed(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    check_safe(tmp_path / ".cache" / "omnigemm")


# ------------------------------------------------------------------------------------------------ measured tables

CONFIG = {"swap": True, "math_groups": 1, "waves": 1, "cols": 8, "stages": 5}
ROW = {"n": 64, "k": 256, "scales": "block", "m_from": 1, "m_to": 8, "m": 1, "us": 4.0, "config": CONFIG}


@pytest.fixture
def tables(folder: Path) -> Path:
    """Of one GPU, with two weights."""
    rows = [ROW, ROW | {"m_from": 9, "m_to": 16, "m": 9}, ROW | {"n": 128}]
    return measured.add("nvidia-h200", rows).parent


def test_list_has_tables(run, tables):
    (found,) = run("cache", "list", "--json").json["tables"]
    assert (found["name"], found["rows"], found["weights"]) == ("nvidia-h200", 3, 2)
    assert found["bytes"] == (tables / "nvidia-h200.json").stat().st_size
    assert "Measured table nvidia-h200: 3 rows for 2 weights, 0 s old" in run("cache", "list").out
    (tables / "nvidia-h200.json").write_text("half")
    assert "Measured table nvidia-h200: it cannot be used" in run("cache", "list").out


def test_list_of_tables_alone(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    measured.add("nvidia-h200", [ROW])
    shown = run("cache", "list").out
    assert "0 kernels" in shown
    assert "empty" not in shown
    assert "1 rows for 1 weights" in shown


def test_clear_keeps_tables_unless_told(run, tables, folder, monkeypatch):
    result = run("cache", "clear", "--yes")
    assert result.code == 0
    assert "2 kernels removed" in result.out
    assert "1 measured tables stay; --tables removes them too" in result.out
    file = tables / "nvidia-h200.json"
    assert file.is_file()
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    asked = run("cache", "clear", "--tables")
    assert asked.code == 1
    assert "0 compiled kernels and 1 measured tables" in asked.err
    assert file.is_file()
    (tables / "My notes.json").write_text("{}")
    assert run("cache", "clear", "--yes", "--tables", "--json").json["removed_tables"] == ["nvidia-h200"]
    assert sorted(one.name for one in tables.iterdir()) == [".locks", "My notes.json"]


def test_clear_leaves_a_link_to_a_table(run, tables, tmp_path):
    (tables / "nvidia-h200.json").rename(tmp_path / "outside" / "table.json")
    (tables / "nvidia-h200.json").symlink_to(tmp_path / "outside" / "table.json")
    assert run("cache", "clear", "--yes", "--tables", "--json").json["removed_tables"] == []
    assert (tmp_path / "outside" / "table.json").is_file()


def test_verify_and_repair_of_tables(run, tables, tmp_path):
    assert "1 of 1 measured tables are whole." in run("cache", "verify").out
    good, damaged, strange = (tables / f"nvidia-{name}.json" for name in ("h200", "h100", "h20"))
    good.write_text(json.dumps({"about": "mine", "rows": [ROW, ROW | {"us": -1}]}))
    damaged.write_text("half")
    strange.symlink_to(tmp_path / "outside" / "precious")
    result = run("cache", "verify")
    assert result.code == 1
    assert "nvidia-h200: row 2: us is -1, expected a number above 0" in result.out
    assert "nvidia-h100: nvidia-h100.json is not JSON" in result.out
    assert "nvidia-h20: nvidia-h20.json is a symbolic link" in result.out
    assert "0 of 3 measured tables are whole" in result.out
    assert "`omnigemm tune` measures it again" in result.out
    repaired = run("cache", "verify", "--repair", "--json")
    assert repaired.code == 1
    assert [(one["ok"], one["removed"]) for one in repaired.json["tables"]] == [(False, True)] * 3
    assert json.loads(good.read_text()) == {"about": "mine", "rows": [ROW]}
    assert sorted(one.name for one in tables.iterdir()) == [".locks", "nvidia-h200.json"]
    assert (tmp_path / "outside" / "precious").read_text() == "keep me"
    assert run("cache", "verify", "--json").json["ok"] is True
