"""Problems: what keywords give, and that they survive hashing, pickling and printing."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

import omnigemm
from omnigemm.core.problem import OPS, SIZE_LIMIT, describe, layout_of


@pytest.mark.parametrize("op", OPS)
def test_usual_values_of_each_op(op: str) -> None:
    problem = describe(op, m=4, n=64, k=256)
    assert problem == pickle.loads(pickle.dumps(problem))
    assert hash(problem) == hash(dataclasses.replace(problem))
    assert op in str(problem)
    assert problem.out_dtype == ("fp32" if op == "grouped_gemm_k_contiguous" else "bf16")


def test_fp8_usually_has_block_scales() -> None:
    problem = describe("fp8_gemm", m=4, n=64, k=256)
    assert (problem.a_scale, problem.b_scale) == ("1x128", "128x128")


def test_flops() -> None:
    assert describe("gemm", m=2, n=3, k=5, batch=7).flops == 2 * 2 * 3 * 5 * 7
    assert describe("grouped_gemm", m=0, n=0, k=0, shapes=[(1, 2, 3), (4, 5, 6)]).flops == 2 * (6 + 120)
    assert describe("grouped_gemm_masked", m=2, n=3, k=5, groups=4).flops == 2 * 30 * 4
    assert describe("grouped_gemm_contiguous", m=2, n=3, k=5, groups=4).flops == 60
    assert describe("grouped_gemm_k_contiguous", m=2, n=3, k=5, groups=4).flops == 60


def test_fp8_groups_along_k() -> None:
    problem = describe("grouped_gemm_k_contiguous", m=4, n=64, k=256, dtype="e5m2", weight_dtype="e4m3")
    assert (problem.a_scale, problem.b_scale, problem.a_layout, problem.b_layout) == ("1x128", "1x128", "col", "col")


@pytest.mark.parametrize(
    ("words", "error", "parts"),
    [
        ({"op": "matmul"}, omnigemm.UnsupportedError, ("op", "'matmul'", "int8_gemm")),
        ({"m": -1}, omnigemm.ShapeError, ("m is -1", ">= 0")),
        ({"m": True}, omnigemm.ShapeError, ("m is True",)),
        ({"dtype": "int8"}, omnigemm.DTypeError, ("dtype is int8", "fp16 or bf16 or fp32")),
        ({"dtype": "fp7"}, omnigemm.DTypeError, ("'fp7'", "bf16")),
        ({"out_dtype": "int8"}, omnigemm.DTypeError, ("out_dtype is int8", "fp32")),
        ({"groups": 3}, omnigemm.ShapeError, ("groups is 3",)),
        ({"granularity": "token"}, omnigemm.ShapeError, ("granularity is 'token'", "bf16")),
        ({"op": "int8_gemm", "granularity": "1x128"}, omnigemm.ShapeError, ("'1x128'", "tensor, token")),
        (
            {"op": "grouped_gemm_k_contiguous", "dtype": "e4m3", "granularity": "token"},
            omnigemm.ShapeError,
            ("granularity is 'token'", "expected one of 1x128"),
        ),
        ({"op": "fp8_gemm", "batch": 2}, omnigemm.ShapeError, ("batch is 2",)),
        ({"op": "int4_gemm", "group_size": 48}, omnigemm.ShapeError, ("group_size is 48", "k = 8")),
        ({"op": "int4_gemm", "dtype": "fp32"}, omnigemm.DTypeError, ("fp32", "fp16 or bf16")),
        ({"op": "int4_gemm", "weight_dtype": "bf16"}, omnigemm.DTypeError, ("weight_dtype is bf16",)),
        ({"group_size": 32}, omnigemm.ShapeError, ("group_size is 32", "int4")),
        ({"a_layout": "diagonal"}, omnigemm.ShapeError, ("'diagonal'", "row")),
        ({"b_layout": 1}, omnigemm.ShapeError, ("b_layout is 1", "row, col or strided")),
        ({"op": ["gemm"]}, omnigemm.UnsupportedError, ("op is ['gemm']", "int8_gemm")),
        ({"dtype": 3}, omnigemm.DTypeError, ("gemm: dtype is 3", "bf16")),
        ({"op": "fp8_gemm", "weight_dtype": 8}, omnigemm.DTypeError, ("weight_dtype is 8", "e5m2")),
        ({"op": "fp8_gemm", "weight_dtype": "fp7"}, omnigemm.DTypeError, ("weight_dtype is 'fp7'", "e5m2")),
        ({"out_dtype": 1.0}, omnigemm.DTypeError, ("out_dtype is 1.0", "fp32")),
        ({"op": "fp8_gemm", "granularity": ["token"]}, omnigemm.ShapeError, ("granularity is ['token']", "1x128")),
        ({"op": "fp8_gemm", "granularity": ""}, omnigemm.ShapeError, ("granularity is ''", "1x128")),
        ({"op": "int4_gemm", "group_size": True, "k": 1}, omnigemm.ShapeError, ("group_size is True", "k = 1")),
        ({"op": "int4_gemm", "b_layout": "col"}, omnigemm.ShapeError, ("b_layout is 'col'", "None")),
        ({"bias": "no"}, omnigemm.DTypeError, ("bias is 'no'", "True or False")),
        ({"op": "int4_gemm", "symmetric": 0}, omnigemm.DTypeError, ("symmetric is 0", "True or False")),
        ({"beta": "x"}, omnigemm.DTypeError, ("beta is 'x'", "a number")),
        ({"alpha": True}, omnigemm.DTypeError, ("alpha is True", "a number")),
        ({"bias": True}, omnigemm.ShapeError, ("bias is True", "False: only int8_gemm, fp8_gemm and int4_gemm")),
        ({"op": "grouped_gemm_masked", "bias": True}, omnigemm.ShapeError, ("bias is True", "False: only int8_gemm")),
        ({"a_zero": True}, omnigemm.ShapeError, ("a_zero is True", "False: only int8_gemm has it")),
        ({"op": "fp8_gemm", "a_zero": True}, omnigemm.ShapeError, ("a_zero is True", "only int8_gemm has it")),
        ({"op": "int8_gemm", "beta": 1.0}, omnigemm.ShapeError, ("beta is 1.0", "0: only gemm, grouped_gemm and")),
        ({"op": "fp8_gemm", "alpha": 2}, omnigemm.ShapeError, ("alpha is 2", "1: only gemm and grouped_gemm have it")),
        ({"op": "grouped_gemm_k_contiguous", "beta": 0.5}, omnigemm.ShapeError, ("beta is 0.5", "0 or 1")),
        ({"symmetric": False}, omnigemm.ShapeError, ("symmetric is False", "True: only int4 weights have it")),
        ({"act_order": True}, omnigemm.ShapeError, ("act_order is True", "False: only int4 weights have it")),
        ({"shapes": [(1, 2, 3)]}, omnigemm.ShapeError, ("shapes is [(1, 2, 3)]", "None: only grouped_gemm has it")),
        ({"op": "grouped_gemm", "shapes": 5}, omnigemm.ShapeError, ("shapes is 5", "a list of (M, N, K)")),
        ({"op": "grouped_gemm", "shapes": []}, omnigemm.ShapeError, ("shapes is []", "at least one group")),
        ({"op": "grouped_gemm", "groups": 0}, omnigemm.ShapeError, ("groups is 0", "at least one group")),
        ({"op": "grouped_gemm", "shapes": [(1, 2)]}, omnigemm.ShapeError, ("shapes[0] is (1, 2)", "(M, N, K)")),
        ({"op": "grouped_gemm", "shapes": ["abc"]}, omnigemm.ShapeError, ("shapes[0] is 'abc'", "(M, N, K)")),
        (
            {"op": "grouped_gemm", "shapes": [(1, 2, 3), (1, 2, -3)]},
            omnigemm.ShapeError,
            ("shapes[1] is (1, 2, -3)", "whole numbers >= 0"),
        ),
        (
            {"op": "grouped_gemm", "shapes": [(1, 2, 3)], "groups": 7},
            omnigemm.ShapeError,
            ("groups is 7", "1, one for each of shapes"),
        ),
    ],
)
def test_bad_words(words: dict[str, object], error: type[Exception], parts: tuple[str, ...]) -> None:
    arguments: dict[str, object] = {"op": "gemm", "m": 1, "n": 8, "k": 8, **words}
    op = arguments.pop("op")
    with pytest.raises(error) as caught:
        omnigemm.plan(op, **arguments)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)


def test_shapes_may_be_lists() -> None:
    """As JSON has them."""
    plan = omnigemm.plan("grouped_gemm", m=0, n=0, k=0, shapes=[[1, 2, 3], [4, 2, 3]], dtype="fp32")
    y = plan.run([torch.ones(1, 3), torch.ones(4, 3)], [torch.ones(3, 2)] * 2)
    assert [one.tolist() for one in y] == [[[3.0, 3.0]], [[3.0, 3.0]] * 4]


def test_layouts() -> None:
    x = torch.zeros(6, 8)
    assert [layout_of(y) for y in (x, x.t(), x[:, ::2], x[::2], x[:1].t(), x[:, :1])] == [
        "row", "col", "strided", "row", "row", "row",
    ]  # fmt: skip


@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_sizes_that_do_not_fit_32_bits_are_refused(size: str) -> None:
    sizes = {"m": 1, "n": 1, "k": 1}
    assert getattr(describe("gemm", **{**sizes, size: SIZE_LIMIT}), size) == SIZE_LIMIT
    with pytest.raises(omnigemm.ShapeError, match=f"gemm: {size} is {SIZE_LIMIT + 1}, expected at most {SIZE_LIMIT}"):
        describe("gemm", **{**sizes, size: SIZE_LIMIT + 1})


def test_where_factors_are_is_a_hint_of_lists() -> None:
    words: dict[str, Any] = {"m": 4, "n": 4, "k": 4, "groups": 3, "alpha": 2.0}
    there = describe("grouped_gemm", device_factors=True, **words)
    assert there == describe("grouped_gemm", **words)  # plans run with either
    assert str(there).endswith("scaled, device factors")
    with pytest.raises(omnigemm.ShapeError, match="device_factors is True, expected False: only grouped_gemm has it"):
        describe("gemm", m=4, n=4, k=4, device_factors=True)


def test_lists_may_lie_in_several_ways() -> None:
    assert describe("grouped_gemm", m=4, n=4, k=4, a_layout="mixed").a_layout == "mixed"
    with pytest.raises(omnigemm.ShapeError, match="a_layout is 'mixed', expected row, col or strided"):
        describe("gemm", m=4, n=4, k=4, a_layout="mixed")
