"""Goals read off a record, and the pages that show them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "records" / "nvidia-h200.json"
HISTORY = ROOT / "benchmarks" / "history" / "nvidia-h200.json"


@pytest.fixture(scope="module")
def goals(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("goals")


@pytest.fixture(scope="module")
def standing(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("standing")


def row(op: str, shape: str, us: float, floor: float | None = 10.0, **more: Any) -> dict[str, Any]:
    return {"op": op, "shape": shape, "us": us, "floor_us": floor, "peers": {}, "config": {}, **more}


def said(goals: ModuleType, what: str, *rows: dict[str, Any], **more: Any) -> Any:
    """What a record with these rows says of the goal with these words."""
    (goal,) = (one for one in goals.GOALS if one.what == what)
    return goal.read({"rows": list(rows), **more})


def test_decode_is_held_to_each_shape(goals: ModuleType) -> None:
    what = "`int8_gemm`, up to 128 rows"
    at_the_bar, above, many = (row("int8", f"{m}x64x64", us) for m, us in ((128, 13.8), (1, 13.81), (129, 99.0)))
    assert said(goals, what, at_the_bar, many) == ("1 of 1", True, "")
    assert said(goals, what, at_the_bar, above, many) == ("1 of 2", False, ", not 1x64x64 13.81 of 13.80")
    assert said(goals, what, many) is None


def test_a_peer_is_beaten_in_the_mean_and_everywhere(goals: ModuleType) -> None:
    what = "the same with many rows, over CUTLASS"
    fast, slow = (row("int8", f"{m}x64x64", 10.0, peers={"CUTLASS, best": us}) for m, us in ((1024, 12.0), (4096, 9.7)))
    assert said(goals, what, fast, slow) == ("1.079, lowest 0.970", True, " at 4096x64x64")
    slow["peers"] = {"CUTLASS, best": 9.69}
    assert not said(goals, what, fast, slow).holds
    fast["peers"] = {"CUTLASS, best": 10.0}
    assert not said(goals, what, fast).holds
    assert said(goals, what, row("int8", "4096x64x64", 1.0)) is None


def test_the_faster_peer_counts_and_pairs_go_before_turns(goals: ModuleType) -> None:
    both = row("fp8_token", "1x2x3", 10.0, peers={"torch scaled_mm rowwise": 9.0, "torch scaled_mm tensorwise": 20.0})
    assert goals.over(both, *goals.TORCH_FP8) == pytest.approx(0.9)
    paired = row("fp8_block", "1x2x3", 10.0, peers={"DeepGEMM 1": 30.0}, pairs={"DeepGEMM 1": [8.0, 16.0]})
    assert goals.over(paired, "DeepGEMM") == pytest.approx(2.0)
    assert goals.over(paired, "CUTLASS") is None


def test_the_blas_backend_is_measured_also_where_our_kernels_run(goals: ModuleType) -> None:
    what = "the blas backend over `torch.mm`, `bmm`, `baddbmm`"
    ours = row("gemm_bf16", "1x2x3", 5.0, us_blas=10.0, peers={"torch.mm": 9.0}, config={"backend": "cuda"})
    its = row("bmm_bf16", "B2x1x2x3", 10.0, peers={"torch.bmm": 10.0}, config={"backend": "blas"})
    assert said(goals, what, ours, its) == ("0.949, lowest 0.900", False, " at gemm_bf16 1x2x3")
    assert said(goals, what, its).holds


def test_lists_bandwidth_quantisers_and_hosts(goals: ModuleType) -> None:
    dense = {"one dense torch.mm": 100.0}
    both = row("grouped_list_bf16", "G10", 105.0, peers=dense), row("grouped_list_bf16", "G500", 115.1, peers=dense)
    what = "lists of unequal products, time over one dense product's"
    assert said(goals, what, *both) == ("10: 1.05, 500: 1.15", False, "")
    what = "groups of 20 rows, masked, fp8 block scales, TB/s"
    thin, other = (row("grouped_masked_fp8_block", f"G32x{m}x64x64", us) for m, us in ((20, 11.5), (4, 99.0)))
    assert said(goals, what, thin, other) == ("4.00", True, "")
    made = [row("fp8 token", shape, 3.0, config={"backend": "quant", "dtype": dtype, "gbps": 3408})
            for shape in ("8192x8192", "64x7168") for dtype in ("bfloat16", "float32")]  # fmt: skip
    made[1]["config"]["gbps"] = 1
    assert said(goals, "quantisers, 8192x8192 bf16, of a copy's bandwidth", *made).holds
    assert said(goals, "quantisers, 64x7168, us", *made) == ("3.0 to 3.00", True, "")
    host = {"with out=": 12.1, "torch.mm, out=": 20.0}
    assert said(goals, "host time of a warm `fp8_gemm`, us", host_us=host) == ("12.1", False, ", `torch.mm` took 20.0")
    assert said(goals, "host time of a warm `fp8_gemm`, us") is None
    by = "gemm by blas"
    host = {f"gemm: {by}, C is out": 11.0, f"gemm: {by}, batch, out=": 12.1, "gemm: torch.bmm, out=": 11.5}
    what = "the same with C and of batches, us"
    words = f" ({by}, batch, out=), `torch.bmm, out=` took 11.5"
    assert said(goals, what, host_us=host) == ("12.1", False, words)
    assert said(goals, what, host_us={f"gemm: {by}, C is out": 12.0}).holds
    assert said(goals, what, host_us={}) is None


def test_the_committed_record_has_something_to_say_of_every_goal(goals: ModuleType) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [goal.what for goal in goals.GOALS if goal.read(record) is None] == []


def test_a_record_is_remembered_once_and_in_front(standing: ModuleType) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    first = standing.remembered([], record, "today")
    assert standing.remembered(first, record, "tomorrow") == first
    other = copy.deepcopy(record)
    other["rows"][0]["us"] *= 2
    second = standing.remembered(first, other, "tomorrow")
    assert [one["date"] for one in second] == ["tomorrow", "today"]
    page = standing.page(other, second, "some.json")
    assert "| today, 4" in page
    assert "../benchmarks/records/some.json" in page


def test_a_stale_record_says_so(standing: ModuleType) -> None:
    record = {**json.loads(RECORD.read_text(encoding="utf-8")), "stale": "no GPU could be had"}
    assert "**Stale:** no GPU could be had" in standing.page(record, standing.remembered([], record, "today"), "x")
    assert standing.badge(record).endswith(". **Stale:** no GPU could be had")
    assert "Stale" not in standing.badge({**record, "stale": None})


def test_rows_of_an_earlier_run_are_named(standing: ModuleType) -> None:
    assert standing.kept_rows({"rows": [row("int8", "1x2x3", 1.0)]}) == ""
    rows = [row("int8", "1x2x3", 1.0), *(row(op, "1x2x3", 1.0, source_hash="0") for op in ("fp8_block", "bmm", "bmm"))]
    said = "**Kept from an earlier run**: 3 of 4 rows, those of `bmm`, `fp8_block`."
    assert standing.kept_rows({"rows": rows}).strip() == said
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record["rows"] = [{**one, "source_hash": "0"} for one in record["rows"]]
    assert f"{len(record['rows'])} of {len(record['rows'])} rows" in standing.page(record, [], "x")


def test_a_readme_without_its_marks_is_refused(standing: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"README.md has 0 places between .*, expected one"):
        standing.with_table("no marks", "| a |")
    with pytest.raises(ValueError, match=r"README.md has 0 lines that begin with .*GPU record.*, expected one"):
        standing.with_line("no line", f"{standing.BADGE} new")
    assert (
        standing.with_line(f"a\n{standing.BADGE} old\nb\n", f"{standing.BADGE} new") == f"a\n{standing.BADGE} new\nb\n"
    )


def test_a_missing_record_is_named(standing: ModuleType, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(standing.main)
    result = CliRunner().invoke(app, ["--record", str(tmp_path / "none.json")])
    assert result.exit_code == 2
    assert "none.json" in result.output


def test_pages_are_of_the_committed_record(standing: ModuleType) -> None:
    made = standing.pages(RECORD, HISTORY, ROOT / "README.md", ROOT / standing.STANDING, "not this day")
    stale = [str(path) for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python benchmarks/standing.py"
