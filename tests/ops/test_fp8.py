"""fp8_gemm against float64: granularities, both fp8 types, special values, and weights that change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import omnigemm
import reference
from omnigemm.backends.cpu.prepared import store
from op_support import (
    E4M3,
    E5M2,
    FLOATS,
    GRANULARITIES,
    LAYOUTS,
    NAN,
    ONE_ROUNDING,
    READ_LAYOUTS,
    SHAPES,
    assert_accumulated,
    floats,
    fp8_scales,
    fp8s,
    guarded,
    laid_out,
    roundings,
    scales,
)


@pytest.fixture(params=["cached", "uncached"], autouse=True)
def _weight_cache(request: pytest.FixtureRequest) -> object:
    """Every test runs with a prepared copy of the weight and without."""
    store.clear()
    with omnigemm.settings(weight_cache_mib=0 if request.param == "uncached" else 64):
        yield
    store.clear()


def check(
    result: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | float,
    b_scale: Tensor | float,
    bias: Tensor | None = None,
) -> None:
    exact = reference.fp8_gemm(a, b, a_scale, b_scale, bias)
    magnitude = reference.fp8_gemm(
        a.float().abs(), b.float().abs(), a_scale, b_scale, None if bias is None else bias.abs()
    )
    assert_accumulated(result, exact, magnitude, a.size(1))


@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 300, 260), (2, 129, 384), (3, 128, 129)])
def test_shapes(shape: tuple[int, int, int], kinds: tuple[str, str]) -> None:
    m, n, k = shape
    a, b = fp8s(m, k), fp8s(n, k)
    a_scale, b_scale = fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k)
    for bias in (None, floats(n)):
        for out_dtype in FLOATS:
            result = omnigemm.fp8_gemm(a, b, a_scale, b_scale, bias=bias, out_dtype=out_dtype)
            assert result.dtype == out_dtype
            check(result, a, b, a_scale, b_scale, bias)


@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
@pytest.mark.parametrize("b_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
def test_types_mix(a_dtype: torch.dtype, b_dtype: torch.dtype, kinds: tuple[str, str]) -> None:
    m, n, k = 9, 140, 200
    a, b = fp8s(m, k, dtype=a_dtype), fp8s(n, k, dtype=b_dtype)
    a_scale, b_scale = fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k)
    result = omnigemm.fp8_gemm(a, b, a_scale, b_scale)
    assert result.dtype == torch.bfloat16
    check(result, a, b, a_scale, b_scale)
    check(omnigemm.fp8_gemm(a, b, a_scale, b_scale, out_dtype=torch.float32), a, b, a_scale, b_scale)


@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_bias_types(bias_dtype: torch.dtype) -> None:
    a, b, bias = fp8s(5, 40), fp8s(7, 40), floats(7, dtype=bias_dtype)
    for out_dtype in FLOATS:
        check(omnigemm.fp8_gemm(a, b, 0.5, 0.25, bias=bias, out_dtype=out_dtype), a, b, 0.5, 0.25, bias)


def test_one_value_has_many_forms() -> None:
    a, b = fp8s(5, 40), fp8s(7, 40)
    for one in (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])):
        check(omnigemm.fp8_gemm(a, b, one, one), a, b, 0.5, 0.5)
    rows, columns = scales(5), scales(7)
    check(omnigemm.fp8_gemm(a, b, rows[:, None], columns[:, None]), a, b, rows, columns)
    check(omnigemm.fp8_gemm(a, b, rows[:, None], columns), a, b, rows, columns)
    # One block covers all of K: a scale per row and a scale per block of a row are the same thing.
    check(omnigemm.fp8_gemm(a, b, rows[:, None], torch.tensor([[0.5]])), a, b, rows, 0.5)


def test_small_weights_in_one_block() -> None:
    a, b = fp8s(5, 100), fp8s(300, 100)
    a_scale, b_scale = scales(5, 1), scales(3, 1)
    check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)
    first = a[:1]
    check(omnigemm.fp8_gemm(first, b, a_scale[:1], b_scale), first, b, a_scale[:1], b_scale)


@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
@pytest.mark.parametrize("layout", READ_LAYOUTS)
def test_any_strides(layout: str, kinds: tuple[str, str]) -> None:
    for m, n, k in ((6, 133, 150), (1, 133, 150), (6, 1, 150), (6, 133, 1)):
        a_scale, b_scale = fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k)
        if a_scale.dim() == 2:
            a_scale, b_scale = laid_out(a_scale, layout), laid_out(b_scale, layout)
        for other in ("plain", layout):
            a, b = laid_out(fp8s(m, k), layout), laid_out(fp8s(n, k), other)
            check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)
            check(omnigemm.fp8_gemm(b, a, 0.5, 0.25), b, a, 0.5, 0.25)


@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_out(layout: str, kinds: tuple[str, str]) -> None:
    m, n, k = 6, 133, 150
    a, b = fp8s(m, k), fp8s(n, k)
    a_scale, b_scale = fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k)
    out, untouched = guarded((m, n), torch.bfloat16, layout)
    assert omnigemm.fp8_gemm(a, b, a_scale, b_scale, out=out) is out
    check(out, a, b, a_scale, b_scale)
    untouched()
    if a_scale.dim() == 2:  # column-major scales, as some quantisers write them
        a_scale, b_scale = a_scale.t().contiguous().t(), b_scale.t().contiguous().t()
        check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
def test_several_blocks_of_rows(kinds: tuple[str, str]) -> None:
    m, n, k = 5, 270, 140
    a, b, bias = fp8s(m, k), fp8s(n, k), floats(n)
    a_scale, b_scale = fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k)
    check(omnigemm.fp8_gemm(a, b, a_scale, b_scale, bias=bias), a, b, a_scale, b_scale, bias)


@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
def test_nan_stays_in_its_row_and_column(kinds: tuple[str, str]) -> None:
    m, n, k = 6, 5, 140
    a, b = fp8s(m, k), fp8s(n, k)
    a[2, 130], b[4, 3] = NAN, NAN
    result = omnigemm.fp8_gemm(a, b, fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k))
    expected = torch.zeros(m, n, dtype=torch.bool)
    expected[2] = expected[:, 4] = True
    assert torch.equal(result.isnan(), expected)


def test_infinity_of_e5m2() -> None:
    a, b = fp8s(4, 9, dtype=E5M2), fp8s(3, 9).float().abs().add(0.5).to(E4M3)
    a[1, 2], a[3, 0] = float("inf"), float("-inf")
    result = omnigemm.fp8_gemm(a, b, 0.5, 2.0)
    assert bool((result[1] == float("inf")).all())
    assert bool((result[3] == float("-inf")).all())
    assert bool(result[0::2].isfinite().all())


def test_special_scales_pass_through() -> None:
    a, b, a_scale, b_scale = fp8s(4, 140), fp8s(5, 140), scales(4, 2), scales(1, 2)
    a_scale[1, 1] = NAN
    result = omnigemm.fp8_gemm(a, b, a_scale, b_scale)
    assert torch.equal(result.isnan(), torch.tensor([False, True, False, False])[:, None].expand(4, 5))


@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_representable_inputs_are_exact(dtype: torch.dtype, kinds: tuple[str, str]) -> None:
    """Small integers and scales that are powers of two: every partial sum is an fp32 number."""
    m, n, k = 7, 131, 257
    a, b = (torch.randint(-7, 8, size).to(dtype) for size in ((m, k), (n, k)))
    a_scale, b_scale = (
        torch.exp2(torch.randint(-2, 3, tuple(fp8_scales(kind, rows, k).shape)).float())
        for kind, rows in zip(kinds, (m, n), strict=True)
    )
    exact = reference.fp8_gemm(a, b, a_scale, b_scale)
    assert torch.equal(omnigemm.fp8_gemm(a, b, a_scale, b_scale, out_dtype=torch.float32).double(), exact)
    for half in (torch.bfloat16, torch.float16):
        assert roundings(omnigemm.fp8_gemm(a, b, a_scale, b_scale, out_dtype=half), exact) <= ONE_ROUNDING


@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
def test_scales_as_large_and_small_as_the_docs_say(kinds: tuple[str, str]) -> None:
    m, n, k = 5, 131, 200
    for a_size, b_size in ((7e35, 1e-36), (1e-36, 7e35), (2e-38, 1e35), (1e35, 2e-38)):
        a, b = fp8s(m, k), fp8s(n, k)
        a[0, 0], b[0, 0] = 448.0, 448.0
        a_scale = torch.full_like(fp8_scales(kinds[0], m, k), a_size)
        b_scale = torch.full_like(fp8_scales(kinds[1], n, k), b_size)
        check(omnigemm.fp8_gemm(a, b, a_scale, b_scale, out_dtype=torch.float32), a, b, a_scale, b_scale)


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_extreme_values(out_dtype: torch.dtype) -> None:
    k = 257
    for left, right in (
        ((448.0, E4M3), (57344.0, E5M2)),
        ((-448.0, E4M3), (448.0, E4M3)),
        ((2.0**-9, E4M3), (2.0**-16, E5M2)),
    ):
        a, b = torch.full((3, k), left[0]).to(left[1]), torch.full((2, k), right[0]).to(right[1])
        result = omnigemm.fp8_gemm(a, b, 1.0, 1.0, out_dtype=out_dtype)
        assert roundings(result, reference.fp8_gemm(a, b, 1.0, 1.0)) <= ONE_ROUNDING


def _copy(x: Tensor, y: Tensor) -> None:
    x.copy_(y)


def _copy_data(x: Tensor, y: Tensor) -> None:
    x.data.copy_(y)


def _copy_inference(x: Tensor, y: Tensor) -> None:
    with torch.inference_mode():
        x.copy_(y)


@pytest.mark.parametrize("write", [_copy, _copy_data, _copy_inference])
@pytest.mark.parametrize("kinds", GRANULARITIES, ids="-".join)
def test_changed_weights_are_seen(kinds: tuple[str, str], write: Callable[[Tensor, Tensor], None]) -> None:
    m, n, k = 4, 150, 140
    a, b = fp8s(m, k), fp8s(n, k)
    a_scale, b_scale = fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k)
    check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)
    write(b, fp8s(n, k))
    check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)
    write(b_scale, fp8_scales(kinds[1], n, k) + 1)
    check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)
    b[0, 0] = 100.0
    check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)
    other = fp8_scales(kinds[1], n, k) + 2
    check(omnigemm.fp8_gemm(a, b, a_scale, other), a, b, a_scale, other)


def test_the_same_weight_with_another_granularity() -> None:
    a, b = fp8s(4, 200), fp8s(150, 200)
    for a_kind, b_kind in (*GRANULARITIES, *GRANULARITIES):
        a_scale, b_scale = fp8_scales(a_kind, 4, 200), fp8_scales(b_kind, 150, 200)
        check(omnigemm.fp8_gemm(a, b, a_scale, b_scale), a, b, a_scale, b_scale)


def test_the_setting_decides_about_copies() -> None:
    a, b = fp8s(4, 20), fp8s(15, 20)
    with omnigemm.settings(weight_cache_mib=0):
        omnigemm.fp8_gemm(a, b, 1.0, 0.5)
        assert store.nbytes() == 0
    with omnigemm.settings(weight_cache_mib=1):
        omnigemm.fp8_gemm(a, b, 1.0, 0.5)
        assert store.nbytes() == 4 * b.numel()


def test_no_copies_means_that_every_write_is_seen() -> None:
    """Even one past the version counter and between the samples, after a copy was made."""
    a, b = fp8s(4, 200), fp8s(150, 200)
    with omnigemm.settings(weight_cache_mib=1):
        omnigemm.fp8_gemm(a, b, 1.0, 0.5)
    b.data[1, 1] = 100.0
    with omnigemm.settings(weight_cache_mib=0):
        check(omnigemm.fp8_gemm(a, b, 1.0, 0.5), a, b, 1.0, 0.5)


def test_one_storage_two_views() -> None:
    """Prepared copies belong to a tensor, not to an address."""
    both = fp8s(2, 64, 48)
    a = fp8s(3, 48)
    for _ in range(2):
        for view in (both[0], both[1], both[0, :32], both[:, 0]):
            check(omnigemm.fp8_gemm(a, view, 1.0, 0.5), a, view, 1.0, 0.5)
    square = fp8s(48, 48)
    check(omnigemm.fp8_gemm(a, square, 1.0, 0.5), a, square, 1.0, 0.5)
    check(omnigemm.fp8_gemm(a, square.t(), 1.0, 0.5), a, square.t(), 1.0, 0.5)
