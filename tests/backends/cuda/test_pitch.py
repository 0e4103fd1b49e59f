"""What the copy engine can address: rows of neighbouring elements, 16 bytes apart or a multiple of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omnigemm.backends.cuda.dense import aligned, aligned_copy, pitch

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def zeros(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.zeros(rows, columns).to(dtype)


@pytest.mark.parametrize(
    ("x", "straight", "loose"),
    [
        (zeros(4, 64), 64, 64),
        (zeros(4, 64, BF16), 128, 128),
        (zeros(4, 24, BF16), 48, 48),
        (zeros(4, 72), None, 72),  # rows begin at odd places
        (zeros(4, 7, BF16), None, 14),
        (zeros(64, 4).t(), None, None),  # transposed
        (zeros(4, 96)[:, :50], 96, 96),  # a slice of columns keeps the pitch,
        (zeros(4, 96)[:, 16:80], 96, 96),  # wherever it begins: addresses are looked at elsewhere
        (zeros(4, 128)[:, ::2], None, None),
        (zeros(8, 64)[::2], 128, 128),
        (zeros(1, 64).expand(4, 64), None, None),  # all rows are one
        (zeros(4, 64).as_strided((4, 64), (32, 1)), None, None),  # rows overlap
        (zeros(4, 1).expand(4, 64), None, None),  # all columns are one
        (zeros(4, 64)[:, :1], 64, 64),
        (zeros(64, 4).t()[:, :1], None, 1),  # one column: its own stride means nothing
        # One row: the pitch means nothing, but must be one that the copy engine takes.
        (zeros(1, 64), 64, 64),
        (zeros(1, 65), 80, 80),
        (zeros(1, 1), 16, 16),
        (zeros(1, 9, BF16), 32, 32),
        (zeros(4, 64)[:1], 64, 64),
        (zeros(64, 1).t(), 64, 64),
        (zeros(64, 4).t()[:1], None, None),
    ],
)
def test_pitch(x: Tensor, straight: int | None, loose: int | None) -> None:
    assert pitch(x) == straight
    assert pitch(x, straight=False) == loose


@pytest.mark.parametrize("dtype", [E4M3, BF16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 64), (7, 129), (2, 255)])
def test_aligned_can_be_addressed(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = aligned(zeros(*shape, dtype).t().contiguous().t())
    assert x.shape == shape
    assert x.dtype == dtype
    step = pitch(x)
    assert step is not None
    assert step % 16 == 0
    assert step < shape[1] * dtype.itemsize + 16  # and wastes no more than it must
    assert x.data_ptr() % 16 == 0


@pytest.mark.parametrize("columns", [1, 15, 16, 131])
def test_aligned_copy_keeps_every_bit(columns: int) -> None:
    """Bytes, not numbers: NaNs of any pattern and both zeros come through."""
    bits = torch.randint(0, 256, (columns, 9), dtype=torch.uint8)
    for x in (bits.t().view(E4M3), bits.t().contiguous().view(E4M3), bits[:, :1].t().view(E4M3)):
        copied = aligned_copy(x)
        assert pitch(copied) is not None
        assert torch.equal(copied.view(torch.uint8), x.view(torch.uint8))
