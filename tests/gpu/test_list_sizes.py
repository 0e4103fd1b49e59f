"""`grouped_gemm` by our own kernels with M, N and K in device memory: against float64, with NaN in all that is not in
use and guards in all that must not be written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import dense, list_launch, list_setup
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.backends.cuda.sm90 import Config

from .group_cases import on_streams
from .test_gemm16 import close
from .test_grouped_lists import CONFIGS, KINDS, LAYOUTS, SHAPES, List, Shape, small, variant

NAN, GUARD = float("nan"), 77.0


class Sized(List):
    """A list with room for its shapes, of which sizes on the device say what is in use."""

    def __init__(self, room: Sequence[Shape], *words: Any, **more: Any) -> None:
        super().__init__(room, *words, **more)
        self.sizes = torch.zeros(len(room), 3, dtype=torch.int32, device="cuda")
        self.whole = [[one.clone() for one in some or ()] for some in (self.a, self.b, self.c)]
        self.used: list[Shape] = []
        self.use(room)

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.a, self.b, self.c, self.alpha, self.beta, self.sizes

    def use(self, sizes: Sequence[Shape]) -> None:
        """Others from now on, in the same tensors."""
        self.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
        self.used = []
        for given, room in zip(sizes, self.shapes, strict=True):
            m, n, k = (min(max(one, 0), most) for one, most in zip(given, room, strict=True))
            self.used.append((m, n, k))
        self.poison()

    def poison(self) -> None:
        """What counts is NaN in results, and what does not is NaN in operands."""
        for i, (m, n, k) in enumerate(self.used):
            ends = (m, k), (k, n), (m, n)
            for some, whole, (rows, cols) in zip((self.a, self.b, self.c), self.whole, ends, strict=True):
                if some is not None:
                    some[i].copy_(whole[i])
                    some[i][rows:], some[i][:, cols:] = NAN, NAN
            self.frames[i].fill_(GUARD)
            self.out[i][:m, :n] = NAN

    def call(self, **words: Any) -> list[Tensor]:
        return super().call(sizes=self.sizes, **words)

    def check(self) -> None:
        for i, (m, n, k) in enumerate(self.used):
            want = self.alpha[i] * (self.a[i][:m, :k].double() @ self.b[i][:k, :n].double())
            if self.c is not None and self.beta[i]:
                want += self.beta[i] * self.whole[2][i].expand(self.out[i].shape)[:m, :n].double()
            if m and n:
                close(self.out[i][:m, :n], want, max(k, 1))
            assert bool((self.out[i][m:] == GUARD).all()), f"rows below what product {i} uses"
            assert bool((self.out[i][:, n:] == GUARD).all()), f"columns beside what product {i} uses"
            guards = self.frames[i].numel() - m * n
            assert int((self.frames[i] == GUARD).sum()) >= guards, f"outside of product {i}"


def some(room: Sequence[Shape], seed: int) -> list[Shape]:
    """At random, at the edges of tiles and of what the copy engine can write, and outside."""
    source = random.Random(seed)

    def one(most: int) -> int:
        ends = 0, 1, 8, 63, 64, 65, 120, 128, 129, 256, most - 1, most
        return source.choice((source.randint(0, most), min(source.choice(ends), most), source.choice((-1, most + 1))))

    return [(one(m), one(n), one(k)) for m, n, k in room]


def turns(room: Sequence[Shape]) -> list[list[Shape]]:
    """What follows one another in the same tensors."""
    return [
        list(room),
        some(room, 1),
        [(0, 0, 0)] * len(room),  # not a tile for any block
        some(room, 2),
        [(m, n, 0) for m, n, _ in room],
        [*[(0, 0, 0)] * (len(room) - 1), room[-1]],
        [(-1, -(2**31), -7)] * len(room),
        [(2**31 - 1, 2**31 - 1, 2**31 - 1)] * len(room),
        some(room, 3),
    ]


def specs(_: Gpu) -> set[KernelSpec]:
    made = {dense.spec(config, variant(kind)) for config in CONFIGS for kind in KINDS}
    return made | {list_setup.spec(lines) for lines in list_setup.LINES}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{'-'.join(kind[0])}-{kind[1]}-{kind[2]}")
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda one: f"{one.rows}x{one.cols}-share{one.share}-blocks{one.blocks_per_sm}"
)
def test_configs_against_float64(config: Config, kind: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    layouts, dtype, out, c, odd = kind
    made = Sized(SHAPES, layouts, dtype, out, c, odd)
    runner: list_launch.Lists = made.runner(config)
    for sizes in turns(SHAPES):
        made.use(sizes)
        runner(made.out, *made.operands)
        made.check()


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_layout_as_users_call_it(dtype: str, layouts: tuple[str, str]) -> None:
    made = Sized(SHAPES, layouts, dtype)
    for sizes in turns(SHAPES):
        made.use(sizes)
        assert made.call() == made.out
        made.check()
    fresh = omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, backend="cuda")
    for one, own, (m, n, _) in zip(fresh, made.out, made.used, strict=True):
        assert one.shape == own.shape
        assert torch.equal(one[:m, :n], own[:m, :n])


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_every_end_of_a_row(out: str) -> None:
    """The copy engine writes whole 16 bytes there: what lies behind must stay."""
    room = [(70, 160, 64)] * 160
    made = Sized(room, out=out)
    for m, k in ((70, 64), (65, 9), (1, 63)):
        made.use([(m, n + 1, k) for n in range(160)])
        made.call()
        made.check()


@pytest.mark.parametrize("count", [1, 36, 37, 109, 325, 700, 1100])
def test_long_lists(count: int) -> None:
    """Tiles are counted on from one launch of the small kernel to the next."""
    made = Sized(small(count, 200 if count <= 325 else 60, count))
    for seed in range(3):
        made.use(some(made.shapes, seed))
        made.call()
        made.check()


def test_few_large_products() -> None:
    room: list[Shape] = [(2048, 1096, 4096), (777, 3000, 2000), (4000, 512, 8192), (130, 8192, 1024)]
    made = Sized(room, c=True)
    for sizes in (room, [(2000, 1000, 4000), (1, 3000, 2000), (4000, 511, 1), (0, 8192, 1024)], some(room, 5)):
        made.use(sizes)
        made.call()
        made.check()


def test_odd_strides_and_addresses() -> None:
    """Operands and results that are copied, with what results hold beside."""
    room = torch.randn(120, 505, device="cuda").bfloat16()
    made = Sized([(37, 77, 201), (37, 77, 64), (60, 40, 99), (20, 9, 50)])
    views = [room[3:40, 1:202], room[50:87, 8:72], room[::2, 300:][:60, :99], room.t()[210:230, :50]]
    for i, view in enumerate(views):
        apart = torch.empty_strided(view.shape, view.stride(), device="cuda", dtype=torch.bfloat16).copy_(view)
        made.a[i], made.whole[0][i] = apart, view.clone()
    turned = torch.full((77, 37), GUARD, device="cuda", dtype=torch.bfloat16)
    made.out[0], made.frames[0] = turned.t(), turned
    odd = torch.full((37, 79), GUARD, device="cuda", dtype=torch.bfloat16)
    made.out[1], made.frames[1] = odd[:, 1:78], odd
    for sizes in turns(made.shapes):
        made.use(sizes)
        made.call()
        made.check()


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_c_may_be_out(out: str) -> None:
    made = Sized([(37, 80, 64), (130, 40, 200), (64, 64, 0), (200, 300, 100)], out=out, c=True)
    made.beta = [1.0, -2.0, 0.5, 1.5]
    values = [torch.randn(one.shape, device="cuda").to(one.dtype) for one in made.out]
    made.c, made.whole[2] = None, values
    for sizes in turns(made.shapes):
        made.use(sizes)
        for one, value, (m, n, _) in zip(made.out, values, made.used, strict=True):
            one[:m, :n] = value[:m, :n]
        made.c = list(made.out)
        made.call()
        made.check()
        made.c = None


def test_c_is_spread() -> None:
    made = Sized([(37, 80, 64), (130, 40, 200)], c=True)
    made.beta = [1.0, -2.0]
    rows, columns = torch.randn(1, 80, device="cuda").bfloat16(), torch.randn(130, 1, device="cuda").bfloat16()
    made.c, made.whole[2] = None, [rows, columns]
    for sizes in turns(made.shapes):
        made.use(sizes)
        made.c = [rows, columns]
        made.call()
        made.check()
        made.c = None


@pytest.mark.parametrize("strided", [False, True])
def test_graphs_follow_sizes(strided: bool) -> None:
    """Also sizes that a kernel right before computes, and factors."""
    made = [Sized(SHAPES, c=True), Sized(small(350, 90), ("mixed", "row"))]
    for one in made:
        if strided:
            one.sizes = torch.full((len(one.shapes), 7), -1, dtype=torch.int32, device="cuda")[:, 1::2]
        one.use(one.shapes)
        one.call()
    halves = [one.sizes.clone() for one in made]
    for one in made:
        one.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one, half in zip(made, halves, strict=True):
            torch.mul(half, 2, out=one.sizes)
            one.call()
    for turn in range(6):
        for one, half in zip(made, halves, strict=True):
            wanted = turns(one.shapes)[turn]
            kept = [tuple(x // 2 * 2 for x in three) for three in wanted]
            one.use(kept)  # type: ignore[arg-type]
            half.copy_(one.sizes // 2)
            one.sizes.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for one in made:
            one.check()


def test_factors_and_sizes_on_the_device() -> None:
    made = Sized([*SHAPES, *small(50, 150)], ("mixed", "col"), c=True)
    count = len(made.shapes)
    assert made.c is not None
    for own in made.whole[2]:
        own.copy_(torch.randn(own.shape, device="cuda"))
    alpha, beta = torch.empty(count, device="cuda"), torch.empty(count, device="cuda")
    for turn, sizes in enumerate(turns(made.shapes)):
        made.use(sizes)
        alpha.copy_(torch.randint(1, 9, (count,), device="cuda") / 4 + turn)
        beta.copy_(torch.randint(-6, 7, (count,), device="cuda") / 4)
        omnigemm.grouped_gemm(
            made.a, made.b, made.c, alpha=alpha, beta=beta, sizes=made.sizes, out=made.out, backend="cuda"
        )
        made.alpha, made.beta = alpha.tolist(), beta.tolist()
        made.check()


def test_sizes_are_not_waited_for() -> None:
    made = Sized(small(20, 100))
    for choice in ("cuda", None):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, out=made.out, backend=choice)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    made.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_blas_waits_for_them(dtype: torch.dtype) -> None:
    a, b = (torch.randn(6, 6, device="cuda").to(dtype) for _ in range(2))
    out = torch.full((6, 6), 7.0, device="cuda", dtype=dtype)
    sizes = torch.tensor([[3, 4, 5]], dtype=torch.int32, device="cuda")
    backend = None if dtype == torch.float32 else "blas"
    omnigemm.grouped_gemm([a], [b], sizes=sizes, out=[out], backend=backend)
    expected = a[:3, :5].double() @ b[:5, :4].double()
    assert torch.allclose(out[:3, :4].double(), expected, rtol=0.01, atol=0.02)
    assert (out[3:] == 7.0).all()
    assert (out[:, 4:] == 7.0).all()
    sizes[0, 1] = 7
    before = out.clone()
    with pytest.raises(omnigemm.ShapeError, match=r"sizes\[0, 1\] is 7"):
        omnigemm.grouped_gemm([a], [b], sizes=sizes, out=[out], backend=backend)
    assert torch.equal(out, before)
    with pytest.raises(omnigemm.DeviceError, match="sizes is on cpu, expected cuda:0"):
        omnigemm.grouped_gemm([a], [b], sizes=sizes.cpu())


def test_plans_in_memory_of_their_callers() -> None:
    made = Sized(small(400, 80))
    words: dict[str, Any] = {"dtype": "bf16", "b_layout": "col", "device_sizes": True, "device": "cuda"}
    plan = omnigemm.plan("grouped_gemm", m=0, n=0, k=0, shapes=made.shapes, backend="cuda", **words)
    workspace = torch.full((plan.workspace_bytes,), 255, device="cuda", dtype=torch.uint8)
    for seed in range(3):
        made.use(some(made.shapes, seed))
        plan.run(made.a, made.b, sizes=made.sizes, out=made.out, workspace=workspace)
        made.check()


def test_streams() -> None:
    made = [Sized(small(60, 400, seed)) for seed in range(4)]
    for seed, one in enumerate(made):
        one.use(some(one.shapes, seed))
    on_streams(made)
