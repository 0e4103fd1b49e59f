"""`gemm` of the blas backend through cuBLASLt, against a library with the same ABI on host memory (standin_lt.c)."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from backends.blas.cases import (
    CPU,
    FLOATS,
    NVIDIA,
    STATUS_NAMES,
    STREAM,
    caller,
    error_of,
    exact,
    in_threads,
    kernel,
    opened,
    product,
    products,
    twos,
    word,
)
from omnigemm.backends.blas import lt
from omnigemm.backends.blas.caller import Caller
from omnigemm.backends.blas.choices import key_of
from omnigemm.backends.blas.workspaces import Workspaces
from omnigemm.core.dtypes import name_of


def lines(pair: Any, kind: str) -> list[str]:
    return [line for line in pair.lt.log() if line.split()[0] == kind]


def errors(pair: Any) -> list[str]:
    return [line for line in pair.lt.log() if "->" in line]


def at_address(x: Tensor, alignment: int) -> Tensor:
    """The same values at an address that is a multiple of this power of two, and of none above it below 512."""
    room = torch.zeros(x.numel() + 512, dtype=x.dtype)
    start = next(
        i
        for i in range(512)
        if (room.data_ptr() + i * x.element_size()) % (2 * alignment) == alignment % (2 * alignment)
    )
    made = room[start : start + x.numel()].view(x.shape)
    return made.copy_(x)


def test_transposed_views_are_not_copied(pair: Any) -> None:
    backend = opened(pair)
    a, b = torch.randn(6, 4).t(), torch.randn(5, 6).t()
    product(backend, torch.empty(4, 5), a, b)
    product(backend, torch.empty(5, 4).t(), a, b)
    product(backend, torch.empty(4, 5), a.contiguous(), b.contiguous())
    first, second, third = lines(pair, "matmul")
    assert "ta=1 tb=1 m=5 n=4 k=6 lda=6 ldb=4 ldc=5 ldd=5" in first  # D^T = B^T A^T
    assert "ta=0 tb=0 m=4 n=5 k=6 lda=4 ldb=6 ldc=4 ldd=4" in second  # D as it is
    assert "ta=0 tb=0 m=5 n=4 k=6 lda=5 ldb=6 ldc=5 ldd=5" in third
    assert word(first, "stream") == hex(STREAM)


@pytest.mark.parametrize("a_shape", [(4, 6), (1, 4, 6), (3, 4, 6)])
@pytest.mark.parametrize("b_shape", [(6, 5), (1, 6, 5), (3, 6, 5)])
def test_steps_of_batches(pair: Any, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    backend = opened(pair)
    a, b = torch.randn(a_shape), torch.randn(b_shape)
    want = exact(a, b).float()
    assert torch.equal(product(backend, torch.full_like(want, float("nan")), a, b), want)
    batch = want.size(0) if want.dim() == 3 else 1
    (line,) = lines(pair, "matmul")
    steps = [20 if batch > 1 else 0, *(x.stride(0) if x.dim() == 3 and x.size(0) > 1 else 0 for x in (b, a))]
    assert [word(line, name) for name in ("batch", "sd", "sa", "sb")] == [str(one) for one in (batch, *steps)]


# ---------------------------------------------------------------------------------------------------------- C and D


def test_a_c_that_is_not_out_is_read_in_its_place(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(pair)
    a, b = torch.randn(3, 4, 6), torch.randn(3, 6, 5)

    def refuse(*_: object) -> None:
        raise AssertionError("a copy")

    monkeypatch.setattr("omnigemm.backends.blas.gemm._copy", refuse)
    frame = torch.randn(3, 4, 9)
    for c in (torch.randn(3, 4, 5), frame[..., 2:7], torch.randn(4, 5), torch.randn(1, 4, 5)):
        before = c.clone()
        got = product(backend, torch.full((3, 4, 5), float("nan")), a, b, c, 2.0, 0.5)
        torch.testing.assert_close(got, exact(a, b, c, 2.0, 0.5).float())
        assert torch.equal(c, before)
    found = lines(pair, "matmul")
    assert [word(line, "apart") for line in found] == ["1"] * 4
    assert [word(line, "ldc") for line in found] == ["5", "9", "5", "5"]
    assert [word(line, "sc") for line in found] == ["20", "36", "0", "0"]


@pytest.mark.parametrize("c", [torch.randn(4, 1), torch.randn(5), torch.randn(5, 4).t(), torch.randn(4, 10)[:, ::2]])
def test_another_c_is_copied_first(pair: Any, c: Tensor) -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    got = product(opened(pair), torch.full((4, 5), float("nan")), a, b, c, 2.0, 0.5)
    torch.testing.assert_close(got, exact(a, b, c.expand(4, 5), 2.0, 0.5).float())
    assert [word(line, "apart") for line in lines(pair, "matmul")] == ["0"]


# --------------------------------------------------------------------------------------------------------- switches


@pytest.fixture
def _switches() -> Iterator[None]:
    yield
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = True


@pytest.mark.usefixtures("_switches")
def test_a_bound_launch_sees_tf32_change_and_remembers_both(pair: Any) -> None:
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.empty(2, 2)
    launch = kernel(opened(pair)).product.bind(out, a, b, None, 1.0, 0.0)
    for allowed in (False, True, False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        launch(out, a, b, None, 1.0, 0.0)
    assert [word(line, "compute") for line in lines(pair, "matmul")] == ["68", "77", "68", "77"]
    assert [word(line, "compute") for line in lines(pair, "choose")] == ["68", "77"]


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_reductions_are_as_exact_as_torch_wants_them(pair: Any, dtype: torch.dtype, name: str) -> None:
    backend = opened(pair)
    a, out = torch.ones(2, 2, dtype=dtype), torch.empty(2, 2, dtype=dtype)
    for allowed in (True, False, False, True):
        setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", allowed)
        product(backend, out, a, a)
    assert [word(line, "reductions") for line in lines(pair, "matmul")] == ["7", "2", "2", "7"]
    assert [word(line, "compute") for line in lines(pair, "matmul")] == ["68"] * 4
    assert [word(line, "reductions") for line in lines(pair, "choose")] == ["7", "2"]


# ----------------------------------------------------------------------------------------------- what is chosen when


def test_a_key_for_every_alignment() -> None:
    assert key_of(1, 0x100, 0x200, 0x300, 0x10000) == 1
    assert key_of(0, 0x101, 0x202, 0x340, 0x1000) == (0, 1, 2, 64, 256)
    assert key_of(2, 0x180, 0x110, 0x108, 0x104) == (2, 128, 16, 8, 4)


def test_an_algorithm_never_meets_worse_alignments(pair: Any) -> None:
    backend = opened(pair)
    a, b, out, c = torch.randn(4, 8), torch.randn(8, 8), torch.empty(4, 8), torch.randn(4, 8)
    launch = kernel(backend).product.bind(out, a, b, c, 1.0, 2.0)
    alignments = [256, 16, 4, 256, 64, 16]
    for one in alignments:
        for which in range(4):
            there = [at_address(x, one if i == which else 256) for i, x in enumerate((out, a, b, c))]
            launch(*there, 1.0, 2.0)
            torch.testing.assert_close(there[0], exact(a, b, c, 1.0, 2.0).float())
    chosen = [word(line, "align") for line in lines(pair, "choose")]
    assert len(chosen) == len(set(chosen)) == 1 + 3 * 4
    # B comes first where D is row by row.
    assert {"256,256,256,256", "16,256,256,256", "256,4,256,256", "256,256,64,256", "256,256,256,16"} <= set(chosen)
    assert len(lines(pair, "matmul")) == 24


def test_a_product_is_chosen_once(pair: Any) -> None:
    backend = opened(pair)
    a, b = at_address(torch.randn(4, 40), 256), at_address(torch.randn(40, 8), 256)
    for _ in range(3):  # bound anew each time
        out = at_address(torch.empty(4, 8), 256)
        assert torch.allclose(product(backend, out, a, b), exact(a, b).float(), atol=1e-5)
    assert len(lines(pair, "choose")) == 1
    assert len([line for line in pair.lt.log() if line.startswith("cublasLtMatrixLayoutCreate")]) == 4
    assert len(lines(pair, "create")) == 1
    (line,) = lines(pair, "choose")
    assert word(line, "most") == "4096"
    assert {word(line, "bytes") for line in lines(pair, "matmul")} == {"4096"}


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize(
    ("dtype", "tf32", "sizes", "waves", "found", "needs_one"),
    [
        (torch.float32, False, (16, 512, 512), 1.0, "2", False),
        (torch.float32, False, (16, 512, 512), 0.1, "2", False),
        (torch.float32, False, (16, 512, 512), 1.5, "2", True),  # the first keeps more of the chip busy
        (torch.float32, False, (16, 512, 513), 0.1, "1", True),  # elsewhere the library's first is taken
        (torch.float32, False, (16, 513, 512), 0.1, "1", True),
        (torch.float32, True, (16, 512, 512), 0.1, "1", True),
        (torch.bfloat16, False, (4, 8, 40), 0.1, "1", True),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_small_fp32_products_take_one_kernel_where_that_does_as_well(
    pair: Any,
    dtype: torch.dtype,
    tf32: bool,
    sizes: tuple[int, int, int],
    waves: float,
    found: str,
    needs_one: bool,
    turned: bool,
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    pair.propose(waves)
    m, n, k = sizes
    a, out = torch.ones(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
    b = torch.ones(n, k, dtype=dtype).t() if turned else torch.ones(k, n, dtype=dtype)
    assert (product(opened(pair), out, a, b) == k).all()
    assert [word(line, "found") for line in lines(pair, "choose")] == [found]
    assert [word(line, "workspace") != "0x0" for line in lines(pair, "matmul")] == [needs_one]


def test_products_that_are_long_gone_are_forgotten(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnigemm.backends.blas.lt._KEPT", 4)
    backend = opened(pair)
    for k in range(1, 21):
        a, b = torch.randn(2, k), torch.randn(k, 2)
        torch.testing.assert_close(product(backend, torch.empty(2, 2), a, b), exact(a, b).float())
    gc.collect()
    assert pair.live_objects() <= 4 * 5  # four layouts and an operation each
    lt = kernel(backend).product.lt
    assert lt is not None
    assert len(lt._choices) == 4


# ------------------------------------------------------------------------------------------- what it has no way for


@pytest.mark.parametrize("way", ["nothing found", "a result that is none", "not supported", "invalid"])
def test_what_it_finds_nothing_for_goes_the_other_way(pair: Any, way: str) -> None:
    backend = opened(pair)
    if way == "nothing found":
        pair.find(0)
    elif way == "a result that is none":
        pair.find(1, 15)
    else:
        pair.lt.fail("cublasLtMatmulAlgoGetHeuristic", 15 if way == "not supported" else 7, times=100)
    a, b, c = torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)
    launch = kernel(backend).product.bind(torch.empty(4, 5), a, b, c, 2.0, 0.5)
    for _ in range(2):
        out = torch.full((4, 5), float("nan"))
        launch(out, a, b, c, 2.0, 0.5)
        torch.testing.assert_close(out, exact(a, b, c, 2.0, 0.5).float())
        twos(backend)
    names = [line.split()[0] for line in pair.blas.log() if line.startswith("gemm")]
    assert names == ["gemm_single"] * 4
    assert not lines(pair, "matmul")


def reasons(backend: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What `doctor` and what `explain` say."""
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    found = omnigemm.explain("gemm", m=1, n=1, k=1, device="cpu")
    return backend.available().reason, str(found)


def test_explain_says_which_library_runs(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in reasons(opened(pair), monkeypatch):
        assert f"by cuBLASLt 130100 ({pair.lt.path}) where it has an algorithm" in text


def test_without_the_library(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(standin)
    for text in reasons(backend, monkeypatch):
        assert f"without cuBLASLt: there is none beside {standin.path}" in text
    twos(backend)
    assert kernel(backend).product.lt is None


@pytest.mark.parametrize("option", ["WITHOUT_HEURISTIC", "WITHOUT_VERSION"])
def test_without_a_function(build_pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    pair = build_pair(option)
    backend = opened(pair)
    twos(backend)
    for text in reasons(backend, monkeypatch):
        if option == "WITHOUT_HEURISTIC":
            assert f"{pair.lt.path} lacks the function cublasLtMatmulAlgoGetHeuristic" in text
        else:
            assert f"by cuBLASLt ({pair.lt.path})" in text
    assert bool(lines(pair, "matmul")) == (option == "WITHOUT_VERSION")
    assert bool(products(pair.blas.log())) == (option == "WITHOUT_HEURISTIC")


# ------------------------------------------------------------------------------------------------------------ errors

CREATED = [f"cublasLt{name}Create" for name in ("", "MatmulDesc", "MatrixLayout", "MatmulPreference")]
SET = [f"cublasLt{name}SetAttribute" for name in ("MatmulDesc", "MatrixLayout", "MatmulPreference")]


FAILING = [*CREATED, *SET, "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"]
# With two of them the heuristic only says that it has none, and the first library is asked.
FAILURES = [
    (function, status)
    for function, status in itertools.product(FAILING, STATUS_NAMES)
    if function != "cublasLtMatmulAlgoGetHeuristic" or status not in (7, 15)
]


@pytest.mark.parametrize(("function", "status"), FAILURES)
def test_every_status_is_an_error_of_ours(pair: Any, function: str, status: int) -> None:
    backend, shape = opened(pair), (3, 2, 2)
    pair.lt.fail(function, status)
    out, name = torch.full(shape, 5.0), STATUS_NAMES[status]
    with pytest.raises(error_of(status), match=rf"NVIDIA cuBLAS: {function} answers {name} \({status}\)"):
        product(backend, out, torch.ones(shape), torch.ones(shape))
    assert bool((out == 5.0).all())
    assert torch.equal(product(backend, out, torch.ones(shape), torch.ones(shape)), torch.full(shape, 2.0))
    assert not products(pair.blas.log())


def test_an_error_after_c_was_copied_gives_the_room_back(pair: Any) -> None:
    backend = opened(pair)
    a, b, c = torch.randn(4, 40), torch.randn(40, 5), torch.randn(5)
    for _ in range(3):
        pair.lt.fail("cublasLtMatmul", 13)
        with pytest.raises(omnigemm.DeviceError, match="EXECUTION_FAILED"):
            product(backend, torch.empty(4, 5), a, b, c, 1.0, 1.0)
    lt = kernel(backend).product.lt
    assert lt is not None
    assert [len(free) for free in lt.device(CPU).rooms._free.values()] == [1]


# ------------------------------------------------------------------------------------------------ workspaces, captures


def test_a_workspace_is_kept_for_its_stream(pair: Any) -> None:
    streams = iter([1, 2, 1, 2, 1])
    backend = opened(pair, by=caller(lambda: next(streams)))
    a, b = torch.ones(2, 32), torch.ones(32, 2)
    for _ in range(5):
        product(backend, torch.empty(2, 2), a, b)
    found = lines(pair, "matmul")
    assert [word(line, "stream") for line in found] == [hex(one) for one in (1, 2, 1, 2, 1)]
    assert len({word(line, "workspace") for line in found}) == 2
    assert len({line.split()[1] for line in found}) == 1  # one handle


def test_what_is_kept_is_made_where_no_pool_gets_it(pair: Any) -> None:
    """But what a captured product works in is the graph's."""
    captures, made = [False], []
    by = dataclasses.replace(
        caller(capturing=lambda: captures[0]), apart=lambda make: made.append(memory := make()) or memory
    )
    backend = opened(pair, by=by)
    out, a, b = torch.empty(2, 2), torch.ones(2, 32), torch.ones(32, 2)  # a capture needs addresses aligned as before
    for captures[0] in (False, False, True):
        product(backend, out, a, b)
    (kept,) = made
    assert kept is not None
    places = [word(line, "workspace") for line in lines(pair, "matmul")]
    assert [one == hex(kept.data_ptr()) for one in places] == [True, True, False]


def test_a_product_that_needs_no_workspace_has_none(pair: Any) -> None:
    twos(opened(pair))
    (line,) = lines(pair, "matmul")
    assert (word(line, "workspace"), word(line, "bytes")) == ("0x0", "0")


@pytest.mark.parametrize("streams", [1, 4])
def test_threads_never_share_a_workspace(pair: Any, streams: int) -> None:
    local = threading.local()
    backend = opened(pair, by=caller(lambda: local.stream))
    pair.lt.set_delay(300)
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    want = exact(a, b).float()
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            local.stream = 1 + (number + turn) % streams
            if not torch.allclose(product(backend, torch.empty(8, 8), a, b), want, atol=1e-4):
                wrong.append(number)

    kernel(backend)
    in_threads(16, work)
    assert not wrong
    assert pair.lt.overlaps() == 0
    assert len(lines(pair, "create")) == 1
    assert not errors(pair)


def test_a_capture_shares_no_workspace(pair: Any) -> None:
    captures = [False]
    backend = opened(pair, by=caller(capturing=lambda: captures[0]))
    a, b, out = torch.ones(2, 32), torch.ones(32, 2), torch.empty(2, 2)
    for captures[0] in (False, True, True, False):
        product(backend, out, a, b)
    found = lines(pair, "matmul")
    assert [word(line, "bytes") for line in found] == ["4096", "1024", "1024", "4096"]
    assert word(found[0], "workspace") == word(found[3], "workspace")
    assert word(found[0], "workspace") not in {word(line, "workspace") for line in found[1:3]}
    lt = kernel(backend).product.lt
    assert lt is not None
    assert [len(free) for free in lt.device(CPU).rooms._free.values()] == [1]  # the graph's memory is not held on to


def test_nothing_is_chosen_in_a_capture(pair: Any) -> None:
    """What was not chosen before goes through cuBLAS, with the handle that was made for captures."""
    captures = [False]
    backend = opened(pair, by=caller(capturing=lambda: captures[0]))
    twos(backend)
    a, b, out = (at_address(x, 256) for x in (torch.randn(2, 32), torch.randn(32, 3), torch.empty(2, 3)))
    c = at_address(torch.randn(2, 3), 64)  # so that adding it is a choice of its own
    for captures[0], rest in itertools.product((True, False, True), ((None, 1.0, 0.0), (c, 2.0, 0.5))):
        torch.testing.assert_close(product(backend, out, a, b, *rest), exact(a, b, *rest).float())
    assert [line.split()[:2] for line in products(pair.blas.log())] == [["gemm_single", "h1"]] * 2
    assert len(lines(pair, "choose")) == 3
    assert len(lines(pair, "matmul")) == 5


def test_a_capture_before_any_call_is_refused(pair: Any) -> None:
    captures = [True]
    backend = opened(pair, by=caller(capturing=lambda: captures[0]))
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.full((2, 2), 5.0)
    launch = kernel(backend).product.bind(out, a, b, None, 1.0, 0.0)
    with pytest.raises(omnigemm.DeviceError, match=r"no handle is ready on cpu.*call the operation once before"):
        launch(out, a, b, None, 1.0, 0.0)
    assert bool((out == 5.0).all())
    for captures[0] in (False, True):
        launch(out.zero_(), a, b, None, 1.0, 0.0)
        assert bool((out == 2.0).all())
    assert len(lines(pair, "matmul")) == 2


def test_no_memory_for_a_workspace(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(pair)
    out = torch.full((2, 2), 5.0)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("for the test")

    with monkeypatch.context() as patch:
        patch.setattr("omnigemm.backends.blas.workspaces.Workspaces._memory", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            product(backend, out, torch.ones(2, 32), torch.ones(32, 2), torch.ones(2), 1.0, 1.0)
    assert bool((out == 5.0).all())  # C was not copied yet


# ------------------------------------------------------------------------------------------- the same addresses again


class Bound:
    """A launch by addresses, its operands, and how often it had to make what it hands over."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch, k: int = 32, dtype: Any = torch.float32) -> None:
        shapes = {"out": (4, 8), "a": (4, k), "b": (k, 8), "c": (4, 8)}
        self.tensors = {name: at_address(torch.randn(shape).to(dtype), 256) for name, shape in shapes.items()}
        self._launch = kernel(backend).product.bind_addresses(*self.tensors.values(), 1.0, 2.0)
        self._made: list[int] = []
        real = lt.number
        monkeypatch.setattr(lt, "number", lambda value: self._made.append(1) or real(value))

    def __call__(self, alpha: float = 1.0, beta: float = 2.0, **others: Tensor) -> bool:
        """Whether all was made anew."""
        tensors = self.tensors | others
        out, a, b, c = tensors.values()
        out.fill_(float("nan"))
        self._made.clear()
        assert self._launch is not None
        assert self._launch(alpha, beta, *(one.data_ptr() for one in tensors.values()))
        torch.testing.assert_close(out, exact(a, b, c, alpha, beta).to(out.dtype))
        return bool(self._made)


@pytest.mark.parametrize("k", [8, 32])  # without and with a workspace
def test_the_same_addresses_again(pair: Any, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    bound = Bound(opened(pair), monkeypatch, k)
    assert [bound() for _ in range(3)] == [True, False, False]
    bound.tensors["a"].mul_(2.0)
    assert not bound()
    first, *others = lines(pair, "matmul")
    assert others == [first] * 3


def test_other_addresses_and_factors(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound(opened(pair), monkeypatch)
    bound()
    for name, one in bound.tensors.items():
        other = at_address(one.neg(), 256)
        assert [bound(**{name: other}), bound(**{name: other})] == [True, False]
        assert not bound()  # what is kept is kept for each set of addresses
    for factors in ((2.0, 2.0), (1.0, 3.0), (1.0, 2.0)):
        assert [bound(*factors), bound(*factors)] == [True, False]


@pytest.mark.parametrize("name", ["out", "a", "b", "c"])
def test_so_many_addresses_are_known(pair: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of each matrix, and when they are too many, of the last ones."""
    monkeypatch.setattr(lt, "_DONE", 4)
    bound = Bound(opened(pair), monkeypatch)
    several = [at_address(torch.randn_like(bound.tensors[name]), 256) for _ in range(5)]
    for one in several[:4]:
        assert bound(**{name: one})
    assert not any(bound(**{name: one}) for one in several[:4])
    assert bound(3.0, **{name: several[3]})  # another factor at the same addresses: the others stay
    assert not any(bound(**{name: one}) for one in several[:3])
    assert [bound(**{name: several[i]}) for i in (4, 4, 0)] == [True, False, True]


def test_the_same_addresses_in_another_stream(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = [1]
    bound = Bound(opened(pair, by=caller(lambda: stream[0])), monkeypatch)
    made = []
    for stream[0] in (1, 1, 2, 2, 1):
        made.append(bound())
    assert made == [True, False, True, False, True]
    found = lines(pair, "matmul")
    assert [word(line, "stream") for line in found] == [hex(one) for one in (1, 1, 2, 2, 1)]
    rooms = [word(line, "workspace") for line in found]
    assert rooms[0] == rooms[1] == rooms[4] != rooms[2] == rooms[3]


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_the_same_addresses_with_other_switches(pair: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    bound, wide = Bound(opened(pair), monkeypatch, dtype=dtype), dtype == torch.float32
    name = "allow_tf32" if wide else f"allow_{name_of(dtype)}_reduced_precision_reduction"
    made = []
    for allowed in (True, True, False, False, True):
        setattr(torch.backends.cuda.matmul, name, allowed)
        made.append(bound())
    assert made == [True, False, True, False, True]
    found = [word(line, "compute" if wide else "reductions") for line in lines(pair, "matmul")]
    assert found == (["77", "77", "68", "68", "77"] if wide else ["7", "7", "2", "2", "7"])


@pytest.mark.parametrize("k", [8, 32])
def test_the_same_addresses_in_a_capture(pair: Any, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Which is of another stream, mostly."""
    captures, stream, memory = [False], [1], []
    real = Workspaces._memory

    def look(self: Workspaces, size: int) -> Tensor:
        made = real(self, size)
        memory.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Workspaces, "_memory", look)
    bound = Bound(opened(pair, by=caller(lambda: stream[0], lambda: captures[0])), monkeypatch, k)
    made = []
    for captures[0], stream[0] in ((False, 1), (True, 1), (True, 2), (True, 2), (False, 1)):
        made.append(bound())
    rooms = [word(line, "workspace") for line in lines(pair, "matmul")]
    if k == 8:
        assert made == [True, False, True, False, True]
        assert set(rooms) == {"0x0"}
    else:
        assert made == [True, True, True, True, False]
        assert rooms[0] == rooms[4]
        assert rooms[0] not in rooms[1:4]
        assert [one() is not None for one in memory] == [True, False, False, False]  # graphs' own is not held on to


def test_a_stream_that_no_graph_captures_is_not_asked_about(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same addresses, where a workspace is needed; all others are."""
    stream, asked = [0], []
    by = caller(lambda: stream[0], lambda: bool(asked.append(stream[0])))
    bound = Bound(opened(pair, by=dataclasses.replace(by, uncaptured=0)), monkeypatch)
    for stream[0] in (0, 1, 0):
        bound()
    asked.clear()
    for stream[0] in (0, 0):
        assert not bound()
    assert not asked
    stream[0] = 1
    assert [bound(), bound()] == [True, False]
    assert asked == [1, 1]


def test_a_copied_c_is_copied_again(pair: Any) -> None:
    """Also at the same addresses."""
    out, a, b, c = torch.empty(4, 8), torch.randn(4, 32), torch.randn(32, 8), torch.randn(8)
    at = kernel(opened(pair)).product.bind_addresses(out, a, b, c, 1.0, 2.0)
    assert at is not None
    addresses = [one.data_ptr() for one in (out, a, b, c)]
    for _ in range(2):
        assert not at(1.0, 2.0, *addresses)
        assert at(1.0, 2.0, *addresses, before=lambda: out.copy_(c.expand_as(out)))
        torch.testing.assert_close(out, exact(a, b, c, 1.0, 2.0).float())
    assert len(lines(pair, "matmul")) == 2


def test_the_same_addresses_while_another_has_the_room(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(pair)
    bound = Bound(backend, monkeypatch)
    bound()
    by_lt = kernel(backend).product.lt
    assert by_lt is not None
    rooms = by_lt.device(CPU).rooms
    taken = rooms.take(STREAM, 1024)
    assert [bound(), bound()] == [True, False]  # with a room of its own from now on
    rooms.give(taken)  # so that this is the next
    assert [bound(), bound()] == [True, False]
    first, *found = [word(line, "workspace") for line in lines(pair, "matmul")]
    assert found[0] == found[1] != first
    assert found[2] == found[3] == first
    assert [len(free) for free in rooms._free.values()] == [2]


def test_an_error_at_the_same_addresses_gives_the_room_back(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(pair)
    bound = Bound(backend, monkeypatch)
    bound()
    for _ in range(3):
        pair.lt.fail("cublasLtMatmul", 13)
        with pytest.raises(omnigemm.DeviceError, match="EXECUTION_FAILED"):
            bound()
    assert not bound()
    by_lt = kernel(backend).product.lt
    assert by_lt is not None
    assert [len(free) for free in by_lt.device(CPU).rooms._free.values()] == [1]


@pytest.mark.parametrize("k", [8, 32])
def test_a_thread_that_did_nothing_with_cuda_before(pair: Any, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """It has no context, without which nothing can be launched, until torch is asked about captures."""
    monkeypatch.setattr(lt, "_thread", threading.local())
    here = threading.local()
    by = caller(capturing=lambda: bool(setattr(here, "asked", True)))
    by = dataclasses.replace(by, uncaptured=STREAM)
    anew, again = Bound(opened(pair, by=by), monkeypatch, k), Bound(opened(pair, by=by), monkeypatch, k)
    again()
    found: list[object] = []

    def work() -> None:
        found.append(anew())
        found.append(hasattr(here, "asked"))

    def fail() -> None:
        """As before, and it is tried once more; then again, for another reason."""
        found.append(hasattr(here, "asked"))
        for _ in range(2):
            pair.lt.fail("cublasLtMatmul", 1)
            try:
                found.append(again())
            except omnigemm.DeviceError as error:
                found.append(str(error))

    for each in (work, fail):
        thread = threading.Thread(target=each)
        thread.start()
        thread.join()
    assert found[:4] == [True, True, False, True]
    assert "cublasLtMatmul answers NOT_INITIALIZED (1)" in str(found[4:])
    assert not again()


@pytest.mark.parametrize("streams", [1, 4])
def test_threads_never_share_a_workspace_of_one_launch(pair: Any, streams: int) -> None:
    """All with the same `out`, where they write the same."""
    local = threading.local()
    backend = opened(pair, by=caller(lambda: local.stream))
    pair.lt.set_delay(100)
    a, b, out = torch.randn(8, 64), torch.randn(64, 8), torch.empty(8, 8)
    local.stream = 1
    at = kernel(backend).product.bind_addresses(out, a, b, None, 1.0, 0.0)
    assert at is not None
    addresses = [one.data_ptr() for one in (out, a, b)]
    failed: list[int] = []

    def work(number: int) -> None:
        local.stream = 1 + number % streams
        for _ in range(40):
            if not at(1.0, 0.0, *addresses):
                failed.append(number)

    in_threads(16, work)
    assert not failed
    torch.testing.assert_close(out, exact(a, b).float())
    assert pair.lt.overlaps() == 0
    assert len(lines(pair, "matmul")) == 16 * 40
    assert not errors(pair)


# -------------------------------------------------------------------------------------------------- as it is called


def test_addresses_on_another_device_are_left_to_tensors(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = [1]
    backend = opened(pair, NVIDIA, Caller(lambda: where[0], lambda index: 0x50 + index, lambda: False))
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.full((2, 2), 5.0)
    at = kernel(backend).product.bind_addresses(out, a, b, None, 1.0, 0.0)
    assert at is not None
    assert not at(1.0, 0.0, *(one.data_ptr() for one in (out, a, b)))
    assert not lines(pair, "create")

    class Device:
        def __init__(self, index: int) -> None:
            where[0] = index

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            where[0] = 1

    monkeypatch.setattr(torch.cuda, "device", Device)
    twos(backend)
    assert where == [1]
    assert word(lines(pair, "matmul")[0], "stream") == "0x50"


def test_groups_in_a_loop(pair: Any) -> None:
    """Results wider than the operands are no matter for the vendor's grouped function."""
    sizes = (3, 0, 2, 3)
    a, b = [torch.randn(m, 6).half() for m in sizes], [torch.randn(6, 5).half() for _ in sizes]
    out = [torch.full((m, 5), float("nan")) for m in sizes]
    kernel(opened(pair)).groups(out, a, b, None, [1.0] * 4, [0.0] * 4)
    for got, x, y in zip(out, a, b, strict=True):
        torch.testing.assert_close(got, exact(x, y).float())
    assert len(lines(pair, "matmul")) == 3


# ------------------------------------------------------------------------------------------------------------ the end


def test_nothing_outlives_the_backend(pair: Any) -> None:
    backend = opened(pair)
    twos(backend)
    assert (pair.lt.live_handles(), pair.live_objects(), pair.blas.live_handles()) == (1, 5, 1)
    del backend
    gc.collect()
    assert (pair.lt.live_handles(), pair.live_objects(), pair.blas.live_handles()) == (0, 0, 0)


def test_all_is_destroyed_at_exit(pair: Any) -> None:
    script = f"""
import atexit, ctypes
lt = ctypes.CDLL({str(pair.lt.path)!r})
atexit.register(lambda: print(lt.standin_live_handles(), lt.standin_lt_live_objects()))  # the last to run
import torch
from backends.blas.cases import opened, twos
from types import SimpleNamespace
backend = opened(SimpleNamespace(path={str(pair.path)!r}))
twos(backend)
print(lt.standin_live_handles(), lt.standin_lt_live_objects())
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd="tests", env=_environment(), check=False
    )
    assert run.stdout.split() == ["1", "5", "0", "0"], run.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
