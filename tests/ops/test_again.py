"""Remembered calls that launch by addresses: a backend takes down which, and never gets a call that is another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import omnigemm
from omnigemm.core.plan import Plan
from omnigemm.core.problem import Problem
from omnigemm.core.support import Support
from op_support import Watch, WatchFunctions, forget_calls

FP8 = torch.float8_e4m3fn


class Backend:
    """One kernel that runs nothing. `by_address` has what its launches got; `by_tensors` counts the others."""

    name = "cuda"

    def __init__(self) -> None:
        self.by_address: list[tuple[Any, ...]] = []
        self.by_tensors = 0
        self.bound = 0
        self.refuses = False

    def available(self) -> Support:
        return Support(True, "for the test")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        return Support(True, "for the test")

    def cost(self, problem: Problem, device: torch.device) -> float:
        return 1.0

    def kernels(self, problem: Problem, device: torch.device) -> Sequence[Any]:
        return (self,)

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        def run(*_: object) -> None:
            self.by_tensors += 1

        def at(*given: Any) -> bool:
            self.by_address.append(given)
            return not self.refuses

        def bind_addresses(*_: object) -> Callable[..., bool]:
            self.bound += 1
            return at

        return Plan(problem, device, self.name, "test", run, bind_addresses=bind_addresses, uses_torch=False)

    def taken(self) -> tuple[list[tuple[Any, ...]], int]:
        """Since the last time."""
        found = self.by_address, self.by_tensors
        self.by_address, self.by_tensors = [], 0
        return found


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    made = Backend()
    monkeypatch.setattr("omnigemm.backends.backends", lambda: (made,))
    forget_calls()
    yield made
    forget_calls()


def matrices() -> dict[str, Tensor]:
    return {"a": torch.randn(3, 8), "b": torch.randn(8, 8), "out": torch.empty(3, 8)}


def scaled() -> dict[str, Tensor]:
    a, b = torch.randn(3, 8).to(FP8), torch.randn(8, 8).to(FP8)
    return {"a": a, "b": b, "a_scale": torch.rand(3), "b_scale": torch.rand(8), "out": torch.empty(3, 8)}


def in_8_bits() -> dict[str, Tensor]:
    return scaled() | {name: torch.zeros(size, 8, dtype=torch.int8) for name, size in (("a", 3), ("b", 8))}


# What is remembered as a function of its own, and what goes through the one for all others.
KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]] = {
    "product": (omnigemm.gemm, matrices),
    "product with C": (omnigemm.gemm, lambda: matrices() | {"c": torch.randn(3, 8), "beta": 2.0}),
    "scaled": (omnigemm.fp8_gemm, scaled),
    "scaled with bias": (omnigemm.fp8_gemm, lambda: scaled() | {"bias": torch.randn(8)}),
    "int8": (omnigemm.int8_gemm, in_8_bits),
}
ORDER = ("out", "a", "b", "c", "a_scale", "b_scale", "bias")


def launched(words: dict[str, Any], out: Tensor) -> tuple[Any, ...]:
    """What a launch by addresses gets."""
    numbers = (words.get("alpha", 1.0), words.get("beta", 0.0)) if words["b"].dtype == torch.float32 else ()
    tensors = [(words | {"out": out}).get(name) for name in ORDER]
    return *numbers, *(one.data_ptr() for one in tensors if one is not None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=["out", "fresh"])
def warm(request: pytest.FixtureRequest, kind: str, backend: Backend) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """An operation and the words of a call that came twice, with an `out` or without."""
    op, make = KINDS[kind]
    words = make()
    if request.param == "fresh":
        del words["out"]
        words["out_dtype"] = torch.float32
    for turn in range(2):
        out = op(**words)
        assert out.dtype == torch.float32
        assert backend.taken() == (([launched(words, out)], 0) if turn else ([], 1))
    return op, words


Warm = tuple[Callable[..., Tensor], dict[str, Any]]


def test_addresses_are_those_of_the_call(warm: Warm, backend: Backend) -> None:
    op, words = warm
    for name in ("a", "out", "a_scale", "bias", "c"):
        if name in words:
            words[name] = words[name].clone()
            out = op(**words)
            assert out is words.get("out", out)
            assert backend.taken() == ([launched(words, out)], 0), name


def test_another_weight_is_another_call(warm: Warm, backend: Backend) -> None:
    """With the launch of all weights of its shape."""
    op, words = warm
    words["b"] = words["b"].clone()
    for expected in (1, 0, 0):
        op(**words)
        assert backend.taken()[1] == expected
    assert backend.bound == 1


def test_what_is_refused_goes_by_tensors(warm: Warm, backend: Backend) -> None:
    op, words = warm
    backend.refuses = True
    out = op(**words)
    assert out is words.get("out", out)
    assert backend.taken() == ([launched(words, out)], 1)


@pytest.mark.parametrize("warm", ["out"], indirect=True)
def test_an_out_that_overlaps_is_refused(warm: Warm, backend: Backend) -> None:
    """Each input in turn, with `out` just before it, just behind it, and over it in part."""
    op, words = warm
    for name in [one for one in ORDER[1:] if one in words]:
        own = words[name]
        size, reach = own.nbytes, words["out"].nbytes
        room = torch.zeros(size + 2 * reach + 64, dtype=torch.uint8)
        start = -room.data_ptr() % 16 + reach
        given = words | {name: room[start : start + size].view(own.dtype).view(own.shape)}
        op(**given)
        backend.taken()

        for at, fine in ((-reach, True), (size, True), (4 - reach, False), (size - 4, False), (8, False)):
            given["out"] = room[start + at : start + at + reach].view(torch.float32).view(3, 8)
            if fine:
                op(**given)
                assert backend.taken() == ([launched(given, given["out"])], 0), name
            else:
                with pytest.raises(omnigemm.LayoutError, match=f"shares memory with {name}"):
                    op(**given)
                assert backend.taken() == ([], 0)


def changes(words: dict[str, Any]) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Ways to make a tensor another one under its name, which change its strides, its shape, or its dtype."""
    for name in ORDER:
        one = words.get(name)
        if one is None:
            continue
        if one.dim() == 2:
            yield name, lambda x: x.t_()
            yield name, lambda x: x.resize_(x.size(0), x.size(1) - 1)
            yield name, lambda x: x.set_(torch.zeros(2 * x.numel(), dtype=x.dtype).view(x.size(0), -1)[:, ::2])
        else:
            yield name, lambda x: x.resize_(x.numel() - 1)


def test_tensors_that_changed_in_place_are_looked_at(warm: Warm, backend: Backend) -> None:
    """Whether the call is refused then or runs by tensors, nothing is launched that was made for what they were."""
    op, words = warm
    count = 0
    for name, change in changes(words):
        given = {key: one.clone() if isinstance(one, Tensor) and key != "b" else one for key, one in words.items()}
        op(**given)
        assert backend.taken()[1] == 0, name
        if name == "b":
            given["b"] = words["b"].clone()
            for _ in range(2):
                op(**given)
        backend.taken()
        change(given[name])
        try:
            op(**given)
        except omnigemm.OmniGemmError:
            assert backend.taken() == ([], 0), name
        else:
            assert backend.taken() == ([], 1), name
        op(**words)  # is remembered again
        backend.taken()
        count += 1
    assert count >= 6


@pytest.mark.parametrize(
    "words",
    [{"backend": 3}, {"backend": "cdua"}, {"out_dtype": "fp32"}, {"out_dtype": 1}, {"out": 1}, {"out": [1.0]}],
    ids=str,
)
def test_wrong_words_are_refused_as_ever(warm: Warm, backend: Backend, words: dict[str, Any]) -> None:
    op, right = warm
    with pytest.raises(omnigemm.OmniGemmError):
        op(**right | words)
    assert backend.taken() == ([], 0)


def test_other_words_are_another_call(warm: Warm, backend: Backend) -> None:
    op, words = warm
    op(**words | {"backend": "cuda"})
    assert backend.taken() == ([], 1)
    op(**words | {"backend": "".join(("cu", "da"))})  # an equal string, and another one
    assert backend.taken()[1] == 0
    op(**words)
    assert backend.taken() == ([], 1)
    other = {key: one for key, one in words.items() if key not in ("out", "out_dtype")}
    other |= {"out_dtype": torch.float32} if "out" in words else {"out": torch.empty(3, 8)}
    op(**other)
    assert backend.taken() == ([], 1)
    op(**words)
    assert backend.taken() == ([], 1)


def test_settings_are_part_of_the_call(warm: Warm, backend: Backend) -> None:
    op, words = warm
    for expected in (1, 0):  # other settings, and then the same in another block
        with omnigemm.settings(deterministic=True):
            op(**words)
        assert backend.taken()[1] == expected
    op(**words)
    assert backend.taken()[1] == 1
    with omnigemm.settings():  # changes nothing
        op(**words)
    assert backend.taken()[1] == 0


def test_gradients_take_the_long_way(warm: Warm, backend: Backend) -> None:
    op, words = warm
    last = "c" if "c" in words else "a_scale" if "a_scale" in words else "b"
    words[last] = words[last].clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            op(**words)
    assert backend.taken()[1] == 1
    if "out" in words:
        words["out"] = words["out"].clone()
    op(**words)
    assert backend.taken() == ([], 1)
    with torch.no_grad():
        op(**words)
    assert backend.taken()[1] == 0


def test_whoever_watches_sees_the_operator(warm: Warm, backend: Backend) -> None:
    op, words = warm
    for mode in (WatchFunctions(), Watch()):
        with mode:
            op(**words)
        assert any(str(one).startswith(f"omnigemm.{op.__name__}") for one in mode.seen)
        assert backend.taken() == ([], 1)


def test_nothing_is_launched_for_fake_tensors(warm: Warm, backend: Backend) -> None:
    """A mode that torch's guard would let pass."""
    op, words = warm
    with FakeTensorMode(allow_non_fake_inputs=True):
        op(**words)
    assert backend.taken() == ([], 0)


def test_numbers_are_those_of_the_call(backend: Backend) -> None:
    words: dict[str, Any] = matrices()
    for alpha, beta in ((1.0, 0.0), (2.0, 0.0), (2.0, 3.0), (2.0, 4.0), (5.0, 4.0), (1.0, 0.0)):
        words |= {"alpha": alpha, "beta": beta, "c": torch.randn(3, 8) if beta else None}
        for turn in range(2):
            omnigemm.gemm(**words)
            assert backend.taken() == (([launched(words, words["out"])], 0) if turn else ([], 1))


@pytest.mark.parametrize("words", [{"c": 3}, {"c": torch.ones(2, 2)}, {"beta": 1.0}, {"alpha": True}], ids=str)
def test_wrong_operands_are_refused_as_ever(backend: Backend, words: dict[str, Any]) -> None:
    right = matrices()
    for _ in range(2):
        omnigemm.gemm(**right)
    backend.taken()
    with pytest.raises(omnigemm.OmniGemmError, match=f"gemm: ({next(iter(words))}|c) "):
        omnigemm.gemm(**right | words)
    assert backend.taken() == ([], 0)


def test_a_c_that_is_out(backend: Backend) -> None:
    words: dict[str, Any] = matrices() | {"beta": 1.0}
    for turn in range(3):
        words["c"] = words["out"] = torch.empty(3, 8)
        omnigemm.gemm(**words)
        assert backend.taken() == (([launched(words, words["out"])], 0) if turn else ([], 1))
    words["c"] = words["out"].clone()
    omnigemm.gemm(**words)
    assert backend.taken() == ([], 1)


@pytest.fixture
def onto(backend: Backend) -> dict[str, Any]:
    """The words of a call that came twice, with a C that is `out`."""
    words: dict[str, Any] = matrices() | {"beta": 1.0}
    words["c"] = words["out"]
    for _ in range(2):
        omnigemm.gemm(**words)
    backend.taken()
    return words


def test_a_c_that_is_no_longer_out_is_another_call(onto: dict[str, Any], backend: Backend) -> None:
    """One that begins where `out` does, too: it may be another matrix."""
    for name, other in (("c", onto["out"].clone()), ("out", onto["c"].clone()), ("out", None)):
        omnigemm.gemm(**onto | {name: other})
        assert backend.taken() == ([], 1)
        omnigemm.gemm(**onto)
        assert backend.taken() == ([], 1)
    with pytest.raises(omnigemm.LayoutError, match="shares memory with c"):
        omnigemm.gemm(**onto | {"c": onto["out"][:1]})


def test_an_out_that_is_c_may_overlap_no_other(onto: dict[str, Any], backend: Backend) -> None:
    for name in ("a", "b"):
        room = torch.zeros(24 + 64)
        start = 24 if name == "b" else 48
        given = onto | {name: room[start : start + onto[name].numel()].view(onto[name].shape)}
        given["out"] = given["c"] = room[start - 24 : start].view(3, 8)
        omnigemm.gemm(**given)
        backend.taken()
        given["out"] = given["c"] = room[start - 23 : start + 1].view(3, 8)
        with pytest.raises(omnigemm.LayoutError, match=f"shares memory with {name}"):
            omnigemm.gemm(**given)
        assert backend.taken() == ([], 0)


def test_a_c_that_is_out_changes_in_place(onto: dict[str, Any], backend: Backend) -> None:
    onto["out"].set_(torch.zeros(3, 16)[:, ::2])
    omnigemm.gemm(**onto)
    assert backend.taken() == ([], 1)


def test_one_matrix_in_several_places(backend: Backend) -> None:
    """Each place that it has is its own, remembered or not."""
    x, out, other = torch.randn(8, 8), torch.empty(8, 8), torch.randn(8, 8)
    for a, c, result in ((x, x, out), (other, x, out), (x, other, out), (x, out, out), (x, None, out), (x, x, None)):
        forget_calls()
        words: dict[str, Any] = {"a": a, "b": x, "c": c, "beta": 0.0 if c is None else 1.0, "out": result}
        for turn in range(2):
            made = omnigemm.gemm(**words)
            assert backend.taken() == (([launched(words, made)], 0) if turn else ([], 1))
        words["a"] = torch.randn(8, 8)  # of the shape that it had
        omnigemm.gemm(**words)
        assert len(backend.taken()[0]) == (a is not x)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_call_is_the_operator(backend: Backend, strict: bool) -> None:
    words = matrices()

    class Module(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return omnigemm.gemm(a, b)

    for _ in range(2):
        omnigemm.gemm(words["a"], words["b"])
    backend.taken()
    graph = torch.export.export(Module(), (words["a"], words["b"]), strict=strict).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.omnigemm.gemm.default]
    assert backend.taken() == ([], 0)
