"""These tests need an NVIDIA GPU; elsewhere they are skipped, and say so, or, with --emulated, run on an emulator as far
as that goes: no graphs, streams or quantisers there, and no large products."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import emulated
from omnigemm.backends.cuda import gpu, jit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and not item.config.getoption("emulated"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """The kernels that a module's `specs` names, side by side; compiling them one by one, as they are met, would take
    most of the time."""
    if hasattr(request.module, "specs") and torch.cuda.is_available():
        failed = [one.error for one in jit.warm(set(request.module.specs(gpu.of(0)))) if not one.ok]
        assert not failed, failed[0]


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, _built: Path) -> Iterator[None]:
    if not request.config.getoption("emulated"):
        yield
        return
    with emulated.emulated(_built) as hopper:
        hopper.seed = zlib.crc32(request.node.name.encode())
        yield
