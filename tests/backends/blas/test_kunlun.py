"""The blas backend as vendor Kunlun: found below KUNLUN_HOME, bf16 through fp32, and a runtime that is waited for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import omnigemm
from backends.blas.cases import CPU, KUNLUN, STREAM, caller, exact, kernel, opened, product
from omnigemm.backends.blas import BlasBackend, BlasKernel
from omnigemm.core.problem import Problem, describe


@pytest.fixture
def home(standin_without_bf16: Any, standin_runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vendor's folder as KUNLUN_HOME points to it."""
    folder = tmp_path / "xhpc" / "xblas" / "so"
    folder.mkdir(parents=True)
    shutil.copy(standin_without_bf16.path, folder / "libxpu_blas.so")
    shutil.copy(standin_runtime.path, folder / "libxpurt.so")
    monkeypatch.setenv("KUNLUN_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("home")
def test_bf16_goes_through_fp32_and_copies_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BlasBackend(KUNLUN, caller=caller())
    found = kernel(backend)
    assert "libxpu_blas.so" in backend.available().reason
    assert "bf16 through fp32 copies" in found.supports(describe("gemm", m=1, n=1, k=1), CPU).reason
    waited: list[int] = []
    monkeypatch.setattr(found.product.library, "_wait", lambda stream: waited.append(stream) or 0)
    a, b, c = (torch.randn(shape).bfloat16() for shape in ((4, 6), (6, 5), (4, 5)))
    out = torch.empty(4, 5, dtype=torch.bfloat16)
    assert torch.equal(product(backend, out, a, b), exact(a, b).float().bfloat16())
    want = exact(a, b, c, 0.5, 2.0)
    torch.testing.assert_close(product(backend, out, a, b, c, 0.5, 2.0), want.bfloat16())
    assert waited == [STREAM, STREAM]
    half = torch.empty(4, 5, dtype=torch.float16)
    product(backend, half, a.half(), b.half())
    assert len(waited) == 2  # nothing was copied, so nothing is waited for
    product(backend, half, torch.stack([a.half(), a.half()], -1)[..., 0], b.half())
    assert len(waited) == 3
    plan = found.plan(describe("gemm", m=4, n=5, k=6, dtype="bf16"), CPU)
    assert plan.workspace_bytes == 4 * (24 + 30 + 20)
    assert found.plan(describe("gemm", m=4, n=5, k=6, dtype="fp16"), CPU).workspace_bytes == 0


@pytest.mark.usefixtures("home")
def test_groups_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel(BlasBackend(KUNLUN, caller=caller()))
    assert (
        "one call for each group, bf16 through" in found.supports(describe("grouped_gemm", m=1, n=1, k=1), CPU).reason
    )
    a, b = [torch.randn(m, 6).bfloat16() for m in (3, 0, 2)], [torch.randn(6, 5).bfloat16() for _ in range(3)]
    out = [torch.empty(m, 5, dtype=torch.bfloat16) for m in (3, 0, 2)]
    found.groups(out, a, b, None, [1.0] * 3, [0.0] * 3)
    for got, x, y in zip(out, a, b, strict=True):
        assert torch.equal(got, exact(x, y).float().bfloat16())


def test_it_waits_by_its_own_runtime(home: Path) -> None:
    kernel(BlasBackend(KUNLUN, caller=caller())).product.wait(CPU)
    (home / "xhpc" / "xblas" / "so" / "libxpurt.so").unlink()
    answer = BlasBackend(KUNLUN).available()
    assert not answer
    assert "xpu_wait is not found" in answer.reason


def test_a_runtime_that_fails(standin_without_bf16: Any, standin_runtime: Any, tmp_path: Path) -> None:
    blas = tmp_path / "libxpu_blas.so"
    shutil.copy(standin_without_bf16.path, blas)
    (tmp_path / "libxpurt.so").symlink_to(standin_runtime.path)  # the very library whose log this test reads
    backend = BlasBackend(KUNLUN, str(blas), caller())
    a = torch.ones(2, 2, dtype=torch.bfloat16)
    product(backend, torch.empty_like(a), a, a)
    assert standin_runtime.log() == [f"wait {STREAM:#x}"]
    standin_runtime.fail("xpu_wait", 700)
    with pytest.raises(omnigemm.DeviceError, match=r"Kunlun xpu_blas: xpu_wait answers an unknown status \(700\)"):
        product(backend, torch.empty_like(a), a, a)


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUNLUN_HOME", raising=False)
    answer = BlasBackend(KUNLUN).available()
    assert not answer
    assert "$KUNLUN_HOME does not hold libxpu_blas.so" in answer.reason


def test_copies_of_a_group_are_given_back_before_the_next(standin: Any) -> None:
    problem = Problem("grouped_gemm", 4, 5, 6, "bf16", "bf16", "bf16", groups=2, shapes=((4, 5, 6), (1, 1, 1)))
    nvidia = kernel(opened(standin))
    assert nvidia._workspace(problem) == 0
    assert BlasKernel("kunlun", KUNLUN, nvidia.product, nvidia.groups)._workspace(problem) == 4 * (24 + 30 + 20)
