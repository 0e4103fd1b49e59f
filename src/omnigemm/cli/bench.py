"""`omnigemm bench`: operations times shapes, against torch in the same run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench import record, timing
from ..bench.compare import compare
from ..bench.workloads import Case, Size, Workload, case
from ..core.errors import OmniGemmError
from ..core.memory import physical_bytes
from ..core.problem import OPS
from . import output
from .problems import check_groups

USUAL_SHAPES = ("1x4096x4096", "16x4096x4096", "128x4096x4096")
USUAL_GROUPED_SHAPES = ("G8x4x1024x2048", "G8x32x1024x2048")


def run_bench(
    ops: Sequence[str],
    shapes: Sequence[str],
    words: Mapping[str, Any],
    *,
    seconds: float = 1.0,
    cold_mb: int = timing.COLD_BYTES // 10**6,
    record_file: Path | None = None,
    as_json: bool = False,
) -> int:
    if not math.isfinite(seconds):
        raise output.CommandError(f"bench: seconds is {seconds}, expected a number")
    if record_file is not None:
        output.check_target(record_file)
    cold_bytes = cold_mb * 10**6
    jobs = _jobs(ops, shapes, words)
    rows, works = [], []
    with output.progress() as bar:
        task = bar.add_task("bench", total=len(jobs))
        for one, size in jobs:
            bar.update(task, description=f"{one.op} {size}")
            with _memory_errors(one, size):
                work = Workload(one, size)
                rows.append(record.row(work, compare(work, seconds=seconds, cold_bytes=cold_bytes)))
            works.append((work.flops, work.traffic_bytes))
            bar.advance(task)
    made = record.new(rows, timing.method(cold_bytes))
    failure = None
    if record_file is not None:
        failure = output.failure(record_file, lambda: record.write(record_file, made))
    if as_json:
        output.print_json(made)
    else:
        show(rows, works)
    if failure is not None:
        raise failure
    return 0


@contextlib.contextmanager
def _memory_errors(one: Case, size: Size) -> Iterator[None]:
    """A shape that does not fit into memory is the user's to change; torch has no kind of its own for it here."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if isinstance(error, RuntimeError) and "allocate memory" not in text and "not enough memory" not in text:
            raise
        raise output.CommandError(f"bench: {one.op} {size} does not fit into this machine's memory") from error


def _jobs(ops: Sequence[str], shapes: Sequence[str], words: Mapping[str, Any]) -> list[tuple[Case, Size]]:
    """What to time, checked before the first second is spent. Without named operations: all that take the words."""
    jobs = []
    refusal: OmniGemmError | None = None
    for op in ops or OPS:
        one = case(op, **words)
        usual = USUAL_GROUPED_SHAPES if one.grouped else USUAL_SHAPES
        sizes = [one.fit(Size.parse(text)) for text in shapes or usual]
        try:
            for size in sizes:
                check_groups(op, size.groups)
                one.problem(size)
                _check_memory(one, size)
        except OmniGemmError as error:
            if ops:
                raise
            refusal = error
        else:
            jobs += [(one, size) for size in sizes]
    if refusal is not None and not jobs:
        raise refusal
    return jobs


def _check_memory(one: Case, size: Size) -> None:
    """Refuse what would only fill the memory until the system ends the process: the matrices alone, in fp32."""
    weights = 4 * max(1, size.groups) * size.n * size.k
    rows = 4 * max(1, size.groups) * size.m * (size.n + size.k)
    if weights + rows > physical_bytes():
        need, have = (round(count / 1e9) for count in (weights + rows, physical_bytes()))
        raise output.CommandError(f"bench: {one.op} {size} needs {need} GB and more, but this machine has {have} GB")


def show(rows: Sequence[Mapping[str, Any]], works: Sequence[tuple[int, int]]) -> None:
    """The rows as a table; `works` holds each row's operations and bytes."""
    screen = output.console()
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    numbers = ["us", "GFLOP/s", "GB/s", *peers]
    names = output.name_columns(screen, ("operands", "shape", "kernel"))
    table = output.table("Microseconds, and torch's over ours", (*names, *numbers), right=numbers)
    for row, (flops, moved) in zip(rows, works, strict=True):
        us, config = row["us"], row["config"]
        cells = [output.duration(us), f"{flops / us / 1e3:.1f}", f"{moved / us / 1e3:.1f}"]
        for name in peers:
            peer = row["peers"].get(name)
            cells.append("" if peer is None else f"{output.duration(peer)}  {output.ratio(peer / us)}")
        details = (f"{config['dtype']} x {config['weight_dtype']}", row["shape"], config["kernel"])
        table.add_row(*output.names_of(screen, row["op"], details), *cells)
    screen.print(table)
