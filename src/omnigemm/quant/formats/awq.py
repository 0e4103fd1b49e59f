"""AWQ checkpoints of the usual "gemm" version: qweight, scales and qzeros.

qweight int32 [K, ceil(N/8)] and qzeros int32 [G, ceil(N/8)] are packed along N: output column 8c + j is at
bit SHIFTS[j] of word c. Zero points are stored as they are. scales [G, N].
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ...core.dtypes import FLOATS
from .parts import (
    Parts,
    ceil_div,
    check_shape,
    check_tensor,
    check_words,
    find_groups,
    finish,
    logical_size,
    one_by_one,
)

WHERE = "from_awq"
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def from_awq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    *,
    group_size: int | None,
    n: int | None,
    k: int | None,
) -> Parts:
    """The canonical parts of an AWQ weight, or of a stack of them with experts first."""
    check_tensor(WHERE, "qweight", qweight, (torch.int32,))
    check_tensor(WHERE, "scales", scales, FLOATS, qweight)
    lead = tuple(qweight.shape[:-2])
    experts = "E, " if lead else ""
    check_shape(WHERE, "scales", scales, (*lead, None, None), f"({experts}G, N)")
    n = logical_size(WHERE, "n", n, scales.shape[-1])
    k = logical_size(WHERE, "k", k, qweight.shape[-2])
    check_shape(WHERE, "scales", scales, (*lead, None, n), f"({experts}G, N)")
    check_shape(WHERE, "qweight", qweight, (*lead, k, None), f"({experts}K, ceil(N/8))")
    check_words(WHERE, "qweight", qweight, -1, n, "N")
    zeros = None
    if qzeros is not None:
        check_tensor(WHERE, "qzeros", qzeros, (torch.int32,), qweight)
        check_shape(WHERE, "qzeros", qzeros, (*lead, scales.shape[-2], None), f"({experts}G, ceil(N/8))")
        check_words(WHERE, "qzeros", qzeros, -1, n, "N")
        columns = [((qzeros >> shift) & 15).to(torch.uint8) for shift in SHIFTS]
        zeros = torch.stack(columns, dim=-1).flatten(-2)[..., :n].mT
    groups = find_groups(WHERE, k=k, group_size=group_size, scales=scales, scales_name="scales", axis=-2)
    return finish(_repack(qweight, n), scales.mT, zeros, k, groups)


def _repack(qweight: torch.Tensor, n: int) -> torch.Tensor:
    """int32 [.., K, W] -> bytes [.., N, ceil(K/2)], one of a word's eight columns at a time."""
    *lead, k, words = qweight.shape
    if lead:
        return one_by_one(qweight, (n, ceil_div(k, 2)), lambda one: _repack(one, n))
    if k % 2:
        qweight = pad(qweight, (0, 0, 0, 1))
    even, odd = qweight[0::2], qweight[1::2]
    out = torch.empty(words, 8, ceil_div(k, 2), dtype=torch.uint8, device=qweight.device)
    for j, shift in enumerate(SHIFTS):
        pairs = ((even >> shift) & 15) | (((odd >> shift) & 15) << 4)
        out[:, j] = pairs.to(torch.uint8).mT
    return out.flatten(0, 1)[:n].contiguous()
