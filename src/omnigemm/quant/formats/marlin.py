"""Legacy Marlin checkpoints: B and s, symmetric 4-bit weights in the order of tensor-core fragments.

B int32 [K/16, 2N]. Word c of row r belongs to chunk c // 128, lane (c % 128) // 4 and block j = c % 4; its
bits 4p..4p+3 are the value of
    input column  16 r + 2 (lane % 4) + 8 (p & 1) + (p >> 2)
    output column 64 chunk + 16 j + 8 ((p >> 1) & 1) + lane // 4.
s [G, N]: with several groups position 8 i + j of each run of 64 holds column i + 8 j; with one group (a scale per
column) position 8 i + 2 j + t of each run of 32 holds column 2 i + 8 j + t, t being 0 or 1.
"""

from __future__ import annotations

import torch

from ...core.dtypes import FLOATS
from ...core.errors import ShapeError, UnsupportedError
from .parts import Parts, ceil_div, check_shape, check_tensor, find_groups, finish, logical_size, one_by_one

WHERE = "from_marlin"


def from_marlin(b: torch.Tensor, s: torch.Tensor, *, n: int | None, k: int | None, group_size: int | None) -> Parts:
    """The canonical parts of a Marlin weight, or of a stack of them with experts first."""
    check_tensor(WHERE, "b", b, (torch.int32,))
    check_tensor(WHERE, "s", s, FLOATS, b)
    lead = tuple(b.shape[:-2])
    experts = "E, " if lead else ""
    check_shape(WHERE, "s", s, (*lead, None, None), f"({experts}G, N)")
    stored_k, stored_n = 16 * b.shape[-2], s.shape[-1]
    if stored_n % 64:
        raise ShapeError(f"{WHERE}: s has shape {tuple(s.shape)}, expected N to be a multiple of 64")
    if b.shape[-1] == 4 * stored_n and stored_n:
        raise UnsupportedError(
            f"{WHERE}: b has shape {tuple(b.shape)}, and 4 N words a row for N = {stored_n} is 8-bit "
            f"packing, expected 4-bit packing, 2 N = {2 * stored_n}"
        )
    check_shape(WHERE, "b", b, (*lead, b.shape[-2], 2 * stored_n), f"({experts}K/16, 2 N)")
    n = logical_size(WHERE, "n", n, stored_n)
    k = logical_size(WHERE, "k", k, stored_k)
    if 64 * ceil_div(n, 64) != stored_n:
        raise ShapeError(f"{WHERE}: n is {n}, expected {stored_n} or less by under 64, from s {tuple(s.shape)}")
    if 16 * ceil_div(k, 16) != stored_k:
        raise ShapeError(f"{WHERE}: k is {k}, expected {stored_k} or less by under 16, from b {tuple(b.shape)}")
    groups = find_groups(WHERE, k=k, group_size=group_size, scales=s, scales_name="s", axis=-2)
    scales = _unpermute_scales(s)[..., :n]
    qweight = _unpermute_weight(b, n, ceil_div(k, 2))
    return finish(qweight, scales.mT, None, k, groups)


def _unpermute_scales(s: torch.Tensor) -> torch.Tensor:
    """Both orders swap i and j, so undoing one is doing it again."""
    n = s.shape[-1]
    if s.shape[-2] == 1:
        return torch.unflatten(s, -1, (n // 32, 4, 4, 2)).transpose(-3, -2).flatten(-4)
    return torch.unflatten(s, -1, (n // 64, 8, 8)).mT.flatten(-3)


def _unpermute_weight(b: torch.Tensor, n: int, length: int) -> torch.Tensor:
    """int32 [.., K/16, 2N] -> bytes [.., n, length] of [.., N, K/2]; values p and p + 4 of a word share a byte."""
    *lead, rows, words = b.shape
    if lead:
        return one_by_one(b, (n, length), lambda one: _unpermute_weight(one, n, length))
    chunks = words // 128
    # Axes: row, chunk, lane // 4, lane % 4, j.
    source = b.reshape(rows, chunks, 8, 4, 4)
    # Axes: chunk, j, (p >> 1) & 1, lane // 4 make the output column; row, p & 1, lane % 4 the byte.
    out = torch.empty(chunks, 4, 2, 8, rows, 2, 4, dtype=torch.uint8, device=b.device)
    for p in range(4):
        pairs = ((source >> (4 * p)) & 15) | ((source >> (4 * p + 12)) & 240)
        out[..., p >> 1, :, :, p & 1, :] = pairs.to(torch.uint8).permute(1, 4, 2, 0, 3)
    return out.reshape(64 * chunks, 8 * rows)[:n, :length].contiguous()
