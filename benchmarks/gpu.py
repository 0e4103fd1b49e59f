"""Run the GPU tests, measure the GPU kernels beside their peers, and write benchmarks/records/<gpu-name>.json.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --out /tmp/records --op fp8_block
    python benchmarks/gpu.py --compile-only h200    # without a GPU: what would be compiled, into the kernel cache

Weights are stated to be constant, as they are in a model (`omnigemm.settings(constant_weights=True)`): `us` of a row is
that. With few rows, `us_any_weights` is the time without that statement. Peers are torch's own products; for int8 also
CUTLASS, from the library that peers/build.py makes (--cutlass). deep_gemm (block scales) and humming (block scales and
int8), if they can be imported, are measured in turns with ours alone: `pairs` of a row has both times. --peer deep_gemm
asks that it can be imported; peers/warm.py compiles their kernels side by side.
The rows of gemm come from benchmarks/gemm.py, the quantisers' from benchmarks/quant.py, those of groups from
benchmarks/groups.py.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from peers.cutlass_int8 import CutlassInt8

    from omnigemm.backends.cuda.gpu import Gpu
    from omnigemm.backends.cuda.jit import KernelSpec, Result
    from omnigemm.core.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
# N x K of the layers of a 7168-wide mixture-of-experts model.
WEIGHTS = ((576, 7168), (2112, 7168), (4096, 7168), (7168, 2048), (7168, 16384), (24576, 1536), (32768, 512))
ROWS = (1, 16, 64, 128, 4096)
FEW = 128
SIFT_SECONDS, SIFT_REPLAYS = 0.004, 4  # for a peer's configs, of which the fastest is measured
TESTS_AT_ONCE = 10
# These begin first.
LONGEST = tuple(
    f"test_{name}.py"
    for name in ("fp32_results", "batches", "fused_quantizers", "grouped_cuda", "grouped_configs", "fp8_configs")
)
SLOWEST = 6  # kernels that are compiled again by themselves
SAVE_SECONDS = 15.0  # after which what was measured is written, whatever may happen to the rest


def few_rows_first(*shapes: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """So that these are not measured on a chip that is hot from many rows."""
    return tuple(sorted(shapes, key=lambda shape: shape[0] > FEW))


SHAPES = few_rows_first(*((m, n, k) for n, k in WEIGHTS for m in ROWS), (8192, 8192, 8192))
GRANULARITIES = {"fp8_block": "128x128", "fp8_token": "token", "fp8_tensor": "tensor"}
# Of dense models of 8 and 70 billion parameters.
INT8_WEIGHTS = ((6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192))
INT8_SHAPES = few_rows_first(
    *((m, n, k) for n, k in INT8_WEIGHTS for m in (1, 16, 32, 64, 128, 1024, 4096)),
    (8192, 8192, 8192),
    (8192, 8192, 28672),
)

# Of what benchmarks/k_groups.py and benchmarks/lists.py can measure.
K_GROUPS = ("grouped_k_bf16", "grouped_k_bf16_add", "grouped_k_fp8_add")
LIST_LAYOUTS = ("col",)


def floor_us(m: int, n: int, k: int) -> float:
    """What an H200's memory (4.6 TB/s read) and fp8 tensor cores (1580 TFLOP/s) allow."""
    return max((n * k + m * k + 2 * m * n) / 4.6e6, 2 * m * n * k / 1580e6)


def run_tests() -> dict[str, int]:
    """Each file in a process of its own, some at a time: most of the time goes into compiling."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda path: path.name not in LONGEST)
    with ThreadPoolExecutor(TESTS_AT_ONCE) as pool:
        counts = list(pool.map(run_file, files))
    total = {word: sum(one.get(word, 0) for one in counts) for word in ("passed", "failed", "skipped")}
    print(total, flush=True)
    if not all(one.get("passed") and not one.get("failed") and not one.get("error") for one in counts):
        sys.exit("benchmarks/gpu.py: the GPU tests fail; no record is written")
    return total


def run_file(path: Path) -> dict[str, int]:
    """How many tests passed and so on; what failed is printed."""
    # The project's own options are set aside: they leave out the line that counts.
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib", "--tb=short", "-q"]
    threads = max(1, (os.cpu_count() or 1) // TESTS_AT_ONCE)  # what they compare with is computed on the processor
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    last = next((line for line in reversed(run.stdout.splitlines()) if " in " in line), "")
    counts = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)}
    print(path.name, last, flush=True)
    if run.returncode != 0:
        counts["error"] = counts.get("error", 0) + 1
        print(run.stdout[-40000:], run.stderr[-1000:], flush=True)
    return counts


class Products:
    """Random operands of one shape, with scales of one granularity."""

    def __init__(self, op: str, m: int, n: int, k: int) -> None:
        import torch

        from omnigemm.bench import graph

        blocks = -(-k // 128)
        fp8 = torch.float8_e4m3fn
        self.a = torch.randn(m, k, device="cuda").to(fp8)
        self.weights = [torch.randn(n, k, device="cuda").to(fp8) for _ in range(graph.copies_needed(n * k))]
        sizes = {
            "fp8_block": ((m, blocks), (-(-n // 128), blocks)),
            "fp8_token": ((m,), (n,)),
            "fp8_tensor": ((), ()),
        }[op]
        self.block = op == "fp8_block"
        self.a_scale, self.b_scale = (torch.rand(size, device="cuda") + 0.5 for size in sizes)
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def ours(self, weight: Any) -> None:
        import omnigemm

        omnigemm.fp8_gemm(self.a, weight, self.a_scale, self.b_scale, out=self.out)

    def peers(self) -> dict[str, Callable[[Any], object]]:
        """Per token and per tensor are the same product, so each is measured beside the other's peer as well."""
        import torch

        if self.block:
            return {"torch scaled_mm 1x128/128x128 (cuBLASLt)": self.torchs_blocks}
        rows, columns, one = (torch.rand(size, device="cuda") for size in ((len(self.a), 1), (1, self.out.size(1)), ()))
        return {
            "torch scaled_mm rowwise": lambda weight: torch._scaled_mm(
                self.a, weight.t(), rows, columns, out_dtype=torch.bfloat16
            ),
            "torch scaled_mm tensorwise (cuBLASLt)": lambda weight: torch._scaled_mm(
                self.a, weight.t(), one, one, out_dtype=torch.bfloat16
            ),
        }

    def torchs_blocks(self, weight: Any) -> None:
        """Its scales of A lie with M innermost; turning them is part of what its user must run."""
        import torch

        turned = self.a_scale.t().contiguous().t()
        torch._scaled_mm(self.a, weight.t(), turned, self.b_scale.t(), out_dtype=torch.bfloat16)

    def deep_gemms(self, weight: Any) -> None:
        importlib.import_module("deep_gemm").fp8_gemm_nt((self.a, self.a_scale), (weight, self.b_scale), self.out)

    def hummings(self) -> Callable[[Any], object]:
        from peers.humming_w8a8 import Humming

        return Humming(self.a, self.a_scale, self.b_scale, self.out)


# Peers that may be here: their modules, and what they are called, with the packages that they come in.
PEERS = {"deep_gemm": ("DeepGEMM", ("deep-gemm", "sgl-deep-gemm")), "humming": ("Humming", ("humming-kernels",))}


def peer_name(module: str) -> str:
    """With the version of the package that it came in."""
    title, packages = PEERS[module]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{title} ({package} {importlib.metadata.version(package)})"
    return title


def peers_missing(names: Iterable[str]) -> str:
    """Which of these modules cannot be imported and why, in words; nothing if all can."""
    found = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a module may do when it is imported
            found.append(f"{name} cannot be imported: {error}")
    return "; ".join(found)


def timed(
    m: int,
    ours: Callable[[Any], object],
    peers: dict[str, Callable[[Any], object]],
    weights: list[Any],
    others: dict[str, Callable[[Any], object]] | None = None,
) -> dict[str, Any]:
    """`us`, with few rows `us_any_weights`, and `peers`: those that are here and take these operands. `pairs`, if any:
    ours and another's time, in turns by themselves."""
    import omnigemm
    from omnigemm.bench import graph

    def constant(weight: Any) -> None:
        with omnigemm.settings(constant_weights=True):
            ours(weight)

    contenders = {"us": constant, **({"us_any_weights": ours} if m <= FEW else {})}
    here = {name: call for name, call in peers.items() if graph.runs(call, weights[0])}
    times = {name: round(us, 2) for name, us in graph.in_turns({**contenders, **here}, weights).items()}
    pairs = graph.pairs(constant, others or {}, weights)
    return {
        **{name: times[name] for name in contenders},
        **({"pairs": pairs} if pairs else {}),
        "peers": {name: times[name] for name in here},
    }


def measured(
    op: str, m: int, n: int, k: int, times: dict[str, Any], function: str, granularity: str | None = None
) -> dict[str, Any]:
    """A row of the record."""
    import omnigemm

    with omnigemm.settings(constant_weights=True):
        plan = omnigemm.plan(function, m=m, n=n, k=k, device="cuda", granularity=granularity)
    return {
        "op": op,
        "shape": f"{m}x{n}x{k}",
        **{name: us for name, us in times.items() if name != "peers"},
        "floor_us": round(floor_us(m, n, k), 2),
        "peers": times["peers"],
        "config": {"kernel": plan.kernel, **plan.config},
    }


def measure(op: str, m: int, n: int, k: int) -> dict[str, Any]:
    products = Products(op, m, n, k)
    others: dict[str, Callable[[Any], object]] = {}
    if products.block:
        others = {peer_name("deep_gemm"): products.deep_gemms, peer_name("humming"): products.hummings()}
    times = timed(m, products.ours, products.peers(), products.weights, others)
    return measured(op, m, n, k, times, "fp8_gemm", GRANULARITIES[op])


def measure_int8(m: int, n: int, k: int, cutlass: CutlassInt8 | None) -> dict[str, Any]:
    """cuBLASLt's product has neither scales nor a 16-bit result, and does not take 16 rows or fewer."""
    import torch
    from peers.humming_w8a8 import Humming

    import omnigemm
    from omnigemm.bench import graph

    a = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
    weights = [
        torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda") for _ in range(graph.copies_needed(n * k))
    ]
    a_scale, b_scale = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    peers: dict[str, Callable[[Any], object]] = {
        "torch._int_mm (cuBLASLt), raw s32 out, no scales": lambda weight: torch._int_mm(a, weight.t())
    }
    if cutlass is not None:
        configs: list[Callable[[Any], object]] = [
            partial(cutlass, i, a, a_scale=a_scale, b_scale=b_scale, out=out) for i in range(len(cutlass.configs()))
        ]
        here = {call: call for call in configs if graph.runs(call, weights[0])}
        sifted = graph.in_turns(here, weights, SIFT_SECONDS, SIFT_REPLAYS)
        peers[f"CUTLASS, best of {len(configs)} configs"] = min(sifted, key=lambda call: sifted[call])
    others: dict[str, Callable[[Any], object]] = {peer_name("humming"): Humming(a, a_scale, b_scale, out)}
    times = timed(m, lambda weight: omnigemm.int8_gemm(a, weight, a_scale, b_scale, out=out), peers, weights, others)
    return measured("int8", m, n, k, times, "int8_gemm")


def problems(ops: Sequence[str]) -> Iterator[Problem]:
    """All that is measured of products, of fp8's single ones those of some granularities."""
    import gemm
    import groups
    import k_groups
    import lists

    from omnigemm.core.problem import describe

    for (m, n, k), op in itertools.product(SHAPES, ops):
        yield describe("fp8_gemm", m=m, n=n, k=k, granularity=GRANULARITIES[op])
    for m, n, k in INT8_SHAPES:
        yield describe("int8_gemm", m=m, n=n, k=k)
    for name in ("bf16", "fp16"):
        for m, n, k in gemm.SHAPES[f"gemm_{name}"]:
            yield describe("gemm", m=m, n=n, k=k, dtype=name, b_layout="col")
    for batch, m, n, k in gemm.HEADS:
        yield describe("gemm", batch=batch, m=m, n=n, k=k, dtype="bf16", b_layout="col")
    yield from groups.problems()
    yield from k_groups.problems(K_GROUPS)
    yield from lists.problems(layouts=LIST_LAYOUTS)


def specs(ops: Sequence[str], which: Gpu) -> set[KernelSpec]:
    """The kernels of all that, with constant weights and without."""
    import omnigemm
    from omnigemm.backends.cuda import CudaBackend

    found: set[KernelSpec] = set()
    for one, constant in itertools.product(problems(ops), (False, True)):
        with omnigemm.settings(constant_weights=constant):
            found.update(CudaBackend().specs(one, which))
    return found


def compiled(wanted: set[KernelSpec]) -> list[Result]:
    """Side by side; an error in any of them ends the program."""
    from rich.progress import Progress

    from omnigemm.backends.cuda import jit

    with Progress() as progress:
        task = progress.add_task("compiling", total=len(wanted))
        results = list(jit.warm(wanted, progress=lambda _: progress.advance(task)))
    for one in results:
        if one.error is not None:
            sys.exit(f"benchmarks/gpu.py: {one.spec.name}: {one.error}")
    return results


def compile_all(ops: Sequence[str]) -> dict[str, float]:
    """Compile what will be measured, side by side; seconds of those that took longest, so and by themselves."""
    from omnigemm.backends.cuda import gpu

    slowest = sorted(compiled(specs(ops, gpu.of(0))), key=lambda one: one.seconds)[-SLOWEST:]
    alone = max(seconds_alone(one.spec) for one in slowest)
    return {"side by side": round(slowest[-1].seconds, 2), f"alone, longest of {SLOWEST}": round(alone, 2)}


def seconds_alone(spec: Any) -> float:
    """Of compiling a kernel in a process of its own, with nothing that the driver or NVRTC remember of it."""
    code = (
        "import json, sys, time; from omnigemm.backends.cuda.jit import KernelSpec, compile_cubin\n"
        "name, source, arch, options = json.load(sys.stdin); start = time.perf_counter()\n"
        "compile_cubin(KernelSpec(name, source, arch, tuple(options))); print(time.perf_counter() - start)"
    )
    given = json.dumps([spec.name, spec.source, spec.arch, spec.options])
    env = {**os.environ, "CUDA_CACHE_DISABLE": "1"}
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, input=given, capture_output=True, text=True, check=True, env=env).stdout)


def host_us() -> dict[str, float]:
    """Of warm eager calls, beside torch's own."""
    import torch

    import omnigemm
    from omnigemm.bench import host

    block, token = Products("fp8_block", 16, 576, 7168), Products("fp8_token", 16, 576, 7168)
    weight, wide, wide_weight = block.weights[0], block.a.bfloat16(), block.weights[0].bfloat16().t()
    sums = torch.empty_like(block.out)
    # Views that its user would make once, not in every call.
    views = token.weights[0].t(), token.a_scale[:, None], token.b_scale[None, :]
    calls: dict[str, Callable[[], object]] = {
        "with out=": lambda: omnigemm.fp8_gemm(block.a, weight, block.a_scale, block.b_scale, out=block.out),
        "allocating": lambda: omnigemm.fp8_gemm(block.a, weight, block.a_scale, block.b_scale),
        "torch._scaled_mm, per token": lambda: torch._scaled_mm(token.a, *views, out_dtype=torch.bfloat16),
        "torch.mm, out=": lambda: torch.mm(wide, wide_weight, out=sums),
    }
    return host.in_turns(calls)


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


PARTS = ("fp8", "int8", "gemm", "quantisers", "lists", "k_groups", "groups")


def main(
    out: Annotated[Path, typer.Option(help="Folder of the record.")] = ROOT / "benchmarks" / "records",
    op: Annotated[list[str] | None, typer.Option(help="Of fp8, this alone; repeat for several.")] = None,
    part: Annotated[
        list[str] | None, typer.Option(help=f"What to measure, in the order given: some of {', '.join(PARTS)}.")
    ] = None,
    rows_only: Annotated[bool, typer.Option(help="Measure without running the tests; writes no record.")] = False,
    cutlass: Annotated[
        Path | None,
        typer.Option(
            exists=True,  # found out before the tests have run
            dir_okay=False,
            help="The library that benchmarks/peers/build.py makes, to measure int8 beside it.",
        ),
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="A module that must be there to be measured beside.")] = None,
    compile_only: Annotated[
        str | None, typer.Option(help="Compile what is measured, for a GPU that need not be here (h200), and stop.")
    ] = None,
    deep_gemm_groups: Annotated[bool, typer.Option(help="DeepGEMM for groups too: ten seconds for each shape.")] = True,
    seconds: Annotated[float, typer.Option(help="Measure nothing further after so long.")] = math.inf,
    keep: Annotated[
        Path | None, typer.Option(help="A record whose rows are kept, and marked, where nothing is measured anew.")
    ] = None,
) -> None:
    """Test and measure the GPU kernels on this machine."""
    import torch
    from rich.progress import track

    from omnigemm.bench import graph, record

    parts, ops = part or (["fp8"] if op else list(PARTS)), op or list(GRANULARITIES)
    for name, given, known in (("part", parts, PARTS), ("op", ops, tuple(GRANULARITIES))):
        if not set(given) <= set(known):
            sys.exit(f"benchmarks/gpu.py: --{name} is {' '.join(given)}, expected some of {', '.join(known)}")
    if compile_only is not None:
        from omnigemm.backends.cuda.gpu import KNOWN

        if compile_only not in KNOWN:
            sys.exit(f"benchmarks/gpu.py: --compile-only is {compile_only}, expected one of {', '.join(KNOWN)}")
        print(f"{len(compiled(specs(ops, KNOWN[compile_only])))} kernels are ready")
        return
    missing = peers_missing(peer or ())
    if missing:
        sys.exit(f"benchmarks/gpu.py: --peer: {missing}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py: there is no NVIDIA GPU on this machine")
    left_out = {module: why for module in PEERS if (why := peers_missing([module]))}
    for module in PEERS:
        print(f"left out: {left_out[module]}" if module in left_out else f"{module} is measured, too", flush=True)
    import gemm
    import groups
    import k_groups
    import lists

    import quant

    start = time.perf_counter()
    before = None if keep is None else record.read(keep)
    tests = None if rows_only else run_tests()
    more: dict[str, Any] = {}
    if "fp8" in parts:
        more["compile_seconds"] = compilation = compile_all(ops)
        print(f"{time.perf_counter() - start:.0f} s; longest compilation, s:", compilation, flush=True)
    host: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    driver = driver_version()

    def save() -> None:
        if tests is None:
            return
        method = f"{graph.METHOD}; our own kernels with weights stated to be constant; fp8 and int8: up to {FEW} "
        method += f"rows before more. {graph.PAIRS}. "
        method += f"gemm: {gemm.METHOD}. "
        method += f"Quantisers: {quant.METHOD}. Lists: {lists.METHOD}. Groups along K: {k_groups.METHOD}. "
        method += f"Groups: {groups.METHOD}"
        made = record.new(list(rows), method, record.cuda_source_hash())
        if before is not None:
            record.keep_rows(made, before)
        order = list(GRANULARITIES)
        made["rows"].sort(key=lambda row: order.index(row["op"]) if row["op"] in order else len(order))
        made.update(more)
        made["gpu"] = torch.cuda.get_device_name(0)
        made["driver"] = driver
        made["tests"] = tests
        made["host_us"] = host
        record.write(out / record.file_name(made["gpu"]), made)

    def fp8() -> Iterator[dict[str, Any]]:
        for (m, n, k), name in track(list(itertools.product(SHAPES, ops)), "measuring"):
            row = measure(name, m, n, k)
            print(name, row["shape"], row["us"], row["floor_us"], row["peers"], row.get("pairs", ""), flush=True)
            yield row
        # Not right behind tests and compilers on all cores, when the processor was seen at half of its speed.
        host.update(host_us())
        print("host time of a warm call, us:", host, flush=True)

    def int8() -> Iterator[dict[str, Any]]:
        from peers.cutlass_int8 import CutlassInt8

        peer = None if cutlass is None else CutlassInt8(cutlass)
        for shape in track(INT8_SHAPES, "measuring int8"):
            row = measure_int8(*shape, peer)
            print("int8", row["shape"], row["us"], row["floor_us"], row["peers"], row.get("pairs", ""), flush=True)
            yield row

    def gemms() -> Iterator[dict[str, Any]]:
        host.update({f"gemm: {name}": us for name, us in gemm.host_us().items()})
        found = []
        for row in gemm.measure(None):
            found.append(row)
            yield row
        print("\n".join(gemm.summary(found)), flush=True)

    def quantisers() -> Iterator[dict[str, Any]]:
        host.update({f"quantisers: {name}": us for name, us in quant.host_us().items()})
        yield from quant.rows("")

    measures: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "fp8": fp8,
        "int8": int8,
        "gemm": gemms,
        "quantisers": quantisers,
        "lists": lambda: lists.rows(layouts=LIST_LAYOUTS),
        "k_groups": lambda: k_groups.rows(K_GROUPS),
        "groups": lambda: groups.rows(
            deep_gemm=peer_name("deep_gemm") if deep_gemm_groups and "deep_gemm" not in left_out else ""
        ),
    }
    for name in parts:
        saved = time.perf_counter()
        for row in measures[name]():
            rows.append(row)
            if time.perf_counter() - start > seconds:
                break
            if time.perf_counter() - saved > SAVE_SECONDS:
                save()
                saved = time.perf_counter()
        save()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if time.perf_counter() - start > seconds:
            break


if __name__ == "__main__":
    typer.run(main)
