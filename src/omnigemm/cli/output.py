"""What the commands share when they speak: tables to stdout, progress and errors to stderr, JSON alone on stdout."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..core.errors import OmniGemmError

PIPE_WIDTH = 180  # a file or a pipe has no width of its own, and rich would cut tables at 80
WIDE = 130  # below, a table of figures cannot have all its names side by side


class CommandError(OmniGemmError):
    """A command cannot do what it was asked, for a reason that its user can change."""


def check_streams() -> None:
    """Refuse to work for nobody, and let warnings go nowhere if that is where stderr goes."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the program ends
    if sys.stdout is None:
        raise CommandError("stdout is closed, expected somewhere to print to")


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """What the system refuses becomes one line: what cannot be done, the path if it knows one, and its reason."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise CommandError(f"{what}: {where}{error.strerror or error}") from error


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """The same for what goes to stdout. That nobody reads on is no error."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up_stdout()
        raise CommandError(f"stdout cannot be written: {error.strerror}") from error


def give_up_stdout() -> None:
    """What still waits to be written would fail once more when Python ends, with a traceback."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written before the work that fills it, not after."""
    folder = path.absolute().parent
    with refusals(f"the folder of {path} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    with refusals(f"{path} cannot be written"):
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise CommandError(f"{path} cannot be written")


def failure(path: Path, write: Callable[[], object]) -> CommandError | None:
    """Why a file cannot be written, to be raised when all that took time to find out is printed."""
    try:
        write()
    except OSError as error:
        return CommandError(f"{path} cannot be written: {error.strerror}")
    return None


class Screen(Console):
    """A console that says in one line why it cannot print."""

    def print(self, *what: Any, **how: Any) -> None:
        with printing():
            super().print(*what, **how)


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    made = Console if stderr else Screen
    return made(stderr=stderr, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


def print_line(text: str) -> None:
    with printing():
        print(text, flush=True)


def print_json(value: Any) -> None:
    print_line(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_error(message: str) -> None:
    print_notice(f"error: {message}")


def print_notice(message: str) -> None:
    """One line, whatever the message holds."""
    print(f"omnigemm: {' '.join(message.split())}", file=sys.stderr)


def progress() -> Progress:
    """A progress bar on stderr, silent where nobody watches."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in `right` hold numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        number = name in right
        made.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    return made


def names_of(screen: Console, op: str, details: Sequence[str]) -> list[str]:
    """What a row is about: a cell each, or all in one cell of two lines where the screen is narrow."""
    if screen.width >= WIDE:
        return [op, *details]
    return [f"{op}\n[dim]{', '.join(details)}[/dim]"]


def name_columns(screen: Console, details: Sequence[str]) -> list[str]:
    """The heads over `names_of`."""
    return ["operation", *details] if screen.width >= WIDE else ["operation"]


def mark(ok: bool, note: str = "") -> str:
    """Pass or fail, and what is to be said about it."""
    return ("[green]pass[/green]" if ok else "[red]FAIL[/red]") + (f" {escape(note)}" if note else "")


def ratio(value: float) -> str:
    """A speed-up; green when we are ahead, red when clearly behind."""
    colour = "green" if value >= 1.0 else ("red" if value < 0.9 else "yellow")
    return f"[{colour}]{value:.2f}x[/{colour}]"


def duration(us: float) -> str:
    """Microseconds with a sensible number of digits."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"
