"""Grouped products: lists of unequal groups, rows sorted by group, and slabs with row counts."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
import reference
from omnigemm import Int4Weight
from omnigemm.backends.cpu.prepared import store
from op_support import (
    E4M3,
    E5M2,
    FLOATS,
    GRANULARITIES,
    HALVES,
    LAYOUTS,
    NAN,
    ONE_ROUNDING,
    READ_LAYOUTS,
    SENTINEL,
    assert_accumulated,
    dequantized,
    floats,
    fp8_scales,
    fp8s,
    guarded,
    indices,
    int4_weight,
    int8s,
    laid_out,
    roundings,
    scales,
)

# --------------------------------------------------------------------------------------- each group its own

GROUPS = ((5, 7, 9), (1, 1, 1), (0, 4, 3), (17, 2, 33), (3, 0, 2), (2, 5, 0), (33, 16, 64), (1, 129, 8))


def group_lists(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A, B and C of every group, each with its own strides."""
    read = [READ_LAYOUTS[i % len(READ_LAYOUTS)] for i in range(2 * len(GROUPS))]
    a = [laid_out(floats(m, k, dtype=dtype), read[i]) for i, (m, _, k) in enumerate(GROUPS)]
    b = [laid_out(floats(k, n, dtype=dtype), read[i + 4]) for i, (_, n, k) in enumerate(GROUPS)]
    c = [laid_out(floats(m, n, dtype=dtype), LAYOUTS[(i + 3) % 5]) for i, (m, n, _) in enumerate(GROUPS)]
    return a, b, c


def check_list(
    results: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    c: list[Tensor] | None = None,
    alpha: list[float] | None = None,
    beta: list[float] | None = None,
) -> None:
    assert len(results) == len(a)
    for i, result in enumerate(results):
        x, y, z = a[i], b[i], None if c is None else c[i]
        s, t = 1.0 if alpha is None else alpha[i], 0.0 if beta is None else beta[i]
        magnitude = reference.gemm(x.abs(), y.abs(), None if z is None else z.abs(), abs(s), abs(t))
        assert_accumulated(result, reference.gemm(x, y, z, s, t), magnitude, x.size(1))


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_list(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    a, b, c = group_lists(dtype)
    results = omnigemm.grouped_gemm(a, b, out_dtype=out_dtype)
    assert isinstance(results, list)
    assert all(one.dtype == out_dtype for one in results)
    check_list(results, a, b)
    for layout in LAYOUTS:
        targets = [guarded((m, n), out_dtype, layout) for m, n, _ in GROUPS]
        out = [target for target, _ in targets]
        returned = omnigemm.grouped_gemm(tuple(a), tuple(b), tuple(c), alpha=2.0, beta=-0.5, out=out)
        assert all(one is target for one, target in zip(returned, out, strict=True))
        check_list(out, a, b, c, [2.0] * len(a), [-0.5] * len(a))
        for _, untouched in targets:
            untouched()


def test_list_takes_the_usual_type() -> None:
    for dtype in FLOATS:
        a, b, _ = group_lists(dtype)
        assert all(one.dtype == dtype for one in omnigemm.grouped_gemm(a, b))


@pytest.mark.parametrize("form", ["list", "tuple", "tensor", "double"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_list_alpha_and_beta_per_group(dtype: torch.dtype, form: str) -> None:
    a, b, c = group_lists(dtype)
    alpha, beta = [0.5 * i - 1 for i in range(len(a))], [0.0 if i % 3 == 0 else i - 2.5 for i in range(len(a))]
    for i, value in enumerate(beta):
        if value == 0.0:
            c[i].fill_(NAN)  # must not be read
    forms: dict[str, Callable[[list[float]], Any]] = {
        "list": list,
        "tuple": tuple,
        "tensor": torch.tensor,
        "double": lambda values: torch.tensor(values, dtype=torch.float64),
    }
    convert = forms[form]
    check_list(omnigemm.grouped_gemm(a, b, c, alpha=convert(alpha), beta=convert(beta)), a, b, c, alpha, beta)


def test_list_alpha_as_a_scalar_tensor() -> None:
    a, b, c = group_lists(torch.float32)
    count = len(a)
    results = omnigemm.grouped_gemm(a, b, c, alpha=torch.tensor(3.0), beta=2)
    check_list(results, a, b, c, [3.0] * count, [2.0] * count)


@pytest.mark.parametrize("dtype", FLOATS)
def test_list_in_place(dtype: torch.dtype) -> None:
    a, b, c = group_lists(dtype)
    before = [one.clone() for one in c]
    omnigemm.grouped_gemm(a, b, c, alpha=-1.0, beta=2.0, out=c)
    check_list(c, a, b, before, [-1.0] * len(a), [2.0] * len(a))


def test_list_broadcasts_c() -> None:
    a, b = [floats(3, 4), floats(5, 2)], [floats(4, 6), floats(2, 6)]
    c = [floats(6), floats(5, 1)]
    check_list(omnigemm.grouped_gemm(a, b, c, beta=1.0), a, b, c, [1.0, 1.0], [1.0, 1.0])


def test_list_groups_may_share_inputs() -> None:
    x, y = floats(4, 5), floats(5, 6)
    check_list(omnigemm.grouped_gemm([x, x, x[:2]], [y, y, y]), [x, x, x[:2]], [y, y, y])


def test_list_out_of_one_group_as_c_of_another() -> None:
    """Refused, or right."""
    a, b = [floats(3, 4), floats(3, 4)], [floats(4, 5), floats(4, 5)]
    c = [floats(3, 5), floats(3, 5)]
    before = [one.clone() for one in c]
    try:
        out = omnigemm.grouped_gemm(a, b, c, beta=1.0, out=[c[1], c[0]])
    except omnigemm.LayoutError:
        return
    check_list(out, a, b, before, [1.0] * 2, [1.0] * 2)


# ------------------------------------------------------------------------------------- rows of many groups


@dataclasses.dataclass
class Rows:
    """Operands of a row-grouped product, and what its groups must give."""

    a: Tensor  # [T, K] or [G, Mmax, K]
    b: Tensor | Int4Weight
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    n: int = 0

    @property
    def scales(self) -> dict[str, Any]:
        return {"a_scale": self.a_scale, "b_scale": self.b_scale}

    def check(self, result: Tensor, g: int, rows: slice) -> None:
        """The rows of one group."""
        masked = self.a.dim() == 3
        a = self.a[g, rows] if masked else self.a[rows]
        a_scale = self.a_scale
        if a_scale is not None and a_scale.numel() != 1:
            a_scale = a_scale[g, rows] if masked else a_scale[rows]
        b_scale = self.b_scale
        if b_scale is not None and b_scale.numel() != 1:
            b_scale = b_scale[g]
        k = a.size(1)
        if isinstance(self.b, Int4Weight):
            weight, parts = dequantized(self.b[g]), self.b[g]
            offset = 0.0 if parts.symmetric or not parts.scales.numel() else 8 * float(parts.scales.max())
            magnitude = reference.linear(a.abs(), weight.abs() + offset)
            eps = torch.finfo(a.dtype).eps
            assert_accumulated(result, reference.linear(a, weight), magnitude, k, operand_eps=eps)
        elif a_scale is None or b_scale is None:
            magnitude = reference.linear(a.abs(), self.b[g].abs())
            assert_accumulated(result, reference.linear(a, self.b[g]), magnitude, k)
        elif a.dtype == torch.int8:
            assert roundings(result, reference.int8_gemm(a, self.b[g], a_scale, b_scale)) <= ONE_ROUNDING
        else:
            magnitude = reference.fp8_gemm(a.float().abs(), self.b[g].float().abs(), a_scale, b_scale)
            assert_accumulated(result, reference.fp8_gemm(a, self.b[g], a_scale, b_scale), magnitude, k)


FP8_KINDS = (*GRANULARITIES, ("tensor", "group"), ("row", "group"))
KINDS = (
    "fp32",
    "bf16",
    "fp16",
    *(f"int8 {a} {b}" for a in ("tensor", "row") for b in ("tensor", "group", "row")),
    *(f"fp8 {a} {b}" for a, b in FP8_KINDS),
    *(f"int4 {dtype} {form}" for dtype in ("bf16", "fp16") for form in ("symmetric", "zeros", "order")),
)
NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(kind: str, lead: tuple[int, ...], groups: int, n: int, k: int) -> Rows:
    """Operands with `lead` rows: (T,) or (G, Mmax)."""
    family, *words = kind.split()
    if family in NAMED:
        return Rows(floats(*lead, k, dtype=NAMED[family]), floats(groups, n, k, dtype=NAMED[family]), n=n)
    if family == "int4":
        w = int4_weight(
            n,
            k,
            32,
            symmetric=words[1] == "symmetric",
            act_order=words[1] == "order",
            dtype=NAMED[words[0]],
            experts=groups,
        )
        return Rows(floats(*lead, k, dtype=NAMED[words[0]]), w, n=n)
    a_kind, b_kind = words
    *outer, rows = lead
    a_scale = fp8_scales(a_kind, rows, k, tuple(outer))
    b_scale = fp8_scales(b_kind, n, k, (groups,))
    if family == "int8":
        return Rows(int8s(*lead, k), int8s(groups, n, k), a_scale * 2.0**-10, b_scale, n)
    return Rows(fp8s(*lead, k), fp8s(groups, n, k, dtype=E5M2 if a_kind == "row" else E4M3), a_scale, b_scale, n)


ENDS = ((0, 1, 1, 20, 29), (3, 3, 3, 3, 3), (0, 0, 0, 0, 0), (29, 29, 29, 29, 29), (5, 6, 7, 8, 9))
COUNTS = ((0, 1, 9, 4), (0, 0, 0, 0), (9, 9, 9, 9), (0, 0, 0, 1))


def check_contiguous(case: Rows, result: Tensor, ends: Tensor) -> None:
    start = 0
    for g, end in enumerate(ends.tolist()):
        case.check(result[start:end], g, slice(start, end))
        start = end


def check_masked(case: Rows, result: Tensor, counts: Tensor) -> None:
    for g, count in enumerate(counts.tolist()):
        case.check(result[g, :count], g, slice(0, count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", ENDS)
def test_contiguous(kind: str, ends: tuple[int, ...]) -> None:
    case, index = make(kind, (29,), 5, 19, 70), indices(ends)
    result = omnigemm.grouped_gemm_contiguous(case.a, case.b, index, **case.scales)
    assert result.dtype == (case.a.dtype if case.a_scale is None else torch.bfloat16)
    assert result.shape == (29, 19)
    check_contiguous(case, result, index)
    for out_dtype in FLOATS:
        asked = omnigemm.grouped_gemm_contiguous(case.a, case.b, index, out_dtype=out_dtype, **case.scales)
        assert asked.dtype == out_dtype
        check_contiguous(case, asked, index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", READ_LAYOUTS)
def test_any_strides(kind: str, layout: str) -> None:
    """Of A, and of B where it is a tensor."""
    ends, counts = indices((4, 5, 12)), indices((9, 0, 1))
    for masked, k in ((False, 70), (True, 70), (False, 1), (True, 2)):
        case = make(kind, (3, 9) if masked else (12,), 3, 19, k)
        product, check = (
            (omnigemm.grouped_gemm_masked, check_masked)
            if masked
            else (omnigemm.grouped_gemm_contiguous, check_contiguous)
        )
        index = counts if masked else ends
        plain, case.a = case.a, laid_out(case.a, layout)
        check(case, product(case.a, case.b, index, **case.scales), index)
        if isinstance(case.b, Tensor):
            case.b = laid_out(case.b, layout)
            check(case, product(case.a, case.b, index, **case.scales), index)
            case.a = plain
            check(case, product(case.a, case.b, index, **case.scales), index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous_writes_only_the_rows_of_its_groups(kind: str, layout: str) -> None:
    case, index = make(kind, (29,), 4, 19, 70), indices((4, 4, 15, 21))
    if case.a.is_floating_point():
        case.a[21:] = NAN
    case.a = laid_out(case.a, layout)
    for out_dtype in FLOATS:
        out, untouched = guarded((29, 19), out_dtype, layout)
        out.fill_(SENTINEL)
        assert omnigemm.grouped_gemm_contiguous(case.a, case.b, index, out=out, **case.scales) is out
        check_contiguous(case, out, index)
        assert bool((out[21:] == SENTINEL).all())
        untouched()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", COUNTS)
def test_masked(kind: str, counts: tuple[int, ...]) -> None:
    case, index = make(kind, (4, 9), 4, 19, 70), indices(counts)
    for expected_m in (None, 4):
        result = omnigemm.grouped_gemm_masked(case.a, case.b, index, expected_m=expected_m, **case.scales)
        assert result.dtype == (case.a.dtype if case.a_scale is None else torch.bfloat16)
        assert result.shape == (4, 9, 19)
        check_masked(case, result, index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_rows_are_neither_read_nor_written(kind: str, layout: str) -> None:
    counts = (0, 1, 9, 4)
    case, index = make(kind, (4, 9), 4, 19, 70), indices(counts)
    for g, count in enumerate(counts):
        if case.a.is_floating_point():
            case.a[g, count:] = NAN
        if case.a_scale is not None and case.a_scale.numel() > 1:
            case.a_scale[g, count:] = NAN
    case.a = laid_out(case.a, layout)
    for out_dtype in FLOATS:
        out, untouched = guarded((4, 9, 19), out_dtype, layout)
        out.fill_(SENTINEL)
        assert omnigemm.grouped_gemm_masked(case.a, case.b, index, out=out, **case.scales) is out
        check_masked(case, out, index)
        for g, count in enumerate(counts):
            assert bool((out[g, count:] == SENTINEL).all())
        untouched()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (1, 33), (7, 1), (130, 129), (0, 16), (3, 0)])
def test_sizes_of_the_weight(kind: str, size: tuple[int, int]) -> None:
    n, k = size
    case, ends = make(kind, (6,), 3, n, k), indices((2, 2, 6))
    check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, ends, **case.scales), ends)
    case, counts = make(kind, (3, 4), 3, n, k), indices((4, 0, 1))
    check_masked(case, omnigemm.grouped_gemm_masked(case.a, case.b, counts, **case.scales), counts)


@pytest.mark.parametrize("kind", KINDS)
def test_one_group_and_no_rows(kind: str) -> None:
    case = make(kind, (5,), 1, 6, 40)
    check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, indices([5]), **case.scales), indices([5]))
    case = make(kind, (1, 5), 1, 6, 40)
    check_masked(case, omnigemm.grouped_gemm_masked(case.a, case.b, indices([3]), **case.scales), indices([3]))
    case = make(kind, (0,), 2, 6, 40)
    assert omnigemm.grouped_gemm_contiguous(case.a, case.b, indices([0, 0]), **case.scales).shape == (0, 6)
    case = make(kind, (2, 0), 2, 6, 40)
    assert omnigemm.grouped_gemm_masked(case.a, case.b, indices([0, 0]), **case.scales).shape == (2, 0, 6)


@pytest.mark.parametrize("kinds", [*FP8_KINDS, "quantised"], ids=str)
@pytest.mark.parametrize("size", [(1, 64), (256, 64), (256, 128), (256, 200)])
def test_one_row(size: tuple[int, int], kinds: tuple[str, str] | str) -> None:
    """Which then has one scale, though it is a scale per row or per block."""
    n, k = size
    for lead in ((1,), (1, 1), (2, 1)):
        groups, counts = lead[0], indices([1] * lead[0])
        case = make("fp8 " + " ".join(kinds if isinstance(kinds, tuple) else ("1x128", "128x128")), lead, groups, n, k)
        assert isinstance(case.b, Tensor)
        if kinds == "quantised":
            case.a, case.a_scale = omnigemm.quantize_fp8(floats(*lead, k), granularity="1x128")
            case.b, case.b_scale = omnigemm.quantize_fp8(floats(groups, n, k), granularity="128x128")
        if len(lead) == 1:
            check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, counts, **case.scales), counts)
        else:
            check_masked(case, omnigemm.grouped_gemm_masked(case.a, case.b, counts, **case.scales), counts)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("family", ["fp8", "int8"])
def test_one_scale_has_many_shapes(family: str, shape: tuple[int, ...]) -> None:
    case, counts = make(f"{family} tensor tensor", (2, 3), 2, 5, 40), indices([3, 2])
    assert case.a_scale is not None
    assert case.b_scale is not None
    scaled = {"a_scale": case.a_scale.view(shape), "b_scale": case.b_scale.view(shape)}
    check_masked(case, omnigemm.grouped_gemm_masked(case.a, case.b, counts, **scaled), counts)
    case.a, ends = case.a.flatten(0, 1), indices([2, 6])
    check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, ends, **scaled), ends)


def test_scales_as_numbers_and_columns() -> None:
    case, ends = make("fp8 row row", (7,), 3, 6, 40), indices((2, 4, 7))
    assert case.a_scale is not None
    assert case.b_scale is not None
    columns: dict[str, Any] = {"a_scale": case.a_scale[:, None], "b_scale": case.b_scale[..., None]}
    check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, ends, **columns), ends)
    case.a_scale, case.b_scale = torch.tensor(0.5), torch.tensor(0.25)
    result = omnigemm.grouped_gemm_contiguous(case.a, case.b, ends, a_scale=0.5, b_scale=0.25)
    check_contiguous(case, result, ends)


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_memory_is_seen(kind: str) -> None:
    """Also if it differs only between the samples, and if what is in the new memory changes later on."""
    case, ends = make(kind, (12,), 3, 33, 140), indices((4, 5, 12))
    weight = case.b.qweight if isinstance(case.b, Int4Weight) else case.b
    other = weight.clone()
    other[:, 1] = weight[:, 2]
    for data in (weight.data, other, weight.clone()):
        weight.data = data
        check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, ends, **case.scales), ends)
    if case.a_scale is None and isinstance(case.b, Tensor):  # nothing is prepared of these but views
        weight.data[:, 1] = weight[:, 3]
        check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, ends), ends)


def test_swapped_memory_may_have_another_shape() -> None:
    weight, ends = torch.zeros(2, 64, 128), indices((2, 4))
    for k in (128, 136, 64):
        weight.data = torch.zeros(2, 64, k)
        assert torch.equal(omnigemm.grouped_gemm_contiguous(floats(4, k), weight, ends), torch.zeros(4, 64))


@pytest.mark.parametrize("room", [0, 64])
@pytest.mark.parametrize("kind", ["fp8 1x128 128x128", "fp8 row group", "int4 bf16 zeros", "int4 fp16 order"])
def test_changed_weights_are_seen(kind: str, room: int) -> None:
    store.clear()
    case, ends = make(kind, (12,), 3, 33, 140), indices((4, 5, 12))
    with omnigemm.settings(weight_cache_mib=room):

        def check() -> None:
            check_contiguous(case, omnigemm.grouped_gemm_contiguous(case.a, case.b, ends, **case.scales), ends)

        check()
        if isinstance(case.b, Int4Weight):
            case.b.scales.mul_(2)
            check()
            case.b.scales.data.mul_(2)
            check()
            case.b.qweight.copy_(case.b.qweight.flip(0))
            check()
            case.b.qweight.data.copy_(case.b.qweight.flip(1))
        else:
            assert case.b_scale is not None
            case.b_scale.mul_(3)
            check()
            case.b_scale.data.mul_(3)
            check()
            case.b.copy_(fp8s(3, 33, 140))
            check()
            case.b.data.copy_(fp8s(3, 33, 140))
        check()


@pytest.mark.parametrize("kind", ["fp8 1x128 128x128", "int4 bf16 zeros", "int4 fp16 order"])
def test_prepared_copies_go_with_their_weight(kind: str) -> None:
    store.clear()
    case, ends = make(kind, (12,), 3, 33, 140), indices((4, 5, 12))
    omnigemm.grouped_gemm_contiguous(case.a, case.b, ends, **case.scales)
    assert store.nbytes() > 0 or kind.startswith("int4")
    del case
    gc.collect()
    assert store.nbytes() == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_one_group_is_the_dense_product(dtype: torch.dtype) -> None:
    a, b = floats(9, 33, dtype=dtype), floats(1, 17, 33, dtype=dtype)
    dense = omnigemm.gemm(a, b[0].t())
    assert torch.equal(omnigemm.grouped_gemm_contiguous(a, b, indices([9])), dense)
    assert torch.equal(omnigemm.grouped_gemm_masked(a[None], b, indices([9]))[0], dense)
    q, r = int8s(9, 33), int8s(1, 17, 33)
    rows, columns = scales(9), scales(1, 17)
    grouped = omnigemm.grouped_gemm_contiguous(q, r, indices([9]), a_scale=rows, b_scale=columns, out_dtype=dtype)
    assert torch.equal(grouped, omnigemm.int8_gemm(q, r[0], rows, columns[0], out_dtype=dtype))


def test_a_warm_list_that_overlaps_is_refused_like_a_cold_one() -> None:
    """The sizes are those of a call that was fine; only the addresses tell."""
    a, b = [torch.randn(4, 4) for _ in range(3)], [torch.randn(4, 4) for _ in range(3)]
    fine = [torch.empty(4, 4) for _ in range(3)]
    for _ in range(2):
        omnigemm.grouped_gemm(a, b, out=fine)
    room = torch.zeros(9, 4)
    for wrong, words in (
        ([fine[0], a[1], fine[2]], r"out\[1\] shares memory with a\[1\]"),
        ([fine[0], b[2], fine[2]], r"out\[1\] shares memory with b\[2\]"),
        ([room[:4], room[3:7], fine[2]], r"out\[\d\] shares memory with out\[\d\]"),
        ([fine[0], fine[0], fine[2]], r"out\[\d\] shares memory with out\[\d\]"),
    ):
        before = [one.clone() for one in wrong]
        with pytest.raises(omnigemm.LayoutError, match=words):
            omnigemm.grouped_gemm(a, b, out=wrong)
        assert all(torch.equal(one, other) for one, other in zip(before, wrong, strict=True))
    beside = [room[:4], room[4:8], fine[2]]
    omnigemm.grouped_gemm(a, b, out=beside)
    assert all(torch.allclose(z, x @ y, atol=1e-4) for x, y, z in zip(a, b, beside, strict=True))
    c = [one.clone() for one in beside]
    omnigemm.grouped_gemm(a, b, c, beta=1.0, out=c)  # a group's C may be its out
    assert all(torch.allclose(z, 2 * (x @ y), atol=1e-4) for x, y, z in zip(a, b, c, strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (8,)], ids=str)
def test_list_factors_that_the_operator_gets_as_tensors(shape: tuple[int, ...]) -> None:
    """As those on a GPU come. The processor reads them when the call runs, so a change is seen."""
    a, b, c = group_lists(torch.float32)
    assert len(a) == 8
    alpha, beta = torch.rand(shape) + 0.5, torch.rand(shape)
    for _ in range(2):
        results = torch.ops.omnigemm.grouped_gemm(a, b, c, [], [], alpha, beta, None, None, None)
        check_list(results, a, b, c, alpha.expand(8).tolist(), beta.expand(8).tolist())
        alpha.add_(1)
        beta.mul_(2)
    beta.zero_()
    for one in c:
        one.fill_(NAN)  # not read
    results = torch.ops.omnigemm.grouped_gemm(a, b, c, [2.0] * 8, [], None, beta, None, None, None)
    check_list(results, a, b, c, [2.0] * 8, [0.0] * 8)


def test_list_factors_as_tensors_that_are_wrong() -> None:
    a, b, c = ([torch.randn(4, 4) for _ in range(3)] for _ in range(3))
    out = [torch.full((4, 4), SENTINEL) for _ in range(3)]
    room, one = torch.full((16,), SENTINEL), torch.ones(())
    out[2] = room.view(4, 4)
    for alpha, beta, own_c, error, words in (
        (torch.ones(2), None, c, omnigemm.ShapeError, r"alpha has shape \(2,\), expected one number or one per group"),
        (one.double(), None, c, omnigemm.DTypeError, "alpha has dtype float64, expected fp32"),
        (one.to("meta"), None, c, omnigemm.DeviceError, "alpha is on meta, expected cpu"),
        (None, torch.ones(3, 1), c, omnigemm.ShapeError, r"beta has shape \(3, 1\)"),
        (None, one, None, omnigemm.ShapeError, "c is None, expected a list of matrices because beta is a tensor"),
        (room[3:6], None, c, omnigemm.LayoutError, r"out\[2\] shares memory with alpha"),
        (None, room[0], c, omnigemm.LayoutError, r"out\[2\] shares memory with beta"),
    ):
        numbers = [[] if alpha is not None else [1.0] * 3, [] if beta is not None else [0.0] * 3]
        with pytest.raises(error, match=words):
            torch.ops.omnigemm.grouped_gemm_out(a, b, own_c, *numbers, alpha, beta, None, out, None)
        assert all(bool((each == SENTINEL).all()) for each in out)


def test_list_in_place_with_a_beta_that_only_the_device_knows() -> None:
    """C is taken to be read, and may be `out` of its own group only."""
    a, b, c = ([torch.randn(4, 4) for _ in range(2)] for _ in range(3))
    before = [one.clone() for one in c]
    beta = torch.tensor([2.0, 3.0])
    torch.ops.omnigemm.grouped_gemm_out(a, b, c, [1.0] * 2, [], None, beta, None, c, None)
    check_list(c, a, b, before, [1.0] * 2, beta.tolist())
    with pytest.raises(omnigemm.LayoutError, match=r"out\[\d\] shares memory with c\[\d\]"):
        torch.ops.omnigemm.grouped_gemm_out(a, b, c, [1.0] * 2, [], None, 0 * beta, None, c[::-1], None)


def test_list_plans_run_many_times() -> None:
    a, b, c = group_lists(torch.float32)
    shapes = [(x.size(0), y.size(1), x.size(1)) for x, y in zip(a, b, strict=True)]
    words: dict[str, Any] = {"dtype": "fp32", "a_layout": "mixed", "b_layout": "mixed", "alpha": 2.0, "beta": 1.0}
    plan = omnigemm.plan("grouped_gemm", m=0, n=0, k=0, shapes=shapes, **words)
    for factor in (2.0, 3.0):
        out = [torch.full((m, n), NAN) for m, n, _ in shapes]
        assert plan.run(a, b, c, alpha=factor, beta=factor, out=out) == out
        check_list(out, a, b, c, [factor] * len(a), [factor] * len(a))
        check_list(plan.run(a, b, c, alpha=factor, beta=factor), a, b, c, [factor] * len(a), [factor] * len(a))
    with pytest.raises(omnigemm.ShapeError, match="not the plan's problem: scaled is False"):
        plan.run(a, b, c, beta=1.0)


def test_list_plans_refuse_what_overlaps_also_when_they_are_warm() -> None:
    a, b = [floats(4, 4) for _ in range(2)], [floats(4, 4) for _ in range(2)]
    plan = omnigemm.plan("grouped_gemm", m=4, n=4, k=4, groups=2, dtype="fp32")
    out = [torch.full((4, 4), SENTINEL) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(omnigemm.LayoutError, match=r"out\[\d\] shares memory with out\[\d\]"):
            plan.run(a, b, out=[out[0], out[0]])
        assert bool((out[0] == SENTINEL).all())
        plan.run(a, b, out=[torch.empty(4, 4), out[1]])


def test_a_workspace_is_checked_and_left_alone_by_kernels_that_need_none() -> None:
    a, b = [floats(4, 4) for _ in range(2)], [floats(4, 4) for _ in range(2)]
    plan = omnigemm.plan("grouped_gemm", m=4, n=4, k=4, groups=2, dtype="fp32")
    room = torch.full((1024 + 32,), SENTINEL)
    room = room[-room.data_ptr() % 128 // 4 :][:1024]
    check_list(plan.run(a, b, workspace=room), a, b)
    assert bool((room == SENTINEL).all())
    needy = dataclasses.replace(plan, workspace_bytes=4096, takes_workspace=True)
    plan.run(a, b, workspace=room[:0])
    inside = room.view(64, 16)[1].view(4, 4)
    for wrong, words in (
        (b"", "workspace is a bytes, expected a tensor"),
        (room[:1023], "workspace has 4092 bytes, expected 4096"),
        (room.view(32, 32).t(), "expected 4096 bytes side by side"),
        (room.to("meta"), "workspace is on meta, expected cpu"),
        (torch.cat([room, room])[1:1025], "expected a multiple of 128"),
    ):
        with pytest.raises(omnigemm.WorkspaceError, match=words):
            needy.run(a, b, workspace=wrong)  # type: ignore[arg-type]
    for operands, out in (((a, b), [inside, torch.empty(4, 4)]), (([inside, a[1]], b), None)):
        with pytest.raises(omnigemm.WorkspaceError, match="workspace shares memory"):
            needy.run(*operands, out=out, workspace=room)
    own = dataclasses.replace(plan, workspace_bytes=4096)
    with pytest.raises(omnigemm.WorkspaceError, match=r"shape \(1024,\), expected None: .* takes its 4096 bytes"):
        own.run(a, b, workspace=room)
    check_list(own.run(a, b), a, b)
