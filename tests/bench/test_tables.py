"""Tables of a record in the pages of docs/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "records" / "nvidia-h200.json"


@pytest.fixture(scope="module")
def tables(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("tables")


def row(op: str, shape: str, us: float, floor: float = 10.0, **more: Any) -> dict[str, Any]:
    return {"op": op, "shape": shape, "us": us, "floor_us": floor, "peers": {}, "config": {}, **more}


def test_a_star_is_a_missed_goal(tables: ModuleType) -> None:
    at_the_bar, above = (row("int8", "1x64x64", us, us_any_weights=15.04) for us in (13.8, 13.81))
    assert tables.constant_or_not(at_the_bar) == "13.8 (15.0)"
    assert tables.constant_or_not(above) == "13.8 * (15.0)"
    assert tables.constant_or_not(row("int8", "4096x64x64", 123.4)) == "123"


def test_weights_that_were_not_measured_with_all_rows_are_left_out(tables: ModuleType) -> None:
    rows = [row("int8", shape, 5.0) for shape in ("1x64x32", "16x64x32", "1x8x8", "4096x8x8")]
    made = tables.by_weight({"rows": rows}, "int8", "N x K", (1, 16), tables.constant_or_not, (1,))
    assert made.splitlines() == [
        "| N x K | M = 1 | 16 | floor at 1 |",
        "| --- | --- | --- | --- |",
        "| 64 x 32 | 5.0 | 5.0 | 10.0 |",
    ]


def test_pairs_are_of_many_rows_and_of_that_peer(tables: ModuleType) -> None:
    rows = [
        row("fp8_block", "4096x64x32", 1.0, pairs={"DeepGEMM 1": [100.0, 110.0], "Humming": [1.0, 2.0]}),
        row("fp8_block", "128x64x32", 1.0, pairs={"DeepGEMM 1": [1.0, 2.0]}),
        row("fp8_block", "8192x64x32", 1.0, pairs={"Humming": [1.0, 2.0]}),
    ]
    made = tables.many_rows_in_pairs({"rows": rows}, "fp8_block", "DeepGEMM")
    assert made.splitlines()[2:] == ["| 4096 x 64 x 32 | 100 | 110 | 1.10x |"]


def test_groups_have_a_column_for_each_weight(tables: ModuleType) -> None:
    shapes = ("G6x20x64x32", "G6x20x8x16", "G9x1x8x16")
    rows = [row("grouped", shape, 1.0, pairs={"DeepGEMM": [float(i), 9.0]}) for i, shape in enumerate(shapes)]
    made = tables.groups_in_pairs({"rows": rows}, "grouped", "DeepGEMM", lambda _: True)
    assert made.splitlines() == [
        "| rows x groups | 64 x 32 | 8 x 16 |",
        "| --- | --- | --- |",
        "| 20 x 6 | 0.0 / 9.0 | 1.0 / 9.0 |",
        "| 1 x 9 |  | 2.0 / 9.0 |",
    ]


def test_pages_get_their_tables_between_the_marks(tables: ModuleType) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, make in tables.TABLES.items():
        text = f"before\n<!-- record: {name} -->\nold\n<!-- up to here -->\nafter\n"
        made = tables.with_tables(text, record)
        assert made == f"before\n<!-- record: {name} -->\n\n{make(record)}\n\n<!-- up to here -->\nafter\n"
        assert tables.with_tables(made, record) == made
        assert len(make(record).splitlines()) > 3
    with pytest.raises(ValueError, match="asks for the table 'no such', expected one of fp8 block, "):
        tables.with_tables("<!-- record: no such -->\n<!-- up to here -->", record)


def test_a_record_of_some_parts_has_shorter_tables(tables: ModuleType) -> None:
    for make in tables.TABLES.values():
        assert make({"rows": [], "host_us": {}}).startswith("| ")


def test_every_table_is_on_a_page(tables: ModuleType) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    shown = [found["name"] for page in pages for found in tables.MARK.finditer(page)]
    assert sorted(shown) == sorted(tables.TABLES)
