"""Measure the configs of the dense kernels on this machine's GPU and write a table of the fastest.

    python benchmarks/tune.py --out /tmp/tables
    python benchmarks/tune.py --out /tmp/tables --weight 4096x7168 --rows 1 --rows 64

The table, <gpu>.json, goes to src/omnigemm/backends/cuda/tables/; <gpu>-times.json has every time that was measured.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

# N x K of the layers of a 7168-wide mixture-of-experts model.
WEIGHTS = ("576x7168", "2112x7168", "4096x7168", "7168x2048", "7168x16384", "24576x1536", "32768x512")
# Of dense models of 8 and 70 billion parameters, for int8.
INT8_WEIGHTS = ("6144x4096", "28672x4096", "4096x14336", "10240x8192", "57344x8192")
LARGE = ((8192, 8192, 8192), (8192, 8192, 28672))  # M, N, K
# Rows that are measured, with the first and the last number of rows that the result is used for.
SPANS = {
    1: (1, 8),
    16: (9, 16),
    32: (17, 32),
    64: (33, 64),
    128: (65, 128),
    512: (257, 700),
    1024: (701, 2048),
    4096: (2049, 1 << 30),
}
LAST = (4097, 1 << 30)  # of more rows than these
KINDS = ("block", "whole", "int8", "16")


def main(
    out: Annotated[Path, typer.Option(help="Folder of the table.")],
    weight: Annotated[list[str] | None, typer.Option(help="N x K; repeat for several.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help=f"M, of {', '.join(map(str, SPANS))}.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)}; repeat for several.")] = None,
    candidates: Annotated[int, typer.Option(help="Configs that are tried: the model's best.")] = 32,
    within: Annotated[float, typer.Option(help="Only what came this close to the best is measured further.")] = 1.2,
    keep: Annotated[
        Path | None, typer.Option(help="A table whose rows are kept where nothing is measured anew.")
    ] = None,
    random_shapes: Annotated[int, typer.Option("--random", help="So many shapes at random, to judge the model.")] = 0,
    seed: Annotated[int, typer.Option(help="Which shapes --random draws.")] = 1,
) -> None:
    """Measure configs on this machine's GPU."""
    import torch
    from rich.progress import Progress

    from omnigemm.backends.cuda import gpu, measured, tune

    if not torch.cuda.is_available():
        sys.exit("benchmarks/tune.py: there is no NVIDIA GPU on this machine")
    wanted = kind or list(KINDS)
    sets: list[tuple[str, int, int, int]] = []
    for one_kind in wanted:
        for one in weight or (INT8_WEIGHTS if one_kind == "int8" else WEIGHTS):
            n, k = map(int, one.split("x"))
            sets += [(one_kind, m, n, k) for m in rows or SPANS]
        if weight is None and rows is None:
            sets += [(one_kind, *one) for one in LARGE]
    if random_shapes:
        sets = list(shapes_at_random(wanted, random_shapes, seed))
    device = gpu.of(0)
    found: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    off: list[float] = []
    start = time.perf_counter()
    with Progress() as progress:
        for one_kind, m, n, k in progress.track(sets, description="measuring"):
            made = tune.measure(tune.problem_of(one_kind, m, n, k), candidates, within)
            off.append(made.model_us / made.us)
            times += [
                {"m": m, "n": n, "k": k, "scales": one_kind, "early": early, "us": us, "config": tune.compact(config)}
                for (config, early), us in made.took.items()
            ]
            rows_made = list(made.rows(SPANS.get(m, LAST)))
            found += rows_made
            last = ", ".join(
                f"{row['us']}" + (f" (BLAS {row['blas_us']})" if "blas_us" in row else "") for row in rows_made
            )
            print(f"{one_kind} {m}x{n}x{k}: {last}; {off[-1]:.2f}; {time.perf_counter() - start:.0f} s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    if keep is not None:
        found = measured.merged(json.loads(keep.read_text())["rows"], found)
    (out / f"{device.table}.json").write_text(measured.to_json(tune.ABOUT, found))
    (out / f"{device.table}-times.json").write_text(json.dumps(times))
    mean = math.exp(statistics.fmean(map(math.log, off)))
    print(f"{len(times)} times; the model's choice took {mean:.3f}x the best's in the mean, {max(off):.2f}x at worst")


def shapes_at_random(kinds: Sequence[str], count: int, seed: int) -> Iterator[tuple[str, int, int, int]]:
    """The same in every run: few rows and many, sizes that are no round numbers."""
    dice = random.Random(seed)
    for i in range(count):
        m = round(2 ** dice.uniform(0, 13))
        n, k = (16 * round(2 ** dice.uniform(5, 10.5)) for _ in range(2))
        yield kinds[i % len(kinds)], m, n, k


if __name__ == "__main__":
    typer.run(main)
