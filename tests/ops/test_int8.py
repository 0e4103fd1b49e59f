"""int8_gemm is exact: the float64 result, rounded once, on both kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import omnigemm
import reference
from omnigemm.backends.cpu.int8 import INT32_K
from omnigemm.backends.cpu.isa import int8_products_are_exact
from op_support import (
    FLOATS,
    LAYOUTS,
    NAN,
    ONE_ROUNDING,
    READ_LAYOUTS,
    SHAPES,
    floats,
    forget_calls,
    guarded,
    indices,
    int8s,
    laid_out,
    roundings,
    scales,
    ulp,
)


@pytest.fixture(params=["int_mm", "fp32_exact"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test on one kernel; plans made under another belief about the processor are dropped."""
    name: str = request.param
    if name == "int_mm" and not int8_products_are_exact():
        pytest.skip("oneDNN's int8 products saturate on this processor")
    monkeypatch.setattr("omnigemm.backends.cpu.int8.int8_products_are_exact", lambda: name == "int_mm")
    forget_calls()
    chosen = omnigemm.explain("int8_gemm", m=64, n=64, k=64).chosen
    assert chosen is not None
    assert chosen.kernel == name
    yield name
    forget_calls()


def check(
    result: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | float,
    b_scale: Tensor | float,
    a_zero: Tensor | int | None = None,
    bias: Tensor | None = None,
) -> None:
    distance = roundings(result, reference.int8_gemm(a, b, a_scale, b_scale, a_zero, bias))
    # A bias may cancel the product, and then the reference itself has lost some of float64's digits.
    assert distance <= (ONE_ROUNDING if bias is None else 1.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(kernel: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, a_scale, b_scale = int8s(m, k), int8s(n, k), scales(m), scales(n)
    zero, bias = torch.randint(-128, 128, (m,), dtype=torch.int32), floats(n) * 100
    assert omnigemm.int8_gemm(a, b, a_scale, b_scale).dtype == torch.bfloat16
    for out_dtype in FLOATS:
        # fp16 holds products of this size only after smaller scales.
        row = a_scale * 2.0**-12
        result = omnigemm.int8_gemm(a, b, row, b_scale, out_dtype=out_dtype)
        assert result.dtype == out_dtype
        check(result, a, b, row, b_scale)
        check(omnigemm.int8_gemm(a, b, row, b_scale, a_zero=zero, out_dtype=out_dtype), a, b, row, b_scale, zero)
        result = omnigemm.int8_gemm(a, b, row, b_scale, bias=bias, out_dtype=out_dtype)
        check(result, a, b, row, b_scale, None, bias)


@pytest.mark.filterwarnings("error")  # torch warns where it takes a slow way
@pytest.mark.parametrize("layout", READ_LAYOUTS)
def test_any_strides(kernel: str, layout: str) -> None:
    for m, n, k in ((17, 13, 33), (1, 13, 33), (17, 1, 33), (17, 13, 1), (1, 1, 2), (2, 3, INT32_K + 40)):
        a_scale, b_scale = scales(m) * 2.0**-12, scales(n)
        zeros = torch.randint(-9, 9, (m,), dtype=torch.int32)
        a = laid_out(int8s(m, k), layout)
        for other in READ_LAYOUTS:
            b = laid_out(int8s(n, k), other)
            for zero in (None, zeros):
                result = omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, out_dtype=torch.float32)
                check(result, a, b, a_scale, b_scale, zero)
    a, b = laid_out(int8s(3, 4, 9), layout), laid_out(int8s(3, 5, 9), layout)
    for i, result in enumerate(omnigemm.int8_gemm(a, b, 2.0**-12, 1.0)):
        check(result, a[i], b[i], 2.0**-12, 1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_out(kernel: str, layout: str) -> None:
    m, n, k = 17, 13, 33
    a, b, a_scale, b_scale = int8s(m, k), int8s(n, k), scales(m) * 2.0**-12, scales(n)
    wide_scale = torch.full((2 * m,), NAN)
    wide_scale[::2] = a_scale
    check(omnigemm.int8_gemm(a, b, wide_scale[::2], b_scale), a, b, a_scale, b_scale)
    for out_dtype in FLOATS:
        out, untouched = guarded((m, n), out_dtype, layout)
        assert omnigemm.int8_gemm(a, b, a_scale, b_scale, out=out) is out
        check(out, a, b, a_scale, b_scale)
        untouched()


@pytest.mark.usefixtures("small_blocks")
def test_several_blocks_of_rows(kernel: str) -> None:
    m, n, k = 50, 9, 40
    a, b, a_scale, b_scale = int8s(m, k), int8s(n, k), scales(m), scales(n)
    zero, bias = torch.randint(-9, 9, (m,), dtype=torch.int32), floats(n)
    for out_dtype in (torch.bfloat16, torch.float32):
        result = omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, bias=bias, out_dtype=out_dtype)
        check(result, a, b, a_scale, b_scale, zero, bias)


@pytest.mark.parametrize("k", [1, 2, 63, 1024, 1025, 5000])
@pytest.mark.parametrize(("left", "right"), [(-128, -128), (-128, 127), (127, 127), (127, -128)])
def test_extreme_values(kernel: str, left: int, right: int, k: int) -> None:
    a, b = torch.full((5, k), left, dtype=torch.int8), torch.full((7, k), right, dtype=torch.int8)
    result = omnigemm.int8_gemm(a, b, 2.0**-8, 1.0, out_dtype=torch.float32)
    check(result, a, b, 2.0**-8, 1.0)
    shifted = omnigemm.int8_gemm(a, b, 2.0**-8, 1.0, a_zero=left, out_dtype=torch.float32)
    assert bool((shifted == 0).all())


@pytest.mark.parametrize("k", [INT32_K, INT32_K + 1, 131072, 131072 + 7, 2 * INT32_K + 3])
def test_sums_beyond_32_bits(kernel: str, k: int) -> None:
    a, b = torch.full((2, k), -128, dtype=torch.int8), torch.full((3, k), -128, dtype=torch.int8)
    b[1] = 127
    b[2, ::2] = 127
    for zero in (None, 127):
        result = omnigemm.int8_gemm(a, b, 1.0, 1.0, a_zero=zero, out_dtype=torch.float32)
        check(result, a, b, 1.0, 1.0, zero)


@pytest.mark.parametrize("k", [1024, 1025, 5001])
def test_sums_beyond_24_bits(kernel: str, k: int) -> None:
    """Sums that fp32 could not hold; the zero point then takes most of them away, so that any error would show."""
    a = torch.randint(100, 128, (6, k), dtype=torch.int8)
    b = torch.randint(100, 128, (7, k), dtype=torch.int8)
    for zero in (None, 113, 127):
        result = omnigemm.int8_gemm(a, b, 1.0, 1.0, a_zero=zero, out_dtype=torch.float32)
        check(result, a, b, 1.0, 1.0, zero)


def test_long_k_at_random(kernel: str) -> None:
    k = 131072 + 7
    a, b, a_scale, b_scale = int8s(3, k), int8s(5, k), scales(3), scales(5)
    zero = indices([-128, 3, 127])
    for out_dtype in (torch.bfloat16, torch.float32):
        check(omnigemm.int8_gemm(a, b, a_scale, b_scale, out_dtype=out_dtype), a, b, a_scale, b_scale)
        result = omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, out_dtype=out_dtype)
        check(result, a, b, a_scale, b_scale, zero)


def test_zero_points(kernel: str) -> None:
    m, n, k = 6, 5, 37
    a, b, a_scale, b_scale = int8s(m, k), int8s(n, k), scales(m), scales(n)
    rows = torch.randint(-128, 128, (m,), dtype=torch.int32)
    for zero in (7, -128, indices([9])[0], indices([9]), rows, rows[:, None], torch.tensor([[-3]], dtype=torch.int32)):
        result = omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, out_dtype=torch.float32)
        check(result, a, b, a_scale, b_scale, zero)
        given = omnigemm.int8_gemm(
            a, b, a_scale, b_scale, a_zero=zero, b_sums=b.sum(1, dtype=torch.int32), out_dtype=torch.float32
        )
        assert torch.equal(given, result)
    large = indices([2**31 - 1, -(2**31), 0, 1, -1, 65536])
    result = omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=large, out_dtype=torch.float32)
    check(result, a, b, a_scale, b_scale, large)


def test_scale_shapes(kernel: str) -> None:
    m, n, k = 6, 5, 19
    a, b = int8s(m, k), int8s(n, k)
    for a_scale in (0.37, 2, torch.tensor(0.37), torch.tensor([0.37]), torch.tensor([[0.37]]), scales(m), scales(m, 1)):
        for b_scale in (0.11, torch.tensor(0.11), torch.tensor([0.11]), scales(n), scales(n, 1)):
            fp32 = (torch.as_tensor(one, dtype=torch.float32) for one in (a_scale, b_scale))
            check(omnigemm.int8_gemm(a, b, a_scale, b_scale, out_dtype=torch.float32), a, b, *fp32)


@pytest.mark.parametrize("bias_dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_bias_types(kernel: str, bias_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    a, b, a_scale, b_scale = int8s(9, 70), int8s(11, 70), scales(9) * 2.0**-9, scales(11)
    bias = floats(11, dtype=bias_dtype)
    result = omnigemm.int8_gemm(a, b, a_scale, b_scale, bias=bias, out_dtype=out_dtype)
    check(result, a, b, a_scale, b_scale, None, bias)


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_bias_that_cancels(kernel: str, out_dtype: torch.dtype) -> None:
    """The product is about 2**20 and the sum about 2**-4: fp32 arithmetic would have nothing left."""
    n, k = 24, 300
    a, b = int8s(1, k), int8s(n, k)
    a_scale, b_scale = scales(1), scales(n)
    product = reference.int8_gemm(a, b, a_scale, b_scale)[0]
    bias = -product.float()
    result = omnigemm.int8_gemm(a, b, a_scale, b_scale, bias=bias, out_dtype=out_dtype)
    integers = (a.long() @ b.long().t())[0].tolist()
    row, columns, offsets = float(a_scale), b_scale.tolist(), bias.tolist()
    for j in range(n):
        exact = Fraction(row) * Fraction(columns[j]) * integers[j] + Fraction(offsets[j])
        step = float(ulp(torch.tensor(float(exact), dtype=torch.float64), out_dtype))
        assert abs(Fraction(float(result[0, j])) - exact) <= step


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_special_scales_pass_through(kernel: str, out_dtype: torch.dtype, value: float) -> None:
    a, b, a_scale, b_scale = int8s(4, 9), int8s(5, 9), scales(4), scales(5)
    b[3] = 0  # 0 * inf is NaN
    a_scale[1] = value
    result = omnigemm.int8_gemm(a, b, a_scale, b_scale, out_dtype=out_dtype)
    check(result, a, b, a_scale, b_scale)
    assert not bool(result[1].isfinite().any())
    b_scale[2] = value
    check(omnigemm.int8_gemm(a, b, a_scale, b_scale, out_dtype=out_dtype), a, b, a_scale, b_scale)


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_scales_whose_partial_products_leave_fp32(kernel: str, out_dtype: torch.dtype) -> None:
    a, b = torch.full((2, 64), 127, dtype=torch.int8), torch.full((3, 64), 127, dtype=torch.int8)
    for small, large in ((1e-37, 1e35), (1e35, 1e-37)):
        a_scale, b_scale = torch.tensor(small), torch.tensor(large)
        check(omnigemm.int8_gemm(a, b, a_scale, b_scale, out_dtype=out_dtype), a, b, a_scale, b_scale)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_results_beside_a_tie(kernel: str, out_dtype: torch.dtype) -> None:
    """Where a rounding to fp32 on the way shows most: products of scales next to the middle of two 16-bit numbers."""
    step, count = torch.finfo(out_dtype).eps, 200
    middles = 1 + step / 2 + step * torch.randint(0, int(1 / step) - 1, (count, 1)).double()
    a_scale = 1 + torch.rand(count, 1)
    b_scale = (middles / a_scale).float()
    exact = a_scale.double() * b_scale.double()
    assert int((exact.float() == middles.float()).sum()) > count // 2
    ones = torch.ones(count, 1, 1, dtype=torch.int8)
    result = omnigemm.int8_gemm(ones, ones, a_scale, b_scale, out_dtype=out_dtype)
    assert roundings(result[..., 0], exact) <= ONE_ROUNDING


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_overflow_and_underflow_of_the_output(kernel: str, out_dtype: torch.dtype) -> None:
    a, b = torch.full((2, 64), 127, dtype=torch.int8), torch.full((3, 64), 127, dtype=torch.int8)
    top = torch.finfo(out_dtype).max
    for factor in (0.99, 1.01, 2.0**-30):
        a_scale = torch.tensor(top * factor / (127 * 127 * 64), dtype=torch.float64).float()
        check(omnigemm.int8_gemm(a, b, a_scale, 1.0, out_dtype=out_dtype), a, b, a_scale, 1.0)
    tiny = torch.tensor(torch.finfo(out_dtype).tiny * 2.0**-3 / (127 * 127 * 64), dtype=torch.float64)
    a_scale, b_scale = (tiny * 2.0**40).float(), torch.tensor(2.0**-40)
    check(omnigemm.int8_gemm(a, b, a_scale, b_scale, out_dtype=out_dtype), a, b, a_scale, b_scale)


BATCHES = (
    ((4, 3, 7), (4, 5, 7)),
    ((1, 3, 7), (4, 5, 7)),
    ((4, 3, 7), (1, 5, 7)),
    ((4, 3, 7), (5, 7)),
    ((3, 7), (4, 5, 7)),
    ((0, 3, 7), (0, 5, 7)),
    ((2, 3, 0), (2, 5, 0)),
)


@pytest.mark.parametrize("shapes", BATCHES)
def test_batches(kernel: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = int8s(*shapes[0]), int8s(*shapes[1])
    batch = max(x.size(0) if x.dim() == 3 else 1 for x in (a, b))
    batch = 0 if a.numel() == 0 and a.size(0) == 0 else batch
    m, n = 3, 5
    bias = floats(n)
    rows = torch.randint(-9, 9, (batch, m), dtype=torch.int32)
    options: list[tuple[Tensor | float, Tensor | float, Tensor | int | None]] = [
        (0.5, 0.25, None),
        (scales(m), scales(n), 3),
        (scales(m), scales(n), torch.randint(-9, 9, (m,), dtype=torch.int32)),
        (scales(batch, m), scales(batch, n), rows),
        (scales(batch, m, 1), scales(batch, n, 1), rows[..., None]),
    ]
    for a_scale, b_scale, zero in options:
        out, untouched = guarded((batch, m, n), torch.float32, "columns")
        omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, bias=bias, out=out)
        untouched()
        functional = omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, bias=bias, out_dtype=torch.float32)
        assert torch.equal(functional, out)
        for i in range(batch):
            left, right = (x if x.dim() == 2 else x[i % x.size(0)] for x in (a, b))
            mine = [x[i] if isinstance(x, Tensor) and x.dim() > 1 else x for x in (a_scale, b_scale, zero)]
            check(out[i], left, right, mine[0], mine[1], mine[2], bias)  # type: ignore[arg-type]


def test_sums_of_rows_are_taken_as_given(kernel: str) -> None:
    """They are multiplied with zero points and nothing else, whatever B holds."""
    a, b, row, column = int8s(6, 37), int8s(5, 37), scales(6), scales(5)
    zero, sums = torch.randint(-128, 128, (6,), dtype=torch.int32), indices([7, -(2**31), 2**31 - 1, 0, -9])
    wrong = [omnigemm.int8_gemm(a, b, row, column, b_sums=sums, out_dtype=torch.float32, **words) for words in ({}, {})]
    plain = omnigemm.int8_gemm(a, b, row, column, out_dtype=torch.float32)
    assert all(torch.equal(one, plain) for one in wrong)  # without zero points they are of no use
    result = omnigemm.int8_gemm(a, b, row, column, a_zero=zero, b_sums=sums, out_dtype=torch.float32)
    exact = (a.double() @ b.double().t() - zero.double()[:, None] * sums) * row.double()[:, None] * column
    assert roundings(result, exact) <= ONE_ROUNDING


def test_sums_of_rows_of_a_batch(kernel: str) -> None:
    zero = torch.randint(-128, 128, (3, 4), dtype=torch.int32)
    for a, b in (
        (int8s(3, 4, 20), int8s(3, 5, 20)),
        (int8s(3, 4, 20), int8s(1, 5, 20)),
        (int8s(3, 4, 20), int8s(5, 20)),
    ):
        words = {"a_zero": zero, "bias": floats(5), "out_dtype": torch.float32}
        want = omnigemm.int8_gemm(a, b, 0.5, 0.25, **words)
        for sums in (b.sum(-1, dtype=torch.int32), torch.stack([b.sum(-1, dtype=torch.int32)] * 2, -1)[..., 0]):
            for _ in range(2):  # the second is like one before
                assert torch.equal(omnigemm.int8_gemm(a, b, 0.5, 0.25, b_sums=sums, **words), want)


def test_columns_of_a_batch() -> None:
    """[M, 1] and [N, 1] are those of every product, also where there are as many products as rows."""
    for batch in (1, 3, 5):
        a, b, x, y, zero = int8s(batch, 3, 8), int8s(5, 8), scales(3), scales(5), indices([1, 20, 100])
        for left, right in ((a, b), (a[0], b.expand(batch, 5, 8))):
            want = omnigemm.int8_gemm(left, right, x, y, a_zero=zero, out_dtype=torch.float32)
            for _ in range(2):  # the second is like one before
                result = omnigemm.int8_gemm(
                    left, right, x[:, None], y[:, None], a_zero=zero[:, None], out_dtype=torch.float32
                )
                assert torch.equal(result, want)
    with pytest.raises(omnigemm.ShapeError, match=r"a_scale has shape \(5, 1\), expected one value, \(5, 3\)"):
        omnigemm.int8_gemm(a, b, scales(5, 1), 1.0)  # not one for each product


_WITHOUT_VNNI = """
import json, torch, omnigemm
torch.manual_seed(0)
a = torch.randint(-128, 128, (17, 300), dtype=torch.int8)
b = torch.randint(-128, 128, (48, 300), dtype=torch.int8)
a[0], b[0] = 127, 127
exact = a.long() @ b.long().t()
result = omnigemm.int8_gemm(a, b, 1.0, 1.0, out_dtype=torch.float32)
explanation = omnigemm.explain("int8_gemm", m=17, n=48, k=300)
print(json.dumps({
    "saturates": not torch.equal(torch._int_mm(a, b.t()).long(), exact),
    "exact": torch.equal(result.long(), exact),
    "chosen": explanation.chosen.kernel,
    "reason": next(one.reason for one in explanation.candidates if one.kernel == "int_mm"),
}))
"""


def test_exact_on_a_processor_whose_products_saturate() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_VNNI], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    report = json.loads(run.stdout)
    assert report["exact"]
    if not report["saturates"]:
        pytest.skip("oneDNN does not saturate here even without VNNI")
    assert report["chosen"] == "fp32_exact"
    assert "saturate" in report["reason"]
