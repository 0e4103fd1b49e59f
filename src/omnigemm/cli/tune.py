"""`omnigemm tune`: measure which configs are fastest on the GPU that is here, and keep them in the user's own table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from ..backends.cuda import dense, measured, sm90
from ..backends.cuda import tune as tuner
from ..backends.cuda.choice import alike, seconds
from ..backends.cuda.gpu import Gpu
from ..core.errors import OmniGemmError
from ..core.problem import Problem
from . import output
from .problems import Refused, asked, summary
from .target import usual_gpu


def shapes_of(n: int | None, k: int | None, rows: Sequence[str]) -> list[str]:
    """MxNxK for each M, from --n, --k and --m."""
    given = {"--n": n is not None, "--k": k is not None, "--m": bool(rows)}
    missing = [name for name, there in given.items() if not there]
    if any(given.values()) and missing:
        there = " and ".join(name for name, one in given.items() if one)
        raise output.CommandError(f"tune: {there} without {' and '.join(missing)}, expected all of --n, --k and --m")
    return [f"{m}x{n}x{k}" for m in rows]


def run_tune(
    op: str | None,
    shapes: Sequence[str],
    words: Mapping[str, Any],
    *,
    file: Path | None = None,
    candidates: int = tuner.CANDIDATES,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Measure, keep and print what was fastest; 1 if a problem failed or cannot be tuned."""
    problems = asked("tune", op, shapes, words, file)
    which = usual_gpu()
    wanted, refused = _checked(problems, which)
    if not dry_run:
        tuner.here()  # what cannot be tuned at all is told first
    about: dict[str, Any] = {"gpu": which.name, "path": str(measured.root() / f"{which.table}{measured.SUFFIX}")}
    if dry_run:
        listed = [_candidates(one, which, candidates) for one in wanted]
        ok = not refused
        about |= {"ok": ok, "problems": listed}
    else:
        results = _measured(wanted, candidates)
        ok = not refused and all(one.error is None for one in results)
        about |= {"ok": ok, "problems": [_described(one) for one in results]}
    about["refused"] = [vars(one) for one in refused]
    if as_json:
        output.print_json(about)
    else:
        (_show_candidates if dry_run else _show)(about, which)
        for text in summary(refused):
            output.console().print(f"[red]not tuned:[/red] {escape(text)}", soft_wrap=True)
    return 0 if ok else 1


def _checked(problems: Sequence[Problem], which: Gpu) -> tuple[list[Problem], list[Refused]]:
    """What is to be measured, and what cannot be. If that is all, the request makes no sense."""
    wanted, refused = [], []
    first: OmniGemmError | None = None
    for one in problems:
        try:
            wanted.append(tuner.check(one, which))
        except OmniGemmError as error:
            first = first or error
            refused.append(Refused(str(one), str(error)))
    if not wanted and first is not None:
        raise first
    return tuner.distinct(wanted), refused


def _measured(wanted: Sequence[Problem], candidates: int) -> list[tuner.Result]:
    with output.progress() as bar:
        task = bar.add_task("tune", total=len(wanted))

        def done(result: tuner.Result) -> None:
            bar.update(task, description=_shape(result.problem), advance=1)

        return tuner.tune(wanted, candidates, done=done)


# ------------------------------------------------------------------------------------------- what is told


def _shape(problem: Problem) -> str:
    return f"{problem.m}x{problem.n}x{problem.k}"


def _kernel(problem: Problem, config: sm90.Config) -> str:
    return sm90.name(config, dense.variant_of(problem)).removeprefix("omnigemm_")


def _place(problem: Problem) -> dict[str, Any]:
    low, high = tuner.span_of(problem.m)
    return {"problem": str(problem), "op": problem.op, "shape": _shape(problem), "m_from": low, "m_to": high}


def _candidates(problem: Problem, which: Gpu, count: int) -> dict[str, Any]:
    variant = dense.variant_of(problem)
    listed = [
        {
            "kernel": _kernel(problem, config),
            "words": config.words,
            "modelled_us": seconds(config, variant, alike(problem.m), which) * 1e6,
            "config": tuner.compact(config),
        }
        for config in tuner.candidates(problem, which, count)
    ]
    return {**_place(problem), "candidates": listed}


def _described(result: tuner.Result) -> dict[str, Any]:
    about = {**_place(result.problem), "error": result.error}
    times = result.times
    if times is None:
        return about
    config, constant = times.best()[0], times.best(constant_weights=True)
    return about | {
        "us": times.us,
        "constant_weights_us": times.took[constant] if result.problem.m <= tuner.FEW else None,
        "model_us": times.model_us,
        "blas_us": times.blas_us,
        "tried": len(times.tried),
        "kernel": _kernel(result.problem, config),
        "words": config.words,
        "config": tuner.compact(config),
    }


# ------------------------------------------------------------------------------------------- for people


def _show(about: Mapping[str, Any], which: Gpu) -> None:
    screen = output.console()
    done = [one for one in about["problems"] if one["error"] is None]
    if done:
        times = ("us", "constant weights", "cuBLAS", "model's choice", "faster")
        table = output.table(f"On {which}", ("operation", "shape", "for M", *times, "kernel"), right=times)
        for one in done:
            taken = (one["us"], one["constant_weights_us"], one["blas_us"], one["model_us"])
            table.add_row(
                one["op"],
                one["shape"],
                f"{one['m_from']}-{one['m_to']}",
                *("" if us is None else f"{us:.2f}" for us in taken),
                output.ratio(one["model_us"] / one["us"]),
                escape(", ".join([one["kernel"], *one["words"]])),
            )
        screen.print(table)
    for one in about["problems"]:
        if one["error"] is not None:
            screen.print(f"[red]failed:[/red] {escape(one['error'])}", soft_wrap=True)
    screen.print(
        f"{len(done)} of {len(about['problems'])} tuned, kept in {about['path']}.", soft_wrap=True, markup=False
    )


def _show_candidates(about: Mapping[str, Any], which: Gpu) -> None:
    screen = output.console()
    for one in about["problems"]:
        title = f"{one['problem']}, for M from {one['m_from']} to {one['m_to']}, on {which}"
        table = output.table(title, ("kernel", "modelled us", ""), right=("modelled us",))
        for each in one["candidates"]:
            table.add_row(escape(each["kernel"]), f"{each['modelled_us']:.2f}", escape(", ".join(each["words"])))
        screen.print(table)
    screen.print("Nothing was measured.")
