"""The blas backend as vendor Kunlun: found below KUNLUN_HOME, bf16 through cublasLt or fp32 copies, and a runtime that
is waited for. Its products are those of `test_products.py`."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import omnigemm
from backends.blas.cases import (
    CPU,
    FLOATS,
    KUNLUN,
    STATUS_NAMES,
    STREAM,
    caller,
    error_of,
    exact,
    in_threads,
    kernel,
    pool,
    product,
    products,
    twos,
    word,
)
from omnigemm.backends.blas import BlasBackend
from omnigemm.core.dtypes import name_of
from omnigemm.core.problem import Problem, describe
from op_support import forget_calls

BF16 = torch.bfloat16


@pytest.fixture
def copying(build_kunlun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library without cublasLt."""
    made = build_kunlun(False)
    monkeypatch.setenv("KUNLUN_HOME", str(made.home))
    return made


@pytest.fixture
def by_lt(build_kunlun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library with it."""
    made = build_kunlun(True)
    monkeypatch.setenv("KUNLUN_HOME", str(made.home))
    return made


def backend_of(kunlun: Any, **by: Any) -> BlasBackend:
    made = BlasBackend(KUNLUN, caller=caller(**by))
    assert str(kunlun.path) in made.available().reason
    return made


def bf16s(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


def multiplied(kunlun: Any) -> list[str]:
    return [line for line in kunlun.blas.log() if line.startswith("matmul")]


# ---------------------------------------------------------------------------------------------------------- which way


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_only_bf16_goes_through_cublaslt(by_lt: Any, dtype: torch.dtype) -> None:
    """Without an algorithm, with a workspace, and with nothing to wait for."""
    backend = backend_of(by_lt)
    a, b = torch.randn(4, 6).to(dtype), torch.randn(6, 5).to(dtype)
    for _ in range(2):
        out = torch.empty(4, 5, dtype=dtype)
        assert torch.equal(product(backend, out, a, b), exact(a, b).to(dtype))
    lines = multiplied(by_lt)
    if dtype == BF16:
        assert [word(line, "types") for line in lines] == ["14,14,14"] * 2
        assert {word(line, "bytes") for line in lines} == {"4096"}
        assert not products(by_lt.blas.log())
    else:
        assert not lines
        assert len(products(by_lt.blas.log())) == 2
    assert by_lt.runtime.log() == []


def reasons(backend: BlasBackend, monkeypatch: pytest.MonkeyPatch, **problem: Any) -> str:
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    found = omnigemm.explain("gemm", m=1, n=1, k=1, **problem).chosen
    assert found is not None
    return found.reason


def test_explain_says_which(kunlun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, path = backend_of(kunlun), kunlun.path
    if multiplies := hasattr(kunlun.blas.lib, "cublasLtMatmul"):
        way = f"bf16 by cublasLt of xpu_blas 130100 ({path}) where it has an algorithm, else bf16 through fp32 copies"
    else:
        way = f"without cublasLt of xpu_blas: Kunlun xpu_blas: {path} lacks the function cublasLtCreate, bf16 through"
    assert way in backend.available().reason
    assert way in reasons(backend, monkeypatch, dtype="bf16")
    assert reasons(backend, monkeypatch, dtype="fp16") == f"Kunlun xpu_blas ({path})"
    assert (kernel(backend).product.lt is not None) == multiplies


@pytest.mark.parametrize("status", [7, 15])
def test_what_cublaslt_has_no_way_for_goes_through_copies(by_lt: Any, status: int) -> None:
    """And is not tried again."""
    backend = backend_of(by_lt)
    a, b, c = bf16s((4, 6), (6, 5), (4, 5))
    by_lt.blas.fail("cublasLtMatmul", status)
    out = torch.full((4, 5), float("nan"), dtype=BF16)
    launch = kernel(backend).product.bind(out, a, b, c, 0.5, 2.0)
    for _ in range(2):
        launch(out, a, b, c, 0.5, 2.0)
        torch.testing.assert_close(out, exact(a, b, c, 0.5, 2.0).bfloat16())
    assert len(multiplied(by_lt)) == 1
    assert [word(line, "types") for line in products(by_lt.blas.log())] == ["0,0,0"] * 2
    assert by_lt.runtime.log() == [f"wait {STREAM:#x}"] * 2


LT_FUNCTIONS = ["cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatrixLayoutCreate", "cublasLtMatmul"]


@pytest.mark.parametrize("function", LT_FUNCTIONS)
@pytest.mark.parametrize("status", [one for one in STATUS_NAMES if one not in (7, 15)])
def test_other_statuses_of_cublaslt_are_errors(by_lt: Any, function: str, status: int) -> None:
    backend = backend_of(by_lt)
    a, b = bf16s((4, 6), (6, 5))
    by_lt.blas.fail(function, status)
    out = torch.full((4, 5), 5.0, dtype=BF16)
    wanted = rf"Kunlun xpu_blas: {function} answers {STATUS_NAMES[status]} \({status}\)"
    with pytest.raises(error_of(status), match=wanted):
        product(backend, out, a, b)
    assert bool((out == 5.0).all())
    assert torch.equal(product(backend, out, a, b), exact(a, b).bfloat16())


def test_groups(kunlun: Any) -> None:
    backend = backend_of(kunlun)
    found = kernel(backend)
    reason = found.supports(describe("grouped_gemm", m=1, n=1, k=1), CPU).reason
    assert "bf16 through fp32 copies, one call for each group" in reason
    a, b = bf16s((3, 6), (0, 6), (2, 6)), bf16s((6, 5), (6, 5), (6, 5))
    out = [torch.empty(m, 5, dtype=BF16) for m in (3, 0, 2)]
    found.groups(out, a, b, None, [1.0] * 3, [0.0] * 3)
    for got, x, y in zip(out, a, b, strict=True):
        assert torch.equal(got, exact(x, y).bfloat16())
    by_handles, by_second = len(products(kunlun.blas.log())), len(multiplied(kunlun))
    assert (by_handles, by_second) == ((0, 2) if hasattr(kunlun.blas.lib, "cublasLtMatmul") else (2, 0))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_through_the_operations(kunlun: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    backend = backend_of(kunlun)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()
    a, b, c = (torch.randn(shape).to(dtype) for shape in ((3, 4, 6), (3, 6, 5), (3, 4, 5)))
    for _ in range(3):  # cold and warm
        torch.testing.assert_close(omnigemm.gemm(a, b), exact(a, b).to(dtype))
        want = exact(a, b, c, 2.0, 0.5).to(dtype)
        torch.testing.assert_close(omnigemm.gemm(a, b, c, alpha=2.0, beta=0.5), want)
        rows = torch.tensor([2, 4, 4], dtype=torch.int32)
        got = omnigemm.grouped_gemm_contiguous(a[0], b.mT.contiguous(), rows)
        torch.testing.assert_close(got[:2], exact(a[0, :2], b[0]).to(dtype))
        torch.testing.assert_close(got[2:], exact(a[0, 2:], b[1]).to(dtype))
    forget_calls()


# ------------------------------------------------------------------------------------------------- copies and waiting


def test_copies_are_waited_for(copying: Any) -> None:
    backend = backend_of(copying)
    a, b, c = bf16s((4, 6), (6, 5), (4, 5))
    out = torch.empty(4, 5, dtype=BF16)
    assert torch.equal(product(backend, out, a, b), exact(a, b).float().bfloat16())
    torch.testing.assert_close(product(backend, out, a, b, c, 0.5, 2.0), exact(a, b, c, 0.5, 2.0).bfloat16())
    wait = f"wait {STREAM:#x}"
    assert copying.runtime.log() == [wait] * 2
    half = torch.empty(4, 5, dtype=torch.float16)
    product(backend, half, a.half(), b.half())
    assert copying.runtime.log() == [wait] * 2  # nothing was copied, so nothing is waited for
    product(backend, half, torch.stack([a.half(), a.half()], -1)[..., 0], b.half())
    assert copying.runtime.log() == [wait] * 3


class Taken(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
            self.bytes += made.untyped_storage().nbytes()
        return made


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layouts", [("row", "row"), ("strided", "row"), ("row", "strided"), ("strided", "strided")])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_plan_says_what_is_taken(kunlun: Any, dtype: torch.dtype, layouts: tuple[str, str], batch: int) -> None:
    """To the byte where there is only one way; each matrix is copied once."""
    found = kernel(backend_of(kunlun))
    a, b = (
        torch.randn(rows, columns, batch, 2).to(dtype)[..., 0].permute(2, 0, 1)
        if way == "strided"
        else torch.randn(batch, rows, columns).to(dtype)
        for way, rows, columns in zip(layouts, (4, 6), (6, 5), strict=True)
    )
    out = torch.empty(batch, 4, 5, dtype=dtype)
    shape = {"m": 4, "n": 5, "k": 6, "batch": batch, "dtype": dtype}
    plan = found.plan(describe("gemm", **shape, a_layout=layouts[0], b_layout=layouts[1]), CPU)
    product(backend_of(kunlun), out, a, b)
    found.product(out, a, b, None, 1.0, 0.0)  # what is kept is there now
    with Taken() as taken:
        found.product(out, a, b, None, 1.0, 0.0)
    torch.testing.assert_close(out, exact(a, b).to(dtype))
    sizes = [one.numel() * dtype.itemsize * (way == "strided") for one, way in zip((a, b), layouts, strict=True)]
    wide = 4 * batch * (24 + 30 + 20)
    if dtype == BF16 and found.product.by_lt("bf16"):
        assert (taken.bytes, plan.workspace_bytes) == (sum(sizes), wide + sum(sizes))
    else:
        assert taken.bytes == plan.workspace_bytes == (wide if dtype == BF16 else sum(sizes))


def test_copies_of_a_group_are_given_back_before_the_next(kunlun: Any) -> None:
    shapes = ((4, 5, 6), (1, 1, 1))
    problem = Problem("grouped_gemm", 4, 5, 6, "bf16", "bf16", "bf16", groups=2, shapes=shapes)
    assert kernel(backend_of(kunlun))._workspace(problem) == 4 * (24 + 30 + 20)


@pytest.mark.parametrize("what", ["bf16", "scattered", "scattered out"])
def test_copies_are_not_captured(copying: Any, what: str) -> None:
    """Waiting is no work for a graph. Said before anything is written, also by a list whose other groups need none."""
    captures = [False]
    backend = backend_of(copying, capturing=lambda: captures[0])
    dtype = BF16 if what == "bf16" else torch.float16
    a, b, c = (torch.randn(shape).to(dtype) for shape in ((4, 6), (6, 5), (4, 5)))
    out = torch.full((4, 5), 5.0, dtype=dtype)
    dense = a
    if what == "scattered":
        a = torch.stack([a, a], -1)[..., 0]
    elif what == "scattered out":
        out = torch.full((4, 5, 2), 5.0, dtype=dtype)[..., 0]
    other = torch.full((4, 5), 5.0, dtype=dtype)
    product(backend, out, a, b)
    out.fill_(5.0)
    copying.runtime.reset()
    captures[0] = True
    with pytest.raises(omnigemm.DeviceError, match=r"Kunlun xpu_blas: copies are made .* xpu_wait .* cannot capture"):
        product(backend, out, a, b, c, 1.0, 1.0)
    with pytest.raises(omnigemm.DeviceError, match="cannot capture"):
        kernel(backend).groups([other, out], [dense, a], [b, b], [c, c], [1.0, 1.0], [1.0, 1.0])
    assert bool((out == 5.0).all())
    assert bool((other == 5.0).all())
    assert copying.runtime.log() == []


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_what_needs_no_copies_is_captured(by_lt: Any, dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    captures = [True]
    backend = backend_of(by_lt, capturing=lambda: captures[0])
    a, b = torch.randn(*batch, 4, 6).to(dtype), torch.randn(*batch, 6, 5).to(dtype)
    out = torch.full((*batch, 4, 5), 5.0, dtype=dtype)
    with pytest.raises(
        omnigemm.DeviceError, match=r"Kunlun xpu_blas: no handle is ready on cpu.*call the operation once"
    ):
        product(backend, out, a, b)
    assert bool((out == 5.0).all())
    small = torch.ones(1, 1, dtype=dtype)
    captures[0] = False
    product(backend, torch.empty(1, 1, dtype=dtype), small, small)
    captures[0] = True
    assert torch.equal(product(backend, out, a, b), exact(a, b).to(dtype))
    assert by_lt.runtime.log() == []


@pytest.mark.parametrize("status", [13, 7])
@pytest.mark.parametrize("wait", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=name_of)
def test_copies_are_waited_for_after_an_error(copying: Any, dtype: torch.dtype, wait: int, status: int) -> None:
    """Of which the first is seen."""
    backend = backend_of(copying)
    a, b = torch.randn(4, 6, 2).to(dtype)[..., 0], torch.randn(6, 5).to(dtype)
    copying.blas.fail("cublasGemmEx", status)
    if wait:
        copying.runtime.fail("xpu_wait", wait)
    with pytest.raises(error_of(status), match=rf"cublasGemmEx answers {STATUS_NAMES[status]} \({status}\)"):
        product(backend, torch.empty(4, 5, dtype=dtype), a, b)
    assert copying.runtime.log() == [f"wait {STREAM:#x}" + (f" -> {wait}" if wait else "")]


@pytest.mark.parametrize("status", [1, 7, 13, 15, 700])
def test_the_runtimes_codes_are_its_own(copying: Any, status: int) -> None:
    backend = backend_of(copying)
    a, b = bf16s((2, 2), (2, 2))
    copying.runtime.fail("xpu_wait", status)
    with pytest.raises(omnigemm.DeviceError, match=rf"^Kunlun xpu_blas: xpu_wait answers {status}$"):
        product(backend, torch.empty(2, 2, dtype=BF16), a, b)
    # So it is for a list in one call, whose table of addresses is given back.
    copying.runtime.fail("xpu_wait", status)
    lists = [[torch.ones(2, 2)] for _ in range(3)]
    with pytest.raises(omnigemm.DeviceError, match=rf"^Kunlun xpu_blas: xpu_wait answers {status}$"):
        kernel(backend).groups(*lists, None, [1.0], [0.0])
    assert [line.split()[0] for line in products(copying.blas.log())] == ["gemm_single", "gemm_grouped"]


# -------------------------------------------------------------------------------------------- errors, threads, pieces


@pytest.mark.parametrize("status", STATUS_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=name_of)
@pytest.mark.parametrize("function", ["cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx"])
def test_every_status_is_an_error_of_ours(copying: Any, function: str, dtype: torch.dtype, status: int) -> None:
    backend = backend_of(copying)
    copying.blas.fail(function, status)
    a, out = torch.ones(2, 2, dtype=dtype), torch.full((2, 2), 5.0, dtype=dtype)
    with pytest.raises(
        error_of(status), match=rf"Kunlun xpu_blas: {function} answers {STATUS_NAMES[status]} \({status}\)"
    ):
        product(backend, out, a, a)
    assert bool((out == 5.0).all())
    assert bool((product(backend, out, a, a) == 2.0).all())
    pool(backend).close()
    assert copying.blas.live_handles() == 0


def test_threads(kunlun: Any) -> None:
    local = threading.local()
    backend = backend_of(kunlun, stream=lambda: local.stream)
    kunlun.blas.set_delay(200)
    cases = []
    for dtype in FLOATS:
        a, b = torch.randn(3, 8, 40).to(dtype), torch.randn(3, 40, 8).to(dtype)
        cases.append((a, b, exact(a, b).to(dtype)))
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            local.stream = 1 + (number + turn) % 4
            a, b, want = cases[(number + turn) % 3]
            out = torch.empty_like(want)
            if not torch.allclose(product(backend, out, a, b).float(), want.float(), rtol=0.02, atol=1e-4):
                wrong.append(number)

    in_threads(12, work)
    assert not wrong
    assert kunlun.blas.overlaps() == 0
    assert not [line for line in (*kunlun.blas.log(), *kunlun.runtime.log()) if "->" in line]


@pytest.mark.parametrize("option", ["WITHOUT_GEMM", "ONLY_BATCHES", "WITHOUT_WORKSPACE"])
def test_a_library_that_lacks_a_function(
    build_kunlun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    made = build_kunlun(False, option)
    monkeypatch.setenv("KUNLUN_HOME", str(made.home))
    backend = BlasBackend(KUNLUN, caller=caller())
    if option == "WITHOUT_GEMM":
        assert not backend.available()
        assert f"{made.path} lacks the function cublasGemmStridedBatchedEx" in backend.available().reason
        return
    twos(backend)
    a, b = bf16s((4, 6), (6, 5))
    assert torch.equal(product(backend, torch.empty(4, 5, dtype=BF16), a, b), exact(a, b).bfloat16())


@pytest.mark.parametrize("there", ["nothing", "a runtime without the function", "a file that is none"])
def test_a_runtime_that_is_not_there(standin: Any, tmp_path: Path, monkeypatch: Any, there: str) -> None:
    """Under a name that the loader does not find in this process already."""
    record = dataclasses.replace(KUNLUN, runtime=("libxpurt_of_this_test.so",))
    folder, runtime = tmp_path / "lib", tmp_path / "xre" / "so"
    for one in (folder, runtime):
        one.mkdir(parents=True)
    shutil.copy(standin.path, folder / "libxpu_blas.so")
    if there == "a runtime without the function":
        shutil.copy(standin.path, runtime / record.runtime[0])
    elif there == "a file that is none":
        (runtime / record.runtime[0]).write_text("no library")
    monkeypatch.setenv("KUNLUN_HOME", str(tmp_path))
    answer = BlasBackend(record).available()
    assert not answer
    assert "Kunlun xpu_blas: xpu_wait is not found" in answer.reason
    assert (f"{runtime / record.runtime[0]}: " in answer.reason) == (there != "nothing")
    assert f"{record.runtime[0]}: " in answer.reason  # the loader was asked too
    # A library that is not there either is the first thing to say.
    assert "absent.so cannot be loaded" in BlasBackend(record, str(tmp_path / "absent.so")).available().reason


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUNLUN_HOME", raising=False)
    answer = BlasBackend(KUNLUN).available()
    assert not answer
    assert "$KUNLUN_HOME does not hold libxpu_blas.so" in answer.reason
