"""Quantisers under torch.compile and torch.export: one operator each, with the results of eager calls, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from omnigemm import DTypeError, UnsupportedError, quantize_fp8, quantize_int8, rms_norm_quantize, swiglu_quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
OPERATORS = {"quantize_int8", "quantize_int8_asymmetric", "quantize_fp8", "rms_norm_quantize", "swiglu_quantize"}

SHAPES: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(5, 300),
    "batch": lambda: torch.randn(2, 3, 130),
    "blocks": lambda: torch.randn(131, 256),
    "vector": lambda: torch.randn(200),
    "a pair": lambda: torch.randn(1, 2),
    "transposed": lambda: torch.randn(140, 6).T,
    "strided": lambda: torch.randn(10, 600)[::2, 1::3],
    "expanded": lambda: torch.randn(1, 70).expand(4, 70),
    "no rows": lambda: torch.empty(0, 8),
    "no columns": lambda: torch.empty(3, 0),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def everything(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Every quantiser in every form."""
    results: list[Tensor] = []
    for granularity in ("token", "tensor"):
        for symmetric in (True, False):
            results += quantize_int8(x, granularity=granularity, symmetric=symmetric)
    for granularity in ("tensor", "token", "1x128", "128x128"):
        if granularity != "128x128" or x.dim() > 1:
            results += quantize_fp8(x, granularity=granularity)
            results += quantize_fp8(x, granularity=granularity, dtype=E5M2)
    for granularity, dtype in (("token", E4M3), ("1x128", E5M2), ("token", torch.int8)):
        results += rms_norm_quantize(x, weight, eps=1e-5, residual=residual, granularity=granularity, dtype=dtype)
        results += rms_norm_quantize(x, weight, granularity=granularity, dtype=dtype)
        results += swiglu_quantize(x, granularity=granularity, dtype=dtype)
    return tuple(results)


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.is_contiguous()
        assert not one.requires_grad
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def same_as_eager(compiled: Callable[..., Any], function: Callable[..., Any], x: Tensor) -> None:
    """For x, with a weight and a residual that fit."""
    weight = torch.randn(x.size(-1)).to(x.dtype)
    residual = torch.randn(x.shape).to(x.dtype)
    other = residual.clone()
    same(compiled(x, weight, residual), function(x, weight, other))
    assert torch.equal(residual, other)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_give_what_eager_calls_give(shape: str, dtype: torch.dtype) -> None:
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    same_as_eager(compiled, everything, SHAPES[shape]().to(dtype))


def test_sizes_that_change() -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, _: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=count)
    for m, k in ((3, 300), (7, 130), (200, 256), (130, 2)):
        same_as_eager(compiled, everything, torch.randn(m, k).bfloat16())
    assert graphs == 1


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's default compiler needs a C++ compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_default_compiler(dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as torch's operations, these codes were others at the ends of rows like these. (So there is little else
    here that Inductor would make code for.)"""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def chain(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        first = rms_norm_quantize(x, weight, residual=residual, granularity="1x128")
        return (*first, *quantize_int8(x), *quantize_fp8(residual, granularity="1x128"), *swiglu_quantize(residual))

    compiled = torch.compile(chain, fullgraph=True, dynamic=dynamic)
    for rows in (64, 9)[: 1 + dynamic]:
        same_as_eager(compiled, chain, torch.randn(rows, 300).bfloat16())


def test_one_node_for_each() -> None:
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(module.graph)
        return module.forward

    def all_four(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        first = rms_norm_quantize(x, weight)
        return (*first, *quantize_int8(x), *quantize_int8(x, symmetric=False), *quantize_fp8(x), *swiglu_quantize(x))

    torch.compile(all_four, fullgraph=True, backend=keep)(torch.randn(4, 64), torch.ones(64))
    calls = [str(node.target) for graph in graphs for node in graph.nodes if node.op.startswith("call")]
    ours = [name for name in calls if "omnigemm" in name]
    assert sorted(ours) == sorted(f"omnigemm.{name}.default" for name in OPERATORS)
    assert set(calls) - set(ours) <= {"detach", "<built-in function getitem>"}


def test_eager_calls_are_no_operators() -> None:
    """Which would cost them time; and who looks on sees what torch computes."""
    seen: list[str] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 64)
    with Look():
        everything(x, torch.ones(64), x.clone())
    assert "aten.div.Tensor" in seen
    assert not any("omnigemm" in name for name in seen)


# --- the operators themselves ------------------------------------------------------------------------------------


def operator(name: str) -> Any:
    return getattr(torch.ops.omnigemm, name).default


def operator_calls() -> dict[str, tuple[str, tuple[Any, ...]]]:
    x, odd, weight = torch.randn(5, 300), torch.randn(300, 7).bfloat16().T, torch.randn(300)
    calls: dict[str, tuple[str, tuple[Any, ...]]] = {
        f"{name} {granularity}": (name, (x, granularity))
        for name in ("quantize_int8", "quantize_int8_asymmetric")
        for granularity in ("token", "tensor")
    }
    for granularity in ("tensor", "token", "1x128", "128x128"):
        calls[f"quantize_fp8 {granularity}"] = "quantize_fp8", (odd, granularity, E4M3)
    for granularity in ("token", "1x128"):
        calls[f"swiglu {granularity}"] = "swiglu_quantize", (odd, granularity, E5M2)
        calls[f"norm {granularity}"] = "rms_norm_quantize", (x, weight, 1e-6, None, granularity, E4M3)
    residual = torch.randn(5, 300)
    calls["norm with residual"] = "rms_norm_quantize", (x, weight, 1e-6, residual, "token", torch.int8)
    return calls


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name: str) -> None:
    key, arguments = operator_calls()[name]
    torch.library.opcheck(operator(key), arguments)


def test_every_operator_of_a_quantiser_has_a_sample() -> None:
    schemas = torch._C._jit_get_all_schemas()
    registered = {schema.name.split("::")[1] for schema in schemas if schema.name.startswith("omnigemm::")}
    assert {name for name in registered if "quantize" in name} == OPERATORS
    assert {name for name, _ in operator_calls().values()} == OPERATORS


def test_operators_do_not_call_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should torch run one while it traces."""
    calls = {name: call for name, call in operator_calls().items() if "residual" not in name}
    want = [operator(key)(*arguments) for key, arguments in calls.values()]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for (key, arguments), expected in zip(calls.values(), want, strict=True):
        same(operator(key)(*arguments), expected)


# --- what stays as it was ----------------------------------------------------------------------------------------


def test_gradients_end_at_quantisers() -> None:
    x, weight = torch.randn(4, 64, requires_grad=True), torch.nn.Parameter(torch.randn(64))
    residual, other = torch.nn.Parameter(torch.zeros(4, 64)), torch.nn.Parameter(torch.zeros(4, 64))
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    same(compiled(x, weight, residual), everything(x, weight, other))
    assert torch.equal(residual, other)

    def beside(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return (*quantize_int8(y), y.square().sum())

    *results, total = torch.compile(beside, fullgraph=True, backend="aot_eager")(x)
    total.backward()
    assert torch.equal(x.grad, 8 * x)
    same(tuple(results), quantize_int8(x * 2))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: quantize_int8(x, granularity="row"), UnsupportedError, "quantize_int8: granularity is 'row'"),
        (lambda x: quantize_int8(x, symmetric=None), DTypeError, "quantize_int8: symmetric is None"),
        (lambda x: quantize_int8(x.double()), DTypeError, "quantize_int8: x has dtype torch.float64"),
        (lambda x: quantize_fp8([x]), DTypeError, "quantize_fp8: x is a list"),
        (lambda x: quantize_fp8(x, dtype=torch.int8), DTypeError, "quantize_fp8: dtype is torch.int8"),
        (lambda x: quantize_fp8(x[0], granularity="128x128"), ValueError, "expected at least 2 dimensions"),
        (lambda x: rms_norm_quantize(x, x[0, :7]), ValueError, r"rms_norm_quantize: weight has shape \(7,\)"),
        (lambda x: rms_norm_quantize(x, x[0], eps=-1.0), UnsupportedError, r"rms_norm_quantize: eps is -1\.0"),
        (lambda x: rms_norm_quantize(x, x[0], residual=x[:2]), ValueError, r"residual has shape \(2, 8\)"),
        (lambda x: rms_norm_quantize(x, torch.ones(8), residual=x), ValueError, "residual shares memory with x"),
        (lambda x: swiglu_quantize(x[:, :7]), ValueError, r"swiglu_quantize: x has shape \(4, 7\)"),
    ],
)
def test_errors(call: Callable[[Tensor], Any], error: type[Exception], words: str) -> None:
    """Found while compiling; where graphs may break, the call itself then raises."""
    x = torch.ones(4, 8)
    with pytest.raises(Exception, match=words):
        torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    with pytest.raises(error, match=words):
        torch.compile(call, backend="aot_eager")(x)


def test_a_residual_that_overlaps_itself() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return rms_norm_quantize(x, x[0], residual=torch.ones(1, 8).expand(4, 8))

    with pytest.raises(Exception, match=r"rms_norm_quantize: residual has strides \(0, 1\)"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(torch.ones(4, 8))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
            return everything(x, weight, residual)

    rows = torch.export.Dim("rows", min=129, max=512)  # more than one block: torch lays out one row in its own way
    given = torch.randn(140, 300), torch.randn(300), torch.randn(140, 300)
    shapes = ({0: rows}, None, {0: rows})
    program = torch.export.export(Module(), given, dynamic_shapes=shapes, strict=strict)
    assert not any("div" in str(node.target) for node in program.graph.nodes)
    same_as_eager(program.module(), everything, torch.randn(131, 300))
    same_as_eager(program.run_decompositions().module(), everything, torch.randn(256, 300))


def test_negated_views() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (*quantize_int8(x), *quantize_fp8(x), *swiglu_quantize(x))

    x = torch.randn(4, 64)
    same(torch.compile(step, fullgraph=True, backend="aot_eager")(torch._neg_view(x)), step(-x))


def test_transforms() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.vmap(lambda row: (*quantize_int8(row), *quantize_fp8(row, granularity="1x128")))(x)

    x = torch.randn(3, 300)
    want = (*quantize_int8(x), *quantize_fp8(x, granularity="1x128"))
    same(torch.compile(step, fullgraph=True, backend="aot_eager")(x), want)


def test_subclasses_keep_to_torchs_operations() -> None:
    """They say what those do to them; of our operators they know nothing."""
    both = TwoTensor(torch.randn(4, 64), torch.randn(4, 64))
    functions: list[Callable[[Tensor], tuple[Tensor, ...]]] = [
        quantize_int8,
        lambda x: quantize_int8(x, symmetric=False),
        quantize_fp8,
        swiglu_quantize,
        lambda x: rms_norm_quantize(x, torch.ones(64)),
    ]
    for function in functions:
        graphs: list[torch.fx.Graph] = []

        def keep(module: torch.fx.GraphModule, _: list[Any], graphs: list[torch.fx.Graph] = graphs) -> Any:
            graphs.append(module.graph)
            return module.forward

        got = torch.compile(function, fullgraph=True, backend=keep)(both)
        same(tuple(one.a for one in got), function(both.a))
        same(tuple(one.b for one in got), function(both.b))
        assert not any("omnigemm" in str(node.target) for node in graphs[0].nodes)
