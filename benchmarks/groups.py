"""Measure grouped products on one GPU beside their peers: torch's grouped products and, where it is there, deep_gemm.

    python benchmarks/groups.py
    python benchmarks/groups.py --op grouped_masked_fp8_block

Up to 32 groups have between 0.7 and 1.3 times the rows that the shape says, spread evenly, in random order; with 64
groups and more each has just as many. Only rows of groups count; peers that want padding get it, and their time
includes it. torch's product takes contiguous rows and scales per row only, so beside masked groups it stands for rows
that were packed before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import omnigemm
from omnigemm.bench import graph
from omnigemm.core.problem import Problem, describe

# N x K of two layers of a 7168-wide model and of a 4096-wide one's, in prefill; and of thin experts in decoding.
WEIGHTS = ((6144, 7168), (7168, 3072), (4096, 2048))
THIN = tuple((g, rows, 7168, 2048) for g in (64, 128, 256) for rows in (1, 4, 16))
THIN += tuple((g, rows, 4096, 7168) for g in (64, 128) for rows in (1, 4, 16))
LARGE = tuple((g, rows, n, k) for g, rows in ((4, 8192), (8, 4096)) for n, k in WEIGHTS)
MIDDLE = tuple((g, rows, n, k) for g, rows in ((6, 1024), (32, 192), (32, 20)) for n, k in WEIGHTS)
SHAPES = {
    "grouped_masked_fp8_block": (*MIDDLE, *THIN),
    "grouped_contiguous_fp8_block": LARGE,
    "grouped_contiguous_fp8_token": (*LARGE, *MIDDLE, *THIN),
    "grouped_contiguous_bf16": (*LARGE, *MIDDLE, *THIN),
}
METHOD = (
    "up to 32 groups have 0.7 to 1.3 times the stated rows, more have just those; peers with the padding they need, "
    "which does not count as rows"
)
FEW = 32  # rows of a group, up to which both are measured: weights stated to be constant, and not
_PAD = 128  # rows: deep_gemm wants contiguous groups to begin at multiples
_FP8 = torch.float8_e4m3fn
# What deep_gemm called its masked product, newest first.
_MASKED = ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked")

Shape = tuple[int, int, int, int]


def sizes(groups: int, rows: int) -> list[int]:
    if groups >= 64:
        return [rows] * groups
    found = [round(rows * (0.7 + 0.6 * (i + 0.5) / groups)) for i in range(groups)]
    random.Random(0).shuffle(found)
    return found


def floor_us(total: int, used: int, n: int, k: int, size: int = 1) -> float:
    """What an H200's memory (4.6 TB/s read) and tensor cores (1580 TFLOP/s in fp8, half in 16 bits) allow."""
    return max((size * (used * n + total) * k + 2 * total * n) / 4.6e6, size * 2 * total * n * k / 1580e6)


def words(op: str) -> dict[str, Any]:
    """What describes the operands, besides their sizes."""
    if op.endswith("bf16"):
        return {"dtype": "bf16"}
    return {"dtype": "e4m3", "granularity": "128x128" if op.endswith("block") else "token"}


def problem(op: str, shape: Shape) -> Problem:
    groups, rows, n, k = shape
    masked = "masked" in op
    counts = sizes(groups, rows)
    return describe(
        "grouped_gemm_masked" if masked else "grouped_gemm_contiguous",
        m=slab(counts) if masked else sum(counts),
        n=n,
        k=k,
        groups=groups,
        expected_m=rows if masked else None,
        **words(op),
    )


def cases(only: str = "") -> Iterator[tuple[str, Shape]]:
    return ((op, shape) for op, shapes in SHAPES.items() if only in op for shape in shapes)


def problems() -> Iterator[Problem]:
    return (problem(*one) for one in cases())


def slab(counts: list[int]) -> int:
    """Rows of a slab: whole tiles, as peers want them."""
    return -(-max(counts) // _PAD) * _PAD


class Products:
    """Random operands of one shape."""

    def __init__(self, op: str, shape: Shape) -> None:
        self.groups, self.rows, n, k = shape
        self.counts, self.masked, blocks = sizes(self.groups, self.rows), "masked" in op, -(-k // 128)
        lead = (self.groups, slab(self.counts)) if self.masked else (sum(self.counts),)
        index = torch.tensor(self.counts, dtype=torch.int32, device="cuda")
        self.index = index if self.masked else index.cumsum(0, dtype=torch.int32)
        self.block, self.wide = op.endswith("block"), op.endswith("bf16")
        dtype = torch.bfloat16 if self.wide else _FP8
        copies = graph.copies_needed(self.groups * n * k * dtype.itemsize)
        self.a = values(*lead, k, dtype=dtype)
        self.weights = [values(self.groups, n, k, dtype=dtype) for _ in range(copies)]
        self.scales: dict[str, Tensor] = {}
        if self.block:
            self.scales = {"a_scale": scales(*lead, blocks), "b_scale": scales(self.groups, -(-n // 128), blocks)}
        elif not self.wide:
            self.scales = {"a_scale": scales(*lead), "b_scale": scales(self.groups, n)}
        self.out = torch.empty(*lead, n, device="cuda", dtype=torch.bfloat16)

    def ours(self, weight: Tensor) -> None:
        if self.masked:
            omnigemm.grouped_gemm_masked(self.a, weight, self.index, expected_m=self.rows, out=self.out, **self.scales)
        else:
            omnigemm.grouped_gemm_contiguous(self.a, weight, self.index, out=self.out, **self.scales)

    def peers(self) -> Iterator[tuple[str, Callable[[Tensor], object]]]:
        if self.wide:
            yield (
                "torch grouped_mm",
                lambda weight: torch._grouped_mm(self.a, weight.transpose(-2, -1), offs=self.index),
            )
            return
        rows = torch.cat([self.a[i, :c] for i, c in enumerate(self.counts)]) if self.masked else self.a
        ends = self.index.cumsum(0, dtype=torch.int32) if self.masked else self.index
        a_scale, b_scale = scales(rows.size(0)), scales(self.groups, self.out.size(-1))

        def torchs(weight: Tensor) -> Tensor:
            turned = weight.transpose(-2, -1)
            return torch._scaled_grouped_mm(
                rows, turned, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        yield "torch scaled_grouped_mm rowwise", torchs

    def deep_gemms(self) -> Callable[[Tensor], object]:
        """Of block scales only."""
        return self._deep_gemm_masked() if self.masked else self._deep_gemm_contiguous()

    def _deep_gemm_masked(self) -> Callable[[Tensor], object]:
        a, b_scale = (self.a, self.scales["a_scale"]), self.scales["b_scale"]

        def call(weight: Tensor) -> object:
            deep_gemm = importlib.import_module("deep_gemm")
            name = next((one for one in _MASKED if hasattr(deep_gemm, one)), _MASKED[0])
            return getattr(deep_gemm, name)(a, (weight, b_scale), self.out, self.index, self.rows)

        return call

    def _deep_gemm_contiguous(self) -> Callable[[Tensor], object]:
        """The group of each row, -1 for padding. The values of rows do not matter for the time."""
        layout = [
            torch.full((-(-count // _PAD) * _PAD,), -1, dtype=torch.int32).index_fill_(0, torch.arange(count), group)
            for group, count in enumerate(self.counts)
        ]
        owners = torch.cat(layout).cuda()
        a = values(owners.numel(), self.a.size(1))
        a_scale, b_scale = scales(owners.numel(), self.scales["a_scale"].size(1)), self.scales["b_scale"]
        out = torch.empty(owners.numel(), self.out.size(1), device="cuda", dtype=torch.bfloat16)

        def call(weight: Tensor) -> object:
            product = importlib.import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous
            return product((a, a_scale), (weight, b_scale), out, owners)

        return call


def values(*shape: int, dtype: torch.dtype = _FP8) -> Tensor:
    """Random ones, some at a time: in fp32 all of them would take four times the room."""
    made = torch.empty(shape, device="cuda", dtype=dtype)
    for part in made.view(-1).split(1 << 28):
        part.copy_(torch.randn(part.numel(), device="cuda", dtype=torch.float16))
    return made


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def constant(ours: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def call(weight: Tensor) -> None:
        with omnigemm.settings(constant_weights=True):
            ours(weight)

    return call


def timed(
    ours: dict[str, Callable[[Tensor], object]], peers: dict[str, Callable[[Tensor], object]], copies: list[Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Ours, and those of the peers that are here and take this shape."""
    here = {name: call for name, call in peers.items() if graph.runs(call, copies[0])}
    times = {name: round(us, 2) for name, us in graph.in_turns({**ours, **here}, copies).items()}
    return {name: times.pop(name) for name in ours}, times


def measure(op: str, shape: Shape, deep_gemm: str) -> dict[str, Any]:
    """`us`, with few rows `us_any_weights`, and peers."""
    groups, rows, n, k = shape
    products = Products(op, shape)
    contenders = {"us": constant(products.ours), **({"us_any_weights": products.ours} if rows <= FEW else {})}
    us, others = timed(contenders, dict(products.peers()), products.weights)
    deep_gemms = {deep_gemm: products.deep_gemms()} if deep_gemm and products.block else {}
    pairs = graph.pairs(contenders["us"], deep_gemms, products.weights)
    described = problem(op, shape)
    more = {"expected_m": rows, **words(op)} if products.masked else words(op)
    with omnigemm.settings(constant_weights=True):
        plan = omnigemm.plan(described.op, m=described.m, n=n, k=k, groups=groups, device="cuda", **more)
    return {
        "op": op,
        "shape": f"G{groups}x{rows}x{n}x{k}",
        **us,
        "floor_us": round(floor_us(sum(products.counts), groups, n, k, products.a.element_size()), 2),
        "peers": others,
        **({"pairs": pairs} if pairs else {}),
        "config": {"kernel": plan.kernel, **plan.config},
    }


def rows(only: str = "", deep_gemm: str = "DeepGEMM") -> Iterator[dict[str, Any]]:
    """Without a name for it, DeepGEMM is left out: it compiles every shape by nvcc, for some ten seconds."""
    from omnigemm.backends.cuda import CudaBackend, gpu, jit

    wanted = list(cases(only))
    jit.warm({spec for one in wanted for spec in CudaBackend().specs(problem(*one), gpu.of(0))})
    for op, shape in wanted:
        found = measure(op, shape, deep_gemm)
        print(op, found["shape"], found["us"], found["floor_us"], found["peers"], found.get("pairs", ""), flush=True)
        torch.cuda.empty_cache()
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="", help="a part of the operation's name")
    parser.add_argument("--out", type=Path, help="a file for the rows")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/groups.py: there is no NVIDIA GPU on this machine")
    found = list(rows(given.op))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
