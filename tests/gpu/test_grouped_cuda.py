"""Grouped products on a GPU as their users call them: strides, graphs with other groups, bad numbers, and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import dense, gpu, groups, jit, sm90
from omnigemm.core.problem import describe

from .fp8_cases import SCALES
from .group_cases import BF16, CONFIGS, FP16, OPS, OUTS, Case, Given, check, frame, indices, make

SIZES = (0, 1, 3, 64, 0, 129, 300, 7)


def call(given: Given, groups: Tensor | None = None, **words: Any) -> Tensor:
    function = omnigemm.grouped_gemm_masked if given.case.masked else omnigemm.grouped_gemm_contiguous
    numbers = given.groups if groups is None else groups
    return function(given.a, given.b, numbers, a_scale=given.a_scale, b_scale=given.b_scale, backend="cuda", **words)


def call_framed(given: Given, groups: Tensor | None = None, sizes: tuple[int, ...] | None = None, **words: Any) -> None:
    """Into a frame of NaN."""
    whole, out = frame(given.case)
    assert call(given, groups, out=out, **words) is out
    written = check(given, out, sizes)
    assert int((~whole.isnan()).sum()) == written


def changed(given: Given, **tensors: Tensor) -> Given:
    return dataclasses.replace(given, **tensors)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "sizes", [(1,) * 64, (16,) * 40, tuple(range(14, 27)), (134, 190, 250), (1024, 700), SIZES, (0, 0, 0)], ids=str
)
def test_every_size_of_groups_gets_a_kernel(op: str, kind: str, sizes: tuple[int, ...]) -> None:
    given = make(Case(op, sizes, 520, 1152, kind))
    call_framed(given)
    result = call(given)
    assert result.dtype == torch.bfloat16
    check(given, result)
    plan = omnigemm.plan(
        OPS[op], m=given.case.capacity, n=520, k=1152, groups=len(sizes), dtype="e4m3", device="cuda",
        granularity=kind.replace("block", "128x128"),
    )  # fmt: skip
    assert plan.backend == "cuda"
    again = plan.run(*given.operands[:3], a_scale=given.a_scale, b_scale=given.b_scale)
    check(given, again)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("op", OPS)
def test_int8(op: str, out: str) -> None:
    for kind in ("token", "tensor"):
        for sizes in (SIZES, (3,) * 40):
            call_framed(make(Case(op, sizes, 264, 640, kind, out, torch.int8, torch.int8)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("op", OPS)
def test_16_bits(op: str, dtype: torch.dtype, turned: bool) -> None:
    """Weights may lie either way; what the kernel cannot read in its place is copied."""
    many = (SIZES, (1,) * 64, (16,) * 40, (134, 190, 250), (1024, 700), (0, 0, 0))
    cases = [Case(op, sizes, 520, 576, "none", "bf16", dtype, dtype, turned=turned) for sizes in many]
    for n, k, out in ((264, 200, "fp32"), (33, 129, "fp16"), (1, 8, "bf16")):
        cases.append(Case(op, SIZES, n, k, "none", out, dtype, dtype, turned=turned))
    jit.warm({spec for case in cases for spec in groups.specs(case.problem, gpu.of(0))})
    for case in cases:
        given = make(case)
        call_framed(given)
        function = omnigemm.grouped_gemm_masked if case.masked else omnigemm.grouped_gemm_contiguous
        check(given, function(given.a, given.b, given.groups, out_dtype=OUTS[case.out]))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_16_bits_that_lie_apart(op: str, turned: bool) -> None:
    given, g = make(Case(op, SIZES, 264, 640, "none", a=BF16, b=BF16, turned=turned)), len(SIZES)
    for jump, width, first in ((1, 8, 0), (2, 8, 8), (1, 3, 1)):
        lines = given.b.transpose(1, 2) if turned else given.b
        wide = torch.full((jump * g, lines.size(1) + 3, lines.size(2) + width), float("nan"), device="cuda", dtype=BF16)
        some = wide[::jump, : lines.size(1), first : first + lines.size(2)]
        some.copy_(lines)
        call_framed(changed(given, b=some.transpose(1, 2) if turned else some))
    one = given.b[1:2].expand(given.b.shape)  # the first group is empty, and has no weights
    call_framed(changed(given, b=one))
    across = torch.full((*given.a.shape, 2), float("nan"), device="cuda", dtype=BF16)
    across[..., 0].copy_(given.a)
    call_framed(changed(given, a=across[..., 0]))


def test_16_bits_run_here_rather_than_where_the_host_waits() -> None:
    for op in OPS.values():
        for m, count in ((4, 4), (4096, 8), (40000, 8)):
            for layout in ("row", "col"):
                found = omnigemm.explain(op, m=m, n=4096, k=2048, groups=count, device="cuda", b_layout=layout).chosen
                assert found is not None
                assert found.backend == "cuda"


@pytest.mark.parametrize("expected", [None, 1, 12, 200, 100000])
def test_what_is_expected_changes_no_result(expected: int | None) -> None:
    given = make(Case("masked", SIZES, 392, 640))
    call_framed(given, expected_m=expected)


@pytest.mark.parametrize("op", OPS)
def test_weights_and_rows_that_lie_apart(op: str) -> None:
    case = Case(op, SIZES, 264, 640)
    given, g = make(case), len(SIZES)
    bytes_ = given.b.view(torch.uint8)
    wide = torch.full((2 * g, 300, 768), 0x7F, device="cuda", dtype=torch.uint8)
    some = wide[::2, :264, :640]
    some.copy_(bytes_)
    call_framed(changed(given, b=some.view(given.b.dtype)))
    shared = bytes_[:1].expand(g, 264, 640).view(given.b.dtype)
    call_framed(changed(given, b=shared, b_scale=given.b_scale[:1].expand_as(given.b_scale)))
    turned = bytes_.transpose(1, 2).contiguous().transpose(1, 2).view(given.b.dtype)
    call_framed(changed(given, b=turned))
    if op == "masked":
        slab = torch.full((g, case.capacity + 9, 640), 0x7F, device="cuda", dtype=torch.uint8)
        slab[:, : case.capacity].copy_(given.a.view(torch.uint8))
        call_framed(changed(given, a=slab[:, : case.capacity].view(given.a.dtype)))
    spread = torch.stack([given.groups, -given.groups], 1)[:, 0]
    call_framed(given, spread)
    scales = torch.stack([given.a_scale, -given.a_scale], -1)[..., 0]
    call_framed(changed(given, a_scale=scales))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("k", [1, 100, 129, 255])
def test_rows_that_the_copy_engine_cannot_address(op: str, k: int) -> None:
    call_framed(make(Case(op, SIZES, 200, k)))
    call_framed(make(Case(op, SIZES, 33, k, "token")))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_results_are_written_where_they_were_asked_for(op: str, dtype: str) -> None:
    given = make(Case(op, SIZES, 136, 512, out=dtype))
    shape = (*given.a.shape[:-1], 136)
    one = torch.full((*shape[:-1], 137), float("nan"), device="cuda", dtype=OUTS[dtype])
    other = torch.full((*shape[:-2], 136, shape[-2]), float("nan"), device="cuda", dtype=OUTS[dtype])
    for out in (one[..., 1:], other.transpose(-1, -2)):
        assert call(given, out=out) is out
        assert int((~out.isnan()).sum()) == check(given, out)
    assert bool(one[..., 0].isnan().all())


@pytest.mark.parametrize("op", OPS)
def test_one_row_or_column_and_nothing(op: str) -> None:
    call_framed(make(Case(op, (1, 1, 0, 1), 1, 256, spare=0)))
    call_framed(make(Case(op, (1,), 8, 16, spare=0)))
    call_framed(make(Case(op, (5, 0, 2), 24, 0, "tensor")))
    for case in (Case(op, (0, 0), 24, 128, "tensor", spare=0), Case(op, (3, 2), 0, 128, "tensor")):
        assert call(make(case)).numel() == 0
    nothing = torch.empty(0, dtype=torch.int32, device="cuda")
    given = make(Case(op, (3,), 24, 128, "tensor"))
    none = changed(given, a=given.a[:0] if op == "masked" else given.a, b=given.b[:0], b_scale=given.b_scale[0])
    call(none, nothing)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sizes", [(3, 2, 9, 1), (200, 100, 0, 300)], ids=str)
def test_a_graph_replays_with_other_groups(op: str, sizes: tuple[int, ...]) -> None:
    case = Case(op, sizes, 264, 512, spare=40)
    given = make(case)
    given.a.copy_(torch.randn(given.a.shape, device="cuda").to(given.a.dtype))
    given.a_scale.uniform_(0.5, 1.5)
    whole, out = frame(case)
    call(given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # back to back, each allowed to start before the last one ends
            call(given, out=out)
    for turn in range(6):
        now = tuple((size * (turn + 3) // 4 + turn) % (size + 8) if turn else 0 for size in sizes)
        given.groups.copy_(indices(case, now))
        whole.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert int((~whole.isnan()).sum()) == check(given, out, now), now


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [3, 150])
def test_bad_numbers_give_wrong_rows_and_nothing_else(op: str, size: int) -> None:
    """Each is moved to the nearest possible one, and no row outside of `out` is written."""
    case = Case(op, (size,) * 5, 264, 512, spare=0)
    given, limit = make(case), case.capacity
    for numbers in (
        (limit + 1, -3, 2**31 - 1, 2, 7),
        (-(2**31), 5, -1, 2**31 - 1, 3),
        (2**31 - 1,) * 5,
        (size, 2 * size, size - 1, 3 * size, 0),
    ):
        bad = torch.tensor(numbers, dtype=torch.int32, device="cuda")
        sizes, last = [], 0
        for number in numbers:
            stop = max(0 if case.masked else last, min(number, limit))
            sizes.append(stop if case.masked else stop - last)
            last = stop
        call_framed(given, bad, tuple(sizes))


def test_the_same_result_every_time() -> None:
    for op in OPS:
        given = make(Case(op, SIZES, 776, 2048))
        first = torch.nan_to_num(call(given, out=frame(given.case)[1]))
        for _ in range(20):
            assert torch.equal(first, torch.nan_to_num(call(given, out=frame(given.case)[1])))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_each_call_waits_for_what_came_before_on_its_stream(op: str, constant: bool) -> None:
    """Kernels start early, but must not read groups that an earlier one has still to write."""
    given = make(Case(op, (40, 3, 90), 520, 512, spare=200))
    given.a.copy_(torch.randn(given.a.shape, device="cuda").to(given.a.dtype))
    given.a_scale.uniform_(0.5, 1.5)
    many = [tuple((i * 7 + j * 31) % 60 for j in range(3)) for i in range(40)]
    numbers = [indices(given.case, one) for one in many]
    outs = [frame(given.case)[1] for _ in many]
    for one, out in zip(numbers, outs, strict=True):
        given.groups.copy_(one)
        with omnigemm.settings(constant_weights=constant):
            call(given, out=out)
    for sizes, out in zip(many, outs, strict=True):
        assert int((~out.isnan()).sum()) == check(given, out, sizes)


@pytest.mark.parametrize("config", [CONFIGS["swap 32x128"], CONFIGS["swap 8"], CONFIGS["rows 64x96"]], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_numbers_that_the_kernel_before_writes(op: str, config: sm90.Config) -> None:
    """It lets this one begin before it is done. Weights are loaded early by what the numbers are until then, here those
    of an earlier product, whose memory they share; which weights that were must not show."""
    case = Case(op, (40, 3, 90), 520, 512, spare=200)
    given = make(case)
    given.a.copy_(torch.randn(given.a.shape, device="cuda").to(given.a.dtype))
    assert given.a_scale is not None
    given.a_scale.uniform_(0.5, 1.5)
    summed = dense.RowSums(describe("int8_gemm", m=1, n=3, k=1 << 20), 0)
    launch = groups.Launch(case.problem, config, 0, gpu.of(0).multiprocessors, early=config.stages)
    many = [tuple((i * 7 + j * 31) % 60 * ((i + j) % 3 > 0) for j in range(3)) for i in range(30)]
    rows = torch.zeros(len(many), 3, 1 << 20, device="cuda", dtype=torch.int8)
    for one, sizes in zip(rows, many, strict=True):
        for row, count in zip(one, indices(case, sizes).tolist(), strict=True):
            row[-count or row.numel() :] = 1  # what is summed last
    outs = [frame(case)[1] for _ in many]
    torch.cuda.synchronize()
    for one, out in zip(rows, outs, strict=True):
        launch(out, given.a, given.b, summed(one), given.a_scale, given.b_scale)
    for sizes, out in zip(many, outs, strict=True):
        assert int((~out.isnan()).sum()) == check(given, out, sizes)


def test_compiled_and_traced() -> None:
    given = make(Case("masked", (5, 0, 9), 264, 512))

    def product(a: Tensor, b: Tensor, counts: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return omnigemm.grouped_gemm_masked(a, b, counts, a_scale=s, b_scale=t, expected_m=7)

    check(given, torch.compile(product, fullgraph=True, backend="aot_eager")(*given.operands))


def test_what_is_refused_and_why() -> None:
    given = make(Case("masked", (5, 0, 9), 264, 512))
    with pytest.raises(omnigemm.DeviceError, match="counts is on cpu, expected cuda:0"):
        call(given, given.groups.cpu())
    rows = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
    weight = omnigemm.quantize_int4(rows[None], group_size=32)
    with pytest.raises(omnigemm.UnsupportedError, match="not int4 weights"):
        omnigemm.grouped_gemm_contiguous(rows, weight, given.groups[:1], backend="cuda")
