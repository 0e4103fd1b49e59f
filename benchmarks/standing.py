"""Every goal beside what a GPU record says of it: docs/standing.md, the README's table and line on the record, and the
record's tables in other pages (tables.py).

    python benchmarks/standing.py

Run it after benchmarks/gpu.py: what the record says is also kept in benchmarks/history, so that the page shows how
records before it stood. tests/bench/test_standing.py fails if the pages no longer show the record.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from goals import FEW, GOALS, TORCH_FP8, Record, few, many, mean, ratios, rows_of
from tables import DASH, MARK, table, with_tables

ROOT = Path(__file__).resolve().parents[1]
EARLIER = 4  # records beside the one of today
BEGIN, END = "<!-- benchmarks/standing.py writes this -->", "<!-- up to here -->"
BADGE = "**GPU record:**"
STANDING = "docs/standing.md"
PAGE = """# Where it stands

`benchmarks/standing.py` writes this page from the [record](../benchmarks/records/{name}) of an {gpu}: {tests} GPU tests
passed, driver {driver}, torch {torch}. How it was measured is in the record (`method`), why things are as they are in
the diaries: [fp8](kernels/sm90_fp8.md), [int8 and 16 bits](kernels/sm90_straight.md),
[groups](kernels/sm90_groups.md), [lists](kernels/sm90_lists.md).

{stale}{kept}## Goals

Speed over a peer is its time over ours, both measured in that run, in turns; means are geometric. The last columns are
earlier records, newest first, with a star where a goal was missed. Kernels, peers and the order of turns were not the
same in all of them; a dash: not measured.

{goals}

## Over the floor

Time over what memory (4.6 TB/s) and tensor cores (790 TFLOP/s in 16 bits, 1580 in 8) allow, geometric mean.

{floors}
"""

# The README's table: what over whom, operation, peers, with few rows and with many.
README: tuple[tuple[str, str, Sequence[str]], ...] = (
    ("`fp8_gemm`, block scales, over DeepGEMM *", "fp8_block", ["DeepGEMM"]),
    ("the same over torch's block-scaled product", "fp8_block", ["torch"]),
    ("per token, over the faster of torch's two products", "fp8_token", TORCH_FP8),
    ("per tensor, over the faster of torch's two products", "fp8_tensor", TORCH_FP8),
    ("`int8_gemm` over the fastest of twelve configs of CUTLASS", "int8", ["CUTLASS"]),
    ("the same over `torch._int_mm` (no scales, more than 16 rows)", "int8", ["torch._int_mm"]),
    ("`gemm` in bf16 over `torch.mm` (cuBLAS)", "gemm_bf16", ["torch.mm"]),
    ("`grouped_gemm_masked`, fp8 block scales, over DeepGEMM *", "grouped_masked_fp8_block", ["DeepGEMM"]),
    (
        "`grouped_gemm_contiguous`, fp8 block scales, over DeepGEMM with its padding *",
        "grouped_contiguous_fp8_block",
        ["DeepGEMM"],
    ),
    ("the same, per token, over torch's grouped product", "grouped_contiguous_fp8_token", ["torch"]),
    ("the same in bf16, over torch's grouped product", "grouped_contiguous_bf16", ["torch"]),
    ("`grouped_gemm_k_contiguous`, bf16, over torch's grouped product", "grouped_k_bf16", ["torch grouped_mm"]),
)


def readings(record: Record) -> dict[str, str]:
    """The numbers by the goals' names, with a star where a goal is missed."""
    found = {goal.what: goal.read(record) for goal in GOALS}
    return {what: one.numbers + ("" if one.holds else " *") for what, one in found.items() if one is not None}


def digest(record: Record) -> str:
    """Tells records apart."""
    parts = {name: record[name] for name in ("source_hash", "rows", "tests")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def remembered(history: Sequence[Mapping[str, Any]], record: Record, today: str) -> list[dict[str, Any]]:
    """The history, newest first, with this record at its head."""
    name = digest(record)
    date = next((one["date"] for one in history if one["record"] == name), today)
    tests = (record["tests"] or {}).get("passed")
    made = {"record": name, "date": date, "tests": tests, "readings": readings(record)}
    return [made, *(dict(one) for one in history if one["record"] != name)]


def goal_lines(record: Record, earlier: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for goal in GOALS:
        one = goal.read(record)
        now = ["not measured", DASH] if one is None else [one.numbers + one.detail, "yes" if one.holds else "**no**"]
        yield [goal.what, goal.bar, *now, *(entry["readings"].get(goal.what, DASH) for entry in earlier)]


def floor_lines(record: Record) -> Iterator[list[str]]:
    for op in dict.fromkeys(row["op"] for row in record["rows"] if row["floor_us"]):
        parts = [[row["us"] / row["floor_us"] for row in rows_of(record, [op], keeps)] for keeps in (few, many)]
        if any(parts):
            yield [op, *(f"{mean(part):.2f}" if part else DASH for part in parts)]


def kept_rows(record: Record) -> str:
    """Which rows are of another run (gpu.py --keep), in words."""
    kept = [row for row in record["rows"] if "source_hash" in row]
    if not kept:
        return ""
    ops = ", ".join(f"`{op}`" for op in sorted({row["op"] for row in kept}))
    return f"**Kept from an earlier run**: {len(kept)} of {len(record['rows'])} rows, those of {ops}.\n\n"


def page(record: Record, history: Sequence[Mapping[str, Any]], name: str) -> str:
    earlier = history[1 : 1 + EARLIER]
    dates = (f"{one['date']}, {one['tests']} tests" for one in earlier)
    return PAGE.format(
        name=name,
        gpu=record["gpu"],
        tests=record["tests"]["passed"],
        driver=record["driver"],
        torch=record["versions"]["torch"],
        stale=f"**Stale:** {record['stale']}\n\n" if record["stale"] else "",
        kept=kept_rows(record),
        goals=table(["what", "goal", "here", "holds", *dates], goal_lines(record, earlier)),
        floors=table(["operation", f"up to {FEW} rows", "more"], floor_lines(record)),
    )


def readme_table(record: Record) -> str:
    lines = []
    for what, op, peers in README:
        parts = [ratios(record, [op], keeps, peers) for keeps in (few, many)]
        lines.append([what, *(f"{mean(part.values()):.2f}x" if part else DASH for part in parts)])
    return table(["geometric mean over", f"up to {FEW} rows (of a group)", "many rows"], lines)


def badge(record: Record) -> str:
    """Whether a GPU vouches for this tree, in one line."""
    stale = "" if record["stale"] is None else f" **Stale:** {record['stale']}"
    return f"{BADGE} {record['tests']['passed']} tests passed on an {record['gpu']}.{stale}"


def with_line(text: str, line: str) -> str:
    """The README with this line on the record."""
    return _replaced(text, f"^{re.escape(BADGE)} .*?$", line, f"lines that begin with {BADGE!r}")


def with_table(text: str, made: str) -> str:
    """The README with this table between its marks."""
    between = f"{re.escape(BEGIN)}\n.*?{re.escape(END)}"
    return _replaced(text, between, f"{BEGIN}\n\n{made}\n\n{END}", f"places between {BEGIN!r} and {END!r}")


def _replaced(text: str, pattern: str, by: str, what: str) -> str:
    made, count = re.subn(pattern, lambda _: by, text, flags=re.S | re.M)
    if count != 1:
        raise ValueError(f"README.md has {count} {what}, expected one")
    return made


def with_marks(docs: Path) -> list[Path]:
    """The pages that have tables of the record."""
    return [page for page in sorted(docs.rglob("*.md")) if MARK.search(page.read_text(encoding="utf-8"))]


def pages(path: Path, history: Path, readme: Path, standing: Path, today: str) -> dict[Path, str]:
    """What the history, docs/standing.md, the README and pages with tables should say of a record."""
    from omnigemm.bench.record import read

    record = read(path)
    known = json.loads(history.read_text(encoding="utf-8")) if history.exists() else []
    kept = remembered(known, record, today)
    tables = {one: with_tables(one.read_text(encoding="utf-8"), record) for one in with_marks(standing.parent)}
    return {
        history: json.dumps(kept, indent=1, ensure_ascii=False) + "\n",
        standing: page(record, kept, path.name),
        readme: with_line(with_table(readme.read_text(encoding="utf-8"), readme_table(record)), badge(record)),
        **tables,
    }


def main(
    record: Annotated[Path, typer.Option(help="Record of a GPU.")] = ROOT
    / "benchmarks"
    / "records"
    / "nvidia-h200.json",
) -> None:
    """Write docs/standing.md and the tables of other pages, and remember the record's figures."""
    history, readme, standing = (ROOT / name for name in (f"benchmarks/history/{record.name}", "README.md", STANDING))
    try:
        made = pages(record, history, readme, standing, datetime.datetime.now(datetime.timezone.utc).date().isoformat())
        history.parent.mkdir(exist_ok=True)
        for file, text in made.items():
            file.write_text(text, encoding="utf-8", newline="\n")
            print(file)
    except (OSError, ValueError) as error:
        typer.echo(f"benchmarks/standing.py: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
