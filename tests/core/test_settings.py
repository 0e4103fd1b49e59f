"""Settings: nesting, threads, the environment, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"speed": 11}, TypeError, ("'speed'", "backend", "deterministic")),
        ({"backend": "abacus"}, omnigemm.UnsupportedError, ("'abacus'", "cpu")),
        ({"deterministic": "yes"}, ValueError, ("'yes'", "True or False")),
        ({"weight_cache_mib": -1}, ValueError, ("-1", ">= 0")),
        ({"weight_cache_mib": True}, ValueError, ("True",)),
        ({"constant_weights": 1}, ValueError, ("constant_weights is 1", "True or False")),
        ({"blas_library": 13}, ValueError, ("blas_library is 13", "vendor:path")),
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
    run = _run({name: value}, "from omnigemm.core.settings import current; current()")
    assert run.returncode != 0
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
