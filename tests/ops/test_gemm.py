"""gemm against float64: shapes, dtypes, strides, batches, alpha, beta and c."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import omnigemm
import reference
from omnigemm.backends.cpu.dense import KERNELS
from omnigemm.backends.cpu.kernel import CpuKernel
from op_support import (
    FLOATS,
    LAYOUTS,
    NAN,
    READ_LAYOUTS,
    SHAPES,
    assert_accumulated,
    assert_no_worse,
    floats,
    guarded,
    laid_out,
    scales,
)

BATCHES = (
    ((4, 5, 7), (4, 7, 3)),
    ((1, 5, 7), (4, 7, 3)),
    ((4, 5, 7), (1, 7, 3)),
    ((4, 5, 7), (7, 3)),
    ((5, 7), (4, 7, 3)),
    ((1, 5, 7), (7, 3)),
    ((1, 5, 7), (1, 7, 3)),
    ((0, 5, 7), (0, 7, 3)),
    ((0, 5, 7), (7, 3)),
    ((3, 0, 7), (3, 7, 2)),
    ((3, 2, 0), (3, 0, 2)),
)


def check(result: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> None:
    exact = reference.gemm(a, b, c, alpha, beta)
    magnitude = reference.gemm(a.abs(), b.abs(), None if c is None else c.abs(), abs(alpha), abs(beta))
    assert_accumulated(result, exact, magnitude, a.size(-1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    a, b = floats(m, k, dtype=dtype), floats(k, n, dtype=dtype)
    result = omnigemm.gemm(a, b)
    assert result.dtype == dtype
    check(result, a, b)
    assert_no_worse(result, reference.gemm(a, b), torch.mm(a, b))
    for out_dtype in FLOATS:
        asked = omnigemm.gemm(a, b, out_dtype=out_dtype)
        assert asked.dtype == out_dtype
        check(asked, a, b)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_is_all_that_is_written(layout: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for m, n, k in ((17, 33, 7), (1, 5, 3), (33, 1, 16), (4, 6, 0), (0, 3, 2)):
        a, b = floats(m, k, dtype=dtype), floats(k, n, dtype=dtype)
        out, untouched = guarded((m, n), out_dtype, layout)
        assert omnigemm.gemm(a, b, out=out) is out
        check(out, a, b)
        untouched()
        c = floats(m, n, dtype=dtype)
        out.fill_(NAN)
        omnigemm.gemm(a, b, c, alpha=-0.5, beta=2.0, out=out)
        check(out, a, b, c, -0.5, 2.0)
        untouched()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("a_layout", READ_LAYOUTS)
@pytest.mark.parametrize("b_layout", READ_LAYOUTS)
def test_any_strides(a_layout: str, b_layout: str, dtype: torch.dtype) -> None:
    for m, n, k in ((9, 17, 33), (1, 17, 33), (9, 1, 33), (9, 17, 1)):
        a, b = laid_out(floats(m, k, dtype=dtype), a_layout), laid_out(floats(k, n, dtype=dtype), b_layout)
        c = laid_out(floats(m, n, dtype=dtype), a_layout)
        for out_dtype in (dtype, torch.float32):
            check(omnigemm.gemm(a, b, out_dtype=out_dtype), a, b)
            check(omnigemm.gemm(a, b, c, alpha=0.5, beta=2.0, out_dtype=out_dtype), a, b, c, 0.5, 2.0)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_of_results_with_one_row_or_column(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for m, n, strides in ((1, 5, (1, 1)), (1, 5, (0, 1)), (5, 1, (1, 1)), (5, 1, (1, 0)), (1, 1, (0, 0))):
        a, b, c = floats(m, 9, dtype=dtype), floats(9, n, dtype=dtype), floats(m, n, dtype=dtype)
        out = torch.full((m * n,), NAN, dtype=out_dtype).as_strided((m, n), strides)
        check(omnigemm.gemm(a, b, out=out), a, b)
        check(omnigemm.gemm(a, b, c, alpha=0.5, beta=2.0, out=out.fill_(NAN)), a, b, c, 0.5, 2.0)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shapes", BATCHES)
def test_batches(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    a, b = floats(*shapes[0], dtype=dtype), floats(*shapes[1], dtype=dtype)
    exact = reference.gemm(a, b)
    check(omnigemm.gemm(a, b, out_dtype=out_dtype), a, b)
    for layout in ("plain", "columns", "transposed"):
        out, untouched = guarded(exact.shape, out_dtype, layout)
        omnigemm.gemm(a, b, out=out)
        check(out, a, b)
        untouched()
        c = floats(*exact.shape, dtype=dtype)
        omnigemm.gemm(a, b, c, alpha=2.0, beta=-1.5, out=out)
        check(out, a, b, c, 2.0, -1.5)
        untouched()


@pytest.mark.parametrize("layout", READ_LAYOUTS)
def test_batches_with_strides(layout: str) -> None:
    a, b = laid_out(floats(3, 5, 7), layout), laid_out(floats(3, 7, 4), layout)
    check(omnigemm.gemm(a, b), a, b)
    check(omnigemm.gemm(a, b[0]), a, b[0])
    # The batch in the middle, as heads of attention come.
    heads_a, heads_b = floats(5, 3, 7).transpose(0, 1), floats(7, 3, 4).transpose(0, 1)
    check(omnigemm.gemm(heads_a, heads_b), heads_a, heads_b)
    out = torch.full((5, 3, 4), NAN).transpose(0, 1)
    check(omnigemm.gemm(heads_a, heads_b, out=out), heads_a, heads_b)


@pytest.mark.parametrize("alpha", [1.0, 0.0, -2.5])
@pytest.mark.parametrize("beta", [1.0, -0.75, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_alpha_beta(dtype: torch.dtype, beta: float, alpha: float) -> None:
    a, b = floats(6, 9, dtype=dtype), floats(9, 4, dtype=dtype)
    for shape in ((6, 4), (4,), (1, 4), (6, 1), (1,), ()):
        c = floats(*shape, dtype=dtype)
        check(omnigemm.gemm(a, b, c, alpha=alpha, beta=beta), a, b, c, alpha, beta)
        check(omnigemm.gemm(a, b, c, alpha=alpha, beta=beta, out_dtype=torch.float32), a, b, c, alpha, beta)
    batched = floats(3, 6, 9, dtype=dtype)
    for whole in ((3, 6, 4), (1, 6, 4), (3, 1, 4), (3, 6, 1), (6, 4), (4,), (3, 1, 1)):
        c = floats(*whole, dtype=dtype)
        check(omnigemm.gemm(batched, b, c, alpha=alpha, beta=beta), batched, b, c, alpha, beta)


@pytest.mark.parametrize("alpha", [0.0, -0.0, 1e-46])
@pytest.mark.parametrize("dtype", FLOATS)
def test_alpha_that_is_0_in_fp32(dtype: torch.dtype, alpha: float) -> None:
    """Sizes at which torch's own batches in bf16 leave the result as it was. Nothing of A and B shows."""
    for lead in ((), (2,)):
        a, b = torch.full((*lead, 64, 16), NAN, dtype=dtype), floats(*lead, 16, 8, dtype=dtype)
        c = floats(*lead, 64, 8, dtype=dtype)
        for out_dtype in (dtype, torch.float32):
            out = torch.full((*lead, 64, 8), 7.0, dtype=out_dtype)
            assert not omnigemm.gemm(a, b, alpha=alpha, out=out).any()
            assert not omnigemm.gemm(a, b, c, alpha=alpha, out_dtype=out_dtype).any()
            want = (0.5 * c.float()).to(out_dtype)
            assert torch.equal(omnigemm.gemm(a, b, c, alpha=alpha, beta=0.5, out_dtype=out_dtype), want)


def test_c_may_have_the_type_of_the_result() -> None:
    a, b = floats(5, 6, dtype=torch.bfloat16), floats(6, 7, dtype=torch.bfloat16)
    c = floats(5, 7)
    result = omnigemm.gemm(a, b, c, beta=1.0, out_dtype=torch.float32)
    check(result, a, b, c, 1.0, 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_alpha_beyond_the_range_of_fp16(dtype: torch.dtype, scale: float) -> None:
    size = 1.0 / scale**0.5
    a, b, c = (torch.full((4, 4), size).to(dtype) for _ in range(3))
    if bool((a == 0).any() | a.isinf().any()):
        pytest.skip("the operands are not representable")
    check(omnigemm.gemm(a, b, alpha=scale), a, b, None, scale)
    if scale > 1:
        check(omnigemm.gemm(a, b, c, alpha=scale, beta=scale / 1e3), a, b, c, scale, scale / 1e3)


@pytest.mark.parametrize("alpha", [1e20, -1e20, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_sum_is_multiplied_by_alpha(dtype: torch.dtype, alpha: float) -> None:
    """Which may bring it back to what the result has room for, where an operand times alpha would have none."""
    large, small = (1e30, 1e-30) if alpha**2 > 1 else (1e-30, 1e30)
    for lead, m, n in (((), 4, 8), ((), 1, 8), ((), 64, 64), ((3,), 4, 8)):
        a, b = torch.full((*lead, m, 64), large).to(dtype), torch.full((*lead, 64, n), small).to(dtype)
        c = floats(*lead, m, n, dtype=dtype)
        for right in (b, b.mT.contiguous().mT):
            check(omnigemm.gemm(a, right, alpha=alpha), a, b, None, alpha)
            check(omnigemm.gemm(a, right, c, alpha=alpha, beta=2.0), a, b, c, alpha, 2.0)


@pytest.mark.parametrize("beta", [1e5, 0.1, 1e-7, -1.2345678])
@pytest.mark.parametrize("dtype", FLOATS)
def test_without_k_beta_is_not_rounded(dtype: torch.dtype, beta: float) -> None:
    for a_lead, b_lead in (((), ()), ((3,), (3,)), ((3,), ())):
        a, b = floats(*a_lead, 4, 0, dtype=dtype), floats(*b_lead, 0, 6, dtype=dtype)
        for shape in ((*a_lead, 4, 6), (6,), ()):
            c = (0.01 * scales(*shape)).to(dtype)
            check(omnigemm.gemm(a, b, c, beta=beta), a, b, c, 1.0, beta)
        c = (0.01 * scales(*a_lead, 4, 6)).to(dtype)
        before = c.clone()
        check(omnigemm.gemm(a, b, c, alpha=2.0, beta=beta, out=c), a, b, before, 2.0, beta)
        c.fill_(NAN)
        assert bool((omnigemm.gemm(a, b, c) == 0).all())  # not read


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_c_is_not_read_when_beta_is_0(dtype: torch.dtype, poison: float) -> None:
    for lead in ((), (3,)):
        a, b = floats(*lead, 5, 7, dtype=dtype), floats(*lead, 7, 4, dtype=dtype)
        c = torch.full((*lead, 5, 4), poison, dtype=dtype)
        for alpha in (1.0, 2.0):
            check(omnigemm.gemm(a, b, c, alpha=alpha, beta=0.0), a, b, None, alpha)
            check(omnigemm.gemm(a, b, c, alpha=alpha, out=c.clone()), a, b, None, alpha)
            check(omnigemm.gemm(a, b, c, alpha=alpha, out_dtype=torch.float32), a, b, None, alpha)
    shared = floats(3, 5, 7, dtype=dtype)
    one = floats(7, 4, dtype=dtype)
    check(omnigemm.gemm(shared, one, torch.full((3, 5, 4), poison, dtype=dtype)), shared, one)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_out_may_be_c(dtype: torch.dtype, layout: str) -> None:
    for a_lead, b_lead in (((), ()), ((3,), (3,)), ((3,), ())):
        a, b = floats(*a_lead, 6, 9, dtype=dtype), floats(*b_lead, 9, 4, dtype=dtype)
        out, untouched = guarded((*a_lead, 6, 4), dtype, layout)
        before = floats(*out.shape, dtype=dtype)
        out.copy_(before)
        omnigemm.gemm(a, b, out, alpha=0.5, beta=-2.0, out=out)
        check(out, a, b, before, 0.5, -2.0)
        untouched()
    a, b = floats(6, 9, dtype=dtype), floats(9, 4, dtype=dtype)
    total = floats(6, 4)
    before = total.clone()
    omnigemm.gemm(a, b, total, beta=1.0, out=total)
    check(total, a, b, before, 1.0, 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_stays_in_its_row_and_column(dtype: torch.dtype) -> None:
    a, b = floats(5, 8, dtype=dtype), floats(8, 6, dtype=dtype)
    a[2, 3] = NAN
    b[1, 4] = NAN
    result = omnigemm.gemm(a, b)
    expected = torch.zeros(5, 6, dtype=torch.bool)
    expected[2] = expected[:, 4] = True
    assert torch.equal(result.isnan(), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_small_integers_are_exact(dtype: torch.dtype) -> None:
    a, b = torch.randint(-3, 4, (33, 27)).to(dtype), torch.randint(-3, 4, (27, 17)).to(dtype)
    assert torch.equal(omnigemm.gemm(a, b, out_dtype=torch.float32).double(), reference.gemm(a, b))
    assert torch.equal(omnigemm.gemm(a, b).double(), reference.gemm(a, b))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kernel(kernel: CpuKernel, dtype: torch.dtype) -> None:
    for a_shape, b_shape in (((9, 21), (21, 50)), *BATCHES):
        a, b = floats(*a_shape, dtype=dtype), floats(*b_shape, dtype=dtype)
        exact = reference.gemm(a, b)
        c = floats(*exact.shape, dtype=dtype)
        problem = omnigemm.plan("gemm", m=9, n=50, k=21, dtype=dtype).problem
        assert kernel.accepts(problem)
        launch = kernel.bind(problem)
        for alpha, beta in ((1.0, 0.0), (2.0, 0.0), (1.0, 1.0), (-0.5, 3.0)):
            out, untouched = guarded(exact.shape, dtype, "columns")
            launch(out, a, b, c, alpha, beta)
            check(out, a, b, c, alpha, beta)
            untouched()


def test_a_column_slice_may_share_a_buffer_with_an_input() -> None:
    buffer = floats(9, 16)
    a, b, c = buffer[:, :6], floats(6, 4), buffer[:, 12:]
    before = buffer.clone()
    omnigemm.gemm(a, b, c, beta=1.0, out=buffer[:, 6:10])
    check(buffer[:, 6:10], before[:, :6], b, before[:, 12:], 1.0, 1.0)
    assert torch.equal(buffer[:, :6], before[:, :6])
    assert torch.equal(buffer[:, 10:], before[:, 10:])


def test_slices_of_any_dimension_may_share_a_buffer_with_an_input() -> None:
    """As heads of one projection lie, and columns that are turned."""
    tokens = floats(5, 3, 2, 8)
    query, key, value = (tokens[:, i].transpose(0, 1) for i in range(3))
    want = query @ key.mT @ value
    omnigemm.gemm(omnigemm.gemm(query, key.mT), value, out=key)
    assert torch.allclose(key, want)
    omnigemm.gemm(query, floats(8, 8), out=tokens[:, 1].transpose(0, 1))
    halves = floats(32, 64)
    want = halves[:, 32:].t() @ torch.ones(32, 32)
    assert torch.allclose(omnigemm.gemm(halves[:, 32:].t(), torch.ones(32, 32), out=halves[:, :32].t()), want)
    with pytest.raises(omnigemm.LayoutError, match=r"out \(32, 32\) shares memory with b"):
        omnigemm.gemm(torch.ones(32, 32), halves[:, 32:].t(), out=halves[:, 31:63].t())


def test_row_slices_may_share_a_buffer_with_an_input() -> None:
    buffer = floats(8, 6)
    a, b = buffer[0::2].clone(), floats(6, 6)
    omnigemm.gemm(buffer[0::2], b, out=buffer[1::2])
    check(buffer[1::2], a, b)
    omnigemm.gemm(buffer[:4], b, out=buffer[4:])
    check(buffer[4:], buffer[:4], b)


def test_the_named_backend_runs() -> None:
    a, b = floats(3, 4), floats(4, 5)
    assert torch.equal(omnigemm.gemm(a, b, backend="cpu"), omnigemm.gemm(a, b))
    with omnigemm.settings(backend="cpu"):
        check(omnigemm.gemm(a, b), a, b)
