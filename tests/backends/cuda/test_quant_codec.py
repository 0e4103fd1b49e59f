"""The quantisers' arithmetic, compiled by the system's C++ compiler: bit for bit what torch computes on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import host_compiler
from omnigemm.quant import quantize_fp8, quantize_int8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHIM = """
#include "quant/codec.cuh"
extern "C" void fp8(const float* x, long n, int mantissa, unsigned char* codes) {
    for (long i = 0; i < n; ++i) codes[i] = mantissa == 3 ? to_fp8<3>(x[i]) : to_fp8<2>(x[i]);
}
extern "C" void divide(const float* x, const float* by, long n, float* q) {
    for (long i = 0; i < n; ++i) q[i] = Divisor(by[i]).quotient(x[i]);
}
static int side(float a, float b) { return a < b ? -1 : a > b; }
// Of odd numbers below 512, how many lie on another side of some quotient near them than of the correctly rounded one.
extern "C" long wrong_sides(const float* by, long n) {
    long wrong = 0;
    for (long j = 0; j < n; ++j) {
        const Divisor divisor(by[j]);
        for (int odd = 1; odd < 512; odd += 2)
            for (int step = -2; step <= 2; ++step) {
                const float x = float_of(bits_of(float(double(by[j]) * odd)) + u32(step));
                wrong += side(divisor.quotient(x), float(odd)) != side(x / by[j], float(odd));
            }
    }
    return wrong;
}
extern "C" long wrong_constants(const float* x, long n) {
    long wrong = 0;
    for (long i = 0; i < n; ++i)
        wrong += (divided<127>(x[i]) != x[i] / 127.0f) + (divided<255>(x[i]) != x[i] / 255.0f) +
                 (divided<448>(x[i]) != x[i] / 448.0f) + (divided<57344>(x[i]) != x[i] / 57344.0f);
    return wrong;
}
template <Codec codec>
static void quantise(const float* x, long n, unsigned* codes, float* scale, int* zero) {
    Span span;
    for (long i = 0; i < n; ++i) {
        Span part;  // put together in two steps, as lanes do
        part.include<codec>(x[i]);
        span.include<codec>(part);
    }
    const Scale found = scale_of<codec>(span);
    const Encoder<codec> encoder(found);
    for (long i = 0; i < n; i += 4) codes[i / 4] = encoder.encode(x[i], x[i + 1], x[i + 2], x[i + 3]);
    *scale = found.value;
    *zero = found.zero;
}
extern "C" void quantise_rows(int codec, const float* x, long rows, long n, unsigned* codes, float* scale, int* zero) {
    for (long row = 0; row < rows; ++row, x += n, codes += n / 4, ++scale, ++zero) {
        if (codec == INT8) quantise<INT8>(x, n, codes, scale, zero);
        if (codec == INT8_ZERO) quantise<INT8_ZERO>(x, n, codes, scale, zero);
        if (codec == E4M3) quantise<E4M3>(x, n, codes, scale, zero);
        if (codec == E5M2) quantise<E5M2>(x, n, codes, scale, zero);
    }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_compiler.library(
        tmp_path_factory.mktemp("codec"), SHIM, "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"
    )


def at(x: Tensor) -> ctypes.c_void_p:
    assert x.is_contiguous()
    return ctypes.c_void_p(x.data_ptr())


def of_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def any_floats(count: int, seed: int) -> Tensor:
    """Random bits: every exponent, subnormal numbers, infinities, NaN."""
    return of_bits(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64))


# --- fp8 ---------------------------------------------------------------------------------------------------------


@cache
def fp8_inputs() -> dict[str, Tensor]:
    sixteen = np.arange(65536, dtype=np.uint32)
    codes = torch.arange(256, dtype=torch.uint8)
    near = [
        (numbers[:-1] / 2 + numbers[1:] / 2)  # where two codes meet
        for numbers in (codes[:127].view(E4M3).float(), codes[:124].view(E5M2).float())
    ]
    bits = torch.cat([*near, codes.view(E4M3).float(), codes.view(E5M2).float()]).numpy().view(np.int32)
    around = np.concatenate([bits + step for step in range(-3, 4)]).view(np.uint32)
    return {
        "bf16": of_bits(sixteen << 16),
        "fp16": torch.from_numpy(sixteen.astype(np.uint16).view(np.float16)).float(),
        "ties and neighbours": of_bits(np.concatenate([around, around ^ 0x80000000])),
        "any": any_floats(4_000_000, 0),
        # Where fp8 has numbers, from well below the smallest to above the largest.
        "in range": (2.0 ** (torch.rand(4_000_000) * 36 - 19)) * (torch.randint(0, 2, (4_000_000,)) * 2 - 1),
    }


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", ["bf16", "fp16", "ties and neighbours", "any", "in range"])
def test_fp8_is_torchs(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    x = fp8_inputs()[name].contiguous()
    largest = torch.finfo(dtype).max
    want = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    got = torch.zeros(x.numel(), dtype=torch.uint8)
    library.fp8(at(x), ctypes.c_long(x.numel()), 3 if dtype == E4M3 else 2, at(got))
    assert torch.equal(got, want)


# --- quotients ---------------------------------------------------------------------------------------------------


@cache
def division_cases() -> dict[str, tuple[Tensor, Tensor]]:
    """Values and divisors as they meet: |value| is at most 57344 times the divisor, and that is from 2^-126 up."""
    count = 2_000_000
    mantissas = torch.randint(0, 2**23, (count,), dtype=torch.int32)
    by = (mantissas | (torch.randint(1, 249, (count,), dtype=torch.int32) << 23)).view(torch.float32)
    few_bits = any_floats(count, 1).bfloat16().float().nan_to_num(1.0)
    ratio = 2.0 ** (torch.rand(count) * 50 - 34)
    near = (by.double() * ratio).float().clamp(-3e38, 3e38)
    narrow = near.bfloat16().float()
    # Quotients next to where two fp32 numbers meet are the hard ones: (n + 1/2) * divisor, rounded.
    hard = (by.double() * (torch.randint(2**23, 2**24, (count,)).double() + 0.5) * 2.0**-17).float()
    return {
        "random": (near, by),
        "bf16 values": (narrow, by),
        "hard": (torch.where(hard.isfinite(), hard, 0.0), by),
        "smallest divisor": (few_bits.clamp(-(2.0**-110), 2.0**-110), torch.full((count,), 2.0**-126)),
        "subnormal values": (
            of_bits(np.random.default_rng(2).integers(0, 2**23, count)),
            2.0 ** (torch.rand(count) * 8 - 126),
        ),
    }


@pytest.mark.parametrize("name", ["random", "bf16 values", "hard", "smallest divisor", "subnormal values"])
def test_quotients_are_nearly_correctly_rounded(library: ctypes.CDLL, name: str) -> None:
    x, by = division_cases()[name]
    want, got = x / by, torch.empty_like(x)
    library.divide(at(x.contiguous()), at(by.contiguous()), ctypes.c_long(x.numel()), at(got))
    small = want.abs() < 2.0**-40  # zero as a code of any kind
    off = (got[~small].view(torch.int32) - want[~small].view(torch.int32)).abs()
    assert int(off.max()) <= 1
    assert float((off > 0).float().mean()) < 1e-5
    assert bool((got[small].abs() <= 2.0**-39).all())
    assert name == "random" or float(small.float().mean()) < 0.9


def test_quotients_lie_on_the_right_side_of_where_codes_change(library: ctypes.CDLL) -> None:
    """The middle between two codes is an odd number of up to 9 bits, times a power of 2; and quotients grow with the
    value, so that those next to the middle decide. A sample of the 2^23 divisors: who has a minute takes all, with
    step = 1."""
    step = 2**9 - 1
    edges = np.concatenate([np.arange(1000), 2**23 - 1 - np.arange(1000)])
    by = of_bits(0x3F800000 | np.concatenate([np.arange(0, 2**23, step), edges]).astype(np.uint32))
    library.wrong_sides.restype = ctypes.c_long
    assert library.wrong_sides(at(by), ctypes.c_long(by.numel())) == 0


def test_scales_are_correctly_rounded(library: ctypes.CDLL) -> None:
    """Here, too, step = 1 takes all numbers. Quotients below the smallest scale do not matter."""
    x = of_bits(np.arange(0x08000000, 0x7F800000, 509))
    library.wrong_constants.restype = ctypes.c_long
    assert library.wrong_constants(at(x), ctypes.c_long(x.numel())) == 0


# --- all of it ---------------------------------------------------------------------------------------------------


def row_cases() -> Tensor:
    rows = [torch.randn(600, 64) * 2.0 ** (torch.rand(600, 1) * 240 - 130)]
    rows.append(any_floats(600 * 64, 3).nan_to_num(0.0, 0.0, 0.0).reshape(600, 64))
    rows.append(rows[0].bfloat16().float())
    rows.append(torch.randint(-127, 128, (100, 64)) + torch.randint(0, 2, (100, 64)) / 2)  # ties where the scale is 1
    rows[-1][:, 0] = 127.0
    rows.append(of_bits(np.random.default_rng(4).integers(0, 2**23, 100 * 64)).reshape(100, 64))  # subnormal
    odd = torch.zeros(12, 64)
    odd[1:3, 3] = -0.0
    odd[2:, 5] = 1.0
    odd[3, 0], odd[4, 1], odd[5, 2] = float("inf"), float("-inf"), float("nan")
    odd[6, 0] = torch.finfo(torch.float32).max
    odd[6, 1] = -odd[6, 0]
    odd[7] = -odd[6]
    odd[8], odd[9] = 2.0**-149, -(2.0**-126)
    odd[10], odd[11] = torch.arange(64.0), -torch.arange(64.0)
    return torch.cat([*rows, odd])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["INT8", "INT8_ZERO", "E4M3", "E5M2"])
def test_rows_are_the_cpus(library: ctypes.CDLL, codec: str, dtype: torch.dtype) -> None:
    x = row_cases().to(dtype).float()
    want: tuple[Tensor, ...]
    if codec.startswith("INT8"):
        want = quantize_int8(x, symmetric=codec == "INT8")
    else:
        want = quantize_fp8(x, granularity="token", dtype=E4M3 if codec == "E4M3" else E5M2)
    codes = torch.full(x.shape, 77, dtype=torch.uint8)
    scale, zero = torch.full((x.size(0),), -1.0), torch.full((x.size(0),), -999, dtype=torch.int32)
    number = ["INT8", "INT8_ZERO", "E4M3", "E5M2"].index(codec)
    rows, n = map(ctypes.c_long, x.shape)
    library.quantise_rows(number, at(x), rows, n, at(codes), at(scale), at(zero))
    assert torch.equal(scale.view(torch.int32), want[1].view(torch.int32))
    assert torch.equal(codes, want[0].view(torch.uint8))
    if codec == "INT8_ZERO":
        assert torch.equal(zero, want[2])
