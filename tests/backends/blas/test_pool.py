"""Handles: kept for their stream, never used by two calls at a time, apart for captures, destroyed at the end."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import omnigemm
from backends.blas.cases import (
    CPU,
    KUNLUN,
    caller,
    exact,
    in_threads,
    kernel,
    opened,
    pool,
    product,
    products,
    twos,
    word,
)
from omnigemm.backends.blas import BlasBackend, kept
from omnigemm.backends.blas import pool as pool_module
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


def test_what_is_kept_is_made_where_no_pool_gets_it(standin: Any) -> None:
    made: list[Any] = []
    by = dataclasses.replace(caller(), apart=lambda make: made.append(memory := make()) or memory)
    backend = opened(standin, by=by)
    for _ in range(2):
        twos(backend)
    (kept,) = made
    assert {word(line, "workspace") for line in products(standin.log())} == {hex(kept.data_ptr())}


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
    captures[0] = False  # none is destroyed in a capture
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


def test_a_second_capture_at_once_takes_the_handle_of_a_stream(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [False]
    backend = opened(standin, by=caller(capturing=lambda: captures[0]))
    twos(backend)
    captures[0] = True
    handles = pool(backend)
    one, two = handles.take(), handles.take()
    assert one is not two
    monkeypatch.setattr(pool_module, "_PATIENCE", 0.05)
    with pytest.raises(omnigemm.DeviceError, match=r"all handles on cpu are in use, for 0 s by now, and a CUDA graph"):
        handles.take()
    handles.give(one)
    handles.give(two)
    captures[0] = False
    twos(backend)  # with a new handle for the stream
    assert standin.live_handles() == 3
    handles.close()
    assert standin.live_handles() == 0


@pytest.mark.parametrize("library", ["standin", "pair"])
def test_captures_at_once_wait_for_a_handle(request: pytest.FixtureRequest, library: str) -> None:
    """With cuBLASLt, there is just the one that was made for captures."""
    made, local = request.getfixturevalue(library), threading.local()
    blas = made if library == "standin" else made.blas
    by = caller(lambda: getattr(local, "stream", 1), lambda: getattr(local, "capturing", False))
    backend = opened(made, by=by)
    twos(backend)
    blas.set_delay(20000)
    ready = threading.Barrier(4)
    wrong: list[str] = []

    def work(number: int) -> None:
        local.stream, local.capturing = 10 + number, True
        a, b = torch.randn(3 + number, 6), torch.randn(6, 5)  # a product that nobody has chosen for
        out = torch.empty(3 + number, 5)
        ready.wait()
        try:
            if not torch.equal(product(backend, out, a, b), exact(a, b).float()):
                wrong.append(f"{number}: another result")
        except omnigemm.OmniGemmError as error:
            wrong.append(f"{number}: {error}")

    in_threads(4, work)
    assert not wrong
    assert blas.overlaps() == 0
    assert len(products(blas.log())) == (5 if library == "standin" else 4)


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
    captures[0] = False  # none is destroyed in a capture
    pool(backend).close()
    assert standin.live_handles() == 0


def test_threads_that_race_for_the_library_open_it_once(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening would have pools of its own, and handles that nobody finds again."""
    opened: list[int] = []
    real = BlasBackend._open

    def slow(self: BlasBackend, named: str | None) -> Any:
        opened.append(1)
        time.sleep(0.05)
        return real(self, named)

    monkeypatch.setattr(BlasBackend, "_open", slow)
    backend = BlasBackend(VENDORS["nvidia"], str(standin.path))
    ready = threading.Barrier(8)

    def ask(_: int) -> None:
        ready.wait()
        assert backend.available()

    in_threads(8, ask)
    assert len(opened) == 1


# ------------------------------------------------------------------------------------------------- how many are kept


@pytest.mark.parametrize("library", ["standin", "pair"])
def test_of_many_streams_the_oldest_are_let_go(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """A handle serves another stream, and its workspace goes back; nothing is destroyed, and nobody waits."""
    monkeypatch.setattr(kept, "IDLE", 4)
    made, stream, memory = request.getfixturevalue(library), [0], []
    real = torch.empty

    def empty(*size: Any, **words: Any) -> torch.Tensor:
        made = real(*size, **words)
        if words.get("dtype") == torch.uint8:
            memory.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty", empty)
    backend = opened(made, by=caller(lambda: stream[0]))
    a, b = torch.ones(2, 32), torch.ones(32, 2)
    outs = torch.zeros(21, 2, 2).unbind()  # of each, what was handed over is remembered
    launch = kernel(backend).product.bind(outs[0], a, b, None, 1.0, 0.0)
    alive = []
    for stream[0] in [*range(1, 21), 1, 20, 19, 1, 2]:  # 19 and 20 are there still
        out = outs[stream[0]]
        launch(out.zero_(), a, b, None, 1.0, 0.0)
        assert bool((out == 32.0).all())
        alive.append(sum(one() is not None for one in memory))
    assert len(memory) == 22
    assert max(alive) == 4
    if library == "standin":
        log = made.log()
        lines = [(word(line, "stream"), word(line, "workspace")) for line in products(log)]
        assert made.live_handles() == 5  # and the one for captures
        assert not [line for line in log if line.startswith("destroy")]
    else:
        found = [line for line in made.lt.log() if line.startswith("matmul")]
        lines = [(word(line, "stream"), word(line, "workspace")) for line in found]
    assert [int(one, 16) for one, _ in lines] == [*range(1, 21), 1, 20, 19, 1, 2]
    assert lines[20] == lines[23]
    assert lines[19] == lines[21]
    assert lines[18] == lines[22]


def test_what_another_thread_took_meanwhile_is_not_let_go(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "IDLE", 2)
    stream = [0]
    handles = pool(opened(standin, by=caller(lambda: stream[0])))
    taken = []
    for stream[0] in (1, 2):
        taken.append(handles.take())
    for one in taken:
        handles.give(one)

    class Late(list[Any]):
        def remove(self, one: Any) -> None:
            raise ValueError

    handles._free[1] = Late(handles._free[1])
    assert handles._oldest() is taken[1]
    handles.give(taken[1])
    handles._free[2] = Late(handles._free[2])
    assert handles._oldest() is None


def test_a_vendor_that_is_waited_for_keeps_all(
    build_kunlun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "IDLE", 4)
    kunlun, stream = build_kunlun(True), [0]
    monkeypatch.setenv("KUNLUN_HOME", str(kunlun.home))
    backend = opened(kunlun, KUNLUN, caller(lambda: stream[0]))
    a, out = torch.ones(2, 2, dtype=torch.bfloat16), torch.empty(2, 2, dtype=torch.bfloat16)
    for stream[0] in range(10):
        twos(backend)
        product(backend, out, a, a)
    assert sum(len(free) for free in pool(backend)._free.values()) == 11
    lt = kernel(backend).product.lt
    assert lt is not None
    assert sum(len(free) for free in lt.device(CPU).rooms._free.values()) == 10
    assert kunlun.runtime.log() == []


# ------------------------------------------------------------------------------------------------------------ the end


def test_an_error_of_binding_is_not_hidden_by_one_of_destroying(standin: Any) -> None:
    backend = opened(standin)
    kernel(backend)
    standin.fail("cublasSetWorkspace_v2", 3)
    standin.fail("cublasDestroy_v2", 14)
    with pytest.raises(omnigemm.DeviceError, match=r"cublasSetWorkspace_v2 answers ALLOC_FAILED \(3\)"):
        twos(backend)
    twos(backend)


def test_handles_end_with_the_backend(standin: Any) -> None:
    backend = opened(standin)
    twos(backend)
    handles = weakref.ref(pool(backend))
    assert standin.live_handles() == 2
    del backend
    gc.collect()
    assert handles() is None
    assert standin.live_handles() == 0


@pytest.mark.parametrize("library", ["standin", "pair"])
def test_what_is_collected_in_a_capture_is_destroyed_at_exit(
    request: pytest.FixtureRequest, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection may come at any time, and destroying a handle waits for the device, which spoils a capture."""
    made, captures, at_exit = request.getfixturevalue(library), [False], list[Any]()
    handles = [made.live_handles] if library == "standin" else [made.blas.live_handles, made.lt.live_handles]
    backend = opened(made, by=caller(capturing=lambda: captures[0]))
    twos(backend)
    before = [count() for count in handles]
    assert all(before)
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    captures[0] = True
    del backend
    gc.collect()
    assert [count() for count in handles] == before
    captures[0] = False
    for function, *arguments in at_exit:
        function(*arguments)
    assert not any(count() for count in handles)


SCRIPT = """
import atexit, ctypes, os, sys
made = ctypes.CDLL({path!r})
made.standin_log.restype = ctypes.c_char_p
atexit.register(lambda: print(len(os.environ.get("CHILD", "")), made.standin_live_handles(), flush=True))  # the last
from types import SimpleNamespace
from backends.blas.cases import opened, twos
backend = opened(SimpleNamespace(path={path!r}))
twos(backend)
print("made", made.standin_live_handles(), flush=True)
if {forks} and os.fork() == 0:
    os.environ["CHILD"] = "x"
    sys.exit()
if {forks}:
    os.wait()
atexit.register(lambda: print(made.standin_log().decode().count("destroy"), "destroyed before", flush=True))
"""


@pytest.mark.parametrize("library", ["standin", "pair"])
@pytest.mark.parametrize("forks", [False, True])
def test_handles_are_destroyed_at_exit_by_who_made_them(
    request: pytest.FixtureRequest, library: str, forks: bool
) -> None:
    path = str(request.getfixturevalue(library).path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    script = SCRIPT.format(path=path, forks=forks)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, cwd="tests", env=environment, check=False,
    )  # fmt: skip
    count = 2 if library == "standin" else 1
    child = [f"1 {count}"] if forks else []  # the parent's handles are alive in it
    assert run.stdout.splitlines() == [f"made {count}", *child, "0 destroyed before", "0 0"], run


def test_nothing_of_cublaslt_is_destroyed_in_a_child(pair: Any) -> None:
    backend = opened(pair)
    twos(backend)
    by_lt = kernel(backend).product.lt
    assert by_lt is not None
    library, opened_by = by_lt.library, by_lt.library._process
    library._process = opened_by + 1  # as a child sees it
    del backend, by_lt
    gc.collect()
    assert pair.lt.live_handles() == 1
    assert pair.live_objects() == 5
