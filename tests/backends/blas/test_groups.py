"""Many products: by the vendor's own function where it has one, by a loop elsewhere, rows of one tensor either way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from backends.blas.cases import (
    CPU,
    FLOATS,
    STATUS_NAMES,
    STREAM,
    caller,
    error_of,
    exact,
    kernel,
    opened,
    products,
    word,
)
from omnigemm.backends.blas.caller import Caller
from omnigemm.core.dtypes import name_of
from omnigemm.core.problem import describe
from op_support import forget_calls

SHAPES = [(3, 5, 6), (1, 8, 2), (0, 4, 4), (7, 1, 9), (2, 2, 0)]


def aligned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random, and at a multiple of 64 bytes as GPUs have it; torch's memory on the host is."""
    made = torch.randn(shape).to(dtype)
    assert made.data_ptr() % 16 == 0
    return made


def lists(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    a = [aligned(m, k, dtype=dtype) for m, _, k in SHAPES]
    b = [aligned(n, k, dtype=dtype).t() if n % 2 else aligned(k, n, dtype=dtype) for _, n, k in SHAPES]
    return a, b, [aligned(m, n, dtype=dtype) for m, n, _ in SHAPES]


def check(out: list[Tensor], a: list[Tensor], b: list[Tensor], c: list[Tensor], alpha: Any, beta: Any) -> None:
    for i in range(len(a)):
        want = exact(a[i], b[i], c[i], alpha[i], beta[i])
        torch.testing.assert_close(out[i], want.to(out[i].dtype), rtol=0.01, atol=0.01)


@pytest.fixture(params=["one call", "loop"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library, with its backend registered for the operations."""
    library = request.getfixturevalue("standin" if request.param == "one call" else "standin_of_batches")
    made = opened(library)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (made,))
    forget_calls()
    yield library
    forget_calls()


def is_one_call(library: Any) -> bool:
    return hasattr(library.lib, "cublasGemmGroupedBatchedEx")


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_lists(backend: Any, dtype: torch.dtype) -> None:
    a, b, c = lists(dtype)
    ones, zeros = [1.0] * len(a), [0.0] * len(a)
    for _ in range(2):  # cold and warm
        check(omnigemm.grouped_gemm(a, b), a, b, c, ones, zeros)
        alpha, beta = [1.0, 0.5, 2.0, -1.0, 3.0], [0.0, 2.0, 1.0, 1.0, 0.5]
        out = [torch.full_like(one, float("nan")) for one in c]
        out[1].copy_(c[1])
        given = [out[1] if i == 1 else one for i, one in enumerate(c)]
        want = [one.clone() for one in given]
        omnigemm.grouped_gemm(a, b, given, alpha=alpha, beta=beta, out=out)
        check(out, a, b, want, alpha, beta)
    names = [line.split()[0] for line in products(backend.log())]
    assert names == (["gemm_grouped"] * 4 if is_one_call(backend) else ["gemm"] * 12)
    found = omnigemm.explain("grouped_gemm", m=4, n=5, k=6, dtype=dtype)
    assert found.chosen is not None
    assert ("one call for all groups" if is_one_call(backend) else "one call for each group") in found.chosen.reason


def test_results_in_columns_and_in_rows(standin: Any) -> None:
    groups = kernel(opened(standin)).groups
    a, b, c = lists(torch.float32)
    out = [torch.full_like(one, float("nan")) for one in c]
    out[0], out[3] = out[0].t().contiguous().t(), out[3].t().contiguous().t()
    groups(out, a, b, None, [1.0] * 5, [0.0] * 5)
    check(out, a, b, c, [1.0] * 5, [0.0] * 5)
    assert [line.split()[0] for line in products(standin.log())] == ["gemm_grouped"]


@pytest.mark.parametrize("why", ["wide results", "not dense", "not aligned", "captured"])
def test_what_the_vendors_function_does_not_take_is_a_loop(standin: Any, why: str) -> None:
    captures = [False]
    found = kernel(opened(standin, by=caller(capturing=lambda: captures[0])))
    a, b, c = lists(torch.float16)
    out = [torch.full_like(one, float("nan"), dtype=torch.float32 if why == "wide results" else None) for one in c]
    if why == "not dense":
        a[0] = torch.stack([a[0], a[0]], -1)[..., 0]
    elif why == "not aligned":
        a[0] = torch.cat([a[0].flatten(), a[0].flatten()])[1:19].view(3, 6)
    elif why == "captured":
        found.product(torch.empty(1, 1), torch.ones(1, 1), torch.ones(1, 1), None, 1.0, 0.0)
        captures[0] = True
    before = len(products(standin.log()))
    found.groups(out, a, b, None, [1.0] * 5, [0.0] * 5)
    check(out, a, b, c, [1.0] * 5, [0.0] * 5)
    assert [line.split()[0] for line in products(standin.log())[before:]] == ["gemm_single"] * 3


def test_factors_on_the_device_are_read_by_the_host(standin: Any) -> None:
    captures = [False]
    found = kernel(opened(standin, by=caller(capturing=lambda: captures[0])))
    a, b, c = lists(torch.float32)
    out = [torch.full_like(one, float("nan")) for one in c]
    alpha, beta = torch.tensor(2.0), torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    launch = found.groups.bind(out, a, b, c, alpha, beta)
    for _ in range(2):
        launch(out, a, b, c, alpha, beta)
        check(out, a, b, c, alpha.expand(5).tolist(), beta.tolist())
        alpha.add_(1)
        beta.add_(1)
    captures[0] = True
    before = [one.clone() for one in out]
    with pytest.raises(omnigemm.DeviceError, match="alpha and beta on the device must be read by the host"):
        launch(out, a, b, c, alpha, beta)
    assert all(torch.equal(one, own) for one, own in zip(out, before, strict=True))


def test_sizes_on_the_device_are_read_by_the_host(standin: Any) -> None:
    """In every call; what lies beside is not touched, and sizes that do not fit are refused before anything is."""
    captures = [False]
    found = kernel(opened(standin, by=caller(capturing=lambda: captures[0])))
    a, b, c = lists(torch.float32)
    sizes = torch.tensor([[*one.shape, x.size(1)] for one, x in zip(c, a, strict=True)], dtype=torch.int32)
    ones, zeros = [1.0] * len(a), [0.0] * len(a)
    launch = found.groups.bind(c, a, b, None, ones, zeros, sizes)
    for less in (0, 1):
        sizes.sub_(less).clamp_(min=0)
        out = [torch.full_like(one, 7.0) for one in c]
        launch(out, a, b, None, ones, zeros, sizes)
        for one, x, y, (m, n, k) in zip(out, a, b, sizes.tolist(), strict=True):
            expected = torch.full_like(one, 7.0, dtype=torch.float64)
            expected[:m, :n] = x[:m, :k].double() @ y[:k, :n].double()
            assert torch.allclose(one.double(), expected, atol=1e-4)
    before = [one.clone() for one in out]
    with pytest.raises(omnigemm.ShapeError, match=r"sizes\[0, 0\] is 99"):
        launch(
            out, a, b, None, ones, zeros, sizes.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(99).int())
        )
    captures[0] = True
    with pytest.raises(omnigemm.DeviceError, match="gemm: sizes on the device must be read by the host"):
        launch(out, a, b, None, ones, zeros, sizes)
    assert all(torch.equal(one, own) for one, own in zip(out, before, strict=True))


def test_who_waits_says_so(standin: Any) -> None:
    """Dispatch then takes it last, however cheap it is beside our own kernels, which may have to copy every operand."""
    found = kernel(opened(standin))
    words: dict[str, Any] = {"m": 0, "n": 0, "k": 0, "shapes": [(65, 63, 61)] * 20, "dtype": "bf16"}
    for waits, awaited in ({}, ""), ({"device_sizes": True}, "sizes"), ({"device_factors": True}, "alpha and beta"):
        answer = found.supports(describe("grouped_gemm", **words, **waits), torch.device("cuda"))
        assert answer.waits == bool(waits)
        assert ("after waiting for the device, to read " + awaited in answer.reason) == bool(waits)


def test_handles_and_switches_are_those_of_single_products(standin: Any) -> None:
    found = kernel(opened(standin))
    a, b, c = lists(torch.float16)
    matmul = torch.backends.cuda.matmul
    try:
        for allowed in (True, False):
            matmul.allow_fp16_reduced_precision_reduction = allowed
            found.groups(c, a, b, None, [1.0] * 5, [0.0] * 5)
    finally:
        matmul.allow_fp16_reduced_precision_reduction = True
    modes = [word(line, "mode") for line in standin.log() if line.startswith("group ")]
    assert modes == ["0"] * 3 + ["16"] * 3
    assert standin.live_handles() == 2


def test_tf32_is_as_torch_has_it(standin: Any) -> None:
    found = kernel(opened(standin))
    a, b, c = lists(torch.float32)
    try:
        for torch.backends.cuda.matmul.allow_tf32 in (False, True, False):
            found.groups(c, a, b, None, [1.0] * 5, [0.0] * 5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    computes = [word(line, "compute") for line in standin.log() if line.startswith("group ")]
    assert computes == ["68"] * 3 + ["77"] * 3 + ["68"] * 3


@pytest.mark.parametrize("status", [0, 13])
def test_a_vendor_that_must_be_waited_for(standin: Any, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Before the table of addresses is given back, whatever came of it."""
    found = kernel(opened(standin))
    waited: list[int] = []
    monkeypatch.setattr(found.product.library, "_wait", lambda stream: waited.append(stream) or 0)
    a, b, c = lists(torch.float16)
    standin.fail("cublasGemmGroupedBatchedEx", status, times=int(status > 0))
    with pytest.raises(omnigemm.DeviceError) if status else contextlib.nullcontext():
        found.groups(c, a, b, None, [1.0] * 5, [0.0] * 5)
    assert waited == [STREAM]


def test_lists_on_another_device(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = [1]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        where[0] = index
        yield
        where[0] = 1

    monkeypatch.setattr(torch.cuda, "device", device)
    found = kernel(opened(standin, by=Caller(lambda: where[0], lambda index: 0x50 + where[0], lambda: False)))
    a, b, c = lists(torch.float16)
    found.groups(c, a, b, None, [1.0] * 5, [0.0] * 5)
    assert {word(line, "stream") for line in standin.log() if line.startswith("group ")} == {"0x50"}
    assert where == [1]


@pytest.mark.parametrize("status", STATUS_NAMES)
@pytest.mark.parametrize(
    "function",
    [
        "cublasCreate_v2",
        "cublasSetStream_v2",
        "cublasSetWorkspace_v2",
        "cublasSetMathMode",
        "cublasGemmGroupedBatchedEx",
    ],
)
def test_every_status_is_an_error_of_ours(standin: Any, function: str, status: int) -> None:
    """Before a C is copied, or a group without a K written, if there is no handle or it refuses."""
    found = kernel(opened(standin))
    a, b, c = lists(torch.float16)
    out = [torch.full_like(one, 5.0) for one in c]
    standin.fail(function, status)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        wanted = rf"NVIDIA cuBLAS: {function} answers {STATUS_NAMES[status]} \({status}\)"
        with pytest.raises(error_of(status), match=wanted):
            found.groups(out, a, b, c, [1.0] * 5, [1.0] * 5)
        assert function == "cublasGemmGroupedBatchedEx" or all(bool((one == 5.0).all()) for one in out)
        found.groups(out, a, b, c, [1.0] * 5, [1.0] * 5)
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    check(out, a, b, c, [1.0] * 5, [1.0] * 5)
    found.product.pool(CPU).close()
    assert standin.live_handles() == 0


@pytest.mark.parametrize("captured", [False, True])
def test_a_loop_without_a_handle_writes_nothing(standin_of_batches: Any, captured: bool) -> None:
    """Not even the groups that need none, which come first in the list."""
    captures = [captured]
    found = kernel(opened(standin_of_batches, by=caller(capturing=lambda: captures[0])))
    a, b = [torch.ones(2, 0), torch.ones(2, 3)], [torch.ones(0, 2), torch.ones(3, 2)]
    out, c = [torch.full((2, 2), 5.0) for _ in a], [torch.ones(2, 2) for _ in a]
    standin_of_batches.fail("cublasCreate_v2", 3, times=9)
    with pytest.raises(omnigemm.DeviceError, match="no handle is ready" if captured else "ALLOC_FAILED"):
        found.groups(out, a, b, c, [1.0] * 2, [1.0] * 2)
    assert all(bool((one == 5.0).all()) for one in out)


# ---------------------------------------------------------------------------------------------- rows of one tensor


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_rows(backend: Any, dtype: torch.dtype) -> None:
    groups, n, k, ends = 4, 8, 16, [3, 3, 8, 10]
    b = torch.randn(groups, n, k).to(dtype)
    a = torch.randn(12, k).to(dtype)
    out = torch.full((12, n), float("nan"), dtype=dtype)
    omnigemm.grouped_gemm_contiguous(a, b, torch.tensor(ends, dtype=torch.int32), out=out)
    slabs = torch.randn(groups, 5, k).to(dtype)
    masked = torch.full((groups, 5, n), float("nan"), dtype=dtype)
    omnigemm.grouped_gemm_masked(slabs, b, torch.tensor([2, 0, 5, 1], dtype=torch.int32), out=masked)
    for group, count in enumerate([2, 0, 5, 1]):
        rows = slice(ends[group - 1] if group else 0, ends[group])
        want = exact(a[rows], b[group].t()).to(dtype)
        torch.testing.assert_close(out[rows], want, rtol=0.01, atol=0.01)
        want = exact(slabs[group, :count], b[group].t()).to(dtype)
        torch.testing.assert_close(masked[group, :count], want, rtol=0.01, atol=0.01)
        assert bool(masked[group, count:].isnan().all())
    assert bool(out[10:].isnan().all())
    names = {line.split()[0] for line in products(backend.log())}
    assert names == ({"gemm_grouped"} if is_one_call(backend) else {"gemm"})
    found = omnigemm.explain("grouped_gemm_masked", m=4, n=5, k=6, dtype=dtype, groups=3)
    assert "after waiting for the device, to read the rows of each group" in str(found)


@pytest.mark.usefixtures("backend")
def test_no_rows_and_wrong_rows() -> None:
    a, b = torch.randn(4, 8), torch.randn(2, 3, 8)
    out = torch.full((4, 3), 5.0)
    omnigemm.grouped_gemm_contiguous(a, b, torch.zeros(2, dtype=torch.int32), out=out)
    assert bool((out == 5.0).all())
    with pytest.raises(omnigemm.ShapeError, match=r"ends\[1\] is 5, expected 1 <= ends\[1\] <= T = 4"):
        omnigemm.grouped_gemm_contiguous(a, b, torch.tensor([1, 5], dtype=torch.int32))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_rows_along_k(dtype: torch.dtype) -> None:
    a, b, ends = torch.randn(12, 6).to(dtype), torch.randn(12, 8).to(dtype), [3, 3, 8, 10]
    index = torch.tensor(ends, dtype=torch.int32)
    for kind in (torch.float32, dtype):
        c = torch.randn(4, 6, 8).to(kind)
        out = torch.full((4, 6, 8), float("nan"), dtype=kind)
        in_place = c.clone()
        omnigemm.grouped_gemm_k_contiguous(a, b, index, out=out)
        added = omnigemm.grouped_gemm_k_contiguous(a, b, index, c)
        omnigemm.grouped_gemm_k_contiguous(a, b, index, in_place, out=in_place)
        for group, end in enumerate(ends):
            rows = slice(ends[group - 1] if group else 0, end)
            want = exact(a[rows].t(), b[rows])
            torch.testing.assert_close(out[group].double(), want.double(), rtol=0.01, atol=0.02)
            torch.testing.assert_close(added[group].double(), want + c[group].double(), rtol=0.01, atol=0.02)
        assert torch.equal(in_place, added)
    with pytest.raises(omnigemm.ShapeError, match=r"ends\[1\] is 13, expected 1 <= ends\[1\] <= T = 12"):
        omnigemm.grouped_gemm_k_contiguous(a, b, torch.tensor([1, 13], dtype=torch.int32))


@pytest.mark.parametrize(
    ("op", "name"),
    [("grouped_gemm_contiguous", "ends"), ("grouped_gemm_masked", "counts"), ("grouped_gemm_k_contiguous", "ends")],
)
def test_rows_are_not_captured(standin: Any, op: str, name: str) -> None:
    captures = [True]
    found = kernel(opened(standin, by=caller(capturing=lambda: captures[0])))
    plan = found.plan(describe(op, m=4, n=3, k=8, groups=2, dtype="fp32"), CPU)
    with pytest.raises(omnigemm.DeviceError, match=rf"{op}: {name} is on the device and must be read by the host"):
        plan.launch(torch.empty(2, 4, 3), torch.empty(2, 4, 8), torch.empty(2, 3, 8), torch.zeros(2), None, None)
    assert standin.log() == []


def explained(backend: Any, monkeypatch: pytest.MonkeyPatch, op: str = "grouped_gemm", **words: Any) -> str:
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    found = omnigemm.explain(op, **{"m": 0, "n": 0, "k": 0, "dtype": "fp32", **words}).chosen
    assert found is not None
    return found.reason


EACH, ALL = "one call for each group", "one call for all groups"


def test_large_groups_are_products_of_their_own(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's grouped function has half the speed of its single ones. `explain` says so."""
    backend = opened(standin)
    groups = kernel(backend).groups
    assert groups.in_one_call("fp32", "fp32", 9.9e9)
    assert not groups.in_one_call("fp32", "fp32", 1e10)
    for rows, way in ((1000, ALL), (1250, EACH)):  # 2 x 1250 x 2000 x 2000 is 10 GFLOP
        assert way in explained(backend, monkeypatch, shapes=[(rows, 2000, 2000)] * 2)
        sizes = {"m": rows, "n": 2000, "k": 2000, "groups": 3}
        assert way in explained(backend, monkeypatch, "grouped_gemm_masked", **sizes)
        sizes["m"] *= 3
        assert way in explained(backend, monkeypatch, "grouped_gemm_contiguous", **sizes)
    monkeypatch.setattr("omnigemm.backends.blas.grouped._OWN_CALL", 2.0 * 4 * 5 * 6)
    a, b = [torch.randn(4, 6) for _ in range(3)], [torch.randn(6, 5) for _ in range(3)]
    out = [torch.full((4, 5), float("nan")) for _ in range(3)]
    groups(out, a, b, None, [1.0] * 3, [0.0] * 3)
    assert all(torch.equal(z, exact(x, y).float()) for x, y, z in zip(a, b, out, strict=True))
    assert len(products(standin.log())) == 3


@pytest.mark.parametrize("limit", [0.75, 1.25])
def test_empty_groups_do_not_count_in_the_mean(standin: Any, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """For `explain` as for the launch."""
    monkeypatch.setattr("omnigemm.backends.blas.grouped._OWN_CALL", limit * 2.0 * 4 * 5 * 6)
    backend, shapes = opened(standin), [(4, 5, 6), (4, 5, 6), (0, 5, 6), (4, 5, 0)]
    assert (ALL if limit > 1 else EACH) in explained(backend, monkeypatch, shapes=shapes)
    a, b = [torch.randn(m, k) for m, _, k in shapes], [torch.randn(k, n) for _, n, k in shapes]
    kernel(backend).groups([torch.empty(m, n) for m, n, _ in shapes], a, b, None, [1.0] * 4, [0.0] * 4)
    names = [line.split()[0] for line in products(standin.log())]
    assert names == (["gemm_grouped"] if limit > 1 else ["gemm_single"] * 2)


@pytest.mark.parametrize("side", ["a", "b"])
def test_what_must_be_copied_is_a_loop(standin: Any, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """For `explain`, and for the plan's memory: one group's copy at a time."""
    backend = opened(standin)
    shapes = [(4, 5, 6), (3, 5, 6)]
    for layout, way in (("row", ALL), ("col", ALL), ("strided", EACH), ("mixed", ALL)):
        words = {f"{side}_layout": layout, "shapes": shapes}
        reason = explained(backend, monkeypatch, **words)
        assert way in reason
        assert ("or for each if a matrix has no dense dimension" in reason) == (layout == "mixed")
        plan = omnigemm.plan("grouped_gemm", m=0, n=0, k=0, dtype="fp32", **words)
        one = 4 * (24 if side == "a" else 30)
        assert plan.workspace_bytes == (one if layout in ("strided", "mixed") else 0)
    assert EACH in explained(
        backend, monkeypatch, "grouped_gemm_masked", m=4, n=5, k=6, **{f"{side}_layout": "strided"}
    )
    a, b = ([torch.randn(one, 6) for one in (4, 3)], [torch.randn(6, 5) for _ in range(2)])
    given = {"a": a, "b": b}
    given[side] = [torch.stack([one, one], -1)[..., 0] for one in given[side]]
    forget_calls()
    out = omnigemm.grouped_gemm(given["a"], given["b"])
    forget_calls()
    check(out, a, b, out, [1.0] * 2, [0.0] * 2)
    assert [line.split()[0] for line in products(standin.log())] == ["gemm_single"] * 2
