"""Handles: kept for their stream, never used by two calls at a time, apart for captures, destroyed at the end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import omnigemm
from backends.blas.cases import caller, exact, kernel, opened, pool, product, products, twos, word
from omnigemm.backends.blas import BlasBackend
from omnigemm.backends.blas.pool import Pool
from omnigemm.backends.blas.vendors import VENDORS


def test_a_handle_is_kept_for_its_stream(standin: Any) -> None:
    streams = iter([1, 2, 1, 2, 1])
    backend = opened(standin, by=caller(lambda: next(streams)))
    for _ in range(5):
        twos(backend)
    log = standin.log()
    assert sum(line.startswith("create") for line in log) == 3  # and one for captures
    assert sum(line.startswith("set_stream") for line in log) == 2
    lines = products(log)
    assert [word(line, "stream") for line in lines] == [hex(one) for one in (1, 2, 1, 2, 1)]
    assert len({word(line, "workspace") for line in lines}) == 2
    assert word(lines[0], "workspace") == word(lines[2], "workspace") != "0x0"
    pool(backend).close()
    assert standin.live_handles() == 0


def in_threads(count: int, work: Any) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_threads_never_share_a_handle(standin: Any, streams: int) -> None:
    local = threading.local()
    backend = opened(standin, by=caller(lambda: local.stream))
    standin.set_delay(300)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    want = exact(a, b).float()
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            local.stream = 1 + (number + turn) % streams
            if not torch.equal(product(backend, torch.empty(8, 8), a, b), want):
                wrong.append(number)

    kernel(backend)
    in_threads(16, work)
    assert not wrong
    assert standin.overlaps() == 0
    assert not [line for line in standin.log() if "->" in line]
    pool(backend).close()
    assert standin.live_handles() == 0


def test_two_calls_at_once_have_two_handles(standin: Any) -> None:
    """The pool runs dry and makes another; both are kept."""
    handles = pool(opened(standin))
    one, two = handles.take(), handles.take()
    assert one is not two
    assert standin.live_handles() == 3
    handles.give(one)
    handles.give(two)
    assert {handles.take(), handles.take()} == {one, two}
    assert standin.live_handles() == 3


def test_no_more_handles(standin: Any) -> None:
    """The library refuses to make another: an error for that call, while those that are there go on."""
    handles = pool(opened(standin))
    one = handles.take()
    standin.fail("cublasCreate_v2", 3, times=100)
    with pytest.raises(omnigemm.DeviceError, match=r"cublasCreate_v2 answers ALLOC_FAILED \(3\)"):
        handles.take()
    handles.give(one)
    assert handles.take() is one


def test_no_memory_for_a_workspace(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [False]
    backend = opened(standin, by=caller(capturing=lambda: captures[0]))
    handles = pool(backend)

    def refuse(self: Pool) -> None:
        raise torch.OutOfMemoryError("for the test")

    for captures[0], live in ((False, 1), (True, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(Pool, "_workspace", refuse)
            with pytest.raises(torch.OutOfMemoryError):
                twos(backend)
        assert standin.live_handles() == live
        twos(backend)
    handles.close()
    assert standin.live_handles() == 0


# ------------------------------------------------------------------------------------------------------- captures


def test_a_capture_shares_no_workspace(standin: Any) -> None:
    captures = [False]
    backend = opened(standin, by=caller(lambda: 7, lambda: captures[0]))
    twos(backend)
    captures[0] = True
    twos(backend)
    twos(backend)
    captures[0] = False
    twos(backend)
    log = standin.log()
    lines = products(log)
    assert sum(line.startswith("create") for line in log) == 2
    handles = [line.split()[1] for line in lines]
    assert handles[0] == handles[3] != handles[1] == handles[2]
    spaces = [word(line, "workspace") for line in lines]
    assert spaces[0] == spaces[3] not in spaces[1:3]
    assert "0x0" not in spaces
    assert [word(line, "stream") for line in lines] == ["0x7"] * 4
    spare = pool(backend)._free[None]
    assert [one.workspace for one in spare] == [None]  # the graph's memory is not held on to


def test_a_capture_before_any_call_is_refused(standin: Any) -> None:
    captures = [True]
    backend = opened(standin, by=caller(capturing=lambda: captures[0]))
    out = torch.full((2, 2), 5.0)
    with pytest.raises(omnigemm.DeviceError, match=r"no handle is ready on cpu.*call the operation once before"):
        product(backend, out, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), 1.0, 1.0)
    assert bool((out == 5.0).all())
    assert standin.log() == []
    captures[0] = False
    twos(backend)
    captures[0] = True
    twos(backend)


def test_a_second_capture_at_once_takes_the_handle_of_a_stream(standin: Any) -> None:
    captures = [False]
    backend = opened(standin, by=caller(capturing=lambda: captures[0]))
    twos(backend)
    captures[0] = True
    handles = pool(backend)
    one, two = handles.take(), handles.take()
    assert one is not two
    with pytest.raises(omnigemm.DeviceError, match="no handle is ready"):
        handles.take()
    handles.give(one)
    handles.give(two)
    captures[0] = False
    twos(backend)  # with a new handle for the stream
    assert standin.live_handles() == 3
    handles.close()
    assert standin.live_handles() == 0


@pytest.mark.parametrize("function", ["cublasSetStream_v2", "cublasSetWorkspace_v2"])
def test_a_capture_that_fails_gives_its_handle_back(standin: Any, function: str) -> None:
    captures = [False]
    backend = opened(standin, by=caller(capturing=lambda: captures[0]))
    twos(backend)
    captures[0] = True
    standin.fail(function, 13)
    with pytest.raises(omnigemm.DeviceError, match="EXECUTION_FAILED"):
        twos(backend)
    twos(backend)
    pool(backend).close()
    assert standin.live_handles() == 0


def test_threads_that_race_for_the_library_open_it_once(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening would have pools of its own, and handles that nobody finds again."""
    opened: list[int] = []
    real = BlasBackend._open

    def slow(self: BlasBackend) -> None:
        opened.append(1)
        time.sleep(0.05)
        real(self)

    monkeypatch.setattr(BlasBackend, "_open", slow)
    backend = BlasBackend(VENDORS["nvidia"], str(standin.path))
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        assert backend.available()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
