"""`gemm` in bf16 and fp16 by our own kernels, against float64: transpositions, configs, alpha, beta and C, batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import dense, sm90
from omnigemm.backends.cuda.gemm import Gemm
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.core.problem import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = tuple(itertools.product(("row", "col"), repeat=2))
# One of each kind: both orientations, one and two warpgroups and waves, depths, clusters that share and split.
CONFIGS = {
    "rows 64x64": sm90.Config(False, 1, 1, 64, 6),
    "rows 64x96": sm90.Config(False, 1, 1, 96, 4, blocks_per_sm=2),
    "rows 128x256 shared": sm90.Config(False, 2, 1, 256, 3, right_share=2),
    "rows 128x256 in parts": sm90.Config(False, 2, 1, 256, 4, right_share=2, out_buffers=2, out_parts=4),
    "rows 128x192": sm90.Config(False, 2, 1, 192, 3, fetch=128),
    "rows 256x128 shared": sm90.Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2),
    "pingpong 128x128 shared": sm90.Config(
        False, 2, 2, 128, 5, right_share=2, out_buffers=2, out_parts=2, pingpong=True
    ),
    "pingpong 64x256": sm90.Config(False, 2, 1, 256, 4, out_parts=4, pingpong=True),
    "rows 64x48 split 3": sm90.Config(False, 1, 1, 48, 6, split=3, depth=2, blocks_per_sm=2),
    "rows 128x64 split 2": sm90.Config(False, 2, 1, 64, 6, split=2),
    "rows 128x80 split 4": sm90.Config(False, 2, 1, 80, 5, split=4, depth=2),
    "swap 8 split 8": sm90.Config(True, 1, 1, 8, 8, split=8, depth=4, blocks_per_sm=2),
    "swap 16 split 3": sm90.Config(True, 1, 1, 16, 6, split=3, depth=4, right_share=2),
    "swap 64 split 2": sm90.Config(True, 1, 1, 64, 6, split=2, depth=2, blocks_per_sm=2),
    "swap 64 shared": sm90.Config(True, 1, 1, 64, 6, split=2, depth=2, right_share=2),
    "swap 128x128": sm90.Config(True, 2, 1, 128, 4, split=2),
    "swap 144 split 2": sm90.Config(True, 1, 1, 144, 6, split=2, depth=2),
}
SHAPES = [(1, 328, 520), (7, 392, 640), (33, 136, 3584), (130, 577, 136), (257, 264, 200)]
# More tiles than multiprocessors: two or three for each, and one to eleven rounds of the ring for a tile.
MANY_TILES = [(2500, 2312, 40), (2500, 2312, 200), (2500, 2312, 2808)]


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "row") -> Tensor:
    if layout == "col":
        return matrix(columns, rows, dtype).t()
    step = -(-columns // 8) * 8  # rows begin where the copy engine can address them
    return torch.randn(rows, step, device="cuda").to(dtype)[:, :columns]


def close(result: Tensor, want: Tensor, k: int) -> None:
    """Sums in fp32, rounded once to the result's type: what a random walk of K roundings of the sums' size leaves."""
    error = (result.double() - want).abs()
    allowed = torch.finfo(result.dtype).eps * want.abs() + 2e-7 * k * want.abs().mean().clamp_min(1.0)
    assert bool((error <= allowed).all()), f"off by {(error / allowed).max().item():.2f} of what is allowed"


def problem(
    m: int,
    n: int,
    k: int,
    layouts: tuple[str, str] = ("row", "col"),
    dtype: str = "bf16",
    out: str = "",
    c: bool = False,
) -> Problem:
    a, b = layouts
    return Problem("gemm", m, n, k, dtype, dtype, out or dtype, a_layout=a, b_layout=b, c=c, scaled=c)


CASES = {
    f"{name}-{m}x{n}x{k}-{a}-{b}-{dtype}-{out}{'-c' * c}": (config, made)
    for name, config in CONFIGS.items()
    for m, n, k in (*SHAPES, *(MANY_TILES if config.pingpong else ()))
    for (a, b), dtype, out, c in (
        (LAYOUTS[1], "bf16", "bf16", False),
        (LAYOUTS[1], "fp16", "fp32", True),
        (LAYOUTS[0], "fp16", "fp16", True),
        (LAYOUTS[2], "bf16", "bf16", True),
        (LAYOUTS[3], "bf16", "fp32", False),
    )
    if (m <= config.tile_m or not config.swap)
    and dense.variant_of(made := problem(m, n, k, (a, b), dtype, out, c)).fault(config) is None
}


def specs(_: Gpu) -> set[KernelSpec]:
    return {dense.spec(config, dense.variant_of(made)) for config, made in CASES.values()}


@pytest.mark.parametrize("title", CASES)
def test_configs_against_float64(title: str) -> None:
    torch.manual_seed(len(title))
    config, made = CASES[title]
    launch = Gemm(made, config, 0, torch.cuda.get_device_properties(0).multi_processor_count)
    assert launch._loaded.local_bytes == 0, "registers are spilled"
    dtype = DTYPES[made.a_dtype]
    a, b = matrix(made.m, made.k, dtype, made.a_layout), matrix(made.k, made.n, dtype, made.b_layout)
    c = torch.randn(made.m, made.n, device="cuda").to(dtype) if made.c else None
    alpha, beta = (0.75, -1.5) if made.c else (1.0, 0.0)
    room = torch.full((made.m + 2, made.n), float("nan"), device="cuda", dtype=DTYPES[made.out_dtype])
    out = room[1:-1]
    launch(out, a, b, c, alpha, beta)
    want = alpha * (a.double() @ b.double())
    close(out, want if c is None else want + beta * c.double(), made.k)
    assert bool(room[0].isnan().all() & room[-1].isnan().all())


def call(a: Tensor, b: Tensor, *others: Any, **words: Any) -> Tensor:
    return omnigemm.gemm(a, b, *others, backend="cuda", **words)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_number_of_rows(dtype: torch.dtype, layouts: tuple[str, str]) -> None:
    b = matrix(145, 330, dtype, layouts[1])
    for m in (*range(1, 20), 31, 33, 63, 64, 65, 127, 128, 129, 255, 257):
        a = matrix(m, 145, dtype, layouts[0])
        close(call(a, b), a.double() @ b.double(), 145)


def test_strides_that_the_copy_engine_cannot_address() -> None:
    """Odd pitches, odd addresses, no stride of 1, a result with gaps: copied, and what lies between stays as it was."""
    room = torch.randn(90, 301, device="cuda").bfloat16()
    for a in (room[3:40, 1:202], room[:37, :201], room[::2, ::3][:37, :99], room.t()[:201, :37].t()):
        k = a.size(1)
        for b in (torch.randn(k, 77, device="cuda").bfloat16(), torch.randn(77, k, device="cuda").bfloat16().t()):
            close(call(a, b), a.double() @ b.double(), k)
            gaps = torch.full((37, 2, 77), float("nan"), device="cuda", dtype=torch.bfloat16)
            call(a, b, out=gaps[:, 0])
            close(gaps[:, 0], a.double() @ b.double(), k)
            assert bool(gaps[:, 1].isnan().all())
            columns = torch.full((77, 37), float("nan"), device="cuda", dtype=torch.bfloat16).t()
            close(call(a, b, out=columns), a.double() @ b.double(), k)


@pytest.mark.parametrize("m", [1, 16, 100, 300])
def test_alpha_beta_and_c(m: int) -> None:
    a, b = matrix(m, 512, torch.float16), matrix(512, 264, torch.float16, "col")
    product = a.double() @ b.double()
    for shape in ((m, 264), (1, 264), (m, 1), (264,), (1, 1)):
        for c in (torch.randn(shape, device="cuda").half(), torch.randn(shape, device="cuda")):
            words: dict[str, Any] = {"alpha": 0.5, "beta": 3.0, "out_dtype": torch.float32}
            close(call(a, b, c, **words), 0.5 * product + 3.0 * c.double(), 512)
    both = torch.randn(m, 264, device="cuda").half()
    want = product + 2.0 * both.double()
    assert call(a, b, both, beta=2.0, out=both) is both
    close(both, want, 512)
    poison = torch.full((m, 264), float("nan"), device="cuda").half()
    close(call(a, b, poison, beta=0.0), product, 512)


def test_nothing_to_add_up() -> None:
    c = torch.randn(5, 8, device="cuda").half()
    a, b = torch.empty(5, 0, device="cuda").half(), torch.empty(0, 8, device="cuda").half()
    assert torch.equal(call(a, b), torch.zeros_like(c))
    assert torch.equal(call(a, b, c, beta=2.0), 2 * c)


@pytest.mark.parametrize("m", [3, 140])
def test_batches(m: int) -> None:
    a, b = torch.randn(4, m, 200, device="cuda").half(), torch.randn(4, 200, 88, device="cuda").half()
    c = torch.randn(4, m, 88, device="cuda").half()
    for left, right in ((a, b), (a, b[0]), (a[0], b), (a[:1], b), (a, b[:1])):
        close(call(left, right, c, beta=0.5), left.double() @ right.double() + 0.5 * c.double(), 200)


def test_graph_and_repeats() -> None:
    a, b = matrix(12, 1024, torch.bfloat16), matrix(1024, 576, torch.bfloat16, "col")
    out = call(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call(a, b, out=out)
    a.copy_(torch.randn(12, 1024, device="cuda"))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    close(out, a.double() @ b.double(), 1024)
    assert all(torch.equal(call(a, b), out) for _ in range(20))


def test_what_is_refused_and_why() -> None:
    x = torch.ones(2, 2, device="cuda")
    with pytest.raises(omnigemm.UnsupportedError, match="fp32 products are the blas backend's"):
        call(x, x)
