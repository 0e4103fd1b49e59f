"""Every kind of Hopper fp8 kernel against float64: every tile edge, odd sizes, all scales and types, frames of NaN."""

from __future__ import annotations

import pytest
import torch

from omnigemm.backends.cuda import dense, sm90
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.core.problem import Problem

from .fp8_cases import CONFIGS, E4M3, E5M2, SCALES, fits, problem, run

ROWS = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 1000]
COLUMNS = [1, 3, 8, 64, 120, 136, 191, 192, 200, 320, 577, 2112]
DEPTHS = [16, 112, 128, 144, 384, 1040, 1536, 7168]

Case = tuple[sm90.Config, Problem]
CASES: dict[str, Case] = {}


def _add(name: str, made: Problem) -> None:
    config = CONFIGS[name]
    if fits(config, made):
        kind = next(key for key, both in SCALES.items() if both == (made.a_scale, made.b_scale))
        size = f"{made.m}x{made.n}x{made.k}"
        title = f"{name}-{kind}-{size}-{made.a_dtype}-{made.b_dtype}-{made.out_dtype}{'-bias' * made.bias}"
        CASES[title] = config, made


for _name in CONFIGS:
    for _m in ROWS:
        _add(_name, problem(_m, 392, 640))
    for _n in COLUMNS:
        _add(_name, problem(100, _n, 384))
    for _k in DEPTHS:
        _add(_name, problem(130, 264, _k))
    for _kind in SCALES:
        for _out in ("bf16", "fp16", "fp32"):
            _add(_name, problem(200, 328, 1168, _kind, _out, bias=_out != "bf16"))
        _add(_name, problem(33, 331, 512, _kind))
    for _a in (E4M3, E5M2):
        _add(_name, problem(70, 264, 640, "token", a=_a, b=E5M2))
    _add(_name, problem(2500 if not CONFIGS[_name].swap else 260, 4104, 512))  # more tiles than multiprocessors


def specs(_: Gpu) -> set[KernelSpec]:
    return {dense.spec(config, dense.variant_of(made)) for config, made in CASES.values()}


@pytest.mark.parametrize("title", CASES)
def test_against_float64(title: str) -> None:
    torch.manual_seed(len(title))
    run(*CASES[title])
