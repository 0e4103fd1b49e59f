"""What every library must give, by whichever way: as NVIDIA's cuBLAS with and without cuBLASLt, and as Kunlun's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import omnigemm
from backends.blas.cases import (
    FLOATS,
    KUNLUN,
    LAYOUTS,
    caller,
    exact,
    kernel,
    laid_out,
    opened,
    product,
)
from omnigemm.backends.blas import BlasBackend
from omnigemm.core.dtypes import name_of
from omnigemm.ops import _again, _run
from op_support import forget_calls


class Library(NamedTuple):
    """A backend on a stand-in, and the products that it was asked for, by handles and by the second library."""

    backend: BlasBackend
    by_handles: Callable[[], list[str]]
    by_lt: Callable[[], list[str]]
    lt_types: tuple[torch.dtype, ...]

    def product(self, out: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        return product(self.backend, out, a, b, *rest)


def begins(log: Callable[[], list[str]], word: str) -> Callable[[], list[str]]:
    return lambda: [line for line in log() if line.startswith(word)]


@pytest.fixture(params=["cuBLAS", "cuBLASLt", "Kunlun, cublasLt", "Kunlun"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Nothing in it may fail, except what a test makes fail."""
    if request.param == "cuBLAS":
        one = request.getfixturevalue("standin")
        made = Library(opened(one), begins(one.log, "gemm"), list, ())
        logs = [one.log]
    elif request.param == "cuBLASLt":
        two = request.getfixturevalue("pair")
        made = Library(opened(two), begins(two.blas.log, "gemm"), begins(two.lt.log, "matmul"), tuple(FLOATS))
        logs = [two.blas.log, two.lt.log]
    else:
        with_lt = request.param != "Kunlun"
        both = request.getfixturevalue("build_kunlun")(with_lt)
        monkeypatch.setenv("KUNLUN_HOME", str(both.home))
        types, log = (torch.bfloat16,) if with_lt else (), both.blas.log
        made = Library(BlasBackend(KUNLUN, caller=caller()), begins(log, "gemm"), begins(log, "matmul"), types)
        logs = [log, both.runtime.log]
    yield made
    failed = [line for log in logs for line in log() if "->" in line]
    assert not failed


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("a_how", "b_how", "out_how"), list(itertools.product(LAYOUTS, LAYOUTS, LAYOUTS)))
def test_every_transposition_and_stride(
    library: Library, dtype: torch.dtype, a_how: str, b_how: str, out_how: str
) -> None:
    """K is so long that cuBLASLt needs a workspace."""
    for batch in ((), (3,)):
        a = laid_out(torch.randn(*batch, 4, 40).to(dtype), a_how)
        b = laid_out(torch.randn(*batch, 40, 5).to(dtype), b_how)
        out = laid_out(torch.full((*batch, 4, 5), float("nan"), dtype=dtype), out_how)
        torch.testing.assert_close(library.product(out, a, b), exact(a, b).to(dtype))
        c = torch.randn(*batch, 4, 5).to(dtype)
        want = exact(a, b, c, 0.5, -2.0)
        torch.testing.assert_close(library.product(out, a, b, c, 0.5, -2.0), want.to(dtype))
        torch.testing.assert_close(library.product(out.copy_(c), a, b, out, 0.5, -2.0), want.to(dtype))
    by_lt = dtype in library.lt_types
    assert [len(library.by_lt()), len(library.by_handles())] == ([6, 0] if by_lt else [0, 6])


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("a_shape", [(4, 6), (1, 4, 6), (3, 4, 6)])
@pytest.mark.parametrize("b_shape", [(6, 5), (1, 6, 5), (3, 6, 5)])
def test_batches_broadcast(
    library: Library, dtype: torch.dtype, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    a, b = torch.randn(a_shape).to(dtype), torch.randn(b_shape).to(dtype)
    want = exact(a, b).to(dtype)
    assert torch.equal(library.product(torch.full_like(want, float("nan")), a, b), want)
    repeated, other = torch.randn(1, 4, 6).to(dtype).expand(3, 4, 6), torch.randn(3, 6, 5).to(dtype)
    out = torch.empty(3, 4, 5, dtype=dtype)
    assert torch.equal(library.product(out, repeated, other), exact(repeated, other).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("shape", [(0, 5, 6), (4, 0, 6), (4, 5, 0), (1, 1, 1), (1, 5, 6), (4, 1, 6), (4, 5, 1)])
def test_thin_and_empty(library: Library, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for a_how, b_how in itertools.product(LAYOUTS, LAYOUTS):
        a, b = laid_out(torch.randn(m, k).to(dtype), a_how), laid_out(torch.randn(k, n).to(dtype), b_how)
        c, out = torch.randn(m, n).to(dtype), torch.full((m, n), float("nan"), dtype=dtype)
        assert torch.equal(library.product(out, a, b), exact(a, b).to(dtype))
        want = exact(a, b, c, 1.0, 0.5).to(dtype)
        torch.testing.assert_close(library.product(out, a, b, c, 1.0, 0.5), want)
    if dtype in library.lt_types:
        assert not library.by_handles()


def test_nothing_to_add_up_is_rounded_once(library: Library) -> None:
    """beta C in fp32: a third of a number of 8 bits, and what is above the largest of 16 bits."""
    a, b = torch.ones(2, 0, dtype=torch.bfloat16), torch.ones(0, 3, dtype=torch.bfloat16)
    c = torch.tensor([1.0, 3.0, 7.0]).bfloat16()
    out = torch.empty(2, 3)
    assert torch.equal(library.product(out, a, b, c, 1.0, 1 / 3), (c.float() * (1 / 3)).expand(2, 3))
    large = torch.full((2, 3), 60000.0, dtype=torch.float16)
    out = torch.empty(2, 3)
    assert torch.equal(library.product(out, a.half(), b.half(), large, 1.0, 4.0), torch.full((2, 3), 240000.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_wide_results(library: Library, dtype: torch.dtype) -> None:
    a, b, c = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype), torch.randn(4, 5).to(dtype)
    out = torch.empty(4, 5)
    assert torch.equal(library.product(out, a, b), exact(a, b).float())
    for one in (c, c.float()):
        torch.testing.assert_close(library.product(out, a, b, one, 2.0, 3.0), exact(a, b, c, 2.0, 3.0).float())
    if dtype in library.lt_types:
        # A C of another type than D is copied first.
        assert [line.partition("apart=")[2][0] for line in library.by_lt()] == ["0", "0", "1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_nan_in_c_and_out_is_not_read_with_beta_0(library: Library, dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype)
    nan = torch.full((4, 5), float("nan"), dtype=dtype)
    for out in (nan.clone(), nan.t().contiguous().t()):
        assert torch.equal(library.product(out, a, b, nan, 1.0, 0.0), exact(a, b).to(dtype))
    assert not [line for line in library.by_lt() if "apart=1" in line]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("k", [0, 6])
def test_parameters_that_require_gradients(library: Library, dtype: torch.dtype, k: int) -> None:
    """Of which a result has none, whatever is copied on the way."""
    shapes = (4, k), (k, 5), (4, 5)
    a, b, c = (torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)
    for left in (a, laid_out(torch.randn(4, k).to(dtype), "scattered").requires_grad_()):
        out = library.product(torch.empty(4, 5, dtype=dtype), left, b, c, 2.0, 3.0)
        assert not out.requires_grad
        torch.testing.assert_close(out, exact(left, b, c, 2.0, 3.0).to(dtype))
    outs = [torch.empty(4, 5, dtype=dtype) for _ in range(2)]
    kernel(library.backend).groups(outs, [a, a], [b, b], [c, c], [2.0, 1.0], [3.0, 0.0])
    assert not any(one.requires_grad for one in outs)


@pytest.fixture
def _registered(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (library.backend,))
    forget_calls()
    yield
    forget_calls()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("kind", ["out", "fresh", "in place", "other C", "copied C"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_warm_call_hands_over_addresses(
    library: Library, monkeypatch: pytest.MonkeyPatch, kind: str, batch: tuple[int, ...]
) -> None:
    """The same products as of tensors, each time from other addresses. A C that must be copied takes tensors."""
    written: list[int] = []
    write = _run.write

    def look(*call: Any) -> Any:
        written.append(1)
        return write(*call)

    for module in (_run, _again):
        monkeypatch.setattr(module, "write", look)
    b = torch.randn(*batch, 6, 5)
    for _ in range(4):
        a, c, out = torch.randn(*batch, 4, 6), torch.randn(*batch, 4, 5), torch.full((*batch, 4, 5), float("nan"))
        if kind == "copied C":
            c = torch.randn(5)
        if kind == "fresh":
            got, want = omnigemm.gemm(a, b), exact(a, b)
        elif kind == "out":
            got, want = omnigemm.gemm(a, b, alpha=2.0, out=out), exact(a, b, alpha=2.0)
            assert got is out
        else:
            want = exact(a, b, c, 2.0, 0.5)
            got = omnigemm.gemm(a, b, c, alpha=2.0, beta=0.5, out=c if kind == "in place" else out)
        torch.testing.assert_close(got, want.float())
    copies = kind == "copied C" or (kind == "other C" and torch.float32 not in library.lt_types)
    assert len(written) == (4 if copies else 1)
    assert len(library.by_lt()) + len(library.by_handles()) == 4
