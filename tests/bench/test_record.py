from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from omnigemm.bench import record
from omnigemm.bench.compare import geometric_mean, sweep
from omnigemm.bench.timing import Timing
from omnigemm.bench.workloads import Size, Workload, case

ROOT = Path(__file__).parents[2]


def test_row_and_round_trip(tmp_path):
    work = Workload(case("int4_gemm", dtype="fp16", group_size=64), Size(2, 16, 128))
    times = {name: Timing(us, us, us, 9) for name, us in (("omnigemm", 12.346), ("torch fp32", 24.0), ("other", 1.0))}
    row = record.row(work, times)
    assert (row["op"], row["shape"], row["us"], row["floor_us"]) == ("int4_gemm", "2x16x128", 12.35, None)
    assert row["peers"] == {"torch fp32": 24.0}
    assert row["config"]["kernel"] == f"cpu/{work.plan().kernel}"
    assert (row["config"]["dtype"], row["config"]["group_size"]) == ("fp16", 64)

    path = tmp_path / "deep" / "one.json"
    made = record.new([row], "by hand")
    record.write(path, made)
    assert record.read(path) == made
    assert path.read_text().count("\n") > 20  # pretty-printed


def test_incomplete_records_are_refused(tmp_path):
    made = record.new([{"op": "gemm"}], "m")
    del made["cpu"]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"lacks cpu, rows\.config"):
        record.read(path)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Intel(R) Xeon(R) Gold 6430", "intel-xeon-gold-6430.json"),
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654-96-core-processor.json"),
        ("???", "unknown.json"),
    ],
)
def test_file_name(name, wanted):
    assert record.file_name(name) == wanted


def test_sweep_times_all_at_every_row_count():
    cases = {"four": case("int4_gemm"), "eight": case("int8_gemm")}
    steps = list(sweep(cases, Size(1, 32, 128), (1, 3), seconds=0.0, cold_bytes=0))
    assert [str(works["four"].size) for works, _ in steps] == ["1x32x128", "3x32x128"]
    for works, times in steps:
        assert list(times) == ["four", "eight", "torch fp32", "torch bf16"]
        assert all(one.us > 0 for one in times.values())
        assert all(work.verify().ok for work in works.values())
    assert steps[0][0]["four"].b is steps[1][0]["four"].b


def test_geometric_mean():
    assert geometric_mean([0.5, 8.0]) == pytest.approx(2.0)


def test_driver_writes_the_required_table(tmp_path):
    driver = runpy.run_path(str(ROOT / "benchmarks" / "cpu.py"))
    assert driver["WEIGHTS"] == ("6144x4096", "28672x4096", "4096x14336")
    assert driver["ROWS"] == (1, 16, 128)
    app = typer.Typer()
    app.command()(driver["main"])
    args = ["--weight", "32x128", "--rows", "1", "--rows", "2", "--seconds", "0", "--cold-mb", "0"]
    result = CliRunner().invoke(app, [*args, "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    (path,) = tmp_path.iterdir()
    made = record.read(path)
    rows = [(row["op"], row["config"]["dtype"], row["shape"]) for row in made["rows"]]
    kinds = [("int4_gemm", "bf16"), ("int4_gemm", "fp16"), ("int8_gemm", "int8")]
    assert rows == [(*kind, shape) for kind in kinds for shape in ("1x32x128", "2x32x128")]
    assert all(set(row["peers"]) == {"torch fp32", "torch bf16"} for row in made["rows"])
    assert made["gpu"] is None
    assert "perf_counter_ns" in made["method"]


def test_rows_that_were_not_measured_anew_are_kept_and_marked():
    def row(op, shape, **more):
        return {"op": op, "shape": shape, "us": 1.0, "floor_us": None, "peers": {}, "config": {}, **more}

    before = record.new([row("a", "1x2"), row("a", "3x4"), row("b", "1x2", source_hash="first")], "", "second")
    now = record.new([row("a", "1x2")], "", "third")
    record.keep_rows(now, before)
    kept = [(one["op"], one["shape"], one.get("source_hash")) for one in now["rows"]]
    assert kept == [("a", "1x2", None), ("a", "3x4", "second"), ("b", "1x2", "first")]
