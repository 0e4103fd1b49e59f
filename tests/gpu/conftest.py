"""These tests need an NVIDIA GPU; elsewhere they are skipped, and say so. With --emulated, products run on an emulator,
unless they are large, captured or on streams."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import emulated
from omnigemm.backends.cuda import gpu, jit

LIMIT = 3_000_000_000  # products of two numbers that the emulator is given at a time: some seconds
# What is of a library, of quantisers, of several devices or threads, of torch's allocator, or of what is said of a GPU.
NOT_EMULATED = (
    "blas", "quantizers", "test_tune", "test_streams_and_threads", "refused", "explanation", "not_waited_for",
    "memory_of_their_callers", "thousand", "reduce_overhead",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        emulates = item.config.getoption("emulated") and not any(name in item.nodeid for name in NOT_EMULATED)
        if not torch.cuda.is_available() and not emulates:
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
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _built: Path) -> Iterator[None]:
    if not request.config.getoption("emulated"):
        yield
        return
    for name in ("CUDAGraph", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name, **_: pytest.skip(f"the emulator has no {name}"))
    with emulated.emulated(_built) as hopper:
        hopper.seed, hopper.limit = zlib.crc32(request.node.name.encode()), LIMIT
        yield
