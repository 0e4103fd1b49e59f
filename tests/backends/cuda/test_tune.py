"""What `tune` measures, what it makes of the times, and what it refuses; the times themselves are made up here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import omnigemm
from omnigemm.backends.cuda import CudaBackend, choice, dense, measured, tune
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.sm90 import FETCHES, Config
from omnigemm.bench import graph
from omnigemm.core.dispatch import Support
from omnigemm.core.errors import CompileError, DeviceError, ShapeError, UnsupportedError
from omnigemm.core.problem import Problem, describe

H200 = KNOWN["h200"]
SLOW, FAST = Config(True, 1, 1, 8, 8), Config(True, 1, 1, 8, 6, split=2, depth=4)


def times(took: dict[tune.Contender, float], m: int = 1, kind: str = "block") -> tune.Times:
    return tune.Times(tune.problem_of(kind, m, 576, 7168), kind, (SLOW, FAST), took)


# ------------------------------------------------------------------------------------------------ rows of a table


def test_few_rows_have_an_entry_for_constant_weights() -> None:
    made = times({(SLOW, 0): 5.0, (FAST, 0): 4.0, (SLOW, 4): 3.0, (FAST, 2): 3.5})
    plain, constant = made.rows()
    assert (plain["us"], plain["config"], plain["constant_weights"]) == (4.0, tune.compact(FAST), False)
    assert "early" not in plain
    assert (constant["us"], constant["config"], constant["early"]) == (3.0, tune.compact(SLOW), 4)
    assert (plain["m_from"], plain["m_to"], plain["m"]) == (1, 8, 1)
    assert (made.us, made.model_us, made.blas_us) == (4.0, 5.0, None)


def test_constant_weights_are_not_loaded_early_where_that_is_slower() -> None:
    plain, constant = times({(SLOW, 0): 5.0, (FAST, 0): 4.0, (FAST, 2): 4.5}, 128, "whole").rows()
    assert plain["config"] == constant["config"] == tune.compact(FAST)
    assert plain["us"] == constant["us"] == 4.0
    assert constant["constant_weights"]
    assert "early" not in constant


def test_many_rows_have_one_entry_for_both() -> None:
    (row,) = times({(SLOW, 0): 5.0, (FAST, 0): 4.0}, 4096).rows((2049, 1 << 30))
    assert "constant_weights" not in row
    assert (row["m_from"], row["m_to"]) == (2049, 1 << 30)


def test_blas_is_told_and_never_chosen() -> None:
    took: dict[tune.Contender, float] = {(SLOW, 0): 5.0, (FAST, 0): 4.0, (tune.BLAS, 0): 1.0}
    (row,) = times(took, 4096, "16").rows()
    assert (row["us"], row["blas_us"], row["config"]) == (4.0, 1.0, tune.compact(FAST))


def test_rows_are_legal() -> None:
    for m in (1, 45, 128, 129, 8192):
        for row in times({(SLOW, 0): 5.0, (FAST, 4): 4.0, (FAST, 0): 4.5}, m).rows():
            assert measured.fault(json.loads(json.dumps(row))) is None


def test_configs_are_written_without_their_defaults() -> None:
    assert tune.compact(SLOW) == {"swap": True, "math_groups": 1, "waves": 1, "cols": 8, "stages": 8}
    for config in (SLOW, FAST):
        assert Config(**json.loads(json.dumps(tune.compact(config)))) == config


def test_a_span_is_all_that_the_model_takes_for_the_same() -> None:
    alike: dict[int, list[int]] = {}
    for m in range(1, 20000):
        alike.setdefault(choice.alike(m), []).append(m)
    for last, rows in alike.items():
        if last < 19000:
            assert rows == list(range(rows[0], last + 1))
            assert {tune.span_of(m) for m in (rows[0], rows[len(rows) // 2], last)} == {(rows[0], last)}
    assert [tune.span_of(m) for m in (1, 8, 9, 32, 64, 4096)] == [
        (1, 8),
        (1, 8),
        (9, 16),
        (25, 32),
        (57, 64),
        (3969, 4096),
    ]


# ------------------------------------------------------------------------------------------------ what is measured


def test_what_tables_do_not_tell_apart_is_one_problem() -> None:
    words: dict[str, Any] = {"m": 5, "n": 64, "k": 256}
    given = [
        describe("fp8_gemm", **words, granularity="token", bias=True),
        describe("fp8_gemm", **words, granularity="tensor", dtype="e5m2", out_dtype="fp32"),
        describe("fp8_gemm", **{**words, "m": 7}, granularity="token"),
    ]
    assert [tune.like(one) for one in given[:2]] == [tune.problem_of("whole", 5, 64, 256)] * 2
    assert tune.distinct(tune.like(one) for one in given) == [tune.problem_of("whole", 7, 64, 256)]
    apart = [describe("fp8_gemm", **words), describe("int8_gemm", **words), describe("gemm", **words)]
    apart += [describe("gemm", **words, dtype="fp16", b_layout="col"), describe("fp8_gemm", **{**words, "m": 9})]
    kinds = ["block", "int8", "turned16", "16"]
    expected = [*(tune.problem_of(kind, 5, 64, 256) for kind in kinds), tune.problem_of("block", 9, 64, 256)]
    assert tune.distinct(tune.like(one) for one in apart) == expected


@pytest.mark.parametrize(
    ("problem", "kind", "told"),
    [
        (
            describe("int4_gemm", m=1, n=64, k=64),
            UnsupportedError,
            "op is int4_gemm, expected one that has tables: fp8",
        ),
        (describe("grouped_gemm", m=1, n=64, k=64), UnsupportedError, "op is grouped_gemm"),
        (describe("fp8_gemm", m=0, n=64, k=64), ShapeError, "m of fp8_gemm 0x64x64.* is 0, expected at least 1"),
        (describe("gemm", m=1, n=64, k=64, batch=3), ShapeError, "is 3, expected 1"),
        (
            describe("gemm", m=1, n=64, k=64, a_layout="col"),
            UnsupportedError,
            "a lies col and b row, expected row for a",
        ),
        (
            describe("gemm", m=1, n=64, k=64, dtype="fp32"),
            UnsupportedError,
            "has no kernel: fp32 products are the blas",
        ),
        (describe("int8_gemm", m=1, n=64, k=200_000), UnsupportedError, "has no kernel: k is 200000"),
    ],
    ids=str,
)
def test_what_cannot_be_tuned(problem: Problem, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        tune.check(problem, H200)


def test_other_gpus_cannot_be_tuned_for() -> None:
    old = dataclasses.replace(H200, name="NVIDIA A100", capability=(8, 0))
    with pytest.raises(UnsupportedError, match="NVIDIA A100 is sm_80; the kernels here so far are for sm_90"):
        tune.check(describe("fp8_gemm", m=1, n=64, k=64), old)


def test_candidates_are_the_models_best_and_what_is_chosen_now() -> None:
    problem = tune.problem_of("block", 20, 4096, 7168)
    variant = dense.variant_of(problem)
    found = tune.candidates(problem, H200, 3)
    best = [one.config for one in choice.modelled(variant, 24, H200)[:3]]
    now = [choice.choices(variant, 20, H200, constant)[0].config for constant in (False, True)]
    assert list(found) == list(dict.fromkeys([*best, *now]))
    assert set(now) - set(best), "the shipped table has nothing here that the model would not try"
    assert len(tune.candidates(problem, H200)) >= tune.CANDIDATES


# ------------------------------------------------------------------------------------------------ the measurement


class MadeUp:
    """In the place of GPU timing: times by contender, and who was timed how."""

    def __init__(self, took: dict[tune.Contender, float]) -> None:
        self.took = took
        self.sifted: list[tune.Contender] = []
        self.final: list[tune.Contender] = []

    def bench(self, kind: str, m: int, patch: pytest.MonkeyPatch) -> tune.Bench:
        def alone(call: Callable[[Any], Any], *_: object) -> float:
            self.sifted.append(call(None))
            return self.took[call(None)]

        def in_turns(calls: dict[tune.Contender, Callable[[Any], Any]], *_: object) -> dict[tune.Contender, float]:
            self.final += [call(None) for call in calls.values()]
            return {one: self.took[one] - 0.25 for one in calls}

        patch.setattr(graph, "microseconds", alone)
        patch.setattr(graph, "in_turns", in_turns)
        patch.setattr(tune.Bench, "call", lambda _, config, early=0: lambda weight: (config, early))
        made = object.__new__(tune.Bench)
        made.problem, made.weights = tune.problem_of(kind, m, 64, 64), []
        return made


THIRD = Config(True, 1, 1, 8, 7)


def test_only_who_is_near_goes_to_the_second_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {(one, early): 1.5 for one in (SLOW, FAST, THIRD) for early in (2, 4, one.stages)}
    made = MadeUp({(SLOW, 0): 5.0, (FAST, 0): 2.0, (THIRD, 0): 2.25} | rest)
    bench = made.bench("block", 1, monkeypatch)
    took = bench.finals(bench.sifted([SLOW, FAST, THIRD]), 1.2)
    assert made.sifted == [(SLOW, 0), (FAST, 0), (THIRD, 0)]
    early = {(one, stages) for one in (FAST, THIRD) for stages in (2, 4, one.stages)}
    assert set(made.final) == {(FAST, 0), (THIRD, 0)} | early
    assert took == {(SLOW, 0): 5.0, (FAST, 0): 1.75, (THIRD, 0): 2.0} | dict.fromkeys(early, 1.25)


def test_the_models_choice_and_blas_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is gained is told from times of one round. A BLAS that is far ahead leaves the field as it is."""
    made = MadeUp({(SLOW, 0): 5.0, (FAST, 0): 2.0, (THIRD, 0): 2.25, (tune.BLAS, 0): 0.5})
    bench = made.bench("16", 4096, monkeypatch)
    took = bench.finals(bench.sifted([SLOW, FAST, THIRD]), 1.2, [SLOW])
    assert made.final == [(SLOW, 0), (FAST, 0), (THIRD, 0), (tune.BLAS, 0)]
    assert took[tune.BLAS, 0] == 0.25


def test_fewer_stages_are_tried_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the nearest candidates, each once; and they can win."""
    monkeypatch.setattr(tune, "here", lambda: H200)
    monkeypatch.setattr(tune.jit, "warm", lambda specs: [])
    checked: list[Config] = []

    class Made:
        def __init__(self, problem: Problem) -> None: ...

        def check(self, configs: list[Config]) -> None:
            checked.extend(configs)

        def sifted(self, configs: list[Config]) -> dict[tune.Contender, float]:
            return {(one, 0): 1.0 + one.stages for one in configs}

        def finals(self, sifted: dict[tune.Contender, float], *_: object) -> dict[tune.Contender, float]:
            return sifted

    monkeypatch.setattr(tune, "Bench", Made)
    for m, fewer in ((64, True), (1024, False)):
        checked.clear()
        found = tune.measure(describe("fp8_gemm", m=m, n=4096, k=7168), 8)
        assert len(checked) == len(set(checked))
        assert set(found.tried) <= set(checked)
        assert (len(checked) > len(found.tried)) == fewer
        assert (found.best()[0].stages < min(one.stages for one in found.tried)) == fewer
        fastest = min(checked, key=lambda one: one.stages)
        assert (dataclasses.replace(fastest, fetch=sum(FETCHES) - fastest.fetch) in checked) == fewer
        assert all(dense.variant_of(found.problem).fault(one) is None for one in checked)


class OnCpu:
    """In the place of a kernel's launch: the same product by the CPU backend, or a wrong one."""

    factor = 1.0

    def __init__(self, problem: Problem, *_: object) -> None:
        self.problem = problem

    def bind(self, *_: object) -> Callable[..., None]:
        return self.run

    def run(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *others: Any) -> None:
        if self.problem.op == "gemm":
            assert others == (None, 1.0, 0.0)
            found = omnigemm.gemm(a, b)
        else:
            a_scale, b_scale, bias = others
            assert bias is None
            op = omnigemm.int8_gemm if self.problem.op == "int8_gemm" else omnigemm.fp8_gemm
            found = op(a, b, a_scale, b_scale)
        out.copy_(found.float() * self.factor)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("omnigemm.backends.cuda.gpu.of", lambda _: H200)
    monkeypatch.setattr(graph, "copies_needed", lambda _: 2)
    monkeypatch.setattr(dense, "Launch", OnCpu)
    monkeypatch.setattr("omnigemm.backends.cuda.gemm.Gemm", OnCpu)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("n", "k"), [(136, 272), (100, 77)])
@pytest.mark.parametrize("kind", measured.KINDS)
def test_results_are_compared_with_torchs(kind: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    bench = tune.Bench(tune.problem_of(kind, 5, n, k))
    assert torch.equal(torch.get_rng_state(), state)
    assert len({one.data_ptr() for one in bench.weights}) == 2
    assert all(dense.pitch(one) is not None for one in bench.weights)
    bench.check([SLOW, FAST])
    for factor in (1.02, float("nan")):
        monkeypatch.setattr(OnCpu, "factor", factor)
        with pytest.raises(tune.WrongResult, match="with an error of"):
            bench.check([SLOW])
    if kind.endswith("16"):  # the library's own product gives the same
        bench.call(tune.BLAS)(bench.weights[0])
        assert torch.allclose(bench._out.double(), bench.expected(), rtol=0.02, atol=0.1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("usual", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", measured.KINDS)
def test_operands_do_not_depend_on_the_default_dtype(kind: str, usual: torch.dtype) -> None:
    problem = tune.problem_of(kind, 5, 136, 272)
    expected, before = tune.Bench(problem).expected(), torch.get_default_dtype()
    torch.set_default_dtype(usual)
    try:
        bench = tune.Bench(problem)
        assert torch.equal(bench.expected(), expected)
        assert all(one.dtype == torch.float32 for one in bench._scales)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.usefixtures("on_cpu")
def test_a_result_that_was_not_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = tune.Bench(tune.problem_of("block", 5, 64, 256))
    bench.check([SLOW])
    monkeypatch.setattr(OnCpu, "run", lambda *_: None)
    with pytest.raises(tune.WrongResult, match="error of nan"):
        bench.check([SLOW])


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "here", lambda: H200)


@pytest.mark.usefixtures("on_h200")
def test_each_result_is_kept_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever stops it loses nothing; and a problem that fails does not stop the others."""

    def made_up(problem: Problem, count: int, within: float) -> tune.Times:
        if problem.n == 128:
            raise CompileError("kernel x does not compile")
        if problem.n == 192:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return dataclasses.replace(times({(SLOW, 0): 5.0, (FAST, 0): 4.0}), problem=problem)

    rows = []

    def done(result: tune.Result) -> None:
        found = measured.read(measured.root(), H200.table)
        rows.append(0 if found is None else len(found.rows))

    monkeypatch.setattr(tune, "measure", made_up)
    problems = [describe("fp8_gemm", m=4096, n=n, k=256) for n in (64, 128, 192, 256)]
    results = tune.tune(problems, done=done)
    assert rows == [1, 1, 1, 2]
    assert [one.error is None for one in results] == [True, False, False, True]
    assert results[1].error == "kernel x does not compile"
    assert "do not fit in the GPU's memory" in str(results[2].error)
    for n, here in ((64, True), (128, False)):
        variant = dense.variant_of(tune.problem_of("block", 4096, n, 256))
        assert choice.choices(variant, 4096, H200)[0].here == here


@pytest.mark.usefixtures("on_h200")
def test_a_table_that_cannot_be_written_any_more_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    add, full = measured.add, [True, False]

    def fails_once(*arguments: Any) -> Any:
        if full.pop(0):
            raise measured.NotKept("the table x cannot be written: No space left on device")
        return add(*arguments)

    def made_up(problem: Problem, *_: object) -> tune.Times:
        return dataclasses.replace(times({(SLOW, 0): 5.0, (FAST, 0): 4.0}), problem=problem)

    monkeypatch.setattr(tune, "measure", made_up)
    monkeypatch.setattr(measured, "add", fails_once)
    told: list[tune.Result] = []
    results = tune.tune([describe("fp8_gemm", m=4096, n=n, k=256) for n in (64, 128)], done=told.append)
    assert told == results
    assert [one.error for one in results] == ["the table x cannot be written: No space left on device", None]
    assert [one.times is None for one in results] == [True, False]


@pytest.mark.usefixtures("on_h200")
def test_nothing_is_measured_for_a_bad_problem_or_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("measured"))
    fine = describe("fp8_gemm", m=1, n=64, k=64)
    with pytest.raises(UnsupportedError, match="int4_gemm"):
        tune.tune([fine, describe("int4_gemm", m=1, n=64, k=64)])
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(measured.NotKept, match="cannot be kept"):
        tune.tune([fine])


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "available", lambda _: Support(False, "torch finds no usable NVIDIA GPU"))
    for call in (tune.measure, lambda problem: tune.tune([problem])):
        with pytest.raises(DeviceError, match="nothing can be measured here: torch finds no usable NVIDIA GPU"):
            call(describe("fp8_gemm", m=1, n=64, k=64))


def test_never_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "available", lambda _: Support(True, "made up"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match="a CUDA graph is being captured"):
        tune.measure(describe("fp8_gemm", m=1, n=64, k=64))


PROBE = """
import sys, omnigemm
from omnigemm.backends.cuda import explain_on, CudaBackend
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.core.problem import describe
for op in ("fp8_gemm", "int8_gemm", "gemm"):
    problem = describe(op, m=16, n=4096, k=7168)
    explain_on(problem, KNOWN["h200"]); CudaBackend().specs(problem, KNOWN["h200"])
print(*[name for name in sys.modules if name.startswith(("omnigemm.bench", "omnigemm.backends.cuda.tune"))])
"""


def test_choosing_a_kernel_does_not_even_load_what_measures() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
