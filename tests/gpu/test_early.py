"""Weights that are loaded before the work before is done: of however many stages, nothing but the time changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from omnigemm.backends.cuda import dense, gemm, gpu, sm90
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.core.problem import Problem, describe

from .fp8_cases import CONFIGS, fits, operands, problem

STAGES = [1, 2, 4, 99]
# One block of K, fewer than stages, more; one tile for each block, and many.
SIZES = [(100, 1000, 128), (60, 264, 500), (33, 2112, 1536), (200, 4104, 1040)]
STRAIGHT = {
    "rows 64x96": sm90.Config(False, 1, 1, 96, 6),
    "pingpong 128x80": sm90.Config(False, 2, 2, 80, 5, band=16, pingpong=True),
    "rows 128x64 split 3": sm90.Config(False, 2, 1, 64, 6, split=3),
    "swap 32 split 2": sm90.Config(True, 1, 1, 32, 8, split=2, depth=4, blocks_per_sm=2),
}

Case = tuple[sm90.Config, Problem]
CASES: dict[str, Case] = {}
for _m, _n, _k in SIZES:
    for _name, _config in CONFIGS.items():
        for _kind in ("block", "token"):
            CASES[f"{_kind} {_name} {_m}x{_n}x{_k}"] = _config, problem(_m, _n, _k, _kind)
    _sizes = {"m": _m, "n": _n, "k": -(-_k // 16) * 16}
    for _name, _config in STRAIGHT.items():
        CASES[f"int8 {_name} {_m}x{_n}x{_k}"] = _config, describe("int8_gemm", **_sizes)
        CASES[f"bf16 {_name} {_m}x{_n}x{_k}"] = _config, describe("gemm", dtype="bf16", b_layout="col", **_sizes)
CASES = {name: case for name, case in CASES.items() if fits(*case)}


# Results that can be multiplied again as they are.
SQUARE = describe("gemm", m=100, n=1024, k=1024, dtype="bf16", b_layout="col")


def specs(_: Gpu) -> set[KernelSpec]:
    chained = [(config, SQUARE) for config in STRAIGHT.values()]
    return {dense.spec(config, dense.variant_of(made)) for config, made in [*CASES.values(), *chained]}


def product(config: sm90.Config, made: Problem) -> tuple[Tensor, Tensor, Callable[[int, Tensor, Tensor], None]]:
    """Two A, and a function that multiplies one of them, with weights loaded early, into a result."""
    made_by: Callable[..., dense.Launch | gemm.Gemm] = gemm.Gemm if made.op == "gemm" else dense.Launch
    launches = {early: made_by(made, config, 0, gpu.of(0).multiprocessors, early) for early in [0, *STAGES]}
    if made.op == "fp8_gemm":
        first, b, *others = operands(made)
        second = operands(made)[0]
    elif made.op == "int8_gemm":
        values = partial(torch.randint, -128, 128, device="cuda", dtype=torch.int8)
        first, second, b = values((made.m, made.k)), values((made.m, made.k)), values((made.n, made.k))
        others = [torch.rand(made.m, device="cuda"), torch.rand(made.n, device="cuda"), None]
    else:
        values = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        first, second, b = values(made.m, made.k), values(made.m, made.k), values(made.n, made.k).t()
        others = [None, 1.0, 0.0]
    return first, second, lambda early, a, out: launches[early](out, a, b, *others)


@pytest.mark.parametrize("title", CASES)
def test_the_result_is_the_same(title: str) -> None:
    """Also of an A that is written right before."""
    config, made = CASES[title]
    torch.manual_seed(0)
    first, second, run = product(config, made)
    shape = made.m, made.n
    wanted = [torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for a, out in zip((first, second), wanted, strict=True):
        run(0, a, out)
        torch.cuda.synchronize()
        assert not bool(out.isnan().any())
    a = first.clone()
    found = []
    for i in range(2 * len(STAGES)):
        out = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        a.copy_((first, second)[i % 2])
        run(STAGES[i // 2], a, out)
        found.append(out)
    assert all(torch.equal(out, wanted[i % 2]) for i, out in enumerate(found))


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("early", [0, *STAGES])
def test_results_that_are_multiplied_next_are_waited_for(name: str, early: int) -> None:
    """Each kernel lets the next one begin before it is done. Who read its results early too would find NaN."""
    torch.manual_seed(0)
    weight = torch.randn(SQUARE.n, SQUARE.k, device="cuda", dtype=torch.bfloat16).t() / 32
    start = torch.randn(SQUARE.m, SQUARE.k, device="cuda", dtype=torch.bfloat16)

    def chain(stages: int, wait: bool) -> list[Tensor]:
        run = gemm.Gemm(SQUARE, STRAIGHT[name], 0, gpu.of(0).multiprocessors, stages)
        found = [torch.full_like(start, float("nan")) for _ in range(20)]
        for x, out in zip([start, *found], found, strict=False):
            run(out, x, weight, None, 1.0, 0.0)
            if wait:
                torch.cuda.synchronize()
        return found

    wanted = chain(0, wait=True)
    assert not bool(wanted[-1].isnan().any())
    assert all(torch.equal(one, other) for one, other in zip(chain(early, wait=False), wanted, strict=True))
