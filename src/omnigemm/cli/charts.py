"""Three small charts as inline SVG. Colours are CSS variables of the page, so they follow light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

WIDTH = 900
_LABELS = 300  # room for the rows' names
_RIGHT = 60
TIMES = "\N{MULTIPLICATION SIGN}"
_MINUS = "\N{MINUS SIGN}"
_FONT = 7.0  # about the width of a letter


class Row(NamedTuple):
    """A row of a chart: what it is, and a value for each series (None: nothing to draw)."""

    name: str
    detail: str
    values: Sequence[float | None]


def legend(names: Sequence[str], shapes: Sequence[str] | None = None, first: int = 0) -> str:
    """Swatches and names, as HTML above a chart; `first` is the first series' colour."""
    marks = shapes or ["square"] * len(names)
    items = [
        f'<span class="key"><i class="{shape} s{first + i}"></i>{escape(name)}</span>'
        for i, (name, shape) in enumerate(zip(names, marks, strict=True))
    ]
    return f'<p class="legend">{"".join(items)}</p>'


def speedup_bars(rows: Sequence[Row], series: Sequence[str], axis: str, first: int = 0) -> str:
    """Horizontal bars that leave 1x to the right when faster and to the left when slower, on a logarithmic axis."""
    values = [value for row in rows for value in row.values if value]
    # Room for the figure at a bar's end.
    low, high = math.log2(min([*values, 0.7])) - 0.5, math.log2(max([*values, 2.0])) + 0.1
    bar, gap = 11, 12
    height_of_row = bar * len(series) + gap
    bottom = 10 + height_of_row * len(rows)

    def x(value: float) -> float:
        return _LABELS + (math.log2(value) - low) / (high - low) * (WIDTH - _LABELS - _RIGHT)

    parts = []
    for power in range(math.ceil(low), math.floor(high) + 1):
        ratio = 2.0**power
        kind = "base" if power == 0 else "grid"
        parts.append(_line(x(ratio), 4, x(ratio), bottom, kind))
        parts.append(_text(x(ratio), bottom + 18, f"{ratio:g}{TIMES}", "tick", "middle"))
    for i, row in enumerate(rows):
        top = 10 + i * height_of_row
        parts.append(_row_label(row, top + bar * len(series) / 2 + 4))
        for j, value in enumerate(row.values):
            if not value:
                continue
            start, end = sorted((x(1.0), x(value)))
            tip = f"{row.name}, {row.detail}: {value:.2f}{TIMES} {series[j]}"
            place = f'x="{start:.1f}" y="{top + j * bar:.1f}" width="{max(1.0, end - start):.1f}" height="{bar - 1}"'
            parts.append(f'<rect class="s{first + j}" {place} rx="1.5"><title>{escape(tip)}</title></rect>')
            side = "start" if value >= 1 else "end"
            shift = 5 if value >= 1 else -5
            parts.append(_text(x(value) + shift, top + j * bar + 8.5, f"{value:.2f}{TIMES}", "value", side))
    parts.append(_text((_LABELS + WIDTH - _RIGHT) / 2, bottom + 40, axis, "axis", "middle"))
    return _svg(bottom + 50, axis, parts)


def error_dots(rows: Sequence[Row], series: Sequence[str], axis: str) -> str:
    """A line per row with a mark for each error, on a logarithmic axis. The last series is a limit, drawn as a tick."""
    values = [value for row in rows for value in row.values if value]
    low = math.floor(math.log10(min([*values, 1e-4])))
    high = math.ceil(math.log10(max([*values, 1e-1])))
    step = 26
    bottom = 10 + step * len(rows)

    def x(value: float) -> float:
        return _LABELS + (math.log10(value) - low) / (high - low) * (WIDTH - _LABELS - _RIGHT)

    parts = []
    for power in range(low, high + 1):
        parts.append(_line(x(10.0**power), 4, x(10.0**power), bottom, "grid"))
        parts.append(_power_of_ten(x(10.0**power), bottom + 18, power))
    for i, row in enumerate(rows):
        y = 10 + step * i + step / 2
        parts.append(_line(_LABELS, y, WIDTH - _RIGHT, y, "grid faint"))
        parts.append(_row_label(row, y + 4))
        for j, value in enumerate(row.values):
            if not value:
                continue
            tip = f"<title>{escape(f'{row.name}, {row.detail}: {series[j]} {value:.2e}')}</title>"
            at = x(value)
            if j == len(series) - 1:
                parts.append(f'<rect class="limit" x="{at - 1:.1f}" y="{y - 8:.1f}" width="2" height="16">{tip}</rect>')
            elif j == 0:
                parts.append(f'<circle class="s0" cx="{at:.1f}" cy="{y:.1f}" r="5">{tip}</circle>')
            else:
                diamond = f"M{at:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"
                parts.append(f'<path class="s{j}" d="{diamond}">{tip}</path>')
    parts.append(_text((_LABELS + WIDTH - _RIGHT) / 2, bottom + 40, axis, "axis", "middle"))
    return _svg(bottom + 50, axis, parts)


def latency_lines(across: Sequence[int], curves: Mapping[str, Sequence[float]], x_axis: str, y_axis: str) -> str:
    """Lines over a number of rows that doubles, microseconds on a logarithmic axis, each line named at its end."""
    left, right, top, bottom = 80, WIDTH - 120, 16, 336
    values = [value for curve in curves.values() for value in curve]
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = 0.06 * max(high - low, 0.1)
    low, high = low - margin, high + margin
    first, last = math.log2(across[0]), math.log2(across[-1])

    def x(count: int) -> float:
        return left + (math.log2(count) - first) / max(last - first, 1.0) * (right - left)

    def y(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - top)

    parts = []
    for value in _ticks(10**low, 10**high):
        parts.append(_line(left, y(value), right, y(value), "grid"))
        parts.append(_text(left - 10, y(value) + 4, f"{value:,.0f}" if value >= 1 else f"{value:g}", "tick", "end"))
    for count in across:
        parts.append(_line(x(count), top, x(count), bottom, "grid faint"))
        parts.append(_text(x(count), bottom + 20, str(count), "tick", "middle"))
    ends = _apart([y(curve[-1]) for curve in curves.values()], 16.0)
    for j, (name, curve) in enumerate(curves.items()):
        points = [(x(count), y(value)) for count, value in zip(across, curve, strict=True)]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        parts.append(f'<path class="l{j}" d="{path}"/>')
        for (px, py), count, value in zip(points, across, curve, strict=True):
            tip = escape(f"{name}, {count} rows: {value:,.0f} us")
            parts.append(f'<circle class="s{j}" cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{tip}</title></circle>')
        parts.append(_text(right + 12, ends[j] + 4, name, f"name t{j}", "start"))
    parts.append(_text((left + right) / 2, bottom + 44, x_axis, "axis", "middle"))
    middle = (top + bottom) / 2
    turned = f'transform="translate(20 {middle}) rotate(-90)"'
    parts.append(f'<text class="axis" text-anchor="middle" {turned}>{escape(y_axis)}</text>')
    return _svg(bottom + 54, f"{y_axis} against {x_axis}", parts)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [value for value in candidates if low <= value <= high]


def _apart(places: Sequence[float], distance: float) -> list[float]:
    """The places, moved down as little as needed so that no two labels touch; the order of the input is kept."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + distance)
    return moved


def _row_label(row: Row, y: float) -> str:
    """'operation  operands', right-aligned at the plot's edge; shortened in the middle column if too long."""
    detail = row.detail
    room = int((_LABELS - 16) / _FONT) - len(row.name)
    if len(detail) > room:
        detail = detail[: max(1, room - 1)].rstrip() + "…"
    return (
        f'<text x="{_LABELS - 12}" y="{y:.1f}" text-anchor="end"><tspan class="op">{escape(row.name)}</tspan>'
        f'<tspan class="detail" dx="6">{escape(detail)}</tspan></text>'
    )


def _power_of_ten(x: float, y: float, power: int) -> str:
    sign = _MINUS if power < 0 else ""
    exponent = f'<tspan dy="-5" font-size="9">{sign}{abs(power)}</tspan>'
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">10{exponent}</text>'


def _text(x: float, y: float, words: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">\n'
        f"{inside}\n</svg></div>"
    )
