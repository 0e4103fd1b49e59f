"""The support table of the docs, asked of the backends themselves.

`python -m omnigemm.core.support` prints it; a test compares it with docs/support.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from .dispatch import Support
from .problem import OPERANDS, Problem, describe, granularities

_HEADER = """# What runs where

Generated from the backends' own `supports` by `python -m omnigemm.core.support`; do not edit. A cell holds the output
types. Shapes, strides and alignment never decide: any M, N, K >= 0 runs.

"""


def _problems() -> Iterator[tuple[str, str, str, Problem]]:
    """A usual problem of each kind: operation, operands, scales."""
    for op, dtypes in OPERANDS.items():
        for dtype in dtypes:
            if op == "int4_gemm":
                continue
            if dtype in ("e4m3", "e5m2", "int8"):
                for kind in granularities(op, dtype):
                    yield op, dtype, kind, describe(op, m=16, n=256, k=512, dtype=dtype, granularity=kind)
            else:
                yield op, dtype, "none", describe(op, m=16, n=256, k=512, dtype=dtype)
        if op == "grouped_gemm":
            for dtype in dtypes:
                problem = describe(op, m=16, n=256, k=512, dtype=dtype, device_sizes=True)
                yield f"{op} with sizes", dtype, "none", problem
        if op in ("int4_gemm", "grouped_gemm_contiguous", "grouped_gemm_masked"):
            for dtype in ("fp16", "bf16"):
                for size in (32, 64, 128, -1):
                    name = f"groups of {size}" if size > 0 else "whole K"
                    problem = describe(
                        op, m=16, n=256, k=512, dtype=dtype, weight_dtype="int4", group_size=size, symmetric=False
                    )
                    yield op, f"{dtype} x int4", name, problem


def table() -> str:
    """Markdown: a row per kind of problem, a column per backend, in each cell the output types it can write."""
    from ..backends import backends
    from ..backends.blas import takes
    from ..backends.blas.vendors import VENDORS
    from ..backends.cuda.gpu import KNOWN

    def answer(backend: Any, problem: Problem) -> Support:
        # A machine need not have a GPU to say what would run on one.
        if backend.name == "cuda":
            return backend.supports_on(problem, KNOWN["h200"])  # type: ignore[no-any-return]
        if backend.name == "blas":
            return takes(VENDORS["nvidia"], problem)
        return backend.supports(problem, torch.device("cpu"))  # type: ignore[no-any-return]

    names = [
        {"cuda": "cuda (sm_90)", "blas": "blas (cuBLAS)"}.get(backend.name, backend.name) for backend in backends()
    ]
    lines = [
        "| operation | operands | scales | " + " | ".join(names) + " |",
        "| --- | --- | --- |" + " --- |" * len(names),
    ]
    for op, operands, scales, problem in _problems():
        cells = []
        for backend in backends():
            outputs = (dataclasses.replace(problem, out_dtype=out) for out in ("fp16", "bf16", "fp32"))
            cells.append(", ".join(one.out_dtype for one in outputs if answer(backend, one)) or "no")
        lines.append(f"| {op} | {operands} | {scales} | " + " | ".join(cells) + " |")
    return _HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
