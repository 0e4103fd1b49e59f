"""Which kernel runs a problem. `supports` is the only source of truth: dispatch, explain, error messages and
the support table in the docs all come from it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from .errors import DeviceError, UnsupportedError
from .forks import in_children
from .plan import Plan
from .problem import Problem, describe
from .settings import check_backend, current

_log = logging.getLogger("omnigemm")


@dataclasses.dataclass(frozen=True)
class Support:
    """Yes, or no; either way with the reason in words."""

    ok: bool
    reason: str
    waits: bool = False  # the host would wait for the device: only if nobody else takes the problem

    def __bool__(self) -> bool:
        return self.ok


class Kernel(Protocol):
    """One way to run some problems. What `supports` accepts must run; what it refuses must say why."""

    @property
    def name(self) -> str: ...

    def supports(self, problem: Problem, device: torch.device) -> Support: ...

    def cost(self, problem: Problem, device: torch.device) -> float:
        """Expected seconds; only the order matters."""

    def plan(self, problem: Problem, device: torch.device) -> Plan: ...


class Backend(Protocol):
    """A named set of kernels that share a device and a way to be unavailable."""

    @property
    def name(self) -> str: ...

    def available(self) -> Support:
        """Whether this machine can use the backend at all."""

    def supports(self, problem: Problem, device: torch.device) -> Support: ...

    def kernels(self, problem: Problem, device: torch.device) -> Sequence[Kernel]:
        """The kernels that are made for this kind of problem, whether or not they take this one."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    backend: str
    kernel: str
    ok: bool
    reason: str
    cost: float | None = None
    waits: bool = False
    chosen: bool = False


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every candidate for a problem and why it was or was not taken. Print it, or read `to_dict()`."""

    problem: Problem
    device: torch.device
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.chosen), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": dataclasses.asdict(self.problem),
            "device": str(self.device),
            "candidates": [dataclasses.asdict(candidate) for candidate in self.candidates],
        }

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.device}"]
        for one in self.candidates:
            mark = "->" if one.chosen else ("  " if one.ok else " x")
            lines.append(f"{mark} {one.backend + '/' + one.kernel:28s} {one.reason}")
        if self.chosen is None:
            lines.append("nothing here can run it")
        return "\n".join(lines)


def _backends() -> Sequence[Backend]:
    from ..backends import backends  # late, so that importing the package loads no kernels

    return backends()


def _candidates(problem: Problem, device: torch.device, only: str | None) -> list[tuple[Candidate, Kernel | None]]:
    """Every kernel's answer. A backend that refuses as a whole answers once, without its kernels."""
    found: list[tuple[Candidate, Kernel | None]] = []
    for backend in _backends():
        if only is not None and backend.name != only:
            found.append((Candidate(backend.name, "*", False, f"not asked: backend is {only!r}"), None))
            continue
        answer = backend.available()
        if answer:
            answer = backend.supports(problem, device)
        kernels = backend.kernels(problem, device) if answer else ()
        if not kernels:
            found.append((Candidate(backend.name, "*", False, answer.reason), None))
        for kernel in kernels:
            answer = kernel.supports(problem, device)
            cost = kernel.cost(problem, device) if answer else None
            found.append((Candidate(backend.name, kernel.name, answer.ok, answer.reason, cost, answer.waits), kernel))
    return found


def _best(found: list[tuple[Candidate, Kernel | None]]) -> int | None:
    usable = [i for i, (candidate, _) in enumerate(found) if candidate.ok]
    return min(usable, key=lambda i: (found[i][0].waits, found[i][0].cost or 0.0)) if usable else None


def choose(problem: Problem, device: torch.device, backend: str | None = None) -> Plan:
    """The plan of the cheapest kernel that supports the problem, or an error with each one's reason."""
    if backend is not None:
        check_backend(problem.op, backend)
    only = backend or current().backend
    found = _candidates(problem, device, only)
    best = _best(found)
    if best is None:
        asked = [one for one, _ in found if only is None or one.backend == only]
        reasons = "; ".join(f"{one.backend}/{one.kernel}: {one.reason}" for one in asked)
        raise UnsupportedError(f"{problem.op}: nothing here can run {problem} on {device}. {reasons}")
    kernel = found[best][1]
    assert kernel is not None
    plan = kernel.plan(problem, device)
    _log.debug("%s", plan)
    return plan


def explain_problem(problem: Problem, device: torch.device, backend: str | None = None) -> Explanation:
    found = _candidates(problem, device, backend or current().backend)
    best = _best(found)
    rows: list[Candidate] = []
    for i, (candidate, _) in enumerate(found):
        if i == best:
            candidate = dataclasses.replace(candidate, chosen=True)
        # A product of nothing takes no time, and there is nothing to compare.
        elif candidate.ok and best is not None and (least := found[best][0].cost):
            slower = (candidate.cost or 0.0) / least
            reason = f"{candidate.reason}; expected {slower:.1f}x the time of {found[best][0].kernel}"
            candidate = dataclasses.replace(candidate, reason=reason)
        rows.append(candidate)
    return Explanation(problem, device, tuple(rows))


def plan(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    **problem: Any,
) -> Plan:
    """Plan a product described in keywords: see `omnigemm.core.problem.describe` for all of them."""
    where = resolve_device(op, device)
    return choose(_describe(op, m, n, k, problem), where, backend)


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    **problem: Any,
) -> Explanation:
    """Every kernel that could run the product, and why it was or was not taken."""
    if backend is not None:
        check_backend(op, backend)
    where = resolve_device(op, device)
    return explain_problem(_describe(op, m, n, k, problem), where, backend)


def _describe(op: str, m: int, n: int, k: int, words: dict[str, Any]) -> Problem:
    import inspect

    known = inspect.signature(describe).parameters
    for word in words:
        if word not in known:
            raise TypeError(f"{op}: {word!r} is not part of a problem, expected one of {', '.join(list(known)[1:])}")
    return describe(op, m=m, n=n, k=k, **words)


def resolve_device(op: str, device: torch.device | str) -> torch.device:
    """The device, with the number that it has now: a plan keeps its kernels there, whatever is current later."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"{op}: device is {device!r}, expected a torch device such as 'cpu' or 'cuda:0'") from error
    if found.type != "cuda" or found.index is not None or not torch.cuda.is_available():
        return found
    # Asking before CUDA is initialised would do that, and explain has no need of it.
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


T = TypeVar("T")


class PlanCache(Generic[T]):
    """What a call needs, by its signature. A warm call does one dictionary look-up, without a lock: reads are atomic.

    Serving meets many row counts, so the cache is emptied rather than left to grow without bound.
    """

    LIMIT = 8192

    def __init__(self) -> None:
        self._entries: dict[Hashable, T] = {}
        self._held = 0
        self._lock = threading.Lock()
        in_children(self._renew_lock)
        self.get: Callable[[Hashable], T | None] = self._entries.get

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def put(self, key: Hashable, entry: T, size: int = 1) -> T:
        """Keep the entry, or return the one that another thread put first. `size`: as many usual ones take its room."""
        with self._lock:
            if key not in self._entries:
                if self._held + size > self.LIMIT:
                    self._entries.clear()
                    self._held = 0
                self._held += size
            return self._entries.setdefault(key, entry)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._held = 0

    def __len__(self) -> int:
        return len(self._entries)
