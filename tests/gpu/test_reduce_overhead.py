"""torch.compile(mode="reduce-overhead"), which captures what it compiled, in memory pools of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import omnigemm

from .fp8_cases import E4M3

N, K = 320, 640


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    torch.compiler.reset()
    counters.clear()


def weights(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def same_in_every_replay(step: object, *operands: Tensor) -> None:
    """The first call only warms up, the second captures, later ones replay: on new data each time."""
    assert callable(step)
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(x, *operands).clone()
        assert torch.equal(got, step(x, *operands))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_layers_of_every_type() -> None:
    eight, scale = omnigemm.quantize_fp8(weights(N, K).bfloat16(), granularity="128x128")
    sixteen, wide = weights(N, N).bfloat16(), weights(N, N)
    assert eight.dtype == E4M3

    def step(x: Tensor, eight: Tensor, scale: Tensor, sixteen: Tensor, wide: Tensor) -> Tensor:
        a, a_scale = omnigemm.quantize_fp8(x, granularity="1x128")
        y = omnigemm.fp8_gemm(a, eight, a_scale, scale)
        z = omnigemm.gemm(y, sixteen.t())
        return omnigemm.gemm(z.float(), wide.t())  # by the vendor's library, with a workspace if it wants one

    same_in_every_replay(step, eight, scale, sixteen, wide)


def test_experts() -> None:
    experts = weights(4, N, K).bfloat16()
    ends = torch.tensor([3, 3, 10, 16], dtype=torch.int32, device="cuda")
    same_in_every_replay(lambda x, w, ends: omnigemm.grouped_gemm_contiguous(x, w, ends), experts, ends)
