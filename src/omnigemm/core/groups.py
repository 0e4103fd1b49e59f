"""Groups of products where one launch for all of them is not to be had."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Launch

Factors = Sequence[float] | Tensor  # one number per group, or a tensor of those or of one for all


def read_factors(factors: Factors, count: int) -> Sequence[float]:
    """As numbers of the host's, which waits for them if they are on a device."""
    if not isinstance(factors, Tensor):
        return factors
    with torch._C._AutoDispatchBelowAutograd():
        return [float(one) for one in factors.expand(count).tolist()]


def one_by_one(product: Launch) -> Launch:
    """`grouped_gemm` as a loop of `gemm`s."""

    def launch(
        out: list[Tensor],
        a: list[Tensor],
        b: list[Tensor],
        c: list[Tensor] | None,
        alpha: Factors,
        beta: Factors,
    ) -> None:
        alpha, beta = read_factors(alpha, len(out)), read_factors(beta, len(out))
        for i in range(len(out)):
            product(out[i], a[i], b[i], None if c is None else c[i], alpha[i], beta[i])

    return launch
