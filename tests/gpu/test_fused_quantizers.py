"""RMSNorm and SwiGLU with quantisation on a GPU: exact where the arithmetic is, else between the codes of what the
exact value may have become by rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm import rms_norm_quantize, swiglu_quantize
from omnigemm.backends.cuda import quant
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec

from .quant_cases import CODES, FLOATS, FUSED, framed, fused_specs, same, untouched

NORM_TOLERANCE = 2**-19  # of the normalised value: a sum of squares in fp32, for up to 16384 values
SILU_TOLERANCE = 2**-16  # the fast exponential, for gates down to -87
LENGTHS = (8, 136, 261, 264, 1032, 7168, 16384, 16392)


def specs(which: Gpu) -> set[KernelSpec]:
    return set(fused_specs(which, LENGTHS))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("codec", "granularity"), FUSED)
@pytest.mark.parametrize("k", LENGTHS)
def test_exact_norms(k: int, codec: str, granularity: str, dtype: str) -> None:
    """Rows of 1 and -1, times a power of 2: the mean of the squares is exact in whatever order they are added."""
    options = {"granularity": granularity, "dtype": CODES[codec]}
    signs = torch.randint(0, 2, (9, k)) * 2.0 - 1.0
    total = (signs * 2.0 ** torch.randint(-3, 4, (9, 1))).to(FLOATS[dtype])
    weight = torch.randn(k).to(FLOATS[dtype])
    bad = total.clone()
    bad[4, k // 2], bad[6, 0] = torch.nan, -torch.inf
    for x in (total, bad):
        want = rms_norm_quantize(x, weight, eps=0.0, **options)  # type: ignore[arg-type]
        same(rms_norm_quantize(x.cuda(), weight.cuda(), eps=0.0, **options), want)  # type: ignore[arg-type]
    residual = (torch.randint(-4, 5, (9, k)) * 2).to(FLOATS[dtype])
    x = total - residual
    want = rms_norm_quantize(total, weight, eps=0.0, **options)  # type: ignore[arg-type]
    tensor, room = framed((9, k), FLOATS[dtype])
    wide = torch.full((9, k + 16), 7.0, dtype=FLOATS[dtype], device="cuda")
    for there in (tensor, wide[:, 8 : k + 8], wide[:, 3 : k + 3]):
        there.copy_(residual)
        same(rms_norm_quantize(x.cuda(), weight.cuda(), eps=0.0, residual=there, **options), want)  # type: ignore[arg-type]
        assert torch.equal(there.cpu(), total)
    assert untouched(room)
    assert bool((wide[:, k + 8 :] == 7.0).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("codec", "granularity"), FUSED)
@pytest.mark.parametrize("f", LENGTHS)
def test_exact_gates(f: int, codec: str, granularity: str, dtype: str) -> None:
    """Gates so large or so small that silu is the gate itself or 0."""
    gate = (torch.rand(9, f) * 100 + 30) * torch.where(torch.rand(9, f) < 0.2, -8.0, 1.0)
    x = torch.cat([gate, torch.randn(9, f)], 1).to(FLOATS[dtype])
    x[4, f + 5], x[5, 3], x[6, 1] = torch.inf, torch.nan, -torch.inf
    want = swiglu_quantize(x, granularity=granularity, dtype=CODES[codec])
    same(swiglu_quantize(x.cuda(), granularity=granularity, dtype=CODES[codec]), want)


def within(got: tuple[Tensor, Tensor], exact: Tensor, granularity: str, tolerance: float) -> None:
    """Each scale is that of the exact values, up to the tolerance; each code lies between those of the exact value a
    little smaller and a little larger, with the scale that was found."""
    q, scale = got
    largest = 127.0 if q.dtype == torch.int8 else torch.finfo(q.dtype).max
    k = exact.size(-1)
    width = k if granularity == "token" else 128
    blocks = -(-k // width)
    padded = torch.nn.functional.pad(exact, (0, blocks * width - k))
    amax = padded.abs().unflatten(-1, (blocks, width)).amax(-1)
    wide = scale.double().reshape(amax.shape)
    assert bool(((wide * largest - amax).abs() <= amax * (tolerance + 2**-22)).all())
    steps = exact / wide.repeat_interleave(width, -1)[..., :k]
    bounds = []
    for factor in (1 - tolerance, 1 + tolerance):
        near = (steps * factor).clamp(-largest, largest).float()
        bounds.append(near.round() if q.dtype == torch.int8 else near.to(q.dtype).float())
    low, high = torch.minimum(*bounds), torch.maximum(*bounds)
    assert bool(((q.float() >= low) & (q.float() <= high)).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("codec", "granularity"), FUSED)
@pytest.mark.parametrize(("m", "k"), [(64, 7168), (9, 261), (2000, 5120), (3, 16384)])
def test_norms_of_random_rows(m: int, k: int, codec: str, granularity: str, dtype: str) -> None:
    x = (torch.randn(m, k, device="cuda") * torch.logspace(-3, 3, m, device="cuda")[:, None]).to(FLOATS[dtype])
    residual, weight = torch.randn_like(x), torch.randn(k, device="cuda").to(FLOATS[dtype])
    total = x + residual
    got = rms_norm_quantize(x, weight, residual=residual, granularity=granularity, dtype=CODES[codec])
    assert torch.equal(residual, total)
    wide = total.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    within(got, exact, granularity, NORM_TOLERANCE)
    same(rms_norm_quantize(total, weight, granularity=granularity, dtype=CODES[codec]), got)  # and every time
    with omnigemm.settings(constant_weights=True):
        same(rms_norm_quantize(total, weight, granularity=granularity, dtype=CODES[codec]), got)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("codec", "granularity"), FUSED)
@pytest.mark.parametrize(("m", "f"), [(64, 2048), (9, 261), (2000, 5120), (3, 16384)])
def test_gates_of_random_rows(m: int, f: int, codec: str, granularity: str, dtype: str) -> None:
    x = torch.randn(m, 2 * f, device="cuda")
    x[:, :f] *= torch.logspace(-2, 1.2, m, device="cuda")[:, None]
    x = x.clamp(-80, 80).to(FLOATS[dtype])
    gate, up = x.double().chunk(2, -1)
    got = swiglu_quantize(x, granularity=granularity, dtype=CODES[codec])
    within(got, torch.nn.functional.silu(gate) * up, granularity, SILU_TOLERANCE)


def test_graph() -> None:
    x, residual = (torch.randn(64, 7168, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(7168, device="cuda").bfloat16()

    def step() -> tuple[Tensor, ...]:
        return (
            *rms_norm_quantize(x, weight, residual=residual, granularity="1x128"),
            *swiglu_quantize(x, dtype=torch.int8),
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    new, before = torch.randn(64, 7168, device="cuda").bfloat16(), residual.clone()
    x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(residual, new + before)
    residual.copy_(before)
    same(results, step())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """With the same kernels as without a graph, and so with the same order of addition."""
    x, residual = (torch.randn(64, 1000, device="cuda").bfloat16() for _ in range(2))
    weight, other = torch.randn(1000, device="cuda").bfloat16(), residual.clone()

    def step(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        first = rms_norm_quantize(x, weight, residual=residual, granularity="1x128")
        return (*first, *swiglu_quantize(residual, dtype=torch.int8))

    torch.compiler.reset()
    quant._calls.clear()
    got = torch.compile(step, fullgraph=True, backend=backend)(x, weight, residual)
    assert len(quant._calls) == 2
    same(got, step(x, weight, other))
    assert torch.equal(residual, other)


def test_what_is_refused_and_why() -> None:
    x, weight = torch.ones(4, 64, device="cuda"), torch.ones(64)
    with pytest.raises(omnigemm.DeviceError, match="weight is on cpu, expected cuda:0"):
        rms_norm_quantize(x, weight)
    weight = weight.cuda()
    for _ in range(2):  # also when such a call was made before
        with pytest.raises(omnigemm.LayoutError, match="residual shares memory with x"):
            rms_norm_quantize(x, weight, residual=x)
        with pytest.raises(omnigemm.UnsupportedError, match=r"eps is -1\.0"):
            rms_norm_quantize(x, weight, eps=-1.0, residual=torch.zeros_like(x))
        rms_norm_quantize(x, weight, residual=torch.zeros_like(x))


def test_the_residual_knows_that_it_changed() -> None:
    x, weight, residual = torch.ones(4, 64).cuda(), torch.ones(64).cuda(), torch.zeros(4, 64).cuda()
    for turn in range(1, 4):
        before = residual._version
        rms_norm_quantize(x, weight, residual=residual)
        assert residual._version > before
        assert torch.equal(residual, x * turn)
