"""Measure weight gradients of experts (`grouped_gemm_k_contiguous`) on one GPU beside torch's own ways.

    python benchmarks/k_groups.py
    python benchmarks/k_groups.py --op grouped_k_bf16_add --out rows.json

A shape is G x rows x M x N, where a group has between 0.7 and 1.3 times the rows, spread evenly, in random order (fp8:
to the next multiple of 128). torch's grouped product gives bf16 only; the loop of torch.mm is told the rows by the host
for nothing, and also gives bf16. All run in CUDA graphs, in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import groups
import torch
from torch import Tensor

import omnigemm
from omnigemm.bench import graph
from omnigemm.core.problem import Problem, describe

METHOD = (
    "a shape is G x rows x M x N, groups of 0.7 to 1.3 times the rows, spread evenly, in random order (fp8: to the "
    "next multiple of 128); torch's products give bf16, and the loop is told the rows by the host for nothing"
)
SHAPES = tuple(
    (count, rows, m, n) for count, rows in ((4, 8192), (8, 4096), (32, 1024), (128, 256)) for m, n in groups.WEIGHTS
)
# op -> what describes the operands, and whether C is added in place
OPS: dict[str, tuple[dict[str, Any], bool]] = {
    "grouped_k_bf16": ({"dtype": "bf16", "out_dtype": "bf16"}, False),
    "grouped_k_bf16_fp32": ({"dtype": "bf16"}, False),
    "grouped_k_bf16_add": ({"dtype": "bf16", "beta": 1.0}, True),
    "grouped_k_fp8": ({"dtype": "e4m3"}, False),
    "grouped_k_fp8_add": ({"dtype": "e4m3", "beta": 1.0}, True),
}
_BLOCK = 128

Shape = tuple[int, int, int, int]


def counts(op: str, shape: Shape) -> list[int]:
    found = groups.sizes(*shape[:2])
    return [-(-count // _BLOCK) * _BLOCK for count in found] if "fp8" in op else found


def problem(op: str, shape: Shape) -> Problem:
    count, _, m, n = shape
    return describe("grouped_gemm_k_contiguous", m=m, n=n, k=sum(counts(op, shape)), groups=count, **OPS[op][0])


def problems(ops: Sequence[str] = tuple(OPS)) -> Iterator[Problem]:
    return (problem(op, shape) for op in ops for shape in SHAPES)


def floor_us(described: Problem) -> float:
    """What an H200's memory (4.6 TB/s read) and tensor cores (1580 TFLOP/s in fp8, half in 16 bits) allow."""
    m, n, k, size = described.m, described.n, described.k, 1 if described.a_dtype == "e4m3" else 2
    out = described.groups * m * n * (2 if described.out_dtype == "bf16" else 4) * (2 if described.c else 1)
    return max((size * (m + n) * k + out) / 4.6e6, size * described.flops / 1580e6)


class Products:
    """Random operands of one shape; what is multiplied is copied often enough that L2 does not hold it."""

    def __init__(self, op: str, shape: Shape) -> None:
        self.counts = counts(op, shape)
        (count, _, m, n), total, (_, self.adds) = shape, sum(self.counts), OPS[op]
        self.fp8 = "fp8" in op
        self.ends = torch.tensor(self.counts, dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
        copies = graph.copies_needed(total * n * (1 if self.fp8 else 2))
        self.a, self.many = self.operand(total, m), [self.operand(total, n) for _ in range(copies)]
        kind = torch.bfloat16 if OPS[op][0].get("out_dtype") == "bf16" else torch.float32
        self.out = torch.zeros(count, m, n, device="cuda", dtype=kind)
        self.scales: dict[str, Tensor] = {}
        if self.fp8:
            self.scales = {"a_scale": groups.scales(m, total // _BLOCK), "b_scale": groups.scales(n, total // _BLOCK)}

    def operand(self, total: int, columns: int) -> Tensor:
        if self.fp8:
            return groups.values(columns, total).t()
        return groups.values(total, columns, dtype=torch.bfloat16)

    def ours(self, b: Tensor) -> None:
        c = self.out if self.adds else None
        omnigemm.grouped_gemm_k_contiguous(self.a, b, self.ends, c, out=self.out, backend="cuda", **self.scales)

    def peers(self) -> Iterator[tuple[str, Callable[[Tensor], object]]]:
        if self.fp8:
            return
        yield "torch grouped_mm to bf16", lambda b: torch._grouped_mm(self.a.t(), b, offs=self.ends)
        out = torch.empty(self.out.shape, device="cuda", dtype=torch.bfloat16)

        def loop(b: Tensor) -> None:
            parts = zip(self.a.split(self.counts), b.split(self.counts), out, strict=True)
            for left, right, target in parts:
                torch.mm(left.t(), right, out=target)

        yield "loop of torch.mm to bf16", loop


def measure(op: str, shape: Shape) -> dict[str, Any]:
    products, described = Products(op, shape), problem(op, shape)
    times, peers = groups.timed({"us": products.ours}, dict(products.peers()), products.many)
    us = times["us"]
    plan = omnigemm.plan(
        described.op,
        m=described.m,
        n=described.n,
        k=described.k,
        groups=described.groups,
        device="cuda",
        backend="cuda",
        **OPS[op][0],
    )
    return {
        "op": op,
        "shape": "G" + "x".join(map(str, shape)),
        "us": us,
        "floor_us": round(floor_us(described), 2),
        "tflops": round(described.flops / us / 1e6, 1),
        "peers": peers,
        "config": {"kernel": plan.kernel, **plan.config},
    }


def rows(ops: Sequence[str] = tuple(OPS)) -> Iterator[dict[str, Any]]:
    from omnigemm.backends.cuda import CudaBackend, gpu, jit

    wanted = [(op, shape) for op in ops for shape in SHAPES]
    jit.warm({spec for one in wanted for spec in CudaBackend().specs(problem(*one), gpu.of(0))})
    for op, shape in wanted:
        found = measure(op, shape)
        print(op, found["shape"], found["us"], found["floor_us"], found["peers"], found["config"]["kernel"], flush=True)
        torch.cuda.empty_cache()
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="*", default=list(OPS), choices=list(OPS))
    parser.add_argument("--out", type=Path, help="a file for the rows")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/k_groups.py: there is no NVIDIA GPU on this machine")
    found = list(rows(given.op))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
