"""Whole products without a GPU: the GPU's own tests, a few of each config, on the emulator. Kernels are compiled from
the source that a GPU gets, and launched by what launches them there. `pytest tests/gpu --emulated` runs the others."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from emulated import Hopper, emulated, whole
from gpu import (
    fp8_cases,
    test_batches,
    test_fp8_configs,
    test_gemm16,
    test_grouped_configs,
    test_grouped_k,
    test_grouped_lists,
    test_int8,
    test_list_sizes,
)
from gpu.group_cases import Case
from omnigemm.backends.cuda import dense, sm90
from omnigemm.core.problem import Problem

WORK = 20_000_000  # products in a case, at most
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def hopper(folder: Path, request: pytest.FixtureRequest) -> Iterator[Hopper]:
    with emulated(folder) as made:
        made.seed = zlib.crc32(request.node.name.encode())
        yield made


def work(made: Any) -> int:
    if isinstance(made, Case):
        return (len(made.sizes) if made.masked else 1) * made.capacity * made.n * made.k
    return int(made.batch * made.m * made.n * made.k)


def some(cases: Mapping[str, tuple[sm90.Config, Any]], each: int) -> list[str]:
    """So many of each config, of all kinds and sizes in turn."""
    found: list[str] = []
    by_config: dict[sm90.Config, list[str]] = {}
    for title, (config, made) in cases.items():
        if work(made) <= WORK:
            by_config.setdefault(config, []).append(title)
    for turn, titles in enumerate(by_config.values()):
        found += [titles[(turn + i) * 7 % len(titles)] for i in range(each)]
    return list(dict.fromkeys(found))


def cases() -> Iterator[Any]:
    lists = itertools.product(test_grouped_lists.CONFIGS, test_grouped_lists.KINDS)
    sampled: list[tuple[str, Callable[..., None], list[Any]]] = [
        ("fp8", test_fp8_configs.test_against_float64, some(test_fp8_configs.CASES, 2)),
        ("int8", test_int8.test_configs_against_float64, some(test_int8.CASES, 1)),
        ("16 bits", test_gemm16.test_configs_against_float64, some(test_gemm16.CASES, 1)),
        ("batch", test_batches.test_sixteen_bits_against_float64, some(test_batches.CASES_16, 1)[::3]),
        ("int8 batch", test_batches.test_int8_is_exact, some(test_batches.CASES_INT8, 1)[::3]),
        ("groups", test_grouped_configs.test_against_float64, some(test_grouped_configs.CASES, 1)),
        ("list", test_grouped_lists.test_configs_against_float64, [*lists][::7]),
        ("sizes on the device", test_list_sizes.test_configs_against_float64, [*lists][3::21]),
        ("groups along K", test_grouped_k.test_configs_against_float64, test_grouped_k.CONFIGS[::9]),
    ]
    for name, function, arguments in sampled:
        for i, one in enumerate(arguments):
            given = (one,) if isinstance(one, str) else one
            yield pytest.param(function, given, id=f"{name}-{one if isinstance(one, str) else i}")


@pytest.mark.parametrize(("test", "arguments"), [*cases()])
def test_the_gpus_own(hopper: Hopper, test: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    for seed in (0, hopper.seed):
        hopper.seed = seed
        test(*arguments)
    assert hopper.launches


def drawn(seed: int) -> tuple[sm90.Config, Problem]:
    """A config that `fault` allows, whether or not anything proposes it, and a product that it allows it for."""
    source = random.Random(seed)
    one_of = source.choice
    sizes = [1, 8, 9, 63, 64, 65, 127, 129, 200, 300]
    while True:
        share, left, swap = one_of([1, 1, 2, 4]), one_of([False, True]), one_of([False, True])
        config = sm90.Config(
            swap,
            math_groups=one_of([1, 2]),
            waves=1 if swap else one_of([1, 2]),
            cols=8 * source.randint(1, 32),
            stages=source.randint(2, 9),
            left_share=share if left else 1,
            right_share=1 if left else share,
            split=one_of([1, 1, 2, 3, 5, 8]),
            depth=one_of([1, 2, 4]),
            band=one_of([1, 3, 8]),
            out_buffers=one_of([1, 2, 3]),
            out_parts=one_of([1, 2, 4]),
            blocks_per_sm=one_of([1, 1, 2, 3, 4]),
            pingpong=one_of([False, False, True]),
        )
        m, n, k, out = one_of(sizes), one_of(sizes), 16 * source.randint(1, 60), one_of(["bf16", "fp16", "fp32"])
        made = one_of(
            [
                fp8_cases.problem(m, n, k, one_of([*fp8_cases.SCALES]), out, bias=one_of([False, True])),
                test_int8.problem(m, n, k, out, one_of([False, True])),
                test_gemm16.problem(m, n, k, one_of(test_gemm16.LAYOUTS), out="fp32", c=one_of([False, True])),
            ]
        )
        if dense.variant_of(made).fault(config) is None:
            return config, made


@pytest.mark.parametrize("seed", range(16))
def test_any_config_that_is_allowed(hopper: Hopper, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    config, made = drawn(seed)
    module = {"int8_gemm": test_int8, "gemm": test_gemm16}.get(made.op)
    for hopper.seed in (0, seed + 1):
        if module is None:
            fp8_cases.run(config, made)
        else:
            monkeypatch.setitem(module.CASES, "drawn", (config, made))
            module.test_configs_against_float64("drawn")


LATE = fp8_cases.problem(70, 200, 500)


@pytest.mark.parametrize("early", [0, 1, 99])
@pytest.mark.parametrize("name", [name for name, one in fp8_cases.CONFIGS.items() if fp8_cases.fits(one, LATE)])
def test_nothing_is_read_before_it_is_there(hopper: Hopper, name: str, early: int) -> None:
    """Operands come late by themselves, scales because we say so; weights may be read early if that was stated."""
    a, b, a_scale, b_scale, _ = fp8_cases.operands(LATE)
    out = torch.full((70, 200), float("nan"), dtype=torch.bfloat16)
    hopper.written = [a_scale, b_scale]
    for seed in (0, hopper.seed, hopper.seed + 1):
        hopper.seed = seed
        out.fill_(float("nan"))
        dense.Launch(LATE, fp8_cases.CONFIGS[name], 0, 8, early)(out, a, b, a_scale, b_scale, None)
        fp8_cases.close(out, (a, b, a_scale, b_scale, None))


# --------------------------------------------------------------------------------------------- as users call them


@pytest.fixture
def as_called(folder: Path) -> Iterator[Hopper]:
    """Without what sees torch's functions: calls are remembered, and launched by addresses the next time."""
    with emulated(folder, cuda_tensors=False) as made:
        yield made


def twice(hopper: Hopper, call: Callable[..., Tensor], want: Tensor, *operands: Any, **words: Any) -> None:
    """A new result, and one that is given, the first time and when the call is known."""
    out = torch.full_like(call(*operands, **words), float("nan"))
    before = len(hopper.launches)
    for hopper.seed in range(3):
        out.fill_(float("nan"))
        assert call(*operands, out=out, **words) is out
        assert torch.equal(out.double(), want.to(out.dtype).double())
        assert torch.equal(call(*operands, **words), out)
    assert len(hopper.launches) >= before + 6


@pytest.mark.parametrize("m", [1, 7, 33, 64, 130, 260])
def test_calls_of_dense_products(as_called: Hopper, m: int) -> None:
    n, k = 200, 384
    a, b = whole(m, k), whole(n, k)
    product = a.double() @ b.double().t()
    a8, b8, two = a.to(FP8), b.to(FP8), torch.full((), 2.0)
    a_scale, b_scale = torch.full((m, 3), 0.5), torch.full((2, 3), 4.0)
    twice(as_called, omnigemm.fp8_gemm, 2 * product, a8, b8, a_scale, b_scale, out_dtype=torch.float32)
    twice(as_called, omnigemm.fp8_gemm, 2 * product, a8, b8, two, torch.ones(n), out_dtype=torch.float32)
    zero, rows = torch.full((m,), 3, dtype=torch.int32), torch.full((m,), 0.5)
    words: dict[str, Any] = {"a_zero": zero, "bias": torch.ones(n), "out_dtype": torch.float32}
    exact = 0.5 * (product - 3 * b.double().sum(1)) + 1
    eights = a.to(torch.int8), b.to(torch.int8), rows, torch.ones(n)
    for sums in (None, b.sum(1).int()):
        twice(as_called, omnigemm.int8_gemm, exact, *eights, b_sums=sums, **words)
    c = whole(m, n)
    words = {"alpha": 2.0, "beta": -1.0, "out_dtype": torch.float32}
    twice(as_called, omnigemm.gemm, 2 * product - c, a.half(), b.half().t(), c, **words)


@pytest.mark.parametrize("sizes", [(1, 0, 2), (70, 0, 3, 129), (300,)], ids=str)
def test_calls_of_groups(as_called: Hopper, sizes: tuple[int, ...]) -> None:
    n, k, total = 136, 256, sum(sizes)
    a, b = whole(total, k), whole(len(sizes), n, k)
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    parts = [x @ weight.t() for x, weight in zip(a.split(sizes), b, strict=True)]
    given = a.bfloat16(), b.bfloat16(), ends
    words: dict[str, Any] = {"out_dtype": torch.float32}
    twice(as_called, omnigemm.grouped_gemm_contiguous, torch.cat(parts), *given, **words)
    words.update(a_scale=torch.full((total, 2), 0.5), b_scale=torch.full((len(sizes), 2, 2), 2.0))
    twice(as_called, omnigemm.grouped_gemm_contiguous, torch.cat(parts), a.to(FP8), b.to(FP8), ends, **words)


def test_calls_of_lists_and_gradients(as_called: Hopper) -> None:
    shapes = [(70, 136, 200), (1, 8, 64), (0, 5, 3), (130, 64, 72)]
    a = [whole(m, k).bfloat16() for m, _, k in shapes]
    b = [whole(k, n).bfloat16() for _, n, k in shapes]
    wanted = [x.float() @ y.float() for x, y in zip(a, b, strict=True)]
    out = [torch.full(one.shape, float("nan")) for one in wanted]
    left, right, ends = whole(300, 72), whole(300, 136), torch.tensor([0, 100, 164, 300], dtype=torch.int32)
    spans = itertools.pairwise([0, *ends.tolist()])
    gradients = torch.stack([left[first:last].t() @ right[first:last] for first, last in spans])
    for as_called.seed in range(3):
        for one in out:
            one.fill_(float("nan"))
        omnigemm.grouped_gemm(a, b, out=out)
        assert all(torch.equal(one, want) for one, want in zip(out, wanted, strict=True))
        total = torch.ones_like(gradients)
        omnigemm.grouped_gemm_k_contiguous(left.half(), right.half(), ends, total, out=total)
        assert torch.equal(total, gradients + 1)
    assert len(as_called.launches) == 12
