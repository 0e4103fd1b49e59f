"""Every kind of grouped Hopper kernel against float64: groups of any size, odd sizes, all scales and types."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from omnigemm.backends.cuda import dense, groups, sm90
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec

from .fp8_cases import E4M3, E5M2
from .group_cases import BF16, CONFIGS, CONFIGS_16, FP16, OPS, OUTS, Case, fits, run

MIXED = (0, 1, 3, 64, 0, 129, 700, 7, 0)
CASES: dict[str, tuple[sm90.Config, Case]] = {}


def _add(name: str, case: Case) -> None:
    config = (CONFIGS_16 if case.kind == "none" else CONFIGS)[name]
    if fits(config, case):
        CASES[f"{name}-{case}"] = config, case


def _many(seed: int, count: int, most: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.choice([0, 1, source.randint(0, most)]) for _ in range(count))


# Every N, K, kind of scales and type has a kernel of its own, and compiling is most of the time: configs take turns.
for _turn, _name in enumerate(CONFIGS):
    for _first, _op in enumerate(OPS):
        _mine = _turn + _first
        _add(_name, Case(_op, MIXED, 392, 640))
        _add(_name, Case(_op, MIXED, 392, 640, spare=0))
        _add(_name, Case(_op, (1000, 770, 5, 900, 1153), 392, 640))  # whole tiles, and short ones of every length
        for _size in (1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257):
            _add(_name, Case(_op, (_size, 2, _size), 392, 640))
        for _n in (1, 577) if _mine % 2 else (120, 2112):
            _add(_name, Case(_op, (5, 0, 130), _n, 384))
        for _k in (16, 1040) if _mine % 2 else (144, 2048):
            _add(_name, Case(_op, (33, 1, 140), 264, _k))
        for _kind in ("block", "token") if _mine % 2 else ("1x128", "tensor"):
            _add(_name, Case(_op, (100, 0, 17, 1), 328, 1168, _kind, list(OUTS)[(_turn + len(_kind)) % 3]))
        if _mine % 2:
            _add(_name, Case(_op, (33, 64), 331, 512, "token" if _turn % 4 < 2 else "1x128"))
            _add(_name, Case(_op, (70, 3), 264, 640, "token", a=E4M3 if _turn % 4 < 2 else E5M2, b=E5M2))
            _add(_name, Case(_op, (70, 0, 3, 129), 264, 640, "token", "bf16", torch.int8, torch.int8))
        else:
            _add(_name, Case(_op, (70, 0, 3, 129), 264, 640, "tensor", "fp32", torch.int8, torch.int8))
        if CONFIGS[_name].pingpong:
            _add(_name, Case(_op, _many(2, 40, 300), 1160, 384, "token", "bf16", torch.int8, torch.int8))
        _add(_name, Case(_op, _many(1, 256, 12), 200, 256))  # many thin groups, some of them empty
        _add(_name, Case(_op, _many(2, 40, 300), 1160, 384))  # more tiles than blocks
        _add(_name, Case(_op, (0,) * 63 + (2,), 200, 256))
        _add(_name, Case(_op, (0, 0), 200, 256))
    _add(_name, Case("contiguous", (0, 1, 3, 20000, 2), 200, 256))

for _turn, _name in enumerate(CONFIGS_16):
    for _first, _op in enumerate(OPS):
        _mine = _turn + _first
        _types: dict[str, Any] = {"a": BF16, "b": BF16} if _mine % 2 else {"a": FP16, "b": FP16}
        _same = "bf16" if _mine % 2 else "fp16"
        for _sizes in (MIXED, (63, 2, 64), (65, 127, 128), (129, 255, 1), (256, 257), (0,) * 63 + (2,), (0, 0)):
            _add(_name, Case(_op, _sizes, 392, 320, "none", _same, **_types))
        _add(_name, Case(_op, _many(2, 40, 300), 1160, 192, "none", _same, **_types))
        _add(_name, Case(_op, (5, 0, 130), 577 if _mine % 2 else 2112, 136, "none", _same, **_types))
        _add(_name, Case(_op, (100, 0, 17, 1), 328, 584, "none", "fp32" if _mine % 2 else "bf16", **_types))
        _add(_name, Case(_op, (70, 0, 3, 129), 264, 640, "none", _same, turned=True, **_types))


def specs(_: Gpu) -> set[KernelSpec]:
    return {dense.spec(config, groups.variant_of(case.problem)) for config, case in CASES.values()}


@pytest.mark.parametrize("title", CASES)
def test_against_float64(title: str) -> None:
    torch.manual_seed(len(title))
    run(*CASES[title])
