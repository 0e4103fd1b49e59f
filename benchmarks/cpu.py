"""Measure the CPU table and write benchmarks/records/<cpu-name>.json.

    python benchmarks/cpu.py
    python benchmarks/cpu.py --seconds 2 --out /tmp/records
    python benchmarks/cpu.py --weight 256x512 --rows 1 --rows 4 --seconds 0 --cold-mb 1    (a few seconds, to try it)

For each weight (N, K), as in a model of 8 billion parameters, and each number of rows, int4_gemm (bf16 and fp16
activations, groups of 128) and int8_gemm take turns with torch's F.linear in fp32 and bf16: every ratio is of one run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

WEIGHTS = ("6144x4096", "28672x4096", "4096x14336")
ROWS = (1, 16, 128)
RECORDS = Path(__file__).parent / "records"


def main(
    weight: Annotated[list[str] | None, typer.Option(help="NxK; repeat for several.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="M; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing for each weight and M, after warm-up.")] = 10.0,
    cold_mb: Annotated[int, typer.Option(min=0, help="Copies of each weight to cycle through, in MB.")] = 256,
    out: Annotated[Path, typer.Option(help="Folder of the record.", show_default=False)] = RECORDS,
) -> None:
    """Measure int4_gemm and int8_gemm against torch on this processor."""
    from omnigemm.backends.cpu.isa import processor, shield_onednn

    shield_onednn()
    from omnigemm.bench import record, timing
    from omnigemm.bench.compare import geometric_mean, sweep
    from omnigemm.bench.workloads import Case, Size
    from omnigemm.cli import output
    from omnigemm.cli.bench import show

    cases = {
        "int4 bf16": Case("int4_gemm", "bf16 x int4", {"dtype": "bf16", "group_size": 128}),
        "int4 fp16": Case("int4_gemm", "fp16 x int4", {"dtype": "fp16", "group_size": 128}),
        "int8": Case("int8_gemm", "int8 per token"),
    }
    sizes = [Size.parse(f"1x{text}") for text in weight or WEIGHTS]
    counts = rows or list(ROWS)
    made: list[dict[str, Any]] = []
    work_done: list[tuple[int, int]] = []
    with output.progress() as bar:
        task = bar.add_task("cpu", total=len(sizes) * len(counts))
        for size in sizes:
            bar.update(task, description=f"weight {size.n}x{size.k}")
            for works, times in sweep(cases, size, counts, seconds=seconds, cold_bytes=cold_mb * 10**6):
                for name, work in works.items():
                    made.append(record.row(work, times, ours=name))
                    work_done.append((work.flops, work.traffic_bytes))
                bar.advance(task)
    order = sorted(range(len(made)), key=lambda i: (made[i]["op"], made[i]["config"]["dtype"]))
    made, work_done = [made[i] for i in order], [work_done[i] for i in order]
    path = out / record.file_name(processor())
    record.write(path, record.new(made, timing.method(cold_mb * 10**6)))
    show(made, work_done)
    screen = output.console()
    for peer in made[0]["peers"]:
        ratios = [row["peers"][peer] / row["us"] for row in made]
        screen.print(f"geometric mean against {peer}: {geometric_mean(ratios):.2f}x, lowest {min(ratios):.2f}x")
    screen.print(f"Record: {path}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    typer.run(main)
