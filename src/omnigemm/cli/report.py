"""The demo's figures as one HTML page: no script, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..bench.compare import geometric_mean
from . import charts

_PEER_COLOUR = 2  # torch has the same colours in the bars as in the lines, where two curves of ours come first


def speedup(result: Mapping[str, Any], peer: str) -> float | None:
    """The peer's time over ours."""
    theirs, ours = result["peers"].get(peer), result["us"]
    return None if theirs is None or not ours else theirs / ours


def verdict(found: Mapping[str, Any]) -> str:
    """The one line that sums it up."""
    results = found["results"]
    failed = [one for one in results if not one["ok"]]
    if failed:
        names = ", ".join(f"{one['op']} ({one['title']})" for one in failed)
        return f"{len(failed)} of {len(results)} results are wrong: {names}."
    fast = []
    for op in ("int4_gemm", "int8_gemm"):
        ratios = [s for one in results if one["op"] == op and (s := speedup(one, "torch fp32")) is not None]
        if ratios:
            fast.append(f"{op} is {geometric_mean(ratios):.1f} times as fast as torch fp32")
    return f"All {len(results)} results are right to the rounding of their type. {', '.join(fast)}".strip() + "."


def write_report(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(page(found), encoding="utf-8")


def page(found: Mapping[str, Any]) -> str:
    results = found["results"]
    peers = list(dict.fromkeys(name for one in results for name in one["peers"]))
    sections = [
        _head(found),
        _tiles(found, peers),
        _speed(results, peers),
        _accuracy(results),
        _latency(found["decode"]),
        _figures(results, peers),
        _machine(found),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>omnigemm report</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    state = "good" if found["ok"] else "bad"
    return (
        f"<header><h1>omnigemm on this machine</h1>"
        f"<p class='sub'>{escape(machine['processor'])}, {machine['threads']} threads, "
        f"torch {escape(machine['versions']['torch'])}</p>"
        f"<p class='verdict {state}'>{escape(verdict(found))}</p></header>"
    )


def _tiles(found: Mapping[str, Any], peers: Sequence[str]) -> str:
    results = found["results"]
    right = sum(one["ok"] for one in results)
    tiles = [(f"{right} / {len(results)}", "results verified against float64")]
    for op in ("int4_gemm", "int8_gemm"):
        for peer in peers:
            ratios = [s for one in results if one["op"] == op and (s := speedup(one, peer)) is not None]
            if ratios:
                tiles.append((f"{geometric_mean(ratios):.2f}{charts.TIMES}", f"{op} against {peer}"))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in tiles)
    return f"<section class='tiles'>{cells}</section>"


def _speed(results: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> str:
    timed = [one for one in results if one["us"] is not None]
    if not timed:
        return ""
    rows = [charts.Row(one["op"], one["title"], [speedup(one, peer) for peer in peers]) for one in timed]
    names = [f"against {peer}" for peer in peers]
    dense = _shapes(timed, grouped=False)
    grouped = _shapes(timed, grouped=True)
    return (
        "<section><h2>Speed against torch</h2>"
        "<p>How many times faster than torch with dense, unquantised weights: one <code>F.linear</code>, or one per "
        f"group for grouped operations. Dense shapes are {dense} (M, N, K), grouped ones {grouped} (groups, rows "
        "per group, N, K). "
        f"To the right of 1{charts.TIMES} omnigemm is faster.</p>"
        + charts.legend(names, first=_PEER_COLOUR)
        + charts.speedup_bars(rows, names, "torch's time / omnigemm's time (logarithmic)", first=_PEER_COLOUR)
        + "</section>"
    )


def _shapes(results: Sequence[Mapping[str, Any]], *, grouped: bool) -> str:
    """The shapes that occur, in words."""
    found = {one["shape"] for one in results if one["op"].startswith("grouped_") == grouped}
    return escape(", ".join(sorted(found)).replace("x", f" {charts.TIMES} ")) or "none"


def _accuracy(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        charts.Row(one["op"], one["title"], [one["error"], one["quantisation"], one["tolerance"]])
        for one in results
        if one["error"] is not None and math.isfinite(one["error"])
    ]
    if not rows:
        return ""
    names = ["error of the kernel", "error of the quantisation", "allowed for the kernel"]
    return (
        "<section><h2>Accuracy</h2>"
        "<p>Relative errors in the Frobenius norm. The kernel's error compares the result with a float64 product "
        "of the same quantised operands; it is the rounding of the result's type and little else. The "
        "quantisation's error compares that float64 product with the one of the unquantised operands; random data "
        "are the hard case for it. An error of exactly zero has no place on a logarithmic axis and is not drawn.</p>"
        + charts.legend(names, ["dot", "diamond", "bar"])
        + charts.error_dots(rows, names, "relative error (logarithmic)")
        + "</section>"
    )


def _latency(decode: Mapping[str, Any]) -> str:
    names = list(decode["us"])
    return (
        "<section><h2>Latency of decoding</h2>"
        f"<p>One linear layer of {decode['k']} inputs and {decode['n']} outputs while the number of rows (sequences "
        "decoded together) grows. Few rows read the whole weight to do little arithmetic, so the weight's bytes "
        "decide; with many rows the arithmetic does.</p>"
        + charts.legend(names)
        + charts.latency_lines(decode["rows"], decode["us"], "rows (M)", "microseconds per call")
        + "</section>"
    )


def _figures(results: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> str:
    heads = ["operation", "operands", "shape", "error", "quantisation", "µs", *(f"{peer}, µs" for peer in peers)]
    numbers = set(range(3, len(heads)))
    rows = []
    for one in results:
        cells = [one["op"], one["title"], one["shape"]]
        cells += [_power(one[name]) for name in ("error", "quantisation")]
        cells.append(_micro(one["us"]))
        cells += [_micro(one["peers"].get(peer)) for peer in peers]
        cells.append(one["kernel"] or "")
        state = "good" if one["ok"] else "bad"
        words = ("pass" if one["ok"] else "fail") + (f": {one['note']}" if one["note"] else "")
        row = "".join(f"<td{' class=n' if i in numbers else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells))
        rows.append(f"<tr>{row}<td class={state}>{escape(words)}</td></tr>")
    head = "".join(f"<th{' class=n' if i in numbers else ''}>{escape(name)}</th>" for i, name in enumerate(heads))
    return (
        "<section><h2>All figures</h2><div class='plot'><table><thead><tr>"
        f"{head}<th>kernel</th><th>result</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _machine(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    facts = {"processor": machine["processor"], "threads": str(machine["threads"]), **machine["versions"]}
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return (
        f"<section><h2>Machine</h2><dl>{cells}</dl></section>"
        f"<section><h2>Method</h2><p>Times: {escape(found['method'])}. Both sides compute the same product on the same "
        "random data with the same threads. A result passes when its relative error stays below the largest rounding "
        "error of its type (for fp32: 1e-5, which also covers the additions) and no single element errs by more than "
        f"eight times that. The whole run took {found['seconds']:.0f} s.</p></section>"
    )


def _micro(us: float | None) -> str:
    return "" if us is None else f"{us:,.0f}"


def _power(error: float | None) -> str:
    return "" if error is None else ("0" if error == 0 else f"{error:.1e}")


_STYLE = """
:root { --page: #f5f6f8; --card: #ffffff; --text: #1b2330; --muted: #5b6675; --line: #dde2e9; --base: #8a94a3;
  --c0: #1f6fd6; --c1: #e0812b; --c2: #14877c; --c3: #8a56c2; --limit: #98a2b1; --good: #16794a; --bad: #c02b2b;
  --good-bg: #e4f5ec; --bad-bg: #fbe6e6; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1a2029; --text: #e7ebf1; --muted: #9aa6b6;
  --line: #2c3541; --base: #6b7788; --c0: #5aa2f5; --c1: #f0a35c; --c2: #45c0b2; --c3: #b894ea; --limit: #7b8798;
  --good: #5fd39b; --bad: #ff8a8a; --good-bg: #173226; --bad-bg: #3a1d1f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { margin: 0; font-size: 28px; letter-spacing: -0.02em; }
h2 { margin: 0 0 6px; font-size: 18px; }
p { margin: 0 0 14px; max-width: 80ch; }
section p, .sub { color: var(--muted); }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.92em; }
.verdict { display: inline-block; margin: 14px 0 0; padding: 8px 14px; border-radius: 8px; font-weight: 600; }
.verdict.good { color: var(--good); background: var(--good-bg); }
.verdict.bad { color: var(--bad); background: var(--bad-bg); }
section { margin-top: 22px; padding: 22px 24px; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 0; padding: 14px 8px; }
.tiles div { padding: 6px 16px; border-left: 1px solid var(--line); }
.tiles div:first-child { border-left: 0; }
.tiles b { display: block; font-size: 26px; font-variant-numeric: tabular-nums; letter-spacing: -0.02em; }
.tiles span { color: var(--muted); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; font-size: 13px; }
.key { display: inline-flex; align-items: center; gap: 7px; }
.key i { width: 12px; height: 12px; display: inline-block; border-radius: 2px; }
.key i.dot { border-radius: 50%; }
.key i.diamond { width: 10px; height: 10px; transform: rotate(45deg); border-radius: 1px; }
.key i.bar { width: 3px; height: 15px; background: var(--limit); border-radius: 0; }
i.s0 { background: var(--c0); } i.s1 { background: var(--c1); } i.s2 { background: var(--c2); }
i.s3 { background: var(--c3); }
.plot { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 640px; height: auto; font-size: 12px; }
svg text { fill: var(--text); }
svg .tick, svg .detail, svg .axis { fill: var(--muted); }
svg .op { font-weight: 600; }
svg .value { font-size: 9.5px; fill: var(--muted); font-variant-numeric: tabular-nums; }
svg .name { font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; } .grid.faint { opacity: 0.6; }
.base { stroke: var(--base); stroke-width: 1.5; }
svg .s0 { fill: var(--c0); } svg .s1 { fill: var(--c1); } svg .s2 { fill: var(--c2); } svg .s3 { fill: var(--c3); }
svg .limit { fill: var(--limit); }
.l0, .l1, .l2, .l3 { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
.l0 { stroke: var(--c0); } .l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); } .l3 { stroke: var(--c3); }
svg .t0 { fill: var(--c0); } svg .t1 { fill: var(--c1); } svg .t2 { fill: var(--c2); } svg .t3 { fill: var(--c3); }
table { width: 100%; border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 7px; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--muted); font-weight: 600; white-space: normal; vertical-align: bottom; }
.n { text-align: right; }
td.good { color: var(--good); } td.bad { color: var(--bad); white-space: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; }
dt { color: var(--muted); } dd { margin: 0; }
@media print { body { background: #ffffff; } section { break-inside: avoid; } }
"""
