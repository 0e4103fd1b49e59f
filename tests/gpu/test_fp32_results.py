"""fp32 results by the copy engine: what lies around them stays, what it adds in place is added once, and what it cannot
write is written all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import dense, sm90
from omnigemm.backends.cuda.gemm import Gemm
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec

from . import test_int8
from .fp8_cases import close as fp8_close
from .fp8_cases import operands as fp8_operands
from .fp8_cases import problem as fp8_problem
from .test_gemm16 import matrix, problem

NAN = float("nan")
CONFIGS = {
    "64x64": sm90.Config(False, 1, 1, 64, 4),
    "64x96": sm90.Config(False, 1, 1, 96, 4, blocks_per_sm=2),
    "128x128": sm90.Config(False, 2, 1, 128, 4),
    "128x192": sm90.Config(False, 2, 1, 192, 4, right_share=2),
    "128x256": sm90.Config(False, 2, 1, 256, 4, right_share=2, out_buffers=2, out_parts=4),
    "256x128": sm90.Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2),
    "64x48, element by element": sm90.Config(False, 1, 1, 48, 4),
}
SIZES = [(1, 4), (64, 32), (130, 300), (257, 260), (300, 516), (77, 258), (65, 131)]
K = 136


def specs(_: Gpu) -> set[KernelSpec]:
    made = [problem(m, n, K, out="fp32", c=c) for m, n in SIZES for c in (False, True)]
    return {dense.spec(config, dense.variant_of(one)) for config in CONFIGS.values() for one in made}


def framed(m: int, n: int, pitch: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A result within a frame of NaN that begins `shift` elements behind a multiple of 16 bytes, and the frame."""
    frame = torch.full((m + 2, pitch), NAN, device="cuda")
    start = -(-pitch // 4) * 4 + shift
    return frame.view(-1)[start : start + (m - 1) * pitch + n].as_strided((m, n), (pitch, 1)), frame


def exact(*shape: int) -> Tensor:
    """Whole numbers: sums are the same in any order."""
    return torch.randint(-4, 5, shape, device="cuda").bfloat16()


def check(out: Tensor, frame: Tensor, want: Tensor) -> None:
    assert torch.equal(out, want.to(out.dtype))
    out.fill_(NAN)
    assert bool(frame.isnan().all()), "written outside of the result"


def runner(config: sm90.Config, m: int, n: int, k: int, c: bool) -> Gemm:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return Gemm(problem(m, n, k, out="fp32", c=c), config, 0, count)


@pytest.mark.parametrize("pitch", [520, 524, 521, 522])
@pytest.mark.parametrize("name", CONFIGS)
def test_gemm_within_a_frame(name: str, pitch: int) -> None:
    for m, n in SIZES:
        a, b = exact(m, K), exact(n, K).t()
        product = a.double() @ b.double()
        out, frame = framed(m, n, pitch)
        runner(CONFIGS[name], m, n, K, False)(out, a, b, None, 1.0, 0.0)
        check(out, frame, product)
        run = runner(CONFIGS[name], m, n, K, True)
        for alpha, beta in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, -1.0)):
            for apart in (False, True):
                out, frame = framed(m, n, pitch)
                before = exact(m, n).float()
                out.copy_(before)
                run(out, a, b, before if apart else out, alpha, beta)
                check(out, frame, alpha * product + beta * before.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_gemm_as_users_call_it(dtype: torch.dtype, shift: int) -> None:
    """Addresses that are no multiples of 16 bytes, too; and NaN in a C that has no part in it."""
    for m, n, k in ((300, 516, 264), (1000, 1024, 72), (300, 515, 264)):
        a, b = exact(m, k).to(dtype), exact(k, n).to(dtype)
        product = a.double() @ b.double()
        out, frame = framed(m, n, n + 4, shift)
        omnigemm.gemm(a, b, torch.full_like(out, NAN), beta=0.0, out=out, backend="cuda")
        check(out, frame, product)
        out, frame = framed(m, n, n + 4, shift)
        out.copy_(product)
        omnigemm.gemm(a, b, out, beta=1.0, out=out, backend="cuda")
        check(out, frame, 2 * product)


def test_gemm_adds_up_many_times_like_float64() -> None:
    m, n, k, times = 384, 640, 200, 40
    a, b = matrix(m, k, torch.bfloat16), matrix(k, n, torch.bfloat16)
    out = torch.zeros(m, n, device="cuda")
    for _ in range(times):
        omnigemm.gemm(a, b, out, beta=1.0, out=out, backend="cuda")
    want = times * (a.double() @ b.double())
    sizes = times * (a.double().abs() @ b.double().abs())
    assert bool(((out.double() - want).abs() <= 1e-6 * sizes).all())
    again = torch.zeros(m, n, device="cuda")
    for _ in range(times):
        omnigemm.gemm(a, b, again, beta=1.0, out=again, backend="cuda")
    assert torch.equal(again, out)


def test_nan_infinity_and_tiny_numbers() -> None:
    """As C + A B in fp32, but that what is smaller than the least normal number may count as zero."""
    m, n, inf = 128, 256, float("inf")
    run = runner(CONFIGS["128x256"], m, n, 8, True)
    a, b = torch.zeros(m, 8, device="cuda").bfloat16(), torch.zeros(n, 8, device="cuda").bfloat16().t()
    a[:, 0], b[0] = 1.0, 1.0
    b[0, :6] = torch.tensor([inf, inf, 1.0, NAN, 0.0, -1.0])
    before = torch.zeros(m, n, device="cuda")
    before[:, :8] = torch.tensor([1.0, -inf, inf, 1.0, NAN, 1.0, -1.0, 1e30])
    out = before.clone()
    run(out, a, b, out, 1.0, 1.0)
    torch.testing.assert_close(out, before + b[0].float(), rtol=0, atol=0, equal_nan=True)
    tiny = torch.full((m, n), 1e-40, device="cuda")
    run(tiny, a * 0, torch.zeros_like(b), tiny, 1.0, 1.0)
    assert bool((tiny >= 0).all())
    assert bool((tiny <= 1.001e-40).all())


@pytest.mark.parametrize("kind", ["block", "token"])
@pytest.mark.parametrize(("n", "pitch", "shift"), [(264, 272, 0), (260, 261, 0), (258, 272, 0), (264, 272, 1)])
def test_fp8(kind: str, n: int, pitch: int, shift: int) -> None:
    for m in (64, 300, 1025):
        given = fp8_operands(fp8_problem(m, n, 384, kind))
        a, b, a_scale, b_scale, _ = given
        out, frame = framed(m, n, pitch, shift)
        omnigemm.fp8_gemm(a, b, a_scale, b_scale, out=out, backend="cuda")
        fp8_close(out, given)
        out.fill_(NAN)
        assert bool(frame.isnan().all())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "pitch"), [(264, 272), (260, 261), (259, 272)])
def test_int8_is_right_to_one_rounding(n: int, pitch: int, biased: bool) -> None:
    for m in (64, 300, 1025):
        a, b = test_int8.random(m, 1040), test_int8.random(n, 1040)
        a_scale, b_scale = test_int8.scales(m), test_int8.scales(n)
        bias = torch.randn(n, device="cuda") if biased else None
        out, frame = framed(m, n, pitch)
        omnigemm.int8_gemm(a, b, a_scale, b_scale, bias=bias, out=out, backend="cuda")
        test_int8.close(out, test_int8.exact(a, b, a_scale, b_scale, bias))
        out.fill_(NAN)
        assert bool(frame.isnan().all())


# Groups without rows, with one, and on both sides of a block of K.
COUNTS = [0, 1, 63, 64, 65, 0, 129, 500]


def groups(m: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B, ends, and the exact results."""
    total = sum(COUNTS)
    a, b = exact(total, -(-m // 8) * 8)[:, :m], exact(total, -(-n // 8) * 8)[:, :n]
    ends = torch.tensor(COUNTS, device="cuda").cumsum(0)
    first = (ends - torch.tensor(COUNTS, device="cuda")).tolist()
    spans = zip(first, ends.tolist(), strict=True)
    products = torch.stack([a[i:j].double().t() @ b[i:j].double() for i, j in spans])
    return a, b, ends.int(), products


@pytest.mark.parametrize(("n", "extra", "shift"), [(264, 8, 0), (260, 1, 0), (258, 6, 0), (131, 5, 0), (264, 8, 1)])
def test_groups_along_k(n: int, extra: int, shift: int) -> None:
    m = 136
    a, b, ends, products = groups(m, n)
    frame = torch.full((len(COUNTS) + 2, m + 1, n + extra), NAN, device="cuda")
    out = frame[1:-1, :m, shift : shift + n]
    omnigemm.grouped_gemm_k_contiguous(a, b, ends, out=out, backend="cuda")
    check(out, frame, products)
    before = exact(*out.shape).float()
    for c in (out, before, before.transpose(1, 2).contiguous().transpose(1, 2)):
        out.copy_(before)
        omnigemm.grouped_gemm_k_contiguous(a, b, ends, c, out=out, backend="cuda")
        check(out, frame, products + before.double())


def test_gradients_of_many_steps_in_a_graph() -> None:
    """What is captured adds to what is there when it runs, once each time."""
    m, n, times = 264, 520, 25
    a, b, ends, products = groups(m, n)
    out = torch.zeros(products.shape, device="cuda")
    omnigemm.grouped_gemm_k_contiguous(a, b, ends, out, out=out, backend="cuda")  # compiles
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        omnigemm.grouped_gemm_k_contiguous(a, b, ends, out, out=out, backend="cuda")
    for _ in range(times):
        graph.replay()
    assert torch.equal(out, (times * products).float())


def test_lists_with_factors_of_their_own() -> None:
    shapes = [(130, 264, 72), (77, 258, 64), (300, 131, 200), (64, 512, 0), (1, 4, 8)]
    alphas, betas = [1.0, 2.0, 1.0, 1.0, -1.0], [1.0, 1.0, 0.5, 1.0, 0.0]
    a = [exact(m, -(-k // 8) * 8)[:, :k] for m, _, k in shapes]
    b = [exact(n, -(-k // 8) * 8)[:, :k].t() for _, n, k in shapes]
    framed_all = [framed(m, n, -(-n // 4) * 4 + 4) for m, n, _ in shapes]
    out, before = [one for one, _ in framed_all], [exact(m, n).float() for m, n, _ in shapes]
    for one, was in zip(out, before, strict=True):
        one.copy_(was)
    out[-1].fill_(NAN)  # with a beta of 0 it is not looked at
    omnigemm.grouped_gemm(a, b, out, alpha=alphas, beta=betas, out=out, backend="cuda")
    for i, (one, frame) in enumerate(framed_all):
        product = alphas[i] * (a[i].double() @ b[i].double())
        check(one, frame, product + (betas[i] * before[i].double() if betas[i] else 0.0))


def test_groups_of_rows() -> None:
    counts = torch.tensor([0, 1, 70, 300, 64, 129], device="cuda")
    ends, total, n, k = counts.cumsum(0).int(), 570, 260, 128
    a, b = exact(total, k), exact(len(counts), n, k)
    for pitch in (264, 261):
        out, frame = framed(total, n, pitch)
        omnigemm.grouped_gemm_contiguous(a, b, ends, out=out, backend="cuda")
        used = int(ends[-1])
        which = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), counts)
        want = torch.einsum("tk,tnk->tn", a[:used].double(), b[which].double())
        assert bool(out[used:].isnan().all()), "rows of no group"
        check(out[:used], frame, want)


def test_the_configs_are_legal_and_most_go_out_by_the_copy_engine() -> None:
    made: dict[str, Any] = {name: dense.variant_of(problem(300, 516, 72, out="fp32", c=True)) for name in CONFIGS}
    assert not any(made[name].fault(config) for name, config in CONFIGS.items())
    assert [name for name, config in CONFIGS.items() if not made[name].stores_by_tma(config)] == [
        "64x48, element by element"
    ]
