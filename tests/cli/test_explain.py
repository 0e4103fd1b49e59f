from __future__ import annotations

import json

import pytest

import omnigemm


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


def test_nothing_can_run_it(run):
    result = run("explain", "gemm", "4", "8", "16", "--device", "cuda:7")
    assert result.code == 1
    assert "Nothing here can run it" in result.out
    assert run("explain", "gemm", "4", "8", "16", "--device", "cuda:7", "--json").code == 1


def test_unknown_backend(run):
    result = run("explain", "gemm", "4", "8", "16", "--backend", "abacus")
    assert result.code == 2
    assert "abacus" in result.err
