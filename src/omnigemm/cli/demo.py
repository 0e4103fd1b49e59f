"""`omnigemm demo`: the main job on this machine. Quantise, multiply, verify, time, report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.cpu.isa import processor
from ..bench import timing
from ..bench.compare import compare, sweep
from ..bench.record import versions
from ..bench.workloads import CASES, OURS, Case, Dense, Size, Workload, case, dense
from ..core.errors import OmniGemmError
from . import output
from .report import speedup, verdict, write_report


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much the demo does."""

    dense: Size
    grouped: Size
    decode: Size
    decode_rows: tuple[int, ...]
    seconds: float  # of timing for each row, after warm-up
    cold_bytes: int


FULL = Scale(
    dense=Size(16, 4096, 4096),
    grouped=Size(16, 1024, 2048, 8),
    decode=Size(1, 4096, 4096),
    decode_rows=(1, 2, 4, 8, 16, 32, 64),
    seconds=0.25,
    cold_bytes=64_000_000,
)
QUICK = Scale(Size(4, 128, 256), Size(4, 64, 128, 3), Size(1, 128, 256), (1, 4), seconds=0.0, cold_bytes=0)


def run_demo(out: Path, *, quick: bool = False, as_json: bool = False) -> int:
    """Run everything, write the report; 1 if a result was wrong."""
    output.check_target(out)
    found = collect(QUICK if quick else FULL)
    failure = output.failure(out, lambda: write_report(out, found))
    written = out if failure is None else None
    if as_json:
        output.print_json({**found, "report": None if written is None else str(written)})
    else:
        _show(found, written)
    if failure is not None:
        raise failure
    return 0 if found["ok"] else 1


def collect(scale: Scale, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """All figures of the demo, as plain data."""
    began = time.perf_counter()
    matrices: dict[tuple[str, Size], tuple[Dense, Tensor]] = {}
    results = []
    with output.progress() as bar:
        task = bar.add_task("demo", total=len(cases) + len(scale.decode_rows))
        for one in cases:
            bar.update(task, description=f"{one.op}, {one.title}")
            size = one.fit(scale.grouped if one.grouped else scale.dense)
            layout = one.op if one.grouped else "dense"
            if (layout, size) not in matrices:
                given = dense(one, size)
                # Only the latest: the cases of a layout follow each other.
                matrices = {(layout, size): (given, Workload(one, size, given).ideal())}
            results.append(_run(one, size, *matrices[layout, size], scale))
            bar.advance(task)
        matrices.clear()
        bar.update(task, description="latency of decoding")
        decode = _decode(scale, lambda: bar.advance(task))
    return {
        "machine": {"processor": processor(), "threads": torch.get_num_threads(), "versions": versions()},
        "method": timing.method(scale.cold_bytes),
        "seconds": round(time.perf_counter() - began, 1),
        "ok": all(one["ok"] for one in results),
        "results": results,
        "decode": decode,
    }


def _run(one: Case, size: Size, given: Dense, ideal: Tensor, scale: Scale) -> dict[str, Any]:
    """One case: verified always, timed only when right."""
    about: dict[str, Any] = {"op": one.op, "title": one.title, "shape": str(size)}
    empty = {"error": None, "worst": None, "quantisation": None, "tolerance": None}
    try:
        work = Workload(one, size, given)
        plan = work.plan()
        about["kernel"] = f"{plan.backend}/{plan.kernel}"
        checked = work.verify(ideal)
        about |= dataclasses.asdict(checked)
        times = compare(work, seconds=scale.seconds, cold_bytes=scale.cold_bytes) if checked.ok else {}
    except (OmniGemmError, RuntimeError) as error:
        return {"kernel": None, **about, **empty, "ok": False, "note": str(error), "us": None, "peers": {}}
    us = times[OURS].us if times else None
    peers = {name: round(taken.us, 2) for name, taken in times.items() if name != OURS}
    return {**about, "us": None if us is None else round(us, 2), "peers": peers}


def _decode(scale: Scale, advance: Callable[[], None]) -> dict[str, Any]:
    """Latency against the number of rows, for one weight in several forms."""
    cases = {"omnigemm int4": case("int4_gemm", dtype="bf16"), "omnigemm int8": case("int8_gemm")}
    curves: dict[str, list[float]] = {}
    times = sweep(cases, scale.decode, scale.decode_rows, seconds=scale.seconds, cold_bytes=scale.cold_bytes)
    for _, taken in times:
        for name, one in taken.items():
            curves.setdefault(name, []).append(round(one.us, 2))
        advance()
    return {"n": scale.decode.n, "k": scale.decode.k, "rows": list(scale.decode_rows), "us": curves}


# ------------------------------------------------------------------------------------------------ for people


def _show(found: Mapping[str, Any], out: Path | None) -> None:
    screen = output.console()
    machine = found["machine"]
    peers = list(dict.fromkeys(name for one in found["results"] for name in one["peers"]))
    ratios = {name: f"vs {name.removeprefix('torch ')}" for name in peers}
    numbers = ["error", "quant.", "us", *ratios.values()]
    shapes = " and ".join(dict.fromkeys(one["shape"] for one in found["results"]))
    table = output.table(
        f"omnigemm on {machine['processor']}, {machine['threads']} threads, {shapes}",
        (*output.name_columns(screen, ("operands", "kernel")), *numbers, "result"),
        right=numbers,
    )
    for one in found["results"]:
        cells = ["" if one[name] is None else f"{one[name]:.1e}" for name in ("error", "quantisation")]
        cells.append("" if one["us"] is None else output.duration(one["us"]))
        for name in peers:
            ratio = speedup(one, name)
            cells.append("" if ratio is None else output.ratio(ratio))
        names = output.names_of(screen, one["op"], (one["title"], one["kernel"] or "no kernel"))
        table.add_row(*names, *cells, output.mark(one["ok"], one["note"]))
    screen.print(table)
    screen.print(
        "[dim]error: the kernel's, against float64 of the same operands. quant.: the quantisation's, against the "
        "unquantised operands. vs: the time of torch with dense weights in that type, over ours.[/dim]",
        soft_wrap=True,
    )
    colour = "green" if found["ok"] else "red"
    screen.print(f"[{colour}]{verdict(found)}[/{colour}] Took {found['seconds']:.0f} s.", soft_wrap=True)
    if out is not None:
        screen.print(f"Report: {out}", soft_wrap=True, markup=False)
