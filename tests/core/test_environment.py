"""The environment: values that mean nothing, the log, and where the cache is."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnigemm.backends.cuda import explain_on
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.core import settings
from omnigemm.core.problem import describe
from omnigemm.core.settings import cache_dir


@pytest.fixture(autouse=True)
def _unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(settings, "_base", None)
    for name in (*settings.ENVIRONMENT, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    monkeypatch.setenv("OMNIGEMM_LOG", "debug")
    logger = logging.getLogger("omnigemm")
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize("value", ["²", "٣", "9" * 5000, "-1", "1.5", " 7", "1_000"])
def test_number_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMNIGEMM_WEIGHT_CACHE_MIB", value)
    with pytest.raises(ValueError) as caught:
        settings.current()
    assert str(caught.value) == f"OMNIGEMM_WEIGHT_CACHE_MIB is {value!r}, expected a whole number of MiB"


@pytest.mark.parametrize("name", ["OMNIGEMM_DETERMINISTIC", "OMNIGEMM_CONSTANT_WEIGHTS", "OMNIGEMM_WEIGHT_CACHE_MIB"])
def test_log_is_started_when_all_is_right(monkeypatch: pytest.MonkeyPatch, log: logging.Logger, name: str) -> None:
    before = log.handlers[:]
    monkeypatch.setenv(name, "perhaps")
    for _ in range(3):
        with pytest.raises(ValueError, match=name):
            settings.current()
    assert log.handlers == before
    monkeypatch.setenv(name, "1")
    settings.current()
    assert len(log.handlers) == len(before) + 1


def test_log_is_started_once_by_many_threads(monkeypatch: pytest.MonkeyPatch, log: logging.Logger) -> None:
    before = len(log.handlers)
    together = threading.Barrier(8)
    make = logging.StreamHandler

    def slowly() -> logging.Handler:
        made = make()
        together.wait(10)  # all threads have found that there is none
        return made

    monkeypatch.setattr(logging, "StreamHandler", slowly)
    threads = [threading.Thread(target=settings._from_environment) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(log.handlers) == before + 1


# ------------------------------------------------------------------------------------------------ the cache folder


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that the system does not know, without HOME."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)


@pytest.mark.usefixtures("homeless")
def test_without_a_home() -> None:
    assert settings.home() is None
    assert cache_dir() == Path(f"/tmp/omnigemm-{os.geteuid()}")


@pytest.mark.usefixtures("homeless")
def test_plain_calls_need_no_home() -> None:
    assert explain_on(describe("fp8_gemm", m=16, n=256, k=512), KNOWN["h200"]).chosen is not None


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("home", [None, "", "somewhere"])
@pytest.mark.parametrize("value", ["~", "~/kernels"])
def test_home_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, home: str | None, value: str) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert cache_dir() == Path(f"/tmp/omnigemm-{os.geteuid()}")
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", value)
    with pytest.raises(ValueError, match=f"^OMNIGEMM_CACHE_DIR is '{value}', but there is no home folder"):
        cache_dir()


def test_user_who_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", "~no-such-user/kernels")
    with pytest.raises(ValueError, match=r"^OMNIGEMM_CACHE_DIR is '~no-such-user/kernels', expected a folder"):
        cache_dir()


def test_home_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", "~/kernels")
    assert cache_dir() == tmp_path / "kernels"


def test_relative_folder_stays_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", f"in/{tmp_path.name}")
    assert cache_dir() == tmp_path / "in" / tmp_path.name
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cache_dir() == tmp_path / "in" / tmp_path.name


def test_relative_folder_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", f"of-{tmp_path.name}")
    with pytest.raises(ValueError, match=r"^OMNIGEMM_CACHE_DIR is 'of-.*working folder"):
        cache_dir()


def test_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_dir() == tmp_path / ".cache" / "omnigemm"
