"""Settings: nesting, threads, the environment, and what is refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import omnigemm
from omnigemm.core.settings import cache_dir, current


def test_nesting_and_restoring() -> None:
    outer = current()
    with omnigemm.settings(deterministic=True):
        with omnigemm.settings(backend="cpu", weight_cache_mib=5):
            assert (current().deterministic, current().backend, current().weight_cache_mib) == (True, "cpu", 5)
        assert current().backend is None
    assert current() == outer


def test_restored_after_an_error() -> None:
    outer = current()
    with pytest.raises(KeyError), omnigemm.settings(deterministic=True):
        raise KeyError
    assert current() == outer


def test_one_object_used_twice_nested_and_as_a_decorator() -> None:
    steer = omnigemm.settings(deterministic=True)

    @steer
    def inside() -> bool:
        return current().deterministic

    with steer, steer:
        assert inside()
    assert not current().deterministic


def test_other_threads_do_not_see_it() -> None:
    seen = []
    with omnigemm.settings(deterministic=True):
        thread = threading.Thread(target=lambda: seen.append(current().deterministic))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_decorated_function_in_two_threads() -> None:
    both = threading.Barrier(2)

    @omnigemm.settings(deterministic=True)
    def inside(seen: list[bool]) -> None:
        both.wait()  # both have entered
        seen.append(current().deterministic)
        both.wait()  # and neither has left

    def run(seen: list[bool]) -> None:
        try:
            inside(seen)
        finally:
            seen.append(current().deterministic)

    seen: tuple[list[bool], ...] = ([], [])
    threads = [threading.Thread(target=run, args=(one,)) for one in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ([True, False], [True, False])


def test_one_object_in_two_tasks() -> None:
    steer = omnigemm.settings(deterministic=True)

    async def task(first: asyncio.Event, second: asyncio.Event) -> tuple[bool, bool]:
        with steer:
            first.set()
            await second.wait()
            inside = current().deterministic
        return inside, current().deterministic

    async def both() -> list[tuple[bool, bool]]:
        one, other = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(task(one, other), task(other, one))

    assert asyncio.run(both()) == [(True, False)] * 2


def test_generators_are_not_decorated() -> None:
    """Their settings would end before they begin."""

    def one() -> Iterator[int]:
        yield 1

    async def another() -> AsyncIterator[int]:
        yield 1

    for function in (one, another):
        with pytest.raises(
            omnigemm.SettingsError, match=rf"settings: .*{function.__name__} is a generator function, exp"
        ):
            omnigemm.settings(deterministic=True)(function)


def test_a_decorated_coroutine_has_it_until_it_is_done() -> None:
    @omnigemm.settings(deterministic=True)
    async def inside() -> bool:
        await asyncio.sleep(0)
        return current().deterministic

    async def run() -> tuple[bool, bool]:
        return await inside(), current().deterministic

    assert asyncio.run(run()) == (True, False)


def test_nothing_stays_if_they_are_left_in_another_order_or_elsewhere() -> None:
    outer, inner = omnigemm.settings(deterministic=True), omnigemm.settings(weight_cache_mib=5)
    before = current()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__()
    assert current() == before
    inner.__exit__()
    assert current() == before
    with outer:
        thread = threading.Thread(target=outer.__exit__)
        thread.start()
        thread.join()
        assert current().deterministic
    assert current() == before


def test_compiled_code_has_what_is_around_it() -> None:
    """And does not go on without it where it cannot have it."""
    refused, a = omnigemm.settings(backend="cuda"), torch.ones(2, 2)

    def inside(a: torch.Tensor) -> torch.Tensor:
        with refused:
            return omnigemm.gemm(a, a)

    product = torch.compile(lambda a: omnigemm.gemm(a, a), fullgraph=True, backend="eager")
    assert product(a).eq(2).all()
    with refused, pytest.raises(omnigemm.UnsupportedError):
        product(a)
    with pytest.raises(omnigemm.UnsupportedError):
        torch.compile(inside, backend="eager")(a)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(inside, fullgraph=True, backend="eager")(a)


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"speed": 11}, TypeError, ("'speed'", "backend", "deterministic")),
        ({"backend": "abacus"}, omnigemm.UnsupportedError, ("'abacus'", "cpu")),
        ({"backend": np.ones(2)}, omnigemm.UnsupportedError, ("array([1., 1.])", "cpu")),
        ({"deterministic": "yes"}, omnigemm.SettingsError, ("'yes'", "True or False")),
        ({"weight_cache_mib": -1}, omnigemm.SettingsError, ("-1", ">= 0")),
        ({"weight_cache_mib": True}, omnigemm.SettingsError, ("True",)),
        ({"constant_weights": 1}, omnigemm.SettingsError, ("constant_weights is 1", "True or False")),
        ({"blas_library": 13}, omnigemm.SettingsError, ("blas_library is 13", "vendor:path")),
    ],
)
def test_refused(changes: dict[str, object], error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        omnigemm.settings(**changes)
    for part in parts:
        assert part in str(caught.value)


def _run(environment: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_environment() -> None:
    code = "from omnigemm.core.settings import current; print(current())"
    given = {
        "OMNIGEMM_BACKEND": "cpu",
        "OMNIGEMM_DETERMINISTIC": "1",
        "OMNIGEMM_WEIGHT_CACHE_MIB": "7",
        "OMNIGEMM_CONSTANT_WEIGHTS": "1",
        "OMNIGEMM_BLAS_LIBRARY": "nvidia",
    }
    run = _run(given, code)
    assert run.stdout.strip() == (
        "Settings(backend='cpu', deterministic=True, weight_cache_mib=7, constant_weights=True, blas_library='nvidia')"
    )


def test_log_prints_each_new_problem_once() -> None:
    code = "import torch, omnigemm; [omnigemm.gemm(torch.ones(2, 3), torch.ones(3, 2)) for _ in range(3)]"
    run = _run({"OMNIGEMM_LOG": "debug"}, code)
    assert run.stderr.count("gemm 2x2x3") == 1, run.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMNIGEMM_BACKEND", "abacus"),
        ("OMNIGEMM_DETERMINISTIC", "maybe"),
        ("OMNIGEMM_CONSTANT_WEIGHTS", "yes"),
        ("OMNIGEMM_WEIGHT_CACHE_MIB", "lots"),
        ("OMNIGEMM_LOG", "loud"),
    ],
)
def test_bad_environment_names_the_variable(name: str, value: str) -> None:
    run = _run({name: value}, "import torch, omnigemm; omnigemm.gemm(torch.ones(1, 1), torch.ones(1, 1))")
    assert run.returncode != 0
    assert ("UnsupportedError" if name == "OMNIGEMM_BACKEND" else "SettingsError") in run.stderr
    assert name in run.stderr
    assert repr(value) in run.stderr


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "kernels"))
    assert cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("OMNIGEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "omnigemm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "omnigemm"
