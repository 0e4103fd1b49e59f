from __future__ import annotations

import json

import pytest

from omnigemm.bench.record import FIELDS, ROW_FIELDS, read
from omnigemm.core.problem import OPS

FAST = ("--seconds", "0", "--cold-mb", "0")


def test_record(run, tmp_path):
    shapes = ("--shape", "2x32x64", "--shape", "3x64x128")
    result = run("bench", "--op", "int8_gemm", "--op", "gemm", *shapes, *FAST, "--json", "--record", "one.json")
    assert result.code == 0
    assert tuple(result.json) == FIELDS
    rows = result.json["rows"]
    pairs = [(row["op"], row["shape"]) for row in rows]
    assert pairs == [(op, shape) for op in ("int8_gemm", "gemm") for shape in ("2x32x64", "3x64x128")]
    for row in rows:
        assert tuple(row) == ROW_FIELDS
        assert row["us"] > 0
        assert row["floor_us"] is None
        assert row["peers"]["torch fp32"] > 0
        assert row["config"]["kernel"].startswith("cpu/")
    assert read(tmp_path / "one.json") == result.json


def test_table_shows_the_ratio(run):
    args = ("bench", "--op", "int4_gemm", "--shape", "4x64x128", *FAST)
    result = run(*args, "--record", "r.json")
    with open("r.json") as file:
        (row,) = json.load(file)["rows"]
    for name, us in row["peers"].items():
        assert name in result.out
        assert f"{us / row['us']:.2f}x" in result.out
    assert row["config"]["kernel"] in result.out


def test_without_op_all_that_take_the_type(run):
    result = run("bench", "--dtype", "int8", "--shape", "2x32x64", *FAST, "--json")
    rows = result.json["rows"]
    assert [row["op"] for row in rows] == ["int8_gemm", "grouped_gemm_contiguous", "grouped_gemm_masked"]
    assert [row["shape"] for row in rows] == ["2x32x64", "G8x2x32x64", "G8x2x32x64"]


def test_every_op(run):
    result = run("bench", "--shape", "G3x2x32x64", *FAST, "--json")
    assert [row["op"] for row in result.json["rows"]] == list(OPS)


def test_words(run):
    args = ("bench", "--op", "fp8_gemm", "--granularity", "token", "--shape", "2x32x64", *FAST, "--json")
    assert run(*args).json["rows"][0]["config"]["scales"] == "token x channel"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "2x3"), "expected MxNxK"),
        (("--shape", "2x0x3"), "expected MxNxK"),
        (("--shape", "٣x16x16"), "expected MxNxK"),
        (("--shape", f"{'9' * 5000}x16x16"), "expected MxNxK"),
        (("--op", "grouped_gemm", "--shape", "G3000000000x1x2x3"), "groups is 3000000000, expected at most 65536"),
        (("--op", "int8_gemm", "--dtype", "bf16"), "dtype is bf16"),
        (("--op", "nothing"), "op is 'nothing'"),
        (("--dtype", "int4"), "dtype is int4"),
    ],
)
def test_wrong_words_are_reported(run, arguments, words):
    result = run("bench", *arguments, *FAST)
    assert (result.code, result.out) == (2, "")
    assert words in result.err


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
def test_seconds_that_are_none(run, seconds):
    result = run("bench", "--op", "gemm", "--seconds", seconds)
    assert (result.code, result.out) == (2, "")
    assert "seconds" in result.err


def test_many_seconds(run):
    """More than the clock counts. The number of rounds is limited too."""
    assert run("bench", "--op", "gemm", "--shape", "1x2x3", "--cold-mb", "0", "--seconds", "1e300").code == 0


def test_shape_that_memory_does_not_hold(run):
    result = run("bench", "--op", "gemm", "--shape", "100000x1000000x1000000")
    assert (result.code, result.out) == (2, "")
    assert "bench: gemm 100000x1000000x1000000 needs 4800 GB and more, but this machine has" in result.err


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_memory_that_runs_out(run, monkeypatch, kind):
    def fail(*_: object, **__: object) -> None:
        raise kind("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")

    monkeypatch.setattr("omnigemm.cli.bench.compare", fail)
    result = run("bench", "--op", "gemm", "--shape", "1x2x3")
    assert (result.code, result.out) == (2, "")
    assert result.err == "omnigemm: error: bench: gemm 1x2x3 does not fit into this machine's memory\n"


def test_other_errors_of_torch_are_not_hidden(run, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("omnigemm.cli.bench.compare", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        run("bench", "--op", "gemm", "--shape", "1x2x3")
