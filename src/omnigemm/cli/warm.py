"""`omnigemm warm`: compile the kernels of named products ahead, side by side. No GPU is needed."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ..backends.cuda import CudaBackend, jit
from ..backends.cuda.gpu import Gpu
from ..backends.cuda.jit import owned, store
from ..core.errors import OmniGemmError, ShapeError
from ..core.problem import Problem, describe
from ..core.settings import cache_dir
from . import output
from .target import named_gpu, usual_gpu

EXAMPLE = "fp8_gemm 16 4096 7168 granularity=128x128"
RANGE_LIMIT = 65536  # rows in one range: choosing takes milliseconds for each
_NUMBER = r"([0-9]{1,18})"  # longer ones no tensor has
_SHAPE = re.compile(rf"{_NUMBER}(?:-{_NUMBER})?x{_NUMBER}x{_NUMBER}")
_WORDS = ("dtype", "weight_dtype", "out_dtype", "granularity", "bias")
_YES_NO = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


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


@dataclasses.dataclass(frozen=True)
class Refused:
    """A problem that has no kernel on that GPU."""

    problem: str
    reason: str


def run_warm(
    op: str | None,
    shapes: Sequence[str],
    words: Mapping[str, Any],
    *,
    file: Path | None = None,
    gpu: str | None = None,
    jobs: int | None = None,
    as_json: bool = False,
) -> int:
    """Compile, and print how each kernel went; 1 if one failed or a problem has none."""
    which = usual_gpu() if gpu is None else named_gpu("warm", gpu)
    problems = _asked(op, shapes, words, file)
    answer = jit.available()
    if not answer:
        raise output.CommandError(f"warm: kernels cannot be compiled: {answer.reason}")
    start = time.perf_counter()
    uses, refused = choose(problems, which)
    warmed = compile_all(uses, jobs)
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


# ------------------------------------------------------------------------------------------- what is asked for


def _asked(op: str | None, shapes: Sequence[str], words: Mapping[str, Any], file: Path | None) -> list[Problem]:
    """The problems, each once."""
    if file is not None:
        if op is not None or shapes or any(words.values()):
            raise output.CommandError(
                "warm: --file is given together with an operation or its options, expected one of the two; "
                f"lines of the file have their own, such as '{EXAMPLE}'"
            )
        found = read_problems(file)
    elif op is None:
        raise output.CommandError("warm: no operation is given, expected one with --shape MxNxK, or --file FILE")
    elif not shapes:
        raise output.CommandError(f"warm: {op} has no --shape, expected at least one such as --shape 16x4096x7168")
    else:
        found = [describe(op, m=m, n=n, k=k, **words) for text in shapes for m, n, k in parse_shape(text)]
    return list(dict.fromkeys(found))


def parse_shape(text: str) -> list[tuple[int, int, int]]:
    """From '16x4096x7168', or from '1-64x4096x7168' one for each number of rows."""
    found = _sizes(text)
    if found is None:
        raise ShapeError(
            f"shape is {text!r}, expected MxNxK with whole numbers above 0; M may be a range of at most "
            f"{RANGE_LIMIT}, such as 1-64"
        )
    return found


def _sizes(text: str) -> list[tuple[int, int, int]] | None:
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        return None
    first, n, k = int(match[1]), int(match[3]), int(match[4])
    last = first if match[2] is None else int(match[2])
    if min(first, n, k) < 1 or not first <= last < first + RANGE_LIMIT:
        return None
    return [(m, n, k) for m in range(first, last + 1)]


def read_problems(file: Path) -> list[Problem]:
    """One problem, or a range of rows, in each line; '#' starts a comment."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise output.CommandError(f"warm: file {file} cannot be read: {reason}") from error
    found = []
    for number, line in enumerate(lines, 1):
        parts = line.split("#", 1)[0].split()
        if not parts:
            continue
        try:
            found += _parse_line(parts)
        except OmniGemmError as error:
            raise output.CommandError(f"{file}, line {number}: {error}") from error
    if not found:
        raise output.CommandError(f"warm: file {file} has no problems, expected lines such as '{EXAMPLE}'")
    return found


def _parse_line(parts: Sequence[str]) -> list[Problem]:
    if len(parts) < 4:
        raise output.CommandError(f"{' '.join(parts)!r} is too short, expected OP M N K, such as '{EXAMPLE}'")
    op, *sizes = parts[:4]
    found = _sizes("x".join(sizes))
    if found is None:
        raise output.CommandError(
            f"M N K is {' '.join(sizes)!r}, expected three whole numbers above 0; M may be a range of at most "
            f"{RANGE_LIMIT}, such as 1-64"
        )
    words = _parse_words(parts[4:])
    return [describe(op, m=m, n=n, k=k, **words) for m, n, k in found]


def _parse_words(parts: Sequence[str]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in _WORDS or not value:
            raise output.CommandError(f"{part!r} is unknown, expected NAME=VALUE with a name of {', '.join(_WORDS)}")
        if name in words:
            raise output.CommandError(f"{part!r} comes after {name}={words[name]}, expected {name} once")
        words[name] = value
    if "bias" in words:
        if words["bias"] not in _YES_NO:
            raise output.CommandError(f"bias is {words['bias']!r}, expected yes or no")
        words["bias"] = _YES_NO[words["bias"]]
    return words


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
    with output.progress() as bar:
        task = bar.add_task("compile", total=len(uses))

        def done(result: jit.Result) -> None:
            bar.update(task, description=result.spec.name, advance=1)

        results = jit.warm(uses, jobs, done)
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
    for text in _summary(refused):
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


def _summary(refused: Sequence[Refused]) -> list[str]:
    """A line for each reason: a range of rows has many problems and one reason."""
    by_reason: dict[str, list[str]] = {}
    for one in refused:
        by_reason.setdefault(one.reason, []).append(one.problem)
    return [
        f"{problems[0]}{f' and {len(problems) - 1} more' if len(problems) > 1 else ''}: {reason}"
        for reason, problems in by_reason.items()
    ]
