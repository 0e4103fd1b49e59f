"""Groups of products where one launch for all of them is not to be had."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import ShapeError
from .plan import Launch

Factors = Sequence[float] | Tensor  # one number per group, or a tensor of those or of one for all


def read_factors(factors: Factors, count: int) -> Sequence[float]:
    """As numbers of the host's, which waits for them if they are on a device."""
    if not isinstance(factors, Tensor):
        return factors
    with torch._C._AutoDispatchBelowAutograd():
        return [float(one) for one in factors.expand(count).tolist()]


Sizes = tuple[int, int, int]  # M, N, K


def read_sizes(sizes: Tensor, rooms: Sequence[Sizes]) -> list[Sizes]:
    """What is in use of each group, after a check that all of it is there."""
    found = [(m, n, k) for m, n, k in sizes.tolist()]
    for i, (used, room) in enumerate(zip(found, rooms, strict=True)):
        for j, letter in enumerate("MNK"):
            if not 0 <= used[j] <= room[j]:
                where = f"sizes[{i}, {j}]"
                raise ShapeError(
                    f"grouped_gemm: {where} is {used[j]}, expected 0 <= {where} <= {letter} = {room[j]} of group {i}"
                )
    return found


def in_use(
    sizes: Tensor, out: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], c: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
    """The parts of the matrices that sizes say, in the same order."""
    rooms = [(*one.shape, x.size(1)) for one, x in zip(out, a, strict=True)]
    found = read_sizes(sizes, rooms)
    parts = [one[:m, :n] for one, (m, n, _) in zip(out, found, strict=True)]
    left = [one[:m, :k] for one, (m, _, k) in zip(a, found, strict=True)]
    right = [one[:k, :n] for one, (_, n, k) in zip(b, found, strict=True)]
    if c is None:
        return parts, left, right, None
    # C may be spread, so its part is taken of what it is spread to.
    spread = (one.expand(room[:2])[:m, :n] for one, room, (m, n, _) in zip(c, rooms, found, strict=True))
    return parts, left, right, list(spread)


def one_by_one(product: Launch) -> Launch:
    """`grouped_gemm` as a loop of `gemm`s."""

    def launch(
        out: list[Tensor],
        a: list[Tensor],
        b: list[Tensor],
        c: list[Tensor] | None,
        alpha: Factors,
        beta: Factors,
        sizes: Tensor | None = None,
    ) -> None:
        if sizes is not None:
            out, a, b, c = in_use(sizes, out, a, b, c)
        alpha, beta = read_factors(alpha, len(out)), read_factors(beta, len(out))
        for i in range(len(out)):
            product(out[i], a[i], b[i], None if c is None else c[i], alpha[i], beta[i])

    return launch
