"""`omnigemm warm`: compile the kernels of named products ahead, side by side. No GPU is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ..backends.cuda import CudaBackend, jit
from ..backends.cuda.gpu import Gpu
from ..backends.cuda.jit import nvrtc, owned, store
from ..core.problem import Problem
from ..core.settings import cache_dir, settings
from . import output
from .problems import Refused, asked, summary
from .target import named_gpu, usual_gpu


@dataclasses.dataclass(frozen=True)
class Warmed:
    """One kernel and how it went. `seconds` passed here; `problems` counts those that use it."""

    key: str
    name: str
    ok: bool
    from_disk: bool
    seconds: float
    error: str | None
    problems: int


def run_warm(
    op: str | None,
    shapes: Sequence[str],
    words: Mapping[str, Any],
    *,
    file: Path | None = None,
    gpu: str | None = None,
    jobs: int | None = None,
    constant_weights: bool = False,
    as_json: bool = False,
) -> int:
    """Compile, and print how each kernel went; 1 if one failed or a problem has none, 130 if it was stopped."""
    which = usual_gpu() if gpu is None else named_gpu("warm", gpu)
    problems = asked("warm", op, shapes, words, file)
    answer = nvrtc.available()  # what loads kernels is not needed for it
    if not answer:
        raise output.CommandError(f"warm: kernels cannot be compiled: {answer.reason}")
    start = time.perf_counter()
    with settings(constant_weights=True) if constant_weights else contextlib.nullcontext():
        uses, refused = choose(problems, which)
    try:
        warmed = compile_all(uses, jobs)
    except KeyboardInterrupt:
        ready = sum(_not_kept(spec) is None for spec in uses)
        output.print_notice(f"stopped; {ready} of {len(uses)} kernels are ready in {cache_dir()}")
        return 130
    seconds = time.perf_counter() - start
    ok = not refused and all(one.ok for one in warmed)
    if as_json:
        output.print_json(
            {
                "path": str(cache_dir()),
                "gpu": which.name,
                "ok": ok,
                "kernels": [dataclasses.asdict(one) for one in warmed],
                "refused": [dataclasses.asdict(one) for one in refused],
            }
        )
    else:
        _show(warmed, refused, which, seconds)
    return 0 if ok else 1


# ------------------------------------------------------------------------------------------- the work


def choose(problems: Sequence[Problem], which: Gpu) -> tuple[dict[jit.KernelSpec, int], list[Refused]]:
    """Each kernel that is needed, with how many problems need it, and the problems that have none."""
    backend = CudaBackend()
    # By key, because that is what the cache goes by.
    specs: dict[str, jit.KernelSpec] = {}
    uses: dict[str, int] = {}
    refused = []
    with output.progress() as bar:
        for problem in bar.track(problems, description="choose"):
            answer = backend.supports_on(problem, which)
            if not answer:
                refused.append(Refused(str(problem), answer.reason))
                continue
            for spec in backend.specs(problem, which):
                specs.setdefault(spec.key, spec)
                uses[spec.key] = uses.get(spec.key, 0) + 1
    return {spec: uses[key] for key, spec in specs.items()}, refused


def compile_all(uses: Mapping[jit.KernelSpec, int], jobs: int | None = None) -> list[Warmed]:
    """All of them, `jobs` at a time. Ctrl-C waits for those that are being compiled, and not for the others."""
    with output.progress() as bar:
        task = bar.add_task("compile", total=len(uses))
        results = jit.warm(uses, jobs, lambda one: bar.update(task, description=one.spec.name, advance=1))
    return [_warmed(one, uses[one.spec]) for one in results]


def _warmed(result: jit.Result, problems: int) -> Warmed:
    spec, compiled = result.spec, result.compiled
    error = _not_kept(spec) if compiled is not None else str(result.error)
    from_disk = compiled is not None and compiled.from_disk
    return Warmed(spec.key, spec.name, error is None, from_disk, result.seconds, error, problems)


def _not_kept(spec: jit.KernelSpec) -> str | None:
    """Why the kernel is not on the disk. One that is in memory alone is gone when the command ends."""
    try:
        if store.read_entry(store.root(), spec.entry) is not None:
            return None
        reason = "it was not written"
    except (owned.Damaged, owned.Refused, OSError) as error:
        reason = str(error)
    return f"kernel {spec.name} compiles, but {store.root() / spec.entry} does not hold it: {reason}"


# ------------------------------------------------------------------------------------------- for people


def _show(warmed: Sequence[Warmed], refused: Sequence[Refused], which: Gpu, seconds: float) -> None:
    screen = output.console()
    if warmed:
        table = output.table(
            f"For {which}", ("kernel", "key", "", "seconds", "problems"), right=("seconds", "problems")
        )
        for one in warmed:
            table.add_row(one.name, one.key[:16], _state(one), f"{one.seconds:.2f}", str(one.problems))
        screen.print(table)
    for one in warmed:
        if one.error is not None:
            screen.print(f"[red]failed:[/red] {escape(one.error)}", soft_wrap=True)
    for text in summary(refused):
        screen.print(f"[red]no kernel:[/red] {escape(text)}", soft_wrap=True)
    made = sum(one.ok and not one.from_disk for one in warmed)
    there = sum(one.ok and one.from_disk for one in warmed)
    counts = f"{made} compiled, {there} already there, {len(warmed) - made - there} failed"
    if refused:
        counts += f", {len(refused)} problems without a kernel"
    screen.print(f"{counts}, in {seconds:.1f} s. Cache folder: {cache_dir()}", soft_wrap=True, markup=False)


def _state(one: Warmed) -> str:
    if not one.ok:
        return "[red]failed[/red]"
    return "already there" if one.from_disk else "[green]compiled[/green]"
