"""Every status of a library, every function it may lack, and every place it may be in or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import omnigemm
from backends.blas.cases import (
    NVIDIA,
    STATUS_NAMES,
    caller,
    error_of,
    kernel,
    opened,
    pool,
    product,
    twos,
)
from omnigemm.backends.blas import BlasBackend, discovery
from omnigemm.backends.blas.vendors import VENDORS

PRODUCTS = {"cublasGemmEx": (2, 2), "cublasGemmStridedBatchedEx": (3, 2, 2)}


@pytest.mark.parametrize("status", STATUS_NAMES)
@pytest.mark.parametrize("function", ["cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", *PRODUCTS])
def test_every_status_is_an_error_of_ours(standin: Any, function: str, status: int) -> None:
    shape = PRODUCTS.get(function, (2, 2))
    backend = opened(standin)
    kernel(backend)
    standin.fail(function, status)
    out, name = torch.full(shape, 5.0), STATUS_NAMES[status]
    with pytest.raises(error_of(status), match=rf"NVIDIA cuBLAS: {function} answers {name} \({status}\)"):
        product(backend, out, torch.ones(shape), torch.ones(shape))
    assert bool((out == 5.0).all())
    # The next call works, and what the failed one had taken is given back.
    assert torch.equal(product(backend, out, torch.ones(shape), torch.ones(shape)), torch.full(shape, 2.0))
    pool(backend).close()
    assert standin.live_handles() == 0


def test_a_product_that_fails_in_a_capture_says_what_helps(standin: Any) -> None:
    captures = [False]
    backend = opened(standin, by=caller(capturing=lambda: captures[0]))
    twos(backend)
    captures[0] = True
    standin.fail("cublasGemmEx", 13)
    with pytest.raises(
        omnigemm.DeviceError, match=r"EXECUTION_FAILED \(13\) while a CUDA graph is captured: run the same"
    ):
        twos(backend)
    standin.fail("cublasGemmEx", 7)  # which running it before would not help
    with pytest.raises(omnigemm.LayoutError, match=r"INVALID_VALUE \(7\)$"):
        twos(backend)


@pytest.mark.parametrize("status", STATUS_NAMES)
def test_a_math_mode_that_is_refused(standin: Any, status: int) -> None:
    """Before a C is copied into the result."""
    backend = opened(standin)
    kernel(backend)
    standin.fail("cublasSetMathMode", status)
    a = torch.ones(2, 2, dtype=torch.float16)
    out = torch.full_like(a, 5.0)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        wanted = rf"cublasSetMathMode answers {STATUS_NAMES[status]} \({status}\)"
        with pytest.raises(error_of(status), match=wanted):
            product(backend, out, a, a, a, 1.0, 1.0)
        assert bool((out == 5.0).all())
        assert product(backend, out, a, a, a, 1.0, 1.0)[0, 0] == 3.0
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    assert [line for line in standin.log() if line.startswith("set_math_mode")] == [
        f"set_math_mode h2 16 -> {status}",
        "set_math_mode h2 16",
    ]


def test_a_library_that_lacks_a_function(
    standin_without_gemm: Any, standin_without_workspace: Any, standin_of_batches: Any
) -> None:
    answer = opened(standin_without_gemm).available()
    assert not answer
    assert "lacks the function cublasGemmStridedBatchedEx" in answer.reason
    a = torch.ones(1, 2, dtype=torch.float16)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        for library in (standin_without_workspace, standin_of_batches):
            assert product(opened(library), torch.empty_like(a[:, :1]), a, a.t()).item() == 2.0
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.so", Path(__file__)):
        answer = BlasBackend(NVIDIA, str(path)).available()
        assert not answer
        assert f"{path} cannot be loaded" in answer.reason


# ------------------------------------------------------------------------------------------------------ where it is


def test_what_is_nowhere_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("omnigemm.backends.blas.candidates", lambda vendor: iter(["libcublas.so.4711"]))
    backend = BlasBackend()
    assert not backend.available()
    assert "libcublas.so.4711 cannot be loaded" in backend.available().reason
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    found = omnigemm.explain("gemm", m=1, n=1, k=1, device="cuda")
    assert found.chosen is None
    assert "libcublas.so.4711 cannot be loaded" in str(found)


def test_a_library_in_this_process_comes_first(standin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then NVIDIA's wheels, the newest first, then what cuda.pathfinder finds, then the system's loader."""
    assert list(discovery.loaded((standin.path.name,))) != []
    assert set(discovery.loaded((standin.path.name,))) == {str(standin.path)}
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1 /opt/a b/libcublas.so.13\n"
        "7f01-7f02 r--p 00000000 08:01 1 /opt/a b/libcublas.so.13\n"
        "7f02-7f03 r-xp 00000000 08:01 2 /opt/libcublasLt.so.13\n"
        "7f03-7f04 rw-p 00000000 00:00 0 \n"
        "7f04-7f05 r-xp 00000000 08:01 3 /opt/libcublas.so.12.9.1.4\n"
        "7f05-7f06 r-xp 00000000 08:01 4 /opt/libcublas.so.130\n"
    )
    names = ("libcublas.so.13", "libcublas.so.12")
    assert list(dict.fromkeys(discovery.loaded(names, maps))) == [
        "/opt/a b/libcublas.so.13",
        "/opt/libcublas.so.12.9.1.4",
    ]
    assert list(discovery.loaded(names, tmp_path / "absent")) == []

    wheels = [tmp_path / "nvidia" / "cu13" / "lib", tmp_path / "nvidia" / "cublas" / "lib"]
    for folder, major in zip(wheels, ("13", "12"), strict=True):
        folder.mkdir(parents=True)
        shutil.copy(standin.path, folder / f"libcublas.so.{major}")
    monkeypatch.setattr(discovery.sys, "path", [str(tmp_path)])
    monkeypatch.setattr(discovery, "loaded", lambda names: iter(["/loaded.so", "/loaded.so"]))
    finder = SimpleNamespace(load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=f"/found/lib{name}.so"))
    monkeypatch.setattr(discovery.importlib, "import_module", lambda name: finder)
    nvidia = VENDORS["nvidia"]
    in_wheels = [str(wheels[0] / "libcublas.so.13"), str(wheels[1] / "libcublas.so.12")]
    assert list(discovery.candidates(nvidia)) == ["/loaded.so", *in_wheels, "/found/libcublas.so", *nvidia.libraries]


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_without_pathfinder(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def refuse(name: str) -> None:
        raise error(name)

    monkeypatch.setattr(discovery.importlib, "import_module", refuse)
    monkeypatch.setattr(discovery, "loaded", lambda names: iter(()))
    monkeypatch.setattr(discovery.sys, "path", [])
    assert list(discovery.candidates(VENDORS["nvidia"])) == list(VENDORS["nvidia"].libraries)


def test_the_first_that_works_is_taken(
    standin: Any, standin_without_gemm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["/nowhere.so", str(standin_without_gemm.path), str(standin.path), "/never.so"]
    monkeypatch.setattr("omnigemm.backends.blas.candidates", lambda vendor: iter(paths))
    assert str(standin.path) in BlasBackend(NVIDIA).available().reason
    monkeypatch.setattr("omnigemm.backends.blas.candidates", lambda vendor: iter(paths[:2]))
    reason = BlasBackend(NVIDIA).available().reason
    assert "/nowhere.so cannot be loaded" in reason
    assert "lacks the function" in reason


# ------------------------------------------------------------------------------------------------ the second library


def test_the_second_library_is_of_the_first_ones_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = VENDORS["nvidia"]
    assert nvidia.lt is not None
    for name in ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(discovery.sys, "path", [])
    monkeypatch.setattr(discovery, "loaded", lambda names: (f"/loaded/{one}" for one in names))
    finder = SimpleNamespace(load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=f"/found/lib{name}.so"))
    monkeypatch.setattr(discovery.importlib, "import_module", lambda name: finder)
    for library, names in (
        ("libcublas.so.13", ["libcublasLt.so.13", "libcublasLt.so"]),
        ("libcublas.so.12.9.1.4", ["libcublasLt.so.12", "libcublasLt.so"]),
        ("libcublas.so.130", ["libcublasLt.so"]),
        ("libmine.so", list(nvidia.lt.libraries)),
    ):
        beside = [str(tmp_path / name) for name in names]
        path = str(tmp_path / library)
        assert list(discovery.lt_candidates(nvidia, nvidia.lt, path, named=True)) == beside
        elsewhere = [*(f"/loaded/{name}" for name in names), "/found/libcublasLt.so", *names]
        assert list(discovery.lt_candidates(nvidia, nvidia.lt, path, named=False)) == [*beside, *elsewhere]
    assert list(discovery.lt_candidates(nvidia, nvidia.lt, "libcublas.so.13", named=True)) == []


def test_a_second_library_that_cannot_be_loaded(standin: Any, tmp_path: Path) -> None:
    shutil.copy(standin.path, tmp_path / "libcublas.so.13")
    (tmp_path / "libcublasLt.so.13").write_text("no library")
    backend = BlasBackend(NVIDIA, str(tmp_path / "libcublas.so.13"))
    answer = backend.available()
    assert answer
    assert f"without cuBLASLt: NVIDIA cuBLAS: {tmp_path / 'libcublasLt.so.13'} cannot be loaded" in answer.reason
    assert kernel(backend).product.lt is None
