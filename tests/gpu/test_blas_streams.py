"""The blas backend's handles on a GPU: graphs, streams, threads, and lists of products."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import omnigemm
from omnigemm.backends.blas import BlasBackend, kept
from omnigemm.backends.blas.pool import Pool
from omnigemm.backends.blas.vendors import VENDORS
from omnigemm.backends.blas.workspaces import Workspaces
from omnigemm.core.dispatch import Support
from omnigemm.core.dtypes import name_of
from op_support import forget_calls

from .blas_cases import FLOATS, NAN, close, exact, limit, poisoned, random

DECODE = (16, 576, 7168)  # few rows and a long sum: cuBLAS splits K, and so needs its workspace


@pytest.fixture(autouse=True)
def _by_blas() -> Iterator[None]:
    """Dispatch would take our own kernels for many of these products. Threads do not see this, and must name it."""
    with omnigemm.settings(backend="blas"):
        yield


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlasBackend]:
    """A backend that has made no handle yet."""
    backend = BlasBackend()
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()
    yield backend
    forget_calls()
    torch.cuda.synchronize()


def pool(backend: BlasBackend) -> Pool:
    (found,) = backend.kernels(omnigemm.plan("gemm", m=1, n=1, k=1, device="cuda").problem, torch.device("cuda"))
    made: Pool = found.product.pool(torch.device("cuda:0"))  # type: ignore[attr-defined]
    return made


# --------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_graph_replays_on_new_data(dtype: torch.dtype) -> None:
    m, n, k = DECODE
    a, b, c = random(m, k, dtype=dtype), random(n, k, dtype=dtype).t(), random(m, n, dtype=dtype)
    many = random(4, 40, 96, dtype=dtype), random(4, 96, 56, dtype=dtype)
    out, sums, batch = poisoned(m, n, dtype=dtype), poisoned(m, n, dtype=dtype), poisoned(4, 40, 56, dtype=dtype)

    def work() -> torch.Tensor:
        omnigemm.gemm(a, b, out=out)
        omnigemm.gemm(a, b, c, alpha=0.5, beta=2.0, out=sums)
        omnigemm.gemm(*many, out=batch)
        return omnigemm.gemm(a, b)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    for one in (a, b, c, *many):
        one.copy_(random(*one.shape, dtype=dtype))
    for one in (out, sums, batch, made):
        one.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    close(out, a, b)
    close(sums, a, b, c, 0.5, 2.0)
    close(batch, *many)
    assert torch.equal(made, out)


def test_a_capture_before_any_call_is_refused_and_works_after_one(fresh: BlasBackend) -> None:
    m, n, k = DECODE
    a, b = random(m, k), random(n, k).t()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(omnigemm.DeviceError, match=r"no handle is ready on cuda:0, and a CUDA graph is being"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            omnigemm.gemm(a, b)
    torch.mm(a, b)  # a product that cuBLAS itself had never run has failed in a capture (docs/blas.md)
    omnigemm.gemm(random(4, 4), random(4, 4))  # any call, of any shape, on any stream
    graph, out = torch.cuda.CUDAGraph(), poisoned(m, n)
    with torch.cuda.graph(graph):
        omnigemm.gemm(a, b, out=out)
    graph.replay()
    close(out, a, b)


def test_graphs_share_no_workspace_with_streams() -> None:
    """Captured on one stream, replayed on another, while the first goes on with products of the same kind."""
    m, n, k = DECODE
    a, b, other = random(m, k), random(n, k).t(), random(m, k)
    allowed, other_allowed = limit(a, b, torch.bfloat16), limit(other, b, torch.bfloat16)
    want, other_want = exact(a, b), exact(other, b)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    out, results = poisoned(m, n), poisoned(50, m, n)
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        omnigemm.gemm(a, b)
        before = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=one):
            for _ in range(50):
                omnigemm.gemm(a, b, out=out)
        # The graph's workspace is its own business; torch keeps a few bytes for its random numbers.
        assert torch.cuda.memory_allocated() < before + 2**16
    for _ in range(5):
        out.fill_(NAN)
        torch.cuda.synchronize()
        with torch.cuda.stream(two):
            graph.replay()
        with torch.cuda.stream(one):
            for i in range(50):
                omnigemm.gemm(other, b, out=results[i])
        torch.cuda.synchronize()
        assert bool(((out.double() - want).abs() <= allowed).all())
        assert bool(((results.double() - other_want).abs() <= other_allowed).all())


# -------------------------------------------------------------------------------------------- streams and threads


@pytest.mark.parametrize("way", [Pool, Workspaces], ids=["cuBLAS", "cuBLASLt"])
def test_16_threads_on_16_streams(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads go through all streams; no handle or room is ever taken twice, and every result is right."""
    nvidia = VENDORS["nvidia"]
    backend = BlasBackend(dataclasses.replace(nvidia, lt=None) if way is Pool else nvidia)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()
    busy: set[int] = set()
    shared: list[str] = []
    guard = threading.Lock()
    real_take, real_give = way.take, way.give

    def take(self: Any, *arguments: int) -> Any:
        taken = real_take(self, *arguments)
        with guard:
            if id(taken) in busy:
                shared.append("what is in use was handed out")
            busy.add(id(taken))
        return taken

    def give(self: Any, taken: Any) -> None:
        with guard:
            busy.discard(id(taken))
        real_give(self, taken)

    monkeypatch.setattr(way, "take", take)
    monkeypatch.setattr(way, "give", give)
    cases = []
    for m, n, k, dtype in (
        (*DECODE, torch.bfloat16), (1, 2112, 7168, torch.float16), (64, 256, 4096, torch.float32),
        (200, 776, 1040, torch.bfloat16),
    ):  # fmt: skip
        a, b = random(m, k, dtype=dtype), random(n, k, dtype=dtype).t()
        cases.append((a, b, exact(a, b), limit(a, b, dtype)))
    streams = [torch.cuda.Stream() for _ in range(16)]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(48):
                a, b, want, allowed = cases[(number + turn) % len(cases)]
                with torch.cuda.stream(streams[(number + 5 * turn) % 16]):
                    result = omnigemm.gemm(a, b, backend="blas")
                    if not bool(((result.double() - want).abs() <= allowed).all()):
                        wrong.append(f"thread {number}, turn {turn}")
        except BaseException as error:
            wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]
    assert not shared
    forget_calls()
    torch.cuda.synchronize()
    if way is Pool:
        handles = sum(len(free) for free in pool(backend)._free.values())
        assert 17 <= handles <= 16 * 16 + 1  # at least one for each stream and one for captures
        pool(backend).close()
        assert not any(pool(backend)._free.values())


@pytest.mark.parametrize("way", [Pool, Workspaces], ids=["cuBLAS", "cuBLASLt"])
def test_of_many_streams_the_oldest_are_let_go(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles and workspaces change hands while products that use them run still, and nobody waits."""
    nvidia = VENDORS["nvidia"]
    backend = BlasBackend(dataclasses.replace(nvidia, lt=None) if way is Pool else nvidia)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    monkeypatch.setattr(kept, "IDLE", 4)
    forget_calls()
    m, n, k = DECODE
    a, b, results = random(m, k), random(n, k).t(), poisoned(6, 16, m, n)
    want, allowed = exact(a, b), limit(a, b, torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(16)]
    torch.cuda.synchronize()
    for turn in range(6):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                omnigemm.gemm(a, b, out=results[turn, i])
    torch.cuda.synchronize()
    forget_calls()
    assert bool(((results.double() - want).abs() <= allowed).all())
    if way is Pool:
        assert sum(len(free) for free in pool(backend)._free.values()) <= 5  # with the one for captures


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(64, 64, 64), DECODE])
def test_a_thread_that_did_nothing_with_cuda_before(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """With a call that is remembered at these addresses, and with one that is not."""
    m, n, k = shape
    a, b = random(m, k, dtype=dtype), random(n, k, dtype=dtype).t()
    want = omnigemm.gemm(a, b)
    known, other = torch.empty_like(want), torch.empty_like(want)
    for _ in range(2):
        omnigemm.gemm(a, b, out=known, backend="blas")
    for out in (known, other):
        out.fill_(NAN)
    torch.cuda.synchronize()
    for out in (known, other):
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(omnigemm.gemm, a, b, out=out, backend="blas").result()
        close(out, a, b)


@pytest.mark.parametrize("way", [Pool, Workspaces], ids=["cuBLAS", "cuBLASLt"])
def test_what_is_kept_lies_in_no_pool_of_the_caller(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.use_mem_pool`, which graphs of torch.compile use: they give memory to others that is in use here."""
    nvidia = VENDORS["nvidia"]
    backend = BlasBackend(dataclasses.replace(nvidia, lt=None) if way is Pool else nvidia)
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (backend,))
    forget_calls()
    m, n, k = DECODE
    a, b, out, mine = random(m, k), random(n, k).t(), poisoned(m, n), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(mine):
        omnigemm.gemm(a, b, out=out)
        inside = torch.empty(1 << 20, device="cuda")
    assert pool_of(inside) == mine.id
    del inside
    forget_calls()
    close(out, a, b)
    found = backend._found()
    assert not isinstance(found, Support)
    lt = found.product.lt
    keeper: Any = pool(backend) if lt is None else lt.device(torch.device("cuda:0")).rooms
    memory = [one.workspace for free in keeper._free.values() for one in free if one.workspace is not None]
    assert memory
    assert all(pool_of(one) == (0, 0) for one in memory)


def pool_of(x: torch.Tensor) -> tuple[int, int]:
    """Of torch's allocator; (0, 0) is the one for all."""
    for segment in torch.cuda.memory_snapshot():
        if 0 <= x.data_ptr() - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("no segment holds it")


def test_each_product_waits_for_what_came_before_on_its_stream() -> None:
    b = (torch.randn(512, 512, device="cuda") * 512**-0.5).bfloat16()
    first = random(8, 512)
    x = y = first
    for _ in range(20):
        x = omnigemm.gemm(x, b)
        torch.cuda.synchronize()
    for _ in range(20):
        y = omnigemm.gemm(y, b)
    assert torch.equal(x, y)


# --------------------------------------------------------------------------------------------------------- groups

SHAPES = [(33, 72, 200), (1, 8, 16), (0, 64, 64), (128, 256, 512), (16, 16, 0), (7, 136, 1024)]


@pytest.fixture
def grouped_calls(fresh: BlasBackend) -> list[Any]:
    """How often the vendor's grouped function is called from here on."""
    assert fresh.available()
    (found,) = fresh.kernels(omnigemm.plan("gemm", m=1, n=1, k=1, device="cuda").problem, torch.device("cuda"))
    functions = found.product.library._functions  # type: ignore[attr-defined]
    if "gemm_grouped" not in functions:
        pytest.skip("this cuBLAS has no cublasGemmGroupedBatchedEx")
    real, seen = functions["gemm_grouped"], []

    def counted(*arguments: Any) -> int:
        seen.append(arguments)
        return int(real(*arguments))

    functions["gemm_grouped"] = counted
    return seen


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_lists_by_the_vendors_function(grouped_calls: list[Any], dtype: torch.dtype) -> None:
    found = omnigemm.explain("grouped_gemm", m=8, n=8, k=8, dtype=dtype, groups=4, device="cuda")
    assert "one call for all groups" in str(found)
    alpha, beta = [1.0, 0.5, 2.0, -1.0, 3.0, 1.0], [0.0, 2.0, 1.0, 1.0, 0.5, 0.0]
    for turn in range(3):
        a = [random(m, k, dtype=dtype) for m, _, k in SHAPES]
        b = [
            random(n, k, dtype=dtype).t() if (i + turn) % 2 else random(k, n, dtype=dtype)
            for i, (_, n, k) in enumerate(SHAPES)
        ]
        c = [random(m, n, dtype=dtype) for m, n, _ in SHAPES]
        for one, x, y in zip(omnigemm.grouped_gemm(a, b), a, b, strict=True):
            close(one, x, y)
        out = [poisoned(m, n, dtype=dtype) for m, n, _ in SHAPES]
        out[3] = poisoned(256, 128, dtype=dtype).t()  # columns
        omnigemm.grouped_gemm(a, b, c, alpha=alpha, beta=beta, out=out)
        for i, one in enumerate(out):
            close(one, a[i], b[i], c[i], alpha[i], beta[i])
    assert len(grouped_calls) == 6


@pytest.mark.parametrize("why", ["wide results", "not dense", "not aligned", "captured"])
def test_lists_by_a_loop(grouped_calls: list[Any], why: str) -> None:
    a, b = [random(m, k) for m, _, k in SHAPES], [random(k, n) for _, n, k in SHAPES]
    if why == "not dense":
        a[0] = random(33, 400)[:, ::2]
    elif why == "not aligned":
        a[0] = random(33 * 200 + 1).view(-1)[1:].view(33, 200)
    wide = why == "wide results"
    out = [poisoned(m, n, dtype=torch.float32 if wide else torch.bfloat16) for m, n, _ in SHAPES]
    omnigemm.gemm(random(4, 4), random(4, 4))
    if why == "captured":
        # A product that had never run has failed in a capture (docs/blas.md).
        for one, x, y in zip(out, a, b, strict=True):
            omnigemm.gemm(x, y, out=one)
            one.fill_(float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            omnigemm.grouped_gemm(a, b, out=out)
        graph.replay()
    else:
        omnigemm.grouped_gemm(a, b, out=out)
    for one, x, y in zip(out, a, b, strict=True):
        close(one, x, y)
    assert not grouped_calls


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_rows_of_one_tensor(grouped_calls: list[Any], dtype: torch.dtype) -> None:
    groups, n, k, ends = 4, 136, 512, [33, 33, 80, 97]
    b, a, out = random(groups, n, k, dtype=dtype), random(100, k, dtype=dtype), poisoned(100, n, dtype=dtype)
    ends_there = torch.tensor(ends, dtype=torch.int32, device="cuda")
    omnigemm.grouped_gemm_contiguous(a, b, ends_there, out=out, backend="blas")
    slabs, masked = random(groups, 40, k, dtype=dtype), poisoned(groups, 40, n, dtype=dtype)
    counts = torch.tensor([40, 0, 1, 17], dtype=torch.int32, device="cuda")
    omnigemm.grouped_gemm_masked(slabs, b, counts, out=masked, backend="blas")
    for group, count in enumerate(counts.tolist()):
        rows = slice(ends[group - 1] if group else 0, ends[group])
        close(out[rows], a[rows], b[group].t())
        close(masked[group, :count], slabs[group, :count], b[group].t())
        assert bool(masked[group, count:].isnan().all())
    assert bool(out[97:].isnan().all())
    assert len(grouped_calls) == 2
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(omnigemm.DeviceError, match="ends is on the device and must be read by the host"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            omnigemm.grouped_gemm_contiguous(a, b, ends_there, out=out, backend="blas")
