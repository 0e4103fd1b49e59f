"""Quantisers: bit for bit against their formulas in numpy, within their error bounds, and for every odd input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigemm.core.errors import DTypeError, LayoutError, ShapeError, UnsupportedError
from omnigemm.quant import Int4Weight, quantize_fp8, quantize_int4, quantize_int8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TINY = np.float32(2.0**-126)
ROWS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9)


# --- the formulas, in numpy: rows are what shares a scale ----------------------------------------------------


def span(row: np.ndarray) -> tuple[np.float32, np.float32]:
    return max(row.max(initial=0), np.float32(0)), min(row.min(initial=0), np.float32(0))


def int8_symmetric(row: np.ndarray) -> tuple[np.ndarray, np.float32]:
    if not np.isfinite(row).all():
        return np.zeros(row.shape, np.int8), np.float32(np.nan)
    amax = np.abs(row).max(initial=0)
    scale = np.float32(1) if amax == 0 else max(amax / np.float32(127), TINY)
    return np.clip(np.rint(row / scale), -127, 127).astype(np.int8), scale


def int8_asymmetric(row: np.ndarray) -> tuple[np.ndarray, np.float32, int]:
    if not np.isfinite(row).all():
        return np.zeros(row.shape, np.int8), np.float32(np.nan), 0
    high, low = span(row)
    if high == low:
        return np.zeros(row.shape, np.int8), np.float32(1), 0
    scale = max(high / np.float32(255) - low / np.float32(255), TINY)
    zero = np.clip(np.rint(np.float32(-128) - low / scale), -128, 127)
    return np.clip(np.rint(row / scale) + zero, -128, 127).astype(np.int8), scale, int(zero)


def fp8_values(dtype: torch.dtype) -> np.ndarray:
    """The finite non-negative numbers of the format, in the order of their codes."""
    exponent_bits, bias = (4, 7) if dtype == E4M3 else (5, 15)
    mantissa_bits = 7 - exponent_bits
    values = []
    for code in range(127 if dtype == E4M3 else 124):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        values.append(math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias))
    return np.array(values)


def fp8(row: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.float32]:
    """Codes and scale."""
    if not np.isfinite(row).all():
        return np.zeros(row.shape, np.uint8), np.float32(np.nan)
    values = fp8_values(dtype)
    amax = np.abs(row).max(initial=0)
    scale = np.float32(1) if amax == 0 else max(amax / np.float32(values[-1]), TINY)
    ratio = row / scale
    magnitude = np.minimum(np.abs(ratio), np.float32(values[-1])).astype(np.float64)
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    down, up = magnitude - values[above - 1], values[above] - magnitude
    take_up = (up < down) | ((up == down) & (above % 2 == 0))
    code = np.where(take_up, above, above - 1)
    return (code | (np.signbit(ratio) * 128)).astype(np.uint8), scale


def by_rows(x: torch.Tensor, granularity: str, rule: Callable[[np.ndarray], tuple[Any, ...]]) -> list[np.ndarray]:
    """The rule applied to each set of values that share a scale; arrays of x's shape first, then of the scale's."""
    data = x.float().numpy()
    if granularity == "tensor":
        q, *rest = rule(data.reshape(-1))
        return [q.reshape(data.shape), *map(np.asarray, rest)]
    if granularity == "token":
        tile, width = 1, data.shape[-1]
    else:
        tile, width = (128 if granularity == "128x128" else 1), 128
    cube = data.reshape((-1, *data.shape[-2:])) if data.ndim > 1 else data.reshape(1, 1, -1)
    b, m, k = cube.shape
    q = None
    sides: list[list[Any]] = []
    for i in range(b):
        for r in range(0, m, tile):
            for c in range(0, max(k, 1), max(width, 1)):
                piece = cube[i, r : r + tile, c : c + width]
                codes, *rest = rule(piece.reshape(-1))
                q = np.zeros(cube.shape, codes.dtype) if q is None else q
                q[i, r : r + tile, c : c + width] = codes.reshape(piece.shape)
                sides.append(rest)
    assert q is not None
    lead = data.shape[:-2] if data.ndim > 1 else ()
    shape: tuple[int, ...] = data.shape[:-1]
    if granularity not in ("tensor", "token"):
        shape = (*lead, *([-(-m // tile)] if data.ndim > 1 else []), -(-k // 128))
    return [q.reshape(data.shape), *(np.array(side).reshape(shape) for side in zip(*sides, strict=True))]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.dtype in (E4M3, E5M2) else t


def check(results: tuple[torch.Tensor, ...], truth: list[np.ndarray]) -> None:
    assert len(results) == len(truth)
    for got, want in zip(results, truth, strict=True):
        assert got.is_contiguous()
        assert tuple(got.shape) == want.shape
        np.testing.assert_array_equal(bits(got).numpy(), want)
    assert results[1].dtype == torch.float32


# --- inputs --------------------------------------------------------------------------------------------------


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values with rows of very different size, and a row of ties: exact halves of a step."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng) * torch.logspace(-4, 4, shape[-2] if len(shape) > 1 else 1)[:, None]
    if x.dim() > 1 and x.shape[-2] > 1 and x.shape[-1] > 1:
        x[..., 0, :] = torch.arange(x.shape[-1]) % 254 / 2 - 63.5
        x[..., 0, 0] = 127.0
    return x.reshape(shape).to(dtype)


SHAPES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "matrix": lambda d: values(5, 300, dtype=d),
    "batch": lambda d: values(3, 4, 130, dtype=d),
    "deep": lambda d: values(2, 3, 131, 129, dtype=d),
    "vector": lambda d: values(200, dtype=d),
    "one": lambda d: values(1, 1, dtype=d),
    "blocks": lambda d: values(256, 256, dtype=d),
    "transposed": lambda d: values(40, 260, dtype=d).T,
    "strided": lambda d: values(10, 600, dtype=d)[::2, 1::3],
    "batch transposed": lambda d: values(3, 5, 140, dtype=d).permute(1, 0, 2),
    "expanded": lambda d: values(1, 70, dtype=d).expand(4, 70),
    "large": lambda d: values(70, 4100, dtype=d),  # more than one chunk
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_int8_bit_for_bit(shape: str, granularity: str, dtype: torch.dtype) -> None:
    x = SHAPES[shape](dtype)
    before = x.clone()
    check(quantize_int8(x, granularity=granularity), by_rows(x, granularity, int8_symmetric))
    got = quantize_int8(x, granularity=granularity, symmetric=False)
    check(got, by_rows(x, granularity, int8_asymmetric))
    assert got[0].dtype == torch.int8
    assert got[2].dtype == torch.int32
    assert torch.equal(x, before)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", ["tensor", "token", "1x128", "128x128"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_fp8_bit_for_bit(shape: str, granularity: str, fp8_dtype: torch.dtype) -> None:
    for dtype in FLOATS if shape in ("matrix", "transposed") else [torch.float32]:
        x = SHAPES[shape](dtype)
        if granularity == "128x128" and x.dim() == 1:
            continue
        got = quantize_fp8(x, granularity=granularity, dtype=fp8_dtype)
        assert got[0].dtype == fp8_dtype
        check(got, by_rows(x, granularity, lambda row: fp8(row, fp8_dtype)))


def test_the_fp8_reference_knows_the_formats() -> None:
    for dtype in (E4M3, E5M2):
        codes = torch.arange(len(fp8_values(dtype)), dtype=torch.uint8)
        assert np.array_equal(codes.view(dtype).double().numpy(), fp8_values(dtype))
        assert fp8_values(dtype)[-1] == torch.finfo(dtype).max


def test_fp8_rounds_ties_to_even_and_keeps_the_sign_of_zero() -> None:
    # With 448 in the row the scale is 1: 17 lies between 16 and 18, 19 between 18 and 20.
    x = torch.tensor([448.0, 17.0, 19.0, -17.0, 0.0, -0.0, 2.0**-10, 2.0**-11, -(2.0**-12)])
    q, scale = quantize_fp8(x, granularity="token")
    assert float(scale) == 1.0
    assert q.float().tolist() == [448.0, 16.0, 20.0, -16.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert torch.signbit(q.float()).tolist() == [False, False, False, True, False, True, False, False, True]


def test_int8_rounds_ties_to_even() -> None:
    q, scale = quantize_int8(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]))
    assert float(scale) == 1.0
    assert q.tolist() == [127, 0, 2, 2, 0, -2, -126]


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(33, 200)
    calls: list[Callable[[], Any]] = [
        lambda: quantize_int8(x),
        lambda: quantize_int8(x, granularity="tensor", symmetric=False),
        lambda: quantize_fp8(x, granularity="tensor"),
        lambda: quantize_fp8(x, granularity="1x128"),
        lambda: quantize_fp8(values(300, 200), granularity="128x128"),
    ]
    whole = [call() for call in calls]
    weights = [quantize_int4(x, symmetric=symmetric).state_dict() for symmetric in (True, False)]
    monkeypatch.setattr("omnigemm.quant.quantizers._CHUNK", 500)
    for before, call in zip(whole, calls, strict=True):
        for a, b in zip(before, call(), strict=True):
            assert torch.equal(bits(a), bits(b))
    for before, symmetric in zip(weights, (True, False), strict=True):
        for name, part in quantize_int4(x, symmetric=symmetric).state_dict().items():
            assert torch.equal(part, before[name])


# --- error bounds for any finite input -----------------------------------------------------------------------


@given(ROWS)
@settings(max_examples=150, deadline=None)
def test_int8_error_bound(row: list[float]) -> None:
    x = torch.tensor([row])
    q, scale = quantize_int8(x)
    assert bool(scale.isfinite().all())
    assert bool((scale >= 2.0**-126).all())
    error = (x.double() - q.double() * scale.double()[:, None]).abs()
    assert bool((error <= scale.double()[:, None] * (0.5 + 2**-16)).all())


@given(ROWS)
@settings(max_examples=150, deadline=None)
def test_int8_asymmetric_error_bound(row: list[float]) -> None:
    x = torch.tensor([row])
    q, scale, zero = quantize_int8(x, symmetric=False)
    assert bool(scale.isfinite().all())
    error = (x.double() - (q.double() - zero[:, None]) * scale.double()[:, None]).abs()
    assert bool((error <= scale.double()[:, None] * (0.5 + 2**-14)).all())
    assert bool((q[x == 0] == zero).all())  # zero stays zero exactly


@given(ROWS, st.sampled_from([E4M3, E5M2]))
@settings(max_examples=150, deadline=None)
def test_fp8_error_bound(row: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor([row])
    q, scale = quantize_fp8(x, granularity="token", dtype=dtype)
    assert bool(q.float().isfinite().all())
    relative, smallest = (2**-4, 2**-10) if dtype == E4M3 else (2**-3, 2**-17)
    steps = x.double() / scale.double()[:, None]
    error = (steps - q.double()).abs()
    assert bool((error <= (steps.abs() * relative).clamp_min(smallest) * (1 + 2**-20)).all())


@given(ROWS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_int4_error_bound(row: list[float], symmetric: bool) -> None:
    w = torch.tensor([row])
    weight = quantize_int4(w, symmetric=symmetric)
    scale = weight.scales.double()
    assert bool(scale.isfinite().all())
    zero = 8 if weight.zeros is None else weight.zeros.double()
    error = (w.double() - (torch.from_numpy(unpack(weight)).double() - zero) * scale).abs()
    assert bool((error <= scale * (0.5 + 2**-16)).all())


# --- rows that have no good scale ----------------------------------------------------------------------------

ODD = {
    "zero": [0.0, -0.0, 0.0],
    "nan": [1.0, math.nan, 2.0],
    "inf": [1.0, math.inf, 2.0],
    "minus inf": [1.0, -math.inf, 2.0],
    "both inf": [-math.inf, math.inf, 0.0],
    "subnormal": [2.0**-149, -(2.0**-140), 2.0**-130],
    "one subnormal": [2.0**-149, 0.0, 0.0],
    "underflow": [2.0**-125, -(2.0**-126), 2.0**-127],
    "largest": [3.4e38, -3.4e38, 1e38],
    "fine": [1.0, -2.0, 3.0],
}


@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("name", list(ODD))
def test_odd_rows(name: str, granularity: str) -> None:
    rows = [ODD[name], ODD["fine"]] if granularity == "token" else [ODD[name]]
    x = torch.tensor(rows)
    check(quantize_int8(x, granularity=granularity), by_rows(x, granularity, int8_symmetric))
    check(quantize_int8(x, granularity=granularity, symmetric=False), by_rows(x, granularity, int8_asymmetric))
    for dtype in (E4M3, E5M2):
        got = quantize_fp8(x, granularity=granularity, dtype=dtype)
        check(got, by_rows(x, granularity, lambda row, dtype=dtype: fp8(row, dtype)))


def test_zero_rows_have_scale_one() -> None:
    x = torch.zeros(2, 130)
    for q, scale in (quantize_int8(x), quantize_fp8(x), quantize_fp8(x, granularity="128x128")):
        assert bool((scale == 1.0).all())
        assert bool((q.float() == 0).all())
    q, scale, zero = quantize_int8(x, symmetric=False)
    assert (scale.tolist(), zero.tolist(), q.unique().tolist()) == ([1.0, 1.0], [0, 0], [0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_bad_values_spoil_their_own_scale_only(poison: float) -> None:
    x = values(130, 300)
    x[3, 200] = poison
    clean = x.clone()
    clean[3, 200] = 0.0
    bad_q, bad_scale = quantize_fp8(x, granularity="1x128")
    q, scale = quantize_fp8(clean, granularity="1x128")
    assert bad_scale.isnan().nonzero().tolist() == [[3, 1]]
    assert bool((bad_q[3, 128:256].float() == 0).all())
    keep = torch.ones(130, 300, dtype=torch.bool)
    keep[3, 128:256] = False
    assert torch.equal(bits(bad_q)[keep], bits(q)[keep])
    assert torch.equal(bad_scale.nan_to_num(scale[3, 1].item()), scale)
    assert quantize_fp8(x, granularity="128x128")[1].isnan().nonzero().tolist() == [[0, 1]]
    assert quantize_int8(x)[1].isnan().nonzero().tolist() == [[3]]
    assert quantize_int8(x, granularity="tensor", symmetric=False)[1].isnan().item()


@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (2, 0, 3), (2, 3, 0), (0, 0)])
def test_empty(shape: tuple[int, ...], granularity: str) -> None:
    x = torch.empty(shape)
    expected = shape[:-1] if granularity == "token" else ()
    q, scale, zero = quantize_int8(x, granularity=granularity, symmetric=False)
    assert (tuple(q.shape), tuple(scale.shape), tuple(zero.shape)) == (shape, expected, expected)
    assert bool((scale == 1).all())
    for q, scale in (quantize_int8(x, granularity=granularity), quantize_fp8(x, granularity=granularity)):
        assert (tuple(q.shape), tuple(scale.shape)) == (shape, expected)
        assert bool((scale == 1).all())


def test_empty_blocks() -> None:
    for shape, fine, coarse in (
        ((0, 200), (0, 2), (0, 2)),
        ((200, 0), (200, 0), (2, 0)),
        ((3, 0, 9), (3, 0, 1), (3, 0, 1)),
    ):
        assert tuple(quantize_fp8(torch.empty(shape), granularity="1x128")[1].shape) == fine
        assert tuple(quantize_fp8(torch.empty(shape), granularity="128x128")[1].shape) == coarse


def test_results_are_no_part_of_a_gradient() -> None:
    x = torch.nn.Parameter(values(4, 64))
    for result in (*quantize_int8(x), *quantize_fp8(x), quantize_int4(x).scales):
        assert not result.requires_grad


# --- int4 ----------------------------------------------------------------------------------------------------


def int4_candidates(group: np.ndarray, dtype: torch.dtype) -> list[tuple[np.ndarray, float, float]]:
    """For both closed forms: values 0..15, the stored scale and the squared error."""
    high, low = span(group)
    out = []
    for top, bottom in ((7, 8), (7.5, 8.5)):
        exact = max(high / np.float32(top), -low / np.float32(bottom))
        smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-126
        scale = torch.tensor(max(float(exact), smallest)).to(dtype).float().numpy()
        q = np.clip(np.rint(group / scale), -8, 7)
        error = ((group.astype(np.float64) - q * float(scale)) ** 2).sum()
        out.append(((q + 8).astype(int), float(scale), float(error)))
    return out


def unpack(weight: Int4Weight) -> np.ndarray:
    packed = weight.qweight.numpy()
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)[..., : weight.k]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("k", "size"), [(256, 32), (256, 64), (300, 128), (77, None), (77, -1), (20, 128)])
def test_int4_symmetric(k: int, size: int | None, dtype: torch.dtype) -> None:
    w = values(6, k, dtype=dtype)
    weight = quantize_int4(w, group_size=size)
    width = k if size in (None, -1) else size
    assert weight.shape == (6, k)
    assert weight.group_size == width
    assert weight.dtype == dtype
    assert weight.symmetric
    chosen = set()
    for row in range(6):
        for g in range(weight.num_groups):
            part = slice(g * width, (g + 1) * width)
            first, second = int4_candidates(w[row, part].float().numpy(), dtype)
            better = int(second[2] < first[2])
            q, scale, _ = (first, second)[better]
            chosen.add(better)
            assert float(weight.scales[row, g]) == scale
            assert np.array_equal(unpack(weight)[row, part], q)
    assert weight.num_groups == 1 or chosen == {0, 1}  # the example exercises both


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("k", "size"), [(256, 32), (300, 128), (77, None)])
def test_int4_asymmetric(k: int, size: int | None, dtype: torch.dtype) -> None:
    w = (values(6, k) + torch.arange(6)[:, None]).to(dtype)
    weight = quantize_int4(w, group_size=size, symmetric=False)
    width = size or k
    assert weight.zeros is not None
    for row in range(6):
        for g in range(weight.num_groups):
            part = slice(g * width, (g + 1) * width)
            group = w[row, part].float().numpy()
            high, low = span(group)
            exact = high / np.float32(15) - low / np.float32(15)
            scale = torch.tensor(exact).to(dtype).float().numpy()
            zero = np.clip(np.rint(-low / scale), 0, 15)
            assert float(weight.scales[row, g]) == scale
            assert int(weight.zeros[row, g]) == zero
            assert np.array_equal(unpack(weight)[row, part], np.clip(np.rint(group / scale) + zero, 0, 15))


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_represents_its_own_weights(symmetric: bool) -> None:
    """Weights on a grid with steps of a power of two come back exactly."""
    rng = torch.Generator().manual_seed(1)
    steps = torch.randint(-8, 8, (4, 64), generator=rng)
    steps[:, ::32], steps[:, 1::32] = -8, 7
    w = steps * torch.tensor([2.0**-3, 1.0, 2.0**-20, 2.0**9])[:, None]
    assert torch.equal(quantize_int4(w, group_size=32, symmetric=symmetric).dequantize(), w)


def test_int4_experts_are_their_own_matrices() -> None:
    w = values(3, 5, 96).permute(1, 0, 2)
    weight = quantize_int4(w, group_size=32, symmetric=False)
    assert weight.shape == (5, 3, 96)
    for expert in range(5):
        one = quantize_int4(w[expert], group_size=32, symmetric=False)
        assert torch.equal(weight[expert].qweight, one.qweight)
        assert torch.equal(weight[expert].dequantize(), one.dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_odd_groups(symmetric: bool) -> None:
    w = torch.ones(5, 64)
    w[0, :32] = 0.0
    w[1, 3] = math.nan
    w[2, 4] = -math.inf
    w[3, :32] = 3e38
    w[3, 1] = -3e38
    weight = quantize_int4(w, group_size=32, symmetric=symmetric)
    assert float(weight.scales[0, 0]) == 1.0
    assert np.array_equal(unpack(weight)[:3, :32], np.full((3, 32), 8))
    assert weight.scales.isnan().nonzero().tolist() == [[1, 0], [2, 0]]
    dense = weight.dequantize()
    assert bool((dense[0, :32] == 0).all())
    assert bool(dense[1:3, :32].isnan().all())
    assert bool(dense[:, 32:].isfinite().all())
    assert bool(weight.scales[3].isfinite().all())
    assert float((dense[3, 0] - 3e38).abs()) <= float(weight.scales[3, 0]) * 0.501


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_scale_is_never_zero(dtype: torch.dtype, symmetric: bool) -> None:
    smallest = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}[dtype]
    w = torch.tensor([[smallest, -smallest, 2 * smallest]], dtype=dtype)
    weight = quantize_int4(w, symmetric=symmetric)
    assert float(weight.scales) > 0
    error = (weight.dequantize(torch.float64) - w.double()).abs()
    assert bool((error <= float(weight.scales) / 2).all())


def test_int4_scale_that_fp16_rounds_far_down() -> None:
    # The scale would be 1.4 of the smallest fp16 number; it becomes 1 of it, and the zero point stays in range.
    w = torch.tensor([[-21.0, 0.0, -3.0]]).mul(2.0**-24).half()
    weight = quantize_int4(w, symmetric=False)
    assert weight.zeros is not None
    assert (weight.zeros.tolist(), unpack(weight).tolist()) == ([[15]], [[0, 15, 12]])


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 5), (2, 3, 0), (0, 2, 64)])
@pytest.mark.parametrize("size", [32, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_empty(shape: tuple[int, ...], size: int | None, symmetric: bool) -> None:
    weight = quantize_int4(torch.empty(shape), group_size=size, symmetric=symmetric)
    assert weight.shape == shape
    assert weight.dequantize().shape == shape


# --- torch.compile -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compile_in_one_graph(backend: str) -> None:
    def everything(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: list[torch.Tensor] = []
        for granularity in ("token", "tensor"):
            outputs += quantize_int8(x, granularity=granularity)
            outputs += quantize_int8(x, granularity=granularity, symmetric=False)
        for granularity in ("tensor", "token", "1x128", "128x128"):
            for dtype in (E4M3, E5M2):
                outputs += quantize_fp8(x, granularity=granularity, dtype=dtype)
        return tuple(outputs)

    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    x = values(9, 300)
    x[4, 5] = math.nan
    x[5] = 0.0
    for got, want in zip(compiled(x), everything(x), strict=True):
        np.testing.assert_array_equal(bits(got).numpy(), bits(want).numpy())


@pytest.mark.parametrize("symmetric", [True, False])
def test_compile_int4(symmetric: bool) -> None:
    def make(w: torch.Tensor) -> Int4Weight:
        return quantize_int4(w, group_size=64, symmetric=symmetric)

    w = values(5, 150)
    got, want = torch.compile(make, fullgraph=True, backend="aot_eager")(w), make(w)
    assert isinstance(got, Int4Weight)
    assert got.shape == want.shape
    for name, part in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], part)


def test_compile_with_dynamic_sizes() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, scale = quantize_int8(x)[:2]
        return (q, scale, *quantize_fp8(x, granularity="token"))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (3, 8, 17):
        x = values(m, 64)
        for got, want in zip(compiled(x), step(x), strict=True):
            assert torch.equal(bits(got), bits(want))


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize_int8([1.0]), DTypeError, ["quantize_int8: x is a list", "torch.Tensor"]),  # type: ignore[arg-type]
        (lambda: quantize_int8(torch.ones(2, 2).double()), DTypeError, ["x has dtype torch.float64", "torch.float16"]),
        (lambda: quantize_int8(torch.ones(2, 2).int()), DTypeError, ["x has dtype torch.int32"]),
        (lambda: quantize_int8(torch.tensor(1.0)), ShapeError, ["x has shape ()", "1 dimension"]),
        (lambda: quantize_int8(torch.ones(2, 4).to_sparse()), LayoutError, ["x is a sparse_coo tensor", "strides"]),
        (lambda: quantize_fp8(torch.ones(2, 4).to_mkldnn()), LayoutError, ["quantize_fp8: x is a mkldnn tensor"]),
        (lambda: quantize_int4(torch.ones(2, 4).to_sparse_csr()), LayoutError, ["w is a sparse_csr tensor"]),
        (lambda: quantize_int8(torch.nested.nested_tensor([torch.ones(2)])), LayoutError, ["x is a nested tensor"]),
        (
            lambda: quantize_int8(torch.ones(2), granularity="1x128"),
            UnsupportedError,
            ["'1x128'", "'token' or 'tensor'"],
        ),
        (lambda: quantize_int8(torch.ones(2), symmetric=None), DTypeError, ["symmetric is None"]),  # type: ignore[arg-type]
        (
            lambda: quantize_fp8(torch.ones(2), granularity="row"),
            UnsupportedError,
            ["granularity is 'row'", "'128x128'"],
        ),
        (lambda: quantize_fp8(torch.ones(2), granularity="128x128"), ShapeError, ["x has shape (2,)", "2 dimensions"]),
        (lambda: quantize_fp8(torch.ones(2), dtype=torch.int8), DTypeError, ["dtype is torch.int8", "float8_e5m2"]),
        (lambda: quantize_int4(torch.ones(2)), ShapeError, ["w has shape (2,)", "(N, K)"]),
        (lambda: quantize_int4(torch.ones(2, 2), group_size=16), UnsupportedError, ["group_size is 16", "32, 64, 128"]),
        (lambda: quantize_int4(torch.ones(2, 2), group_size=2.0), DTypeError, ["group_size is 2.0"]),  # type: ignore[arg-type]
        (lambda: quantize_int4(torch.ones(2, 2).long()), DTypeError, ["quantize_int4: w has dtype torch.int64"]),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
