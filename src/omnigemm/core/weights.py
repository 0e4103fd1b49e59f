"""What the layers below the operations see of a packed weight."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Int4Parts(NamedTuple):
    """The tensors and sizes of an Int4Weight; `omnigemm.quant.Int4Weight` says what they mean."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    n: int
    k: int
    group_size: int

    def companions(self) -> tuple[Tensor, ...]:
        return tuple(one for one in (self.scales, self.zeros, self.perm) if one is not None)

    def experts(self) -> list[Int4Parts]:
        """One weight per expert, as views."""
        count = self.qweight.size(0)
        zeros = [None] * count if self.zeros is None else self.zeros.unbind(0)
        perms = [None] * count if self.perm is None else self.perm.unbind(0)
        parts = zip(self.qweight.unbind(0), self.scales.unbind(0), zeros, perms, strict=True)
        return [Int4Parts(q, s, z, p, self.n, self.k, self.group_size) for q, s, z, p in parts]
