from __future__ import annotations

import itertools

import pytest
import torch

import omnigemm
from omnigemm.backends.cpu import isa
from omnigemm.bench.workloads import CASES, Case, Operand, Size, Workload, case, group_rows, quantise, wide
from omnigemm.core.errors import ShapeError
from omnigemm.core.problem import OPS
from omnigemm.ops import _run
from op_support import forget_calls

SIZE = Size(3, 40, 136, 4)
IDS = [f"{one.op}, {one.title}" for one in CASES]
EXTRA = [
    Case("fp8_gemm", "e5m2", {"dtype": "e5m2"}),
    Case("int8_gemm", "one scale", {"granularity": "tensor"}),
    Case("int4_gemm", "one group", {"group_size": -1}),
    Case("grouped_gemm_k_contiguous", "fp16", {"dtype": "fp16"}),
    Case("grouped_gemm_masked", "fp8 per tensor", {"dtype": "e4m3", "granularity": "tensor"}),
    Case("grouped_gemm_contiguous", "int8 per tensor", {"dtype": "int8", "granularity": "tensor"}),
    Case("grouped_gemm_contiguous", "fp16 x int4", {"dtype": "fp16", "weight_dtype": "int4", "symmetric": False}),
]


def test_table_covers_the_contract():
    assert {one.op for one in CASES} == set(OPS)


@pytest.mark.parametrize("one", [*CASES, *EXTRA], ids=[*IDS, *(one.title for one in EXTRA)])
def test_case(one, monkeypatch):
    """Each case is right, and the problem that is shown is the one that runs."""
    asked = []
    choose = _run.choose
    monkeypatch.setattr(_run, "choose", lambda problem, *rest: asked.append(problem) or choose(problem, *rest))
    forget_calls()
    work = Workload(one, SIZE)
    checked = work.verify()
    assert checked.ok, checked.note
    assert asked == [work.problem]
    assert checked.worst >= checked.error > 0


@pytest.mark.parametrize("one", CASES, ids=IDS)
def test_peers_compute_the_same_product(one):
    work = Workload(one, SIZE)
    peers = work.peers()
    assert list(peers) == ["torch fp32", "torch bf16"]
    for name, allowed in (("torch fp32", 1e-5), ("torch bf16", 1e-2)):
        contender = peers[name]
        result = torch.cat([y.double().flatten() for y in contender.call(contender.weights)])
        ideal = work.ideal()
        assert float((result - ideal).norm() / ideal.norm()) < allowed


def test_no_bf16_peer_where_it_would_crash(monkeypatch):
    monkeypatch.setattr(isa, "bf16_products_are_safe", lambda: False)
    assert list(Workload(CASES[0], SIZE).peers()) == ["torch fp32"]


@pytest.mark.parametrize("damage", ["element", "nan", "scale"])
def test_wrong_results_are_found(monkeypatch, damage):
    right = omnigemm.fp8_gemm

    def wrong(*args, **named):
        out = right(*args, **named)
        if damage == "element":
            out[1, 7] += 1.0
        elif damage == "nan":
            out[1, 7] = float("nan")
        else:
            out *= 1.01
        return out

    monkeypatch.setattr(omnigemm, "fp8_gemm", wrong)
    checked = Workload(case("fp8_gemm"), Size(16, 512, 128)).verify()
    assert not checked.ok
    assert checked.note


def test_rows_past_the_counts_are_watched(monkeypatch):
    right = omnigemm.grouped_gemm_masked

    def wrong(*args, out, **named):
        right(*args, out=out, **named)
        out[0, -1, -1] = 0.0
        return out

    monkeypatch.setattr(omnigemm, "grouped_gemm_masked", wrong)
    checked = Workload(case("grouped_gemm_masked"), SIZE).verify()
    assert not checked.ok
    assert checked.note == "rows past counts were written"


@pytest.mark.parametrize(("m", "groups"), list(itertools.product((1, 3, 10, 64), (1, 2, 5, 8))))
def test_rows_keep_their_mean(m, groups):
    rows = group_rows(Size(m, 1, 1, groups))
    assert len(rows) == groups
    assert sum(rows) == m * groups
    assert 0.7 * m <= min(rows) <= max(rows) <= 1.3 * m
    assert (len(set(rows)) > 1) == (m >= 10 and groups > 1)


@pytest.mark.parametrize("text", ["16x4096x128", "G8x16x32x64"])
def test_size_round_trip(text):
    assert str(Size.parse(text)) == text


@pytest.mark.parametrize("text", ["", "1x2", "1x2x3x4", "ax2x3", "G8x1x2", "1x2x0", "-1x2x3"])
def test_size_refuses(text):
    with pytest.raises(ShapeError, match="expected MxNxK"):
        Size.parse(text)


def test_counts_of_work():
    work = Workload(case("grouped_gemm_masked", dtype="int8"), Size(10, 6, 4, 3))
    assert work.flops == 2 * 30 * 6 * 4
    assert work.weight_bytes == 3 * 6 * 4
    assert work.traffic_bytes == 72 + 30 * 4 + 30 * 6 * 2
    along = Workload(case("grouped_gemm_k_contiguous"), Size(10, 6, 4, 3))
    assert (along.problem.m, along.problem.n, along.problem.k, along.problem.groups) == (6, 4, 30, 3)
    assert along.flops == along.problem.flops == 2 * 30 * 6 * 4
    assert along.traffic_bytes == 2 * 30 * (6 + 4) + 4 * 3 * 6 * 4
    assert Workload(case("int4_gemm"), Size(1, 8, 128)).weight_bytes == 8 * 128 // 2


@pytest.mark.parametrize("kind", ["tensor", "token", "1x128", "128x128"])
def test_wide_undoes_quantise(kind):
    x = torch.randn(200, 300)
    back = wide(quantise(x, "e4m3", kind), kind)
    assert float((back - x).abs().max() / x.abs().max()) < 2**-4


def test_wide_applies_zero_points():
    operand = Operand(
        torch.tensor([[3, 5]], dtype=torch.int8), torch.tensor([2.0]), torch.tensor([3], dtype=torch.int32)
    )
    assert wide(operand, "token").tolist() == [[0.0, 4.0]]


@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.op} {one.title}")
def test_operands_go_to_the_device(one):
    work = Workload(one, SIZE, device="meta")
    for operand in (work.a, work.b):
        for part in operand:
            for tensor in part if isinstance(part, list) else [getattr(part, "qweight", part)]:
                assert tensor is None or tensor.device.type == "meta"
    assert work.counts.device.type == work.ends.device.type == "meta"
