"""int4_gemm: every kernel and every kind of weight, against the exactly dequantised weight in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import omnigemm
import reference
from omnigemm import Int4Weight
from omnigemm.backends.cpu.int4 import KERNELS
from omnigemm.backends.cpu.kernel import CpuKernel
from omnigemm.backends.cpu.prepared import store
from omnigemm.ops.int4 import parts_of
from op_support import (
    FLOATS,
    HALVES,
    LAYOUTS,
    READ_LAYOUTS,
    assert_accumulated,
    assert_no_worse,
    dequantized,
    floats,
    guarded,
    int4_weight,
    laid_out,
)

GROUPS = (32, 64, 128, 0)
SIZES = ((1, 1), (3, 7), (16, 32), (17, 33), (64, 128), (65, 129), (33, 255), (128, 257), (0, 32), (7, 0))


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    store.clear()
    yield
    store.clear()


def forms() -> list[Any]:
    """Every kernel with every type of activations that it takes on this processor."""
    found = []
    for kernel in KERNELS:
        for dtype in HALVES:
            if kernel.accepts(omnigemm.plan("int4_gemm", m=1, n=64, k=128, dtype=dtype).problem):
                found.append(pytest.param(kernel, dtype, id=f"{kernel.name}-{dtype}".replace("torch.", "")))
    return found


every_form = pytest.mark.parametrize(("kernel", "dtype"), forms())


def run(kernel: CpuKernel, a: Tensor, w: Int4Weight, bias: Tensor | None, out: Tensor) -> bool:
    """Run one kernel if it takes the problem."""
    problem = omnigemm.plan(
        "int4_gemm",
        m=a.size(0),
        n=w.n,
        k=w.k,
        dtype=a.dtype,
        out_dtype=out.dtype,
        group_size=w.group_size if w.k else None,
        symmetric=w.symmetric,
        act_order=w.act_order,
        bias=bias is not None,
    ).problem
    if not kernel.accepts(problem):
        return False
    kernel.bind(problem)(out, a, parts_of(w), bias)
    return True


def check(result: Tensor, a: Tensor, w: Int4Weight, bias: Tensor | None = None) -> None:
    """Weights (and, before a bias, products) may be rounded to the type of the activations; sums are fp32.

    Zero points may be rounded apart from the values, as if each were 8 scales larger.
    """
    weight = dequantized(w)
    offset = 0.0 if w.symmetric or not weight.numel() else 8 * float(w.scales.max())
    magnitude = reference.linear(a.abs(), weight.abs() + offset, None if bias is None else bias.abs())
    eps = torch.finfo(a.dtype).eps
    assert_accumulated(result, reference.linear(a, weight, bias), magnitude, w.k, operand_eps=eps)


def compare(result: Tensor, a: Tensor, w: Int4Weight, bias: Tensor | None = None, *, allowance: float = 0.0) -> None:
    """Against torch with the weight dequantised to the type of the activations."""
    weight = dequantized(w)
    peer = linear(a, weight.to(a.dtype), None if bias is None else bias.to(a.dtype))
    assert_no_worse(result, reference.linear(a, weight, bias), peer, allowance)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
@every_form
def test_every_kernel(kernel: CpuKernel, dtype: torch.dtype, group: int, symmetric: bool, act_order: bool) -> None:
    ran = 0
    for n, k in SIZES:
        w = int4_weight(n, k, group, symmetric=symmetric, act_order=act_order, dtype=dtype)
        for m, bias in ((1, None), (17, floats(n)), (2, floats(n, dtype=dtype))):
            a = floats(m, k, dtype=dtype)
            out, untouched = guarded((m, n), dtype)
            if run(kernel, a, w, bias, out):
                check(out, a, w, bias)
                untouched()
                ran += 1
    assert ran >= 24  # all but, for some kernels, the empty weights


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
@every_form
def test_no_worse_than_torch(
    kernel: CpuKernel, dtype: torch.dtype, group: int, symmetric: bool, act_order: bool
) -> None:
    n, k = 96, 257 if group == 0 else 300
    w = int4_weight(n, k, group, symmetric=symmetric, act_order=act_order, dtype=dtype)
    for m, bias in ((33, None), (33, floats(n)), (33, floats(n, dtype=dtype)), (1, None), (2, None)):
        a, out = floats(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
        assert run(kernel, a, w, bias, out)
        compare(out, a, w, bias)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", GROUPS)
def test_blocks_are_exact_up_to_accumulation(group: int, dtype: torch.dtype) -> None:
    blocks = next(one for one in KERNELS if one.name == "blocks")
    for n, k in ((50, 129), (33, 64), (17, 31)):
        for act_order in (False, True):
            w = int4_weight(n, k, group, symmetric=False, act_order=act_order, dtype=dtype)
            a, bias, weight = floats(5, k, dtype=dtype), floats(n), dequantized(w)
            for out_dtype in FLOATS:
                out, untouched = guarded((5, n), out_dtype)
                assert run(blocks, a, w, bias, out)
                exact = reference.linear(a, weight, bias)
                magnitude = reference.linear(a.abs(), weight.abs(), bias.abs())
                assert_accumulated(out, exact, magnitude, k)
                untouched()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [0, 1, 3, 16, 129])
def test_the_chosen_kernel(m: int, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        for group in GROUPS:
            w = int4_weight(n, k, group, symmetric=group != 64, act_order=group == 32, dtype=dtype)
            a, bias = floats(m, k, dtype=dtype), floats(n, dtype=dtype)
            result = omnigemm.int4_gemm(a, w, bias=bias)
            assert result.dtype == dtype
            check(result, a, w, bias)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", HALVES)
def test_out_of_another_type(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for act_order in (False, True):
        w = int4_weight(33, 100, 32, symmetric=False, act_order=act_order, dtype=dtype)
        a, bias = floats(6, 100, dtype=dtype), floats(33)
        for layout in LAYOUTS:
            out, untouched = guarded((6, 33), out_dtype, layout)
            assert omnigemm.int4_gemm(a, w, bias=bias, out=out) is out
            check(out, a, w, bias)
            untouched()


@pytest.mark.parametrize("layout", READ_LAYOUTS)
@every_form
def test_any_strides(kernel: CpuKernel, layout: str, dtype: torch.dtype) -> None:
    for act_order in (False, True):
        for m, k in ((6, 65), (1, 65), (6, 64), (1, 64), (6, 1)):
            w = int4_weight(19, k, 32, act_order=act_order, dtype=dtype)
            a = laid_out(floats(m, k, dtype=dtype), layout)
            out, untouched = guarded((m, 19), dtype, layout if layout in LAYOUTS else "columns")
            assert run(kernel, a, w, None, out)
            check(out, a, w)
            untouched()


@pytest.mark.parametrize("scale_dtype", FLOATS)
@every_form
def test_scales_of_another_type(kernel: CpuKernel, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    for group in GROUPS:
        for symmetric in (True, False):
            w = int4_weight(48, 256, group, symmetric=symmetric, dtype=scale_dtype)
            a = floats(33, 256, dtype=dtype)
            out = torch.empty(33, 48, dtype=dtype)
            assert run(kernel, a, w, None, out)
            compare(out, a, w)


@every_form
def test_small_integers_are_exact(kernel: CpuKernel, dtype: torch.dtype) -> None:
    """Scales of 1 and sums below 256 are exact in every type."""
    k = 64
    q = torch.randint(0, 256, (20, k // 2), dtype=torch.uint8)
    w = Int4Weight(q, torch.ones(20, 2, dtype=dtype), torch.full((20, 2), 7, dtype=torch.uint8), k=k, group_size=32)
    a = torch.zeros(16, k, dtype=dtype)
    a[torch.arange(16), torch.arange(0, k, 4)] = 2.0
    a[:, 5] = -1.0
    out = torch.empty(16, 20, dtype=dtype)
    assert run(kernel, a, w, None, out)
    assert torch.equal(out.double(), reference.linear(a, dequantized(w)))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@every_form
def test_special_activations_stay_in_their_row(
    kernel: CpuKernel, value: float, group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """Padding must not turn an infinity into NaN: columns that do not exist are not multiplied, and nothing that is
    taken back afterwards is infinite."""
    for act_order in (False, True):
        w = int4_weight(9, 51, group, symmetric=symmetric, act_order=act_order, dtype=dtype)
        w.qweight.copy_(w.qweight | 0x99)  # no weight is 0
        if w.zeros is not None:
            w.zeros.copy_(w.zeros % 8)
        for column in (0, 50):
            a = floats(3, 51, dtype=dtype)
            a[1, column] = value
            out = torch.empty(3, 9, dtype=dtype)
            assert run(kernel, a, w, None, out)
            exact = reference.linear(a, dequantized(w)).float()
            torch.testing.assert_close(out[1].float(), exact[1], rtol=0, atol=0, equal_nan=True)
            assert bool(out[0::2].isfinite().all())


@pytest.mark.parametrize(("size", "others"), [(1e-9, 3e3), (3e4, 1e-5), (1e-5, 1.0)])
def test_weights_that_fp16_has_no_room_for(size: float, others: float) -> None:
    """Scales in bf16 may be far beyond fp16, and the result within."""
    (dense,) = (kernel for kernel in KERNELS if kernel.name == "dense")
    w = omnigemm.quantize_int4((size * torch.randn(48, 256)).bfloat16())
    a, out = (others * torch.randn(99, 256)).half(), torch.full((99, 48), float("nan"), dtype=torch.float16)
    problem = omnigemm.plan("int4_gemm", m=99, n=48, k=256, dtype="fp16", group_size=128).problem
    store.clear()
    dense.bind(problem)(out, a, parts_of(w), None)
    check(out, a, w)
    assert store.nbytes() == 0


@every_form
def test_offsets_that_cancel(kernel: CpuKernel, dtype: torch.dtype) -> None:
    """Equal activations and weights that add up to 0: an error in a zero point would be multiplied by K."""
    n, k = 24, 256
    low = torch.randint(0, 7, (n, k // 2), dtype=torch.uint8)
    zeros = torch.full((n, 2), 3, dtype=torch.uint8)
    scale = (torch.rand(n, 2) + 1).to(dtype)
    w = Int4Weight(low | (6 - low) << 4, scale, zeros, k=k, group_size=128)
    a = (1 + 0.01 * torch.randn(4, k)).to(dtype)
    out = torch.empty(4, n, dtype=dtype)
    assert run(kernel, a, w, None, out)
    # packed takes back what rounding the offsets to bf16 does to a result, but only after the result was rounded.
    offset = (8 - zeros.double()) * scale.double()
    lost = (offset - offset.to(torch.bfloat16).double()).abs().sum(1).max() * 128
    compare(out, a, w, allowance=float(lost) * 2**-7 if kernel.name == "packed" else 0.0)


def _in_place(x: Tensor) -> None:
    x.mul_(2)


def _data(x: Tensor) -> None:
    x.data.mul_(2)


def _inference(x: Tensor) -> None:
    with torch.inference_mode():
        x.mul_(2)


@pytest.mark.parametrize("write", [_in_place, _data, _inference])
@every_form
def test_changed_weights_are_seen(kernel: CpuKernel, dtype: torch.dtype, write: Callable[[Tensor], None]) -> None:
    w = int4_weight(40, 96, 32, symmetric=False, act_order=True, dtype=dtype)
    a = floats(5, 96, dtype=dtype)
    out = torch.empty(5, 40, dtype=dtype)
    assert w.zeros is not None
    w.zeros.fill_(3)
    assert run(kernel, a, w, None, out)
    check(out, a, w)
    for part in (w.scales, w.zeros, w.qweight):
        write(part)
        run(kernel, a, w, None, out)
        check(out, a, w)
    assert w.perm is not None
    w.perm.copy_(w.perm.flip(0))
    run(kernel, a, w, None, out)
    check(out, a, w)


@every_form
def test_without_room_for_prepared_copies(kernel: CpuKernel, dtype: torch.dtype) -> None:
    w = int4_weight(40, 96, 32, symmetric=False, act_order=True, dtype=dtype)
    a, bias = floats(5, 96, dtype=dtype), floats(40)
    out = torch.empty(5, 40, dtype=dtype)
    with omnigemm.settings(weight_cache_mib=0):
        assert run(kernel, a, w, bias, out)
        assert store.nbytes() == 0
    check(out, a, w, bias)


def test_quantized_weights() -> None:
    for group in (32, 64, 128, None):
        for symmetric in (True, False):
            w = omnigemm.quantize_int4(floats(40, 256, dtype=torch.bfloat16), group_size=group, symmetric=symmetric)
            a = floats(7, 256, dtype=torch.bfloat16)
            compare(omnigemm.int4_gemm(a, w), a, w)
            torch.testing.assert_close(w.dequantize(torch.float64), dequantized(w), rtol=1e-6, atol=0)
