"""New results: on the device of the operands, whichever is the current one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omnigemm.ops import _results
from omnigemm.ops.checks import OutSpec


@pytest.mark.parametrize("devices", [1, 2])
def test_new_memory_is_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    """The quick way, which has it on the current device, is taken where that is the one."""
    current = [0]
    monkeypatch.setattr(_results, "empty_strided_cuda", lambda *form: ("quick", current[0], *form))
    monkeypatch.setattr(_results, "allocate", lambda spec: spec.device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    for index in range(devices):
        spec = OutSpec((2, 3), torch.float16, torch.device("cuda", index))
        fresh: Any = _results.allocator(spec)
        for current[0] in range(devices):
            quick = ("quick", index, (2, 3), (3, 1), torch.float16)
            assert fresh() == (quick if current[0] == index else spec.device)
