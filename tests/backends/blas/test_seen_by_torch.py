"""What is written by address is seen by torch as what its own operations write: signs, versions, devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from backends.blas.cases import exact, opened
from op_support import forget_calls

Gemm = Callable[..., Tensor]


@pytest.fixture(params=["cuBLAS", "cuBLASLt"], autouse=True)
def _registered(
    request: pytest.FixtureRequest, standin: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    backend = opened(standin if request.param == "cuBLAS" else pair)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()
    yield
    forget_calls()


def by_list(a: Tensor, b: Tensor, c: Tensor | None = None, out: Tensor | None = None, **words: Any) -> Tensor:
    made = omnigemm.grouped_gemm([a], [b], None if c is None else [c], out=None if out is None else [out], **words)
    return made[0]


def by_plan(a: Tensor, b: Tensor, c: Tensor | None = None, out: Tensor | None = None, **words: Any) -> Tensor:
    sizes = {"m": a.size(0), "n": b.size(1), "k": a.size(1)}
    beta = words.get("beta", 0.0)
    made: Tensor = omnigemm.plan("gemm", dtype="fp32", beta=beta, **sizes).run(a, b, c, out=out, **words)
    return made


ways = pytest.mark.parametrize("product", [omnigemm.gemm, by_list, by_plan])


@ways
def test_signs_that_are_not_in_memory_yet(product: Gemm) -> None:
    a, b, c = torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)
    want = exact(a, b).float()
    for _ in range(2):  # cold and warm
        torch.testing.assert_close(product(a, b), want)
        torch.testing.assert_close(product(torch._neg_view(a), b), -want)
        torch.testing.assert_close(product(a, torch._neg_view(b)), -want)
        torch.testing.assert_close(product(a, b, torch._neg_view(c), beta=1.0), want - c)


@ways
def test_an_out_whose_sign_is_not_in_memory(product: Gemm) -> None:
    a, b, memory = torch.randn(4, 6), torch.randn(6, 5), torch.zeros(4, 5)
    for _ in range(2):
        with pytest.raises(omnigemm.LayoutError, match="out is a negated view, expected memory that is written as"):
            product(a, b, out=torch._neg_view(memory))
        assert not memory.any()
        product(a, b, out=memory.clone())


@ways
def test_a_backward_pass_through_what_was_overwritten_fails(product: Gemm) -> None:
    a, b, w = torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5, requires_grad=True)
    out = torch.empty(4, 5)
    for _ in range(3):  # cold, looked up, remembered
        y = (w * out).sum()
        product(a, b, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        a, b = torch.randn(4, 6), torch.randn(6, 5)
        out = torch.empty(4, 5)
        for _ in range(2):
            torch.testing.assert_close(omnigemm.gemm(a, b, out=out), exact(a, b).float())


@pytest.mark.parametrize("op", ["gemm", "grouped_gemm"])
def test_a_plan_refuses_tensors_on_another_device(op: str) -> None:
    a, b = torch.randn(4, 6, device="meta"), torch.randn(6, 5, device="meta")
    words: dict[str, Any] = {"shapes": [(4, 5, 6)]} if op == "grouped_gemm" else {}
    plan = omnigemm.plan(op, m=4, n=5, k=6, dtype="fp32", **words)
    with pytest.raises(omnigemm.DeviceError, match="the operands are on meta, expected cpu, the device of the plan"):
        plan.run(*([a], [b]) if op == "grouped_gemm" else (a, b))
