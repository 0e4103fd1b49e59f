"""`gemm` in 16 bits beside cuBLAS: which layouts a kernel is for, and who is taken. No GPU is needed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from omnigemm.backends.blas import BlasKernel, estimate
from omnigemm.backends.blas.vendors import VENDORS
from omnigemm.backends.cuda import choice, dense
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.groups import kernels as groups_of
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import Problem, describe

H200, DEVICE = KNOWN["h200"], torch.device("cuda")
TUNE = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "tune.py"))


def gemm(m: int = 16, n: int = 512, k: int = 1024, a: str = "row", b: str = "col", **words: Any) -> Problem:
    return describe("gemm", m=m, n=n, k=k, a_layout=a, b_layout=b, **words)


@pytest.mark.parametrize(
    ("a", "b", "turned"),
    [
        ("row", "col", (False, False)),
        ("col", "col", (True, False)),
        ("row", "row", (False, True)),
        ("col", "row", (True, True)),
    ],
)
def test_layouts_are_the_kernels_own(a: str, b: str, turned: tuple[bool, bool]) -> None:
    variant = dense.variant_of(gemm(a=a, b=b))
    assert (variant.a_turned, variant.b_turned) == turned
    assert variant.turned(swap=False) == turned == variant.turned(swap=True)[::-1]
    assert not dense.variant_of(describe("fp8_gemm", m=1, n=16, k=16, a_layout=a, b_layout=b)).a_turned


def test_what_is_copied_costs_the_copy() -> None:
    fine, strided = (dense.kernels(one, H200)[0] for one in (gemm(), gemm(a="strided")))
    assert "copied" not in fine.supports(gemm(), DEVICE).reason
    assert "copied" in strided.supports(gemm(a="strided"), DEVICE).reason
    assert strided.cost(gemm(a="strided"), DEVICE) > fine.cost(gemm(), DEVICE) + 9e-6
    for odd in (gemm(k=1001), gemm(a="col", m=17), gemm(b="row", n=513)):
        assert "copied" in dense.kernels(odd, H200)[0].supports(odd, DEVICE).reason
    for even in (gemm(a="col", m=16, k=1001, b="row"), gemm(m=17, n=513)):
        assert "copied" not in dense.kernels(even, H200)[0].supports(even, DEVICE).reason


@pytest.mark.parametrize(("ratio", "wins"), [(0.97, True), (1.03, False)])
def test_whoever_was_measured_faster_is_taken(ratio: float, wins: bool) -> None:
    """Whatever the estimates say: both are then compared by what they took in one run."""
    one = gemm(4096, 4096, 7168)
    ours = choice.Choice(Config(False, 2, 1, 128, 4), 1.0, measured=True, against_blas=ratio)
    assert (dense.Sm90Dense(one, ours, H200).cost(one, DEVICE) < estimate.seconds(one)) == wins


def test_batches_must_be_well_ahead_of_the_library() -> None:
    """The tables have no batches, so the model has to be well ahead, whatever the rows."""
    for m in (1, 64, 4096):
        one = gemm(m=m, n=512, k=128, batch=64)
        kernel = dense.kernels(one, H200)[0]
        assert isinstance(kernel, dense.Sm90Dense)
        assert not kernel.choice.measured
        assert kernel.cost(one, DEVICE) == pytest.approx(1.3 * kernel.choice.seconds)
    large = gemm(m=4096, n=4096, k=4096, batch=4)
    assert dense.kernels(large, H200)[0].cost(large, DEVICE) > estimate.seconds(large)


def test_a_batch_is_one_launch() -> None:
    """Which explain says, and which costs less than a launch for each product."""
    single, many = gemm(m=8, n=4096, k=7168), gemm(m=8, n=4096, k=7168, batch=3)
    alone, together = dense.kernels(single, H200)[0], dense.kernels(many, H200)[0]
    assert "one launch for 3 products" in together.supports(many, DEVICE).reason
    assert "launch for" not in alone.supports(single, DEVICE).reason
    assert "_batch_" in together.name
    assert "_batch_" not in alone.name
    assert isinstance(together, dense.Sm90Dense)
    assert together.choice.seconds < 3 * choice.modelled(dense.variant_of(single), 8, H200)[0].seconds
    (spec,) = dense.specs(many, H200)
    assert spec.name == f"omnigemm_{together.name}"


def test_estimates_grow_with_the_work() -> None:
    base = estimate.seconds(gemm())
    assert base < estimate.seconds(gemm(n=50000)) < estimate.seconds(gemm(n=50000, out_dtype="fp32"))
    assert base < estimate.seconds(gemm(batch=1000))
    assert estimate.seconds(describe("grouped_gemm", m=64, n=64, k=64, groups=8), calls=8) > 8 * 4e-6


@pytest.mark.parametrize("op", ["grouped_gemm_contiguous", "grouped_gemm_masked"])
@pytest.mark.parametrize("m", [8, 1024, 65536])
def test_groups_are_never_left_to_a_library_that_waits(op: str, m: int) -> None:
    """Which it must, to learn their rows; no graph could capture that."""
    library = BlasKernel("nvidia", VENDORS["nvidia"], cast("Any", None), cast("Any", _AtOnce()))
    for n, k, groups in ((4096, 2048, 8), (7168, 3072, 4), (576, 64, 256)):
        one = describe(op, m=m, n=n, k=k, groups=groups, dtype="bf16")
        assert groups_of(one, H200)[0].cost(one, DEVICE) < library.cost(one, DEVICE)


class _AtOnce:
    def in_one_call(self, *_: object) -> bool:
        return True


def test_rows_of_contiguous_groups_are_counted_once() -> None:
    one, many = (describe("grouped_gemm_contiguous", m=4096, n=64, k=64, groups=g, dtype="bf16") for g in (1, 256))
    assert estimate.seconds(many) < 2 * estimate.seconds(one)


def test_random_shapes_are_the_same_every_time() -> None:
    first, second = (list(TUNE["shapes_at_random"](("block", "16"), 20, 1)) for _ in range(2))
    assert first == second
    assert len({one[1:] for one in first}) == 20
    assert {one[0] for one in first} == {"block", "16"}
    assert min(one[1] for one in first) < 16 < 1024 < max(one[1] for one in first)


@pytest.mark.parametrize(("ratio", "wins"), [(0.96, True), (0.98, False)])
def test_a_lead_must_be_more_than_noise(ratio: float, wins: bool) -> None:
    one, unused = gemm(4096, 4096, 7168), cast("Any", None)
    library = BlasKernel("nvidia", VENDORS["nvidia"], unused, unused)
    ours = choice.Choice(Config(False, 2, 1, 128, 4), 1.0, measured=True, against_blas=ratio)
    assert (dense.Sm90Dense(one, ours, H200).cost(one, DEVICE) < library.cost(one, DEVICE)) == wins
