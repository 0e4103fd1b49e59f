"""Measure grouped_gemm on lists of random products on one GPU, beside a loop of torch.mm and one dense product.

    python benchmarks/lists.py
    python benchmarks/lists.py --groups 10 50 --layout row

M, N and K of each product are multiples of 8 between 64 and 8192, drawn at random. The dense product has as many
operations as the whole list. All run in CUDA graphs, in turns; the host's time for a call is measured beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import omnigemm
from omnigemm.bench import graph
from omnigemm.core.problem import Problem, describe

GROUPS = (10, 50, 200, 500)
LAYOUTS = ("col", "row")
OP = "grouped_list_bf16"
METHOD = (
    "M, N, K of each product multiples of 8 from 64 to 8192 at random, K of B innermost unless the shape says [K, N]; "
    "the dense product is torch.mm with N = K = 8192 and as many operations"
)
_DENSE = 8192
_HOST_CALLS = 5

Shape = tuple[int, int, int]


def shapes(count: int, low: int = 64, high: int = 8192) -> list[Shape]:
    source = random.Random(count)
    return [tuple(source.randrange(low, high + 1, 8) for _ in range(3)) for _ in range(count)]  # type: ignore[misc]


def problem(sizes: list[Shape], layout: str) -> Problem:
    return describe("grouped_gemm", m=0, n=0, k=0, shapes=sizes, dtype="bf16", b_layout=layout)


def problems(groups: Sequence[int] = GROUPS, layouts: Sequence[str] = LAYOUTS) -> list[Problem]:
    return [problem(shapes(count), layout) for layout, count in itertools.product(layouts, groups)]


def values(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


class Lists:
    """Random operands."""

    def __init__(self, sizes: list[Shape], layout: str) -> None:
        self.a = [values(m, k) for m, _, k in sizes]
        self.b = [values(n, k).t() if layout == "col" else values(k, n) for _, n, k in sizes]
        self.out = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for m, n, _ in sizes]
        self.flops = sum(2 * m * n * k for m, n, k in sizes)
        rows = max(1, round(self.flops / (2 * _DENSE * _DENSE)))
        self.dense = values(rows, _DENSE), values(_DENSE, _DENSE).t(), values(rows, _DENSE)

    def ours(self, _: Any = None) -> None:
        omnigemm.grouped_gemm(self.a, self.b, out=self.out, backend="cuda")

    def loop(self, _: Any = None) -> None:
        for a, b, out in zip(self.a, self.b, self.out, strict=True):
            torch.mm(a, b, out=out)

    def one(self, _: Any = None) -> None:
        a, b, out = self.dense
        torch.mm(a, b, out=out)


def host_us(call: Any) -> float:
    """Of a warm call, while the device has other things to do."""
    call()
    taken = []
    for _ in range(_HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(min(taken) * 1e6, 1)


def measure(count: int, layout: str) -> dict[str, Any]:
    sizes = shapes(count)
    made = Lists(sizes, layout)
    contenders = {"ours": made.ours, "loop of torch.mm": made.loop, "one dense torch.mm": made.one}
    times = graph.in_turns(contenders, [0])
    ours = times.pop("ours")
    plan = omnigemm.plan(
        "grouped_gemm", m=0, n=0, k=0, shapes=sizes, dtype="bf16", b_layout=layout, device="cuda", backend="cuda"
    )
    return {
        "op": OP,
        "shape": f"G{count}{'' if layout == 'col' else ' [K, N]'}",
        "us": round(ours, 2),
        "floor_us": round(made.flops / 800e6, 2),
        "tflops": round(made.flops / ours / 1e6, 1),
        "peers": {name: round(one, 2) for name, one in times.items()},
        "host_us": {"ours": host_us(made.ours), "loop of torch.mm": host_us(made.loop)},
        "config": {"kernel": plan.kernel, **plan.config},
    }


def rows(groups: Sequence[int] = GROUPS, layouts: Sequence[str] = LAYOUTS) -> list[dict[str, Any]]:
    from omnigemm.backends.cuda import CudaBackend, gpu, jit

    jit.warm({spec for one in problems(groups, layouts) for spec in CudaBackend().specs(one, gpu.of(0))})
    found = []
    for layout, count in itertools.product(layouts, groups):
        one = measure(count, layout)
        dense = one["peers"]["one dense torch.mm"]
        print(one["shape"], one["us"], f"{one['us'] / dense:.3f} of dense", one["peers"], one["host_us"], flush=True)
        found.append(one)
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="*", default=list(GROUPS))
    parser.add_argument("--layout", nargs="*", default=["col", "row"], help="of B, [K, N]: col has K innermost")
    parser.add_argument("--out", type=Path, help="a file for the rows")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/lists.py: there is no NVIDIA GPU on this machine")
    found = rows(tuple(given.groups), tuple(given.layout))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
