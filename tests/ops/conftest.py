"""The matrices here are small: a second thread would only wait, and on a busy machine for long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that work in blocks cut even small matrices, every 16 rows."""

    def cut(rows: int, *_: int, **__: int) -> list[slice]:
        return [slice(start, min(start + 16, rows)) for start in range(0, rows, 16)]

    for module in ("dense", "fp8", "int4", "int8"):
        monkeypatch.setattr(f"omnigemm.backends.cpu.{module}.blocks", cut)
