"""While a CUDA graph is captured nothing is compiled or loaded: whoever would have to says what to call before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import omnigemm
from omnigemm.backends.cuda import CudaBackend, dense, kernels_on, list_setup, quant, quant_source
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.jit import KernelSpec, loader
from omnigemm.core.problem import Problem, describe

H200 = KNOWN["h200"]
PROBLEMS = {
    "fp8": describe("fp8_gemm", m=16, n=256, k=512),
    "int8": describe("int8_gemm", m=16, n=256, k=512),
    "int8 with zero points": describe("int8_gemm", m=16, n=256, k=512, a_zero=True),
    "gemm": describe("gemm", m=16, n=256, k=512),
    "batch": describe("gemm", m=16, n=256, k=512, batch=3),
    "int8 batch with zero points": describe("int8_gemm", m=16, n=256, k=512, batch=3, a_zero=True),
    "contiguous": describe("grouped_gemm_contiguous", m=16, n=256, k=512, groups=3),
    "masked": describe("grouped_gemm_masked", m=16, n=256, k=512, groups=3),
    "along K": describe("grouped_gemm_k_contiguous", m=16, n=256, k=512, groups=3),
    "list": describe("grouped_gemm", m=16, n=256, k=512, groups=3),
    "mixed list": describe("grouped_gemm", m=16, n=256, k=512, groups=40, b_layout="mixed"),
}


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of kernels that are loaded, while a graph is captured; to load one that is not is a failure."""
    names: set[str] = set()

    def load(spec: KernelSpec, *_: object) -> Any:
        assert spec.name in names, "compiled in a capture"
        return loader.Loaded(None, 0, 0, 0)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(loader, "is_loaded", lambda spec, index, shared: spec.name in names)
    for module in (dense, quant):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(list_setup, "most_lines", lambda: list_setup.LINES[-1])
    return names


def plan(problem: Problem) -> None:
    kernels_on(problem, H200)[0].plan(problem, torch.device("cuda:0"))


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_kernel_of_a_product_is_refused(ready: set[str], name: str) -> None:
    """Also where the others of the same product are ready."""
    problem = PROBLEMS[name]
    specs = CudaBackend().specs(problem, H200)
    assert len(specs) >= (2 if "zero" in name or "list" in name or "K" in name else 1)
    for missing in specs:
        ready.clear()
        ready.update(one.name for one in specs if one != missing)
        with pytest.raises(omnigemm.DeviceError) as caught:
            plan(problem)
        assert str(caught.value) == (
            f"{problem.op}: the kernel {missing.name} for {problem} is not compiled yet, and a CUDA graph is being "
            f"captured; call {problem.op} once with such operands, or make the plan with omnigemm.plan, before the "
            f"capture"
        )


def test_what_is_ready_is_taken(ready: set[str]) -> None:
    problem = PROBLEMS["int8 with zero points"]
    ready.update(one.name for one in CudaBackend().specs(problem, H200))
    plan(problem)


def test_quantisers(ready: set[str]) -> None:
    variant = quant_source.Variant("plain", "bf16", "e4m3", "token", True)
    shape = quant_source.rows(variant, 4, 64)
    wanted = quant_source.spec(variant, shape, "sm_90")
    with pytest.raises(omnigemm.DeviceError) as caught:
        quant._launcher(wanted, shape, "P", 0)
    assert str(caught.value) == (
        f"quantisers: the kernel {wanted.name} is not compiled yet, and a CUDA graph is being captured; call the "
        f"quantiser once with such a tensor, before the capture"
    )
