"""Plain eager calls skip torch's dispatcher; whoever watches it still sees the operator."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import omnigemm
from omnigemm.core.dispatch import PlanCache
from omnigemm.ops import _library, _run, grouped_list, overlap
from omnigemm.ops._again import ANEW
from omnigemm.ops._recent import RecentCalls, recent_calls
from op_support import Watch, WatchFunctions, forget_calls

OP = torch.ops.omnigemm.fp8_gemm


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b = torch.randn(3, 256).to(torch.float8_e4m3fn), torch.randn(5, 256).to(torch.float8_e4m3fn)
    return a, b, torch.rand(3) + 0.5, torch.rand(5) + 0.5


@pytest.fixture
def through_dispatcher(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls that take the long way."""
    taken: list[int] = []
    shortcut = _library.shortcut

    def look(*call: Any) -> Any:
        answer = shortcut(*call)
        if answer is ANEW:
            taken.append(1)
        return answer

    monkeypatch.setattr(_library, "shortcut", look)
    return taken


def test_a_plain_call_takes_the_shortcut_to_the_same_result(through_dispatcher: list[int]) -> None:
    given = operands()
    ours = omnigemm.fp8_gemm(*given)
    out = torch.full_like(ours, float("nan"))
    omnigemm.fp8_gemm(*given, out=out)
    assert not through_dispatcher
    assert torch.equal(ours, OP.default(*given, None, None, None))
    assert torch.equal(out, ours)


def test_a_mode_sees_the_operator() -> None:
    given = operands()
    with Watch() as watch:
        omnigemm.fp8_gemm(*given)
    assert OP.default in watch.seen


def test_a_function_mode_sees_the_operator() -> None:
    given = operands()
    with WatchFunctions() as mode:
        omnigemm.fp8_gemm(*given)
    assert OP.default in mode.seen


@pytest.mark.filterwarnings("ignore")
def test_a_traced_call_is_an_operator_and_not_a_constant() -> None:
    a, b, a_scale, b_scale = operands()
    traced = torch.jit.trace(lambda scale: omnigemm.fp8_gemm(a, b, scale, b_scale), (a_scale,), check_trace=False)
    assert torch.equal(traced(2 * a_scale), omnigemm.fp8_gemm(a, b, 2 * a_scale, b_scale))


def test_fake_tensors_stay_fake() -> None:
    with FakeTensorMode():
        a = torch.empty(3, 256, dtype=torch.float8_e4m3fn)
        result = omnigemm.fp8_gemm(a, torch.empty(5, 256, dtype=torch.float8_e4m3fn), torch.empty(3), torch.empty(5))
    assert type(result).__name__ == "FakeTensor"
    assert result.shape == (3, 5)


def test_a_subclass_is_not_bypassed(through_dispatcher: list[int]) -> None:
    class Own(Tensor):
        pass

    a, b, a_scale, b_scale = operands()
    omnigemm.fp8_gemm(a, b, a_scale.as_subclass(Own), b_scale)
    assert through_dispatcher


def test_an_out_of_a_subclass_is_not_bypassed(through_dispatcher: list[int]) -> None:
    """Nor remembered: the calls after it, with the same weight and rows, are compared with what was."""

    class Own(Tensor):
        pass

    given = operands()
    wanted = omnigemm.fp8_gemm(*given)
    for turn in range(1, 3):
        out = torch.full_like(wanted, float("nan")).as_subclass(Own)
        omnigemm.fp8_gemm(*given, out=out)
        assert torch.equal(out.as_subclass(Tensor), wanted)
        assert len(through_dispatcher) == turn
        out = torch.full_like(wanted, float("nan"))
        assert torch.equal(omnigemm.fp8_gemm(*given, out=out), wanted)
    assert len(through_dispatcher) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_go_the_way_that_warns(through_dispatcher: list[int], enabled: bool) -> None:
    a, b, a_scale, b_scale = operands()
    with torch.set_grad_enabled(enabled):
        omnigemm.fp8_gemm(a, b, a_scale, torch.nn.Parameter(b_scale))
    assert bool(through_dispatcher) == enabled


def test_transforms_are_not_bypassed(through_dispatcher: list[int]) -> None:
    a, b, a_scale, b_scale = operands()

    def one(scale: Tensor) -> Tensor:
        return omnigemm.fp8_gemm(a, b, scale, b_scale)

    doubled = torch.stack([a_scale, 2 * a_scale])
    assert torch.equal(torch.vmap(one)(doubled), torch.stack([one(scale) for scale in doubled]))
    assert through_dispatcher


def test_out_next_to_an_operand_is_fine_and_inside_one_is_not() -> None:
    """The quick look at addresses lets neighbours pass and leaves the rest to the full check."""
    room = torch.zeros(3 * 256 + 3 * 5 * 2, dtype=torch.uint8)
    a, b, a_scale, b_scale = operands()
    inside = room[: 3 * 256].view(torch.float8_e4m3fn).view(3, 256)
    inside.view(torch.uint8).copy_(a.view(torch.uint8))
    beside = room[3 * 256 :].view(torch.bfloat16).view(3, 5)
    for _ in range(2):  # cold and warm
        assert torch.equal(
            omnigemm.fp8_gemm(inside, b, a_scale, b_scale, out=beside), omnigemm.fp8_gemm(a, b, a_scale, b_scale)
        )
        overlapping = room[3 * 256 - 2 : -2].view(torch.bfloat16).view(3, 5)
        with pytest.raises(omnigemm.LayoutError, match="shares memory with a"):
            omnigemm.fp8_gemm(inside, b, a_scale, b_scale, out=overlapping)


# ------------------------------------------------------------------------------------ the last call with a weight


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls that are looked up by their signature."""
    seen: list[int] = []
    get = _run.calls.get

    def look(key: Any) -> Any:
        seen.append(1)
        return get(key)

    monkeypatch.setattr(_run.calls, "get", look)
    forget_calls()
    return seen


def test_the_same_call_again_is_not_looked_up(executed: list[int]) -> None:
    given = operands()
    first = omnigemm.fp8_gemm(*given)
    for _ in range(3):
        assert torch.equal(omnigemm.fp8_gemm(given[0].clone(), given[1], *given[2:]), first)
    assert len(executed) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, sa, sb: (a[:2], b, sa[:2], sb),
        lambda a, b, sa, sb: (a.to(torch.float8_e5m2), b, sa, sb),
        lambda a, b, sa, sb: (a, b, sa[:1], sb),
        lambda a, b, sa, sb: (a[:, ::2], b[:, ::2], sa, sb),
    ],
    ids=["rows", "dtype", "scales", "strides"],
)
def test_another_call_with_the_weight_is_another_call(change: Any) -> None:
    given = operands()
    other = change(*given)
    wanted = omnigemm.fp8_gemm(*(one.clone() for one in other))
    for _ in range(2):
        omnigemm.fp8_gemm(*given)
        assert torch.equal(omnigemm.fp8_gemm(*other), wanted)


def test_packed_weights_are_recognised_too(executed: list[int]) -> None:
    x, other = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    weights = [omnigemm.quantize_int4(torch.randn(8, 64).bfloat16(), group_size=size) for size in (32, 64)]
    wanted = [[omnigemm.int4_gemm(one, w).clone() for one in (x, other)] for w in weights]
    del executed[:]
    for _ in range(2):
        for w, results in zip(weights, wanted, strict=True):
            for one, result in zip((x, other), results, strict=True):
                assert torch.equal(omnigemm.int4_gemm(one, w), result)
    assert not executed
    with pytest.raises(omnigemm.DTypeError, match="w is a Tensor"):
        omnigemm.int4_gemm(x, weights[0].qweight)  # type: ignore[arg-type]


def test_a_weight_that_changed_under_its_name(executed: list[int]) -> None:
    a, b, a_scale, b_scale = operands()
    omnigemm.fp8_gemm(a, b, a_scale, b_scale)
    b.data = b.data[:4].clone()
    result = omnigemm.fp8_gemm(a, b, a_scale, b_scale[:4])
    assert result.shape == (3, 4)
    with pytest.raises(omnigemm.ShapeError, match="b_scale"):
        omnigemm.fp8_gemm(a, b, a_scale, b_scale)
    assert len(executed) == 3


def test_which_argument_is_missing_is_told_apart() -> None:
    """The same number of tensors of the same kind in the same order, but one is C and the other `out`."""
    a, b, c = (torch.randn(4, 4) for _ in range(3))
    for _ in range(2):
        with_c = omnigemm.gemm(a, b, c, beta=1.0)
        out = torch.full_like(c, float("nan"))
        omnigemm.gemm(a, b, out=out)
        torch.testing.assert_close(with_c, a @ b + c)
        torch.testing.assert_close(out, a @ b)


def test_numbers_are_not_kept() -> None:
    a, b, c = (torch.randn(4, 4) for _ in range(3))
    for alpha, beta in [(1.0, 0.0), (2.0, 0.5), (3.0, 0.25), (1.0, 1.0), (0.0, 2.0), (2.0, 0.0)]:
        torch.testing.assert_close(omnigemm.gemm(a, b, c, alpha=alpha, beta=beta), alpha * (a @ b) + beta * c)


def test_settings_and_words_are_part_of_the_call(executed: list[int]) -> None:
    given = operands()
    omnigemm.fp8_gemm(*given)
    with omnigemm.settings(deterministic=True):
        omnigemm.fp8_gemm(*given)
    assert omnigemm.fp8_gemm(*given, out_dtype=torch.float32).dtype == torch.float32
    assert omnigemm.fp8_gemm(*given).dtype == torch.bfloat16
    omnigemm.fp8_gemm(*given, backend="cpu")
    with pytest.raises(omnigemm.OmniGemmError):
        omnigemm.fp8_gemm(*given, backend="cuda")
    assert len(executed) == 6


def test_gradients_take_the_long_way_also_after_a_call_without(through_dispatcher: list[int]) -> None:
    a, b, a_scale, b_scale = operands()
    b_scale.requires_grad_()
    with torch.no_grad():
        wanted = omnigemm.fp8_gemm(a, b, a_scale, b_scale)
        assert not through_dispatcher
    assert torch.equal(omnigemm.fp8_gemm(a, b, a_scale, b_scale).detach(), wanted)
    assert len(through_dispatcher) == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecentCalls, "LIMIT", 5)
    weights = [torch.randn(4, 4) for _ in range(12)]
    for weight in weights:
        omnigemm.gemm(weight, weight)
    assert len(recent_calls.by_place) <= 5


def test_whoever_watches_sees_remembered_calls_too() -> None:
    given = operands()
    for _ in range(2):
        wanted = omnigemm.fp8_gemm(*given)
    with Watch() as watch:
        assert torch.equal(omnigemm.fp8_gemm(*given), wanted)
    assert OP.default in watch.seen
    with WatchFunctions() as functions:
        omnigemm.fp8_gemm(*given)
    assert OP.default in functions.seen
    mapped = torch.func.functionalize(lambda *tensors: omnigemm.fp8_gemm(*tensors))(*given)
    assert torch.equal(mapped, wanted)
    compiled = torch.compile(lambda *tensors: omnigemm.fp8_gemm(*tensors), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), wanted)
    with FakeTensorMode() as fake:
        assert omnigemm.fp8_gemm(*(fake.from_tensor(one) for one in given)).shape == wanted.shape


def test_a_remembered_call_with_wrong_arguments_is_refused_as_ever() -> None:
    given = operands()
    for _ in range(2):
        omnigemm.fp8_gemm(*given)
    with pytest.raises(omnigemm.DTypeError, match="backend is 3"):
        omnigemm.fp8_gemm(*given, backend=3)  # type: ignore[arg-type]
    with pytest.raises(omnigemm.DTypeError, match="out_dtype is 'bf16'"):
        omnigemm.fp8_gemm(*given, out_dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(omnigemm.DTypeError, match="a is a list"):
        omnigemm.fp8_gemm([1.0], *given[1:])  # type: ignore[arg-type]
    room = torch.zeros(3 * 256, dtype=torch.uint8)
    a = room.view(torch.float8_e4m3fn).view(3, 256)
    for _ in range(2):
        omnigemm.fp8_gemm(a, *given[1:], out=torch.empty(3, 5, dtype=torch.bfloat16))
    with pytest.raises(omnigemm.LayoutError, match="shares memory"):
        omnigemm.fp8_gemm(a, *given[1:], out=room[:30].view(torch.bfloat16).view(3, 5))


def test_numbers_of_rows_in_turns_are_remembered_each(executed: list[int]) -> None:
    """A server's batches change from step to step."""
    a, b, a_scale, b_scale = operands()
    for _ in range(4):
        for rows in (3, 2, 1):
            omnigemm.fp8_gemm(a[:rows], b, a_scale[:rows], b_scale)
    assert len(executed) == 3
    left, right = torch.randn(2, 5, 4), torch.randn(2, 4, 6)
    for _ in range(3):
        for rows in (5, 3):
            torch.testing.assert_close(omnigemm.gemm(left[:, :rows], right), left[:, :rows] @ right)
    assert len(executed) == 5


@pytest.mark.parametrize("wrong", [True, "1", torch.ones(()), torch.ones(3)], ids=str)
def test_what_equals_a_remembered_number_is_not_one(wrong: Any) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(2):
        omnigemm.gemm(a, b, alpha=1.0)
    with pytest.raises(omnigemm.DTypeError, match="alpha is"):
        omnigemm.gemm(a, b, alpha=wrong)
    assert torch.equal(omnigemm.gemm(a, b, alpha=1), omnigemm.gemm(a, b))


@pytest.mark.parametrize("wrong", [True, 1.0], ids=str)
def test_what_equals_a_remembered_number_of_rows_is_not_one(wrong: Any) -> None:
    a, b, counts = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.tensor([1, 2], dtype=torch.int32)
    for _ in range(2):
        omnigemm.grouped_gemm_masked(a, b, counts, expected_m=1)
    with pytest.raises(omnigemm.ShapeError, match="expected_m is"):
        omnigemm.grouped_gemm_masked(a, b, counts, expected_m=wrong)


def test_a_tensor_that_comes_twice_is_remembered_as_such(executed: list[int]) -> None:
    """Such as a C that is `out`, which torch's guard would refuse."""
    a, b, c = (torch.randn(4, 4) for _ in range(3))
    out = torch.randn(4, 4)
    for turn in range(3):
        want = a @ b + out
        omnigemm.gemm(a, b, out, beta=1.0, out=out)
        torch.testing.assert_close(out, want)
        assert len(executed) == 1, turn
    other = torch.full((4, 4), float("nan"))  # the same kinds of tensors in the same places, but all different
    omnigemm.gemm(a, b, c, beta=1.0, out=other)
    torch.testing.assert_close(other, a @ b + c)
    assert len(executed) == 2
    want = a @ b + out
    omnigemm.gemm(a, b, out, beta=1.0, out=out)
    torch.testing.assert_close(out, want)


def test_one_matrix_in_both_places(executed: list[int]) -> None:
    square, other = torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(3):
        torch.testing.assert_close(omnigemm.gemm(square, square), square @ square)
    assert len(executed) == 1
    torch.testing.assert_close(omnigemm.gemm(other, square), other @ square)
    assert len(executed) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of_lists", [False, True])
def test_tracers_and_transforms_see_remembered_calls(through_dispatcher: list[int], of_lists: bool) -> None:
    """Also where the tensors themselves are none of theirs: the guard looks at what is in force around the call."""
    given = lists(3, 2) if of_lists else operands()

    def product() -> Tensor:
        return omnigemm.grouped_gemm(*given)[1] if of_lists else omnigemm.fp8_gemm(*given)  # type: ignore[arg-type]

    wanted = product()
    product()

    def seen(x: Tensor) -> Tensor:
        through_dispatcher.clear()
        result = product()
        assert through_dispatcher
        return x + result.float().sum()

    one = torch.ones(())
    torch.jit.trace(seen, (one,), check_trace=False)
    torch.vmap(seen)(torch.ones(2))
    torch.func.grad(seen)(one)
    torch.func.jvp(seen, (one,), (one,))
    torch.func.functionalize(seen)(one)
    through_dispatcher.clear()
    assert torch.equal(product(), wanted)
    assert not through_dispatcher


# ------------------------------------------------------------------------------------------------ lists of tensors


def lists(*rows: int) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.randn(m, 6) for m in rows], [torch.randn(6, 5) for _ in rows]


def check_lists(
    out: list[Tensor], a: list[Tensor], b: list[Tensor], c: Any = None, alpha: Any = 1.0, beta: Any = 0.0
) -> None:
    for i, one in enumerate(out):
        s, t = (x if isinstance(x, float) else x[i] for x in (alpha, beta))
        torch.testing.assert_close(one, s * (a[i] @ b[i]) + (t * c[i] if t else 0.0))


def test_a_list_like_one_before_is_not_looked_up(executed: list[int]) -> None:
    """Whatever the tensors and lists are in which it comes, and after whatever other lists."""
    for _ in range(3):
        for rows in ((3, 2, 4), (3, 2, 1), (3, 2)):
            a, b = lists(*rows)
            check_lists(omnigemm.grouped_gemm(a, b), a, b)
            check_lists(omnigemm.grouped_gemm(tuple(a), tuple(b)), a, b)
    assert len(executed) == 3
    a, b = lists(3, 2, 4)
    for _ in range(3):
        out = [torch.full((m, 5), float("nan")) for m in (3, 2, 4)]
        assert omnigemm.grouped_gemm(a, b, out=out) == out
        check_lists(out, a, b)
    assert len(executed) == 4


def test_factors_of_a_list_are_not_kept(executed: list[int]) -> None:
    a, b = lists(3, 2)
    c = [torch.randn(3, 5), torch.randn(2, 5)]
    for alpha, beta in ((2.0, 3.0), ([4.0, 5.0], [0.5, 7.0]), ([0.25, 3.0], 2.0)):
        check_lists(omnigemm.grouped_gemm(a, b, c, alpha=alpha, beta=beta), a, b, c, alpha, beta)
    assert len(executed) == 1
    # Where C is read, and where nothing is scaled, is part of the call.
    c[1].fill_(float("nan"))
    for alpha, beta in ((2.0, [3.0, 0.0]), ([1.0, 2.0], [1.0, 0.0]), (2.0, [5.0, 0.0])):
        check_lists(omnigemm.grouped_gemm(a, b, c, alpha=alpha, beta=beta), a, b, c, alpha, beta)
    assert len(executed) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: (a, [b[0], torch.randn(12, 5)[::2]]),
        lambda a, b: (a, [b[0], torch.randn(5, 6).t()]),
        lambda a, b: (a, [b[0], torch.randn(6, 9)]),
        lambda a, b: ([one.double().half() for one in a], [one.half() for one in b]),
    ],
    ids=["strides", "transposed", "columns", "dtype"],
)
def test_another_list_of_such_rows_is_another_call(change: Any) -> None:
    given = lists(3, 2)
    other = change(*given)
    wanted = [x @ y for x, y in zip(*other, strict=True)]
    for _ in range(2):
        check_lists(omnigemm.grouped_gemm(*given), *given)
        torch.testing.assert_close(omnigemm.grouped_gemm(*other), wanted)


def test_lists_of_other_lengths_and_kinds_are_told_apart() -> None:
    """As many tensors of the same kinds in the same order as in the call before, but in other lists."""
    a, b, c, out = ([torch.randn(4, 4) for _ in range(3)] for _ in range(4))
    spare = [torch.randn(4, 4) for _ in range(2)]
    for right, wrong in (
        ({"a": a, "b": b, "c": c, "beta": 2.0}, {"a": a, "b": [*b, spare[0]], "c": c[:2], "beta": 2.0}),
        ({"a": a, "b": b, "out": out}, {"a": a, "b": b[:2], "out": [*out, spare[0]]}),
        (
            {"a": a, "b": b, "c": c, "out": out, "beta": 2.0},
            {"a": a, "b": b, "c": c[:2], "out": [*out, spare[0]], "beta": 2.0},
        ),
    ):
        for _ in range(2):
            check_lists(omnigemm.grouped_gemm(**right), a, b, c, 1.0, right.get("beta", 0.0))  # type: ignore[arg-type]
        with pytest.raises(omnigemm.ShapeError, match=r"has \d matrices, expected 3"):
            omnigemm.grouped_gemm(**wrong)  # type: ignore[arg-type]
    for _ in range(2):  # C, or the results
        check_lists(omnigemm.grouped_gemm(a, b, c, beta=2.0), a, b, c, 1.0, 2.0)
        check_lists(omnigemm.grouped_gemm(a, b, out=out), a, b)


@pytest.mark.parametrize("wrong", [True, "1", [True, 1.0], [1.0], None], ids=str)
def test_what_equals_a_lists_number_is_not_one(wrong: Any) -> None:
    a, b = lists(3, 2)
    for _ in range(2):
        omnigemm.grouped_gemm(a, b, alpha=1.0)
    with pytest.raises(omnigemm.OmniGemmError, match=r"alpha (is|has)"):
        omnigemm.grouped_gemm(a, b, alpha=wrong)
    with pytest.raises(omnigemm.DTypeError, match="out_dtype is 'fp32'"):
        omnigemm.grouped_gemm(a, b, out_dtype="fp32")  # type: ignore[arg-type]
    with pytest.raises(omnigemm.DTypeError, match="backend is 1"):
        omnigemm.grouped_gemm(a, b, backend=1)  # type: ignore[arg-type]
    with pytest.raises(omnigemm.DTypeError, match=r"b\[1\] is a NoneType"):
        omnigemm.grouped_gemm(a, [b[0], None])  # type: ignore[list-item]


def test_whoever_watches_sees_lists_too(through_dispatcher: list[int]) -> None:
    a, b = lists(3, 2)
    operator = torch.ops.omnigemm.grouped_gemm.default
    for _ in range(2):
        wanted = omnigemm.grouped_gemm(a, b)
    assert not through_dispatcher
    with Watch() as watch:
        check_lists(omnigemm.grouped_gemm(a, b), a, b)
    assert operator in watch.seen
    with WatchFunctions() as functions:
        omnigemm.grouped_gemm(a, b)
    assert operator in functions.seen
    del through_dispatcher[:]
    with FakeTensorMode(allow_non_fake_inputs=True):
        omnigemm.grouped_gemm(a, b)
    assert through_dispatcher
    compiled = torch.compile(lambda x, y: omnigemm.grouped_gemm([x, a[1]], [y, b[1]]), fullgraph=True, backend="eager")
    assert torch.equal(compiled(a[0], b[0])[0], wanted[0])
    del through_dispatcher[:]

    class Own(Tensor):
        pass

    omnigemm.grouped_gemm([a[0], a[1].as_subclass(Own)], b)
    assert len(through_dispatcher) == 1
    b[1].requires_grad_()
    with torch.no_grad():
        omnigemm.grouped_gemm(a, b)
        omnigemm.grouped_gemm(a, b)
    assert len(through_dispatcher) == 1
    omnigemm.grouped_gemm(a, b)
    assert len(through_dispatcher) == 2


def test_settings_are_part_of_a_list(executed: list[int]) -> None:
    a, b = lists(3, 2)
    for _ in range(2):
        omnigemm.grouped_gemm(a, b)
    with omnigemm.settings(deterministic=True):
        omnigemm.grouped_gemm(a, b)
    assert omnigemm.grouped_gemm(a, b, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    assert len(executed) == 3


def test_long_lists_take_more_of_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_calls()
    monkeypatch.setattr(RecentCalls, "LIMIT", 50)
    for rows in range(1, 9):
        omnigemm.grouped_gemm(*lists(*[rows] * 10))  # of 20 tensors
        assert 1 <= len(recent_calls.by_place) <= 2
    monkeypatch.setattr(PlanCache, "LIMIT", 10)
    forget_calls()
    for rows in range(1, 9):
        omnigemm.grouped_gemm(*lists(*[rows] * 32))  # as much as 5 products
        assert 1 <= len(_run.calls) <= 2


def test_in_place_lists_are_looked_at_closely_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = grouped_list.need_all_distinct
    monkeypatch.setattr(grouped_list, "need_all_distinct", lambda *given: looked.append(1) or real(*given))
    a, b = lists(3, 2)
    c = [torch.zeros(3, 5), torch.zeros(2, 5)]
    for turn in range(1, 4):
        omnigemm.grouped_gemm(a, b, c, beta=2.0, out=c)
        check_lists(c, a, b, alpha=2.0**turn - 1)
    assert len(looked) == 1
    moved = [one.clone() for one in c]
    omnigemm.grouped_gemm(a, b, moved, beta=2.0, out=moved)
    assert len(looked) == 2
    with pytest.raises(omnigemm.LayoutError, match=r"out\[\d\] shares memory"):
        omnigemm.grouped_gemm(a, b, [moved[0], moved[0][:2]], beta=2.0, out=moved)


def test_a_tensor_that_comes_twice_in_a_list(executed: list[int]) -> None:
    """One weight in several products, and C that is `out`: recognised as such, and told from lists without."""
    a, b = lists(3, 2, 3)
    shared, out = [b[0], b[1], b[0]], [torch.zeros(m, 5) for m in (3, 2, 3)]
    for turn in range(1, 4):
        check_lists(omnigemm.grouped_gemm(a, shared), a, shared)
        omnigemm.grouped_gemm([a[0]], [b[0]], [out[0]], beta=2.0, out=[out[0]])
        check_lists([out[0]], a, b, alpha=2.0**turn - 1)
    assert len(executed) == 2
    for given in (b, [b[0], b[1], b[1]], shared, [b[2], b[1], b[2]]):
        check_lists(omnigemm.grouped_gemm(a, given), a, given)
    assert len(executed) == 5, "the last two are alike"


def test_overlaps_of_lists_are_found_by_addresses() -> None:
    """Against a count of who uses each byte."""
    source, room, found = random.Random(0), torch.zeros(64, dtype=torch.uint8), [0, 0]
    for _ in range(2000):
        tensors, uses = [], torch.zeros(2, 64, dtype=torch.int64)
        outs = source.randint(1, 3)
        for i in range(outs + source.randint(0, 4)):
            start, size = source.randint(0, 60), source.randint(0, 4)
            tensors.append(room[start : start + size])
            uses[int(i >= outs), start : start + size] += 1
        fine = not bool(((uses[0] > 1) | (uses[0] > 0) & (uses[1] > 0)).any())
        reach, looks = overlap.ListReach(outs, tensors), []
        starts = [one.data_ptr() for one in tensors]
        for _ in range(2):  # what was looked at closely, and passed, is known
            reach.need_apart(starts, lambda looks=looks: looks.append(1))
        assert looks == ([] if fine else [1])
        found[fine] += 1
    assert min(found) > 300
