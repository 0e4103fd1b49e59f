"""Measure the configs of the dense kernels on this machine's GPU and write a table of the fastest.

    python benchmarks/tune.py --out /tmp/tables
    python benchmarks/tune.py --out /tmp/tables --weight 4096x7168 --rows 1 --rows 64

The table, <gpu>.json, goes to src/omnigemm/backends/cuda/tables/; <gpu>-times.json has every time that was measured.
"""

from __future__ import annotations

import dataclasses
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
FEW = 128  # rows up to which it is worth to know which config is best when weights are stated to be constant
KINDS = {
    "block": ("1x128", "128x128"),
    "whole": ("token", "channel"),
    "int8": ("token", "channel"),
    "16": ("none", "none"),
}
BLAS = "blas"  # torch's own product, in the place of a config
MANY = 512  # rows from which on the chip is at its power limit, so that who runs first has an advantage
ABOUT = (
    "For a weight of N x K, the config that ran fastest. scales: block is fp8 with 1x128 and 128x128, and is used for "
    "1x128 with 1x128 too; whole is fp8 with one for each token and channel, and is used for single ones too; int8 is "
    "int8 with any; 16 is bf16, and is used for fp16 too, with what cuBLAS took in the same run as blas_us. "
    "constant_weights: as the setting of that name; if it is missing, both. early: whether the first weights are "
    "loaded before the kernel before is done. Measured at m rows with bf16 results, used from m_from to m_to rows; us "
    "is microseconds."
)


class Bench:
    """One weight and number of rows: operands, and the time of a config."""

    def __init__(self, kind: str, m: int, n: int, k: int) -> None:
        import torch

        from omnigemm.backends.cuda import dense, gpu
        from omnigemm.bench import graph
        from omnigemm.core.problem import Problem

        self.kind = kind
        a_scale, b_scale = KINDS[kind]
        op, dtype = {"int8": ("int8_gemm", "int8"), "16": ("gemm", "bf16")}.get(kind, ("fp8_gemm", "e4m3"))
        b_layout = "col" if kind == "16" else "row"  # a weight [N, K] is given as its transpose
        self.problem = Problem(op, m, n, k, dtype, dtype, "bf16", a_scale=a_scale, b_scale=b_scale, b_layout=b_layout)
        self.variant, self.gpu = dense.variant_of(self.problem), gpu.of(0)
        blocks = -(-k // 128)
        sizes = ((m, blocks), (-(-n // 128), blocks)) if kind == "block" else ((m,), (n,))

        def filled(*shape: int) -> Any:
            if kind == "int8":
                return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
            return torch.randn(shape, device="cuda").to(torch.bfloat16 if kind == "16" else torch.float8_e4m3fn)

        self.a = filled(m, k)
        self.weights = [filled(n, k) for _ in range(graph.copies_needed(n * k * self.a.element_size()))]
        self.scales = [] if kind == "16" else [torch.rand(size, device="cuda") + 0.5 for size in sizes]
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def expected(self) -> Any:
        """The product with the first weight, by torch in fp32."""
        if self.kind == "16":
            return self.a.float() @ self.weights[0].float().t()
        wide = []
        for x, scale in zip((self.a, self.weights[0]), self.scales, strict=True):
            rows, columns = x.shape
            scale = scale.unsqueeze(1) if scale.dim() == 1 else scale.repeat_interleave(128, 1)[:, :columns]
            if scale.size(0) != rows:
                scale = scale.repeat_interleave(128, 0)[:rows]
            wide.append(x.float() * scale)
        return wide[0] @ wide[1].t()

    def launch(self, config: Any, early: bool) -> Any:
        from omnigemm.backends.cuda import dense, gemm

        made = gemm.Gemm if self.kind == "16" else dense.Launch
        launch = made(self.problem, config, 0, self.gpu.multiprocessors, early)
        return launch.bind(*self.operands(self.weights[0]))

    def operands(self, weight: Any) -> tuple[Any, ...]:
        """With the result first."""
        if self.kind == "16":
            return self.out, self.a, weight.t(), None, 1.0, 0.0
        return self.out, self.a, weight, *self.scales, None

    def check(self, configs: Sequence[Any]) -> None:
        expected = self.expected()
        for config in configs:
            self.out.fill_(float("nan"))
            self.launch(config, False)(*self.operands(self.weights[0]))
            error = ((self.out.float() - expected).norm() / expected.norm()).item()
            if not error < 0.01:
                sys.exit(f"benchmarks/tune.py: {config} computes {self.problem} with an error of {error:.3g}")

    def microseconds(self, config: Any, early: bool, replay_seconds: float) -> float:
        import torch

        from omnigemm.bench import graph

        if config == BLAS:
            return graph.microseconds(
                lambda weight: torch.mm(self.a, weight.t(), out=self.out), self.weights, replay_seconds, 3
            )
        run = self.launch(config, early)
        return graph.microseconds(lambda weight: run(*self.operands(weight)), self.weights, replay_seconds, 3)

    def times(self, configs: Sequence[Any], within: float) -> dict[tuple[Any, bool], float]:
        """By config and whether weights were loaded early. In 16 bits, BLAS takes part as a contender."""
        contenders = [*configs, BLAS] if self.kind == "16" else configs
        took = {(config, False): self.microseconds(config, False, 0.006) for config in contenders}
        near = [one for one in contenders if took[one, False] < within * min(took.values()) or one == BLAS]
        if self.problem.m <= FEW:
            took |= {(one, True): self.microseconds(one, True, 0.006) for one in near if one != BLAS}
        if self.problem.m >= MANY:
            rounds = [[self.microseconds(one, False, 0.02) for one in near] for _ in range(3)]
            took |= {
                (one, False): statistics.median(us) for one, us in zip(near, zip(*rounds, strict=True), strict=True)
            }
        return took


def compact(config: Any) -> dict[str, Any]:
    """What differs from the defaults."""
    if config == BLAS:
        return {BLAS: True}
    fields = dataclasses.fields(config)
    return {one.name: value for one in fields if (value := getattr(config, one.name)) != one.default}


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
) -> None:
    """Measure configs on this machine's GPU."""
    import torch
    from rich.progress import Progress

    from omnigemm.backends.cuda import choice, dense, gpu, jit
    from omnigemm.bench import graph

    if not torch.cuda.is_available():
        sys.exit("benchmarks/tune.py: there is no NVIDIA GPU on this machine")
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = kind or list(KINDS)
    sets: list[tuple[str, int, int, int]] = []
    for one_kind in wanted:
        for one in weight or (INT8_WEIGHTS if one_kind == "int8" else WEIGHTS):
            n, k = map(int, one.split("x"))
            sets += [(one_kind, m, n, k) for m in rows or SPANS]
        if weight is None and rows is None:
            sets.append((one_kind, 8192, 8192, 8192))
    if random_shapes:
        sets = list(shapes_at_random(wanted, random_shapes))
    device = gpu.of(0)
    found: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    off: list[float] = []
    start = time.perf_counter()
    with Progress() as progress:
        for one_kind, m, n, k in progress.track(sets, description="measuring"):
            bench = Bench(one_kind, m, n, k)
            tried = [one.config for one in choice.modelled(bench.variant, m, device)[:candidates]]
            jit.warm([dense.spec(config, bench.variant) for config in tried])
            if m <= FEW:
                bench.check(tried)
            took = bench.times(tried, within)
            plain = {config: us for (config, early), us in took.items() if not early and config != BLAS}
            off.append(plain[tried[0]] / min(plain.values()))
            times += [
                {"m": m, "n": n, "k": k, "scales": one_kind, "early": early, "us": us, "config": compact(config)}
                for (config, early), us in took.items()
            ]
            made = list(entries(m, n, k, one_kind, took))
            found += made
            last = ", ".join(f"{row['us']}" + (f" (BLAS {row['blas_us']})" if "blas_us" in row else "") for row in made)
            print(f"{one_kind} {m}x{n}x{k}: {last}; {off[-1]:.2f}; {time.perf_counter() - start:.0f} s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    if keep is not None:
        found = merged(json.loads(keep.read_text())["rows"], found)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in found)
    about = (
        f"{ABOUT} Method: {graph.METHOD}; but 6 ms and 3 replays, and from {MANY} rows on the median of three rounds "
        "over all contenders with 20 ms and 3 replays each."
    )
    (out / f"{device.table}.json").write_text(f'{{\n "about": {json.dumps(about)},\n "rows": [\n{lines}\n ]\n}}\n')
    (out / f"{device.table}-times.json").write_text(json.dumps(times))
    mean = math.exp(statistics.fmean(map(math.log, off)))
    print(f"{len(times)} times; the model's choice took {mean:.3f}x the best's in the mean, {max(off):.2f}x at worst")


def entries(m: int, n: int, k: int, kind: str, took: dict[tuple[Any, bool], float]) -> Iterator[dict[str, Any]]:
    """Rows of the table: the fastest of all if weights are constant, and the fastest that does not load them early."""
    low, high = SPANS.get(m, (4097, 1 << 30))
    for constant in (False, True) if m <= FEW else (None,):
        ours = (one for one in took if one[0] != BLAS and (constant or not one[1]))
        config, early = min(ours, key=lambda one: took[one])
        row = {"n": n, "k": k, "scales": kind, "m_from": low, "m_to": high, "m": m}
        if constant is not None:
            row |= {"constant_weights": constant}
        if early:
            row |= {"early": True}
        row |= {"us": round(took[config, early], 2)}
        if (BLAS, False) in took:
            row |= {"blas_us": round(took[BLAS, False], 2)}
        yield row | {"config": compact(config)}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows of both, the new ones where both have some."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["scales"], row["n"], row["k"], row["m"]

    anew = {place(row) for row in new}
    return sorted([*(row for row in old if place(row) not in anew), *new], key=place)


def shapes_at_random(kinds: Sequence[str], count: int) -> Iterator[tuple[str, int, int, int]]:
    """The same in every run: few rows and many, sizes that are no round numbers."""
    dice = random.Random(1)
    for i in range(count):
        m = round(2 ** dice.uniform(0, 13))
        n, k = (16 * round(2 ** dice.uniform(5, 10.5)) for _ in range(2))
        yield kinds[i % len(kinds)], m, n, k


if __name__ == "__main__":
    typer.run(main)
