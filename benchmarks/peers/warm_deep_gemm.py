"""Compile the kernels of deep_gemm that benchmarks/gpu.py measures, side by side, on the GPU that is here.

    python benchmarks/peers/warm_deep_gemm.py

It compiles a kernel by nvcc when a product of that shape is first called, for some ten seconds, and keeps it on disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks, also in the processes that are started


def single(m: int, n: int, k: int) -> None:
    import gpu

    made = gpu.Products("fp8_block", m, n, k)
    made.deep_gemms(made.weights[0])


def grouped(op: str, *shape: int) -> None:
    import groups

    made = groups.Products(op, shape)
    made.deep_gemms()(made.weights[0])


def calls() -> Iterator[Callable[[], None]]:
    """The products, whose operands are made when they are called."""
    import groups

    import gpu

    yield from (partial(single, *shape) for shape in gpu.SHAPES)
    yield from (partial(grouped, op, *shape) for op, shape in groups.cases("fp8_block"))


def work(part: int, parts: int) -> None:
    """Every so-manieth of the products; what fails is printed, and is for the benchmark to leave out."""
    import groups
    import torch

    from omnigemm.bench import graph

    # Values do not matter here, and random ones take longer.
    def zeros(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=torch.uint8).view(dtype)

    groups.values = zeros
    graph.copies_needed = lambda nbytes: 1
    for call in islice(calls(), part, None, parts):
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
    jobs = parser.parse_args().jobs
    if jobs < 1:
        parser.error(f"--jobs is {jobs}, expected at least 1")
    missing = gpu.peers_missing(["deep_gemm"])
    if missing:
        parser.error(missing)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes = [context.Process(target=work, args=(i, jobs)) for i in range(jobs)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    died = sum(one.exitcode != 0 for one in processes)
    if died:
        sys.exit(f"benchmarks/peers/warm_deep_gemm.py: {died} of {jobs} processes died")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
