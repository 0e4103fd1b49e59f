"""Measure the quantisers on one GPU: device time in a CUDA graph, bandwidth beside that of a copy, host time of a call.

    python benchmarks/quant.py
    python benchmarks/quant.py --out /tmp/quant.json --form fp8

GB/s count every byte that the kernels must move: inputs once (per tensor twice, because nothing is known of the first
value before the last is read), codes and scales once. Of a peer, torch's own operations on the same GPU, which give the
same bits, the time is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import omnigemm
from omnigemm.bench import graph, host

COPY_GBPS = 4260.0  # what torch's copy_ reaches on an H200, bytes read and written
TARGET_FRACTION, TARGET_US = 0.80, 3.0
REPLAY_SECONDS, REPLAYS = 0.01, 5
LARGE, SMALL = (8192, 8192), (64, 7168)
METHOD = (
    f"microseconds per call in a CUDA graph that replays calls back to back for at least {REPLAY_SECONDS * 1e3:.0f} "
    f"ms; large inputs differ from call to call (together at least {graph.COLD_BYTES // 10**6} MB, at least 2) and "
    f"come from memory, small ones stay warm, as after the kernel that wrote them; median of {REPLAYS} replays; "
    f"weights of RMSNorm stated to be constant; floor: the bytes that must be moved at {COPY_GBPS:.0f} GB/s"
)

Row = dict[str, Any]
Form = tuple[Callable[[Tensor], object], int, float]  # the call, columns of x for one of the result, reads of x


def forms() -> dict[str, Form]:
    weights: dict[int, Tensor] = {}
    sums: dict[tuple[int, ...], Tensor] = {}

    # Made once: in a graph, a kernel that fills them would be part of every call.
    def weight(x: Tensor) -> Tensor:
        if x.size(-1) not in weights:
            weights[x.size(-1)] = torch.randn(x.size(-1), device="cuda").to(x.dtype)
        return weights[x.size(-1)]

    def residual(x: Tensor) -> Tensor:
        if tuple(x.shape) not in sums:
            sums[tuple(x.shape)] = torch.zeros_like(x)
        return sums[tuple(x.shape)]

    int8, fp8, norm, glu = (
        omnigemm.quantize_int8,
        omnigemm.quantize_fp8,
        omnigemm.rms_norm_quantize,
        omnigemm.swiglu_quantize,
    )
    return {
        "int8 token": (lambda x: int8(x), 1, 1.0),
        "int8 token, zero points": (lambda x: int8(x, symmetric=False), 1, 1.0),
        "int8 tensor": (lambda x: int8(x, granularity="tensor"), 1, 2.0),
        "fp8 token": (lambda x: fp8(x, granularity="token"), 1, 1.0),
        "fp8 tensor": (lambda x: fp8(x, granularity="tensor"), 1, 2.0),
        "fp8 1x128": (lambda x: fp8(x, granularity="1x128"), 1, 1.0),
        "fp8 128x128": (lambda x: fp8(x, granularity="128x128"), 1, 1.0),
        "fp8 1x128, e5m2": (lambda x: fp8(x, granularity="1x128", dtype=torch.float8_e5m2), 1, 1.0),
        "rms_norm fp8 token": (lambda x: norm(x, weight(x)), 1, 1.0),
        "rms_norm fp8 1x128": (lambda x: norm(x, weight(x), granularity="1x128"), 1, 1.0),
        "rms_norm int8 token": (lambda x: norm(x, weight(x), dtype=torch.int8), 1, 1.0),
        # x and the residual are read, and the sum is written.
        "rms_norm fp8 1x128, residual": (
            lambda x: norm(x, weight(x), residual=residual(x), granularity="1x128"),
            1,
            3.0,
        ),
        "swiglu fp8 token": (lambda x: glu(x), 2, 1.0),
        "swiglu fp8 1x128": (lambda x: glu(x, granularity="1x128"), 2, 1.0),
        "swiglu int8 token": (lambda x: glu(x, dtype=torch.int8), 2, 1.0),
    }


def by_torch(call: Callable[[Tensor], object], x: Tensor) -> object:
    """The same without our kernels: they make way for whoever looks at torch's functions."""
    with torch.overrides.BaseTorchFunctionMode():
        return call(x)


def timed(call: Callable[[Any], object], inputs: list[Tensor]) -> float:
    return graph.microseconds(call, inputs, REPLAY_SECONDS, REPLAYS)


def measure(name: str, form: Form, shape: tuple[int, int], dtype: torch.dtype) -> Row:
    call, columns, reads = form
    m, k = shape
    nbytes = m * k * columns * dtype.itemsize
    count = graph.copies_needed(nbytes) if shape == LARGE else 1
    inputs = [torch.randn(m, k * columns, device="cuda").to(dtype) for _ in range(count)]
    with omnigemm.settings(constant_weights=True):  # those of RMSNorm
        us = timed(call, inputs)
    moved = nbytes * reads + m * k
    # Torch's RMSNorm here sums in fp64, and is nobody's peer.
    peers = {} if columns > 1 or "norm" in name else {"torch": timed(lambda x: by_torch(call, x), inputs[:2])}
    return {
        "op": name,
        "shape": f"{m}x{k}",
        "us": round(us, 2),
        "floor_us": round(moved / COPY_GBPS / 1e3, 2),
        "peers": {peer: round(taken, 2) for peer, taken in peers.items()},
        "config": {"backend": "quant", "dtype": str(dtype).removeprefix("torch."), "gbps": round(moved / us / 1e3)},
    }


def copy_gbps() -> float:
    """The copy of this run: as many bytes as the largest input, read and written."""
    inputs = [torch.randn(LARGE, device="cuda").bfloat16() for _ in range(2)]
    target = torch.empty_like(inputs[0])
    return 2 * target.nbytes / timed(target.copy_, inputs) / 1e3


def host_us() -> dict[str, float]:
    """Of warm eager calls."""
    x = torch.randn(16, 1024, device="cuda").bfloat16()
    names = "int8 token", "fp8 1x128", "fp8 tensor", "rms_norm fp8 1x128"
    return host.in_turns({name: partial(forms()[name][0], x) for name in names})


def rows(only: str) -> Iterator[Row]:
    for name, form in forms().items():
        if only in name:
            yield measure(name, form, LARGE, torch.bfloat16)
            yield measure(name, form, SMALL, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        for name in ("int8 token", "fp8 1x128"):
            if only in name:
                yield measure(name, forms()[name], LARGE, dtype)


def verdict(row: Row) -> str:
    if row["shape"] == "x".join(map(str, LARGE)):
        return "" if row["floor_us"] >= TARGET_FRACTION * row["us"] else f"below {TARGET_FRACTION:.0%} of a copy"
    return "" if row["us"] <= TARGET_US else f"above {TARGET_US} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--form", default="", help="measure only forms with this in their name")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/quant.py: there is no NVIDIA GPU on this machine")
    begin = time.perf_counter()
    copied = copy_gbps()
    print(f"a copy of {LARGE[0]}x{LARGE[1]} bf16 moves {copied:.0f} GB/s; the target counts {COPY_GBPS:.0f}")
    print(f"\n{'form':30s} {'shape':10s} {'dtype':9s} {'us':>8s} {'GB/s':>6s} {'of copy':>8s} {'torch us':>9s}")
    found = []
    for row in rows(given.form):
        found.append(row)
        dtype, gbps, peer = row["config"]["dtype"], row["config"]["gbps"], row["peers"].get("torch", "")
        share = row["floor_us"] / row["us"]
        print(
            f"{row['op']:30s} {row['shape']:10s} {dtype:9s} {row['us']:8.2f} {gbps:6d} {share:8.1%} {peer:>9}  "
            f"{verdict(row)}",
            flush=True,
        )
    host = host_us()
    print("\nhost time of a warm call, us:", host)
    print(f"took {time.perf_counter() - begin:.0f} s")
    if given.out is not None:
        record = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "method": METHOD,
            "copy_gbps": round(copied),
            "host_us": host,
            "rows": found,
        }
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
