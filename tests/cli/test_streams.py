"""What a command meets at its ends: disks that are full, streams that are closed, and Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omnigemm.bench.record import read

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
EXPLAIN = ("explain", "gemm", "4", "8", "16")
BENCH = ("bench", "--op", "gemm", "--shape", "2x32x64", "--seconds", "0", "--cold-mb", "0")


@needs_full
@pytest.mark.parametrize("words", [EXPLAIN, (*EXPLAIN, "--json"), ("cache", "path"), ("--version",)], ids=" ".join)
def test_full_stdout_is_told(run, monkeypatch, words):
    monkeypatch.setattr(sys, "stdout", FULL.open("w"))
    result = run(*words)
    assert (result.code, result.err) == (2, "omnigemm: error: stdout cannot be written: No space left on device\n")


@needs_full
def test_help_on_a_full_stdout(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", FULL.open("w"))
    result = run("--help")
    assert (result.code, result.err) == (2, "omnigemm: error: [Errno 28] No space left on device\n")


@needs_full
def test_full_stdout_ends_without_a_traceback():
    with FULL.open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "omnigemm", *EXPLAIN, "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)


@needs_full
def test_record_is_written_all_the_same(run, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", FULL.open("w"))
    assert run(*BENCH, "--record", "run.json").code == 2
    assert len(read(tmp_path / "run.json")["rows"]) == 1


@needs_full
@pytest.mark.parametrize("as_json", [False, True])
def test_figures_are_printed_if_the_record_cannot_be_kept(run, as_json):
    result = run(*BENCH, "--record", str(FULL), *["--json"] * as_json)
    assert (result.code, result.err) == (2, "omnigemm: error: /dev/full cannot be written: No space left on device\n")
    assert "2x32x64" in result.out


@needs_full
@pytest.mark.parametrize("as_json", [False, True])
def test_figures_are_printed_if_the_report_cannot_be_kept(run, as_json):
    result = run("demo", "--quick", "--out", str(FULL), *["--json"] * as_json)
    assert (result.code, result.err) == (2, "omnigemm: error: /dev/full cannot be written: No space left on device\n")
    if as_json:
        assert (result.json["ok"], result.json["report"]) == (True, None)
    else:
        assert "results are right" in result.out
        assert "Report" not in result.out


@pytest.mark.parametrize("words", [("demo", "--out"), ("bench", "--record")], ids=" ".join)
def test_name_that_is_too_long(run, monkeypatch, words):
    monkeypatch.setattr("omnigemm.cli.demo.collect", lambda *_: pytest.fail("worked in vain"))
    monkeypatch.setattr("omnigemm.cli.bench._jobs", lambda *_: pytest.fail("worked in vain"))
    result = run(*words, "x" * 300)
    assert (result.code, result.out) == (2, "")
    assert "cannot be written: " in result.err
    assert "File name too long" in result.err
    assert result.err.count("\n") == 1


def test_closed_stdout(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    result = run(*EXPLAIN)
    assert (result.code, result.err) == (2, "omnigemm: error: stdout is closed, expected somewhere to print to\n")


def test_closed_stderr(run, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    result = run(*BENCH, "--json")
    assert result.code == 0
    assert len(result.json["rows"]) == 1
    monkeypatch.setattr(sys, "stderr", None)
    result = run("explain", "no_such_op", "1", "2", "3")  # its error must not go to stdout
    assert (result.code, result.out) == (2, "")


@pytest.mark.parametrize("where", ["omnigemm.cli.app.run", "omnigemm.cli.explain.run_explain"])
def test_ctrl_c_is_no_traceback(run, monkeypatch, where):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, stop)
    result = run(*EXPLAIN)
    assert (result.code, result.out, result.err) == (130, "", "")
