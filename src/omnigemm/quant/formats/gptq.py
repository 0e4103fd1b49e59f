"""GPTQ checkpoints: qweight, scales, qzeros and g_idx.

qweight int32 [ceil(K/8), N]: bits 4i..4i+3 of word r are the value of input column 8r + i.
qzeros int32 [G, ceil(N/8)]: bits 4i..4i+3 of word c belong to output column 8c + i. Format "gptq" stores the
zero point minus one in four bits, so 0 as 15; "gptq_v2" the zero point.
scales [G, N]. g_idx int32 [K]: the group of each input column, k // group_size unless act-order.
"""

from __future__ import annotations

import torch

from ...core.dtypes import FLOATS
from ...core.errors import UnsupportedError
from ..nibbles import unpack_nibbles, words_to_bytes
from .parts import (
    Parts,
    check_shape,
    check_tensor,
    check_words,
    find_groups,
    finish,
    logical_size,
)

WHERE = "from_gptq"
ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}


def from_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    *,
    group_size: int | None,
    checkpoint_format: str,
    n: int | None,
    k: int | None,
) -> Parts:
    """The canonical parts of a GPTQ weight, or of a stack of them with experts first."""
    if not isinstance(checkpoint_format, str) or checkpoint_format not in ZERO_OFFSET:
        raise UnsupportedError(
            f"{WHERE}: checkpoint_format is {checkpoint_format!r}, expected 'gptq' or 'gptq_v2' "
            "('marlin' is read by from_marlin)"
        )
    check_tensor(WHERE, "qweight", qweight, (torch.int32,))
    check_tensor(WHERE, "scales", scales, FLOATS, qweight)
    lead = tuple(qweight.shape[:-2])
    experts = "E, " if lead else ""
    rows = qweight.shape[-2]
    n = logical_size(WHERE, "n", n, qweight.shape[-1])
    check_shape(WHERE, "qweight", qweight, (*lead, rows, n), f"({experts}ceil(K/8), N)")
    check_shape(WHERE, "scales", scales, (*lead, None, n), f"({experts}G, N)")
    if g_idx is not None and isinstance(g_idx, torch.Tensor) and g_idx.numel() == 0 and rows:
        g_idx = None  # how some files say that there is none
    from_order = g_idx.shape[-1] if isinstance(g_idx, torch.Tensor) and g_idx.dim() else 8 * rows
    k = logical_size(WHERE, "k", k, from_order)
    check_words(WHERE, "qweight", qweight, -2, k, "K")
    zeros = None
    if qzeros is not None:
        check_tensor(WHERE, "qzeros", qzeros, (torch.int32,), qweight)
        check_shape(WHERE, "qzeros", qzeros, (*lead, scales.shape[-2], None), f"({experts}G, ceil(N/8))")
        check_words(WHERE, "qzeros", qzeros, -1, n, "N")
        stored = unpack_nibbles(words_to_bytes(qzeros, n), n)
        zeros = ((stored + ZERO_OFFSET[checkpoint_format]) & 15).mT
    groups = find_groups(WHERE, k=k, group_size=group_size, scales=scales, scales_name="scales", axis=-2, g_idx=g_idx)
    return finish(words_to_bytes(qweight.mT, k), scales.mT, zeros, k, groups)
