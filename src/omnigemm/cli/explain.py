"""`omnigemm explain`: every candidate for a product, with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from ..core.dispatch import Explanation
from ..core.dispatch import explain as explain_op
from . import output


def run_explain(
    op: str,
    m: int,
    n: int,
    k: int,
    words: Mapping[str, Any],
    *,
    device: str = "cpu",
    backend: str | None = None,
    as_json: bool = False,
) -> int:
    """Print the explanation; 1 if nothing here can run the product."""
    found = explain_op(op, m=m, n=n, k=k, device=device, backend=backend, **words)
    if as_json:
        output.print_json(found.to_dict())
    else:
        _show(found)
    return 0 if found.chosen is not None else 1


def _show(found: Explanation) -> None:
    table = output.table(
        f"{found.problem} on {found.device}", ("", "kernel", "expected us", "why"), right=("expected us",)
    )
    for one in found.candidates:
        state = "[green]chosen[/green]" if one.chosen else ("possible" if one.ok else "[red]no[/red]")
        cost = "" if one.cost is None else output.duration(one.cost * 1e6)
        table.add_row(state, f"{one.backend}/{one.kernel}", cost, escape(one.reason))
    screen = output.console()
    screen.print(table)
    if found.chosen is None:
        screen.print("[red]Nothing here can run it.[/red]")
