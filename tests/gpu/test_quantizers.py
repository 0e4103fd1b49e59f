"""Quantisers on a GPU: bit for bit what the CPU computes, whatever the values and strides; graphs, streams, errors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import gpu, quant, quant_source
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.backends.cuda.jit.loader import load
from omnigemm.backends.cuda.quant_source import Variant

from .quant_cases import (
    CODES,
    E4M3,
    E5M2,
    FLOATS,
    FORM_SHAPES,
    FORMS,
    LENGTHS,
    MANY_TILES,
    all_specs,
    by,
    framed,
    raw,
    same,
    untouched,
    values,
)


def specs(which: gpu.Gpu) -> set[KernelSpec]:
    return set(all_specs(which))


def test_kernels_run_at_all() -> None:
    """Where they do not, torch computes the same, and all else here would pass."""
    assert quant.usable(torch.ones(2, 3, device="cuda"))
    major, minor = gpu.of(0).capability
    assert quant.architecture(0) == f"sm_{major}{minor}"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("codec", "granularity"), FORMS)
def test_every_form(codec: str, granularity: str, dtype: str) -> None:
    for shape in FORM_SHAPES:
        x = values(*shape, dtype=FLOATS[dtype])
        same(by(codec, x.cuda(), granularity), by(codec, x, granularity))
        if granularity == "tensor":  # without what makes the scale NaN
            same(by(codec, x[8:].cuda(), granularity), by(codec, x[8:], granularity))


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_tiles(dtype: str) -> None:
    assert quant_source.tiles(*MANY_TILES, 1).threads < quant_source.tiles(*FORM_SHAPES[0], 1).threads
    x = values(*MANY_TILES, dtype=FLOATS[dtype])
    same(by("e4m3", x.cuda(), "128x128"), by("e4m3", x, "128x128"))


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("m", [9, 1100])
def test_lengths(m: int, k: int) -> None:
    x = values(m, k)
    for granularity in ("token", "1x128"):
        same(by("e4m3", x.cuda(), granularity), by("e4m3", x, granularity))


@pytest.mark.parametrize("codec", ["int8", "e4m3", "e5m2"])
def test_every_16_bit_number(codec: str) -> None:
    """With a scale of 1, so that codes show the rounding of the values themselves."""
    largest = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}[codec]
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)
        x = torch.where(x.abs() <= largest, x, largest)
        got = by(codec, x.cuda().view(8, 8192), "tensor")
        assert float(got[1]) == 1.0
        same(got, by(codec, x.view(8, 8192), "tensor"))


@pytest.mark.parametrize(("codec", "granularity"), [("e4m3", "1x128"), ("e5m2", "1x128"), ("int8", "token")])
def test_any_fp32_numbers(codec: str, granularity: str) -> None:
    """Millions of them: random bits, and numbers near those where a code changes, with scales of all sizes."""
    bits = torch.randint(-(2**31), 2**31, (4096, 512), dtype=torch.int64).to(torch.int32).view(torch.float32)
    same(by(codec, bits.cuda(), granularity), by(codec, bits, granularity))
    finite = torch.where(bits.isfinite(), bits, 0.0)
    same(by(codec, finite.cuda(), granularity), by(codec, finite, granularity))
    codes = torch.randint(0, 256, (4096, 512), dtype=torch.uint8)
    numbers = codes.view(CODES[codec]).float().nan_to_num(0.0)
    between = (numbers * 2.0 ** torch.randint(-140, 100, (4096, 1))).nan_to_num(0.0)
    between = between * (1 + torch.randint(-2, 3, between.shape) * 2.0**-5)
    same(by(codec, between.cuda(), granularity), by(codec, between, granularity))


@pytest.mark.parametrize(("codec", "granularity"), FORMS)
def test_strides(codec: str, granularity: str) -> None:
    x = values(140, 320)[8:]
    there = x.cuda()
    one_off = torch.zeros(132 * 320 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(132, 320).copy_(there)
    same(by(codec, one_off, granularity), by(codec, x, granularity))
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[:, 8:264],
        lambda x: x[:, 3:260],
        lambda x: x[::2],
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(6, 320),
        lambda x: x.view(4, 33, 320),
        lambda x: x.view(4, 33, 320)[1:, :32],
        lambda x: x.view(4, 33, 320).transpose(0, 1),
        lambda x: x[3:4],
    ]
    for view in views:
        before = view(there).clone()
        same(by(codec, view(there), granularity), by(codec, view(x), granularity))
        assert torch.equal(view(there), before)


@pytest.mark.parametrize(("codec", "granularity"), FORMS)
def test_repeated_calls(codec: str, granularity: str) -> None:
    """The first call is looked at closely, the next ones are remembered; tensors of one shape may lie differently."""
    quant._calls.clear()
    even, odd = (torch.zeros(140, 328, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for turn in range(3):
        x = values(140, 320)[8:] * (turn + 1)
        for there in (x.cuda(), even[8:, 8:].copy_(x), odd[8:, 3:323].copy_(x)):
            known = len(quant._calls)
            same(by(codec, there, granularity), by(codec, x, granularity))
            assert len(quant._calls) <= known + (turn == 0)
    assert quant._calls, "nothing was remembered"


@pytest.mark.parametrize("codec", ["e4m3", "int8_zero"])
def test_vectors_and_nothing(codec: str) -> None:
    x = torch.randn(1000)
    for granularity in ("token", "tensor"):
        same(by(codec, x.cuda(), granularity), by(codec, x, granularity))
        for shape in ((0, 5), (5, 0), (0,), (2, 0, 3)):
            same(by(codec, torch.empty(shape).cuda(), granularity), by(codec, torch.empty(shape), granularity))


@pytest.mark.parametrize(("codec", "granularity"), FORMS)
def test_nothing_is_written_beside_the_results(codec: str, granularity: str) -> None:
    for m, k in ((131, 1), (131, 264), (130, 261), (5, 1000), (3, 16392)):
        x = torch.randn(m, k).bfloat16()
        want = by(codec, x, granularity)
        frames = [framed(tuple(one.shape), one.dtype) for one in want]
        codes, scale, *zero = (tensor for tensor, _ in frames)
        quant.write(codes, scale, zero[0] if zero else None, x.cuda(), codec, granularity)
        same((codes, scale, *zero), want)
        assert all(untouched(room) for _, room in frames)


def test_torchs_own_operations_give_the_same() -> None:
    """Which is what runs where somebody looks at calls. Large: rows and units of work by the thousand."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x[5, 7], x[4000] = torch.nan, 0.0
    for codec, granularity in FORMS:
        for one in (x, x[8:]) if granularity == "tensor" else (x,):
            got = by(codec, one, granularity)
            with torch.overrides.BaseTorchFunctionMode():
                assert not quant.usable(one)
                want = by(codec, one, granularity)
            for first, second in zip(got, want, strict=True):
                assert torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """What a graph calls runs the kernels, and so gives the same as without one."""
    x = values(40, 300)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (*omnigemm.quantize_fp8(x, granularity="1x128"), *omnigemm.quantize_int8(x))

    torch.compiler.reset()
    quant._calls.clear()
    same(torch.compile(step, fullgraph=True, backend=backend)(x.cuda()), step(x))
    assert len(quant._calls) == 2


# --- graphs, streams, threads ------------------------------------------------------------------------------------


def test_a_thread_that_did_nothing_with_cuda_before() -> None:
    """Its first launch is of a kernel that is ready, into memory that torch has."""
    x = values(40, 300).cuda()
    want = [by(*_with(x, form)) for form in FORMS]
    torch.cuda.synchronize()
    for form, one in zip(FORMS, want, strict=True):
        with ThreadPoolExecutor(1) as fresh:
            same(fresh.submit(by, *_with(x, form)).result(), one)


def test_graph_replays_on_new_data() -> None:
    x = torch.randn(300, 1024).bfloat16().cuda()
    for form in FORMS:
        by(*_with(x, form))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [by(*_with(x, form)) for form in FORMS]
    x.copy_(torch.randn(300, 1024) * 7)
    for result in results:
        for one in result:
            one.reshape(-1).view(torch.uint8).fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    for form, result in zip(FORMS, results, strict=True):
        same(result, by(*_with(x.cpu(), form)))


def _with(x: Tensor, form: tuple[str, str]) -> tuple[str, Tensor, str]:
    return form[0], x, form[1]


def test_a_capture_that_would_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 40, device="cuda")
    monkeypatch.setattr(quant_source, "OPTIONS", (*quant_source.OPTIONS, "--define-macro=NEVER_COMPILED_BEFORE"))
    quant._rows_plan.cache_clear()
    quant._calls.clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(omnigemm.DeviceError, match=r"not compiled yet, and a CUDA graph is being captured"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            omnigemm.quantize_int8(x)
    same(omnigemm.quantize_int8(x), omnigemm.quantize_int8(x.cpu()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = omnigemm.quantize_int8(x)
    graph.replay()
    same(result, omnigemm.quantize_int8(x.cpu()))
    quant._rows_plan.cache_clear()
    quant._calls.clear()


def test_streams_and_threads() -> None:
    given = [torch.randn(64, 7168, device="cuda").mul_(i + 1).bfloat16() for i in range(4)]
    forms = [("e4m3", "tensor"), ("int8_zero", "tensor"), ("e4m3", "1x128"), ("int8", "token"), ("e5m2", "128x128")]
    want = {(i, form): by(*_with(x, form)) for i, x in enumerate(given) for form in forms}
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(40):
                which, form = (number + turn) % len(given), forms[turn % len(forms)]
                result = by(*_with(given[which], form))
                torch.cuda.current_stream().synchronize()
                same(result, want[which, form])

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))  # raises what a thread raised


def test_each_kernel_waits_for_the_one_before() -> None:
    """Kernels are set up early, but must not read what another has still to write: products and quantisers in turns."""
    if gpu.of(0).capability != (9, 0):
        pytest.skip("fp8_gemm needs an sm_90")
    weight, b_scale = omnigemm.quantize_fp8(torch.randn(1024, 1024, device="cuda"), granularity="128x128")

    def chain(x: Tensor, wait: bool) -> Tensor:
        for turn in range(30):
            for granularity in ("1x128", "tensor"):
                q, scale = omnigemm.quantize_fp8(x, granularity=granularity)
                if granularity == "tensor":
                    scale = scale.expand(64, 8).contiguous()
                x = omnigemm.fp8_gemm(q, weight, scale, b_scale) * 0.03
                if wait:
                    torch.cuda.synchronize()
            x = x + turn
        return x

    start = torch.randn(64, 1024, device="cuda").bfloat16()
    first = chain(start, True)
    assert all(torch.equal(chain(start, False), first) for _ in range(5))


def test_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = values(40, 300)
    for form in FORMS:
        result = by(*_with(x.to("cuda:1"), form))
        assert all(one.device == torch.device("cuda:1") for one in result)
        same(result, by(*_with(x, form)))


def test_no_spills() -> None:
    arch = quant.architecture(0)
    assert arch is not None
    for source in ("plain", "rms_norm", "swiglu"):
        for dtype, granularity in (("bf16", "token"), ("bf16", "1x128"), ("fp32", "token")):
            variant = Variant(source, dtype, "e4m3", granularity, True, source == "rms_norm")
            for m, k in ((64, 7168), (8192, 16384)):
                spec = quant_source.spec(variant, quant_source.rows(variant, m, k), arch)
                assert load(spec, 0).local_bytes == 0, spec.name


def test_e5m2_and_e4m3_are_what_they_are_called() -> None:
    x = torch.tensor([[1.0, -0.3, 0.07]], device="cuda")
    assert omnigemm.quantize_fp8(x, dtype=E5M2)[0].dtype == E5M2
    assert omnigemm.quantize_fp8(x)[0].dtype == E4M3
    assert raw(omnigemm.quantize_fp8(x)[0]).tolist() == raw(omnigemm.quantize_fp8(x.cpu())[0]).tolist()
