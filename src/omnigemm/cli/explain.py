"""`omnigemm explain`: every candidate for a product, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from ..core.dispatch import Explanation
from ..core.dispatch import explain as explain_op
from ..core.problem import describe
from ..core.settings import check_backend
from . import output
from .problems import words_of


def run_explain(
    op: str,
    m: int,
    n: int,
    k: int,
    words: Mapping[str, Any],
    *,
    device: str | None = None,
    backend: str | None = None,
    gpu: str | None = None,
    as_json: bool = False,
) -> int:
    """Print the explanation; 1 if nothing can run the product."""
    words = words_of(op, words)
    if gpu is None:
        found = explain_op(op, m=m, n=n, k=k, device=device or "cpu", backend=backend, **words)
        about, where, nothing = found.to_dict(), str(found.device), "Nothing here can run it."
    else:
        found, where = _on_gpu(op, m, n, k, words, device, backend, gpu)
        about, nothing = {**found.to_dict(), "gpu": where}, "Nothing can run it there."
    if as_json:
        output.print_json(about)
    else:
        _show(found, where, nothing)
    return 0 if found.chosen is not None else 1


def _on_gpu(
    op: str, m: int, n: int, k: int, words: Mapping[str, Any], device: str | None, backend: str | None, gpu: str
) -> tuple[Explanation, str]:
    """The explanation for a GPU that need not be here, and that GPU in words."""
    from ..backends.cuda import explain_on
    from .target import named_gpu

    which = named_gpu(op, gpu)
    if device is not None:
        raise output.CommandError(f"{op}: device is {device!r} and gpu is {gpu!r}, expected one of the two")
    if backend is not None:
        check_backend(op, backend)
        if backend != "cuda":
            raise output.CommandError(
                f"{op}: backend is {backend!r}, expected cuda, which is what runs on {which.name}"
            )
    return explain_on(describe(op, m=m, n=n, k=k, **words), which), str(which)


def _show(found: Explanation, where: str, nothing: str) -> None:
    table = output.table(f"{found.problem} on {where}", ("", "kernel", "expected us", "why"), right=("expected us",))
    for one in found.candidates:
        state = "[green]chosen[/green]" if one.chosen else ("possible" if one.ok else "[red]no[/red]")
        cost = "" if one.cost is None else output.duration(one.cost * 1e6)
        table.add_row(state, f"{one.backend}/{one.kernel}", cost, escape(one.reason))
    screen = output.console()
    screen.print(table)
    if found.chosen is None:
        screen.print(f"[red]{nothing}[/red]")
