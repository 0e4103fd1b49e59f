"""Draw a GPU record as figures: docs/figures/<record>-<op>.svg, one for each operation.

    python benchmarks/plot.py
    python benchmarks/plot.py --record benchmarks/records/nvidia-h200.json --op fp8_block --out /tmp/figures

A bar is our time as a multiple of the floor, a mark is a peer's. tests/bench/test_plot.py fails if docs/figures no
longer shows the records: run this after benchmarks/gpu.py.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parents[1]
TIMES = "\N{MULTIPLICATION SIGN}"
US = "\N{MICRO SIGN}s"
TITLES = {
    "fp8_block": f"fp8_gemm, block scales 1{TIMES}128 {TIMES} 128{TIMES}128",
    "fp8_token": "fp8_gemm, scales per token",
    "fp8_tensor": "fp8_gemm, scales per tensor",
    "int8": "int8_gemm, scales per token",
    "gemm_bf16": "gemm, bf16",
    "gemm_fp16": "gemm, fp16",
    "grouped_contiguous_bf16": "grouped_gemm_contiguous, bf16",
    "grouped_contiguous_fp8_block": "grouped_gemm_contiguous, fp8 with block scales",
    "grouped_contiguous_fp8_token": "grouped_gemm_contiguous, fp8 with scales per token",
    "grouped_masked_fp8_block": "grouped_gemm_masked, fp8 with block scales",
    "grouped_k_bf16": "grouped_gemm_k_contiguous, bf16 to bf16",
    "grouped_k_bf16_add": "grouped_gemm_k_contiguous, bf16, added to fp32",
    "grouped_k_fp8_add": "grouped_gemm_k_contiguous, fp8, added to fp32",
}
NOT_DRAWN = ("grouped_list_bf16", "bmm_bf16")  # many shapes in one product, and batches: no axes for these
# What a peer whose name has this word does differently.
NOTES = {
    "fp8_token": ("tensorwise", "torch scaled_mm tensorwise applies one scale for each operand, not one for each row."),
    "fp8_tensor": ("rowwise", "torch scaled_mm rowwise applies a scale for each row, not one for each operand."),
    "grouped_k_bf16_add": ("torch", "torch's products give bf16 and add nothing: a quarter of the results' bytes."),
}
FEW_ROWS = 128  # the upper panel's largest M

WIDTH, PAD = 1000, 28
COLUMN_NK, COLUMN_M, COLUMN_US = 122, 190, 262  # right edges of the columns of words
LEFT, RIGHT = 280, WIDTH - PAD - 8  # of the plot
ROW, BAR = 20, 12
COLOURS = ("#d55e00", "#333333", "#009e73", "#aa3377")  # of peers: apart for all kinds of colour vision
STYLE = """
text { font: 13px Helvetica, Arial, "Liberation Sans", sans-serif; fill: #1f2933; }
.card { fill: #ffffff; stroke: #d5dae0; }
.title { font-size: 19px; font-weight: 700; }
.head { font-weight: 700; font-size: 15px; }
.strong { font-weight: 700; }
.small { font-size: 12px; fill: #52606d; }
.warn { font-weight: 700; fill: #b42318; }
.band { fill: #f3f5f8; }
.grid { stroke: #d5dae0; stroke-width: 1; }
.floor { stroke: #1f2933; stroke-width: 2; }
.ours { fill: #4a90d9; }
.mark { stroke: #ffffff; stroke-width: 1.2; }
"""


class Point(NamedTuple):
    """A row of the record. With groups, M is the mean of their rows."""

    groups: int
    m: int
    n: int
    k: int
    us: float
    floor: float
    peers: Mapping[str, float]

    @property
    def label(self) -> str:
        return f"{self.groups} {TIMES} {self.m}" if self.groups else str(self.m)

    @property
    def shape(self) -> str:
        return (f"G{self.groups}x" if self.groups else "") + f"{self.m}x{self.n}x{self.k}"

    @property
    def ratios(self) -> list[float]:
        return [us / self.floor for us in (self.us, *self.peers.values())]


class Scale:
    """A logarithmic axis from the floor, or from what is below it, to the tick above the largest ratio."""

    def __init__(self, ratios: Sequence[float]) -> None:
        low, high = min(1.0, *ratios), max(1.2, *ratios)
        if high / low <= 3:
            ticks = [step / 5 for step in range(1, 17)]
        elif high / low <= 64:
            ticks = sorted(2.0**power * step for power in range(-7, 8) for step in (1.0, 1.5))
        else:
            stride = math.ceil(math.log2(high / low) / 10)
            start = math.floor(math.log2(low) / stride)
            ticks = [2.0 ** (stride * i) for i in range(start, start + 13)]
        first = max((tick for tick in ticks if tick <= low), default=low)
        last = min((tick for tick in ticks if tick >= high), default=high)
        self.ticks = [tick for tick in ticks if first <= tick <= last]
        self._low, self._high = math.log(first), math.log(last)

    def x(self, ratio: float) -> float:
        return LEFT + (math.log(ratio) - self._low) / (self._high - self._low) * (RIGHT - LEFT)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, inside: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}>{inside}</rect>'


def mark(x: float, y: float, index: int, tip: str = "") -> str:
    """Peers differ in colour and in shape."""
    shapes = (
        "m0 -6.5l6.5 6.5l-6.5 6.5l-6.5 -6.5z",
        "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
        "m0 -6l6 11h-12z",
        "m-4.5 -4.5h9v9h-9z",
    )
    shape = shapes[(index + index // len(COLOURS)) % len(shapes)]
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<path class="mark" fill="{COLOURS[index % len(COLOURS)]}" d="M{x:.1f} {y:.1f}{shape}">{inside}</path>'


def paragraph(y: float, words: str, kind: str) -> tuple[float, list[str]]:
    """Wrapped lines from y on, and where the next may start."""
    lines = textwrap.wrap(words, 140)
    return y + 17 * len(lines), [text(PAD, y + 17 * i, one, kind) for i, one in enumerate(lines)]


def legend(y: float, peers: Mapping[str, int]) -> tuple[float, list[str]]:
    parts, x = [], float(PAD)
    for name, index in (("omnigemm", -2), ("floor", -1), *peers.items()):
        width = 26 + 7.2 * len(name)
        if x + width > WIDTH - PAD and x > PAD:
            x, y = PAD, y + 22
        if index == -2:
            parts.append(rect(x, y - 10, 18, BAR, "ours"))
        elif index == -1:
            parts.append(line(x + 9, y - 12, y + 3, "floor"))
        else:
            parts.append(mark(x + 9, y - 4, index))
        parts.append(text(x + 26, y, name))
        x += width + 18
    return y + 22, parts


def letters(op: str) -> tuple[str, str]:
    """What a shape's rows and its other two sizes are called: groups along K have rows of K."""
    return ("rows", f"M {TIMES} N") if op.startswith("grouped_k_") else ("M", f"N {TIMES} K")


def panel(y: float, op: str, sign: str, points: Sequence[Point], peers: Mapping[str, int]) -> tuple[float, list[str]]:
    """Rows in groups of one N x K, over an axis of their own."""
    scale = Scale([ratio for point in points for ratio in point.ratios])
    top = y + 44
    bottom = top + ROW * len(points)
    rows, sides = letters(op)
    words = [text(PAD, y + 12, f"{rows} {sign}", "head")]
    if points[0].groups:
        rows = f"groups {TIMES} {rows}"
    columns = ((COLUMN_NK, sides), (COLUMN_M, rows), (COLUMN_US, f"ours, {US}"))
    words += [text(x, top - 10, name, "small", "end") for x, name in columns]
    words.append(text(scale.x(1.0) - 2, top - 10, "floor", "small"))
    bands, bars, marks = [], [], []
    at = top
    for i, ((n, k), group) in enumerate(groupby(points, key=lambda point: (point.n, point.k))):
        members = list(group)
        if i % 2 == 0:
            bands.append(rect(PAD, at, WIDTH - 2 * PAD, ROW * len(members), "band"))
        words.append(text(COLUMN_NK, at + 14.5, f"{n} {TIMES} {k}", "strong", "end"))
        for point in members:
            middle = at + ROW / 2
            words.append(text(COLUMN_M, at + 14.5, point.label, "", "end"))
            words.append(text(COLUMN_US, at + 14.5, f"{point.us:.2f}", "", "end"))
            start, end = sorted((scale.x(1.0), scale.x(point.us / point.floor)))
            tip = f"<title>{escape(_tip(point.shape, 'omnigemm', point.us, point.floor))}</title>"
            bars.append(rect(start, middle - BAR / 2, max(1.0, end - start), BAR, "ours", tip))
            places = {name: scale.x(us / point.floor) for name, us in point.peers.items()}
            for name, x in places.items():
                # Marks that would hide each other move apart, up and down.
                near = sorted(peers[other] for other, place in places.items() if abs(place - x) < 9)
                shift = 8.0 * (near.index(peers[name]) - (len(near) - 1) / 2)
                tip = _tip(point.shape, name, point.peers[name], point.floor)
                marks.append(mark(x, middle + shift, peers[name], tip))
            at += ROW
    axis = [line(scale.x(tick), top, bottom, "grid") for tick in scale.ticks]
    axis.append(line(scale.x(1.0), top - 4, bottom, "floor"))
    words += [text(scale.x(tick), bottom + 17, f"{tick:g}{TIMES}", "small", "middle") for tick in scale.ticks]
    what = "time over the floor, logarithmic axis; shorter is better"
    words.append(text((LEFT + RIGHT) / 2, bottom + 36, what, "small", "middle"))
    return bottom + 62, [*bands, *axis[:-1], *bars, axis[-1], *marks, *words]


def _tip(shape: str, name: str, us: float, floor: float) -> str:
    return f"{shape}, {name}: {us:.2f} us, {us / floor:.2f} times the floor of {floor:.2f} us"


def _of_older_kernels(record: Mapping[str, Any], op: str) -> str | None:
    """What to say of rows that a record took over from the one before."""
    own = record["source_hash"]
    old = any(row.get("source_hash", own) != own for row in record["rows"] if row["op"] == op)
    return "times of older kernels" if old else None


def figure(record: Mapping[str, Any], op: str, points: Sequence[Point], peers: Mapping[str, int]) -> str:
    """A standalone SVG. `peers` are those of the whole record, so that each looks the same in every figure."""
    here = {name: index for name, index in peers.items() if any(name in point.peers for point in points)}
    title = f"{TITLES.get(op, op)} on {record['gpu']}"
    first, _, rest = record["method"].partition(", ")
    parts = [text(PAD, 42, title, "title")]
    y = 66.0

    def add(made: tuple[float, list[str]]) -> None:
        nonlocal y
        y = made[0]
        parts.extend(made[1])

    driver = f", driver {record['driver']}" if record["driver"] else ""
    add(paragraph(y, f"torch {record['versions']['torch']}{driver}", ""))
    add(paragraph(y + 2, _sentence(first), "small"))
    stale = record["stale"] or _of_older_kernels(record, op)
    if stale:
        add(paragraph(y + 2, f"Stale: {stale}", "warn"))
    add(legend(y + 14, here))
    few = [point for point in points if point.m <= FEW_ROWS]
    many = [point for point in points if point.m > FEW_ROWS]
    if few:
        add(panel(y + 6, op, f"\N{LESS-THAN OR EQUAL TO} {FEW_ROWS}", few, here))
    if many:
        least = min(point.m for point in many)
        add(panel(y + 6, op, f"\N{GREATER-THAN OR EQUAL TO} {least}", many, here))
    notes = [
        "Floor: computed from the GPU's memory and tensor-core rates for each shape (benchmarks/gpu.py), not measured."
    ]
    if few and many:
        notes.append("The two panels have different axes.")
    if any(name not in point.peers for point in points for name in here):
        notes.append("A mark is missing where that peer was not there or does not take the shape.")
    word, note = NOTES.get(op, ("", ""))
    if word and any(word in name for name in here):
        notes.append(note)
    if rest:
        notes.append(_sentence(rest))
    for note in notes:
        add(paragraph(y, note, "small"))
    height = y + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">'
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>'
    about = f"<title>{escape(title)}</title>\n<desc>{escape(record['method'])}</desc>"
    return "\n".join([head, about, f"<style>{STYLE}</style>", card, *parts, "</svg>"]) + "\n"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def point_of(row: Mapping[str, Any]) -> Point:
    """A row, checked; ValueError says what is wrong with it."""
    from omnigemm.bench.workloads import Size

    where = f"{row['op']} {row['shape']}"
    size = Size.parse(str(row["shape"]))
    if not isinstance(row["peers"], dict):
        raise ValueError(f"{where}: peers is {row['peers']!r}, expected names with microseconds")
    for name, us in (("us", row["us"]), ("floor_us", row["floor_us"]), *row["peers"].items()):
        if not isinstance(us, (int, float)) or not 0 < us < math.inf:
            raise ValueError(f"{where}: {name} is {us!r}, expected microseconds above 0")
    return Point(size.groups, size.m, size.n, size.k, row["us"], row["floor_us"], row["peers"])


def figures(path: Path, ops: Sequence[str] | None = None) -> dict[str, str]:
    """File names and figures of a record: the given operations, or all that it has."""
    from omnigemm.bench.record import read

    try:
        record = read(path)
        # Without a floor there is nothing to draw a bar over.
        rows = [row for row in record["rows"] if row["op"] in TITLES or row.get("floor_us") is not None]
        rows = [row for row in rows if (row.get("config") or {}).get("backend") != "quant"]  # no products
        rows = [row for row in rows if row["op"] not in NOT_DRAWN]
        found = list(dict.fromkeys(str(row["op"]) for row in rows))
        words = {"gpu": record["gpu"], "versions.torch": record["versions"].get("torch"), "method": record["method"]}
    except (AttributeError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a record: {error}") from None
    for name, value in words.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{path}: {name} is {value!r}, expected words as in a record of benchmarks/gpu.py")
    missing = [op for op in ops or () if op not in found]
    if missing or not found:
        raise ValueError(
            f"{path}: no rows of {', '.join(missing) or 'any operation'}; it has {', '.join(found) or 'none'}"
        )
    peers: dict[str, int] = {}
    points: dict[str, list[Point]] = {op: [] for op in found}
    for row in rows:
        op = str(row["op"])
        if not re.fullmatch(r"\w+", op):
            raise ValueError(f"{path}: op is {op!r}, expected letters, digits and underscores")
        try:
            points[op].append(point_of(row))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        for name in points[op][-1].peers:
            peers.setdefault(name, len(peers))
    return {
        f"{path.stem}-{op}.svg": figure(record, op, sorted(points[op], key=lambda p: (p.n, p.k, p.groups, p.m)), peers)
        for op in ops or found
    }


def main(
    record: Annotated[Path, typer.Option(help="Record of a GPU.")] = ROOT
    / "benchmarks"
    / "records"
    / "nvidia-h200.json",
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = ROOT / "docs" / "figures",
    op: Annotated[list[str] | None, typer.Option(help="Operation; repeat for several. Default: all.")] = None,
) -> None:
    """Draw a record of a GPU: one SVG for each operation."""
    try:
        made = figures(record, op)
        out.mkdir(parents=True, exist_ok=True)
        for name, svg in made.items():
            (out / name).write_text(svg, encoding="utf-8", newline="\n")
            print(out / name)
    except (OSError, ValueError) as error:
        typer.echo(f"benchmarks/plot.py: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
