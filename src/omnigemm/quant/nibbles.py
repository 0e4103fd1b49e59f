"""Two 4-bit values in a byte, eight in a 32-bit word: packing, unpacking and moving columns."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

# Rows are unpacked this many columns at a time, so that a large weight never has an unpacked copy of itself.
BLOCK = 1 << 22


def pack_nibbles(q: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of values 0..15 -> uint8 [..., ceil(K/2)], even columns in the low half."""
    if q.shape[-1] % 2:
        q = pad(q, (0, 1))
    return q[..., 0::2] | (q[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of pack_nibbles: uint8 [..., ceil(k/2)] -> uint8 [..., k]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :k]


def words_to_bytes(words: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [..., W] with eight values a word, lowest bits first -> contiguous uint8 [..., ceil(k/2)].

    In little-endian memory such a word already is four bytes of two values each, so nothing is unpacked.
    """
    *lead, count = words.shape
    # Flat first: a dimension of size 1 may have any stride, which view does not take.
    flat = words.contiguous().as_strided((words.numel(),), (1,))
    data = flat.view(torch.uint8).reshape(*lead, 4 * count)
    return data[..., : (k + 1) // 2].contiguous()


def row_blocks(rows: int, columns: int, block: int = BLOCK) -> list[slice]:
    """Slices that cover `rows`, each of about `block` elements."""
    step = max(1, block // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def gather_columns(packed: torch.Tensor, k: int, perm: torch.Tensor) -> torch.Tensor:
    """Packed [.., N, ceil(k/2)] with column perm[j], of perm [.., Kp], at j; -1 gives 8, the weight zero."""
    if packed.dim() == 3:
        out = packed.new_empty(*packed.shape[:-1], (perm.shape[-1] + 1) // 2)
        for target, one, order in zip(out, packed, perm, strict=True):
            target.copy_(gather_columns(one, k, order))
        return out
    index = torch.where(perm < 0, k, perm).long()
    out = packed.new_empty(packed.shape[0], (perm.shape[0] + 1) // 2)
    for rows in row_blocks(packed.shape[0], perm.shape[0]):
        q = pad(unpack_nibbles(packed[rows], k), (0, 1), value=8)
        out[rows] = pack_nibbles(q.index_select(1, index))
    return out
