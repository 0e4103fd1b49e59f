"""The quantisers' kernels themselves, run on the processor by a small emulator: bit for bit the CPU's results.

It shows that every value is read, measured and written where it should be; a GPU has the last word (tests/gpu).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import emulated
import omnigemm
from omnigemm.backends.cuda import quant, quant_source
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.backends.cuda.quant_source import Shape, Variant

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Which instructions there are, kernels ask of the compiler for a GPU.
WAITS = ("quant/team.cuh", "void wait_for_previous() {\n#if __CUDA_ARCH__ >= 900", "void wait_for_previous() {\n#if 1")
MULTIPROCESSORS = 3  # of the GPU that is made up here: small, so that blocks have more than one thing to do


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[KernelSpec], ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("kernels")
    return lambda spec: emulated.compiled(spec, folder, (WAITS,))


class Emulated:
    """A launcher that runs the kernel here. What is `late` is written by the kernel before."""

    late: ClassVar[list[Tensor]] = []

    def __init__(self, library: ctypes.CDLL, shape: Shape, values: str) -> None:
        self._library, self._shape, self._values = library, shape, values

    def __call__(self, stream: int, addresses: tuple[int, ...], *values: float) -> None:
        arguments = struct.pack(self._values, *values)
        written = [(one.data_ptr(), one.nbytes, 0) for one in self.late]
        emulated.run(self._library, arguments, grid=self._shape.grid, threads=self._shape.threads, written=written)


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch, compiled: Callable[[KernelSpec], ctypes.CDLL]) -> None:
    """Tensors of the CPU go the way of the GPU's."""

    class Gpu:
        multiprocessors = MULTIPROCESSORS

    def launcher(wanted: KernelSpec, shape: Shape, values: str, index: int) -> Emulated:
        return Emulated(compiled(wanted), shape, values)

    for name in ("_rows_plan", "_tiles_plan", "_tensor_plans"):
        monkeypatch.setattr(quant, name, getattr(quant, name).__wrapped__)
    monkeypatch.setattr(quant, "_launcher", launcher)
    monkeypatch.setattr(quant, "_architecture", lambda index: "sm_90")
    monkeypatch.setattr(quant.gpu, "of", lambda index: Gpu())
    monkeypatch.setattr(quant, "raw_stream", lambda index: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)


def same(got: tuple[Tensor | None, ...], want: tuple[Tensor, ...]) -> None:
    found = [one for one in got if one is not None]
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        assert torch.equal(*bits)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of many sizes, among them zeros, infinities, NaN and tiny ones."""
    x = torch.randn(shape) * torch.logspace(-6, 3, shape[-2])[:, None]
    x[..., 0, :] = torch.where(torch.rand(shape[-1]) < 0.5, 0.0, -0.0)
    for row, bad in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        if shape[-2] > row + 1:
            x[..., row, shape[-1] * 2 // 3] = bad
    if shape[-2] > 5:
        x[..., 5, :] *= 1e-40
    return x.to(dtype)


def codec_of(codec: str, x: Tensor, granularity: str) -> tuple[Tensor, ...]:
    if codec.startswith("int8"):
        return omnigemm.quantize_int8(x, granularity=granularity, symmetric=codec == "int8")
    return omnigemm.quantize_fp8(x, granularity=granularity, dtype=E4M3 if codec == "e4m3" else E5M2)


# Lengths: below and above a vector, a warp, a block's registers; whole vectors and not.
LENGTHS = [1, 8, 100, 136, 264, 1000, 1032, 4100, 4104, 16392, 17001]


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("granularity", ["token", "1x128"])
def test_rows(k: int, granularity: str) -> None:
    x = values(9, k)
    same(quant.quantize(x, "e4m3", granularity), codec_of("e4m3", x, granularity))


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("codec", "granularity"),
    [
        *((codec, gran) for codec in ("int8", "int8_zero") for gran in ("token", "tensor")),
        *((codec, gran) for codec in ("e4m3", "e5m2") for gran in ("token", "tensor", "1x128", "128x128")),
    ],
)
def test_every_form(codec: str, granularity: str, dtype: torch.dtype) -> None:
    for k in (264, 261):
        x = values(150, k, dtype=dtype)
        if granularity == "tensor":
            x = x[8:]
        same(quant.quantize(x, codec, granularity), codec_of(codec, x, granularity))


@pytest.mark.usefixtures("_emulated")
def test_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_source, "_MANY_ROWS", 8)
    for k, dtype in ((1040, torch.bfloat16), (1040, torch.float32), (8192, torch.float32), (4104, torch.float16)):
        x = values(9, k, dtype=dtype)
        for granularity in ("token", "1x128"):
            same(quant.quantize(x, "e4m3", granularity), codec_of("e4m3", x, granularity))


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("granularity", ["token", "tensor", "1x128", "128x128"])
def test_strides(granularity: str) -> None:
    x = values(140, 320)[8:]
    room = torch.zeros(132 * 320 + 1, dtype=torch.bfloat16)[1:].view(132, 320)
    cases = {
        "columns of a wider one": x[:, 8:264],
        "at odd places": x[:, 3:260],
        "one off": room.copy_(x),
        "every second row": x[::2],
        "transposed": x.T,
        "every second column": x[:, ::2],
        "the same row": x[:1].expand(6, 320),
        "batch": x.view(4, 33, 320),
        "part of a batch": x.view(4, 33, 320)[1:, :32],
        "one row": x[3:4],
    }
    for name, one in cases.items():
        before = one.clone()
        same(quant.quantize(one, "e4m3", granularity), codec_of("e4m3", one, granularity))
        assert torch.equal(one, before), name


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("k", [30000, 30003])
def test_whole_tensors_of_many_units(k: int) -> None:
    for bad in (None, torch.nan, -torch.inf):
        x = torch.randn(3, k).half()
        x[1, 777] = -60.0
        if bad is not None:
            x[2, k - 1] = bad
        for one in (x, torch.cat([x, x], 1)[:, 8 : k + 8], x[:, :100], x[1:2]):
            same(quant.quantize(one, "int8_zero", "tensor"), codec_of("int8_zero", one, "tensor"))


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("granularity", ["token", "tensor", "1x128", "128x128"])
def test_nothing_is_written_beside_the_results(granularity: str) -> None:
    for m, k in ((131, 264), (130, 261)):
        x = torch.randn(m, k).bfloat16()
        want = codec_of("e4m3", x, granularity)
        rooms = [torch.full((one.nbytes + 512,), 0xA5, dtype=torch.uint8) for one in want]
        pairs = zip(rooms, want, strict=True)
        codes, scale = (room[256:-256].view(one.dtype).view(one.shape) for room, one in pairs)
        quant.write(codes, scale, None, x, "e4m3", granularity)
        same((codes, scale), want)
        assert all(bool((torch.cat([room[:256], room[-256:]]) == 0xA5).all()) for room in rooms)


# --- fused -------------------------------------------------------------------------------------------------------

FUSED = [
    ("e4m3", E4M3, "token", torch.float16),
    ("e4m3", E4M3, "1x128", torch.bfloat16),
    ("e4m3", E4M3, "1x128", torch.float32),
    ("e5m2", E5M2, "token", torch.float32),
    ("int8", torch.int8, "token", torch.bfloat16),
]


def exact_rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """1 and -1, whose squares have a mean of 1 in whatever order they are added, and rows of other sizes."""
    signs = torch.randint(0, 2, (m, k)) * 2.0 - 1.0
    return (signs * 2.0 ** torch.randint(-3, 4, (m, 1))).to(dtype)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("codec", "code", "granularity", "dtype"), FUSED)
def test_rms_norm(codec: str, code: torch.dtype, granularity: str, dtype: torch.dtype) -> None:
    """With means that are exact, everything is."""
    for k in (136, 1032, 261, 16392):
        x, weight = exact_rows(5, k, dtype), torch.randn(k).to(dtype)
        x[4, k // 2] = torch.nan
        want = omnigemm.rms_norm_quantize(x, weight, eps=0.25, granularity=granularity, dtype=code)
        same(quant.quantize(x, codec, granularity, source="rms_norm", weight=weight, eps=0.25)[:2], want)
        # The sum of two may be anything: a row of even numbers less one of odd ones.
        residual = (torch.randint(-4, 5, (5, k)) * 2).to(dtype)
        part = exact_rows(5, k, dtype) - residual
        wide = torch.full((5, k + 8), 7.0, dtype=dtype)
        for start in (0, 3):
            for given in (residual.clone(), wide[:, start : start + k].copy_(residual)):
                same(
                    quant.quantize(part, codec, granularity, source="rms_norm", weight=weight, eps=0.0, residual=given)[
                        :2
                    ],
                    omnigemm.rms_norm_quantize(part + residual, weight, eps=0.0, granularity=granularity, dtype=code),
                )
                assert torch.equal(given, part + residual)
            assert bool((wide[:, start + k :] == 7.0).all())
            wide.fill_(7.0)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("k", [1032, 16392])  # in registers, and longer
def test_a_weight_is_read_early_if_it_is_constant(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """All else waits for the kernel before; so does a weight that must be copied, for the copy is made right before."""
    x, weight, residual = exact_rows(5, k, torch.bfloat16), torch.randn(k).bfloat16(), torch.zeros(5, k).bfloat16()
    form = "e4m3", "1x128"
    want = omnigemm.rms_norm_quantize(x, weight, eps=0.25, granularity="1x128")

    def right(late: list[Tensor], given: Tensor) -> bool:
        monkeypatch.setattr(Emulated, "late", late)
        residual.zero_()
        codes, scale, _ = quant.quantize(x, *form, source="rms_norm", weight=given, eps=0.25, residual=residual)
        return torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(scale, want[1])

    assert right([x, weight, residual], weight)
    with omnigemm.settings(constant_weights=True):
        assert right([x, residual], weight)
        assert right([weight], weight) == (k > 10000)  # the promise was broken
    copies: list[Tensor] = []
    operands = quant._operands

    def copied(*given: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = operands(*given)
        assert found[1] is not None
        copies[:] = [found[1]]
        Emulated.late[:] = copies
        return found

    monkeypatch.setattr(quant, "_operands", copied)
    apart = torch.zeros(k, 2).bfloat16()
    apart[:, 0] = weight
    with omnigemm.settings(constant_weights=True):
        assert right([], apart[:, 0])
    assert copies


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("codec", "code", "granularity", "dtype"), FUSED)
def test_swiglu(codec: str, code: torch.dtype, granularity: str, dtype: torch.dtype) -> None:
    """Gates so large or so small that silu is the gate itself or 0: nothing is left to chance."""
    for f in (136, 1032, 261, 16392):
        gate = (torch.rand(5, f) * 100 + 30) * torch.where(torch.rand(5, f) < 0.2, -8.0, 1.0)
        x = torch.cat([gate, torch.randn(5, f)], 1).to(dtype)
        x[4, f + 5] = torch.inf
        want = omnigemm.swiglu_quantize(x, granularity=granularity, dtype=code)
        same(quant.quantize(x, codec, granularity, source="swiglu")[:2], want)


# --- calls that are remembered -----------------------------------------------------------------------------------


@pytest.fixture
def _remembered(_emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are made where the kernels are."""
    monkeypatch.setattr(
        quant, "empty_strided_cuda", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    )
    monkeypatch.setattr(quant, "_calls", {})


def remember(x: Tensor, codec: str, granularity: str, source: str = "plain", **others: Tensor) -> None:
    """As `quantize` does with tensors of a GPU."""
    weight, residual = others.get("weight"), others.get("residual")
    codes, scale, _ = quant.quantize(x, codec, granularity, source=source, weight=weight, residual=residual)
    run = quant.prepared(codes, scale, x, codec, granularity, source, weight, residual)
    assert run is not None
    quant._calls[quant._key(x, codec, granularity, source, weight, residual)] = run


@pytest.mark.usefixtures("_remembered")
@pytest.mark.parametrize(("codec", "granularity"), [("int8_zero", "token"), ("e4m3", "tensor"), ("e5m2", "128x128")])
def test_repeated_calls(codec: str, granularity: str) -> None:
    first, other = values(140, 264), values(140, 264)[:, :256]
    assert quant.repeated(first, codec, granularity) is None
    for x in (first, other, other.view(4, 35, 256) if granularity != "128x128" else other[8:]):
        remember(x, codec, granularity)
    for x in (torch.randn_like(first), torch.randn(140, 264).bfloat16()[:, :256]):
        got = quant.repeated(x, codec, granularity)
        assert got is not None
        same(got, codec_of(codec, x, granularity))
    assert quant.repeated(first.float(), codec, granularity) is None
    assert quant.repeated(first[:, 1:257], codec, granularity) is None
    assert quant.repeated(first, codec, "1x128") is None
    with torch.overrides.BaseTorchFunctionMode():
        assert quant.repeated(first, codec, granularity) is None


@pytest.mark.usefixtures("_remembered")
def test_repeated_norms_look_at_memory_again() -> None:
    rows = torch.zeros(12, 264).bfloat16()
    x, residual, weight = exact_rows(4, 264, torch.bfloat16), rows[:4], torch.randn(264).bfloat16()
    form = "e4m3", "1x128", "rms_norm"
    remember(x, *form, weight=weight, residual=residual)
    residual.zero_()
    before = residual._version
    got = quant.repeated(x, *form, weight, 0.25, residual)
    assert got is not None
    same(got[:2], omnigemm.rms_norm_quantize(x, weight, eps=0.25, granularity="1x128"))
    assert torch.equal(residual, x)
    assert residual._version > before
    # Those that an error awaits, or that are not sure to be apart.
    assert quant.repeated(rows[2:6], *form, weight, 0.25, residual) is None
    assert quant.repeated(x, *form, rows.view(-1)[264:528], 0.25, residual) is None
    for eps in (-1.0, torch.inf, torch.nan, 1, True, "1"):
        assert quant.repeated(x, *form, weight, eps, residual) is None  # type: ignore[arg-type]


@pytest.mark.usefixtures("_remembered")
def test_what_must_be_copied_is_not_remembered() -> None:
    x = values(8, 264).T
    codes, scale, _ = quant.quantize(x, "e4m3", "token")
    assert quant.prepared(codes, scale, x, "e4m3", "token", "plain", None, None) is None


def test_repeated_calls_leave_what_is_wrong_to_the_checks() -> None:
    for x in (None, 1, [1.0], torch.ones(2, 3), torch.ones(2, 3, device="meta")):
        assert quant.repeated(x, "e4m3", "token") is None  # type: ignore[arg-type]
    assert quant.repeated(torch.ones(2, 3), "e4m3", ["token"]) is None  # type: ignore[arg-type]


# --- how they are launched ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("m", [1, 64, 8192])
def test_threads_hold_whole_rows_or_none(dtype: str, m: int) -> None:
    variant = Variant("plain", dtype, "e4m3", "token", True)
    for k in (*range(1, 70), *range(120, 1100, 37), 2048, 4096, 7168, 8192, 14336, 16384, 16385, 50000, 2**30):
        shape = quant_source.rows(variant, m, k)
        constants = dict(shape.constants)
        lanes = 32 if constants["WARP_ROWS"] else shape.threads
        assert shape.threads % 32 == 0
        assert shape.threads <= 512
        assert shape.grid * (shape.threads // lanes) >= m
        assert (constants["EACH"] == 0) == (k > 16384)
        if constants["EACH"]:
            vectors = -(-k // variant.values)
            assert lanes * constants["EACH"] >= vectors
            assert constants["WARP_ROWS"] or (lanes - 32) * constants["EACH"] < vectors  # no warp has nothing to do
