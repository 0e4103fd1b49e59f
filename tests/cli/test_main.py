from __future__ import annotations

import subprocess
import sys

import pytest
from rich.console import Console

import omnigemm
from omnigemm.cli import output
from omnigemm.core import settings

COMMANDS = [
    [],
    ["doctor"],
    ["explain"],
    ["bench"],
    ["demo"],
    ["warm"],
    ["tune"],
    ["cache"],
    ["cache", "path"],
    ["cache", "list"],
    ["cache", "verify"],
    ["cache", "clear"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(run, command):
    result = run(*command, "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert " ".join(["omnigemm", *command]) in result.out.split("Example")[1]


def test_entry_point_is_light():
    probe = "import sys, omnigemm.cli; print(*[m for m in sys.modules if m.split('.')[0] in ('typer', 'rich')])"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_module_runs():
    ran = subprocess.run([sys.executable, "-m", "omnigemm", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"omnigemm {omnigemm.__version__}\n")


def test_library_error_is_one_line(run):
    result = run("explain", "no_such_op", "1", "2", "3")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("omnigemm: error: op is 'no_such_op'")
    assert result.err.count("\n") == 1


def test_wrong_variable_is_one_line(run, monkeypatch):
    monkeypatch.setattr(settings, "_base", None)
    monkeypatch.setenv("OMNIGEMM_DETERMINISTIC", "perhaps")
    result = run("explain", "gemm", "1", "2", "3")
    assert (result.code, result.out) == (2, "")
    assert "OMNIGEMM_DETERMINISTIC is 'perhaps'" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "words", [("cache", "path"), ("cache", "clear", "--yes"), ("tune", "gemm", "--shape", "1x2x3")]
)
def test_wrong_cache_folder_is_one_line(run, monkeypatch, words):
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", "~no-such-user/kernels")
    result = run(*words, *["--dry-run"] * (words[0] == "tune"))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("omnigemm: error: OMNIGEMM_CACHE_DIR is '~no-such-user/kernels'")
    assert result.err.count("\n") == 1


def test_defects_are_not_hidden(run, monkeypatch):
    def defect(*_: object, **__: object) -> int:
        raise ValueError("a defect")

    monkeypatch.setattr("omnigemm.cli.explain.run_explain", defect)
    with pytest.raises(ValueError, match="a defect"):
        run("explain", "gemm", "1", "2", "3")


def test_unknown_option(run):
    result = run("doctor", "--no-such-option")
    assert result.code == 2
    assert "no-such-option" in result.err


def test_narrow_screens_put_the_names_in_one_cell():
    wide, narrow = Console(width=output.WIDE), Console(width=output.WIDE - 1)
    assert output.name_columns(wide, ("kernel",)) == ["operation", "kernel"]
    assert output.names_of(wide, "gemm", ("cpu/mm",)) == ["gemm", "cpu/mm"]
    assert output.name_columns(narrow, ("kernel",)) == ["operation"]
    assert output.names_of(narrow, "gemm", ("cpu/mm",)) == ["gemm\n[dim]cpu/mm[/dim]"]
