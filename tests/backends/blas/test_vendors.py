"""Which library it is: by settings, by the environment, or by what the machine has; and what a record says of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import omnigemm
from backends.blas.cases import NVIDIA, exact, kernel, opened, product, products, twos, word
from omnigemm.backends import backends as all_backends
from omnigemm.backends.blas import BlasBackend, discovery
from omnigemm.backends.blas.caller import Caller, caller_of
from omnigemm.backends.blas.library import LtLibrary
from omnigemm.backends.blas.vendors import VENDORS, Asks
from omnigemm.core import settings
from omnigemm.core.problem import describe
from op_support import forget_calls


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read anew."""
    for name in ("OMNIGEMM_BLAS_LIBRARY", "KUNLUN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(settings, "_base", None)


# ------------------------------------------------------------------------------------------------------- by its name


def test_the_environment_names_it(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIGEMM_BLAS_LIBRARY", f"nvidia:{standin.path}")
    assert str(standin.path) in BlasBackend().available().reason


@pytest.mark.parametrize("text", ["abacus", "abacus:/x", "/opt/libcublas.so.13", ":/opt/libcublas.so.13"])
def test_a_vendor_that_is_none_is_a_reason(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Other backends go on."""
    backend, cpu = BlasBackend(), all_backends()[-1]
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend, cpu))
    expected = f"is {text!r}, expected vendor or vendor:path with one of nvidia, kunlun as the vendor"
    forget_calls()
    with omnigemm.settings(blas_library=text):
        assert expected in backend.available().reason
        assert not backend.available()
        assert expected in str(omnigemm.explain("gemm", m=1, n=1, k=1))
        assert omnigemm.gemm(torch.ones(2, 3), torch.ones(3, 2)).tolist() == [[3.0, 3.0]] * 2
        with pytest.raises(omnigemm.UnsupportedError, match="expected vendor or vendor:path"):
            omnigemm.gemm(torch.ones(2, 3), torch.ones(3, 2), backend="blas")


def test_settings_name_it_for_a_while(standin: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library has its own plans, handles and algorithms, also for the very same call."""
    monkeypatch.setitem(VENDORS, "nvidia", NVIDIA)  # type: ignore[arg-type]
    backend = BlasBackend(caller=Caller(lambda: 0, lambda index: 7, lambda: False))
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()
    a, b, out = torch.randn(4, 6), torch.randn(6, 5), torch.empty(4, 5)
    for _ in range(3):
        for library in (standin, pair):
            with omnigemm.settings(blas_library=f"nvidia:{library.path}"):
                assert torch.equal(omnigemm.gemm(a, b, out=out.fill_(7.0)), exact(a, b).float())
                assert str(library.path) in backend.available().reason
    forget_calls()
    assert len(products(standin.log())) == 3
    assert sum(line.startswith("matmul") for line in pair.lt.log()) == 3
    assert sum(line.startswith("create") for line in standin.log()) == 2
    assert not products(pair.blas.log())


# ------------------------------------------------------------------------------------------------ without being named


@pytest.mark.parametrize("gpu", [False, True])
def test_without_a_word_it_is_the_library_of_torch(standin: Any, monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("omnigemm.backends.blas.candidates", lambda vendor: iter([str(standin.path)]))
    answer = BlasBackend().available()
    assert answer.ok == gpu
    if gpu:
        assert f"NVIDIA cuBLAS from {standin.path}" in answer.reason
    else:
        assert "torch finds no GPU; OMNIGEMM_BLAS_LIBRARY names" in answer.reason
        assert "or KUNLUN_HOME its folder" in answer.reason


@pytest.mark.parametrize("gpu", [False, True])
def test_a_vendors_folder_is_word_enough(
    build_kunlun: Callable[..., Any], standin: Any, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """But a GPU that torch finds comes first, unless there is no library for it."""
    kunlun = build_kunlun(True)
    monkeypatch.setenv("KUNLUN_HOME", str(kunlun.home))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = discovery.candidates

    def candidates(vendor: Any) -> Iterator[str]:
        return found(vendor) if vendor.name == "kunlun" else iter([nvidias])

    monkeypatch.setattr("omnigemm.backends.blas.candidates", candidates)
    for nvidias, taken in ((str(standin.path), gpu), ("/nowhere.so", False)):
        answer = BlasBackend().available()
        assert answer, answer.reason
        title = f"NVIDIA cuBLAS from {nvidias}" if taken else f"Kunlun xpu_blas from {kunlun.path}"
        assert title in answer.reason


def test_a_process_of_its_own_finds_the_vendors_folder(build_kunlun: Callable[..., Any]) -> None:
    """The library needs the runtime, which lies elsewhere; it is loaded first."""
    kunlun = build_kunlun(True)
    script = "from omnigemm.backends import backends; print(backends()[1].available().reason)"
    environment = {**os.environ, "KUNLUN_HOME": str(kunlun.home), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(one for one in sys.path if one)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.startswith(f"Kunlun xpu_blas from {kunlun.path}, bf16 by cublasLt of xpu_blas"), run


# ------------------------------------------------------------------------------------------------------ what it says


def test_kunluns_record() -> None:
    """Where the vendor's own build scripts, and those of its users, expect things."""
    kunlun = VENDORS["kunlun"]
    assert kunlun.device_type == "cuda"
    assert kunlun.folders == ("lib", "lib64", "so", "xhpc/xblas/so")
    assert kunlun.runtime_folders == ("lib", "lib64", "so", "xre/so")
    assert (kunlun.home, kunlun.runtime, kunlun.wait) == ("KUNLUN_HOME", ("libxpurt.so",), "xpu_wait")


@pytest.mark.parametrize("folder", ["lib", "lib64", "so", "xhpc/xblas/so"])
@pytest.mark.parametrize("runtime", ["beside", "lib", "lib64", "so", "xre/so"])
def test_every_folder_of_kunluns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, runtime: str) -> None:
    kunlun = VENDORS["kunlun"]
    monkeypatch.setenv("KUNLUN_HOME", str(tmp_path))
    library = tmp_path / folder / "libxpu_blas.so"
    waits = (library.parent if runtime == "beside" else tmp_path / runtime) / "libxpurt.so"
    for file in (library, waits):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert list(discovery.candidates(kunlun)) == [str(library)]
    found = list(discovery.runtime_candidates(kunlun, str(library)))
    assert list(dict.fromkeys(found)) == [str(waits), "libxpurt.so"]


def test_a_record_for_devices_of_another_type(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions of torch's module for them are asked, and nothing of CUDA's."""
    where, entered = [1], []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        where[0] = index
        yield
        where[0] = 1

    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: where[0],
        current_stream=lambda index: SimpleNamespace(musa_stream=0x90 + index),
        is_current_stream_capturing=lambda: False,
        device=device,
    )
    monkeypatch.setattr(torch, "musa", module, raising=False)
    moore = dataclasses.replace(NVIDIA, name="moore", title="Moore mublas", device_type="musa", lt=None)
    backend = BlasBackend(moore, str(standin.path))
    twos(backend)
    assert entered == [0]
    assert word(products(standin.log())[0], "stream") == "0x90"
    lists = [[torch.ones(2, 2)] for _ in range(3)]
    kernel(backend).groups(*lists, None, [1.0], [0.0])
    assert entered == [0, 0]
    problem: Any = describe("gemm", m=1, n=1, k=1)
    there: Any = SimpleNamespace(type="musa", index=1)
    assert backend.supports(problem, there)
    there.index = 2
    assert "torch finds 2 GPUs" in backend.supports(problem, there).reason
    assert "Moore mublas computes on musa tensors" in backend.supports(problem, torch.device("cuda")).reason
    monkeypatch.setattr("omnigemm.backends.blas.VENDORS", {"moore": moore})
    monkeypatch.setattr("omnigemm.backends.blas.candidates", lambda vendor: iter([str(standin.path)]))
    assert "Moore mublas from" in BlasBackend().available().reason  # torch finds its GPUs


def test_what_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "musa", SimpleNamespace(), raising=False)
    by = caller_of(dataclasses.replace(NVIDIA, device_type="musa"))
    assert by.capturing() is False  # no graphs there
    for ask in (by.device, lambda: by.stream(0), lambda: by.on(0)):
        with pytest.raises(omnigemm.DeviceError, match=r"torch has no musa\."):
            ask()


def test_names_of_torchs_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = SimpleNamespace(device=lambda: 3, stream=lambda index: 0x40 + index, capturing=lambda: True)
    monkeypatch.setattr(torch, "_fast", fast, raising=False)
    by = caller_of(dataclasses.replace(NVIDIA, asks=Asks("_fast.device", "_fast.stream", "_fast.capturing")))
    assert (by.device(), by.stream(2), by.capturing()) == (3, 0x42, True)
    asked = VENDORS["nvidia"].asked
    assert asked == VENDORS["kunlun"].asked
    assert asked == Asks("_C._cuda_getDevice", "_C._cuda_getCurrentRawStream", "_C._cuda_isCurrentStreamCapturing")


def test_memory_that_is_kept_is_made_by_a_thread_without_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the device and the stream of the caller, and its errors are the caller's."""
    local = threading.local()
    local.device, local.stream = 1, "mine"

    @contextlib.contextmanager
    def use(name: str, value: object) -> Iterator[None]:
        setattr(local, name, value)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: local.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: local.stream)
    monkeypatch.setattr(torch.cuda, "device", lambda index: use("device", index))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: use("stream", stream))
    seen: list[object] = []

    def make(fails: bool = False) -> torch.Tensor:
        seen.append((threading.get_ident() != here, local.device, local.stream))
        if fails:
            raise torch.OutOfMemoryError("for the test")
        return torch.ones(3)

    here, by = threading.get_ident(), caller_of(VENDORS["nvidia"])
    assert by.apart(make) is not None
    with pytest.raises(torch.OutOfMemoryError):
        by.apart(partial(make, True))
    assert seen == [(True, 1, "mine")] * 2
    assert caller_of(dataclasses.replace(NVIDIA, device_type="musa")).apart(lambda: None) is None


def test_only_of_cuda_a_stream_is_known_that_no_graph_captures() -> None:
    assert caller_of(VENDORS["nvidia"]).uncaptured == 0
    assert caller_of(dataclasses.replace(NVIDIA, device_type="musa")).uncaptured is None


def test_codes_and_statuses_of_its_own(standin: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    described, call = [], LtLibrary.call

    def look(self: LtLibrary, name: str, *given: Any) -> None:
        if name == "create_operation":
            described.append(given[1:])
        call(self, name, *given)

    monkeypatch.setattr(LtLibrary, "call", look)
    own = {"codes": {"fp32": 5, "fp16": 6, "bf16": 7}, "compute": 8, "statuses": {15: "NOT_TODAY", 7: "NOT_SUPPORTED"}}
    record = dataclasses.replace(NVIDIA, **own)
    with pytest.raises(omnigemm.DeviceError, match=r"cublasGemmEx answers NOT_TODAY \(15\)"):
        twos(opened(standin, record))
    (line,) = products(standin.log())
    assert (word(line, "types"), word(line, "compute")) == ("5,5,5", "8")
    standin.fail("cublasGemmEx", 7)
    with pytest.raises(omnigemm.UnsupportedError, match=r"NOT_SUPPORTED \(7\)"):
        twos(opened(standin, record))
    with pytest.raises(omnigemm.DeviceError, match=r"cublasLtMatmulAlgoGetHeuristic answers NOT_TODAY \(15\)"):
        twos(opened(pair, record))
    assert described == [(8, 5)]  # the compute type, and the type of factors
    with pytest.raises(omnigemm.DeviceError, match=r"cublasGemmGroupedBatchedEx answers NOT_TODAY \(15\)"):
        kernel(opened(standin, record)).groups(*[[torch.ones(2, 2)] for _ in range(3)], None, [1.0], [0.0])
    assert word(next(line for line in standin.log() if line.startswith("group ")), "types") == "5,5,5"


def test_tf32_has_a_code_too(standin: Any, pair: Any) -> None:
    record = dataclasses.replace(NVIDIA, compute_tf32=68)  # of which it has none
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        twos(opened(standin, record))
        twos(opened(pair, record))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    lines = [*products(standin.log()), *(line for line in pair.lt.log() if line.startswith("matmul"))]
    assert [word(line, "compute") for line in lines] == ["68", "68"]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_types_that_only_the_second_library_has(pair: Any, kind: str) -> None:
    """And what that has no algorithm for goes through fp32 copies, which its heuristic is asked about too."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]
    record = dataclasses.replace(NVIDIA, types=tuple(one for one in NVIDIA.types if one != kind))
    backend = opened(pair, record)
    a, b = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype)
    c, out = torch.randn(4, 5).to(dtype), torch.empty(4, 5, dtype=dtype)
    for rest in ((None, 1.0, 0.0), (c, 2.0, 0.5)):
        torch.testing.assert_close(product(backend, out, a, b, *rest), exact(a, b, *rest).to(dtype))
    found = [line for line in pair.lt.log() if line.startswith("matmul")]
    assert {word(line, "types").split(",")[0] for line in found} == {str(VENDORS["nvidia"].codes[kind])}
    pair.find(0)
    backend = opened(pair, record)
    for rest in ((None, 1.0, 0.0), (c, 2.0, 0.5), (c[0], 2.0, 0.5)):
        torch.testing.assert_close(product(backend, out, a, b, *rest), exact(a, b, *rest).to(dtype))
    assert {word(line, "types") for line in products(pair.blas.log())} == {"0,0,0"}
    reason = kernel(backend).supports(describe("gemm", m=1, n=1, k=1, dtype=kind), torch.device("cpu")).reason
    assert f"where it has an algorithm, else {kind} through fp32 copies" in reason


def test_a_record_without_fp32(standin: Any) -> None:
    backend = opened(standin, dataclasses.replace(NVIDIA, types=("fp16",)))
    assert backend.supports(describe("gemm", m=1, n=1, k=1, dtype="fp16"), torch.device("cpu"))
    for kind in ("fp32", "bf16"):
        answer = backend.supports(describe("gemm", m=1, n=1, k=1, dtype=kind), torch.device("cpu"))
        assert not answer
        assert f"NVIDIA cuBLAS has no {kind} products" in answer.reason


def test_who_chooses_needs_the_functions_for_it(build_pair: Callable[..., Any]) -> None:
    path = str(build_pair("WITHOUT_HEURISTIC").lt.path)
    chooses = VENDORS["nvidia"].lt
    assert chooses is not None
    with pytest.raises(omnigemm.DeviceError, match="lacks the function cublasLtMatmulAlgoGetHeuristic"):
        LtLibrary(NVIDIA, chooses, path)
    assert not LtLibrary(NVIDIA, dataclasses.replace(chooses, chooses=False), path).has("choose")
