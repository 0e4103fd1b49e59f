"""`int4_gemm`: 4-bit weights with group scales, 16-bit activations.

Three kernels. `packed` is PyTorch's int4 kernel: the fastest for a few rows, but only for bf16 (its fp16 and fp32 forms
are scalar code). `dense` multiplies by a 16-bit copy of the weight, prepared once while there is room for it.
`blocks` unpacks a block of the weight at a time and multiplies fp32: slower, no extra memory, for every case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.dispatch import Support
from ...core.problem import Problem
from ...core.weights import Int4Parts
from .isa import has_amx_bf16, native_halves
from .kernel import CpuKernel, blocks, finish, no, yes
from .prepared import store


def in_stored_order(a: Tensor, weight: Int4Parts, columns: int, dtype: torch.dtype) -> Tensor:
    """Activations in the weight's column order, padded with zeros to `columns`."""
    if weight.perm is not None:
        real = weight.perm >= 0
        order = weight.perm.clamp(min=0)
        a = a.index_select(1, order) if a.size(1) else a.new_zeros(a.size(0), order.numel())
        if not bool(real.all()):
            a = a.masked_fill(~real, 0.0)  # not a product: an infinity times 0 would be NaN
    a = a.to(dtype)
    return a if a.size(1) == columns else torch.nn.functional.pad(a, (0, columns - a.size(1)))


def nibbles(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd columns of a packed matrix."""
    return packed & 15, packed >> 4


# ---------------------------------------------------------------------------------------------------- packed


class _Packed(NamedTuple):
    weight: Tensor  # PyTorch's own layout
    scales: Tensor  # [G, N, 2]: scale, and the offset (8 - zero) * scale
    group: int
    k: int


_PACK_N = 64  # columns of N that the kernel treats at once
_PACK_GROUPS = (128, 64, 32)


def _pack_group(weight_group: int, k: int) -> int:
    """The group size given to the kernel: whole-K scales are repeated for groups that it knows."""
    if weight_group in _PACK_GROUPS:
        return weight_group
    return next((size for size in _PACK_GROUPS if k >= size), 32)


def _pack(weight: Int4Parts) -> _Packed:
    stored = weight.qweight.size(1) * 2
    group = _pack_group(weight.group_size, stored)
    k = -(-stored // group) * group
    n = -(-weight.n // _PACK_N) * _PACK_N
    values = torch.full((n, k), 8, dtype=torch.int32)
    even, odd = nibbles(weight.qweight)
    values[: weight.n, 0:stored:2] = even.int()
    values[: weight.n, 1:stored:2] = odd.int()
    scale = weight.scales.float()
    zero = 8.0 if weight.zeros is None else weight.zeros.float()
    pairs = torch.zeros(k // group, n, 2)
    width = k // group if scale.size(1) == 1 else scale.size(1)
    pairs[:width, : weight.n, 0] = scale.t()
    pairs[:width, : weight.n, 1] = ((8.0 - zero) * scale).t()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    return _Packed(packed, pairs.bfloat16(), group, k)


def _packed_multiply(out: Tensor, a: Tensor, weight: Int4Parts, bias: Tensor | None) -> None:
    form = store.get(weight.qweight, "packed", weight.companions(), weight.qweight.numel(), lambda: _pack(weight))
    if form is None:
        _blocks_multiply(out, a, weight, bias)
        return
    x = in_stored_order(a, weight, form.k, torch.bfloat16).contiguous()
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, form.weight, form.group, form.scales)[:, : weight.n]
    out.copy_(y if bias is None else y + bias.float())


def _packed_accepts(problem: Problem) -> Support:
    if problem.a_dtype != "bf16" or problem.out_dtype != "bf16":
        return no("PyTorch's int4 kernel is fast for bf16 activations and bf16 output only")
    if problem.k == 0 or problem.n == 0:
        return no("PyTorch's int4 kernel takes no empty weights")
    return yes("PyTorch's int4 kernel")


def _packed_seconds(problem: Problem) -> float:
    return problem.n * problem.k * (2.4e-11 + 1.65e-11 * problem.m)


# ---------------------------------------------------------------------------------------------------- blocks


def unpack_half(half: Tensor, scale: Tensor, offset: Tensor, width: int) -> Tensor:
    """q * scale + offset in fp32 for half a row of values [R, C], `width` neighbours sharing a scale."""
    value = half.float()
    whole = half.size(1) // width
    if whole:
        view = value[:, : whole * width].unflatten(1, (whole, width))
        torch.addcmul(offset[:, :whole, None], view, scale[:, :whole, None], out=view)
    if half.size(1) > whole * width:
        tail = value[:, whole * width :]
        torch.addcmul(offset[:, whole : whole + 1], tail, scale[:, whole : whole + 1], out=tail)
    return value


def _halves(weight: Int4Parts, rows: slice) -> tuple[Tensor, Tensor]:
    """The even and the odd columns of some rows, dequantised to fp32."""
    scale = weight.scales[rows].float()
    zero = 8.0 if weight.zeros is None else weight.zeros[rows].float()
    offset = -zero * scale
    even, odd = nibbles(weight.qweight[rows])
    if weight.group_size % 2 == 0:
        width = weight.group_size // 2
        return unpack_half(even, scale, offset, width), unpack_half(odd, scale, offset, width)
    # An odd group is always the whole of K: one scale per row.
    return even.float() * scale + offset, odd.float() * scale + offset


def _blocks_multiply(out: Tensor, a: Tensor, weight: Int4Parts, bias: Tensor | None) -> None:
    columns = weight.qweight.size(1) * 2
    x = in_stored_order(a, weight, columns, torch.float32)
    x_even, x_odd = x[:, 0::2].contiguous(), x[:, 1::2].contiguous()
    for rows in blocks(weight.n, columns):
        even, odd = _halves(weight, rows)
        acc = torch.mm(x_even, even.t())
        acc.addmm_(x_odd, odd.t())
        finish(out[:, rows], acc, None if bias is None else bias[rows])


# ----------------------------------------------------------------------------------------------------- dense


def _dense(weight: Int4Parts, dtype: torch.dtype) -> Tensor:
    """The weight in the order of its stored columns."""
    columns = weight.qweight.size(1) * 2
    full = torch.empty(weight.n, columns, dtype=dtype)
    for rows in blocks(weight.n, columns):
        full[rows, 0::2], full[rows, 1::2] = _halves(weight, rows)
    return full


def _dense_multiply(out: Tensor, a: Tensor, weight: Int4Parts, bias: Tensor | None) -> None:
    nbytes = weight.qweight.numel() * 4
    form = store.get(weight.qweight, ("dense", a.dtype), weight.companions(), nbytes, lambda: _dense(weight, a.dtype))
    if form is None:
        _blocks_multiply(out, a, weight, bias)
        return
    x = in_stored_order(a, weight, form.size(1), a.dtype)
    if bias is None:
        torch.mm(x, form.t(), out=out)
    elif bias.dtype == x.dtype:
        torch.addmm(bias, x, form.t(), out=out)
    else:
        out.copy_(torch.mm(x, form.t()) + bias.float())


def _dense_accepts(problem: Problem) -> Support:
    if problem.out_dtype != problem.a_dtype:
        return no(f"torch's {problem.a_dtype} product has no {problem.out_dtype} output")
    if problem.a_dtype not in native_halves():
        return no(f"this processor has no {problem.a_dtype} product that can be used")
    return yes(f"{problem.a_dtype} product with a copy of the weight, prepared once")


def _dense_seconds(problem: Problem) -> float:
    # Without AMX, torch's bf16 products are slower than fp16's and than fp32's.
    row = (2e-12 if has_amx_bf16() else 1.5e-11) if problem.a_dtype == "bf16" else 9e-12
    return problem.n * problem.k * (1.8e-10 + problem.m * row)


KERNELS = (
    CpuKernel("packed", _packed_accepts, _packed_seconds, lambda p: _packed_multiply),
    CpuKernel("dense", _dense_accepts, _dense_seconds, lambda p: _dense_multiply),
    CpuKernel(
        "blocks",
        lambda p: yes("fp32 product with blocks unpacked on the way"),
        lambda p: p.n * p.k * (8e-10 + 1e-11 * p.m),
        lambda p: _blocks_multiply,
    ),
)
