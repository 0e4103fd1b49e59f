"""`int8_gemm` on a GPU is exact: the float64 result, rounded once; every number of rows, odd sizes, extreme values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import dense, sm90
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.core.problem import Problem

OUTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# One of each kind: both orientations, one and two warpgroups and waves, depths, clusters that share and split.
CONFIGS = {
    "rows 64x96": sm90.Config(False, 1, 1, 96, 6),
    "rows 128x256": sm90.Config(False, 2, 1, 256, 3, right_share=2),
    "rows 128x256 in parts": sm90.Config(False, 2, 1, 256, 4, right_share=2, out_buffers=2, out_parts=4),
    "rows 256x128 shared": sm90.Config(False, 2, 2, 128, 3, left_share=2),
    "pingpong 128x128 shared": sm90.Config(
        False, 2, 2, 128, 5, left_share=2, out_buffers=2, out_parts=2, pingpong=True
    ),
    "pingpong 64x256": sm90.Config(False, 2, 1, 256, 4, right_share=2, out_parts=4, pingpong=True),
    "pingpong 128x80": sm90.Config(False, 2, 2, 80, 7, band=16, pingpong=True, fetch=128),
    "rows 64x48 split 3": sm90.Config(False, 1, 1, 48, 6, split=3, depth=2, blocks_per_sm=2),
    "rows 128x64 split 2": sm90.Config(False, 2, 1, 64, 6, split=2),
    "rows 128x80 split 4": sm90.Config(False, 2, 1, 80, 5, split=4, depth=2),
    "swap 8 split 8": sm90.Config(True, 1, 1, 8, 8, split=8, depth=4, blocks_per_sm=2),
    "swap 16 split 3": sm90.Config(True, 1, 1, 16, 6, split=3, depth=4, right_share=2),
    "swap 64 shared": sm90.Config(True, 1, 1, 64, 6, split=2, depth=2, left_share=2, blocks_per_sm=2),
    "swap 128x128": sm90.Config(True, 2, 1, 128, 4, split=2),
    "swap 144 split 2": sm90.Config(True, 1, 1, 144, 6, split=2, depth=2),
}
SHAPES = [(1, 331, 1040), (7, 392, 640), (33, 136, 7168), (130, 577, 129), (257, 264, 384)]
# More tiles than multiprocessors: two or three for each, and one to eleven rounds of the ring for a tile.
MANY_TILES = [(2500, 2312, 80), (2500, 2312, 384), (2500, 2312, 5600)]


def random(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def scales(count: int) -> Tensor:
    return torch.rand(count, device="cuda") * 10.0 ** torch.randint(-4, 3, (count,), device="cuda")


def exact(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, a_zero: Tensor | None = None
) -> Tensor:
    """Sums of integers below 2^53 are exact in float64, in any order."""
    sums = a.double() @ b.double().mT
    if a_zero is not None:
        sums = sums - a_zero.reshape(-1, 1).double() * b.double().sum(-1)
    value = sums * b_scale.reshape(-1).double() * a_scale.reshape(-1, 1).double()
    return value if bias is None else value + bias.double()


def close(result: Tensor, want: Tensor) -> None:
    """Within a hair more than half a unit in the last place; what is too large for the result's type is infinite."""
    dtype = torch.finfo(result.dtype)
    exponent = torch.frexp(want.abs().clamp_min(dtype.tiny)).exponent - 1
    unit = torch.ldexp(torch.full_like(want, dtype.eps), exponent)
    finite = want.abs() < dtype.max
    assert bool(((result.double() - want).abs() <= 0.51 * unit)[finite].all())
    assert bool((result == want.to(result.dtype))[~finite].all())


def framed(m: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    room = torch.full((m + 2, n), float("nan"), device="cuda", dtype=dtype)
    return room, room[1:-1]


def problem(m: int, n: int, k: int, out: str = "bf16", bias: bool = False) -> Problem:
    return Problem("int8_gemm", m, n, k, "int8", "int8", out, a_scale="token", b_scale="channel", bias=bias)


CASES = {
    f"{name}-{m}x{n}x{k}-{out}{'-bias' * bias}": (config, problem(m, n, k, out, bias))
    for name, config in CONFIGS.items()
    for m, n, k in (*SHAPES, *(MANY_TILES if config.pingpong else ()))
    for out, bias in (("bf16", False), ("fp16", True), ("fp32", False), ("fp32", True))
    if m <= config.tile_m * config.left_share or not config.swap
}


def specs(_: Gpu) -> set[KernelSpec]:
    return {dense.spec(config, dense.variant_of(made)) for config, made in CASES.values()}


@pytest.mark.parametrize("title", CASES)
def test_configs_against_float64(title: str) -> None:
    torch.manual_seed(len(title))
    config, made = CASES[title]
    launch = dense.Launch(made, config, 0, torch.cuda.get_device_properties(0).multi_processor_count)
    assert launch._loaded.local_bytes == 0, "registers are spilled"
    a, b, a_scale, b_scale = random(made.m, made.k), random(made.n, made.k), scales(made.m), scales(made.n)
    bias = torch.randn(made.n, device="cuda") if made.bias else None
    room, out = framed(made.m, made.n, OUTS[made.out_dtype])
    launch(out, a, b, a_scale, b_scale, bias)
    close(out, exact(a, b, a_scale, b_scale, bias))
    assert bool(room[0].isnan().all() & room[-1].isnan().all())


@pytest.mark.parametrize("n", [330, 331])
def test_every_number_of_rows(n: int) -> None:
    b, b_scale = random(n, 145), scales(n)
    for m in range(1, 258):
        a, a_scale = random(m, 145), scales(m)
        close(omnigemm.int8_gemm(a, b, a_scale, b_scale, backend="cuda"), exact(a, b, a_scale, b_scale))


@pytest.mark.parametrize("m", [1, 16, 100, 300])
@pytest.mark.parametrize("k", [1, 15, 4096, 57344, 131071])
def test_extreme_values(m: int, k: int) -> None:
    """-128 everywhere: the largest sums that there are."""
    a, b = (torch.full((rows, k), -128, dtype=torch.int8, device="cuda") for rows in (m, 72))
    one = torch.ones((), device="cuda")
    result = omnigemm.int8_gemm(a, b, one, one, out_dtype=torch.float32, backend="cuda")
    assert bool((result.double() == float(128 * 128 * k)).all())


def test_a_bias_that_cancels() -> None:
    a, b, a_scale, b_scale = random(20, 1024), random(64, 1024), scales(20), scales(64)
    product = exact(a, b, a_scale, b_scale)
    for row in range(20):
        bias = -product[row].float()
        result = omnigemm.int8_gemm(a[row : row + 1], b, a_scale[row : row + 1], b_scale, bias=bias, backend="cuda")
        close(result, exact(a[row : row + 1], b, a_scale[row : row + 1], b_scale, bias))


def test_scales_of_any_size() -> None:
    a, b = random(5, 256), random(24, 256)
    for left, right in ((1e30, 1e-30), (1e-30, 1e-38), (1e20, 1e20), (0.0, 1.0)):
        a_scale, b_scale = torch.full((5,), left, device="cuda"), torch.full((24,), right, device="cuda")
        result = omnigemm.int8_gemm(a, b, a_scale, b_scale, out_dtype=torch.float32, backend="cuda")
        torch.testing.assert_close(result, exact(a, b, a_scale, b_scale).float(), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("m", [3, 140])
def test_batches(m: int) -> None:
    a, b = random(4, m, 200), random(4, 88, 200)
    for right in (b, b[0]):
        for a_scale, b_scale in ((scales(m), scales(88)), (scales(4 * m).view(4, m), scales(4 * 88).view(4, 88))):
            result = omnigemm.int8_gemm(a, right, a_scale, b_scale, backend="cuda")
            for i in range(4):
                one = (x[i] if x.dim() == 2 else x for x in (a_scale, b_scale))
                close(result[i], exact(a[i], right[i] if right.dim() == 3 else right, *one))


def test_graph_and_repeats() -> None:
    given: list[Any] = [random(12, 1024), random(576, 1024), scales(12), scales(576)]
    out = omnigemm.int8_gemm(*given, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            omnigemm.int8_gemm(*given, out=out, backend="cuda")
    given[0].copy_(random(12, 1024))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    close(out, exact(*given))
    assert all(torch.equal(omnigemm.int8_gemm(*given, backend="cuda"), out) for _ in range(20))


@pytest.mark.parametrize("m", [1, 16, 60, 128, 300])
@pytest.mark.parametrize("out_dtype", OUTS.values(), ids=OUTS)
def test_zero_points(m: int, out_dtype: torch.dtype) -> None:
    for n, k in ((331, 1040), (64, 129), (392, 7168)):
        a, b, a_scale, b_scale = random(m, k), random(n, k), scales(m), scales(n)
        bias = torch.randn(n, device="cuda")
        for zero in (
            torch.randint(-128, 128, (m,), dtype=torch.int32, device="cuda"),
            torch.tensor(-(2**31), dtype=torch.int32, device="cuda"),
            torch.randint(-128, 128, (m, 2), dtype=torch.int32, device="cuda")[:, 0],
        ):
            for offset in (None, bias):
                words: dict[str, Any] = {"a_zero": zero, "bias": offset, "out_dtype": out_dtype, "backend": "cuda"}
                result = omnigemm.int8_gemm(a, b, a_scale, b_scale, **words)
                close(result, exact(a, b, a_scale, b_scale, offset, zero))
                for _ in range(2):  # the second is like one before
                    given = omnigemm.int8_gemm(a, b, a_scale, b_scale, b_sums=b.sum(1, dtype=torch.int32), **words)
                    assert torch.equal(given, result)


def test_zero_points_of_rows_that_begin_anywhere() -> None:
    """The sums of B's rows are read in 16 bytes where that is possible, from any address and pitch."""
    room = random(40, 300)
    for first in range(17):
        b = room[:, first : first + 211]
        a, a_scale, b_scale = random(9, 211), scales(9), scales(40)
        zero = torch.full((), 7, dtype=torch.int32, device="cuda")
        result = omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, backend="cuda")
        close(result, exact(a, b, a_scale, b_scale, None, zero))
