"""`grouped_gemm_k_contiguous` by our own kernels, against float64: groups of any rows, C, fp8, bad ends, graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import dense, k_groups, list_choice
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import Problem
from omnigemm.ops.grouped_k import GROUPED_K_CONTIGUOUS

from .group_cases import on_streams
from .test_gemm16 import DTYPES, close

NAN = float("nan")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OP = "grouped_gemm_k_contiguous"


def ends_of(counts: Sequence[int]) -> list[int]:
    return torch.tensor(counts).cumsum(0).tolist()


def clamped(ends: Sequence[int], total: int) -> list[slice]:
    """What bad ends are taken for."""
    found, last = [], 0
    for end in ends:
        here = min(max(end, last), total)
        found.append(slice(last, here))
        last = here
    return found


def operand(rows: int, columns: int, dtype: str) -> Tensor:
    """[T, columns] that kernels read in place: 16 bits by rows, fp8 by columns, at multiples of 16 bytes."""
    if dtype in FP8:
        return torch.randn(columns, -(-rows // 16) * 16, device="cuda").to(FP8[dtype])[:, :rows].t()
    return torch.randn(rows, -(-columns // 8) * 8, device="cuda").to(DTYPES[dtype])[:, :columns]


def fp8_close(result: Tensor, want: Tensor, size: Tensor) -> None:
    """One rounding of the output. Inside a block of 128, Hopper's tensor cores align fp8 products to some 13 bits: in
    groups of a single block, a few sums in a million then are further off than 2**-12 of their size."""
    error, rounding = (result.double() - want).abs(), max(torch.finfo(result.dtype).eps, 2**-20)
    assert bool((error <= want.abs() * rounding + size * 2**-11).all()), f"worst {float((error / size).max()):.2e}"


class Case:
    """Operands, and a result in a frame of NaN."""

    def __init__(
        self,
        m: int,
        n: int,
        ends: Sequence[int],
        total: int,
        dtype: str = "bf16",
        out: str = "fp32",
        c: bool = False,
        odd: int = 0,
        b_dtype: str = "",
    ) -> None:
        self.ends, self.total = list(ends), total
        self.index = torch.tensor(self.ends, dtype=torch.int32, device="cuda")
        self.a, self.b = operand(total, m, dtype), operand(total, n, b_dtype or dtype)
        self.scales: tuple[Tensor, Tensor] | None = None
        if dtype in FP8:
            blocks = -(-total // 128)
            self.scales = torch.rand(m, blocks, device="cuda") + 0.5, torch.rand(n, blocks, device="cuda") + 0.5
        groups, kind = len(self.ends), DTYPES[out]
        self.c = torch.randn(groups, m, n, device="cuda").to(kind) if c else None
        # Rows at multiples of 16 bytes, or not: the copy engine can write the former only.
        shape = groups + 2, m + 2, -(-(n + 1) // 8) * 8 + odd
        self.frame = torch.full(shape, NAN, device="cuda", dtype=kind)
        self.out = self.frame[1:-1, 1:-1, odd : odd + n]

    @property
    def words(self) -> dict[str, Any]:
        return {} if self.scales is None else {"a_scale": self.scales[0], "b_scale": self.scales[1]}

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.a, self.b, self.index, self.c, *(self.scales or (None, None))

    @property
    def problem(self) -> Problem:
        return GROUPED_K_CONTIGUOUS.describe(self.operands, GROUPED_K_CONTIGUOUS.check(self.operands, self.out, None))

    def run(self, config: Config) -> None:
        count = torch.cuda.get_device_properties(0).multi_processor_count
        k_groups.KGroups(self.problem, config, 0, count)(self.out, *self.operands)

    def call(self) -> None:
        result = omnigemm.grouped_gemm_k_contiguous(
            self.a, self.b, self.index, self.c, out=self.out, backend="cuda", **self.words
        )
        assert result is self.out

    def poison(self) -> None:
        self.frame.fill_(NAN)

    def wanted(self, c: Tensor | None) -> tuple[Tensor, Tensor]:
        """In float64; and the same sums of sizes."""
        left, right = self.a.double(), self.b.double()
        if self.scales is not None:
            spread = [one.double().repeat_interleave(128, 1)[:, : self.total].t() for one in self.scales]
            left, right = left * spread[0], right * spread[1]
        parts = clamped(self.ends, self.total)
        found = torch.stack([left[rows].t() @ right[rows] for rows in parts])
        sizes = torch.stack([left[rows].abs().t() @ right[rows].abs() for rows in parts])
        return (found, sizes) if c is None else (found + c.double(), sizes + c.double().abs())

    def check(self, c: Tensor | None = None, nan: Sequence[int] = ()) -> None:
        """`nan`: groups that have no right result."""
        want, sizes = self.wanted(self.c if c is None else c)
        for group, rows in enumerate(clamped(self.ends, self.total)):
            if group in nan:
                assert bool(self.out[group].isnan().all()), f"group {group} has numbers"
            elif self.scales is not None:
                fp8_close(self.out[group], want[group], sizes[group])
            elif self.out[group].numel():
                close(self.out[group], want[group], max(rows.stop - rows.start, 1))
        finite = sum(self.out[group].numel() for group in range(len(self.ends)) if group not in nan)
        assert int((~self.frame.isnan()).sum()) == finite, "outside of the result"


# Groups without rows, with one, and on both sides of blocks of K; sides on both sides of tiles.
COUNTS = (0, 1, 63, 64, 65, 0, 129, 500, 2, 0)
SIDES = ((1, 1), (7, 9), (64, 64), (129, 257), (264, 520), (300, 40))
KINDS = (
    ("bf16", "fp32", False, 0),
    ("bf16", "fp32", True, 0),
    ("fp16", "fp16", True, 0),
    ("bf16", "bf16", False, 3),
    ("bf16", "bf16", True, 0),
    ("e4m3", "fp32", True, 0),
    ("e5m2", "bf16", False, 0),
    ("e4m3", "fp16", True, 1),
)
KIND_IDS = ["-".join(str(part) for part in kind) for kind in KINDS]


def problem(kind: tuple[str, str, bool, int]) -> Problem:
    dtype, out, c, _ = kind
    scales = "1x128" if dtype in FP8 else "none"
    return Problem(OP, 8, 8, 8, dtype, dtype, out, groups=1, c=c, a_scale=scales, b_scale=scales)


def configs(kind: tuple[str, str, bool, int]) -> list[Config]:
    return list(list_choice.legal([k_groups.variant_of(problem(kind))]))


CONFIGS = [(kind, config) for kind in KINDS for config in configs(kind)]


def specs(_: Gpu) -> set[KernelSpec]:
    made = {dense.spec(config, k_groups.variant_of(problem(kind))) for kind, config in CONFIGS}
    return made | {k_groups.setup_spec(size) for size in (1, 2)}


def counts_for(dtype: str) -> list[int]:
    """fp8 groups are whole blocks, but for the end of all rows."""
    return [0, 128, 384, 0, 256, 1024, 77] if dtype in FP8 else list(COUNTS)


@pytest.mark.parametrize(
    ("kind", "config"),
    CONFIGS,
    ids=[
        f"{'-'.join(map(str, kind))}-{one.rows}x{one.cols}-share{one.share}-blocks{one.blocks_per_sm}-{one.out_parts}"
        for kind, one in CONFIGS
    ],
)
def test_configs_against_float64(kind: tuple[str, str, bool, int], config: Config) -> None:
    dtype, out, c, odd = kind
    counts = counts_for(dtype)
    for m, n in SIDES:
        made = Case(m, n, ends_of(counts), sum(counts), dtype, out, c, odd)
        made.run(config)
        made.check()


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_as_users_call_it(kind: tuple[str, str, bool, int]) -> None:
    dtype, out, c, odd = kind
    counts = counts_for(dtype)
    spare = 0 if dtype in FP8 else 5
    for m, n in SIDES:
        made = Case(m, n, ends_of(counts), sum(counts) + spare, dtype, out, c, odd)
        if spare:  # rows of no group
            made.a[-spare:], made.b[-spare:] = NAN, NAN
        made.call()
        if spare:
            made.a[-spare:], made.b[-spare:] = 0.0, 0.0
        made.check()
        fresh = omnigemm.grouped_gemm_k_contiguous(
            made.a, made.b, made.index, made.c, out_dtype=DTYPES[out], backend="cuda", **made.words
        )
        assert torch.equal(fresh, made.out)


def test_the_neighbours_rows_are_not_read_into_a_group() -> None:
    """Infinities next to a group would make NaN of its zeros."""
    made = Case(72, 136, ends_of([70, 30, 101]), 201)
    made.a[70:100], made.b[70:100] = float("inf"), NAN
    made.call()
    first, last = made.out[0].clone(), made.out[2].clone()
    made.a[70:100], made.b[70:100] = 0.0, 0.0
    made.call()
    assert torch.equal(first, made.out[0])
    assert torch.equal(last, made.out[2])
    made.check()


@pytest.mark.parametrize("ends", [[7, 3, 900, 20], [-5, -1, 9], [2**31 - 1, 0, 5], [-(2**31), 300, 301]], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_bad_ends(dtype: str, ends: list[int]) -> None:
    made = Case(130, 72, ends, 300, dtype, c=True)
    made.call()
    made.check()


@pytest.mark.parametrize(
    ("ends", "nan"),
    [
        ([100, 256, 512], (0, 1)),
        ([128, 200, 200, 384], (1, 2, 3)),
        ([128, 100, 9999], ()),
        ([699, 700], (0, 1)),
        ([-1, 64], (1,)),
    ],
    ids=str,
)
def test_fp8_groups_that_share_a_block_are_nan(ends: list[int], nan: tuple[int, ...]) -> None:
    for c in (False, True):
        made = Case(130, 72, ends, 700, "e4m3", "bf16", c, b_dtype="e5m2")
        made.call()
        made.check(nan=nan)


def test_fp8_scales_of_unequal_blocks() -> None:
    """A scale that is taken from a neighbour shows."""
    made = Case(136, 200, [256, 256, 384, 1200], 1200, "e4m3", b_dtype="e5m2")
    assert made.scales is not None
    for one in made.scales:
        one.mul_(2.0 ** torch.arange(one.size(1), device="cuda"))
    made.call()
    made.check()
    made.scales = tuple(one.t().contiguous().t() for one in made.scales)  # type: ignore[assignment]
    made.poison()
    made.call()
    made.check()


@pytest.mark.parametrize("blocks", [16, 17, 18, 19])
def test_fp8_scales_at_any_address(blocks: int) -> None:
    """They are read 16 bytes at a time, from rows that begin anywhere; what lies beside them would show."""
    ends = [128 * end for end in (1, 6, 6, 9, blocks)]
    for m, n in ((520, 264), (40, 1000)):
        made = Case(m, n, ends, 128 * blocks, "e4m3", c=True)
        assert made.scales is not None
        scales = made.scales
        for before in range(4):
            around = [torch.full((one.numel() + 8,), NAN, device="cuda") for one in scales]
            here = [memory[before:][: one.numel()].view_as(one) for memory, one in zip(around, scales, strict=True)]
            made.scales = here[0].copy_(scales[0]), here[1].copy_(scales[1])
            made.poison()
            made.call()
            made.check()


@pytest.mark.parametrize("count", [1, 5, 300, 700, 701, 1500])
def test_many_groups(count: int) -> None:
    source = random.Random(count)
    ends = sorted(source.randint(0, 4000) for _ in range(count))
    made = Case(40, 24, ends, 4000)
    made.call()
    made.check()


def test_few_large_groups() -> None:
    for kind in (("bf16", "fp32"), ("fp16", "fp16"), ("e4m3", "fp32")):
        made = Case(2048, 1096, [4096, 4224, 9000], 9000, *kind, c=True)
        made.call()
        made.check()


def test_no_rows_at_all() -> None:
    for c in (False, True):
        made = Case(40, 24, [0, 0, 0], 0, c=c)
        made.call()
        assert torch.equal(made.out, torch.zeros_like(made.out) if made.c is None else made.c)


@pytest.mark.parametrize("out", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_gradients_are_added_up_in_place(dtype: str, out: str) -> None:
    counts = counts_for(dtype)
    for m, n in ((136, 264), (33, 17)):
        made = Case(m, n, ends_of(counts), sum(counts), dtype, out)
        before = torch.randn(made.out.shape, device="cuda").to(made.out.dtype)
        made.out.copy_(before)
        made.c = made.out
        made.call()
        made.check(before)


def test_odd_strides_and_addresses() -> None:
    room = torch.randn(400, 505, device="cuda").bfloat16()
    made = Case(37, 77, [100, 120, 300], 300)
    ways = [
        (room[:300, 1:38], room[:300, 8:85]),
        (room[:300, 8:45], room.t()[:300, 5:82]),
        (room[:300, ::3][:, :37], torch.randn(77, 300, device="cuda").bfloat16().t()),
    ]
    for a, b in ways:
        made.a, made.b = a, b
        made.poison()
        made.call()
        made.check()
    made.index = torch.tensor([100, 0, 120, 0, 300, 0], dtype=torch.int32, device="cuda")[::2]
    turned = torch.full((3, 77, 37), NAN, device="cuda")
    made.frame, made.out = turned, turned.transpose(1, 2)
    made.call()
    made.check()
    made.c = torch.randn(3, 77, 37, device="cuda").transpose(1, 2)
    made.call()
    made.check()


def test_fp8_rows_that_must_be_copied() -> None:
    made = Case(40, 72, [128, 384, 500], 500, "e4m3")
    made.call()
    first = made.out.clone()
    made.a, made.b = (
        x.view(torch.uint8).contiguous().view(x.dtype) for x in (made.a, made.b)
    )  # the columns lie side by side
    made.poison()
    made.call()
    made.check()
    assert torch.equal(first, made.out)


def test_graph_with_other_ends_and_contents() -> None:
    made = [
        Case(136, 264, ends_of([100, 0, 300, 111]), 600),
        Case(136, 264, [128, 256, 640], 640, "e4m3", c=True),
        Case(65, 40, ends_of([10] * 40), 600, "fp16", "fp16", c=True),
    ]
    for one in made:
        one.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for one in made:
                one.call()
    source = random.Random(0)
    for turn in range(5):
        for one in made:
            if one.scales is None:
                one.ends = sorted(source.randint(0, one.total) for _ in one.ends)
                for x in (one.a, one.b):
                    x.copy_(torch.randn(x.shape, device="cuda") * (turn + 1))
            else:
                one.ends = sorted(128 * source.randint(0, 5) for _ in one.ends)
            one.index.copy_(torch.tensor(one.ends, dtype=torch.int32))
            one.poison()
        graph.replay()
        torch.cuda.synchronize()
        for one in made:
            one.check()


def test_ends_that_the_kernel_before_makes() -> None:
    """Kernels begin while the one before still runs, and must not read its results too early."""
    made = Case(136, 264, ends_of([100, 0, 300, 111]), 600)
    counts = torch.tensor([100, 0, 300, 111], dtype=torch.int32, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        made.index.fill_(-1)
        made.poison()
        busy @ busy
        torch.cumsum(counts, 0, dtype=torch.int32, out=made.index)
        made.call()
        made.check()


def test_calls_that_follow_one_another() -> None:
    """Maps of the call before lie in the same memory: none of them must be used again."""
    made = [
        Case(136, 264, ends_of([100, 0, 300, 111]), 600),
        Case(65, 40, ends_of([10] * 60), 600),
        Case(264, 136, ends_of([300, 0, 300]), 600),
    ]
    for _ in range(30):
        for one in made:
            one.call()
    for one in made:
        one.check()
        one.poison()
        one.call()
        one.check()


def test_streams() -> None:
    on_streams([Case(136, 264, ends_of([100 + i, 0, 300, 111]), 600) for i in range(4)])


def test_results_are_the_same_every_time() -> None:
    made = Case(520, 1000, ends_of([700, 50, 900]), 1650)
    made.call()
    first = made.out.clone()
    for _ in range(10):
        made.call()
        assert torch.equal(made.out, first)


def test_a_capture_that_would_compile_is_refused() -> None:
    made = Case(8, 8, [8], 8)
    config = Config(False, 1, 1, 192, 4)  # that nobody else compiles
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(omnigemm.DeviceError, match="is not compiled yet"), torch.cuda.graph(graph):
        made.run(config)


def test_plans_run_and_say_what_they_take() -> None:
    made = Case(136, 264, ends_of([100, 0, 300, 111]), 600, c=True)
    plan = omnigemm.plan(OP, m=136, n=264, k=600, groups=4, dtype="bf16", beta=1.0, device="cuda", backend="cuda")
    assert plan.workspace_bytes >= 4 * 464
    assert plan.problem == made.problem
    plan.run(made.a, made.b, made.index, made.c, out=made.out)
    made.check()
    assert omnigemm.plan(OP, m=136, n=264, k=600, groups=4, dtype="bf16", device="cuda").backend == "cuda"


@pytest.mark.parametrize("odd", [False, True])
def test_plans_run_in_memory_of_their_callers(odd: bool) -> None:
    """Also where operands are copied first."""
    made = Case(137 if odd else 136, 264, ends_of([100, 0, 300, 111]), 600, c=True)
    made.a = made.a.contiguous()
    words: dict[str, Any] = {"m": made.a.size(1), "n": 264, "k": 600, "groups": 4, "dtype": "bf16", "beta": 1.0}
    plan = omnigemm.plan(OP, **words, device="cuda", backend="cuda")
    room = torch.full((plan.workspace_bytes + 256,), 77, device="cuda", dtype=torch.uint8)
    workspace = room[: plan.workspace_bytes]
    given = made.a, made.b, made.index, made.c
    plan.run(*given, out=made.out, workspace=workspace)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        made.poison()
        plan.run(*given, out=made.out, workspace=workspace)
    if not odd:
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    made.check()
    assert bool((room[plan.workspace_bytes :] == 77).all())
    with pytest.raises(omnigemm.WorkspaceError, match="expected"):
        plan.run(*given, out=made.out, workspace=workspace[:-1])
