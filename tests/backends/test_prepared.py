"""Prepared weights: found again, made again when the weight changed, gone with it, and bounded."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

import omnigemm
from omnigemm.backends.cpu.prepared import PreparedWeights, store


def _counted(values: list[int]) -> int:
    values.append(1)
    return len(values)


@pytest.fixture
def shelf() -> PreparedWeights:
    return PreparedWeights()


def test_made_once(shelf: PreparedWeights) -> None:
    weight, scale, made = torch.randn(20, 30), torch.ones(20), []
    for _ in range(3):
        assert shelf.get(weight, "form", (scale,), 10, lambda: _counted(made)) == 1
    assert shelf.get(weight, "form", (scale.clone(),), 10, lambda: _counted(made)) == 1, "equal scales will do"
    assert shelf.get(weight, "other form", (scale,), 10, lambda: _counted(made)) == 2
    assert shelf.nbytes() == 20


@pytest.mark.parametrize("how", ["in place", "data", "no_grad", "inference", "scale", "new scale"])
def test_made_again_after_a_change(shelf: PreparedWeights, how: str) -> None:
    weight, scale, made = torch.randn(20, 30), torch.ones(20), []
    shelf.get(weight, "form", (scale,), 10, lambda: _counted(made))
    if how == "in place":
        weight[7, 11] += 1
    elif how == "data":
        weight.data.copy_(torch.randn(20, 30))
    elif how == "no_grad":
        with torch.no_grad():
            weight.mul_(2)
    elif how == "inference":
        with torch.inference_mode():
            weight.mul_(2)
    elif how == "scale":
        scale[3] = 2
    else:
        scale = torch.ones(20)
        scale[3] = 2
    assert shelf.get(weight, "form", (scale,), 10, lambda: _counted(made)) == 2
    assert shelf.nbytes() == 10


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight.t()).t().copy_(weight)


@pytest.mark.parametrize(
    "other",
    [
        torch.clone,
        _transposed,
        lambda weight: weight.view(torch.int8),
        lambda weight: torch.cat([weight, weight], 1),
        lambda weight: weight[:, :16],
    ],
    ids=["memory", "strides", "dtype", "wider", "narrower"],
)
def test_made_again_for_other_memory(shelf: PreparedWeights, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whose samples are the same: the tensor is where it was, and lies as it did, or what is prepared is not of it."""
    weight, made = torch.full((32, 32), 7, dtype=torch.uint8), list[int]()
    shelf.get(weight, "form", (), 10, lambda: _counted(made))
    weight.data = other(weight.data)
    assert shelf.get(weight, "form", (), 10, lambda: _counted(made)) == 2
    assert shelf.get(weight, "form", (), 10, lambda: _counted(made)) == 2
    assert shelf.nbytes() == 10


def test_inference_tensors_are_watched_by_their_samples(shelf: PreparedWeights) -> None:
    made: list[int] = []
    with torch.inference_mode():
        weight = torch.randn(20, 30)
        shelf.get(weight, "form", (), 10, lambda: _counted(made))
        assert shelf.get(weight, "form", (), 10, lambda: _counted(made)) == 1
        weight.mul_(2)
        assert shelf.get(weight, "form", (), 10, lambda: _counted(made)) == 2


def test_gone_with_the_weight(shelf: PreparedWeights) -> None:
    weight = torch.randn(4, 4)
    shelf.get(weight, "form", (), 10, lambda: torch.ones(4))
    assert shelf.nbytes() == 10
    del weight
    gc.collect()
    assert shelf.nbytes() == 0


def test_bounded(shelf: PreparedWeights) -> None:
    weights = [torch.randn(4, 4) for _ in range(3)]
    with omnigemm.settings(weight_cache_mib=2):
        kept = [shelf.get(weight, "form", (), 1 << 20, lambda: 1) for weight in weights]
    assert kept == [1, 1, None]
    with omnigemm.settings(weight_cache_mib=0):
        assert shelf.get(weights[2], "form", (), 1, lambda: 1) is None
        assert shelf.get(weights[0], "form", (), 1, lambda: 1) is None, "not even one that is there"
        assert shelf.get(weights[2], "form", (), 0, lambda: 1) is None, "nor one without a copy"
    assert shelf.nbytes() == 2 << 20


def test_threads_share_one_copy(shelf: PreparedWeights) -> None:
    weight, made = torch.randn(20, 30), []

    def build() -> int:
        time.sleep(0.02)
        return _counted(made)

    threads = [threading.Thread(target=lambda: shelf.get(weight, "form", (), 10, build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_child_that_was_forked_while_a_copy_was_made_goes_on(shelf: PreparedWeights) -> None:
    weight = torch.randn(4, 4)
    building, forked = threading.Event(), threading.Event()

    def build() -> int:
        building.set()
        forked.wait()
        return 1

    thread = threading.Thread(target=lambda: shelf.get(weight, "form", (), 1, build))
    thread.start()
    building.wait()
    child = os.fork()
    if child == 0:
        threading.Timer(5, os._exit, (1,)).start()  # it would wait for ever
        os._exit(0 if shelf.nbytes() == 0 else 2)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_experts_are_prepared_once_and_gone_with_the_weight() -> None:
    """Groups are views made anew in every call; what is prepared for them must be found again all the same."""
    experts = torch.randn(3, 8, 128)
    b, b_scale = omnigemm.quantize_fp8(experts, granularity="128x128")
    a, a_scale = omnigemm.quantize_fp8(torch.randn(6, 128), granularity="1x128")
    ends = torch.tensor([2, 4, 6], dtype=torch.int32)
    store.clear()
    first = omnigemm.grouped_gemm_contiguous(a, b, ends, a_scale=a_scale, b_scale=b_scale)
    used = store.nbytes()
    assert used == 3 * 8 * 128 * 4
    again = omnigemm.grouped_gemm_contiguous(a, b, ends, a_scale=a_scale, b_scale=b_scale)
    assert torch.equal(first, again)
    assert store.nbytes() == used
    del b
    gc.collect()
    assert store.nbytes() == 0
