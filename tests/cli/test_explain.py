from __future__ import annotations

import json

import pytest

import omnigemm
from omnigemm.backends.cuda import dense
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.core.problem import describe


def test_json_is_the_explanation(run):
    result = run("explain", "int4_gemm", "16", "256", "512", "--dtype", "fp16", "--group-size", "64", "--json")
    wanted = omnigemm.explain("int4_gemm", m=16, n=256, k=512, dtype="fp16", group_size=64).to_dict()
    assert result.code == 0
    assert result.json == json.loads(json.dumps(wanted))
    assert sum(one["chosen"] for one in result.json["candidates"]) == 1


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("int8_gemm 4 8 16 --asymmetric", "zero_points", True),
        ("int8_gemm 4 8 16", "zero_points", False),
        ("int4_gemm 4 8 128 --asymmetric", "zero_points", True),
        ("int4_gemm 4 8 128", "zero_points", False),
        ("int4_gemm 4 8 128 --act-order", "act_order", True),
        ("int4_gemm 4 8 640 --group-size -1", "group_size", 640),
        ("int8_gemm 4 8 16 --bias", "bias", True),
        ("gemm 4 8 16 --batch 3", "batch", 3),
        ("gemm 4 8 16 --dtype fp32", "a_dtype", "fp32"),
        ("fp8_gemm 4 8 16 --granularity token", "a_scale", "token"),
        ("fp8_gemm 4 8 16 --out-dtype fp16", "out_dtype", "fp16"),
        ("fp8_gemm 4 8 16 --weight-dtype e5m2", "b_dtype", "e5m2"),
        ("grouped_gemm_masked 4 8 16 --groups 5", "groups", 5),
        ("grouped_gemm_masked 4 8 16 --expected-m 3", "expected_m", 3),
        ("gemm 4 8 16 --c", "c", True),
        ("gemm 4 8 16", "c", False),
        ("gemm 4 8 16 --a-layout col", "a_layout", "col"),
    ],
)
def test_options_reach_the_problem(run, arguments, field, value):
    assert run("explain", *arguments.split(), "--json").json["problem"][field] == value


def test_table_names_every_candidate_and_reason(run):
    found = omnigemm.explain("int4_gemm", m=16, n=256, k=512)
    result = run("explain", "int4_gemm", "16", "256", "512")
    shown = " ".join(result.out.split())
    assert shown.count("chosen") == 1
    assert len(found.candidates) >= 2
    for one in found.candidates:
        assert f"{one.backend}/{one.kernel}" in shown
        assert one.reason in shown


@pytest.mark.parametrize("sizes", ["gemm 4 8 0", "int4_gemm 4 0 128", "int8_gemm 0 8 16"])
def test_products_of_nothing_are_not_compared(run, sizes):
    result = run("explain", *sizes.split())
    assert "possible" in result.out
    assert "the time of" not in result.out


def test_nothing_can_run_it(run):
    result = run("explain", "gemm", "4", "8", "16", "--device", "cuda:7")
    assert result.code == 1
    assert "Nothing here can run it" in result.out
    assert run("explain", "gemm", "4", "8", "16", "--device", "cuda:7", "--json").code == 1


def test_unknown_backend(run):
    result = run("explain", "gemm", "4", "8", "16", "--backend", "abacus")
    assert result.code == 2
    assert "abacus" in result.err


@pytest.mark.parametrize("more", [(), ("--gpu", "h200")])
def test_more_groups_than_memory_holds(run, more):
    result = run("explain", "grouped_gemm", "4", "8", "16", "--groups", "3000000000", *more)
    assert (result.code, result.out) == (2, "")
    assert "grouped_gemm: groups is 3000000000, expected at most 65536" in result.err


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_gpu_that_is_not_here(run, rows):
    words = ("explain", "fp8_gemm", str(rows), "4096", "7168", "--gpu", "h200")
    names = [one.name for one in dense.kernels(describe("fp8_gemm", m=rows, n=4096, k=7168), KNOWN["h200"])]
    found = run(*words, "--json")
    assert found.code == 0
    assert found.json["gpu"] == str(KNOWN["h200"])
    candidates = found.json["candidates"]
    assert [one["kernel"] for one in candidates] == names
    assert len(names) > 1
    # What is compiled ahead is what would be chosen: the first.
    assert [one["chosen"] for one in candidates] == [True] + [False] * (len(names) - 1)
    assert all(one["cost"] >= candidates[0]["cost"] for one in candidates)
    shown = " ".join(run(*words).out.split())
    assert str(KNOWN["h200"]) in shown
    assert shown.count("chosen cuda/") == 1
    assert shown.count("possible cuda/") == len(names) - 1
    for one in candidates:
        assert f"cuda/{one['kernel']}" in shown
        assert one["reason"] in shown


def test_gpu_runs_a_product_of_nothing(run):
    (one,) = run("explain", "fp8_gemm", "0", "8", "16", "--gpu", "h200", "--json").json["candidates"]
    assert (one["kernel"], one["chosen"]) == ("fill", True)


def test_gpu_has_no_kernel_for_it(run):
    result = run("explain", "int4_gemm", "8", "8", "128", "--gpu", "h200")
    assert result.code == 1
    assert "this backend has kernels for fp8_gemm, int8_gemm, gemm, " in result.out
    assert "Nothing can run it there" in result.out


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--gpu", "abacus"), "gpu is 'abacus', expected one of h200, h100"),
        (("--gpu", "h200", "--device", "cpu"), "device is 'cpu' and gpu is 'h200'"),
        (("--gpu", "h200", "--backend", "cpu"), "backend is 'cpu', expected cuda"),
        (("--gpu", "h200", "--backend", "abacus"), "backend is 'abacus'"),
        (("--gpu", "h200", "--granularity", "2x2"), "granularity is '2x2'"),
    ],
)
def test_gpu_with_words_that_make_no_sense(run, more, told):
    result = run("explain", "fp8_gemm", "4", "8", "16", *more)
    assert (result.code, result.out) == (2, "")
    assert told in result.err


def test_gpu_with_its_backend(run):
    assert run("explain", "fp8_gemm", "4", "8", "16", "--gpu", "H200", "--backend", "cuda").code == 0
