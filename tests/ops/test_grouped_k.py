"""Groups along K: A^T B of each group's rows, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import omnigemm
import reference
from op_support import (
    E4M3,
    E5M2,
    FLOATS,
    HALVES,
    LAYOUTS,
    NAN,
    READ_LAYOUTS,
    assert_accumulated,
    floats,
    fp8s,
    guarded,
    indices,
    laid_out,
    scales,
)

# Rows of each group: none, one, an odd number, none at the end, and rows of nobody after them.
COUNTS = ((5, 0, 1, 17, 0), (0, 0), (7,), (64, 3))
SIZES = ((1, 1), (7, 9), (33, 16), (0, 5), (5, 0), (64, 129))
product = omnigemm.grouped_gemm_k_contiguous


def ends_of(counts: tuple[int, ...]) -> Tensor:
    return indices(counts).cumsum(0, dtype=torch.int32)


def parts(ends: Tensor) -> list[slice]:
    last, found = 0, []
    for end in ends.tolist():
        found.append(slice(last, end))
        last = end
    return found


def check(result: Tensor, a: Tensor, b: Tensor, ends: Tensor, c: Tensor | None = None) -> None:
    """Of 16-bit and fp32 operands."""
    for group, rows in enumerate(parts(ends)):
        own = None if c is None else c[group]
        beta = 0.0 if c is None else 1.0
        exact = reference.gemm(a[rows].t(), b[rows], own, 1.0, beta)
        size = reference.gemm(a[rows].abs().t(), b[rows].abs(), None if own is None else own.abs(), 1.0, beta)
        assert_accumulated(result[group], exact, size, rows.stop - rows.start)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_against_float64(dtype: torch.dtype, size: tuple[int, int], counts: tuple[int, ...]) -> None:
    (m, n), total = size, sum(counts) + 2
    a, b, ends = floats(total, m, dtype=dtype), floats(total, n, dtype=dtype), ends_of(counts)
    a[-2:], b[-2:] = NAN, NAN  # rows of no group
    result = product(a, b, ends)
    assert result.dtype == torch.float32
    assert result.shape == (len(counts), m, n)
    check(result, a, b, ends)
    for out_dtype in FLOATS:
        check(product(a, b, ends, out_dtype=out_dtype), a, b, ends)


@pytest.mark.parametrize("layout", READ_LAYOUTS)
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", HALVES)
def test_strides_and_c_into_a_guarded_result(dtype: torch.dtype, out_dtype: torch.dtype, layout: str) -> None:
    ends = ends_of((5, 0, 12))
    a, b = laid_out(floats(17, 6, dtype=dtype), layout), laid_out(floats(17, 10, dtype=dtype), layout)
    c = laid_out(floats(3, 6, 10, dtype=out_dtype), layout)
    for added in (None, c):
        out, untouched = guarded((3, 6, 10), out_dtype, layout if layout in LAYOUTS else "columns")
        assert product(a, b, ends, added, out=out) is out
        check(out, a, b, ends, added)
        untouched()


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_added_up_in_place(dtype: torch.dtype) -> None:
    a, b, ends = floats(9, 4, dtype=dtype), floats(9, 6, dtype=dtype), ends_of((2, 0, 7))
    for out_dtype in FLOATS:
        c = floats(3, 4, 6, dtype=out_dtype)
        before = c.clone()
        assert product(a, b, ends, c, out=c) is c
        check(c, a, b, ends, before)
        assert torch.equal(c[1], before[1])  # no rows


def test_the_result_has_the_type_of_out_then_c_then_fp32() -> None:
    a, b, ends = floats(3, 4).bfloat16(), floats(3, 5).bfloat16(), indices([1, 3])
    c = floats(2, 4, 5).bfloat16()
    assert product(a, b, ends).dtype == torch.float32
    assert product(a, b, ends, c).dtype == torch.bfloat16
    assert product(a, b, ends, out=torch.empty(2, 4, 5, dtype=torch.float16)).dtype == torch.float16


def test_no_groups_and_no_rows() -> None:
    a, b = floats(4, 3), floats(4, 5)
    assert product(a, b, indices([])).shape == (0, 3, 5)
    none = product(a[:0], b[:0], indices([0, 0]))
    assert torch.equal(none, torch.zeros(2, 3, 5))


# ------------------------------------------------------------------------------------------------------ fp8

FP8_COUNTS = ((128, 0, 256, 128), (256, 100), (77,), (128, 128))


@pytest.mark.parametrize("counts", FP8_COUNTS, ids=str)
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2-e4m3"])
@pytest.mark.parametrize("layout", READ_LAYOUTS)
def test_fp8_against_float64(kinds: tuple[torch.dtype, torch.dtype], counts: tuple[int, ...], layout: str) -> None:
    m, n, total = 9, 20, sum(counts)
    ends = ends_of(counts)
    a, b = laid_out(fp8s(total, m, dtype=kinds[0]), layout), laid_out(fp8s(total, n, dtype=kinds[1]), layout)
    a_scale, b_scale = scales(m, -(-total // 128)), scales(n, -(-total // 128))
    left = a.double() * reference.spread(a_scale, m, total).t()
    right = b.double() * reference.spread(b_scale, n, total).t()
    c = floats(len(counts), m, n)
    for added, out_dtype in ((None, None), (None, torch.bfloat16), (c, None)):
        result = product(a, b, ends, added, a_scale=a_scale, b_scale=b_scale, out_dtype=out_dtype)
        assert result.dtype == (out_dtype or torch.float32)
        for group, rows in enumerate(parts(ends)):
            exact, size = left[rows].t() @ right[rows], left[rows].abs().t() @ right[rows].abs()
            if added is not None:
                exact, size = exact + added[group], size + added[group].abs()
            # Each operand is rounded once when its scale is applied.
            assert_accumulated(result[group], exact, size, rows.stop - rows.start, operand_eps=2.0**-23)


@pytest.mark.parametrize("ends", [[100, 256], [0, 64, 256], [127, 128, 200]])
def test_fp8_groups_do_not_share_a_block_of_scales(ends: list[int]) -> None:
    out = torch.full((len(ends), 3, 5), NAN)
    with pytest.raises(omnigemm.ShapeError, match=r"ends\[\d\] is \d+, expected a multiple of 128, or T = 300"):
        product(fp8s(300, 3), fp8s(300, 5), indices(ends), a_scale=scales(3, 3), b_scale=scales(5, 3), out=out)
    assert bool(out.isnan().all())


def test_quantised_along_the_rows() -> None:
    """The way that users come to such operands."""
    x, y, ends = floats(256, 8), floats(256, 12), indices([128, 256])
    (a, a_scale), (b, b_scale) = (omnigemm.quantize_fp8(z.t().contiguous(), granularity="1x128") for z in (x, y))
    result = product(a.t(), b.t(), ends, a_scale=a_scale, b_scale=b_scale)
    want = torch.stack([x[:128].t() @ y[:128], x[128:].t() @ y[128:]])
    assert float((result - want).norm() / want.norm()) < 0.06


# ----------------------------------------------------------------------------------- plans, and what is refused


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_plans(dtype: str) -> None:
    plan = omnigemm.plan("grouped_gemm_k_contiguous", m=6, n=10, k=17, groups=3, dtype=dtype, beta=1.0)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    a, b, ends, c = floats(17, 6, dtype=kind), floats(17, 10, dtype=kind), ends_of((5, 0, 12)), floats(3, 6, 10)
    check(plan.run(a, b, ends, c), a, b, ends, c)
    with pytest.raises(omnigemm.ShapeError, match="not the plan's problem"):
        plan.run(a, b, ends)


def test_fp8_plan() -> None:
    plan = omnigemm.plan("grouped_gemm_k_contiguous", m=6, n=10, k=256, groups=2, dtype="e4m3")
    a, b = fp8s(6, 256).t(), fp8s(10, 256).t()
    assert plan.run(a, b, indices([128, 256]), a_scale=scales(6, 2), b_scale=scales(10, 2)).shape == (2, 6, 10)


def test_explain() -> None:
    found = omnigemm.explain("grouped_gemm_k_contiguous", m=64, n=32, k=1000, groups=4)
    assert found.chosen is not None
    assert "a loop over the groups" in found.chosen.reason
    assert found.problem.out_dtype == "fp32"
