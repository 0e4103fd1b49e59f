"""The operations as their contract states them, in float64 and without thought for speed.

Grouped products are these, group by group.
Nothing here imports the library: a mistake in it cannot hide in its own reference. Integers are multiplied as
integers, so `int8_gemm` is exact up to the final scaling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 128


def wide(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value).to(torch.float64)


def gemm(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """alpha A B + beta C; a missing batch, or one of 1, serves every product. C is not read if beta is 0."""
    if a.dim() == 2 and b.dim() == 2:
        result = alpha * (wide(a) @ wide(b))
    else:
        batches = [x.size(0) for x in (a, b) if x.dim() == 3]
        batch = next((size for size in batches if size != 1), 1)
        result = torch.empty(batch, a.size(-2), b.size(-1), dtype=torch.float64)
        for i in range(batch):
            result[i] = gemm(_item(a, i), _item(b, i), alpha=alpha)
    if c is not None and beta != 0.0:
        result = result + beta * wide(c).expand(result.shape)
    return result


def _item(x: Tensor, i: int) -> Tensor:
    if x.dim() == 2:
        return x
    return x[0] if x.size(0) == 1 else x[i]


def int8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | float,
    b_scale: Tensor | float,
    a_zero: Tensor | int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """a_scale * b_scale * (A B^T - a_zero * rowsum(B)) + bias, for two matrices."""
    m, n = a.size(0), b.size(0)
    integers = a.to(torch.int64) @ b.to(torch.int64).t()
    if a_zero is not None:
        zero = torch.as_tensor(a_zero).to(torch.int64).reshape(-1, 1).expand(m, 1)
        integers = integers - zero * b.to(torch.int64).sum(1)
    row = wide(a_scale).reshape(-1, 1).expand(m, 1)
    column = wide(b_scale).reshape(1, -1).expand(1, n)
    result = row * column * integers.to(torch.float64)
    return result if bias is None else result + wide(bias)


def spread(scale: Tensor | float, rows: int, k: int) -> Tensor:
    """A scale for every element [rows, k]: one value; [rows]; [rows, ceil(k/128)]; or one for 128 rows and columns."""
    values = wide(scale)
    if values.numel() == 1:
        return values.reshape(1, 1).expand(rows, k)
    if values.dim() == 1:
        return values[:, None].expand(rows, k)
    if values.size(0) != rows:
        values = values.repeat_interleave(BLOCK, 0)[:rows]
    return values.repeat_interleave(BLOCK, 1)[:, :k]


def fp8_gemm(
    a: Tensor, b: Tensor, a_scale: Tensor | float, b_scale: Tensor | float, bias: Tensor | None = None
) -> Tensor:
    """Scales multiply their elements, then A B^T + bias."""
    left = wide(a.float()) * spread(a_scale, *a.shape)
    right = wide(b.float()) * spread(b_scale, *b.shape)
    result = left @ right.t()
    return result if bias is None else result + wide(bias)


def int4_weight(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, perm: Tensor | None, k: int, group_size: int
) -> Tensor:
    """W[n, perm[j]] = scales[n, g] * (q[n, j] - zeros[n, g]) with g = j // group_size; without zeros they are 8."""
    packed = qweight.numpy().astype(np.int64)
    stored = np.arange(k if perm is None else perm.numel())
    group = stored // group_size
    q = np.where(stored % 2 == 0, packed[:, stored // 2] % 16, packed[:, stored // 2] // 16)
    zero = 8 if zeros is None else zeros.numpy().astype(np.int64)[:, group]
    values = wide(scales).numpy()[:, group] * (q - zero)
    column = stored if perm is None else perm.numpy()
    weight = np.full((len(packed), k), np.nan)
    weight[:, column[column >= 0]] = values[:, column >= 0]
    return torch.from_numpy(weight)


def linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A W^T + bias."""
    result = wide(a) @ wide(weight).t()
    return result if bias is None else result + wide(bias)
