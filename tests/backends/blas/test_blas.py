"""The blas backend against a library with the same ABI that computes on host memory (standin.c)."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.blas import BlasBackend, BlasKernel
from omnigemm.backends.blas.gemm import Matrices
from omnigemm.backends.blas.vendors import STATUSES, VENDORS
from omnigemm.core.dtypes import name_of
from omnigemm.core.problem import Problem, describe
from omnigemm.ops._run import calls

CPU = torch.device("cpu")
NVIDIA = dataclasses.replace(VENDORS["nvidia"], device_type="cpu", workspace_bytes=4096)
KUNLUN = dataclasses.replace(VENDORS["kunlun"], device_type="cpu", workspace_bytes=4096)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
STREAM = 0x70


def opened(standin: Any, vendor: Any = NVIDIA, stream: int = STREAM) -> BlasBackend:
    return BlasBackend(vendor, str(standin.path), stream_of=lambda device: stream)


def kernel(backend: BlasBackend) -> BlasKernel:
    assert backend.available()
    (found,) = backend.kernels(describe("gemm", m=1, n=1, k=1), CPU)
    assert isinstance(found, BlasKernel)
    return found


def product(backend: BlasBackend, out: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    c, alpha, beta = rest or (None, 1.0, 0.0)
    kernel(backend).product(out, a, b, c, alpha, beta)
    return out


def exact(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    result = alpha * torch.matmul(a.double(), b.double())
    return result if c is None or beta == 0.0 else result + beta * c.double()


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same values with other strides."""
    if how == "columns":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "wide":  # rows of a wider matrix
        wide = torch.full((*x.shape[:-1], x.size(-1) + 3), float("nan"), dtype=x.dtype)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if how == "scattered":  # no dimension is dense
        wide = torch.full((*x.shape[:-1], 2 * x.size(-1)), float("nan"), dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x.contiguous()


LAYOUTS = ["rows", "columns", "wide", "scattered"]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("a_how", "b_how", "out_how"), list(itertools.product(LAYOUTS, LAYOUTS, LAYOUTS)))
def test_every_transposition_and_stride(standin: Any, dtype: torch.dtype, a_how: str, b_how: str, out_how: str) -> None:
    backend = opened(standin)
    for batch in ((), (3,)):
        a = laid_out(torch.randn(*batch, 4, 6).to(dtype), a_how)
        b = laid_out(torch.randn(*batch, 6, 5).to(dtype), b_how)
        out = laid_out(torch.full((*batch, 4, 5), float("nan"), dtype=dtype), out_how)
        assert torch.equal(product(backend, out, a, b), exact(a, b).to(dtype))
        c = torch.randn(*batch, 4, 5).to(dtype)
        want = exact(a, b, c, 0.5, -2.0)
        torch.testing.assert_close(product(backend, out, a, b, c, 0.5, -2.0), want.to(dtype))
        torch.testing.assert_close(product(backend, out.copy_(c), a, b, out, 0.5, -2.0), want.to(dtype))


def test_transposed_views_are_not_copied(standin: Any) -> None:
    backend = opened(standin)
    a, b = torch.randn(6, 4).t(), torch.randn(5, 6).t()
    product(backend, torch.empty(4, 5), a, b)
    product(backend, torch.empty(5, 4).t(), a, b)
    product(backend, torch.empty(4, 5), a.contiguous(), b.contiguous())
    first, second, third = (line for line in standin.log() if line.startswith("gemm"))
    assert "ta=1 tb=1 m=5 n=4 k=6" in first  # D^T = B^T A^T
    assert "lda=6 ldb=4 ldc=5" in first
    assert "ta=0 tb=0 m=4 n=5 k=6" in second  # D as it is
    assert "lda=4 ldb=6 ldc=4" in second
    assert "ta=0 tb=0 m=5 n=4 k=6" in third


@pytest.mark.parametrize("a_shape", [(4, 6), (1, 4, 6), (3, 4, 6)])
@pytest.mark.parametrize("b_shape", [(6, 5), (1, 6, 5), (3, 6, 5)])
def test_batches_broadcast(standin: Any, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    backend = opened(standin)
    a, b = torch.randn(a_shape), torch.randn(b_shape)
    want = exact(a, b).float()
    assert torch.equal(product(backend, torch.full_like(want, float("nan")), a, b), want)
    repeated = torch.randn(1, 4, 6).expand(3, 4, 6)
    other = torch.randn(3, 6, 5)
    assert torch.equal(product(backend, torch.empty(3, 4, 5), repeated, other), exact(repeated, other).float())


@pytest.mark.parametrize("shape", [(0, 5, 6), (4, 0, 6), (4, 5, 0), (1, 1, 1), (1, 5, 6), (4, 1, 6), (4, 5, 1)])
def test_thin_and_empty(standin: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    backend = opened(standin)
    for a_how, b_how in itertools.product(LAYOUTS, LAYOUTS):
        a, b = laid_out(torch.randn(m, k), a_how), laid_out(torch.randn(k, n), b_how)
        c = torch.randn(m, n)
        out = torch.full((m, n), float("nan"))
        assert torch.equal(product(backend, out, a, b), exact(a, b).float())
        torch.testing.assert_close(product(backend, out, a, b, c, 1.0, 0.5), exact(a, b, c, 1.0, 0.5).float())


def test_a_row_that_repeats_is_copied(standin: Any) -> None:
    a, b = torch.randn(1, 6).expand(4, 6), torch.randn(6, 5)
    assert torch.equal(product(opened(standin), torch.empty(4, 5), a, b), exact(a, b).float())
    assert Matrices.of(a) is None
    assert Matrices.of(torch.empty(0, 3, device="meta").as_strided((2, 3), (2**31, 1))) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_wide_results(standin: Any, dtype: torch.dtype) -> None:
    a, b, c = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype), torch.randn(4, 5).to(dtype)
    out = torch.empty(4, 5)
    backend = opened(standin)
    assert torch.equal(product(backend, out, a, b), exact(a, b).float())
    torch.testing.assert_close(product(backend, out, a, b, c, 2.0, 3.0), exact(a, b, c, 2.0, 3.0).float())


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_as_torch_has_it(standin: Any, allowed: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        product(opened(standin), torch.empty(2, 2), torch.ones(2, 2), torch.ones(2, 2))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert any(f"compute={77 if allowed else 68}" in line for line in standin.log())


# ------------------------------------------------------------------------------------------------------ handles


def test_a_handle_is_kept_for_its_stream(standin: Any) -> None:
    streams = iter([1, 2, 1, 2, 1])
    backend = BlasBackend(NVIDIA, str(standin.path), stream_of=lambda device: next(streams))
    for _ in range(5):
        product(backend, torch.empty(2, 2), torch.ones(2, 2), torch.ones(2, 2))
    log = standin.log()
    assert sum(line.startswith("create") for line in log) == 2
    assert sum(line.startswith("set_stream") for line in log) == 2
    assert [line.split("stream=")[1].split()[0] for line in log if line.startswith("gemm")] == [
        hex(one) for one in (1, 2, 1, 2, 1)
    ]
    kernel(backend).product.pool.close()
    assert standin.live_handles() == 0


def test_threads_never_share_a_handle(standin: Any) -> None:
    backend = opened(standin)
    standin.set_delay(300)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    want = exact(a, b).float()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not torch.equal(product(backend, torch.empty(8, 8), a, b), want):
                wrong.append(number)

    kernel(backend)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert standin.overlaps() == 0
    assert 1 <= standin.live_handles() <= 16
    kernel(backend).product.pool.close()
    assert standin.live_handles() == 0


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("status", [*STATUSES, 99])
@pytest.mark.parametrize("function", ["cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "gemm"])
def test_every_status_is_an_error_of_ours(standin: Any, function: str, status: int) -> None:
    function = "cublasGemmStridedBatchedEx" if function == "gemm" else function
    backend = opened(standin)
    kernel(backend)
    standin.fail(function, status)
    kind = {7: omnigemm.LayoutError, 15: omnigemm.UnsupportedError}.get(status, omnigemm.DeviceError)
    name = STATUSES.get(status, "an unknown status")
    out = torch.full((2, 2), 5.0)
    with pytest.raises(kind, match=rf"NVIDIA cuBLAS: {function} answers {name} \({status}\)"):
        product(backend, out, torch.ones(2, 2), torch.ones(2, 2))
    assert bool((out == 5.0).all())
    # The next call works, and what the failed one had taken is given back.
    assert torch.equal(product(backend, out, torch.ones(2, 2), torch.ones(2, 2)), torch.full((2, 2), 2.0))
    kernel(backend).product.pool.close()
    assert standin.live_handles() == 0


def test_a_library_that_lacks_a_function(standin_without_gemm: Any, standin_without_workspace: Any) -> None:
    answer = opened(standin_without_gemm).available()
    assert not answer
    assert "lacks the function cublasGemmStridedBatchedEx" in answer.reason
    backend = opened(standin_without_workspace)
    assert torch.equal(product(backend, torch.empty(1, 1), torch.ones(1, 2), torch.ones(2, 1)), torch.tensor([[2.0]]))


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.so", Path(__file__)):
        answer = BlasBackend(NVIDIA, str(path)).available()
        assert not answer
        assert f"{path} cannot be loaded" in answer.reason


def test_what_is_refused(standin: Any) -> None:
    backend = opened(standin)
    assert backend.supports(describe("gemm", m=1, n=1, k=1), CPU)
    for problem, reason in (
        (describe("int8_gemm", m=1, n=1, k=1), "not int8_gemm"),
        (describe("gemm", m=1, n=1, k=1, dtype="fp32", out_dtype="bf16"), "no bf16 result of fp32"),
    ):
        answer = backend.supports(problem, CPU)
        assert not answer
        assert reason in answer.reason
    assert "computes on cpu tensors" in backend.supports(describe("gemm", m=1, n=1, k=1), torch.device("meta")).reason


# ------------------------------------------------------------------------------------------------------- Kunlun


@pytest.fixture
def kunlun_home(standin_without_bf16: Any, standin_runtime: Any, tmp_path: Path) -> Path:
    """A vendor's folder as KUNLUN_HOME points to it."""
    folder = tmp_path / "xhpc" / "xblas" / "so"
    folder.mkdir(parents=True)
    shutil.copy(standin_without_bf16.path, folder / "libxpu_blas.so")
    shutil.copy(getattr(standin_runtime, "path", standin_runtime), folder / "libxpurt.so")
    return tmp_path


def test_kunlun_is_found_and_bf16_goes_through_fp32(kunlun_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUNLUN_HOME", str(kunlun_home))
    backend = BlasBackend(KUNLUN, stream_of=lambda device: STREAM)
    answer = backend.available()
    assert answer, answer.reason
    assert "libxpu_blas.so" in answer.reason
    waited: list[int] = []
    monkeypatch.setattr(kernel(backend).product.library, "_wait", lambda stream: waited.append(stream) or 0)
    a, b, c = (torch.randn(shape).bfloat16() for shape in ((4, 6), (6, 5), (4, 5)))
    out = torch.empty(4, 5, dtype=torch.bfloat16)
    assert torch.equal(product(backend, out, a, b), exact(a, b).float().bfloat16())
    want = exact(a, b, c, 0.5, 2.0)
    torch.testing.assert_close(product(backend, out, a, b, c, 0.5, 2.0), want.bfloat16())
    assert waited == [STREAM, STREAM]
    product(backend, torch.empty(4, 5, dtype=torch.float16), a.half(), b.half())
    assert len(waited) == 2  # nothing was copied, so nothing is waited for
    plan = kernel(backend).plan(describe("gemm", m=4, n=5, k=6, dtype="bf16"), CPU)
    assert plan.workspace_bytes == 4 * (24 + 30 + 20)
    assert kernel(backend).plan(describe("gemm", m=4, n=5, k=6, dtype="fp16"), CPU).workspace_bytes == 0


def test_kunlun_waits_by_its_own_runtime(kunlun_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUNLUN_HOME", str(kunlun_home))
    backend = BlasBackend(KUNLUN, stream_of=lambda device: STREAM)
    kernel(backend).product.library.wait(STREAM)
    (kunlun_home / "xhpc" / "xblas" / "so" / "libxpurt.so").unlink()
    answer = BlasBackend(KUNLUN).available()
    assert not answer
    assert "xpu_wait is not found" in answer.reason


def test_kunlun_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUNLUN_HOME", raising=False)
    answer = BlasBackend(KUNLUN).available()
    assert not answer
    assert "KUNLUN_HOME" in answer.reason


# ----------------------------------------------------------------------------------------------- as users call it


@pytest.fixture
def _registered(standin: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    backend = opened(standin)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    calls.clear()
    yield
    calls.clear()


@pytest.mark.usefixtures("_registered")
def test_through_the_operations() -> None:
    a, b, c = torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)
    assert torch.equal(omnigemm.gemm(a, b, backend="blas"), exact(a, b).float())
    torch.testing.assert_close(omnigemm.gemm(a, b, c, alpha=2.0, beta=3.0), exact(a, b, c, 2.0, 3.0).float())
    outs = omnigemm.grouped_gemm([a, a[:2]], [b, b[:, :3]], alpha=[1.0, 2.0])
    assert torch.equal(outs[0], exact(a, b).float())
    torch.testing.assert_close(outs[1], exact(a[:2], b[:, :3], alpha=2.0).float())
    found = omnigemm.explain("grouped_gemm", m=4, n=5, k=6, dtype="fp32")
    assert found.chosen is not None
    assert "one call for each group" in found.chosen.reason


def test_the_environment_names_it(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNIGEMM_BLAS_LIBRARY", raising=False)
    answer = BlasBackend().available()
    assert not answer
    assert "set OMNIGEMM_BLAS_LIBRARY to vendor or vendor:path" in answer.reason
    monkeypatch.setenv("OMNIGEMM_BLAS_LIBRARY", f"nvidia:{standin.path}")
    assert str(standin.path) in BlasBackend().available().reason
    monkeypatch.setenv("OMNIGEMM_BLAS_LIBRARY", "abacus:/x")
    with pytest.raises(ValueError, match="OMNIGEMM_BLAS_LIBRARY is 'abacus:/x', expected vendor or vendor:path"):
        BlasBackend().available()


def test_problem_without_shapes_has_a_workspace_of_its_own_size() -> None:
    problem = Problem("grouped_gemm", 4, 5, 6, "bf16", "bf16", "bf16", groups=2, shapes=((4, 5, 6), (1, 1, 1)))
    made = BlasKernel("kunlun", KUNLUN, None)  # type: ignore[arg-type]
    assert made._workspace(problem) == 4 * (24 + 30 + 20)
