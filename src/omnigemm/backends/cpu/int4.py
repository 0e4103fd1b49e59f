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


# ---------------------------------------------------------------------------------------------------- packed


class _Packed(NamedTuple):
    weight: Tensor  # PyTorch's own layout
    scales: Tensor  # [G, N, 2] in bf16: scale, and the offset (8 - zero) * scale
    offset_error: Tensor | None  # [G, N]: what the offsets lost by rounding to bf16, if there are zero points
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
    values = torch.full((n, k), 8, dtype=torch.int32, device=weight.qweight.device)
    values[: weight.n, 0:stored:2] = weight.qweight & 15
    values[: weight.n, 1:stored:2] = weight.qweight >> 4
    scale = torch.zeros(k // group, n, dtype=torch.float32, device=weight.scales.device)
    zero = torch.full_like(scale, 8.0)
    groups = slice(None if weight.scales.size(1) == 1 else weight.scales.size(1))  # one scale serves all of K
    scale[groups, : weight.n] = weight.scales.t().bfloat16().float()
    if weight.zeros is not None:
        zero[groups, : weight.n] = weight.zeros.t().float()
    offset = (8.0 - zero) * scale
    pairs = torch.stack([scale, offset], dim=2).bfloat16()
    offset_error = None if weight.zeros is None else (offset - pairs[..., 1].float())[:, : weight.n].contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    return _Packed(packed, pairs, offset_error, group, k)


def _packed_multiply(out: Tensor, a: Tensor, weight: Int4Parts, bias: Tensor | None) -> None:
    form = store.get(weight.qweight, "packed", weight.companions(), weight.qweight.numel(), lambda: _pack(weight))
    if form is None:
        _blocks_multiply(out, a, weight, bias)
        return
    x = in_stored_order(a, weight, form.k, torch.bfloat16).contiguous()
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, form.weight, form.group, form.scales)[:, : weight.n]
    if form.offset_error is not None:
        # The error of an offset is shared by its whole group, so activations that do not average out would add it up.
        sums = x.float().unflatten(1, (-1, form.group)).sum(2)
        sums = torch.where(sums.isfinite(), sums, 0.0)  # what is not finite is in the product already
        y = torch.addmm(y.float(), sums, form.offset_error)
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


class _Unpacker:
    """Dequantises blocks of rows to fp32, the even columns apart from the odd ones, always into the same memory.

    Fresh memory for each block would cost several times the arithmetic, in page faults.
    """

    def __init__(self, weight: Int4Parts) -> None:
        self.weight = weight
        columns = weight.qweight.size(1)
        self.blocks = blocks(weight.n, 2 * columns)
        rows = self.blocks[0].stop if self.blocks else 0
        device = weight.qweight.device
        self._nibbles = torch.empty(rows, columns, dtype=torch.uint8, device=device)
        self._values = torch.empty(2, rows, columns, dtype=torch.float32, device=device)

    def halves(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The even and the odd columns of some rows; good until the next call."""
        packed = self.weight.qweight[rows]
        scale = self.weight.scales[rows].float()
        zero = 8.0 if self.weight.zeros is None else self.weight.zeros[rows].float()
        nibbles, (even, odd) = self._nibbles[: packed.size(0)], self._values[:, : packed.size(0)]
        even.copy_(torch.bitwise_and(packed, 15, out=nibbles))
        odd.copy_(torch.bitwise_right_shift(packed, 4, out=nibbles))
        for half in (even, odd):
            self._apply(half, scale, zero)
        return even, odd

    def _apply(self, half: Tensor, scale: Tensor, zero: Tensor | float) -> None:
        """(q - zero) * scale in place; half a row holds half of each group, and an odd group is all of K."""
        width = max(1, self.weight.group_size // 2) if scale.size(1) > 1 else max(1, half.size(1))
        whole = half.size(1) // width
        for part, groups in ((half[:, : whole * width], slice(whole)), (half[:, whole * width :], slice(whole, None))):
            if part.size(1):
                view = part.unflatten(1, (-1, min(width, part.size(1))))
                view.sub_(zero if isinstance(zero, float) else zero[:, groups, None]).mul_(scale[:, groups, None])


def _blocks_multiply(out: Tensor, a: Tensor, weight: Int4Parts, bias: Tensor | None) -> None:
    x = in_stored_order(a, weight, weight.qweight.size(1) * 2, torch.float32)
    x_even, x_odd = x[:, 0::2].contiguous(), x[:, 1::2].contiguous()
    unpacker = _Unpacker(weight)
    for rows in unpacker.blocks:
        even, odd = unpacker.halves(rows)
        acc = torch.mm(x_even, even.t())
        acc.addmm_(x_odd, odd.t())
        finish(out[:, rows], acc, None if bias is None else bias[rows])


# ----------------------------------------------------------------------------------------------------- dense


_FEWEST, _MOST = 2.0**-14, torch.finfo(torch.float16).max / 16  # scales of which fp16 has all multiples


def _dense(weight: Int4Parts, dtype: torch.dtype) -> Tensor:
    """The weight in the order of its stored columns; nothing where fp16 has no room for it."""
    if dtype == torch.float16:
        scales = weight.scales.float().abs()
        if not bool(((scales <= _MOST) & ((scales >= _FEWEST) | (scales == 0.0))).all()):
            return scales.new_empty(0)
    full = torch.empty(weight.n, weight.qweight.size(1) * 2, dtype=dtype, device=weight.qweight.device)
    unpacker = _Unpacker(weight)
    for rows in unpacker.blocks:
        full[rows, 0::2], full[rows, 1::2] = unpacker.halves(rows)
    return full


def _dense_multiply(out: Tensor, a: Tensor, weight: Int4Parts, bias: Tensor | None) -> None:
    nbytes = weight.qweight.numel() * 4
    form = store.get(weight.qweight, ("dense", a.dtype), weight.companions(), nbytes, lambda: _dense(weight, a.dtype))
    if form is None or form.numel() == 0:
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
        lambda p: p.n * p.k * (4.5e-10 + 1e-11 * p.m),
        lambda p: _blocks_multiply,
    ),
)
