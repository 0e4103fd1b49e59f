"""The blas backend with the cuBLAS of this machine: every layout, type, batch and switch of torch, against float64."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import omnigemm
from omnigemm.backends import backends
from omnigemm.backends.blas import BlasBackend
from omnigemm.backends.blas.discovery import loaded
from omnigemm.backends.blas.vendors import VENDORS
from omnigemm.core.dtypes import name_of
from op_support import forget_calls

from .blas_cases import FLOATS, LAYOUTS, NAN, close, exact, laid_out, poisoned, random, untouched


@pytest.fixture(autouse=True)
def _by_blas() -> Iterator[None]:
    """Dispatch would take our own kernels for many of these products. Threads do not see this, and must name it."""
    with omnigemm.settings(backend="blas"):
        yield


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    yield
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = True


def blas() -> BlasBackend:
    found = next(one for one in backends() if one.name == "blas")
    assert isinstance(found, BlasBackend)
    return found


def test_what_names_no_backend_is_blas_here() -> None:
    for problem in ({}, {"dtype": "fp32"}, {"batch": 3}, {"b_layout": "col"}):
        assert omnigemm.plan("gemm", m=40, n=56, k=96, device="cuda", **problem).backend == "blas"


def test_the_library_is_torchs_own() -> None:
    torch.mm(random(8, 8), random(8, 8))  # torch has loaded it by now
    before = set(loaded(VENDORS["nvidia"].libraries))
    answer = blas().available()
    assert answer, answer.reason
    found = omnigemm.explain("gemm", m=16, n=576, k=7168, device="cuda", backend="blas")
    assert found.chosen is not None
    assert (found.chosen.backend, found.chosen.kernel) == ("blas", "nvidia")
    omnigemm.gemm(random(8, 8), random(8, 8), backend="blas")
    assert set(loaded(VENDORS["nvidia"].libraries)) == before
    assert len(before) == 1
    assert next(iter(before)) in answer.reason


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["single", "batch"])
def test_every_transposition_and_stride(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    for a_how, b_how, out_how in itertools.product(LAYOUTS, LAYOUTS, LAYOUTS):
        a = laid_out(random(*batch, 33, 200, dtype=dtype), a_how)
        b = laid_out(random(*batch, 200, 71, dtype=dtype), b_how)
        out = laid_out(poisoned(*batch, 33, 71, dtype=dtype), out_how)
        assert omnigemm.gemm(a, b, out=out, backend="blas") is out
        close(out, a, b)
        assert untouched(out)
        c = random(*batch, 33, 71, dtype=dtype)
        close(omnigemm.gemm(a, b, c, alpha=0.5, beta=-2.0, out=out, backend="blas"), a, b, c, 0.5, -2.0)
        close(omnigemm.gemm(a, b, out.copy_(c), alpha=0.5, beta=-2.0, out=out), a, b, c, 0.5, -2.0)
        assert untouched(out)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 576, 7168), (16, 2112, 1536), (129, 255, 1023), (1000, 1, 77), (1, 1, 4096)])
def test_sizes_and_no_worse_than_torch(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = random(m, k, dtype=dtype), random(n, k, dtype=dtype).t()
    result, want = omnigemm.gemm(a, b), exact(a, b)
    close(result, a, b)
    if want.numel() > 500:  # of few elements, one may be right by luck
        ours, theirs = (float((one.double() - want).norm()) for one in (result, torch.mm(a, b)))
        assert ours <= 2 * theirs


@pytest.mark.parametrize("a_shape", [(40, 96), (1, 40, 96), (5, 40, 96)])
@pytest.mark.parametrize("b_shape", [(96, 56), (1, 96, 56), (5, 96, 56)])
def test_batches_broadcast(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = random(*a_shape), random(*b_shape)
    want = exact(a, b)
    close(omnigemm.gemm(a, b, out=poisoned(*want.shape)), a, b)
    c = random(40, 1)
    close(omnigemm.gemm(a, b, c, beta=0.5), a, b, c.expand(want.shape), 1.0, 0.5)
    repeated = random(1, 40, 96).expand(5, 40, 96)
    many = random(5, 96, 56)
    close(omnigemm.gemm(repeated, many), repeated, many)


@pytest.mark.parametrize("shape", [(0, 5, 6), (4, 0, 6), (4, 5, 0), (1, 1, 1), (1, 5, 6), (4, 1, 6), (4, 5, 1)])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_thin_and_empty(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    for a_how, b_how in itertools.product(LAYOUTS, LAYOUTS):
        a, b = laid_out(random(m, k, dtype=dtype), a_how), laid_out(random(k, n, dtype=dtype), b_how)
        c = random(m, n, dtype=dtype)
        close(omnigemm.gemm(a, b, out=poisoned(m, n, dtype=dtype)), a, b)
        close(omnigemm.gemm(a, b, c, beta=0.5, out=poisoned(m, n, dtype=dtype)), a, b, c, 1.0, 0.5)
    assert omnigemm.gemm(random(0, m, k), random(k, n)).shape == (0, m, n)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_what_beta_0_does_not_read(dtype: torch.dtype) -> None:
    a, b = random(40, 96, dtype=dtype), random(96, 56, dtype=dtype)
    nan = poisoned(40, 56, dtype=dtype)
    close(omnigemm.gemm(a, b, nan, out=nan.clone()), a, b)
    close(omnigemm.gemm(a, b, alpha=-3.0, out=nan), a, b, None, -3.0)
    close(omnigemm.gemm(a, b, nan.fill_(NAN), alpha=0.0), a, b, None, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_wide_results(dtype: torch.dtype) -> None:
    for batch in ((), (3,)):
        a, b = random(*batch, 40, 520, dtype=dtype), random(*batch, 520, 56, dtype=dtype)
        for c in (random(40, 56, dtype=dtype), random(40, 56, dtype=torch.float32)):
            result = omnigemm.gemm(a, b, c, alpha=2.0, beta=3.0, out_dtype=torch.float32)
            assert result.dtype == torch.float32
            want = exact(a, b, c, 2.0, 3.0)
            # Tensor cores cut off sums, by up to 1.6e-6 here; one rounding to fp16 is 2e-4.
            assert float((result.double() - want).norm() / want.norm()) < 1e-5
    with pytest.raises(omnigemm.UnsupportedError, match="no fp16 result of bf16"):
        omnigemm.gemm(random(2, 2), random(2, 2), out_dtype=torch.float16, backend="blas")


def test_tf32_is_as_torch_has_it() -> None:
    a, b = random(64, 512, dtype=torch.float32), random(512, 64, dtype=torch.float32)
    want = exact(a, b)

    def error() -> float:
        return float((omnigemm.gemm(a, b).double() - want).norm() / want.norm())

    for _ in range(2):
        torch.backends.cuda.matmul.allow_tf32 = False
        assert error() < 1e-6
        torch.backends.cuda.matmul.allow_tf32 = True
        assert 1e-5 < error() < 1e-3
    torch.backends.cuda.matmul.allow_tf32 = False
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert 1e-5 < error() < 1e-3
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert error() < 1e-6


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_reductions_in_fp32(dtype: torch.dtype, name: str) -> None:
    a, b = random(16, 16384, dtype=dtype), random(576, 16384, dtype=dtype).t()
    setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", False)
    close(omnigemm.gemm(a, b), a, b)
    ours, theirs = (float((one.double() - exact(a, b)).norm()) for one in (omnigemm.gemm(a, b), torch.mm(a, b)))
    assert ours <= 1.05 * theirs


def test_statuses_are_errors_of_ours() -> None:
    (found,) = blas().kernels(omnigemm.plan("gemm", m=1, n=1, k=1, device="cuda").problem, torch.device("cuda"))
    product = found.product  # type: ignore[attr-defined]
    a, b = random(8, 8, dtype=torch.float32), random(8, 8, dtype=torch.float32)
    with pytest.raises(omnigemm.OmniGemmError, match=r"NVIDIA cuBLAS: cublas\w+ answers \w+ \(\d+\)"):
        product(poisoned(8, 8), a, b, None, 1.0, 0.0)
    pool = product.pool(a.device)
    handle = pool.take()
    with pytest.raises(omnigemm.OmniGemmError, match=r"NVIDIA cuBLAS: cublasSetMathMode answers \w+ \(\d+\)"):
        handle.set_math_mode(9999)
    pool.give(handle)
    close(omnigemm.gemm(a, b), a, b)


def test_compiled_and_with_gradients() -> None:
    a, b, c = random(24, 264), random(264, 96), random(24, 96)
    compiled = torch.compile(lambda x, y, z: omnigemm.gemm(x, y, z, beta=2.0) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, c), omnigemm.gemm(a, b, c, beta=2.0) + 1)
    weight = torch.nn.Parameter(b)
    for _ in range(2):
        assert torch.equal(omnigemm.gemm(a, weight), omnigemm.gemm(a, b))
    scattered = laid_out(a, "scattered").requires_grad_()
    close(omnigemm.gemm(scattered, weight), a, b)


def test_what_is_refused_and_why() -> None:
    with pytest.raises(omnigemm.UnsupportedError, match="there is no cuda:31"):
        omnigemm.plan("gemm", m=1, n=1, k=1, device="cuda:31")
    with pytest.raises(omnigemm.UnsupportedError, match="not int8_gemm"):
        omnigemm.plan("int8_gemm", m=1, n=1, k=1, device="cuda", backend="blas")


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU on this machine")
def test_another_device() -> None:
    a, b = random(24, 264).to("cuda:1"), random(264, 96).to("cuda:1")
    close(omnigemm.gemm(a, b), a, b)
    assert torch.cuda.current_device() == 0


# ------------------------------------------------------------------------------------------------------- by cuBLASLt


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """A backend of its own, and how often it calls which functions: choose, multiply, gemm, gemm_single."""
    backend, seen = BlasBackend(), Counter[str]()
    assert backend.available(), backend.available().reason
    (found,) = backend.kernels(omnigemm.plan("gemm", m=1, n=1, k=1, device="cuda").problem, torch.device("cuda"))
    product = found.product  # type: ignore[attr-defined]
    if product.lt is None:
        pytest.skip(f"no cuBLASLt: {backend.available().reason}")

    def call(name: str, real: Callable[..., int], *arguments: Any) -> int:
        seen[name] += 1
        return real(*arguments)

    for functions in (product.lt.library._functions, product.library._functions):
        for name in {"choose", "multiply", "gemm", "gemm_single"} & set(functions):
            functions[name] = partial(call, name, functions[name])
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()  # also those by place: a new weight may lie where one of an earlier test was
    yield seen
    forget_calls()
    torch.cuda.synchronize()


def only_lt(seen: Counter[str]) -> bool:
    return seen["multiply"] > 0 and not seen["gemm"] and not seen["gemm_single"]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["single", "batch"])
def test_lt_every_transposition(counted: Counter[str], dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    for a_how, b_how, out_how in itertools.product(LAYOUTS, LAYOUTS, LAYOUTS):
        a = laid_out(random(*batch, 32, 200, dtype=dtype), a_how)
        b = laid_out(random(*batch, 200, 72, dtype=dtype), b_how)
        out = laid_out(poisoned(*batch, 32, 72, dtype=dtype), out_how)
        close(omnigemm.gemm(a, b, out=out), a, b)
        assert untouched(out)
        c = laid_out(random(*batch, 32, 72, dtype=dtype), out_how)
        before = c.clone()
        close(omnigemm.gemm(a, b, c, alpha=0.5, beta=-2.0, out=out), a, b, c, 0.5, -2.0)
        assert torch.equal(c, before)
        assert untouched(out)
        close(omnigemm.gemm(a, b, out.copy_(c), alpha=0.5, beta=-2.0, out=out), a, b, c, 0.5, -2.0)
    assert only_lt(counted), counted


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_lt_c_in_its_own_place(counted: Counter[str], dtype: torch.dtype) -> None:
    a, b = random(5, 40, 96, dtype=dtype), random(5, 96, 56, dtype=dtype)
    wide = random(5, 40, 80, dtype=dtype)
    for c in (
        random(5, 40, 56, dtype=dtype), wide[..., 8:64], random(40, 56, dtype=dtype), random(1, 40, 56, dtype=dtype),
        random(40, 1, dtype=dtype), random(56, dtype=dtype), random(5, 56, 40, dtype=dtype).mT,
    ):  # fmt: skip
        for _ in range(2):  # cold and warm
            got = omnigemm.gemm(a, b, c, alpha=-1.5, beta=0.5, out=poisoned(5, 40, 56, dtype=dtype))
            close(got, a, b, c.expand(5, 40, 56), -1.5, 0.5)
    nan = poisoned(5, 40, 56, dtype=dtype)
    close(omnigemm.gemm(a, b, nan, out=nan.clone()), a, b)
    assert only_lt(counted), counted


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_lt_every_alignment(counted: Counter[str], dtype: torch.dtype) -> None:
    """The same plan, worse and worse aligned, one matrix after the other, and well again."""
    m, n, k = 64, 128, 256
    size = torch.finfo(dtype).bits // 8

    def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
        return poisoned(x.numel() + 256, dtype=dtype)[by // size :][: x.numel()].view(x.shape).copy_(x)

    a, b, c = random(m, k, dtype=dtype), random(k, n, dtype=dtype), random(m, n, dtype=dtype)
    shifts = [one for one in (0, 128, 64, 32, 16, 8, 4, 2, 0) if one % size == 0]
    for which, shift in itertools.product(range(4), shifts):
        x, y, z, out = (
            shifted(t, shift if i == which else 0) for i, t in enumerate((a, b, c, poisoned(m, n, dtype=dtype)))
        )
        close(omnigemm.gemm(x, y, z, alpha=2.0, beta=0.5, out=out), a, b, c, 2.0, 0.5)
        close(omnigemm.gemm(x, y, out=out), a, b)
    assert only_lt(counted), counted
    assert counted["choose"] <= 2 * 4 * len(shifts)


def test_lt_is_asked_once(counted: Counter[str]) -> None:
    a, b, out = random(16, 7168), random(576, 7168).t(), poisoned(16, 576)
    for _ in range(10):
        close(omnigemm.gemm(a, b, out=out), a, b)
    assert (counted["choose"], counted["multiply"]) == (1, 10)


@pytest.mark.parametrize("shape", [(1, 576, 7168), (16, 2112, 1536), (129, 255, 1023), (1000, 1, 77), (1, 1, 4096)])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_lt_sizes_and_switches(counted: Counter[str], dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    matmul = torch.backends.cuda.matmul
    a, b = random(m, k, dtype=dtype), random(n, k, dtype=dtype).t()
    for strict in (False, True, False):
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = not strict
        close(omnigemm.gemm(a, b), a, b)
    assert counted["multiply"] + counted["gemm_single"] == 3


def test_lt_in_captures(counted: Counter[str]) -> None:
    """What was chosen before a capture is captured; for anything else, cuBLAS is."""
    a, b, other = random(16, 7168), random(576, 7168).t(), random(2112, 7168).t()
    out, other_out = poisoned(16, 576), poisoned(16, 2112)
    omnigemm.gemm(a, b, out=out)
    assert (counted["choose"], counted["multiply"], counted["gemm_single"]) == (1, 1, 0)
    torch.mm(a, other)  # a product that cuBLAS itself had never run has failed in a capture (docs/blas.md)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        omnigemm.gemm(a, b, out=out)
        omnigemm.gemm(a, other, out=other_out)
    assert (counted["choose"], counted["multiply"], counted["gemm_single"]) == (1, 2, 1)
    a.copy_(random(16, 7168))
    graph.replay()
    close(out, a, b)
    close(other_out, a, other)
