"""`grouped_gemm` by our own kernels, against float64: every config and layout, alpha, beta and C, graphs, streams."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import dense, gpu, jit, list_choice, list_kernel, list_launch, list_setup, lists
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.backends.cuda.sm90 import Config, Variant
from omnigemm.core.problem import Problem
from omnigemm.ops.grouped_list import GROUPED_GEMM

from .group_cases import on_streams
from .test_gemm16 import DTYPES, close, matrix

Shape = tuple[int, int, int]
# Every edge of the tiles, one row or column, nothing to add up, and nothing at all.
SHAPES: list[Shape] = [
    (1, 1, 1), (64, 64, 64), (65, 63, 65), (0, 5, 5), (127, 129, 31), (128, 256, 64), (129, 257, 200), (5, 0, 5),
    (300, 520, 1000), (9, 24, 0), (513, 40, 136), (33, 136, 3584),
]  # fmt: skip
LAYOUTS = tuple(itertools.product(("row", "col", "mixed"), repeat=2))


def layout(way: str, i: int) -> str:
    return ("row", "col")[i % 2] if way == "mixed" else way


class List:
    """A list of products whose results lie in frames of NaN."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        layouts: tuple[str, str] = ("row", "col"),
        dtype: str = "bf16",
        out: str = "",
        c: bool = False,
        odd: int = 0,
    ) -> None:
        kind, out_kind, source = DTYPES[dtype], DTYPES[out or dtype], random.Random(len(shapes))
        self.shapes = shapes
        self.a = [matrix(m, k, kind, layout(layouts[0], i)) for i, (m, _, k) in enumerate(shapes)]
        self.b = [matrix(k, n, kind, layout(layouts[1], i // 2)) for i, (_, n, k) in enumerate(shapes)]
        self.c = [torch.randn(m, n, device="cuda").to(out_kind) for m, n, _ in shapes] if c else None
        self.alpha = [source.choice((1.0, 0.5, -2.0)) if c else 1.0 for _ in shapes]
        self.beta = [source.choice((0.0, 1.0, -1.5)) if c else 0.0 for _ in shapes]
        for own, beta in zip(self.c or (), self.beta, strict=False):
            if beta == 0.0:
                own.fill_(float("nan"))  # not read
        # Rows at multiples of 16 bytes, or not: the copy engine can write the former only.
        self.frames = [
            torch.full((m + 2, -(-(n + 1) // 8) * 8 + odd), float("nan"), device="cuda", dtype=out_kind)
            for m, n, _ in shapes
        ]
        self.out = [frame[1:-1, odd : odd + n] for frame, (_, n, _) in zip(self.frames, shapes, strict=True)]

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.a, self.b, self.c, self.alpha, self.beta, None

    def runner(self, config: Config) -> list_launch.Lists:
        problem = GROUPED_GEMM.describe(self.operands, GROUPED_GEMM.check(self.operands, self.out, None))
        return list_launch.Lists(problem, config, 0, torch.cuda.get_device_properties(0).multi_processor_count)

    def call(self, **words: Any) -> list[Tensor]:
        return omnigemm.grouped_gemm(
            self.a, self.b, self.c, alpha=self.alpha, beta=self.beta, out=self.out, backend="cuda", **words
        )

    def poison(self) -> None:
        for frame in self.frames:
            frame.fill_(float("nan"))

    def check(self) -> None:
        for i, (m, n, k) in enumerate(self.shapes):
            want = self.alpha[i] * (self.a[i].double() @ self.b[i].double())
            if self.c is not None and self.beta[i]:
                want += self.beta[i] * self.c[i].double()
            if m and n:
                close(self.out[i], want, max(k, 1))
            assert int((~self.frames[i].isnan()).sum()) == m * n, f"outside of product {i}"


KINDS = (
    (("row", "col"), "bf16", "bf16", False, 0),
    (("col", "row"), "fp16", "fp16", True, 0),
    (("row", "row"), "bf16", "fp32", True, 0),
    (("col", "col"), "bf16", "bf16", True, 3),
)


def variant(kind: tuple[Any, ...]) -> Variant:
    (a, b), dtype, out, c, _ = kind
    one = Problem(
        "grouped_gemm", 1, 1, 1, dtype, dtype, out, groups=1, c=c, a_layout=a, b_layout=b, shapes=((1, 1, 1),)
    )
    return list_kernel.variant_of(one, list_launch.layouts(one)[0])


CONFIGS = tuple(list_choice.legal([variant(kind) for kind in KINDS]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{'-'.join(kind[0])}-{kind[1]}-{kind[2]}")
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda one: f"{one.rows}x{one.cols}-share{one.share}-blocks{one.blocks_per_sm}"
)
def test_configs_against_float64(config: Config, kind: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    layouts, dtype, out, c, odd = kind
    made = List(SHAPES, layouts, dtype, out, c, odd)
    made.runner(config)(made.out, *made.operands)
    made.check()


def specs(_: Gpu) -> set[KernelSpec]:
    made = {dense.spec(config, variant(kind)) for config in CONFIGS for kind in KINDS}
    return made | {list_setup.spec(lines) for lines in list_setup.LINES}


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_layout_as_users_call_it(dtype: str, layouts: tuple[str, str]) -> None:
    made = List(SHAPES, layouts, dtype)
    assert made.call() == made.out
    made.check()
    fresh = omnigemm.grouped_gemm(made.a, made.b, backend="cuda")
    assert all(torch.equal(one, own) for one, own in zip(fresh, made.out, strict=True))


def small(count: int, most: int, seed: int = 0) -> list[Shape]:
    source = random.Random(seed)
    return [(source.randint(1, most), source.randint(1, most), source.randint(1, most)) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 36, 37, 109, 300, 325, 700, 1100])
def test_many_small_products(count: int) -> None:
    made = List(small(count, 200 if count <= 300 else 40, count))
    made.call()
    made.check()


@pytest.mark.parametrize("c", [False, True])
def test_few_large_products(c: bool) -> None:
    made = List([(2048, 1096, 4096), (777, 3000, 2000), (4000, 512, 8192), (130, 8192, 1024)], c=c)
    made.call()
    made.check()


def test_odd_strides_and_addresses() -> None:
    room = torch.randn(120, 505, device="cuda").bfloat16()
    made = List([(37, 77, 201), (37, 77, 64), (60, 40, 99), (20, 9, 50)])
    made.a = [room[3:40, 1:202], room[1:38, 8:72], room[::2, ::3][:60, :99], room.t()[7:27, :50]]
    made.b[1] = torch.randn(64, 160, device="cuda").bfloat16()[:, ::2][:, :77]
    made.call()
    made.check()
    turned = torch.full((77, 37), float("nan"), device="cuda", dtype=torch.bfloat16)
    made.out[0] = turned.t()
    made.frames[0] = turned
    made.call()
    made.check()


def test_c_is_spread_and_may_be_out() -> None:
    made = List([(37, 80, 64), (130, 40, 200), (64, 64, 0)], c=True)
    made.c, made.beta = list(made.out), [1.0, -2.0, 0.5]
    values = [torch.randn(one.shape, device="cuda").bfloat16() for one in made.out]
    for one, value in zip(made.out, values, strict=True):
        one.copy_(value)
    made.call()
    made.c = values
    made.check()
    for shape in ((1, 80), (37, 1), (1, 1)):
        made.c[0] = torch.randn(shape, device="cuda").bfloat16()
        made.poison()
        made.call()
        made.check()


def test_calls_that_follow_one_another() -> None:
    """Maps of the call before lie in the same memory: none of them must be used again."""
    both = [List(small(40, 300, seed)) for seed in (1, 2)]
    moved = List(both[0].shapes)
    for _ in range(30):
        for made in (*both, moved):
            made.call()
    for made in (*both, moved):
        made.check()
        made.poison()
        made.call()
        made.check()


def test_graph_with_other_contents() -> None:
    made = [List(SHAPES, c=True), List(small(120, 100), ("mixed", "row"))]
    for one in made:
        one.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for one in made:
                one.call()
    trash = [
        torch.full((1 << 20,), -1, device="cuda") for _ in range(8)
    ]  # what the host had is gone, and memory reused
    for turn in range(4):
        for one in made:
            for x in (*one.a, *one.b):
                x.copy_(torch.randn(x.shape, device="cuda") * (turn + 1))
            one.poison()
        made[1].call()  # outside of the graph, in between
        made[1].poison()
        graph.replay()
        torch.cuda.synchronize()
        for one in made:
            one.check()
    del trash


@pytest.mark.parametrize("form", ["one", "one each", "strided"])
def test_factors_on_the_device_and_graphs_that_follow_them(form: str) -> None:
    """Nobody waits for them: a call is captured, and replays use what they are then."""
    made = List([*SHAPES, *small(50, 150)], ("mixed", "col"), c=True)
    assert made.c is not None
    count = len(made.shapes)
    for own in made.c:
        own.copy_(torch.randn(own.shape, device="cuda"))
    shape = {"one": (), "one each": (count,), "strided": (3 * count,)}[form]
    rooms = [torch.empty(shape, device="cuda") for _ in range(2)]
    alpha, beta = (room[::3] if form == "strided" else room for room in rooms)

    def call() -> None:
        omnigemm.grouped_gemm(made.a, made.b, made.c, alpha=alpha, beta=beta, out=made.out, backend="cuda")

    def set_factors(turn: int) -> None:
        """By kernels right before, of which the next one must see the results. Of few bits: products stay exact."""
        alpha.copy_(torch.randint(1, 9, alpha.shape, device="cuda") / 4 + turn)
        beta.copy_(torch.randint(-6, 7, beta.shape, device="cuda") / 4)

    def check() -> None:
        torch.cuda.synchronize()
        made.alpha, made.beta = alpha.expand(count).tolist(), beta.expand(count).tolist()
        made.check()

    for turn in range(2):
        made.poison()
        set_factors(turn)
        call()
        check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for turn in range(3):
        made.poison()
        set_factors(turn)
        graph.replay()
        check()
    # A beta of 0 is known on the device only: C is not read then.
    beta.zero_()
    for own in made.c:
        own.fill_(float("nan"))
    made.poison()
    graph.replay()
    check()
    # One of both may be the host's.
    made.poison()
    omnigemm.grouped_gemm(made.a, made.b, alpha=alpha, out=made.out, backend="cuda")
    check()


def test_factors_on_the_device_are_not_waited_for() -> None:
    made = List(small(20, 100), c=True)
    alpha, beta = torch.ones(20, device="cuda"), torch.ones((), device="cuda")
    for choice in ("cuda", None):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                omnigemm.grouped_gemm(made.a, made.b, made.c, alpha=alpha, beta=beta, out=made.out, backend=choice)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(omnigemm.ShapeError, match="c is None"):
        omnigemm.grouped_gemm(made.a, made.b, beta=beta, backend="cuda")
    with pytest.raises(omnigemm.DTypeError, match="alpha has dtype float64"):
        omnigemm.grouped_gemm(made.a, made.b, alpha=alpha.double(), backend="cuda")
    with pytest.raises(omnigemm.DeviceError, match="alpha is on cuda"):
        omnigemm.grouped_gemm([torch.ones(2, 2)], [torch.ones(2, 2)], alpha=alpha[:1])


@pytest.mark.parametrize("backend", ["blas", "cuda"])
def test_both_backends_agree_on_factors_of_the_device(backend: str) -> None:
    made = List(small(12, 90), c=True)
    assert made.c is not None
    made.alpha, made.beta = [0.5 * i - 1.0 for i in range(12)], [1.0 - 0.5 * i for i in range(12)]
    for own in made.c:
        own.copy_(torch.randn(own.shape, device="cuda"))
    alpha, beta = (torch.tensor(one, device="cuda") for one in (made.alpha, made.beta))
    omnigemm.grouped_gemm(made.a, made.b, made.c, alpha=alpha, beta=beta, out=made.out, backend=backend)
    made.check()


class Packed:
    """Products whose results lie in one buffer, 1 to 15 guard elements apart, so that they begin anywhere."""

    def __init__(self, count: int, seed: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        source = random.Random(seed)
        pick = lambda: source.randint(1, 400)  # noqa: E731
        self.shapes = [(pick(), pick(), pick()) for _ in range(count)]
        gaps = [source.randint(1, 15) for _ in range(count)]
        self.room = torch.empty(sum(m * n for m, n, _ in self.shapes) + sum(gaps), device="cuda", dtype=out_dtype)
        self.guards = torch.ones(self.room.numel(), dtype=torch.bool)
        self.out, at = [], 0
        for (m, n, _), gap in zip(self.shapes, gaps, strict=True):
            turned = source.random() < 0.1
            one = self.room[at + gap :][: m * n]
            self.out.append(one.view(n, m).t() if turned else one.view(m, n))
            self.guards[at + gap : at + gap + m * n] = False
            at += gap + m * n
        self.guards = self.guards.cuda()

        def values(rows: int, cols: int, kind: torch.dtype) -> Tensor:
            """Row by row, column by column, or a part of something wider."""
            way = source.randrange(3)
            wide = torch.randn(rows + way, cols + 8 * way, device="cuda").to(kind)[:rows, :cols]
            return wide.t().contiguous().t() if source.random() < 0.5 else wide

        self.a = [values(m, k, dtype) for m, _, k in self.shapes]
        self.b = [values(k, n, dtype) for _, n, k in self.shapes]
        self.c = [values(m, n, source.choice((dtype, out_dtype))) for m, n, _ in self.shapes]
        self.alpha = [source.choice((1.0, -0.5, 2.0)) for _ in range(count)]
        self.beta = [source.choice((0.0, 1.0, -1.5)) for _ in range(count)]
        for own, beta in zip(self.c, self.beta, strict=True):
            if beta == 0.0:
                own.fill_(float("nan"))  # not read

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.a, self.b, self.c, self.alpha, self.beta, None


def test_a_thousand_products_at_random() -> None:
    torch.manual_seed(0)
    kinds = (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)
    made = [Packed(count, seed, *kinds[seed % 2]) for seed, count in enumerate((1, 2, 7, 40, 150, 300, 500))]
    assert sum(len(one.shapes) for one in made) == 1000
    problems = [GROUPED_GEMM.describe(one.operands, GROUPED_GEMM.check(one.operands, one.out, None)) for one in made]
    jit.warm({spec for one in problems for spec in lists.specs(one, gpu.of(0))})  # side by side
    for one in made:
        a, b, c, alpha, beta, _ = one.operands
        for _ in range(2):  # cold and warm
            one.room.fill_(float("nan"))
            omnigemm.grouped_gemm(a, b, c, alpha=alpha, beta=beta, out=one.out, backend="cuda")
            assert bool(one.room[one.guards].isnan().all()), "outside of results"
        for i, (_, _, k) in enumerate(one.shapes):
            want = alpha[i] * (a[i].double() @ b[i].double())
            if beta[i]:
                want += beta[i] * c[i].double()
            close(one.out[i], want, k)


def test_plans_run_many_times_in_memory_of_their_callers() -> None:
    words: dict[str, Any] = {"dtype": "bf16", "b_layout": "col", "alpha": 2.0, "beta": 1.0, "device": "cuda"}
    made = List(small(800, 40), c=True)
    plan = omnigemm.plan("grouped_gemm", m=0, n=0, k=0, shapes=made.shapes, backend="cuda", **words)
    room = torch.full((plan.workspace_bytes + 256,), 77, device="cuda", dtype=torch.uint8)
    workspace = room[: plan.workspace_bytes]
    given = {"alpha": made.alpha, "beta": made.beta, "out": made.out, "workspace": workspace}
    plan.run(made.a, made.b, made.c, **given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        made.poison()
        plan.run(made.a, made.b, made.c, **given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    made.check()
    assert bool((room[plan.workspace_bytes :] == 77).all())
    # Other products in the same memory, right behind one another.
    other = List(small(300, 60, 5))
    small_plan = omnigemm.plan(
        "grouped_gemm", m=0, n=0, k=0, shapes=other.shapes, dtype="bf16", b_layout="col", device="cuda", backend="cuda"
    )
    assert small_plan.workspace_bytes < plan.workspace_bytes
    for one in (made, other):
        one.poison()
    for _ in range(5):
        plan.run(made.a, made.b, made.c, **given)
        small_plan.run(other.a, other.b, out=other.out, workspace=workspace)
    for one in (made, other):
        one.check()
    with pytest.raises(omnigemm.WorkspaceError, match="expected"):
        plan.run(made.a, made.b, made.c, **{**given, "workspace": workspace[:-1]})


def test_a_capture_that_would_compile_is_refused() -> None:
    made = List([(8, 8, 8)], dtype="fp16", out="fp32", c=True)
    made.beta = [1.0]
    made.c = [torch.zeros(8, 8, device="cuda")]
    graph = torch.cuda.CUDAGraph()
    config = Config(False, 1, 1, 96, 4)  # that nobody else compiles
    with pytest.raises(omnigemm.DeviceError, match="is not compiled yet"), torch.cuda.graph(graph):
        made.runner(config)


def test_streams() -> None:
    on_streams([List(small(60, 400, seed)) for seed in range(4)])


def test_plans_run_and_say_what_they_take() -> None:
    made = List(SHAPES)
    plan = omnigemm.plan(
        "grouped_gemm", m=0, n=0, k=0, shapes=SHAPES, dtype="bf16", b_layout="col", device="cuda", backend="cuda"
    )
    assert plan.workspace_bytes >= len(SHAPES) * list_kernel.MEMORY_BYTES
    plan.run(made.a, made.b, out=made.out)
    made.check()
    assert "one launch for all products" in str(
        omnigemm.explain("grouped_gemm", m=0, n=0, k=0, shapes=SHAPES, b_layout="col", device="cuda")
    )


def test_results_are_the_same_every_time() -> None:
    made = List(small(50, 500))
    first = [one.clone() for one in made.call()]
    for _ in range(10):
        assert all(torch.equal(one, own) for one, own in zip(made.call(), first, strict=True))
