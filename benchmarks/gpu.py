"""Run the GPU tests, measure the GPU kernels, and write benchmarks/records/<gpu-name>.json.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --out /tmp/records

So far there is one kernel: fp8 with block scales for many rows, on Hopper.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
# M x N x K of op fp8_block: the layers of a 7168-wide mixture-of-experts model in prefill, and a square.
SHAPES = (
    (4096, 576, 7168),
    (4096, 2112, 7168),
    (4096, 4096, 7168),
    (4096, 7168, 2048),
    (4096, 7168, 16384),
    (4096, 24576, 1536),
    (4096, 32768, 512),
    (8192, 8192, 8192),
)


def floor_us(m: int, n: int, k: int) -> float:
    """What an H200's memory (4.6 TB/s read) and fp8 tensor cores (1580 TFLOP/s) allow."""
    return max((n * k + m * k + 2 * m * n) / 4.6e6, 2 * m * n * k / 1580e6)


def run_tests() -> dict[str, int]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "tests/gpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped)", run.stdout.splitlines()[-1])}
    print(run.stdout.splitlines()[-1])
    if run.returncode != 0:
        sys.exit("benchmarks/gpu.py: the GPU tests fail; no record is written")
    return {word: counts.get(word, 0) for word in ("passed", "failed", "skipped")}


def measure(m: int, n: int, k: int) -> dict[str, Any]:
    import torch

    from omnigemm.backends.cuda import sm90
    from omnigemm.backends.cuda.fp8_block import multiply
    from omnigemm.bench import graph

    blocks = -(-k // 128)
    copies = []
    for _ in range(graph.copies_needed(n * k)):
        a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.rand(m, blocks, device="cuda") + 0.5, torch.rand(-(-n // 128), blocks, device="cuda") + 0.5
        copies.append((a if not copies else copies[0][0], b, *scales))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    times = {config: graph.microseconds(lambda c, x=config: multiply(x, *c, out), copies) for config in sm90.configs()}
    rows, columns = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
    peer = graph.microseconds(
        lambda c: torch._scaled_mm(c[0], c[1].t(), rows, columns, out_dtype=torch.bfloat16), copies
    )
    best = min(times, key=lambda config: times[config])
    return {
        "op": "fp8_block",
        "shape": f"{m}x{n}x{k}",
        "us": round(times[best], 2),
        "floor_us": round(floor_us(m, n, k), 2),
        "peers": {"torch scaled_mm rowwise (cuBLASLt)": round(peer, 2)},
        "config": {"kernel": sm90.KERNEL, "block_n": best.block_n, "stages": best.stages, "band": best.band},
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = ROOT / "benchmarks" / "records",
) -> None:
    """Test and measure the GPU kernels on this machine."""
    import torch

    from omnigemm.bench import graph, record

    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: there is no NVIDIA GPU on this machine")
    tests = run_tests()
    rows = []
    for shape in SHAPES:
        rows.append(measure(*shape))
        print(rows[-1]["shape"], rows[-1]["us"], "us,", rows[-1]["peers"], rows[-1]["config"], flush=True)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    made = record.new(rows, graph.METHOD, record.cuda_source_hash())
    made["gpu"] = torch.cuda.get_device_name(0)
    made["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    made["tests"] = tests
    record.write(out / record.file_name(made["gpu"]), made)


if __name__ == "__main__":
    typer.run(main)
