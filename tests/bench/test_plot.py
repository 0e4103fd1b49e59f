"""The figures of GPU records: what they show, what is refused, and that docs/figures is current."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
PLOT = runpy.run_path(str(ROOT / "benchmarks" / "plot.py"))
SVG = "{http://www.w3.org/2000/svg}"


def row(op: str, shape: str, us: float, **peers: float) -> dict[str, Any]:
    return {"op": op, "shape": shape, "us": us, "floor_us": 2.0, "peers": peers, "config": {"kernel": "k"}}


def small_record() -> dict[str, Any]:
    return {
        "source_hash": "0",
        "gpu": "NVIDIA <Test> & Co",
        "cpu": "some",
        "driver": "1.2",
        "versions": {"torch": "9.8.7"},
        "threads": 1,
        "method": "timed by hand, with care; once",
        "tests": {"passed": 1, "failed": 0, "skipped": 0},
        "stale": None,
        "rows": [
            row("fp8_block", "16x576x7168", 4.0, first=30.0, second=30.1),
            row("fp8_block", "1x576x7168", 3.5),
            row("fp8_block", "4096x512x256", 1.5, second=5.0),
            row("fp8_token", "8x64x128", 123.456, third=300.0),
        ],
    }


def run(*args: str) -> Any:
    app = typer.Typer()
    app.command()(PLOT["main"])
    return CliRunner().invoke(app, list(args))


def plot(folder: Path, record: Any, *args: str) -> Any:
    path = folder / "some-gpu.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return run("--record", str(path), "--out", str(folder / "figures"), *args)


def texts(path: Path, tag: str = "text") -> list[str]:
    return [one.text or "" for one in ElementTree.parse(path).getroot().iter(SVG + tag)]


def test_figures_show_every_shape_and_peer(tmp_path: Path) -> None:
    result = plot(tmp_path, small_record())
    assert result.exit_code == 0, result.output
    block, token = (tmp_path / "figures" / f"some-gpu-{op}.svg" for op in ("fp8_block", "fp8_token"))
    assert sorted((tmp_path / "figures").iterdir()) == [block, token]

    words = texts(block)
    assert words[:2] == ["fp8_gemm, block scales 1×128 × 128×128 on NVIDIA <Test> & Co", "torch 9.8.7, driver 1.2"]  # noqa: RUF001
    assert {"Timed by hand.", "With care; once.", "M ≤ 128", "M ≥ 4096"} <= set(words)
    assert {"omnigemm", "first", "second"} <= set(words)
    assert "third" not in words
    # One label for each N x K, and M ascending with our time.
    at = words.index("576 × 7168")  # noqa: RUF001
    assert words[at + 1 : at + 5] == ["1", "3.50", "16", "4.00"]
    at = words.index("512 × 256")  # noqa: RUF001
    assert words[at + 1 : at + 3] == ["4096", "1.50"]
    tips = texts(block, "title")
    assert "16x576x7168, first: 30.00 us, 15.00 times the floor of 2.00 us" in tips
    assert [tip.split(",")[0] for tip in tips if "omnigemm" in tip] == ["1x576x7168", "16x576x7168", "4096x512x256"]
    assert sum("mark is missing" in one for one in words) == 1

    words = texts(token)
    assert {"64 × 128", "8", "123.46", "third", "M ≤ 128"} <= set(words)  # noqa: RUF001
    assert not any("mark is missing" in one or one.startswith("M ≥") for one in words)


def test_bars_and_marks_are_in_proportion(tmp_path: Path) -> None:
    assert plot(tmp_path, small_record()).exit_code == 0
    root = ElementTree.parse(tmp_path / "figures" / "some-gpu-fp8_block.svg").getroot()
    bars = [one for one in root.iter(SVG + "rect") if one.get("class") == "ours" and len(one)]
    one, sixteen, below = ((float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in bars)
    floors = [float(line.attrib["x1"]) for line in root.iter(SVG + "line") if line.get("class") == "floor"][1:]
    assert one[0] == sixteen[0] == floors[0]
    assert one[1] < sixteen[1]
    assert sum(below) == pytest.approx(floors[1], abs=0.2)  # faster than its floor: the bar ends there
    marks = [path.attrib["d"] for path in root.iter(SVG + "path") if len(path)]
    first, second = (tuple(map(float, d[1:].split("m")[0].split())) for d in marks[:2])
    assert second[0] > first[0] > sum(sixteen)
    assert abs(first[1] - second[1]) == pytest.approx(8.0)  # they would hide each other


def test_chosen_operation_and_stale_record(tmp_path: Path) -> None:
    result = plot(tmp_path, {**small_record(), "stale": "kernels changed"}, "--op", "fp8_token")
    assert result.exit_code == 0
    (path,) = (tmp_path / "figures").iterdir()
    assert path.name == "some-gpu-fp8_token.svg"
    assert "Stale: kernels changed" in texts(path)


def test_operations_whose_times_are_of_older_kernels_say_so(tmp_path: Path) -> None:
    record = small_record()
    record["rows"][3]["source_hash"] = "of long ago"
    assert plot(tmp_path, record).exit_code == 0
    figures = tmp_path / "figures"
    assert "Stale: times of older kernels" in texts(figures / "some-gpu-fp8_token.svg")
    assert not any("Stale" in one for one in texts(figures / "some-gpu-fp8_block.svg"))


def test_groups_have_their_number(tmp_path: Path) -> None:
    record = small_record()
    record["rows"] += [row("grouped_masked_fp8_block", "G32x20x64x128", 3.0, first=4.0), row("other", "1x2x3", 2.5)]
    record["rows"].append({**row("eager (lists)", "G2x1x2x3", 1.0), "floor_us": None})  # no floor: not drawn
    assert plot(tmp_path, record).exit_code == 0
    path = tmp_path / "figures" / "some-gpu-grouped_masked_fp8_block.svg"
    assert {"groups × M", "32 × 20", "3.00"} <= set(texts(path))  # noqa: RUF001
    assert "G32x20x64x128, first: 4.00 us, 2.00 times the floor of 2.00 us" in texts(path, "title")
    assert len(list((tmp_path / "figures").iterdir())) == 4


def without(name: str) -> dict[str, Any]:
    record = small_record()
    for holder in (record, record["rows"][1]):
        holder.pop(name, None)
    return record


def with_row(**words: Any) -> dict[str, Any]:
    record = small_record()
    record["rows"][1].update(words)
    return record


@pytest.mark.parametrize(
    ("record", "args", "message"),
    [
        (small_record(), ["--op", "fp8_tensor"], "no rows of fp8_tensor; it has fp8_block, fp8_token"),
        ({**small_record(), "rows": []}, [], "no rows of any operation; it has none"),
        (without("method"), [], "the record lacks method"),
        (without("floor_us"), [], "the record lacks rows.floor_us"),
        ({**small_record(), "gpu": None}, [], "gpu is None"),
        ({**small_record(), "versions": {}}, [], "versions.torch is None"),
        (with_row(floor_us=None), [], "fp8_block 1x576x7168: floor_us is None, expected microseconds above 0"),
        (with_row(us=0), [], "fp8_block 1x576x7168: us is 0, expected microseconds above 0"),
        (with_row(peers={"torch": "fast"}), [], "fp8_block 1x576x7168: torch is 'fast', expected microseconds"),
        (with_row(peers=None), [], "peers is None, expected names"),
        (with_row(shape="1x2"), [], "shape is '1x2', expected MxNxK"),
        (with_row(op="../up"), [], "op is '../up'"),
        ([1], [], "not a record"),
        ("{", [], "not a record"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_are_one_line(tmp_path: Path, record: Any, args: list[str], message: str) -> None:
    result = plot(tmp_path, record, *args)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"benchmarks/plot.py: {tmp_path / 'some-gpu.json'}: ")
    assert message in line
    assert not (tmp_path / "figures").exists()


def test_missing_file(tmp_path: Path) -> None:
    result = plot(tmp_path, small_record(), "--record", str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "none.json" in result.output


def test_figures_are_of_the_committed_records(tmp_path: Path) -> None:
    for path in (ROOT / "benchmarks" / "records").glob("*.json"):
        if json.loads(path.read_text(encoding="utf-8"))["gpu"]:
            result = run("--record", str(path), "--out", str(tmp_path))
            assert result.exit_code == 0, result.output
    wanted, shown = (
        {path.name: path.read_bytes() for path in folder.glob("*.svg")} for folder in (tmp_path, ROOT / "docs/figures")
    )
    assert sorted(shown) == sorted(wanted)
    stale = [name for name in wanted if shown[name] != wanted[name]]
    assert not stale, "run: python benchmarks/plot.py"
