"""compressed-tensors checkpoints of the "pack-quantized" kind with 4-bit weights.

weight_packed int32 [N, ceil(K/8)]: bits 4i..4i+3 of word r are input column 8r + i, stored plus 8.
weight_scale [N, G], or [N, 1] for one scale a channel. weight_zero_point int32 [ceil(N/8), G], packed along N
and stored plus 8 too. weight_shape holds N and K. weight_g_idx int32 [K] is there for act-order weights only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.dtypes import FLOATS
from ...core.errors import DTypeError, ShapeError
from ..nibbles import unpack_nibbles, words_to_bytes
from .parts import (
    Parts,
    check_shape,
    check_tensor,
    check_values,
    check_words,
    find_groups,
    finish,
    logical_size,
)

WHERE = "from_compressed_tensors"


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    weight_shape: torch.Tensor | Sequence[int] | None,
    weight_zero_point: torch.Tensor | None,
    weight_g_idx: torch.Tensor | None,
    group_size: int | None,
) -> Parts:
    """The canonical parts of a pack-quantized weight, or of a stack of them with experts first."""
    check_tensor(WHERE, "weight_packed", weight_packed, (torch.int32,))
    check_tensor(WHERE, "weight_scale", weight_scale, FLOATS, weight_packed)
    lead = tuple(weight_packed.shape[:-2])
    experts = "E, " if lead else ""
    n, words = weight_packed.shape[-2:]
    check_shape(WHERE, "weight_scale", weight_scale, (*lead, n, None), f"({experts}N, G)")
    if weight_g_idx is not None:
        check_tensor(WHERE, "weight_g_idx", weight_g_idx, (torch.int32, torch.int64), weight_packed)
        check_values(WHERE, "weight_g_idx", weight_g_idx)
        if bool((weight_g_idx == -1).all()) and words:
            weight_g_idx = None  # how these files say that the columns are in order
    k = 8 * words
    if weight_shape is not None:
        rows, k = _read_shape(weight_shape)
        if rows != n:
            raise ShapeError(
                f"{WHERE}: weight_shape is {(rows, k)}, expected N = {n}, the rows of weight_packed "
                f"{tuple(weight_packed.shape)}"
            )
    elif weight_g_idx is not None and weight_g_idx.dim():
        k = weight_g_idx.shape[-1]
    check_words(WHERE, "weight_packed", weight_packed, -1, k, "K")
    zeros = None
    if weight_zero_point is not None:
        check_tensor(WHERE, "weight_zero_point", weight_zero_point, (torch.int32,), weight_packed)
        wanted = (*lead, None, weight_scale.shape[-1])
        check_shape(WHERE, "weight_zero_point", weight_zero_point, wanted, f"({experts}ceil(N/8), G)")
        check_words(WHERE, "weight_zero_point", weight_zero_point, -2, n, "N")
        # Both weight and zero point carry the same +8, which their difference cancels.
        zeros = unpack_nibbles(words_to_bytes(weight_zero_point.mT, n), n).mT
    groups = find_groups(
        WHERE,
        k=k,
        group_size=group_size,
        scales=weight_scale,
        scales_name="weight_scale",
        axis=-1,
        g_idx=weight_g_idx,
        g_idx_name="weight_g_idx",
    )
    return finish(words_to_bytes(weight_packed, k), weight_scale, zeros, k, groups)


def _read_shape(weight_shape: torch.Tensor | Sequence[int]) -> tuple[int, int]:
    """(N, K) from a tensor [2], a stack of equal ones [E, 2], or a sequence."""
    expected = "two whole numbers, N and K"
    if isinstance(weight_shape, torch.Tensor):
        if weight_shape.dtype not in (torch.int32, torch.int64):
            raise DTypeError(f"{WHERE}: weight_shape has dtype {weight_shape.dtype}, expected torch.int32 or int64")
        check_values(WHERE, "weight_shape", weight_shape)
        rows = weight_shape.reshape(-1, 2).tolist() if weight_shape.numel() % 2 == 0 else []
        if weight_shape.dim() not in (1, 2) or not rows or any(row != rows[0] for row in rows):
            raise ShapeError(f"{WHERE}: weight_shape is {weight_shape.tolist()}, expected {expected}")
        weight_shape = rows[0]
    elif not isinstance(weight_shape, Sequence):
        raise DTypeError(f"{WHERE}: weight_shape is {weight_shape!r}, expected {expected}")
    sizes = list(weight_shape)
    if len(sizes) != 2:
        raise ShapeError(f"{WHERE}: weight_shape is {sizes}, expected {expected}")
    return logical_size(WHERE, "weight_shape[0]", sizes[0], 0), logical_size(WHERE, "weight_shape[1]", sizes[1], 0)
