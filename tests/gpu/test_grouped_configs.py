"""Every kind of grouped Hopper kernel against float64: groups of any size, odd sizes, all scales and types."""

from __future__ import annotations

import random

import pytest
import torch

from omnigemm.backends.cuda import dense, groups, jit, sm90

from .fp8_cases import E4M3, E5M2, SCALES
from .group_cases import CONFIGS, OPS, Case, fits, run

MIXED = (0, 1, 3, 64, 0, 129, 700, 7, 0)
CASES: dict[str, tuple[sm90.Config, Case]] = {}


def _add(name: str, case: Case) -> None:
    if fits(CONFIGS[name], case):
        CASES[f"{name}-{case}"] = CONFIGS[name], case


def _many(seed: int, count: int, most: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.choice([0, 1, source.randint(0, most)]) for _ in range(count))


for _name in CONFIGS:
    for _op in OPS:
        _add(_name, Case(_op, MIXED, 392, 640))
        _add(_name, Case(_op, MIXED, 392, 640, spare=0))
        for _size in (1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257):
            _add(_name, Case(_op, (_size, 2, _size), 392, 640))
        # Each has a kernel of its own, so the two operations share them out.
        first = _op == "contiguous"
        for _n in (1, 63, 200, 577) if first else (8, 120, 2112):
            _add(_name, Case(_op, (5, 0, 130), _n, 384))
        for _k in (16, 144, 2048) if first else (128, 1040):
            _add(_name, Case(_op, (33, 1, 140), 264, _k))
        for _kind in SCALES:
            for _out in ("bf16", "fp32") if first else ("fp16",):
                _add(_name, Case(_op, (100, 0, 17, 1), 328, 1168, _kind, _out))
        _add(_name, Case(_op, (33, 64), 331, 512, "token" if first else "1x128"))
        _add(_name, Case(_op, (70, 3), 264, 640, "token", a=E4M3 if first else E5M2, b=E5M2))
        _add(_name, Case(_op, (70, 0, 3, 129), 264, 640, "token", "bf16", torch.int8, torch.int8))
        _add(_name, Case(_op, (70, 0, 3, 129), 264, 640, "tensor", "fp32", torch.int8, torch.int8))
        _add(_name, Case(_op, _many(1, 256, 12), 192, 256))  # many thin groups, some of them empty
        _add(_name, Case(_op, _many(2, 40, 300), 1160, 384))  # more tiles than blocks
        _add(_name, Case(_op, (0,) * 63 + (2,), 72, 256))
        _add(_name, Case(_op, (0, 0), 72, 256))
    _add(_name, Case("contiguous", (0, 1, 3, 20000, 2), 200, 256))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All of them at once, in parallel: one by one, compiling would take most of the time."""
    wanted = {dense.spec(config, groups.variant_of(case.problem)) for config, case in CASES.values()}
    failed = [one.error for one in jit.warm(wanted) if not one.ok]
    assert not failed, failed[0]


@pytest.mark.parametrize("title", CASES)
def test_against_float64(title: str) -> None:
    torch.manual_seed(len(title))
    run(*CASES[title])
