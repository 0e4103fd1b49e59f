"""Int4Weight: what it is made of, what it means, and how it is moved, stored and taken apart."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from omnigemm.core.errors import DeviceError, DTypeError, OmniGemmError, ShapeError, UnsupportedError
from omnigemm.quant import Int4Weight
from omnigemm.quant.nibbles import gather_columns, pack_nibbles, row_blocks, unpack_nibbles, words_to_bytes

HALF = torch.float16


def make(
    n: int = 6,
    k: int = 96,
    size: int = 32,
    *,
    experts: int | None = None,
    zeros: bool = False,
    order: bool = False,
    dtype: torch.dtype = HALF,
    seed: int = 0,
) -> Int4Weight:
    """A random weight. With order, groups are short and padded: one group more than K needs."""
    rng = torch.Generator().manual_seed(seed)
    lead = () if experts is None else (experts,)
    groups = -(-k // size) + order
    width = groups * size if order else k
    perm = None
    if order:
        slots = torch.full((*lead, width), -1, dtype=torch.int32)
        for row in slots.reshape(-1, width):
            row[torch.randperm(width, generator=rng)[:k]] = torch.randperm(k, generator=rng).int()
        perm = slots
    return Int4Weight(
        torch.randint(0, 256, (*lead, n, -(-width // 2)), dtype=torch.uint8, generator=rng),
        torch.rand((*lead, n, groups), generator=rng).to(dtype),
        torch.randint(0, 17, (*lead, n, groups), dtype=torch.uint8, generator=rng) if zeros else None,
        perm,
        k=k,
        group_size=size,
    )


def dense(weight: Int4Weight) -> torch.Tensor:
    """The definition, one weight at a time, in float64."""
    if weight.experts is not None:
        return torch.stack([dense(weight[expert]) for expert in range(weight.experts)])
    out = torch.zeros(weight.n, weight.k, dtype=torch.float64)
    for row in range(weight.n):
        for j in range(weight.padded_k):
            column = j if weight.perm is None else int(weight.perm[j])
            if column < 0:
                continue
            q = (int(weight.qweight[row, j // 2]) >> (4 * (j % 2))) & 15
            g = j // weight.group_size
            zero = 8 if weight.zeros is None else int(weight.zeros[row, g])
            out[row, column] = float(weight.scales[row, g]) * (q - zero)
    return out


def same(a: Int4Weight, b: Int4Weight) -> bool:
    def equal(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return x.dtype == y.dtype and torch.equal(x, y)

    return (a.shape, a.group_size, a.experts) == (b.shape, b.group_size, b.experts) and all(
        equal(getattr(a, name), getattr(b, name)) for name in ("qweight", "scales", "zeros", "perm")
    )


KINDS = [
    {},
    {"zeros": True},
    {"order": True},
    {"zeros": True, "order": True},
    {"experts": 3},
    {"experts": 2, "zeros": True, "order": True},
]


# --- nibbles -------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 15), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_pack_and_unpack(rows: list[list[int]], k: int) -> None:
    q = torch.tensor(rows, dtype=torch.uint8)[:, :k]
    packed = pack_nibbles(q)
    assert packed.shape == (len(rows), -(-k // 2))
    for r in range(len(rows)):
        for j in range(k):
            assert (int(packed[r, j // 2]) >> (4 * (j % 2))) & 15 == rows[r][j]
    assert torch.equal(unpack_nibbles(packed, k), q)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_words(words: list[int]) -> None:
    k = 8 * len(words) - 3
    q = unpack_nibbles(words_to_bytes(torch.tensor([words], dtype=torch.int32), k), k)
    assert q[0].tolist() == [(words[j // 8] >> (4 * (j % 8))) & 15 for j in range(k)]


def test_gather_columns_fills_padding_with_the_weight_zero() -> None:
    q = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    moved = gather_columns(pack_nibbles(q), 3, torch.tensor([2, -1, 0, 1], dtype=torch.int32))
    assert unpack_nibbles(moved, 4).tolist() == [[3, 8, 1, 2]]


@given(st.integers(0, 50), st.integers(0, 9), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_row_blocks_cover_every_row_once(rows: int, columns: int, block: int) -> None:
    slices = row_blocks(rows, columns, block)
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(rows))
    assert all((part.stop - part.start) * columns <= max(block, columns) for part in slices)


# --- what it is and what it means ----------------------------------------------------------------------------


def test_attributes() -> None:
    weight = make(6, 96, 32, zeros=True)
    assert (weight.n, weight.k, weight.group_size, weight.experts) == (6, 96, 32, None)
    assert (weight.shape, weight.num_groups, weight.padded_k) == ((6, 96), 3, 96)
    assert (weight.dtype, weight.device) == (HALF, torch.device("cpu"))
    assert not weight.symmetric
    assert not weight.act_order
    assert weight.nbytes == 6 * 48 + 6 * 3 * 2 + 6 * 3
    experts = make(6, 90, 32, experts=4, order=True)
    assert (experts.shape, experts.num_groups, experts.padded_k) == ((4, 6, 90), 4, 128)
    assert experts.symmetric
    assert experts.act_order
    assert experts.nbytes == 4 * 6 * 64 + 4 * 6 * 4 * 2 + 4 * 128 * 4


def test_repr_says_what_it_is() -> None:
    assert repr(make(2, 64, 64)) == (
        "Int4Weight(n=2, k=64, group_size=64, symmetric, scales=torch.float16, device='cpu')"
    )
    assert "experts=2, n=6" in repr(make(experts=2))
    assert "zero points, act-order" in repr(make(zeros=True, order=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "size"), [(96, 32), (128, 64), (130, 128), (37, 32), (33, 33), (20, 128), (1, 32)])
def test_dequantize_is_the_definition(k: int, size: int, kind: dict[str, Any]) -> None:
    if kind.get("order") and size == 33:
        kind = {**kind, "order": False}
    weight = make(5, k, size, **kind)
    truth = dense(weight)
    # A 16-bit scale times a small integer is exact in fp32.
    assert torch.equal(weight.dequantize(), truth.float())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        got = weight.dequantize(dtype)
        assert got.dtype == dtype
        assert torch.equal(got, truth.to(dtype))


def test_dequantize_with_fp32_scales_rounds_in_fp32() -> None:
    weight = make(7, 100, 32, dtype=torch.float32, zeros=True)
    assert torch.equal(weight.dequantize(), dense(weight).float())


def test_dequantize_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make(23, 70, 32, zeros=True, order=True)
    whole = weight.dequantize()
    sizes: list[int] = []

    def small_blocks(rows: int, columns: int) -> list[slice]:
        parts = row_blocks(rows, columns, 500)
        sizes.append(len(parts))
        return parts

    monkeypatch.setattr("omnigemm.quant.int4_weight.row_blocks", small_blocks)
    assert torch.equal(weight.dequantize(), whole)
    assert sizes[0] > 3


def test_dequantize_leaves_the_weight_alone() -> None:
    weight = make(dtype=torch.float32, zeros=True)
    before = copy.deepcopy(weight)
    weight.dequantize().zero_()
    assert same(weight, before)


@pytest.mark.parametrize(
    ("n", "k", "size", "groups"), [(0, 64, 32, 2), (4, 0, 128, 0), (4, 0, 1, 0), (0, 0, 32, 0), (3, 5, 128, 1)]
)
def test_empty_and_short(n: int, k: int, size: int, groups: int) -> None:
    weight = make(n, k, size, zeros=True)
    assert weight.num_groups == groups
    assert weight.dequantize().shape == (n, k)
    stacked = Int4Weight.stack([weight, weight])
    assert stacked.dequantize().shape == (2, n, k)
    assert same(Int4Weight.from_state_dict(weight.state_dict()), weight)


def test_the_unused_nibble_of_an_odd_k_does_not_matter() -> None:
    weight = make(3, 33, 32)
    changed = Int4Weight(weight.qweight.clone(), weight.scales, k=33, group_size=32)
    changed.qweight[:, -1] ^= 0xF0
    assert not torch.equal(changed.qweight, weight.qweight)
    assert torch.equal(changed.dequantize(), weight.dequantize())


def test_strided_parts_are_made_contiguous() -> None:
    weight = make(6, 64, 32, zeros=True)
    assert weight.zeros is not None
    strided = Int4Weight(
        weight.qweight.T.contiguous().T,
        weight.scales.T.contiguous().T,
        weight.zeros.T.contiguous().T,
        k=64,
        group_size=32,
    )
    assert strided.qweight.is_contiguous()
    assert strided.scales.is_contiguous()
    assert strided.zeros is not None
    assert strided.zeros.is_contiguous()
    assert same(strided, weight)


def test_scales_are_no_part_of_a_gradient() -> None:
    weight = make(dtype=torch.float32)
    trained = torch.nn.Parameter(weight.scales.clone())
    frozen = Int4Weight(weight.qweight, trained, k=96, group_size=32)
    assert not frozen.scales.requires_grad
    assert frozen.scales.data_ptr() == trained.data_ptr()


# --- moving, storing, taking apart ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_round_trip(kind: dict[str, Any], tmp_path: Path) -> None:
    weight = make(5, 90, 32, **kind)
    state = weight.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert state["meta"].dtype == torch.int64
    assert same(Int4Weight.from_state_dict(state), weight)
    save_file(state, tmp_path / "weight.safetensors")
    loaded = Int4Weight.from_state_dict(load_file(tmp_path / "weight.safetensors"))
    assert same(loaded, weight)
    assert torch.equal(loaded.dequantize(), weight.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_and_copy(kind: dict[str, Any]) -> None:
    weight = make(**kind)
    assert same(pickle.loads(pickle.dumps(weight)), weight)
    assert copy.copy(weight).qweight is weight.qweight
    deep = copy.deepcopy(weight)
    assert same(deep, weight)
    assert deep.qweight.data_ptr() != weight.qweight.data_ptr()


def test_to() -> None:
    weight = make(zeros=True, order=True)
    assert weight.to("cpu") is weight
    assert weight.to(torch.device("cpu")) is weight
    assert weight.cpu() is weight
    moved = weight.to("meta")
    assert moved.device == torch.device("meta")
    for part in (moved.qweight, moved.scales, moved.zeros, moved.perm):
        assert part is not None
        assert part.is_meta
    assert moved.shape == weight.shape
    assert weight.device == torch.device("cpu")


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("order", [False, True])
def test_stack_and_take_apart(zeros: bool, order: bool) -> None:
    weights = [make(5, 90, 32, zeros=zeros, order=order, seed=seed) for seed in range(3)]
    stacked = Int4Weight.stack(weights)
    assert stacked.shape == (3, 5, 90)
    assert stacked.symmetric is not zeros
    for i, weight in enumerate(weights):
        assert same(stacked[i], weight)
        assert stacked[i].qweight.data_ptr() == stacked.qweight[i].data_ptr()
    assert same(stacked[-1], weights[2])
    assert [same(a, b) for a, b in zip(stacked, weights, strict=True)] == [True] * 3


def test_stack_of_unlike_experts() -> None:
    # Three groups each; only the first has an order, so the others are padded to 96 columns and given one.
    ordered = make(5, 60, 32, order=True, seed=1)
    plain = [make(5, 90, 32, seed=2), make(5, 90, 32, zeros=True, seed=3)]
    narrow = Int4Weight(ordered.qweight, ordered.scales, None, _perm(90, 96), k=90, group_size=32)
    stacked = Int4Weight.stack([narrow, *plain])
    assert stacked.act_order
    assert not stacked.symmetric
    assert stacked.padded_k == 96
    for i, weight in enumerate([narrow, *plain]):
        assert torch.equal(stacked[i].dequantize(), dense(weight).float())
    assert stacked.zeros is not None
    assert stacked.zeros[0].unique().tolist() == [8]
    assert unpack_nibbles(stacked.qweight, 96)[1:, :, 90:].unique().tolist() == [8]


def _perm(k: int, width: int) -> torch.Tensor:
    perm = torch.full((width,), -1, dtype=torch.int32)
    perm[torch.randperm(width, generator=torch.Generator().manual_seed(5))[:k]] = torch.arange(k).int()
    return perm


def test_torch_compile_traces_attributes_and_dequantize() -> None:
    weight = make(4, 70, 32, zeros=True, order=True)

    def product(x: torch.Tensor, w: Int4Weight) -> torch.Tensor:
        if w.symmetric or w.experts is not None:
            return x
        return x @ w.dequantize(x.dtype).T * w.num_groups + w.k + w.shape[0]

    x = torch.ones(3, 70)
    compiled = torch.compile(product, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight), product(x, weight))


# --- errors --------------------------------------------------------------------------------------------------


def build(**changes: Any) -> Int4Weight:
    good = make(4, 60, 32, zeros=True, order=True)
    parts: dict[str, Any] = {
        "qweight": good.qweight,
        "scales": good.scales,
        "zeros": good.zeros,
        "perm": good.perm,
        "k": 60,
        "group_size": 32,
    }
    for name, value in changes.items():
        parts[name] = value(parts[name].clone()) if callable(value) else value
    return Int4Weight(**parts)


def put(value: int, at: int) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return change


ERRORS = [
    ({"qweight": 3}, DTypeError, ["qweight is a int", "torch.Tensor"]),
    ({"qweight": lambda t: t.char()}, DTypeError, ["qweight has dtype torch.int8", "torch.uint8"]),
    ({"qweight": lambda t: t[0]}, ShapeError, ["qweight has shape (48,)", "2 dimensions"]),
    ({"qweight": lambda t: t[:, :9]}, ShapeError, ["qweight has shape (4, 9)", "(N, ceil(Kp/2)) = (4, 48)"]),
    ({"scales": lambda t: t.double()}, DTypeError, ["scales has dtype torch.float64", "torch.float16"]),
    ({"scales": lambda t: t[:, :2]}, ShapeError, ["scales has shape (4, 2)", "(N, G) = (4, 3)"]),
    ({"scales": lambda t: t[None]}, ShapeError, ["scales has shape (1, 4, 3)", "(4, 3)"]),
    ({"scales": lambda t: t.to("meta")}, DeviceError, ["scales is on meta", "cpu"]),
    ({"zeros": lambda t: t.int()}, DTypeError, ["zeros has dtype torch.int32", "torch.uint8"]),
    ({"zeros": lambda t: t[1:]}, ShapeError, ["zeros has shape (3, 3)", "(N, G) = (4, 3)"]),
    ({"zeros": lambda t: t.to("meta")}, DeviceError, ["zeros is on meta"]),
    ({"zeros": put(17, 5)}, ShapeError, ["zeros holds 17", "0..16"]),
    ({"perm": lambda t: t.long()}, DTypeError, ["perm has dtype torch.int64", "torch.int32"]),
    ({"perm": lambda t: t[None]}, ShapeError, ["perm has shape (1, 96)"]),
    ({"perm": lambda t: t[:90]}, ShapeError, ["perm has shape (90,)", "group_size = 32"]),
    ({"perm": lambda t: t[:32]}, ShapeError, ["perm has shape (32,)", "k = 60"]),
    ({"perm": lambda t: torch.where(t == 7, 60, t)}, ShapeError, ["perm holds 60", "0..59"]),
    ({"perm": lambda t: torch.where(t == 7, -2, t)}, ShapeError, ["perm holds -2"]),
    ({"perm": lambda t: torch.where(t == 7, 8, t)}, ShapeError, ["input column 7 0 times", "once"]),
    ({"perm": lambda t: torch.where(t == 9, 8, t)}, ShapeError, ["input column 8 2 times", "once"]),
    ({"k": -1}, ShapeError, ["k is -1"]),
    ({"k": 60.0}, DTypeError, ["k is 60.0"]),
    ({"k": True}, DTypeError, ["k is True"]),
    ({"group_size": 16}, UnsupportedError, ["group_size is 16", "32, 64, 128 or k = 60"]),
    ({"group_size": None}, DTypeError, ["group_size is None"]),
    ({"group_size": 60}, ShapeError, ["perm has shape (96,)", "group_size = 60"]),
]


@pytest.mark.parametrize(("changes", "error", "words"), ERRORS)
def test_constructor_errors(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        build(**changes)
    assert str(caught.value).startswith("Int4Weight: ")
    for word in words:
        assert word in str(caught.value)


def test_the_unchanged_example_of_the_errors_is_good() -> None:
    assert build().shape == (4, 60)


def test_validate_false_does_not_read_values() -> None:
    weight = make(zeros=True)
    assert weight.zeros is not None
    zeros = torch.full_like(weight.zeros, 17)
    assert Int4Weight(weight.qweight, weight.scales, zeros, k=96, group_size=32, validate=False).zeros is zeros


def test_expert_values_are_checked_one_by_one() -> None:
    weight = make(experts=2, order=True)
    assert weight.perm is not None
    perm = weight.perm.clone()
    perm[1] = torch.where(perm[1] == 3, 4, perm[1])
    with pytest.raises(ShapeError, match="input column 3 0 times"):
        Int4Weight(weight.qweight, weight.scales, perm=perm, k=96, group_size=32)


def test_whole_k_has_one_group_even_with_an_order() -> None:
    perm = torch.cat([torch.arange(40), torch.full((40,), -1)]).int()
    with pytest.raises(ShapeError, match=r"perm has shape \(80,\)"):
        Int4Weight(torch.zeros(2, 40, dtype=torch.uint8), torch.ones(2, 2), perm=perm, k=40, group_size=40)


def state(changes: dict[Any, Any]) -> dict[Any, torch.Tensor]:
    out: dict[Any, Any] = {**make(experts=2).state_dict(), **changes}
    return {name: value for name, value in out.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"scales": None}, ShapeError, ["['meta', 'qweight']", "lacks ['scales']"]),
        ({"meta": None}, ShapeError, ["lacks ['meta']"]),
        ({"g_idx": torch.zeros(3)}, ShapeError, ["unknown keys ['g_idx']"]),
        ({"meta": torch.tensor([7, 6, 96, 32, 2])}, UnsupportedError, ["version 7", "expected 1"]),
        ({"meta": torch.tensor([1, 6, 96, 32])}, ShapeError, ["meta has shape (4,)", "(5,)"]),
        ({"meta": torch.empty(5, dtype=torch.int64, device="meta")}, DeviceError, ["meta is on meta"]),
        ({1: torch.zeros(3), "g": torch.zeros(3)}, ShapeError, ["unknown keys ['1', 'g']"]),
        ({"meta": torch.tensor([1.0, 6, 96, 32, 2])}, DTypeError, ["meta", "torch.int64"]),
        ({"meta": torch.empty(0, dtype=torch.int64)}, DTypeError, ["meta", "torch.int64"]),
        ({"meta": torch.tensor([1, 6, 96, 32, 3])}, ShapeError, ["(3, 6, 96)", "(2, 6, 96)"]),
        ({"meta": torch.tensor([1, 6, 96, 32, -1])}, ShapeError, ["(6, 96)", "(2, 6, 96)"]),
        ({"meta": torch.tensor([1, 5, 96, 32, 2])}, ShapeError, ["(2, 5, 96)", "(2, 6, 96)"]),
    ],
)
def test_state_dict_errors(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        Int4Weight.from_state_dict(state(changes))
    assert str(caught.value).startswith("Int4Weight.from_state_dict: ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (lambda: make(7), ShapeError, ["weights[1] has shape (7, 96)", "(6, 96)"]),
        (lambda: make(6, 96, 64), ShapeError, ["weights[1] has group_size 64", "32"]),
        (lambda: make(order=True), ShapeError, ["weights[1] has num_groups 4", "3"]),
        (lambda: make(dtype=torch.bfloat16), DTypeError, ["weights[1]", "torch.bfloat16", "torch.float16"]),
        (lambda: make(experts=2), ShapeError, ["weights[1] has shape (2, 6, 96)"]),
        (lambda: make().to("meta"), DeviceError, ["weights[1] is on meta", "cpu"]),
        (lambda: torch.ones(3), DTypeError, ["weights[1] is a Tensor"]),
    ],
)
def test_stack_errors(other: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        Int4Weight.stack([make(), other()])
    for word in words:
        assert word in str(caught.value)


def test_other_errors() -> None:
    with pytest.raises(ShapeError, match="weights is empty"):
        Int4Weight.stack([])
    with pytest.raises(DTypeError, match="weights is a NoneType, expected a sequence of Int4Weight"):
        Int4Weight.stack(None)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="state is a NoneType, expected a mapping of names to tensors"):
        Int4Weight.from_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"index 0 .*\(6, 96\)"):
        make()[0]
    with pytest.raises(IndexError, match="index 2, expected one of 2"):
        make(experts=2)[2]
    with pytest.raises(DTypeError, match=r"index is 1\.0"):
        make(experts=2)[1.0]  # type: ignore[index]
    with pytest.raises(DTypeError, match=r"dtype is torch\.int8"):
        make().dequantize(torch.int8)
    with pytest.raises(DeviceError, match=r"device is torch\.float16") as caught:
        make().to(HALF)  # type: ignore[arg-type]
    assert isinstance(caught.value, OmniGemmError)
