"""Before any product runs, keep oneDNN off an AMX that faults and would end the process (see backends/cpu/isa.py)."""

from __future__ import annotations

import pytest
import torch

from omnigemm.backends.cpu.isa import shield_onednn

shield_onednn()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
