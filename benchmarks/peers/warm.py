"""Compile the kernels of deep_gemm and humming that benchmarks/gpu.py measures, side by side, on the GPU that is here.

    python benchmarks/peers/warm.py
    python benchmarks/peers/warm.py --peer deep_gemm

They compile a kernel when a product of that shape is first called, deep_gemm by nvcc for some ten seconds, and keep it
on disk. Without --peer, those are compiled that can be imported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks, also in the processes that are started


def single(m: int, n: int, k: int) -> None:
    import gpu

    made = gpu.Products("fp8_block", m, n, k)
    made.deep_gemms(made.weights[0])


def humming_fp8(m: int, n: int, k: int) -> None:
    import gpu

    made = gpu.Products("fp8_block", m, n, k)
    made.hummings()(made.weights[0])


def humming_int8(m: int, n: int, k: int) -> None:
    import torch
    from peers.humming_w8a8 import Humming

    a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (m, n))
    a_scale, b_scale = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    Humming(a, a_scale, b_scale, torch.empty(m, n, device="cuda", dtype=torch.bfloat16))(b)


def grouped(op: str, *shape: int) -> None:
    import groups

    made = groups.Products(op, shape)
    made.deep_gemms()(made.weights[0])


def calls(peers: Sequence[str]) -> Iterator[Callable[[], None]]:
    """The products, whose operands are made when they are called."""
    import groups

    import gpu

    if "deep_gemm" in peers:
        yield from (partial(single, *shape) for shape in gpu.SHAPES)
        yield from (partial(grouped, op, *shape) for op, shape in groups.cases("fp8_block"))
    if "humming" in peers:
        yield from (partial(humming_fp8, *shape) for shape in gpu.SHAPES)
        yield from (partial(humming_int8, *shape) for shape in gpu.INT8_SHAPES)


def work(peers: Sequence[str], part: int, parts: int) -> None:
    """Every so-manieth of the products; what fails is printed, and is for the benchmark to leave out."""
    import groups
    import torch

    from omnigemm.bench import graph

    # Values do not matter here, and random ones take longer.
    def zeros(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=torch.uint8).view(dtype)

    groups.values = zeros
    graph.copies_needed = lambda nbytes: 1
    for call in islice(calls(peers), part, None, parts):
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{call}: {error!r}"[:300], flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    import gpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--peer", action="append", choices=list(gpu.PEERS), help="repeat for several")
    given = parser.parse_args()
    jobs = given.jobs
    if jobs < 1:
        parser.error(f"--jobs is {jobs}, expected at least 1")
    missing = {module: why for module in given.peer or gpu.PEERS if (why := gpu.peers_missing([module]))}
    peers = [module for module in given.peer or gpu.PEERS if module not in missing]
    if missing and (given.peer or not peers):
        parser.error("; ".join(missing.values()))
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes = [context.Process(target=work, args=(peers, i, jobs)) for i in range(jobs)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    died = sum(one.exitcode != 0 for one in processes)
    if died:
        sys.exit(f"benchmarks/peers/warm.py: {died} of {jobs} processes died")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
