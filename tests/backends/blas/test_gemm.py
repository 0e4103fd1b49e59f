"""`gemm` of the blas backend against a library with the same ABI that computes on host memory (standin.c)."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import omnigemm
from backends.blas.cases import CPU, NVIDIA, exact, kernel, laid_out, opened, product, products, twos, word
from omnigemm.backends.blas import estimate
from omnigemm.backends.blas.caller import Caller, _tf32, allows
from omnigemm.backends.blas.matrices import Matrices
from omnigemm.core.problem import describe
from omnigemm.ops._run import calls
from op_support import forget_calls


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


def test_a_row_that_repeats_is_copied(standin: Any) -> None:
    a, b = torch.randn(1, 6).expand(4, 6), torch.randn(6, 5)
    assert torch.equal(product(opened(standin), torch.empty(4, 5), a, b), exact(a, b).float())
    assert Matrices.of(a) is None


def test_a_step_that_is_no_c_int_is_copied() -> None:
    empty = torch.empty(0, device="meta")
    for size, rowwise in ((2**31 - 1, True), (2**31, None)):
        for strides, wanted in (((size, 1), rowwise), ((1, size), rowwise and False)):
            form = Matrices.of(empty.as_strided((2, 3), strides))
            assert (None if form is None else form.rowwise) == wanted


def test_strides_of_a_single_row_or_column_mean_nothing() -> None:
    x = torch.empty(12)
    assert Matrices.of(x.as_strided((1, 6), (0, 1))) == (True, 6, 0)
    assert Matrices.of(x.as_strided((6, 1), (1, 0))) == (True, 1, 0)
    assert Matrices.of(x.as_strided((1, 6), (0, 2))) == (False, 2, 0)
    assert Matrices.of(x.as_strided((1, 3, 4), (0, 4, 1))) == (True, 4, 0)


# ------------------------------------------------------------------------------------------- as torch has it


@pytest.fixture
def _switches() -> Iterator[None]:
    """Whatever a test sets, others find as before."""
    matmul = torch.backends.cuda.matmul
    before = [torch._C._get_fp32_precision_getter("cuda", "matmul")]
    yield
    torch.set_float32_matmul_precision("highest")
    matmul.allow_tf32 = False
    matmul.fp32_precision = before[0]
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = True


def set_old(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed


def set_new(allowed: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"


def set_words(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize("switch", [set_old, set_new, set_words])
def test_tf32_is_as_torch_has_it(standin: Any, switch: Any) -> None:
    for allowed in (True, False, True):
        standin.reset()
        backend = opened(standin)
        switch(allowed)
        twos(backend)
        (line,) = products(standin.log())
        assert word(line, "compute") == ("77" if allowed else "68")
        assert word(line, "mode") == "0"


@pytest.mark.usefixtures("_switches")
def test_a_bound_launch_sees_switches_change(standin: Any) -> None:
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.empty(2, 2)
    launch = kernel(opened(standin)).product.bind(out, a, b, None, 1.0, 0.0)
    for allowed in (False, True):
        set_old(allowed)
        launch(out, a, b, None, 1.0, 0.0)
    assert [word(line, "compute") for line in products(standin.log())] == ["68", "77"]


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_reductions_are_as_exact_as_torch_wants_them(standin: Any, dtype: torch.dtype, name: str) -> None:
    backend = opened(standin)
    a = torch.ones(2, 2, dtype=dtype)
    for allowed in (True, False, False, True):
        setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", allowed)
        product(backend, torch.empty_like(a), a, a)
    log = standin.log()
    assert [word(line, "mode") for line in products(log)] == ["0", "16", "16", "0"]
    assert [word(line, "compute") for line in products(log)] == ["68"] * 4
    assert len([line for line in log if line.startswith("set_math_mode")]) == 2  # only where it changes


# ------------------------------------------------------------------------------------------------ how it is called


def test_one_product_and_many(standin: Any, standin_of_batches: Any) -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    for library, names in ((standin, ["gemm_single", "gemm_single", "gemm"]), (standin_of_batches, ["gemm"] * 3)):
        backend = opened(library)
        product(backend, torch.empty(4, 5), a, b)
        product(backend, torch.empty(1, 4, 5), a, b[None])
        many = product(backend, torch.empty(3, 4, 5), a.expand(3, 4, 6), b)
        assert torch.equal(many[1], exact(a, b).float())
        lines = products(library.log())
        assert [line.split()[0] for line in lines] == names
        assert [word(lines[2], name) for name in ("sa", "sb", "sc", "batch")] == ["0", "0", "20", "3"]
        assert word(lines[0], "workspace") != "0x0"


def test_a_launch_for_another_device_goes_there(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    where = [1]

    class Device:
        def __init__(self, index: int) -> None:
            entered.append(index)

        def __enter__(self) -> None:
            where[0] = 0

        def __exit__(self, *_: object) -> None:
            where[0] = 1

    monkeypatch.setattr(torch.cuda, "device", Device)
    by = Caller(lambda: where[0], lambda index: 0x50 + index, lambda: False)
    twos(opened(standin, NVIDIA, by))
    assert entered == [0]
    assert word(products(standin.log())[0], "stream") == "0x50"


# ----------------------------------------------------------------------------------------------- as users call it


@pytest.fixture
def _registered(standin: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    backend = opened(standin)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()
    yield
    forget_calls()


@pytest.mark.usefixtures("_registered")
def test_through_the_operation(standin: Any) -> None:
    a, b, c = torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)
    for _ in range(2):  # cold and warm
        assert torch.equal(omnigemm.gemm(a, b, backend="blas"), exact(a, b).float())
        for alpha, beta in ((2.0, 3.0), (-1.0, 1.0), (0.5, -0.25)):
            want = exact(a, b, c, alpha, beta).float()
            torch.testing.assert_close(omnigemm.gemm(a, b, c, alpha=alpha, beta=beta), want)
            out = c.clone()
            assert omnigemm.gemm(a, b, out, alpha=alpha, beta=beta, out=out) is out
            torch.testing.assert_close(out, want)
    assert standin.live_handles() == 2  # one for the stream, and one for captures
    plan = omnigemm.plan("gemm", m=4, n=5, k=6, dtype="fp32")
    assert (plan.backend, plan.kernel, plan.workspace_bytes) == ("blas", "nvidia", 0)
    assert torch.equal(plan.run(a, b), exact(a, b).float())


@pytest.mark.usefixtures("_registered")
def test_numbers_share_a_plan_unless_they_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)
    torch.ops.omnigemm.gemm(a, b, c, 0.25, 3.0, None, None)  # as torch.compile calls it
    assert len(calls) == 1
    for alpha, beta in ((0.25, 3.0), (0.5, 2.0), (-7.0, float("inf")), (2, 3)):
        for _ in range(2):
            want = exact(a, b, c, alpha, beta).float()
            torch.testing.assert_close(omnigemm.gemm(a, b, c, alpha=alpha, beta=beta), want)
    assert len(calls) == 1
    for alpha, beta in ((1.0, 2.0), (0.5, 0.0), (0.0, 2.0), (0.5, 1.0)):  # these choose, so they are plans of their own
        omnigemm.gemm(a, b, c, alpha=alpha, beta=beta)
    assert len(calls) == 5

    def refuse(*_: object) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(calls, "get", refuse)
    omnigemm.gemm(a, b, c, alpha=0.5, beta=1.0)  # the very call again is not even looked up
    omnigemm.gemm(a, b, c, alpha=0.5, beta=1)


@pytest.mark.usefixtures("_registered")
def test_c_may_be_out_without_a_closer_look_and_other_operands_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    room = torch.randn(4, 4, 4)
    a, b, out, _ = room
    looked: list[str] = []
    module = sys.modules["omnigemm.ops.gemm"]  # by name, the package has the function
    real = module.need_distinct

    def need_distinct(op: str, *rest: Any, **words: Any) -> None:
        looked.append(op)
        real(op, *rest, **words)

    monkeypatch.setattr(module, "need_distinct", need_distinct)
    for _ in range(2):  # cold and warm
        want = exact(a, b, out, 2.0, 0.5).float()
        torch.testing.assert_close(omnigemm.gemm(a, b, out, alpha=2.0, beta=0.5, out=out), want)
    assert not looked
    for _ in range(2):
        with pytest.raises(omnigemm.LayoutError, match="shares memory with a"):
            omnigemm.gemm(a, b, a, alpha=2.0, beta=0.5, out=a)
        shifted = room.flatten()[33:49].view(4, 4)
        with pytest.raises(omnigemm.LayoutError, match="shares memory with c"):
            omnigemm.gemm(a, b, out, alpha=2.0, beta=0.5, out=shifted)
    assert looked


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("a_layout", "b_layout"), itertools.product(["row", "col", "strided"], repeat=2))
def test_a_plan_says_what_copies_take(standin: Any, batch: int, a_layout: str, b_layout: str) -> None:
    words = {"m": 4, "n": 5, "k": 6, "batch": batch, "a_layout": a_layout, "b_layout": b_layout}
    for dtype, size in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
        plan = kernel(opened(standin)).plan(describe("gemm", dtype=dtype, **words), CPU)
        copied = 24 * (a_layout == "strided") + 30 * (b_layout == "strided")
        assert plan.workspace_bytes == size * batch * copied


@pytest.mark.usefixtures("_switches")
def test_before_torch_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_get_fp32_precision_getter", raising=False)
        answer = _tf32()
    for allowed in (True, False):
        set_old(allowed)
        assert answer() is allowed
        assert allows(answer()) == allowed


def test_the_doubt_is_the_librarys(standin: Any) -> None:
    """Our own kernels must be ahead by more than two runs differ."""
    problem = describe("gemm", m=16, n=576, k=7168)
    assert kernel(opened(standin)).cost(problem, CPU) == pytest.approx(0.97 * estimate.seconds(problem))


def test_what_is_refused(standin: Any) -> None:
    backend = opened(standin)
    assert backend.supports(describe("gemm", m=1, n=1, k=1), CPU)
    for problem, reason in (
        (describe("int8_gemm", m=1, n=1, k=1), "not int8_gemm"),
        (describe("grouped_gemm_masked", m=1, n=1, k=1, dtype="e4m3"), "not e4m3 x e4m3"),
        (describe("grouped_gemm_contiguous", m=1, n=1, k=32, weight_dtype="int4"), "not bf16 x int4"),
        (describe("gemm", m=1, n=1, k=1, dtype="fp32", out_dtype="bf16"), "no bf16 result of fp32"),
        (describe("gemm", m=1, n=1, k=1, batch=2**31), "batch is 2147483648, expected at most 2147483647"),
    ):
        answer = backend.supports(problem, CPU)
        assert not answer
        assert reason in answer.reason
    assert "computes on cpu tensors" in backend.supports(describe("gemm", m=1, n=1, k=1), torch.device("meta")).reason


def test_a_gpu_that_is_not_there(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(standin, dataclasses.replace(NVIDIA, device_type="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    problem = describe("gemm", m=1, n=1, k=1)
    assert backend.supports(problem, torch.device("cuda:1"))
    assert "there is no cuda:2: torch finds 2 GPUs" in backend.supports(problem, torch.device("cuda:2")).reason


@pytest.mark.usefixtures("_registered")
def test_a_warm_call_refuses_what_a_cold_one_does(standin: Any) -> None:
    room, b = torch.randn(8, 6), torch.randn(6, 6)
    a, out = room[:4], room[4:]
    for _ in range(2):
        omnigemm.gemm(a, b, out=out)
    before = room.clone()
    with pytest.raises(omnigemm.LayoutError, match="shares memory with a"):
        omnigemm.gemm(a, b, out=room[2:6])
    assert torch.equal(room, before)
    standin.fail("cublasGemmEx", 13)
    with pytest.raises(omnigemm.DeviceError, match=r"NVIDIA cuBLAS: cublasGemmEx answers EXECUTION_FAILED \(13\)"):
        omnigemm.gemm(a, b, out=out)
    omnigemm.gemm(a, b, out=out)
    assert torch.equal(out, exact(a, b).float())


def test_addresses_on_another_device_are_left_to_tensors(standin: Any) -> None:
    where = [1]
    backend = opened(standin, NVIDIA, Caller(lambda: where[0], lambda index: 0x50, lambda: False))
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.full((2, 2), 5.0)
    at = kernel(backend).product.bind_addresses(out, a, b, None, 1.0, 0.0)
    assert at is not None
    addresses = [one.data_ptr() for one in (out, a, b)]
    assert not at(1.0, 0.0, *addresses)
    assert standin.log() == []
    where[0] = 0
    assert at(1.0, 0.0, *addresses)
    assert bool((out == 2.0).all())


def test_what_the_library_cannot_do_in_place_has_no_launch_by_addresses(standin: Any) -> None:
    bind = kernel(opened(standin)).product.bind_addresses
    a, b, out = torch.ones(4, 6), torch.ones(6, 5), torch.ones(4, 5)
    for wrong in (
        (laid_out(out, "scattered"), a, b),
        (out, laid_out(a, "scattered"), b),
        (out, a, laid_out(b, "scattered")),
        (out, a[:, :0], b[:0]),
        (out[:0], a[:0], b),
    ):
        assert bind(*wrong, None, 1.0, 0.0) is None
    record = dataclasses.replace(NVIDIA, types=("fp32", "fp16"))
    bind = kernel(opened(standin, record)).product.bind_addresses
    assert bind(out.bfloat16(), a.bfloat16(), b.bfloat16(), None, 1.0, 0.0) is None
