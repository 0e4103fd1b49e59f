"""Which config is chosen for groups of rows, on a GPU that need not be here."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from omnigemm.backends.blas import estimate
from omnigemm.backends.cuda import explain_on, group_choice, groups
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.group_choice import Sizes
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import Problem, describe
from omnigemm.core.settings import settings

H200 = KNOWN["h200"]
KINDS = [("e4m3", "128x128"), ("e4m3", "token"), ("e5m2", "1x128"), ("int8", "token"), ("bf16", None), ("fp16", None)]

# What sweeps on an H200 found within 3 % of the best of their configs (docs/kernels/sm90_groups.md): the model must
# pick one of these. Of three more shapes of the last sweep it picks what took 4 or 5 % longer than the best. G x rows x
# N x K, without scales in bf16: tiles, with L or R for what clusters share, and blocks on a multiprocessor.
MEASURED = {
    "masked 128x128 G32x20x4096x2048": "swap 128x32, swap 64x32 b2, swap 64x32 b3, swap 128x48, rows 64x128 b2",
    "masked 128x128 G128x4x7168x2048": "swap 128x8, swap 64x8 b2, swap 64x8 b3",
    "masked 128x128 G256x1x7168x2048": "swap 128x8, swap 64x8 b2, swap 64x8 b3",
    "masked 128x128 G64x16x4096x7168": "swap 64x24 b2, swap 128x24, swap 128x32, swap 64x24, swap 64x32 b2",
    "masked 128x128 G32x160x4096x7168": "rows 256x128 L2, rows 256x128",
    "masked 128x128 G32x192x6144x7168": "rows 256x128 L2, rows 256x128",
    "masked 128x128 G32x192x7168x3072": "rows 256x128 L2, rows 256x128",
    "masked 128x128 G32x192x4096x2048": "rows 256x128 L2, rows 256x128",
    "masked 128x128 G32x400x4096x7168": "rows 128x192",
    "masked 128x128 G6x1024x6144x7168": "rows 256x128 L2",
    "masked 128x128 G6x1024x4096x2048": "rows 256x128 L2, rows 256x128",
    "masked 128x128 G6x1024x7168x3072": "rows 256x128 L2, rows 128x192, rows 256x128",
    "contiguous 128x128 G16x256x4096x4096": "rows 128x192",
    "contiguous 128x128 G4x8192x7168x3072": "rows 256x128 L2, rows 256x128",
    "contiguous 128x128 G8x4096x4096x2048": "rows 256x128 L2, rows 256x128",
    "contiguous token G6x1024x6144x7168": "rows 128x192, rows 128x192 R2, rows 128x160, rows 256x128 L2",
    "contiguous token G6x1024x4096x2048": "rows 256x128 L2, rows 256x128, rows 128x192",
    "contiguous token G32x192x6144x7168": "rows 256x128 L2, rows 256x128, rows 128x192 R2",
    "contiguous token G16x400x4096x4096": "rows 128x192, rows 256x128, rows 128x160",
    "masked 128x128 G256x16x7168x2048": "swap 128x24, swap 128x32, swap 64x24, swap 64x24 b2, swap 64x32",
    "contiguous token G64x16x7168x2048": "swap 128x32, swap 64x24 b3, swap 64x32 b3, swap 128x24, swap 64x24 b2",
    "contiguous None G256x16x7168x2048": "swap 128x24, swap 128x32, swap 64x24 b2, swap 64x24, swap 64x32 b2",
    "contiguous None G64x16x4096x7168": "swap 64x24 b2, swap 128x24, swap 128x32, swap 64x32 b2, swap 64x24",
    "contiguous None G64x8x7168x2048": "swap 128x24, swap 128x16, swap 64x24 b2, swap 64x16 b2, swap 64x24, swap 64x16",
    "contiguous None G64x32x7168x2048": "swap 128x48, swap 128x64, swap 64x48 b2, rows 64x256",
    "contiguous None G6x1024x6144x7168": "pingpong 128x128 R2, rows 128x192, rows 128x256, pingpong 128x128 L2",
    "contiguous None G6x1024x4096x2048": "pingpong 128x128 L2",
    "contiguous None G6x1024x7168x3072": "rows 128x256, pingpong 128x128 L2",
    "contiguous None G32x192x6144x7168": "rows 128x160 R2, rows 128x256 R2, rows 128x144 R2",
    "contiguous None G32x192x7168x3072": "pingpong 128x128 R2, rows 128x160 R2, rows 128x256 R2",
    "contiguous None G32x192x4096x2048": "pingpong 128x128 R2, rows 128x256 R2",
    "contiguous None G4x8192x6144x7168": "rows 128x256, pingpong 128x128 R2, rows 128x256 R2, rows 128x192 R2",
    "contiguous None G16x400x4096x4096": "pingpong 128x128 L2",
    "contiguous None G8x4096x6144x7168": "rows 128x256 R2, rows 128x256, pingpong 128x128 R2, rows 128x192 R2",
    "contiguous None G32x150x7168x2048": "pingpong 128x128 L2",
}


def name(config: Config) -> str:
    share = f" L{config.left_share}" * (config.left_share > 1) + f" R{config.right_share}" * (config.right_share > 1)
    way = "swap" if config.swap else "pingpong" if config.pingpong else "rows"
    return f"{way} {config.rows}x{config.cols}{share}" + f" b{config.blocks_per_sm}" * (config.blocks_per_sm > 1)


def problem(
    op: str, count: int, rows: int, n: int, k: int, dtype: str = "e4m3", granularity: str | None = "128x128"
) -> Problem:
    masked = op == "masked"
    return describe(
        f"grouped_gemm_{op}", m=2 * rows if masked else count * rows, n=n, k=k, groups=count, dtype=dtype,
        granularity=granularity, expected_m=rows if masked else None,
    )  # fmt: skip


@pytest.mark.parametrize("title", MEASURED)
def test_the_model_picks_what_a_sweep_found_fast(title: str) -> None:
    op, granularity, shape = title.split()
    count, rows, n, k = map(int, shape[1:].split("x"))
    scaled = granularity != "None"
    one = problem(op, count, rows, n, k, "e4m3" if scaled else "bf16", granularity if scaled else None)
    ranked = group_choice.modelled(groups.variant_of(one), groups.sizes_of(one), H200)
    assert name(ranked[0].config) in MEASURED[title].split(", ")


@pytest.mark.parametrize(("dtype", "granularity"), KINDS)
@pytest.mark.parametrize("op", ["contiguous", "masked"])
def test_whatever_is_chosen_is_legal(op: str, dtype: str, granularity: str | None) -> None:
    for count, rows, (n, k) in itertools.product((1, 40, 700, 8192), (1, 9, 70, 200, 3000), ((1, 1), (264, 1000))):
        one = problem(op, count, rows, n, k, dtype, granularity)
        variant = groups.variant_of(one)
        ranked = group_choice.modelled(variant, groups.sizes_of(one), H200)
        assert ranked
        assert [choice.seconds for choice in ranked] == sorted(choice.seconds for choice in ranked)
        for choice in ranked:
            assert variant.fault(choice.config) is None
            room = variant.shared_bytes(choice.config) + group_choice.table_bytes(choice.config, count) + 1024
            assert choice.config.blocks_per_sm * room <= 228 * 1024


@pytest.mark.parametrize(("dtype", "granularity"), KINDS)
def test_few_rows_swap_operands_and_many_do_not(dtype: str, granularity: str | None) -> None:
    for op, rows in itertools.product(("contiguous", "masked"), (1, 4, 16, 24, 300, 5000)):
        (first, *_) = groups.kernels(problem(op, 32, rows, 4096, 4096, dtype, granularity), H200)
        assert isinstance(first, groups.Sm90Groups)
        assert first.choice.config.swap == (rows < 64)


@pytest.mark.parametrize(
    ("rows", "k", "fetch"),
    [(1, 2048, 128), (4, 7168, 128), (16, 2048, 128), (20, 2048, 128), (20, 7168, 128), (192, 7168, 256)],
)
def test_what_l2_takes_at_a_time_is_what_a_sweep_found_fast(rows: int, k: int, fetch: int) -> None:
    (first, *_) = groups.kernels(problem("masked", 64, rows, 4096, k), H200)
    assert isinstance(first, groups.Sm90Groups)
    assert first.choice.config.fetch == fetch


@pytest.mark.parametrize("rows", [1, 4, 16, 20])
def test_rings_of_few_tokens_are_even(rows: int) -> None:
    """With odd numbers of stages all of them took up to 1 % longer."""
    for op, count, k in itertools.product(("contiguous", "masked"), (32, 256), (2048, 7168)):
        for dtype, granularity in KINDS:
            (first, *_) = groups.kernels(problem(op, count, rows, 4096, k, dtype, granularity), H200)
            assert isinstance(first, groups.Sm90Groups)
            assert first.choice.config.cols <= 32
            assert first.choice.config.stages in (6, 8, 10)


@pytest.mark.parametrize(("rows", "early"), [(1, True), (20, True), (100, True), (192, False), (1000, False)])
def test_weights_are_read_early_where_they_are_constant(rows: int, early: bool) -> None:
    """With some rows blocks share them, and with many there is nothing to gain."""
    one = problem("masked", 64, rows, 4096, 7168, granularity="token")
    assert not any(found.choice.early for found in groups.kernels(one, H200))
    with settings(constant_weights=True):
        first, *others = groups.kernels(one, H200)
        assert first.choice.early == (first.choice.config.stages if early else 0)
        assert not any(found.choice.early for found in others if found.choice.config.cluster > 1 or rows > 512)
        words = f"{first.choice.early} stages of weights are read before"
        assert (words in str(explain_on(one, H200))) == early
        assert "stages of weights are read before" not in str(explain_on(dataclasses.replace(one, k=7160), H200))


def test_what_is_expected_of_masked_groups_decides() -> None:
    one = problem("masked", 32, 4, 4096, 4096)
    assert "for 4 rows in a group" in str(explain_on(one, H200))
    assert "contiguous" not in str(explain_on(one, H200))
    unknown = dataclasses.replace(one, m=512, expected_m=0)
    assert "for 512 rows in a group" in str(explain_on(unknown, H200))
    assert groups.sizes_of(dataclasses.replace(unknown, expected_m=1000)).rows == 512


def test_16_bit_weights_either_way_are_not_copied() -> None:
    one = problem("contiguous", 8, 300, 4096, 4096, "bf16", None)
    assert "copied" not in str(explain_on(one, H200))
    turned = dataclasses.replace(one, b_layout="col")
    assert "copied" not in str(explain_on(turned, H200))
    assert "sm90_bf16_nt_contiguous" in str(explain_on(turned, H200))
    for other in (dataclasses.replace(turned, k=4104), dataclasses.replace(turned, n=4092)):
        assert "operands are copied" in str(explain_on(other, H200))
        assert not groups.variant_of(other).b_turned


def test_rows_by_chance() -> None:
    sizes = Sizes.by_chance(256, 256)
    assert 150 < sizes.used < 170  # many groups have none
    assert sizes.used * sizes.rows == pytest.approx(256)
    assert Sizes.by_chance(4, 40000).used == pytest.approx(4)
    assert min(Sizes(9, 9, 1.0).spread()) == 1


def test_more_groups_and_more_rows_take_longer() -> None:
    def seconds(count: int, rows: int) -> float:
        one = problem("masked", count, rows, 4096, 4096)
        return group_choice.choices(groups.variant_of(one), groups.sizes_of(one), H200)[0].seconds

    times = [seconds(count, rows) for count, rows in ((8, 4), (64, 4), (64, 40), (64, 400), (64, 4000))]
    assert times == sorted(times)


@pytest.mark.parametrize("layout", ["row", "col", "strided"])
def test_16_bit_groups_cost_less_than_a_blas_that_waits(layout: str) -> None:
    for op, rows in itertools.product(("contiguous", "masked"), (1, 200, 9000)):
        one = dataclasses.replace(problem(op, 8, rows, 4096, 4096, "bf16", None), b_layout=layout)
        (first, *_) = groups.kernels(one, H200)
        assert first.cost(one, torch.device("cuda")) < estimate.seconds(one)
