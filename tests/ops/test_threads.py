"""Operations called from many threads at once, and on more than one torch thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cpu.prepared import store
from op_support import floats, forget_calls, fp8s, indices, int4_weight, int8s, scales

THREADS = 8


def jobs(seed: int) -> list[Callable[[], Tensor]]:
    """One call of each operation, with shapes of their own for every seed."""
    torch.manual_seed(seed)
    m, n, k = 3 + seed, 17 + 2 * seed, 40 + 8 * seed
    bf16 = torch.bfloat16
    a, b, c = floats(m, k), floats(k, n), floats(m, n)
    q, r, rows, columns = int8s(m, k), int8s(n, k), scales(m), scales(n)
    f, g = fp8s(m, k), fp8s(n, k)
    x, w = floats(m, k, dtype=bf16), int4_weight(n, k, 32, symmetric=False)
    experts, slabs = fp8s(2, n, k), int4_weight(n, k, 32, experts=2)
    ends, counts = indices([m // 2, m]), indices([m, m])
    slab = floats(2, m, k, dtype=bf16)
    return [
        lambda: omnigemm.gemm(a, b, c, alpha=0.5, beta=2.0),
        lambda: omnigemm.gemm(x, x.t(), out_dtype=torch.float32),
        lambda: omnigemm.int8_gemm(q, r, rows, columns, a_zero=seed),
        lambda: omnigemm.fp8_gemm(f, g, rows, columns),
        lambda: omnigemm.int4_gemm(x, w),
        lambda: torch.cat(omnigemm.grouped_gemm([a, a[:1]], [b, b])),
        lambda: omnigemm.grouped_gemm_contiguous(f, experts, ends, a_scale=rows, b_scale=0.5),
        lambda: omnigemm.grouped_gemm_masked(slab, slabs, counts),
    ]


def test_distinct_shapes_in_many_threads() -> None:
    """Plans and prepared weights are made by all threads at once; the results are those of one thread alone."""
    forget_calls()
    store.clear()
    work = [jobs(seed) for seed in range(THREADS)]
    barrier = threading.Barrier(THREADS)

    def hammer(mine: list[Callable[[], Tensor]]) -> list[list[Tensor]]:
        barrier.wait()
        return [[job() for job in mine] for _ in range(12)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(hammer, work))
    forget_calls()
    store.clear()
    for mine, rounds in zip(work, results, strict=True):
        expected = [job() for job in mine]
        for once in rounds:
            for result, right in zip(once, expected, strict=True):
                torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-5)


def test_one_weight_in_many_threads() -> None:
    """All threads want the same prepared copy at the same time, and each writes its own out."""
    store.clear()
    g, w = fp8s(64, 96), int4_weight(64, 96, 32)
    f, x = fp8s(9, 96), floats(9, 96, dtype=torch.bfloat16)
    with omnigemm.settings(weight_cache_mib=0):
        right = omnigemm.fp8_gemm(f, g, 0.5, 0.5), omnigemm.int4_gemm(x, w)
    barrier = threading.Barrier(THREADS)

    def hammer(_: int) -> list[tuple[Tensor, Tensor]]:
        barrier.wait()
        found = []
        for _ in range(20):
            out = torch.full((9, 64), float("nan"), dtype=torch.bfloat16)
            omnigemm.fp8_gemm(f, g, 0.5, 0.5, out=out)
            found.append((out, omnigemm.int4_gemm(x, w)))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(hammer, range(THREADS)):
            for fp8, int4 in found:
                torch.testing.assert_close(fp8, right[0])
                torch.testing.assert_close(int4, right[1])


def test_settings_belong_to_a_thread() -> None:
    entered, checked = threading.Event(), threading.Event()
    seen: list[str | None] = []

    def other() -> None:
        entered.wait(10)
        with omnigemm.settings() as mine:
            seen.append(mine.backend)
        checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with omnigemm.settings(backend="cpu"):
        entered.set()
        assert checked.wait(10)
    thread.join()
    assert seen == [None]


@pytest.mark.parametrize("threads", [2, 3])
def test_several_torch_threads(threads: int) -> None:
    """Large enough that torch cuts the work."""
    a, b = floats(160, 300), floats(300, 200)
    q, r, rows, columns = int8s(160, 1500), int8s(200, 1500), scales(160), scales(200)
    f, g, x, w = fp8s(160, 300), fp8s(200, 300), floats(160, 300, dtype=torch.bfloat16), int4_weight(200, 300, 32)

    def results() -> list[Tensor]:
        return [
            omnigemm.gemm(a, b),
            omnigemm.int8_gemm(q, r, rows, columns, a_zero=3, out_dtype=torch.float32),
            omnigemm.fp8_gemm(f, g, rows, columns, out_dtype=torch.float32),
            omnigemm.int4_gemm(x, w),
        ]

    alone = results()
    torch.set_num_threads(threads)
    together = results()
    assert torch.equal(together[1], alone[1])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-4, atol=1e-3)
