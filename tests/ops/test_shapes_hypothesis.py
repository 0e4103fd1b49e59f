"""Random shapes, strides and options of every operation, against float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import omnigemm
import reference
from op_support import (
    E4M3,
    E5M2,
    FLOATS,
    GRANULARITIES,
    HALVES,
    LAYOUTS,
    ONE_ROUNDING,
    READ_LAYOUTS,
    SENTINEL,
    assert_accumulated,
    dequantized,
    floats,
    fp8_scales,
    fp8s,
    guarded,
    indices,
    int4_weight,
    int8s,
    laid_out,
    roundings,
    scales,
)

few = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
sizes = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257]))
layouts = st.sampled_from(LAYOUTS)
read_layouts = st.sampled_from(READ_LAYOUTS)
outs = st.sampled_from(FLOATS)
seeds = st.integers(0, 2**31)


def check_gemm(result: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> None:
    magnitude = reference.gemm(a.abs(), b.abs(), None if c is None else c.abs(), abs(alpha), abs(beta))
    assert_accumulated(result, reference.gemm(a, b, c, alpha, beta), magnitude, a.size(-1))


@few
@given(data=st.data(), seed=seeds, m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(FLOATS), out_dtype=outs)
def test_gemm(data: Any, seed: int, m: int, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    batch = data.draw(st.integers(0, 3))
    leads = data.draw(
        st.sampled_from([((), ()), ((batch,), (batch,)), ((1,), (batch,)), ((batch,), ()), ((), (batch,))])
    )
    a = laid_out(floats(*leads[0], m, k, dtype=dtype), data.draw(read_layouts))
    b = laid_out(floats(*leads[1], k, n, dtype=dtype), data.draw(read_layouts))
    exact = reference.gemm(a, b)
    alpha, beta = data.draw(st.sampled_from([1.0, -0.5, 3.0])), data.draw(st.sampled_from([0.0, 1.0, -2.0]))
    keep = [data.draw(st.booleans()) for _ in exact.shape]
    c = floats(*(size if kept else 1 for size, kept in zip(exact.shape, keep, strict=True)), dtype=dtype)
    out, untouched = guarded(exact.shape, out_dtype, data.draw(layouts))
    omnigemm.gemm(a, b, c, alpha=alpha, beta=beta, out=out)
    check_gemm(out, a, b, c, alpha, beta)
    untouched()


@few
@given(data=st.data(), seed=seeds, m=sizes, n=sizes, k=sizes, out_dtype=outs)
def test_int8(data: Any, seed: int, m: int, n: int, k: int, out_dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    a, b = laid_out(int8s(m, k), data.draw(read_layouts)), laid_out(int8s(n, k), data.draw(read_layouts))
    a_scale = data.draw(st.sampled_from([scales(m), scales(m, 1), scales()])) * 2.0**-14
    b_scale = data.draw(st.sampled_from([scales(n), scales()]))
    rows = torch.randint(-128, 128, (m,), dtype=torch.int32)
    zero = data.draw(st.sampled_from([None, -7, rows]))
    bias = data.draw(st.sampled_from([None, floats(n)]))
    out, untouched = guarded((m, n), out_dtype, data.draw(layouts))
    omnigemm.int8_gemm(a, b, a_scale, b_scale, a_zero=zero, bias=bias, out=out)
    distance = roundings(out, reference.int8_gemm(a, b, a_scale, b_scale, zero, bias))
    assert distance <= (ONE_ROUNDING if bias is None else 1.0)
    untouched()


@few
@given(data=st.data(), seed=seeds, m=sizes, n=sizes, k=sizes, kinds=st.sampled_from(GRANULARITIES), out_dtype=outs)
def test_fp8(data: Any, seed: int, m: int, n: int, k: int, kinds: tuple[str, str], out_dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    types = st.sampled_from([E4M3, E5M2])
    a = laid_out(fp8s(m, k, dtype=data.draw(types)), data.draw(read_layouts))
    b = laid_out(fp8s(n, k, dtype=data.draw(types)), data.draw(read_layouts))
    a_scale, b_scale = fp8_scales(kinds[0], m, k), fp8_scales(kinds[1], n, k)
    out, untouched = guarded((m, n), out_dtype, data.draw(layouts))
    with omnigemm.settings(weight_cache_mib=data.draw(st.sampled_from([0, 64]))):
        omnigemm.fp8_gemm(a, b, a_scale, b_scale, out=out)
    magnitude = reference.fp8_gemm(a.float().abs(), b.float().abs(), a_scale, b_scale)
    assert_accumulated(out, reference.fp8_gemm(a, b, a_scale, b_scale), magnitude, k)
    untouched()


@few
@given(data=st.data(), seed=seeds, m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(HALVES), out_dtype=outs)
def test_int4(data: Any, seed: int, m: int, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    w = int4_weight(
        n,
        k,
        data.draw(st.sampled_from([0, 32, 64, 128])),
        symmetric=data.draw(st.booleans()),
        act_order=data.draw(st.booleans()),
        dtype=data.draw(outs),
    )
    a = laid_out(floats(m, k, dtype=dtype), data.draw(read_layouts))
    out, untouched = guarded((m, n), out_dtype, data.draw(layouts))
    with omnigemm.settings(weight_cache_mib=data.draw(st.sampled_from([0, 64]))):
        omnigemm.int4_gemm(a, w, out=out)
    weight = dequantized(w)
    # Zero points may be rounded apart from the values, as if each value were 8 scales larger.
    magnitude = reference.linear(a.abs(), weight.abs() + 8 * 1.5 / 16)
    assert_accumulated(out, reference.linear(a, weight), magnitude, k, operand_eps=torch.finfo(dtype).eps)
    untouched()


@few
@given(data=st.data(), seed=seeds, dtype=st.sampled_from(FLOATS), out_dtype=outs)
def test_list(data: Any, seed: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    small = st.integers(0, 20)
    shapes = data.draw(st.lists(st.tuples(small, small, small), min_size=1, max_size=6))
    a = [laid_out(floats(m, k, dtype=dtype), data.draw(read_layouts)) for m, _, k in shapes]
    b = [laid_out(floats(k, n, dtype=dtype), data.draw(read_layouts)) for _, n, k in shapes]
    c = [floats(m, n, dtype=dtype) for m, n, _ in shapes]
    numbers = st.lists(st.sampled_from([0.0, 1.0, -1.5]), min_size=len(shapes), max_size=len(shapes))
    alpha, beta = data.draw(numbers), data.draw(numbers)
    targets = [guarded((m, n), out_dtype, data.draw(layouts)) for m, n, _ in shapes]
    omnigemm.grouped_gemm(a, b, c, alpha=alpha, beta=beta, out=[out for out, _ in targets])
    for i, (out, untouched) in enumerate(targets):
        check_gemm(out, a[i], b[i], c[i], alpha[i], beta[i])
        untouched()


@few
@given(data=st.data(), seed=seeds, n=sizes, k=sizes, counts=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_rows_of_groups(data: Any, seed: int, n: int, k: int, counts: list[int]) -> None:
    """The same int8 groups, sorted by rows and in slabs: exact, and nothing else is written."""
    torch.manual_seed(seed)
    groups, spare = len(counts), data.draw(st.integers(0, 5))
    total, capacity = sum(counts) + spare, 9
    b = laid_out(int8s(groups, n, k), data.draw(read_layouts))
    b_scale = data.draw(st.sampled_from([scales(), scales(groups), scales(groups, n)]))
    slabs, slab_scale = int8s(groups, capacity, k), scales(groups, capacity)
    rows = torch.cat([*(slabs[g, :count] for g, count in enumerate(counts)), int8s(spare, k)])
    row_scale = torch.cat([*(slab_scale[g, :count] for g, count in enumerate(counts)), scales(spare)])
    layout = data.draw(layouts)
    sorted_out, sorted_untouched = guarded((total, n), torch.float32, layout)
    masked_out, masked_untouched = guarded((groups, capacity, n), torch.float32, layout)
    for out in (sorted_out, masked_out):
        out.fill_(SENTINEL)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    scaled = {"a_scale": row_scale, "b_scale": b_scale}
    omnigemm.grouped_gemm_contiguous(laid_out(rows, layout), b, ends, **scaled, out=sorted_out)
    scaled["a_scale"] = slab_scale
    omnigemm.grouped_gemm_masked(laid_out(slabs, layout), b, indices(counts), **scaled, out=masked_out)
    start = 0
    for g, count in enumerate(counts):
        scale = b_scale if b_scale.numel() == 1 else b_scale[g]
        exact = reference.int8_gemm(slabs[g, :count], b[g], slab_scale[g, :count], scale)
        assert roundings(sorted_out[start : start + count], exact) <= ONE_ROUNDING
        assert roundings(masked_out[g, :count], exact) <= ONE_ROUNDING
        assert bool((masked_out[g, count:] == SENTINEL).all())
        start += count
    assert bool((sorted_out[start:] == SENTINEL).all())
    sorted_untouched()
    masked_untouched()
