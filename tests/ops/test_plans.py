"""Plans are for the very problems that calls have: what quantisers give runs with a plan made from sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import CudaBackend, dense
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.core.problem import GRANULARITIES, Problem, describe
from omnigemm.ops import OPERATIONS

GROUPED = ("grouped_gemm_contiguous", "grouped_gemm_masked")


def called(op: str, *operands: Any, out_dtype: torch.dtype | None = None, **named: Any) -> Problem:
    """The problem of a call."""
    operation = OPERATIONS[op]
    given = operation.collect(*operands, **named)
    return operation.describe(given, operation.check(given, None, out_dtype))


def scaled(x: Tensor, dtype: str, kind: str) -> tuple[Tensor, Tensor]:
    granularity = "token" if kind == "channel" else kind
    if dtype == "int8":
        return omnigemm.quantize_int8(x, granularity=granularity)
    return omnigemm.quantize_fp8(x, granularity=granularity)


def kinds(dtype: str) -> tuple[str, ...]:
    return ("tensor", "token") if dtype == "int8" else tuple(GRANULARITIES)


DENSE = [("int8_gemm", "int8", one) for one in kinds("int8")] + [("fp8_gemm", "e4m3", one) for one in kinds("e4m3")]
GROUPS = [(op, dtype, one) for op in GROUPED for dtype in ("int8", "e4m3") for one in kinds(dtype)]


@pytest.mark.parametrize("n", [0, 1, 64, 128, 300])
@pytest.mark.parametrize("k", [0, 1, 100, 128, 129])
@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize(("op", "dtype", "granularity"), DENSE)
def test_a_plan_runs_what_quantisers_give(op: str, dtype: str, granularity: str, m: int, n: int, k: int) -> None:
    a_kind, b_kind = GRANULARITIES[granularity]
    (a, a_scale), (b, b_scale) = scaled(torch.randn(m, k), dtype, a_kind), scaled(torch.randn(n, k), dtype, b_kind)
    plan = omnigemm.plan(op, m=m, n=n, k=k, granularity=granularity)
    assert plan.problem == called(op, a, b, a_scale, b_scale)
    assert torch.equal(plan.run(a, b, a_scale, b_scale), getattr(omnigemm, op)(a, b, a_scale, b_scale))


@pytest.mark.parametrize("n", [1, 64, 128, 300])
@pytest.mark.parametrize("k", [100, 128, 129])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("op", "dtype", "granularity"), GROUPS)
def test_a_plan_runs_groups_that_quantisers_give(
    op: str, dtype: str, granularity: str, groups: int, m: int, n: int, k: int
) -> None:
    a_kind, b_kind = GRANULARITIES[granularity]
    rows = torch.randn(m, k) if op == "grouped_gemm_contiguous" else torch.randn(groups, m, k)
    (a, a_scale), (b, b_scale) = scaled(rows, dtype, a_kind), scaled(torch.randn(groups, n, k), dtype, b_kind)
    index = torch.full((groups,), m, dtype=torch.int32)
    words: dict[str, Any] = {"a_scale": a_scale, "b_scale": b_scale}
    plan = omnigemm.plan(op, m=m, n=n, k=k, groups=groups, dtype=dtype, granularity=granularity)
    assert plan.problem == called(op, a, b, index, **words)
    assert torch.equal(plan.run(a, b, index, **words), getattr(omnigemm, op)(a, b, index, **words))


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("granularity", kinds("int8"))
def test_a_plan_runs_a_batch_that_quantisers_give(granularity: str, m: int, n: int, batch: int) -> None:
    a, a_scale = omnigemm.quantize_int8(torch.randn(batch, m, 100), granularity=granularity)
    b, b_scale = omnigemm.quantize_int8(torch.randn(batch, n, 100), granularity=granularity)
    plan = omnigemm.plan("int8_gemm", m=m, n=n, k=100, batch=batch, granularity=granularity)
    assert plan.problem == called("int8_gemm", a, b, a_scale, b_scale)
    assert torch.equal(plan.run(a, b, a_scale, b_scale), omnigemm.int8_gemm(a, b, a_scale, b_scale))


def test_one_scale_is_one_problem_however_it_is_written() -> None:
    a, b = (torch.ones(rows, 64, dtype=torch.int8) for rows in (1, 5))
    for granularity in ("tensor", "token"):
        plan = omnigemm.plan("int8_gemm", m=1, n=5, k=64, granularity=granularity)
        scale = torch.ones(()) if granularity == "tensor" else torch.ones(5)
        for one in (torch.ones(()), torch.ones(1), torch.ones(1, 1), 1.0):
            assert plan.run(a, b, one, scale).eq(64).all()


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("k", [2, 100])
@pytest.mark.parametrize("m", [1, 2])
def test_a_plan_runs_matrices_as_they_lie(m: int, n: int, k: int) -> None:
    x, w = torch.randn(m, k), torch.randn(n, k)
    forms = {"row": w.t().contiguous(), "col": w.t(), "strided": torch.randn(k, 2 * n + 1, 2)[:, :n, 0]}
    for layout, b in forms.items():
        words: dict[str, Any] = {"k": k, "dtype": "fp32", "b_layout": layout}
        plan = omnigemm.plan("gemm", m=m, n=n, **words)
        assert plan.problem == called("gemm", x, b)
        assert torch.equal(plan.run(x, b), omnigemm.gemm(x, b))
        many = omnigemm.plan("grouped_gemm", m=m, n=n, groups=2, **words)
        assert many.problem == called("grouped_gemm", [x, x], [b, b])
        assert torch.equal(many.run([x, x], [b, b])[1], omnigemm.gemm(x, b))


@pytest.mark.parametrize("sizes", [(1, 64, 256), (6, 1, 256), (1, 1, 1)], ids=str)
def test_a_plan_runs_thin_groups_along_k(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    (a, a_scale), (b, b_scale) = (scaled(torch.randn(rows, k), "e4m3", "1x128") for rows in (m, n))
    ends = torch.tensor([k], dtype=torch.int32)
    plan = omnigemm.plan("grouped_gemm_k_contiguous", m=m, n=n, k=k, groups=1, dtype="e4m3")
    assert plan.problem == called(plan.problem.op, a.t(), b.t(), ends, a_scale=a_scale, b_scale=b_scale)
    plan.run(a.t(), b.t(), ends, a_scale=a_scale, b_scale=b_scale)


@pytest.mark.parametrize(("op", "dtype", "granularity"), DENSE)
def test_what_is_compiled_ahead_is_what_a_single_row_runs(op: str, dtype: str, granularity: str) -> None:
    a_kind, b_kind = GRANULARITIES[granularity]
    (a, a_scale), (b, b_scale) = (
        scaled(torch.randn(rows, 7168), dtype, kind) for rows, kind in ((1, a_kind), (576, b_kind))
    )
    planned, run = describe(op, m=1, n=576, k=7168, granularity=granularity), called(op, a, b, a_scale, b_scale)
    specs = [CudaBackend().specs(one, KNOWN["h200"]) for one in (planned, run)]
    assert specs[0] == specs[1]
    assert len(specs[0]) == 1


def test_a_single_row_has_the_config_that_was_measured_with_a_scale_per_row() -> None:
    planned = describe("fp8_gemm", m=1, n=576, k=7168, granularity="token")
    assert planned.a_scale == "tensor"
    found = [
        dense.kernels(one, KNOWN["h200"])[0].choice for one in (planned, dataclasses.replace(planned, a_scale="token"))
    ]
    assert found[0] == found[1]
    assert found[0].measured


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_plan_runs_int4_weights(symmetric: bool) -> None:
    words: dict[str, Any] = {"m": 4, "n": 64, "k": 128, "weight_dtype": "int4", "symmetric": symmetric}
    a = torch.randn(4, 128).bfloat16()
    w, experts = (omnigemm.quantize_int4(torch.randn(*lead, 64, 128), symmetric=symmetric) for lead in ((), (3,)))
    plan, ends = omnigemm.plan("int4_gemm", **words), torch.tensor([1, 1, 4], dtype=torch.int32)
    grouped = omnigemm.plan("grouped_gemm_contiguous", groups=3, **words)
    for _ in range(2):
        assert torch.equal(plan.run(a, w), omnigemm.int4_gemm(a, w))
        assert torch.equal(grouped.run(a, experts, ends), omnigemm.grouped_gemm_contiguous(a, experts, ends))


def test_a_weight_in_parts_has_its_signs() -> None:
    """Its scales may be a negated view, whoever made them so."""
    a, w = torch.randn(4, 128).bfloat16(), omnigemm.quantize_int4(torch.randn(64, 128))
    plan = omnigemm.plan("int4_gemm", m=4, n=64, k=128)
    wanted = -plan.run(a, w)
    w.scales = torch._neg_view(w.scales)
    assert torch.equal(plan.run(a, w), wanted)


def test_a_plan_that_runs_again_looks_at_signs_and_gradients_only_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closely, that is: it would take longer than all else."""
    a, b = [torch.randn(4, 8)] * 3, [torch.randn(8, 5)] * 3
    plan = omnigemm.plan("grouped_gemm", m=4, n=5, k=8, groups=3, dtype="fp32")
    for name in ("with_signs", "look_for_gradients"):
        monkeypatch.setattr(f"omnigemm.ops._plans.{name}", lambda *_, **__: pytest.fail("a closer look"))
    plan.run(a, b, out=[torch.empty(4, 5) for _ in range(3)])
