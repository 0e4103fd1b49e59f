"""Every operation under torch.compile, in inference mode and under torch.library.opcheck."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import omnigemm
from op_support import NAN, floats, fp8s, indices, int4_weight, int8s, scales

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Sample(NamedTuple):
    """A call: the operation, its arguments, and its keywords."""

    op: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def samples() -> dict[str, Sample]:
    """Representative calls of all operations; groups own every row, so results are all defined."""
    a, b, a3, b3 = floats(5, 7), floats(7, 3), floats(2, 5, 7), floats(2, 7, 3)
    q, r, f, g = int8s(5, 20), int8s(6, 20), fp8s(5, 140), fp8s(6, 140)
    x = floats(5, 64, dtype=BF16)
    w, order = int4_weight(6, 64, symmetric=False), int4_weight(6, 64, act_order=True)
    experts = int4_weight(6, 64, experts=3, act_order=True)
    ends, counts = indices([2, 2, 5]), indices([4, 4, 4])
    return {
        "gemm": Sample(omnigemm.gemm, (a, b), {}),
        "gemm with c": Sample(omnigemm.gemm, (a, b, floats(3)), {"alpha": 2.0, "beta": -1.0}),
        "gemm to bf16": Sample(omnigemm.gemm, (a, b), {"out_dtype": BF16}),
        "gemm in a batch": Sample(omnigemm.gemm, (a3, b3), {}),
        "gemm with a shared weight": Sample(omnigemm.gemm, (a3, b.t().contiguous().t()), {"backend": "cpu"}),
        "int8_gemm": Sample(omnigemm.int8_gemm, (q, r, scales(5), scales(6)), {}),
        "int8_gemm with all": Sample(
            omnigemm.int8_gemm, (q, r, 0.5, scales(6)), {"a_zero": 3, "bias": floats(6), "out_dtype": torch.float16}
        ),
        "int8_gemm with sums": Sample(omnigemm.int8_gemm, (q, r, 0.5, 2.0), {"a_zero": 3, "b_sums": indices([1] * 6)}),
        "int8_gemm in a batch": Sample(omnigemm.int8_gemm, (int8s(2, 5, 20), r, scales(2, 5), scales(6)), {}),
        "fp8_gemm": Sample(omnigemm.fp8_gemm, (f, g, 0.5, scales(6)), {"bias": floats(6)}),
        "fp8_gemm in blocks": Sample(omnigemm.fp8_gemm, (f, g, scales(5, 2), scales(1, 2)), {}),
        "int4_gemm": Sample(omnigemm.int4_gemm, (x, w), {"bias": floats(6)}),
        "int4_gemm in order": Sample(omnigemm.int4_gemm, (x, order), {}),
        "grouped_gemm": Sample(omnigemm.grouped_gemm, ([a, floats(2, 4)], [b, floats(4, 9)]), {"alpha": 0.5}),
        "grouped_gemm with c": Sample(
            omnigemm.grouped_gemm,
            ([a, floats(2, 4)], [b, floats(4, 9)], [floats(5, 3), floats(2, 9)]),
            {"beta": [1.0, 2.0], "out_dtype": BF16},
        ),
        "grouped_gemm with sizes": Sample(
            omnigemm.grouped_gemm,
            ([a, floats(2, 4)], [b, floats(4, 9)]),
            {"sizes": torch.tensor([[5, 3, 6], [2, 9, 0]], dtype=torch.int32)},
        ),
        "grouped_gemm_contiguous": Sample(omnigemm.grouped_gemm_contiguous, (a, floats(3, 4, 7), ends), {}),
        "grouped_gemm_contiguous int8": Sample(
            omnigemm.grouped_gemm_contiguous,
            (q, int8s(3, 6, 20), ends),
            {"a_scale": scales(5), "b_scale": scales(3, 6)},
        ),
        "grouped_gemm_contiguous int4": Sample(omnigemm.grouped_gemm_contiguous, (x, experts, ends), {}),
        "grouped_gemm_k_contiguous": Sample(omnigemm.grouped_gemm_k_contiguous, (a, floats(5, 4), ends), {}),
        "grouped_gemm_k_contiguous with c": Sample(
            omnigemm.grouped_gemm_k_contiguous, (x, floats(5, 4, dtype=BF16), ends, floats(3, 64, 4)), {}
        ),
        "grouped_gemm_k_contiguous fp8": Sample(
            omnigemm.grouped_gemm_k_contiguous,
            (fp8s(140, 5), fp8s(140, 6), indices([128, 128, 140])),
            {"a_scale": scales(5, 2), "b_scale": scales(6, 2)},
        ),
        "grouped_gemm_masked": Sample(
            omnigemm.grouped_gemm_masked, (floats(3, 4, 7), floats(3, 6, 7), counts), {"expected_m": 4}
        ),
        "grouped_gemm_masked fp8": Sample(
            omnigemm.grouped_gemm_masked,
            (fp8s(3, 4, 140), fp8s(3, 6, 140), counts),
            {"a_scale": scales(3, 4, 2), "b_scale": scales(3, 1, 2)},
        ),
        "grouped_gemm_masked int4": Sample(
            omnigemm.grouped_gemm_masked, (floats(3, 4, 64, dtype=BF16), experts, counts), {}
        ),
    }


NAMES = tuple(samples())


def poisoned(result: Any) -> Any:
    """Outputs like the result, full of NaN."""
    return [poisoned(one) for one in result] if isinstance(result, list) else torch.full_like(result, NAN)


def assert_equal(result: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert_equal(one, other)
    else:
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name: str) -> None:
    op, arguments, keywords = samples()[name]
    eager = op(*arguments, **keywords)
    compiled = torch.compile(lambda *given: op(*given, **keywords), fullgraph=True, backend="aot_eager")
    assert_equal(compiled(*arguments), eager)
    assert_equal(compiled(*arguments), eager)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_out_equals_eager(name: str) -> None:
    op, arguments, keywords = samples()[name]
    eager = op(*arguments, **keywords)
    out = poisoned(eager)

    def write(target: Any, *given: Any) -> Any:
        op(*given, out=target, **keywords)
        # The graph goes on with what was written.
        return [one + 1 for one in target] if isinstance(target, list) else target + 1

    following = torch.compile(write, fullgraph=True, backend="aot_eager")(out, *arguments)
    assert_equal(out, eager)
    assert_equal(following, [one + 1 for one in eager] if isinstance(eager, list) else eager + 1)


@pytest.mark.parametrize("name", NAMES)
def test_inference_mode(name: str) -> None:
    """The mode that servers run in: its tensors have no version counter, and still a changed weight is seen."""
    with torch.inference_mode():
        op, arguments, keywords = samples()[name]
        result = op(*arguments, **keywords)
        assert_equal(op(*arguments, **keywords), result)
        out = poisoned(result)
        op(*arguments, out=out, **keywords)
        assert_equal(out, result)
        for weight in (one for one in arguments[1:2] if isinstance(one, Tensor)):
            changed = weight.flip(0)
            weight.copy_(changed)
            assert_equal(op(*arguments, **keywords), op(arguments[0], changed, *arguments[2:], **keywords))


def test_a_layer_of_operations_is_one_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(module)
        return module.forward

    w, weight, column = int4_weight(16, 64), int8s(8, 16), scales(8)

    def layer(x: Tensor) -> Tensor:
        hidden = torch.relu(omnigemm.int4_gemm(x, w))
        q, scale = omnigemm.quantize_int8(hidden)[:2]
        return omnigemm.int8_gemm(q, weight, scale, column) * 2

    x = floats(5, 64, dtype=BF16)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend=keep)(x), layer(x))
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("omnigemm.int4_gemm" in target for target in targets) == 1
    assert sum("omnigemm.int8_gemm" in target for target in targets) == 1
    assert sum("omnigemm.quantize_int8" in target for target in targets) == 1


@pytest.mark.parametrize("name", ["gemm", "int8_gemm", "fp8_gemm in blocks", "int4_gemm", "grouped_gemm_contiguous"])
def test_dynamic_rows_compile_once(name: str) -> None:
    op, arguments, keywords = samples()[name]
    a, *rest = arguments
    graphs = 0

    def count(module: torch.fx.GraphModule, _: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(lambda *given: op(*given, **keywords), fullgraph=True, dynamic=True, backend=count)
    for rows in (5, 17, 33, 2):
        x = a[torch.arange(rows) % a.size(0)]
        more = [indices([1, 2, rows]) if one.dtype == torch.int32 else one for one in rest if isinstance(one, Tensor)]
        others = more if len(more) == len(rest) else rest
        if name == "int8_gemm":
            others = [rest[0], scales(rows), *rest[2:]]
        if name == "fp8_gemm in blocks":
            others = [rest[0], scales(rows, 2), *rest[2:]]
        assert_equal(compiled(x, *others), op(x, *others, **keywords))
    assert graphs == 1


def test_dynamic_rows_that_are_marked() -> None:
    a, b = floats(6, 8), floats(8, 4)
    torch._dynamo.mark_dynamic(a, 0)
    compiled = torch.compile(omnigemm.gemm, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(a, b), omnigemm.gemm(a, b))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (2, 9, 31):
            x = floats(rows, 8)
            assert_equal(compiled(x, b), omnigemm.gemm(x, b))


def test_errors_are_found_while_compiling() -> None:
    compiled = torch.compile(omnigemm.gemm, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"b has shape \(6, 5\), expected \(K, N\) with K = 7"):
        compiled(floats(4, 7), floats(6, 5))


def raw(name: str) -> tuple[str, tuple[Any, ...], Any]:
    """A registered operation's name, the arguments of its schema, and the out_dtype."""
    op, arguments, keywords = samples()[name]
    backend, out_dtype = keywords.get("backend"), keywords.get("out_dtype")
    first = op.__name__
    if first == "gemm":
        a, b, *c = arguments
        return "gemm", (a, b, c[0] if c else None, keywords.get("alpha", 1.0), keywords.get("beta", 0.0)), out_dtype
    if first == "grouped_gemm":
        a, b, *c = arguments
        alpha, beta = keywords.get("alpha", 1.0), keywords.get("beta", 0.0)
        numbers = [[] if isinstance(one, Tensor) else one for one in (alpha, beta)]
        lists = [[one] * len(a) if isinstance(one, float) else one for one in numbers]
        on_device = [one if isinstance(one, Tensor) else None for one in (alpha, beta)]
        return first, (a, b, c[0] if c else None, *lists, *on_device, keywords.get("sizes")), out_dtype
    assert backend is None
    values = [torch.tensor(one) if isinstance(one, float) else one for one in arguments]
    if first == "int8_gemm":
        zero = keywords.get("a_zero")
        zero = None if zero is None else torch.tensor(zero, dtype=torch.int32)
        return first, (*values, zero, keywords.get("bias"), keywords.get("b_sums")), out_dtype
    if first == "fp8_gemm":
        return first, (*values, keywords.get("bias")), out_dtype
    if first == "grouped_gemm_k_contiguous" and len(values) == 3:
        values.append(None)  # C
    hint = (keywords.get("expected_m"),) if first == "grouped_gemm_masked" else ()
    weights = [one for one in values if isinstance(one, omnigemm.Int4Weight)]
    if weights:
        w = weights[0]
        parts = (w.qweight, w.scales, w.zeros, w.perm, w.n, w.k, w.group_size)
        last = keywords.get("bias") if first == "int4_gemm" else values[2]
        return first if first == "int4_gemm" else f"{first}_int4", (values[0], *parts, last, *hint), out_dtype
    return first, (*values, keywords.get("a_scale"), keywords.get("b_scale"), *hint), out_dtype


def test_every_registered_operation_has_a_sample() -> None:
    sampled = {raw(name)[0] for name in NAMES}
    schemas = torch._C._jit_get_all_schemas()
    registered = {schema.name.split("::")[1] for schema in schemas if schema.name.startswith("omnigemm::")}
    registered = {name for name in registered if "quantize" not in name}  # tests/quant/test_operators.py has those
    assert registered == sampled | {f"{name}_out" for name in sampled}


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    key, arguments, out_dtype = raw(name)
    # torch compares inputs before and after with arithmetic that it does not have for fp8.
    checks = CHECKS[1:] if "fp8" in name else CHECKS
    function = getattr(torch.ops.omnigemm, key).default
    torch.library.opcheck(function, (*arguments, out_dtype, None), test_utils=checks)
    eager = function(*arguments, out_dtype, None)
    out = poisoned(eager)
    writer = getattr(torch.ops.omnigemm, f"{key}_out").default
    torch.library.opcheck(writer, (*arguments, out, None), test_utils=checks)
    writer(*arguments, out, None)
    assert_equal(out, eager)


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_opcheck_of_factors_that_are_tensors(shape: tuple[int, ...]) -> None:
    """Those of a GPU reach the operator so; here the operator itself is called."""
    a, b, c = [floats(5, 7), floats(2, 4)], [floats(7, 3), floats(4, 9)], [floats(5, 3), floats(2, 9)]
    alpha, beta = torch.rand(shape) + 1, torch.rand(shape) + 1
    arguments = a, b, c, [], [], alpha, beta, None
    function, writer = torch.ops.omnigemm.grouped_gemm.default, torch.ops.omnigemm.grouped_gemm_out.default
    torch.library.opcheck(function, (*arguments, None, None), test_utils=CHECKS)
    eager = function(*arguments, None, None)
    assert_equal(eager, omnigemm.grouped_gemm(a, b, c, alpha=alpha, beta=beta))
    out = poisoned(eager)
    torch.library.opcheck(writer, (*arguments, out, None), test_utils=CHECKS)
    compiled = torch.compile(lambda *factors: function(*arguments[:5], *factors, None, None, None), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    assert_equal(compiled(alpha, beta), eager)
    assert_equal(compiled(2 * alpha, 2 * beta), function(*arguments[:5], 2 * alpha, 2 * beta, None, None, None))


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's default compiler needs a C++ compiler")
def test_default_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products only: pointwise code would keep the C++ compiler busy for a quarter of a minute."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    a, b, c = floats(5, 7), floats(7, 3), floats(3, 4)

    def layer(x: Tensor, out: Tensor) -> Tensor:
        return omnigemm.gemm(omnigemm.gemm(x, b), c, out=out)

    out = torch.full((5, 4), NAN)
    result = torch.compile(layer, fullgraph=True)(a, out)
    expected = layer(a, torch.empty(5, 4))
    assert_equal(result, expected)
    assert_equal(out, expected)


def test_factors_of_a_list_in_a_tensor_of_the_processors() -> None:
    """They are read when the product runs: other numbers need no other graph."""
    a, b, c = [floats(3, 4), floats(2, 4)], [floats(4, 5)] * 2, [floats(3, 5), floats(2, 5)]
    product = torch.compile(omnigemm.grouped_gemm, fullgraph=True, backend="aot_eager")
    for alpha, beta in ((torch.tensor([2.0, 3.0]), torch.tensor(0.5)), (torch.tensor([5.0, 7.0]), torch.tensor(0.0))):
        results = product(a, b, c, alpha=alpha, beta=beta)
        for result, expected in zip(results, omnigemm.grouped_gemm(a, b, c, alpha=alpha, beta=beta), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_of_the_processor_go_where_the_matrices_are(dtype: torch.dtype) -> None:
    """As without a graph, where their numbers are read. Matrices without memory stand for those of a GPU."""
    a, b, c = ([torch.empty(size, device="meta") for _ in range(2)] for size in ((3, 4), (4, 5), (3, 5)))
    product = torch.compile(omnigemm.grouped_gemm, fullgraph=True, backend="eager")
    alpha, beta = torch.tensor([2.0, 3.0], dtype=dtype), torch.tensor(0.5, dtype=dtype)
    assert [one.shape for one in product(a, b, c, alpha=alpha, beta=beta)] == [(3, 5), (3, 5)]
    here = [floats(*one.shape) for one in (a[0], b[0], c[0])]
    lists = [[one] * 2 for one in here]
    for result, expected in zip(
        product(*lists, alpha=alpha, beta=beta), omnigemm.grouped_gemm(*lists, alpha=alpha, beta=beta), strict=True
    ):
        assert torch.equal(result, expected)


def test_numbers_of_rows_that_are_not_known_while_tracing() -> None:
    weight = torch.randn(64, 300)
    q, q_scale = omnigemm.quantize_int8(weight)
    f, f_scale = omnigemm.quantize_fp8(weight, granularity="128x128")
    experts, scale = omnigemm.quantize_fp8(torch.randn(2, 64, 300), granularity="128x128")

    def products(x: Tensor, count: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        rows = count.item()
        torch._check(rows >= 0)
        torch._check(rows <= x.size(0))
        x = x[:rows]
        a, a_scale = omnigemm.quantize_int8(x)
        e, e_scale = omnigemm.quantize_fp8(x, granularity="1x128")
        return (
            omnigemm.int8_gemm(a, q, a_scale, q_scale),
            omnigemm.fp8_gemm(e, f, e_scale, f_scale),
            omnigemm.grouped_gemm_contiguous(e, experts, ends, a_scale=e_scale, b_scale=scale),
        )

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        traced = torch.compile(products, fullgraph=True, backend="aot_eager")
        for count in (3, 1, 4):
            given = torch.randn(5, 300), torch.tensor(count), indices([1, count])
            for result, expected in zip(traced(*given), products(*given), strict=True):
                assert torch.equal(result, expected)


def test_factors_of_whole_numbers() -> None:
    """As in eager mode, where they are taken as numbers."""
    a, b = [floats(3, 4), floats(2, 4)], [floats(4, 5), floats(4, 5)]

    def scaled(alpha: Tensor) -> list[Tensor]:
        return omnigemm.grouped_gemm(a, b, alpha=alpha)

    alpha = torch.tensor([1, 2])
    assert_equal(torch.compile(scaled, fullgraph=True, backend="aot_eager")(alpha), scaled(alpha))
