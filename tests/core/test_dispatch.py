"""Dispatch, plans and explanations all say what `supports` says."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest
import torch

import omnigemm
from omnigemm.backends import backends
from omnigemm.backends.cpu import CpuBackend
from omnigemm.core import dispatch
from omnigemm.core.dispatch import Candidate, PlanCache, Support, choose, explain_problem
from omnigemm.core.problem import OPS, describe
from omnigemm.core.settings import BACKEND_NAMES
from omnigemm.ops._run import calls
from op_support import forget_calls

CPU = torch.device("cpu")


@pytest.fixture
def _no_calls_yet() -> Iterator[None]:
    forget_calls()
    yield
    forget_calls()


def test_registry_and_settings_know_the_same_backends() -> None:
    assert tuple(backend.name for backend in backends()) == BACKEND_NAMES


@pytest.mark.parametrize("op", OPS)
def test_explanation_and_plan_agree(op: str) -> None:
    problem = describe(op, m=3, n=64, k=256)
    explanation = explain_problem(problem, CPU)
    chosen = explanation.chosen
    assert chosen is not None
    assert chosen.ok
    plan = choose(problem, CPU)
    assert (plan.backend, plan.kernel) == (chosen.backend, chosen.kernel)
    assert plan.problem == problem
    told = [one for one in json.loads(json.dumps(explanation.to_dict()))["candidates"] if one["backend"] == "cpu"]
    assert [one["kernel"] for one in told if one["chosen"]] == [plan.kernel]
    assert {one.backend for one in explanation.candidates} == set(BACKEND_NAMES)
    assert all(candidate.reason for candidate in explanation.candidates)
    assert f"-> cpu/{chosen.kernel}" in str(explanation)
    assert plan.kernel in str(plan)


def test_another_device_is_refused_with_the_reason() -> None:
    with pytest.raises(omnigemm.UnsupportedError, match=r"cpu/\*: the tensors are on cuda:0"):
        omnigemm.plan("gemm", m=1, n=1, k=1, device="cuda:0")
    explanation = omnigemm.explain("gemm", m=1, n=1, k=1, device="cuda:0")
    assert explanation.chosen is None
    assert "nothing here can run it" in str(explanation)


def test_a_refusal_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "available", lambda self: Support(False, "switched off for the test"))
    with pytest.raises(omnigemm.UnsupportedError, match=r"gemm.*1x1x1.*cpu/\*: switched off for the test"):
        omnigemm.plan("gemm", m=1, n=1, k=1)


def test_unknown_device_backend_and_word() -> None:
    with pytest.raises(omnigemm.DeviceError, match="'toaster'"):
        omnigemm.plan("gemm", m=1, n=1, k=1, device="toaster")
    with pytest.raises(omnigemm.UnsupportedError, match="'abacus', expected None or one of cuda, blas, cpu"):
        omnigemm.explain("gemm", m=1, n=1, k=1, backend="abacus")
    with pytest.raises(TypeError, match="'colour' is not part of a problem"):
        omnigemm.plan("gemm", m=1, n=1, k=1, colour="red")


def test_plan_runs_what_it_was_made_for() -> None:
    plan = omnigemm.plan("int8_gemm", m=2, n=3, k=4, out_dtype="fp32")
    a, b = torch.ones(2, 4, dtype=torch.int8), torch.ones(3, 4, dtype=torch.int8)
    scales = torch.ones(2), torch.full((3,), 2.0)
    assert torch.equal(plan.run(a, b, *scales), torch.full((2, 3), 8.0))
    out = torch.full((2, 3), float("nan"))
    assert plan.run(a, b, *scales, out=out) is out
    assert torch.equal(out, torch.full((2, 3), 8.0))
    with pytest.raises(omnigemm.ShapeError, match=r"m is 1 \(planned 2\)"):
        plan.run(a[:1], b, scales[0][:1].reshape(1, 1).expand(1, 1), scales[1])
    with pytest.raises(omnigemm.ShapeError, match=r"bias is True \(planned False\)"):
        plan.run(a, b, *scales, bias=torch.ones(3))


@pytest.mark.parametrize("op", ["gemm", "grouped_gemm"])
def test_plan_of_lists_and_matrices(op: str) -> None:
    plan = omnigemm.plan(op, m=2, n=3, k=4, dtype="fp32")
    a, b = torch.ones(2, 4), torch.ones(4, 3)
    result = plan.run([a], [b])[0] if op == "grouped_gemm" else plan.run(a, b)
    assert torch.equal(result, torch.full((2, 3), 4.0))


@pytest.mark.usefixtures("_no_calls_yet")
def test_a_warm_call_does_not_validate_again(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(2, 4), torch.ones(4, 3)
    omnigemm.gemm(a, b)
    assert len(calls) == 1

    def refuse(*_: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("omnigemm.ops._run.choose", refuse)
    assert torch.equal(omnigemm.gemm(a, b), torch.full((2, 3), 4.0))
    with pytest.raises(AssertionError, match="planned again"):
        omnigemm.gemm(a.t().contiguous().t(), b)
    with pytest.raises(AssertionError, match="planned again"), omnigemm.settings(deterministic=True):
        omnigemm.gemm(a, b)


@pytest.mark.usefixtures("_no_calls_yet")
def test_numbers_that_change_share_a_plan() -> None:
    a, b, c = torch.ones(2, 4), torch.ones(4, 3), torch.ones(2, 3)
    for alpha, beta in ((0.5, 2.0), (0.25, -3.0), (7.0, float("inf"))):
        assert torch.equal(omnigemm.gemm(a, b, c, alpha=alpha, beta=beta), torch.full((2, 3), alpha * 4 + beta))
    assert len(calls) == 1
    omnigemm.gemm(a, b, c, alpha=0.5)
    omnigemm.gemm(a, b, c, beta=0.5)
    assert len(calls) == 3
    with pytest.raises(omnigemm.ShapeError, match=r"c is None.*beta is 0\.5"):
        omnigemm.gemm(a, b, beta=0.5)


def test_the_cache_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: PlanCache[int] = PlanCache()
    monkeypatch.setattr(PlanCache, "LIMIT", 10)
    for key in range(25):
        cache.put(key, key)
    assert len(cache) == 5
    assert cache.get(24) == 24
    assert cache.get(3) is None


def test_threads_get_one_entry() -> None:
    cache: PlanCache[object] = PlanCache()
    barrier = threading.Barrier(8)
    got: list[object] = []

    def work() -> None:
        barrier.wait()
        got.append(cache.put("key", object()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, got))) == 1


@pytest.mark.usefixtures("_no_calls_yet")
def test_new_problems_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "omnigemm"):
        omnigemm.gemm(torch.ones(2, 4), torch.ones(4, 3))
        omnigemm.gemm(torch.ones(2, 4), torch.ones(4, 3))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "gemm 2x3x4" in lines[0]
    assert "cpu/mm" in lines[0]


def test_cheaper_kernels_win() -> None:
    """Few rows of bf16 take the packed kernel, and a forced output type leaves only the one that can write it."""
    assert omnigemm.plan("int4_gemm", m=1, n=4096, k=4096).kernel == "packed"
    assert omnigemm.plan("int4_gemm", m=1, n=4096, k=4096, out_dtype="fp32").kernel == "blocks"
    many = explain_problem(describe("int4_gemm", m=4096, n=4096, k=4096), CPU)
    assert many.chosen is not None
    assert many.chosen.kernel != "packed"
    packed = next(one for one in many.candidates if one.kernel == "packed")
    assert "x the time of" in packed.reason


def test_who_waits_for_the_device_comes_last() -> None:
    """However cheap it is, and first if it is the only one."""
    waits = Candidate("x", "waits", True, "", 1.0, waits=True)
    others = [Candidate("x", "slow", True, "", 9.0), Candidate("x", "refuses", False, "")]
    assert dispatch._best([(waits, None), *((one, None) for one in others)]) == 1
    assert dispatch._best([(waits, None), (others[1], None)]) == 0


def test_problem_fields_are_all_compared() -> None:
    problem = describe("gemm", m=1, n=1, k=1)
    for field in dataclasses.fields(problem):
        if field.type == "bool" and field.name != "device_factors":  # which is a hint
            assert dataclasses.replace(problem, **{field.name: True}) != problem


def test_parameters_are_fine_and_going_backward_is_not_silent() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    y = omnigemm.gemm(torch.ones(2, 4), weight)
    out = torch.empty(2, 3)
    assert torch.equal(omnigemm.gemm(torch.ones(2, 4), weight, out=out), y)
    with pytest.warns(UserWarning, match="omnigemm::gemm: an autograd kernel was not registered"):
        y.sum().backward()


@pytest.mark.parametrize(("initialised", "number"), [(True, 3), (False, 0)])
def test_a_device_without_a_number_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, number: int
) -> None:
    """A plan for plain "cuda" must not run on tensors of whichever GPU is current later."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert dispatch.resolve_device("gemm", "cuda") == torch.device("cuda", number)
    assert dispatch.resolve_device("gemm", "cuda:1") == torch.device("cuda", 1)
    assert dispatch.resolve_device("gemm", "cpu") == torch.device("cpu")


def test_a_child_that_was_forked_while_a_plan_was_put_goes_on() -> None:
    cache: PlanCache[int] = PlanCache()
    with cache._lock:  # as another thread may have it, which the child does not have
        child = os.fork()
        if child == 0:
            threading.Timer(5, os._exit, (1,)).start()
            os._exit(0 if cache.put("a", 1) == 1 else 2)
    assert os.waitpid(child, 0)[1] == 0
