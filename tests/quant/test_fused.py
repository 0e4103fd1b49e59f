"""RMSNorm and SwiGLU with quantisation: what they mean, their error, odd rows, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omnigemm import (
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
    quantize_fp8,
    quantize_int8,
    rms_norm_quantize,
    swiglu_quantize,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FORMS = [(E4M3, "token"), (E4M3, "1x128"), (E5M2, "token"), (torch.int8, "token")]


def bits(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype in (E4M3, E5M2) else t


def quantized(values: Tensor, dtype: torch.dtype, granularity: str) -> tuple[Tensor, Tensor]:
    if dtype == torch.int8:
        return quantize_int8(values)
    return quantize_fp8(values, granularity=granularity, dtype=dtype)


def dequantized(q: Tensor, scale: Tensor, granularity: str) -> Tensor:
    if granularity == "token":
        return q.double() * scale.double()[..., None]
    return q.double() * scale.double().repeat_interleave(128, -1)[..., : q.size(-1)]


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        assert torch.equal(bits(one).nan_to_num(-7.0), bits(other).nan_to_num(-7.0))


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def exact_swiglu(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def near(q: Tensor, scale: Tensor, granularity: str, want: Tensor) -> None:
    """Half a step of int8; for fp8 a rounding, or half of its smallest number; and what fp32 loses before."""
    wide = scale.double()[..., None] if granularity == "token" else scale.double().repeat_interleave(128, -1)
    wide = wide.expand(*wide.shape[:-1], want.size(-1)) if granularity == "token" else wide[..., : want.size(-1)]
    relative, smallest = {torch.int8: (0.0, 0.5), E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}[q.dtype]
    error = (dequantized(q, scale, granularity) - want).abs()
    assert bool((error <= torch.maximum(want.abs() * relative, wide * smallest) * 1.0001 + want.abs() * 2**-20).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("code", "granularity"), FORMS)
@pytest.mark.parametrize("shape", [(5, 300), (2, 3, 130), (200,), (1, 1), (70, 5000)])
def test_rms_norm(shape: tuple[int, ...], code: torch.dtype, granularity: str, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    q, scale = rms_norm_quantize(x, weight, eps=1e-5, granularity=granularity, dtype=code)
    assert q.shape == x.shape
    near(q, scale, granularity, exact_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("code", "granularity"), FORMS)
@pytest.mark.parametrize("shape", [(5, 600), (2, 3, 260), (200,), (1, 2), (70, 9000)])
def test_swiglu(shape: tuple[int, ...], code: torch.dtype, granularity: str, dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    q, scale = swiglu_quantize(x, granularity=granularity, dtype=code)
    assert q.shape == (*shape[:-1], shape[-1] // 2)
    near(q, scale, granularity, exact_swiglu(x))


@pytest.mark.parametrize(("code", "granularity"), FORMS)
def test_they_are_the_quantisers_of_an_fp32_result(code: torch.dtype, granularity: str) -> None:
    """Where the result in fp32 is certain: a mean of squares of 1, and gates whose silu is the gate itself."""
    x = torch.randint(0, 2, (6, 260)) * 2.0 - 1.0
    weight = torch.randn(260)
    same(
        rms_norm_quantize(x, weight, eps=0.0, granularity=granularity, dtype=code),
        quantized(x * weight, code, granularity),
    )
    gate, up = torch.rand(6, 260) * 50 + 20, torch.randn(6, 260)
    same(
        swiglu_quantize(torch.cat([gate, up], 1), granularity=granularity, dtype=code),
        quantized(gate * up, code, granularity),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_residual_becomes_the_sum_and_is_what_is_normalised(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 7, 200).to(dtype), torch.randn(2, 7, 200).to(dtype)
    weight, before = torch.randn(200).to(dtype), residual.clone()
    kept = x.clone()
    got = rms_norm_quantize(x, weight, residual=residual)
    assert torch.equal(residual, x + before)
    assert torch.equal(x, kept)
    same(got, rms_norm_quantize(x + before, weight))


def test_residual_of_any_strides() -> None:
    x, weight = torch.randn(6, 40), torch.randn(40)
    frames = [torch.zeros(6, 50)[:, 5:45], torch.zeros(40, 6).T, torch.zeros(12, 80)[::2, ::2]]
    for residual in frames:
        residual.copy_(torch.randn(6, 40))
        want = x + residual
        rms_norm_quantize(x.T.contiguous().T, weight[None].T.contiguous()[:, 0], residual=residual)
        assert torch.equal(residual, want)


def test_bad_rows_spoil_themselves_only() -> None:
    x = torch.randn(6, 256)
    x[1, 3], x[2, 200], x[3, 5] = math.nan, math.inf, 1e20
    q, scale = rms_norm_quantize(x, torch.ones(256))
    assert scale.isnan().tolist() == [False, True, True, True, False, False]
    assert not q[1:4].float().any()
    # One scale for 128, but one mean for all.
    assert rms_norm_quantize(x, torch.ones(256), granularity="1x128")[1].isnan()[1:4].all()
    x[3, 5], x[4, 128 + 3] = 1.0, -math.inf
    scale = swiglu_quantize(x)[1]
    assert scale.isnan().tolist() == [False, True, True, False, True, False]
    x = torch.full((1, 256), 3e38)
    assert swiglu_quantize(x)[1].isnan().all()  # the product overflows


def test_zeros() -> None:
    for q, scale in (
        rms_norm_quantize(torch.zeros(3, 8), torch.ones(8)),
        rms_norm_quantize(torch.randn(3, 8), torch.zeros(8), dtype=torch.int8),
        swiglu_quantize(torch.zeros(3, 16)),
    ):
        assert scale.tolist() == [1.0] * 3
        assert not q.float().any()
    # Without eps nothing can be said about a row of zeros.
    assert rms_norm_quantize(torch.zeros(3, 8), torch.ones(8), eps=0)[1].isnan().all()
    # Gates that are very negative shut.
    assert swiglu_quantize(torch.tensor([[-200.0, -1e30, 5.0, 1e30]]))[1].item() == 1.0


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    residual = x.clone()
    q, scale = rms_norm_quantize(x, torch.empty(shape[-1]), residual=residual)
    assert (q.shape, scale.shape) == (x.shape, x.shape[:-1])
    assert swiglu_quantize(x)[0].shape == (*shape[:-1], shape[-1] // 2)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(33, 200), torch.randn(200)
    whole = rms_norm_quantize(x, weight), swiglu_quantize(x)
    monkeypatch.setattr("omnigemm.quant.fused._CHUNK", 500)
    same(rms_norm_quantize(x, weight), whole[0])
    same(swiglu_quantize(x), whole[1])


def test_parameters_and_gradients() -> None:
    x, weight = torch.randn(4, 64, requires_grad=True), torch.nn.Parameter(torch.ones(64))
    residual = torch.nn.Parameter(torch.zeros(4, 64))
    for one in (*rms_norm_quantize(x, weight, residual=residual), *swiglu_quantize(x)):
        assert not one.requires_grad
    assert torch.equal(residual, x)


def test_compile_in_one_graph() -> None:
    def step(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return (*rms_norm_quantize(x, weight, residual=residual), *swiglu_quantize(x, dtype=torch.int8))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, weight, residual = torch.randn(5, 64), torch.randn(64), torch.randn(5, 64)
    other = residual.clone()
    same(compiled(x, weight, residual), step(x, weight, other))
    assert torch.equal(residual, other)


X, W = torch.ones(4, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rms_norm_quantize([1.0], W), DTypeError, ["rms_norm_quantize: x is a list", "torch.Tensor"]),  # type: ignore[arg-type]
        (lambda: rms_norm_quantize(X.int(), W), DTypeError, ["x has dtype torch.int32"]),
        (lambda: rms_norm_quantize(X, 1.0), DTypeError, ["weight is a float"]),  # type: ignore[arg-type]
        (
            lambda: rms_norm_quantize(X, W.half()),
            DTypeError,
            ["weight has dtype torch.float16", "torch.float32 like x"],
        ),
        (lambda: rms_norm_quantize(X, W[:7]), ShapeError, ["weight has shape (7,)", "expected (8,)"]),
        (lambda: rms_norm_quantize(X, W.to("meta")), DeviceError, ["weight is on meta", "cpu"]),
        (lambda: rms_norm_quantize(X, W, eps=-1e-6), UnsupportedError, ["eps is -1e-06", ">= 0"]),
        (lambda: rms_norm_quantize(X, W, eps=math.nan), UnsupportedError, ["eps is nan"]),
        (lambda: rms_norm_quantize(X, W, eps="1"), DTypeError, ["eps is '1'"]),  # type: ignore[arg-type]
        (lambda: rms_norm_quantize(X, W, eps=10**400), DTypeError, ["eps has 1329 bits", "fits fp32"]),
        (lambda: rms_norm_quantize(X, W.to_sparse()), LayoutError, ["weight is a sparse_coo tensor", "dense"]),
        (lambda: rms_norm_quantize(X, W, residual=X.to_sparse()), LayoutError, ["residual is a sparse_coo tensor"]),
        (lambda: swiglu_quantize(X.to_sparse_csr()), LayoutError, ["swiglu_quantize: x is a sparse_csr tensor"]),
        (lambda: rms_norm_quantize(X, W, residual=X[:2]), ShapeError, ["residual has shape (2, 8)", "(4, 8)"]),
        (lambda: rms_norm_quantize(X, W, residual=X), LayoutError, ["residual shares memory with x"]),
        (
            lambda: rms_norm_quantize(X, W, residual=torch.ones(1, 8).expand(4, 8)),
            LayoutError,
            ["residual has strides (0, 1)"],
        ),
        (
            lambda: rms_norm_quantize(X, W, granularity="tensor"),
            UnsupportedError,
            ["granularity is 'tensor'", "'token' or '1x128'"],
        ),
        (
            lambda: swiglu_quantize(X, granularity="1x128", dtype=torch.int8),
            UnsupportedError,
            ["granularity is '1x128' with dtype torch.int8", "'token'"],
        ),
        (lambda: swiglu_quantize(X, dtype=torch.int32), DTypeError, ["dtype is torch.int32", "torch.int8"]),
        (lambda: swiglu_quantize(torch.ones(4, 7)), ShapeError, ["swiglu_quantize: x has shape (4, 7)", "even"]),
        (lambda: swiglu_quantize(torch.tensor(1.0)), ShapeError, ["x has shape ()"]),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_a_refused_call_leaves_the_residual_alone() -> None:
    residual = torch.zeros(4, 8)
    with pytest.raises(ShapeError):
        rms_norm_quantize(X, W[:3], residual=residual)
    with pytest.raises(UnsupportedError):
        rms_norm_quantize(X, W, residual=residual, dtype=torch.int8, granularity="1x128")
    assert not residual.any()


def test_negated_views_are_not_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those read memory, in which the signs are not; what is remembered of another tensor must not run either."""

    def asked(*given: Any) -> None:
        """Answers no, as these do on a processor."""
        assert not any(isinstance(one, Tensor) and one.is_neg() for one in given)

    x, weight, residual = torch.randn(4, 256), torch.randn(256), torch.randn(4, 256)
    signed = -x
    wanted = [quantize_int8(signed), quantize_fp8(signed), swiglu_quantize(signed)]
    wanted += [rms_norm_quantize(signed, weight), rms_norm_quantize(x, -weight)]
    added = residual.clone()
    wanted.append(rms_norm_quantize(x, weight, residual=added))
    for name in ("repeated", "usable"):
        monkeypatch.setattr(f"omnigemm.backends.cuda.quant.{name}", asked)
    view = torch._neg_view(x)
    found = [quantize_int8(view), quantize_fp8(view), swiglu_quantize(view)]
    found += [rms_norm_quantize(view, weight), rms_norm_quantize(x, torch._neg_view(weight))]
    target = torch._neg_view(-residual)
    found.append(rms_norm_quantize(x, weight, residual=target))
    assert torch.equal(target, added)
    for (q, scale), (q_wanted, scale_wanted) in zip(found, wanted, strict=True):
        assert torch.equal(bits(q), bits(q_wanted))
        assert torch.equal(scale, scale_wanted)
