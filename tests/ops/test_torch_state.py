"""What torch has switched on around a call changes nothing about it, and gradients that end are not lost in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.ops import _library, _recent
from omnigemm.ops._again import ANEW
from op_support import forget_calls

E4M3 = torch.float8_e4m3fn


def fp8(granularity: str) -> tuple[Tensor, ...]:
    (a, a_scale), (b, b_scale) = (
        omnigemm.quantize_fp8(torch.randn(shape), granularity=one)
        for shape, one in (((9, 300), granularity), ((70, 300), "128x128" if granularity == "1x128" else granularity))
    )
    return a, b, a_scale, b_scale


def int8() -> tuple[Tensor, ...]:
    (a, a_scale), (b, b_scale) = (omnigemm.quantize_int8(torch.randn(shape)) for shape in ((9, 300), (70, 300)))
    return a, b, a_scale, b_scale


def int4(dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(9, 256).to(dtype), omnigemm.quantize_int4(torch.randn(64, 256).to(dtype))


def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(9, 300).to(dtype), torch.randn(300, 70).to(dtype)


def groups(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(9, 64).to(dtype), torch.randn(2, 48, 64).to(dtype), torch.tensor([4, 9], dtype=torch.int32)


def along_k() -> tuple[Tensor, ...]:
    return *(torch.randn(256, n).to(E4M3) for n in (24, 40)), torch.tensor([128, 256], dtype=torch.int32)


# Products and how their operands are made; to fp32 where that shows what a product in 16 bits would lose.
PRODUCTS: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, Any]]] = {
    "fp8_token": (lambda: fp8("token"), omnigemm.fp8_gemm, {"out_dtype": torch.float32}),
    "fp8_block": (lambda: fp8("1x128"), omnigemm.fp8_gemm, {"out_dtype": torch.float32}),
    "int8": (int8, omnigemm.int8_gemm, {"out_dtype": torch.float32}),
    "int4_bf16": (lambda: int4(torch.bfloat16), omnigemm.int4_gemm, {}),
    "int4_fp16": (lambda: int4(torch.float16), omnigemm.int4_gemm, {}),
    "gemm_fp32": (lambda: matrices(torch.float32), omnigemm.gemm, {}),
    "gemm_fp16": (lambda: matrices(torch.float16), omnigemm.gemm, {"out_dtype": torch.float32}),
    "contiguous": (lambda: groups(torch.float32), omnigemm.grouped_gemm_contiguous, {}),
    "along_k": (
        along_k,
        lambda a, b, ends, **words: omnigemm.grouped_gemm_k_contiguous(
            a, b, ends, a_scale=torch.rand(24, 2), b_scale=torch.ones(40, 2), **words
        ),
        {},
    ),
    "list": (
        lambda: [matrices(torch.float32)] * 2,
        lambda *pairs: torch.cat(omnigemm.grouped_gemm(*map(list, zip(*pairs, strict=True)))),
        {},
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_autocast_leaves_products_as_they_are(name: str) -> None:
    make, product, words = PRODUCTS[name]
    operands = make()
    torch.manual_seed(0)
    plain = product(*operands, **words)
    for warm in (False, True):
        if not warm:
            forget_calls()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(product(*operands, **words), plain)


@pytest.mark.parametrize("name", PRODUCTS)
def test_autocast_leaves_prepared_weights_as_they_are(name: str) -> None:
    """What is prepared under it is used after it."""
    make, product, words = PRODUCTS[name]
    operands = make()
    forget_calls()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        first = product(*operands, **words)
    torch.manual_seed(0)
    assert torch.equal(product(*operands, **words), first)


def test_autocast_leaves_quantisers_as_they_are() -> None:
    x, weight = torch.randn(9, 512), torch.randn(256)
    calls: list[Callable[[], Any]] = [
        lambda: omnigemm.quantize_int8(x, symmetric=False),
        lambda: omnigemm.quantize_fp8(x, granularity="1x128"),
        lambda: omnigemm.rms_norm_quantize(x[:, :256], weight),
        lambda: omnigemm.swiglu_quantize(x),
    ]
    for call in calls:
        plain = call()
        with torch.autocast("cpu", torch.bfloat16):
            for ours, wanted in zip(call(), plain, strict=True):
                assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("scope", ["set_default_device", "with"])
def test_under_a_default_device_calls_are_remembered(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a mode of torch's, but one that has no say in products."""
    operands = int8()
    wanted = omnigemm.int8_gemm(*operands)
    long_ways: list[bool] = []
    for module, name in ((_library, "shortcut"), (_recent, "call_for")):
        real = getattr(module, name)

        def look(*given: Any, real: Any = real) -> Any:
            answer = real(*given)
            long_ways.append(answer is ANEW or real is not _shortcut)
            return answer

        monkeypatch.setattr(module, name, look)
    if scope == "with":
        with torch.device("cpu"):
            assert torch.equal(omnigemm.int8_gemm(*operands), wanted)
    else:
        torch.set_default_device("cpu")
        try:
            assert torch.equal(omnigemm.int8_gemm(*operands), wanted)
        finally:
            torch.set_default_device(None)
    assert not long_ways


_shortcut = _library.shortcut


def test_an_out_that_requires_gradients_is_refused() -> None:
    a, b, leaf = torch.randn(4, 8), torch.randn(8, 5), torch.zeros(4, 5, requires_grad=True)
    plan = omnigemm.plan("gemm", m=4, n=5, k=8, dtype="fp32")
    calls: list[Callable[[], Any]] = [
        lambda: omnigemm.gemm(a, b, out=leaf),
        lambda: omnigemm.grouped_gemm([a], [b], out=[leaf]),
        lambda: plan.run(a, b, out=leaf),
    ]
    for call in calls:
        with pytest.raises(omnigemm.UnsupportedError, match="out requires gradients, expected one that does not, or"):
            call()
        assert not leaf.any()
        with torch.no_grad():
            call()
        assert leaf.any()
        leaf.data.zero_()


def test_gradients_that_end_draw_a_warning() -> None:
    a, b, out = torch.randn(4, 8, requires_grad=True), torch.randn(8, 5), torch.empty(4, 5)
    plan = omnigemm.plan("gemm", m=4, n=5, k=8, dtype="fp32")
    calls: list[Callable[[], Any]] = [
        lambda: omnigemm.gemm(a, b, out=out),
        lambda: plan.run(a, b),
        lambda: plan.run(a, b, out=out),
        lambda: omnigemm.grouped_gemm([a], [b], out=[out]),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="an operand requires gradients, and none come back") as seen:
            call()
        assert seen[0].filename == __file__
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            call()


@pytest.mark.parametrize("out", ["x", [torch.empty(4, 5)], 3])
def test_a_plan_says_what_is_wrong_with_out(out: Any) -> None:
    plan = omnigemm.plan("gemm", m=4, n=5, k=8, dtype="fp32")
    with pytest.raises(omnigemm.DTypeError, match=f"gemm: out is a {type(out).__name__}, expected a tensor"):
        plan.run(torch.randn(4, 8), torch.randn(8, 5), out=out)
