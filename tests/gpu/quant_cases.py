"""Inputs, the comparison with the CPU and the kernels that the GPU's quantiser tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import gpu, quant_source
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.backends.cuda.quant_source import Variant

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES = {"int8": torch.int8, "int8_zero": torch.int8, "e4m3": E4M3, "e5m2": E5M2}
FORMS = [
    *itertools.product(("int8", "int8_zero"), ("token", "tensor")),
    *itertools.product(("e4m3", "e5m2"), ("token", "tensor", "1x128", "128x128")),
]
FUSED = [("e4m3", "token"), ("e4m3", "1x128"), ("e5m2", "token"), ("int8", "token")]
FORM_SHAPES = ((150, 264), (150, 261))
MANY_TILES = (2100, 2000)  # of 128x128: more than have many threads each
LENGTHS = (1, 7, 8, 100, 136, 264, 1000, 1032, 4100, 4104, 7168, 16384, 16392, 40001)


def architecture(which: gpu.Gpu) -> str:
    major, minor = which.capability
    return f"sm_{major}{minor}"


def all_specs(which: gpu.Gpu) -> Iterator[KernelSpec]:
    """Most of what the tests run, for compiling it side by side. What is missing here only costs time."""
    arch, count = architecture(which), which.multiprocessors
    for dtype, (codec, kind), (m, k) in itertools.product(FLOATS, FORMS, FORM_SHAPES):
        variant = Variant("plain", dtype, codec, kind, k % 8 == 0)
        if kind == "tensor":
            shape = quant_source.tensor(variant, 1, (m - 8) * k, count)
            yield from (quant_source.spec(variant, shape, arch, measure) for measure in (False, True))
        elif kind == "128x128":
            yield quant_source.spec(variant, quant_source.tiles(m, k, 1), arch)
        else:
            yield quant_source.spec(variant, quant_source.rows(variant, m, k), arch)
    for k, m, kind in itertools.product(LENGTHS, (9, 1100), ("token", "1x128")):
        variant = Variant("plain", "bf16", "e4m3", kind, k % 8 == 0)
        yield quant_source.spec(variant, quant_source.rows(variant, m, k), arch)
    for dtype in FLOATS:
        variant = Variant("plain", dtype, "e4m3", "128x128", True)
        yield quant_source.spec(variant, quant_source.tiles(*MANY_TILES, 1), arch)
    yield from fused_specs(which, (264, 261, 7168))


def fused_specs(which: gpu.Gpu, lengths: Sequence[int]) -> Iterator[KernelSpec]:
    """The same for nine rows of these lengths."""
    arch = architecture(which)
    forms = itertools.product((("rms_norm", False), ("rms_norm", True), ("swiglu", False)), FUSED, FLOATS)
    for ((source, residual), (codec, kind), dtype), k in itertools.product(forms, lengths):
        variant = Variant(source, dtype, codec, kind, k % 8 == 0, residual)
        yield quant_source.spec(variant, quant_source.rows(variant, 9, k), arch)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """On the CPU: rows of many sizes, among them zeros of both signs, NaN, infinities, subnormal and huge numbers."""
    m = shape[-2]
    x = torch.randn(shape) * torch.logspace(-6, 3, m)[:, None]
    for row, bad in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        if m > row + 1:
            x[..., row, shape[-1] * 2 // 3] = bad
    if m > 7:
        x[..., 0, :] = torch.where(torch.rand(shape[-1]) < 0.5, 0.0, -0.0)
        x[..., 5, :] *= 1e-40
        x[..., 6, :] = x[..., 6, :].clamp(-1, 1) * (6e4 if dtype == torch.float16 else 3e38)
        x[..., 7, ::2] = 0.0
    return x.to(dtype)


def by(codec: str, x: Tensor, granularity: str) -> tuple[Tensor, ...]:
    """The public function."""
    if codec.startswith("int8"):
        return omnigemm.quantize_int8(x, granularity=granularity, symmetric=codec == "int8")
    return omnigemm.quantize_fp8(x, granularity=granularity, dtype=CODES[codec])


def raw(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8).cpu()


def same(got: tuple[Tensor | None, ...], want: tuple[Tensor, ...]) -> None:
    """Bit for bit, NaN included."""
    found = [one for one in got if one is not None]
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(raw(one), raw(other))


def framed(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor full of poison, and the bytes that it lies in the middle of: 256 more on either side."""
    size = torch.Size(shape).numel() * dtype.itemsize
    room = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device="cuda")
    return room[256 : 256 + size].view(dtype).view(shape), room


def untouched(room: Tensor) -> bool:
    return bool((room[:256] == 0xA5).all()) and bool((room[-256:] == 0xA5).all())
