"""`omnigemm tune` as its user meets it, without a GPU: the measurement is made up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from omnigemm.backends.cuda import CudaBackend, measured, tune
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.core.dispatch import Support
from omnigemm.core.errors import CompileError
from omnigemm.core.problem import Problem

H200 = KNOWN["h200"]
SMALL = ("tune", "fp8_gemm", "--n", "64", "--k", "256")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that are measured. The second candidate takes 4 us, all others 5."""
    seen: list[Problem] = []

    def made_up(problem: Problem, count: int = tune.CANDIDATES, within: float = 1.2) -> tune.Times:
        seen.append(problem)
        if problem.n == 128:
            raise CompileError("kernel [x] does not compile")
        tried = tune.candidates(problem, H200, count)
        took: dict[tune.Contender, float] = {(one, False): 5.0 for one in tried} | {(tried[1], False): 4.0}
        took |= {(tried[0], True): 3.5} if problem.m <= tune.FEW else {}
        took |= {(tune.BLAS, False): 6.0} if problem.op == "gemm" else {}
        return tune.Times(problem, "16" if problem.op == "gemm" else "block", tried, took)

    monkeypatch.setattr(tune, "here", lambda: H200)
    monkeypatch.setattr(tune, "measure", made_up)
    return seen


def kept() -> list[dict[str, Any]]:
    path = measured.root() / "nvidia-h200.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_measures_keeps_and_tells(run, tuned, tmp_path):
    result = run(*SMALL, "--m", "1", "--m", "512")
    assert (result.code, result.err) == (0, "")
    assert [one.m for one in tuned] == [1, 512]
    assert "1x64x256" in result.out
    assert "512x64x256" in result.out
    assert "1-8" in result.out
    assert result.out.count("1.25x") == 2
    assert f"2 of 2 tuned, kept in {tmp_path / 'cache' / 'tables' / 'nvidia-h200.json'}" in result.out
    assert [(one["m"], one["us"]) for one in kept()] == [(1, 4.0), (1, 3.5), (512, 4.0)]
    shown = run("explain", "fp8_gemm", "8", "64", "256", "--gpu", "h200")
    assert "4.0 us measured here" in shown.out
    assert "1 weights" in run("cache", "list").out


def test_json(run, tuned):
    found = run("tune", "gemm", "--shape", "100x64x256", "--b-layout", "col", "--json").json
    assert (found["gpu"], found["ok"], found["refused"]) == ("NVIDIA H200", True, [])
    (one,) = found["problems"]
    assert (one["shape"], one["m_from"], one["m_to"], one["error"]) == ("100x64x256", 97, 104, None)
    assert (one["us"], one["constant_weights_us"], one["model_us"], one["blas_us"]) == (4.0, 3.5, 5.0, 6.0)
    assert one["config"] == kept()[0]["config"]
    assert one["kernel"].startswith("sm90_bf16_nn_")
    assert one["tried"] > 10
    assert tuned[0].b_layout == "col"


def test_a_range_is_measured_once_for_each_span(run, tuned):
    assert run(*SMALL, "--m", "1-20", "--m", "3", "--candidates", "2").code == 0
    assert [one.m for one in tuned] == [8, 16, 20]
    assert {(one["m_from"], one["m_to"]) for one in kept()} == {(1, 8), (9, 16), (17, 24)}


def test_a_file_of_warm_may_have_what_cannot_be_tuned(run, tuned, tmp_path):
    (tmp_path / "problems.txt").write_text(
        "fp8_gemm 1 64 256 bias=yes\ngrouped_gemm_masked 1-3 64 256\ngemm 512 64 256 b_layout=col  # linear layer\n"
    )
    result = run("tune", "--file", "problems.txt")
    assert result.code == 1
    assert tuned == [tune.problem_of("block", 1, 64, 256), tune.problem_of("16", 512, 64, 256)]
    assert "not tuned: grouped_gemm_masked" in result.out
    assert "and 2 more: tune: op is grouped_gemm_masked" in result.out
    found = run("tune", "--file", "problems.txt", "--json")
    assert (found.code, found.json["ok"], len(found.json["refused"])) == (1, False, 3)


@pytest.mark.usefixtures("tuned")
def test_a_failure_does_not_stop_the_others(run):
    result = run("tune", "fp8_gemm", "--shape", "512x128x256", "--shape", "512x64x256")
    assert result.code == 1
    assert "failed: kernel [x] does not compile" in result.out
    assert "1 of 2 tuned" in result.out
    assert [one["n"] for one in kept()] == [64]


def test_dry_run_needs_no_gpu_and_writes_nothing(run, tmp_path):
    result = run(*SMALL, "--m", "1", "--dry-run", "--candidates", "5")
    assert (result.code, result.err) == (0, "")
    assert "for M from 1 to 8, on NVIDIA H200" in " ".join(result.out.split())  # a title as wide as the table
    assert "Nothing was measured." in result.out
    found = run(*SMALL, "--m", "1", "--dry-run", "--candidates", "5", "--json").json
    listed = found["problems"][0]["candidates"]
    assert len(listed) == 5
    assert [one["modelled_us"] for one in listed] == sorted(one["modelled_us"] for one in listed)
    assert all(one["modelled_us"] > 0 and one["kernel"] in result.out for one in listed)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "tune: no operation is given, expected one with --shape MxNxK, or --file FILE"),
        (("fp8_gemm",), "tune: fp8_gemm has no --shape"),
        (("fp8_gemm", "--n", "64"), "tune: --n without --k and --m, expected all of --n, --k and --m"),
        (("fp8_gemm", "--n", "64", "--m", "1"), "tune: --n and --m without --k"),
        (("fp8_gemm", "--n", "64", "--k", "64", "--m", "0"), "shape is '0x64x64', expected MxNxK"),
        (("fp8_gemm", "--n", "-64", "--k", "64", "--m", "1"), "shape is '1x-64x64', expected MxNxK"),
        (("fp8_gemm", "--n", "64", "--k", "64", "--m", "many"), "shape is 'manyx64x64'"),
        (("fp8_gemm", "--shape", "1x64x64", "--granularity", "2x2"), "granularity is '2x2'"),
        (("gemm", "--shape", "1x64x64", "--b-layout", "askew"), "b_layout is 'askew', expected row, col or strided"),
        (
            ("gemm", "--shape", "1x64x64", "--b-layout", "strided"),
            "b strided, expected row for a, and row or col for b",
        ),
        (("no_such_op", "--shape", "1x2x3"), "op is 'no_such_op'"),
        (("int4_gemm", "--shape", "1x64x64"), "tune: op is int4_gemm, expected one that has tables: fp8_gemm, int8"),
        (("int8_gemm", "--shape", "1x64x200000"), "has no kernel: k is 200000"),
        (("fp8_gemm", "--shape", "1x64x64", "--candidates", "0"), "--candidates"),
        (("--file", "none.txt"), "tune: file none.txt cannot be read"),
        (("fp8_gemm", "--file", "none.txt"), "tune: --file is given together with an operation"),
    ],
)
def test_bad_request(run, tmp_path, words, told):
    result = run("tune", *words)
    assert (result.code, result.out) == (2, "")
    assert told in " ".join(result.err.split())
    assert not (tmp_path / "cache").exists()


def test_without_a_gpu(run, monkeypatch, tmp_path):
    monkeypatch.setattr(CudaBackend, "available", lambda _: Support(False, "torch finds no usable NVIDIA GPU"))
    result = run(*SMALL, "--m", "1")
    assert (result.code, result.out) == (2, "")
    assert result.err == "omnigemm: error: tune: nothing can be measured here: torch finds no usable NVIDIA GPU\n"
    assert not (tmp_path / "cache").exists()


def test_on_another_gpu(run, monkeypatch):
    other = dataclasses.replace(H200, name="NVIDIA A100", capability=(8, 0))
    monkeypatch.setattr("omnigemm.cli.tune.usual_gpu", lambda: other)
    result = run(*SMALL, "--m", "1")
    assert result.code == 2
    assert "NVIDIA A100 is sm_80; the kernels here so far are for sm_90 (Hopper)" in result.err


@pytest.mark.usefixtures("tuned")
def test_a_folder_that_cannot_be_written_is_told_before(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "cache").write_text("in the way")
    result = run(*SMALL, "--m", "1")
    assert (result.code, result.out) == (2, "")
    assert "measured tables cannot be kept in" in result.err
