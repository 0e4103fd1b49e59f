"""Measure gemm beside torch's own products, on one GPU, in one run: device time, and host time of a call.

    python benchmarks/gemm.py --out /tmp/gemm.json
    python benchmarks/gemm.py --op gemm_bf16

A ratio above 1 means that ours is faster: `us` is what dispatch takes, with weights stated to be constant, `us_blas`
the blas backend.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import omnigemm
from omnigemm.bench import graph, host

REPLAY_SECONDS = 0.02
REPLAYS = 8
APART, TIMES = 1.02, 3
METHOD = (
    f"microseconds per call in a CUDA graph that replays calls back to back for at least {REPLAY_SECONDS * 1e3:.0f} "
    f"ms, each call with another copy of the weights (together at least {graph.COLD_BYTES // 10**6} MB, at least 2) "
    f"while activations stay warm; median of {REPLAYS} replays, contenders in turns; random data; where the blas "
    f"backend and torch.mm or torch.bmm, which call one library, come out more than {APART - 1:.0%} apart, all is "
    f"captured and measured {TIMES} times, and medians count"
)
TARGET_RATIO, TARGET_HOST_US = 0.98, 12.0

Call = Callable[[Any], object]
Row = dict[str, Any]


def _shapes(weights: Sequence[tuple[int, int]], rows: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(m, n, k) for n, k in weights for m in rows]


# Layers of a 7168-wide mixture-of-experts model, and of dense models of 8 and 70 billion parameters.
SHAPES = {
    "gemm_bf16": [
        *_shapes(
            ((576, 7168), (2112, 7168), (4096, 7168), (7168, 2048), (7168, 16384), (24576, 1536), (32768, 512)),
            (1, 16, 64, 128, 4096),
        ),
        (8192, 8192, 8192),
    ],
    "gemm_fp16": [
        *_shapes(
            ((6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192)),
            (1, 16, 32, 64, 128, 1024, 4096),
        ),
        (8192, 8192, 8192),
        (8192, 8192, 28672),
    ],
    "gemm_fp32": [(16, 4096, 4096), (1024, 4096, 4096)],
    "gemm_tf32": [(16, 4096, 4096), (1024, 4096, 4096)],
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
BATCHES = [(64, 16, 512, 128), (64, 512, 512, 128), (256, 128, 128, 64), (8, 1024, 1024, 1024)]  # B, M, N, K
# Of each head of attention a product: with latent keys and values in decoding, scores and values in prefill.
HEADS = [
    *((128, m, n, k) for n, k in ((512, 128), (128, 512)) for m in (1, 16, 64, 256)),
    (32, 2048, 2048, 128),
    (32, 2048, 128, 2048),
    *BATCHES,
]
GROUPS = [(32, 20, 4096, 2048), (8, 1024, 4096, 2048)]  # G, M, N, K


def in_turns(contenders: dict[str, Call], copies: Sequence[Any]) -> dict[str, float]:
    return graph.in_turns(contenders, copies, REPLAY_SECONDS, REPLAYS)


def until_level(calls: dict[str, Call], copies: Sequence[Any], alike: tuple[str, str]) -> dict[str, float]:
    """Times of all; medians of several measurements, if two that should take equally long do not."""
    found = [in_turns(calls, copies)]
    one, other = (found[0][name] for name in alike)
    if max(one, other) > APART * min(one, other):
        found += (in_turns(calls, copies) for _ in range(TIMES - 1))
    return {name: statistics.median(times[name] for times in found) for name in calls}


def row(
    op: str, shape: str, times: dict[str, float], floor_us: float | None = None, plan: omnigemm.Plan | None = None
) -> Row:
    peers = {name: round(us, 2) for name, us in times.items() if name.startswith(("torch", "loop"))}
    kernel = {"kernel": "nvidia", "backend": "blas"}
    if plan is not None:
        kernel = {"kernel": plan.kernel, "backend": plan.backend, **plan.config}
    blas = {"us_blas": round(times["blas"], 2)} if "blas" in times else {}
    return {
        "op": op,
        "shape": shape,
        "us": round(times["ours"], 2),
        **blas,
        "floor_us": floor_us,
        "peers": peers,
        "ratio": round(min(peers.values()) / times["ours"], 3),
        "config": kernel,
    }


def single(op: str, m: int, n: int, k: int) -> Row:
    """A linear layer: weights [N, K], read transposed."""
    dtype = DTYPES[op.removeprefix("gemm_")]
    a, out = torch.randn(m, k, device="cuda").to(dtype), torch.empty(m, n, device="cuda", dtype=dtype)
    count = graph.copies_needed(n * k * dtype.itemsize)
    weights = [torch.randn(n, k, device="cuda", dtype=dtype).t() for _ in range(count)]

    def ours(weight: Any) -> None:
        with omnigemm.settings(constant_weights=True):
            omnigemm.gemm(a, weight, out=out)

    calls: dict[str, Call] = {"ours": ours, "torch.mm": lambda weight: torch.mm(a, weight, out=out)}
    with omnigemm.settings(constant_weights=True):
        plan = omnigemm.plan("gemm", m=m, n=n, k=k, dtype=dtype, b_layout="col", device="cuda")
    if plan.backend != "blas":
        calls["blas"] = lambda weight: omnigemm.gemm(a, weight, out=out, backend="blas")
    # What an H200's memory (4.6 TB/s read) and 16-bit tensor cores (790 TFLOP/s) allow.
    floor = max((n * k + m * k + m * n) * 2 / 4.6e6, 2 * m * n * k / 790e6) if dtype.itemsize == 2 else None
    times = until_level(calls, weights, ("blas" if "blas" in calls else "ours", "torch.mm"))
    return row(op, f"{m}x{n}x{k}", times, None if floor is None else round(floor, 2), plan)


def batched(batch: int, m: int, n: int, k: int) -> Row:
    """alpha A B + beta C with another C than the result, which cuBLASLt reads in its own place; without it, C is
    copied first."""
    dtype = torch.bfloat16
    a, c = torch.randn(batch, m, k, device="cuda").to(dtype), torch.randn(batch, m, n, device="cuda").to(dtype)
    out = torch.empty_like(c)
    count = graph.copies_needed(batch * n * k * dtype.itemsize)
    others = [torch.randn(batch, k, n, device="cuda", dtype=dtype) for _ in range(count)]
    calls: dict[str, Call] = {
        "ours": lambda b: omnigemm.gemm(a, b, c, alpha=0.5, beta=2.0, out=out, backend="blas"),
        "torch.baddbmm": lambda b: torch.baddbmm(c, a, b, alpha=0.5, beta=2.0, out=out),
    }
    return row("baddbmm_bf16", f"B{batch}x{m}x{n}x{k}", in_turns(calls, others))


def heads(batch: int, m: int, n: int, k: int) -> Row:
    """A product for each head, with a B whose rows are K long."""
    a = torch.randn(batch, m, k, device="cuda").bfloat16()
    out = torch.empty(batch, m, n, device="cuda", dtype=torch.bfloat16)
    count = graph.copies_needed(batch * n * k * 2)
    others = [torch.randn(batch, n, k, device="cuda", dtype=torch.bfloat16).mT for _ in range(count)]
    calls: dict[str, Call] = {
        "ours": lambda b: omnigemm.gemm(a, b, out=out),
        "blas": lambda b: omnigemm.gemm(a, b, out=out, backend="blas"),
        "torch.bmm": lambda b: torch.bmm(a, b, out=out),
    }
    plan = omnigemm.plan("gemm", batch=batch, m=m, n=n, k=k, dtype="bf16", b_layout="col", device="cuda")
    floor = max(batch * (n * k + m * k + m * n) * 2 / 4.6e6, 2 * batch * m * n * k / 790e6)
    times = until_level(calls, others, ("blas", "torch.bmm"))
    return row("bmm_bf16", f"B{batch}x{m}x{n}x{k}", times, round(floor, 2), plan)


def grouped(groups: int, m: int, n: int, k: int) -> Row:
    """Eager, because a graph takes a loop: device time from the first to the last of ten calls in a row."""
    a = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(groups)]
    b = [torch.randn(n, k, device="cuda").bfloat16().t() for _ in range(groups)]
    out = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(groups)]

    def loop() -> None:
        for x, y, z in zip(a, b, out, strict=True):
            torch.mm(x, y, out=z)

    calls = {"ours": lambda: omnigemm.grouped_gemm(a, b, out=out, backend="blas"), "loop of torch.mm": loop}
    times: dict[str, list[float]] = {name: [] for name in calls}
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(6):
        for name, call in calls.items():
            start.record()
            for _ in range(10):
                call()
            stop.record()
            stop.synchronize()
            if turn:  # the first one warms up
                times[name].append(start.elapsed_time(stop) * 1e2)
    return row(
        "grouped_bf16 (eager)",
        f"G{groups}x{m}x{n}x{k}",
        {name: statistics.median(taken) for name, taken in times.items()},
    )


def host_us() -> dict[str, float]:
    """Of warm eager calls."""
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((16, 512), (512, 512)))
    out, c = torch.empty(16, 512, device="cuda", dtype=torch.bfloat16), torch.randn(16, 512, device="cuda").bfloat16()
    weight = b.t()
    # cuBLAS may split K of the product above, and add the parts up in a second kernel; here it has no reason to.
    short, short_weight = a[:, :64].contiguous(), b[:, :64].contiguous().t()
    wide, wide_weight, wide_out = a.float(), weight.float(), out.float()
    three = a.expand(4, 16, 512), torch.randn(4, 512, 512, device="cuda").bfloat16()
    three_out = torch.empty(4, 16, 512, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "gemm, out=": lambda: omnigemm.gemm(a, weight, out=out),
        "gemm by blas, out=": lambda: omnigemm.gemm(a, weight, out=out, backend="blas"),
        "torch.mm, out=": lambda: torch.mm(a, weight, out=out),
        "gemm by blas, K = 64, out=": lambda: omnigemm.gemm(short, short_weight, out=out, backend="blas"),
        "torch.mm, K = 64, out=": lambda: torch.mm(short, short_weight, out=out),
        "gemm": lambda: omnigemm.gemm(a, weight),
        "torch.mm": lambda: torch.mm(a, weight),
        "gemm fp32, out=": lambda: omnigemm.gemm(wide, wide_weight, out=wide_out),
        "torch.mm fp32, out=": lambda: torch.mm(wide, wide_weight, out=wide_out),
        "gemm, C is out": lambda: omnigemm.gemm(a, weight, out, alpha=0.5, beta=0.5, out=out),
        # Called so in all records; our kernels and cuBLASLt read C in its own place.
        "gemm, C copied": lambda: omnigemm.gemm(a, weight, c, beta=0.5, out=out),
        "gemm by blas, C is out": lambda: omnigemm.gemm(a, weight, out, alpha=0.5, beta=0.5, out=out, backend="blas"),
        "gemm by blas, another C": lambda: omnigemm.gemm(a, weight, c, beta=0.5, out=out, backend="blas"),
        "torch.addmm, out=": lambda: torch.addmm(c, a, weight, beta=0.5, out=out),
        "gemm by blas, batch, out=": lambda: omnigemm.gemm(*three, out=three_out, backend="blas"),
        "torch.bmm, out=": lambda: torch.bmm(*three, out=three_out),
        "gemm, batch": lambda: omnigemm.gemm(*three),
        "gemm by blas, batch": lambda: omnigemm.gemm(*three, backend="blas"),
        "torch.bmm": lambda: torch.bmm(*three),
    }
    return host.in_turns(calls)


def measure(ops: Sequence[str] | None) -> Iterator[Row]:
    for op, shapes in SHAPES.items():
        if ops is None or op in ops:
            torch.backends.cuda.matmul.allow_tf32 = op == "gemm_tf32"
            for shape in shapes:
                yield single(op, *shape)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ops is None or "baddbmm_bf16" in ops:
        yield from (batched(*shape) for shape in BATCHES)
    if ops is None or "bmm_bf16" in ops:
        yield from (heads(*shape) for shape in HEADS)
    if ops is None or "grouped_bf16" in ops:
        yield from (grouped(*shape) for shape in GROUPS)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    for op in dict.fromkeys(one["op"] for one in rows):
        ratios = sorted((one["ratio"], one["shape"]) for one in rows if one["op"] == op)
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
        below = sum(ratio < TARGET_RATIO for ratio, _ in ratios)
        yield (
            f"{op:22s} {len(ratios):3d} shapes: ratio {mean:.3f} in the geometric mean, worst {ratios[0][0]:.3f} at "
            f"{ratios[0][1]}, {below} below {TARGET_RATIO}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SHAPES, "baddbmm_bf16", "bmm_bf16", "grouped_bf16"]
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--op", action="append", choices=names, help="measure only this; repeat for several")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gemm.py: there is no NVIDIA GPU on this machine")
    begin = time.perf_counter()
    found = omnigemm.explain("gemm", m=16, n=576, k=7168, device="cuda")
    print(found, flush=True)
    hosts = host_us()
    for name, us in hosts.items():
        print(f"host time, {name:20s} {us:6.2f} us")
    worst = max(us for name, us in hosts.items() if not name.startswith("torch"))
    print(f"worst of ours: {worst} us (target {TARGET_HOST_US})\n\n{'op':22s} {'shape':20s} {'us':>9s}  ratio  peers")
    rows: list[Row] = []
    for one in measure(given.op):
        rows.append(one)
        print(f"{one['op']:22s} {one['shape']:20s} {one['us']:9.2f}  {one['ratio']:.3f}  {one['peers']}", flush=True)
    print()
    for line in summary(rows):
        print(line)
    print(f"took {time.perf_counter() - begin:.0f} s")
    if given.out is not None:
        record = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "library": next(one.reason for one in found.candidates if one.backend == "blas"),
            "method": METHOD,
            "host_us": hosts,
            "rows": rows,
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
