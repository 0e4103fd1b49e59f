"""These tests need an NVIDIA GPU; elsewhere they are skipped, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnigemm.backends.cuda import gpu, jit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """The kernels that a module's `specs` names, side by side; compiling them one by one, as they are met, would take
    most of the time."""
    if hasattr(request.module, "specs"):
        failed = [one.error for one in jit.warm(set(request.module.specs(gpu.of(0)))) if not one.ok]
        assert not failed, failed[0]
