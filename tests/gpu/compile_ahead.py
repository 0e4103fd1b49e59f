"""Compile most of what the GPU tests run, for a GPU that is not here: its machine then has little to do but run them.

    cd tests
    OMNIGEMM_CACHE_DIR=/tmp/kernels python -m gpu.compile_ahead --gpu h200

That folder is good for every machine with the same NVRTC, which `omnigemm doctor` names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from omnigemm.backends.cuda import jit
from omnigemm.backends.cuda.gpu import KNOWN, Gpu
from omnigemm.backends.cuda.jit import KernelSpec


def specs(which: Gpu) -> Iterator[KernelSpec]:
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        if hasattr(module, "specs"):
            yield from module.specs(which)


def main(gpu: Annotated[str, typer.Option(help=f"One of {', '.join(KNOWN)}.")] = "h200") -> None:
    """Compile what the GPU tests run."""
    if gpu not in KNOWN:
        sys.exit(f"compile_ahead: --gpu is {gpu!r}, expected one of {', '.join(KNOWN)}")
    wanted = set(specs(KNOWN[gpu]))
    with Progress() as progress:
        task = progress.add_task("compiling", total=len(wanted))
        failed = [one for one in jit.warm(wanted, progress=lambda _: progress.advance(task)) if not one.ok]
    for one in failed:
        print(f"{one.spec.name}: {one.error}", file=sys.stderr)
    print(f"{len(wanted) - len(failed)} of {len(wanted)} kernels are ready")
    sys.exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
