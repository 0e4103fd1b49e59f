"""The Hopper fp8 kernel with block scales, against float64: every tile edge, guard rows, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omnigemm.backends.cuda import sm90
from omnigemm.backends.cuda.fp8_block import multiply

CONFIGS = tuple(sm90.configs())
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma runs on compute capability 9.0 only")


def operands(m: int, n: int, k: int, a: torch.dtype = E4M3, b: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    blocks = -(-k // 128)
    return (
        torch.randn(m, k, device="cuda").to(a),
        torch.randn(n, k, device="cuda").to(b),
        torch.rand(m, blocks, device="cuda") + 0.5,
        torch.rand(-(-n // 128), blocks, device="cuda") + 0.5,
    )


def exact(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    k, n = a.size(1), b.size(0)
    left = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :k]
    scale = b_scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return left @ (b.double() * scale).t()


def check(config: sm90.Config, m: int, n: int, k: int, a: torch.dtype = E4M3, b: torch.dtype = E4M3) -> None:
    given = operands(m, n, k, a, b)
    guarded = torch.full((m + 2, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    multiply(config, *given, guarded[1:-1])
    result, want = guarded[1:-1].double(), exact(*given)
    # One rounding to bf16. Inside a block of 128, Hopper's tensor cores align fp8 products to some 13 bits.
    size = exact(given[0].float().abs(), given[1].float().abs(), *given[2:])
    assert bool(((result - want).abs() <= want.abs() * 2**-8 + size * 2**-12).all())
    assert float((result - want).norm() / want.norm()) < 0.0025
    assert bool(guarded[0].isnan().all())
    assert bool(guarded[-1].isnan().all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("m", [1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 1000])
def test_rows(config: sm90.Config, m: int) -> None:
    check(config, m, 384, 512)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("n", [8, 64, 120, 128, 136, 184, 192, 200, 256, 320, 576, 2112, 4096])
def test_columns(config: sm90.Config, n: int) -> None:
    check(config, 130, n, 384)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("k", [16, 112, 128, 144, 256, 1040, 7168])
def test_depths(config: sm90.Config, k: int) -> None:
    check(config, 200, 256, k)


@pytest.mark.parametrize("b", [E4M3, E5M2])
@pytest.mark.parametrize("a", [E4M3, E5M2])
def test_types(a: torch.dtype, b: torch.dtype) -> None:
    check(CONFIGS[0], 200, 320, 640, a, b)


def test_more_tiles_than_processors() -> None:
    check(CONFIGS[0], 2500, 4104, 512)


def test_graph_replays_on_new_data() -> None:
    given = operands(300, 576, 1024)
    out = torch.full((300, 576), float("nan"), device="cuda", dtype=torch.bfloat16)
    multiply(CONFIGS[0], *given, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # back to back, each allowed to start before the last one ends
            multiply(CONFIGS[0], *given, out)
    fresh = operands(300, 576, 1024)
    for old, new in zip(given, fresh, strict=True):
        old.copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    want = exact(*fresh)
    assert float((out.double() - want).norm() / want.norm()) < 0.002


def test_the_same_result_every_time() -> None:
    given = operands(1000, 2112, 2048)
    outs = [torch.empty(1000, 2112, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
    for out in outs:
        multiply(CONFIGS[0], *given, out)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
