"""Groups of products where one launch for all of them is not to be had."""

from __future__ import annotations

from torch import Tensor

from .plan import Launch


def one_by_one(product: Launch) -> Launch:
    """`grouped_gemm` as a loop of `gemm`s."""

    def launch(
        out: list[Tensor],
        a: list[Tensor],
        b: list[Tensor],
        c: list[Tensor] | None,
        alpha: list[float],
        beta: list[float],
    ) -> None:
        for i in range(len(out)):
            product(out[i], a[i], b[i], None if c is None else c[i], alpha[i], beta[i])

    return launch
