"""From floating point to int8, fp8 and 4-bit weights, in formulas that a kernel can match bit for bit.

All arithmetic is IEEE fp32, every division correctly rounded; `round` is to nearest, ties to even. Zeros,
or no values at all, have scale 1. An inf or NaN among the values that share a scale makes that scale NaN and
those values 0, so that what is computed from them is NaN and never quietly wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, overload

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.functional import pad

from ..backends.cuda import quant as kernels
from ..core.dtypes import FLOATS, FP8, name_of
from ..core.errors import DTypeError, ShapeError, UnsupportedError
from ..core.strided import need_strided
from ..core.watched import PLAIN
from ..ops._library import define
from .formats.parts import GROUP_SIZES, ceil_div, check_int, dtype_names
from .int4_weight import Int4Weight
from .nibbles import BLOCK as ROW_BLOCK
from .nibbles import pack_nibbles, row_blocks

BLOCK = 128
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32: below it division loses bits, and GPUs may flush to zero
INT4_SMALLEST_SCALE = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
# On a CPU, temporaries of about this many elements stay in a core's cache.
_CHUNK = 1 << 18

_Encode = Callable[..., torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # codes and scales
_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # and zero points


class _Range(NamedTuple):
    """What the values that share a scale span, 0 included, in fp32 and with the reduced dimensions kept."""

    high: torch.Tensor
    low: torch.Tensor
    empty: torch.Tensor  # all zero, or no values at all
    bad: torch.Tensor  # inf or NaN among them

    @property
    def amax(self) -> torch.Tensor:
        return torch.maximum(self.high, -self.low)


@overload
def quantize_int8(
    x: torch.Tensor, *, granularity: str = "token", symmetric: Literal[True] = True
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def quantize_int8(
    x: torch.Tensor, *, granularity: str = "token", symmetric: Literal[False]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def quantize_int8(
    x: torch.Tensor, *, granularity: str = "token", symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def quantize_int8(
    x: torch.Tensor, *, granularity: str = "token", symmetric: bool = True
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 values and a scale per token (x.shape[:-1]) or one for the tensor; asymmetric, also a zero point.

    Symmetric, x ~ scale * q:            scale = amax / 127; q = clamp(round(x / scale), -127, 127).
    Asymmetric, x ~ scale * (q - zero):  scale = max / 255 - min / 255, with 0 counted among the values;
        zero = clamp(round(-128 - min / scale), -128, 127); q = clamp(round(x / scale) + zero, -128, 127).
    """
    if torch.compiler.is_compiling():
        return _trace_int8(x, granularity, symmetric)
    codec = "int8" if symmetric is True else "int8_zero" if symmetric is False else ""
    try:
        again = kernels.repeated(x, codec, granularity) if in_memory(x) else None
    except RuntimeError:
        check_input("quantize_int8", "x", x)  # it may have no memory to be found by
        raise
    q, scale, zero = int8_anew(x, granularity, symmetric) if again is None else again
    return (q, scale) if zero is None else (q, scale, zero)


def quantize_fp8(
    x: torch.Tensor, *, granularity: str = "tensor", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values, x ~ scale * q: scale = amax / m, q = fp8(clamp(x / scale, -m, m)), m the largest value.

    The scale has shape () for "tensor", x.shape[:-1] for "token", [.., M, ceil(K/128)] for "1x128" and
    [.., ceil(N/128), ceil(K/128)] for "128x128".
    """
    if torch.compiler.is_compiling():
        return _trace_fp8(x, granularity, dtype)
    try:
        again = kernels.repeated(x, name_of(dtype) if dtype in FP8 else "", granularity) if in_memory(x) else None
    except RuntimeError:
        check_input("quantize_fp8", "x", x)
        raise
    return fp8_anew(x, granularity, dtype) if again is None else (again[0], again[1])


def quantize_int4(w: torch.Tensor, *, group_size: int | None = 128, symmetric: bool = True) -> Int4Weight:
    """4-bit weights from [N, K] or [E, N, K], a scale in w's dtype for each group_size columns (None: all K).

    Symmetric: of scale = max(max / 7, -min / 8), which reaches every weight, and max(max / 7.5, -min / 8.5),
    which leaves the outermost half a step away, each group takes the one with the smaller squared error.
    Asymmetric: scale = max / 15 - min / 15, with 0 counted among the weights, and zero = round(-min / scale).
    The scale is rounded to w's dtype before anything is divided by it.
    """
    where = "quantize_int4"
    check_input(where, "w", w)
    if w.dim() not in (2, 3):
        raise ShapeError(f"{where}: w has shape {tuple(w.shape)}, expected (N, K) or (E, N, K)")
    _check_flag(where, "symmetric", symmetric)
    *lead, k = w.shape
    size = _int4_group_size(where, group_size, k)
    rows, groups, width = math.prod(lead), ceil_div(k, size), ceil_div(k, 2)
    qweight = torch.empty(rows, width, dtype=torch.uint8, device=w.device)
    scales = torch.empty(rows, groups, dtype=w.dtype, device=w.device)
    zeros = None if symmetric else torch.empty(rows, groups, dtype=torch.uint8, device=w.device)
    if rows and k:
        flat = w.detach().reshape(rows, k)
        for part in _row_chunks(flat):
            v = torch.unflatten(pad(flat[part].float(), (0, groups * size - k)), 1, (groups, size))
            if zeros is None:
                q, scale = _int4_symmetric(v, w.dtype)
            else:
                q, scale, zero = _int4_asymmetric(v, w.dtype)
                zeros[part] = zero.squeeze(-1).to(torch.uint8)
            scales[part] = scale.squeeze(-1).to(w.dtype)
            qweight[part] = pack_nibbles(q.to(torch.uint8).flatten(1)[:, :k])
    return Int4Weight(
        qweight.reshape(*lead, width),
        scales.reshape(*lead, groups),
        None if zeros is None else zeros.reshape(*lead, groups),
        k=k,
        group_size=size,
        validate=False,
    )


def int8_anew(x: torch.Tensor, granularity: str, symmetric: bool) -> kernels.Results:
    """What `quantize_int8` gives where no call like it is remembered."""
    _check_int8(x, granularity, symmetric)
    if for_kernels(x):
        return kernels.quantize(x, "int8" if symmetric else "int8_zero", granularity)
    rows, dims, shape = _as_rows(x.detach(), granularity)
    span = _measure(rows, dims)
    if symmetric:
        scale = _guard(_divide(span.amax, 127.0), span)
        q = _apply(rows, _int8_symmetric, torch.int8, scale)
        return q.reshape(x.shape), scale.reshape(shape), None
    # Not (max - min) / 255, which overflows when the range is wider than fp32.
    scale = _guard(_divide(span.high, 255.0) - _divide(span.low, 255.0), span)
    zero = (-128.0 - span.low / scale).round().clamp(-128.0, 127.0)
    zero = torch.where(span.empty | span.bad, 0.0, zero)
    q = _apply(rows, _int8_asymmetric, torch.int8, scale, zero)
    return q.reshape(x.shape), scale.reshape(shape), zero.to(torch.int32).reshape(shape)


def fp8_anew(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    """What `quantize_fp8` gives where no call like it is remembered."""
    _check_fp8(x, granularity, dtype)
    if for_kernels(x):
        q, scale, _ = kernels.quantize(x, name_of(dtype), granularity)
        return q, scale
    x = x.detach()
    encode = _e4m3 if dtype == torch.float8_e4m3fn else _e5m2
    largest = torch.finfo(dtype).max
    if granularity in ("tensor", "token"):
        rows, dims, shape = _as_rows(x, granularity)
        span = _measure(rows, dims)
        scale = _guard(_divide(span.amax, largest), span)
        return _apply(rows, encode, dtype, scale).reshape(x.shape), scale.reshape(shape)

    tile = BLOCK if granularity == "128x128" else 1
    m, k = (x.shape[-2] if x.dim() > 1 else 1), x.shape[-1]
    tiles, blocks = ceil_div(m, tile), ceil_div(k, BLOCK)
    shape = _scale_shape(x.shape[:-1], k, granularity)
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=dtype), x.new_ones(shape, dtype=torch.float32)
    v = x.reshape(-1, m, k)
    if m % tile or k % BLOCK:
        # Zeros change no amax.
        v = pad(v, (0, -k % BLOCK, 0, -m % tile))
    v = torch.unflatten(torch.unflatten(v, 2, (blocks, BLOCK)), 1, (tiles, tile)).flatten(0, 1)
    span = _measure(v, (3, 1))
    scale = _guard(_divide(span.amax, largest), span)
    q = _apply(v, encode, dtype, scale).reshape(-1, tiles * tile, blocks * BLOCK)
    return q[:, :m, :k].contiguous().reshape(x.shape), scale.reshape(shape)


# The encoders below take fp32 values; those whose scale is NaN become 0.


def _int8_symmetric(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (v / scale).round_().nan_to_num_(0.0).clamp_(-127.0, 127.0)


def _int8_asymmetric(v: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (v / scale).round_().add_(zero).nan_to_num_(0.0).clamp_(-128.0, 127.0)


def _e4m3(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # Clamped because the quotient may be a rounding above the largest value, from where a cast may give NaN.
    return (v / scale).nan_to_num_(0.0).clamp_(-448.0, 448.0)


def _e5m2(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (v / scale).nan_to_num_(0.0).clamp_(-57344.0, 57344.0)


def _int4_symmetric(v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 groups [R, G, S] -> values 0..15 and scales [R, G, 1], both as fp32."""
    span = _measure(v, (2,))

    def attempt(top: float, bottom: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = torch.maximum(_divide(span.high, top), _divide(-span.low, bottom))
        scale = _guard(_round_scale(scale, dtype), span)
        steps = v / scale
        q = steps.round().clamp_(-8.0, 7.0)
        return q, scale, steps.sub_(q).square_().sum(-1, keepdim=True)

    q, scale, error = attempt(7.0, 8.0)
    half_q, half_scale, half_error = attempt(7.5, 8.5)
    # Errors are in steps, so that no square overflows; the ratio brings them to the same unit.
    better = half_error * (half_scale / scale).square() < error
    q = torch.where(better, half_q, q).nan_to_num_(0.0).add_(8.0)
    return q, torch.where(better, half_scale, scale)


def _int4_asymmetric(v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 groups [R, G, S] -> values 0..15, scales and zero points [R, G, 1], all as fp32."""
    span = _measure(v, (2,))
    scale = _divide(span.high, 15.0) - _divide(span.low, 15.0)
    scale = _guard(_round_scale(scale, dtype), span)
    zero = (-span.low / scale).round().clamp(0.0, 15.0)
    zero = torch.where(span.empty | span.bad, 8.0, zero)
    q = (v / scale).round_().nan_to_num_(0.0).add_(zero).clamp_(0.0, 15.0)
    return q, scale, zero


def _round_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest scale that dtype can hold and that is not zero, as fp32."""
    return scale.clamp_min(INT4_SMALLEST_SCALE[dtype]).to(dtype).float()


def _measure(v: torch.Tensor, dims: tuple[int, ...]) -> _Range:
    high = low = v
    for dim in dims:
        if v.numel() == 0:
            high = low = high.new_zeros([1 if i == dim else size for i, size in enumerate(high.shape)])
        else:
            high, low = high.amax(dim, keepdim=True), low.amin(dim, keepdim=True)
    high, low = high.float().clamp_min(0.0), low.float().clamp_max(0.0)
    return _Range(high, low, high == low, ~(high.isfinite() & low.isfinite()))


def _divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, correctly rounded. By a tensor: on a GPU, torch multiplies by the reciprocal of a number."""
    return x / torch.full_like(x, by)


def _guard(scale: torch.Tensor, span: _Range) -> torch.Tensor:
    """The scale, never below the smallest normal number; 1 for zeros, NaN where there is an inf or NaN."""
    scale = torch.where(span.empty, 1.0, scale.clamp_min(SMALLEST_SCALE))
    return torch.where(span.bad, math.nan, scale)


def _as_rows(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """x as a matrix, the dimensions of it that share a scale, and the shape of the scale to hand back."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows, (1,), tuple(x.shape[:-1])) if granularity == "token" else (rows, (1, 0), ())


def _scale_shape(lead: tuple[int, ...], k: int, granularity: str) -> tuple[int, ...]:
    """Of the scales of rows of K values, of which there are `lead`."""
    if granularity == "tensor":
        return ()
    if granularity == "token":
        return tuple(lead)
    rows = lead if granularity == "1x128" else (*lead[:-1], ceil_div(lead[-1], BLOCK))
    return *rows, ceil_div(k, BLOCK)


def _row_chunks(v: torch.Tensor) -> list[slice]:
    """How to walk over the first dimension: whole when compiling, which fuses the passes by itself."""
    if torch.compiler.is_compiling() or v.shape[0] == 0:
        return [slice(None)]
    block = _CHUNK if v.device.type == "cpu" else ROW_BLOCK
    return row_blocks(v.shape[0], v.numel() // v.shape[0], block)


def _apply(v: torch.Tensor, encode: _Encode, dtype: torch.dtype, *side: torch.Tensor) -> torch.Tensor:
    """encode(v, *side) as a contiguous tensor of dtype; side has v's first dimension or 1 there."""
    chunks = _row_chunks(v) if v.device.type == "cpu" else [slice(None)]
    if len(chunks) == 1:
        return encode(v.float(), *side).to(dtype).contiguous()
    q = torch.empty(v.shape, dtype=dtype, device=v.device)
    for part in chunks:
        q[part] = encode(v[part].float(), *(s if s.shape[0] == 1 else s[part] for s in side)).to(dtype)
    return q


def _int4_group_size(where: str, group_size: int | None, k: int) -> int:
    if group_size is None or group_size == -1:
        return max(k, 1)
    expected = "32, 64, 128, or None or -1 for the whole of K"
    check_int(where, "group_size", group_size, expected)
    if group_size not in GROUP_SIZES:
        raise UnsupportedError(f"{where}: group_size is {group_size}, expected {expected}")
    return group_size


def in_memory(*tensors: object) -> bool:
    """Whether kernels, which read memory, see the values. Of negated views torch keeps the signs apart, and its own
    operations compute."""
    for one in tensors:  # noqa: SIM110 - a generator takes longer than all this
        if isinstance(one, torch.Tensor) and one.is_neg():
            return False
    return True


def for_kernels(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    return not torch.compiler.is_compiling() and in_memory(x, *others) and kernels.usable(x)


def check_input(where: str, name: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"{where}: {name} is a {type(x).__name__}, expected a torch.Tensor")
    need_strided(where, **{name: x})
    if x.dtype not in FLOATS:
        raise DTypeError(f"{where}: {name} has dtype {x.dtype}, expected {dtype_names(FLOATS)}")
    if x.dim() == 0:
        raise ShapeError(f"{where}: {name} has shape (), expected at least 1 dimension")


def _check_int8(x: torch.Tensor, granularity: str, symmetric: bool) -> None:
    where = "quantize_int8"
    check_input(where, "x", x)
    check_option(where, "granularity", granularity, ("token", "tensor"))
    _check_flag(where, "symmetric", symmetric)


def _check_fp8(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> None:
    where = "quantize_fp8"
    check_input(where, "x", x)
    check_option(where, "granularity", granularity, ("tensor", "token", "1x128", "128x128"))
    if dtype not in FP8:
        raise DTypeError(f"{where}: dtype is {dtype}, expected {dtype_names(FP8)}")
    if granularity == "128x128" and x.dim() < 2:
        raise ShapeError(f"{where}: x has shape {tuple(x.shape)}, expected at least 2 dimensions for 128x128 blocks")


def check_option(where: str, name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        expected = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise UnsupportedError(f"{where}: {name} is {value!r}, expected {expected}")


def _check_flag(where: str, name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise DTypeError(f"{where}: {name} is {value!r}, expected True or False")


# Inductor makes code that rounds otherwise, and codes differ. So a graph gets one operator for a quantiser, which runs
# what is above. It does not run the public function: where torch traces, that calls the operator.


def one_node(x: torch.Tensor) -> bool:
    """Whether a graph gets the operator. Subclasses know what torch's operations are to them, and not ours. Those that
    torch traces with are no subclasses of the user's."""
    return type(x) in PLAIN or isinstance(x, (FakeTensor, FunctionalTensor))


def _trace_int8(x: torch.Tensor, granularity: str, symmetric: bool) -> Pair | _Triple:
    _check_int8(x, granularity, symmetric)
    if one_node(x):
        return _INT8(x.detach(), granularity) if symmetric else _INT8_ZERO(x.detach(), granularity)
    q, scale, zero = int8_anew(x, granularity, symmetric)
    return (q, scale) if zero is None else (q, scale, zero)


def _trace_fp8(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    _check_fp8(x, granularity, dtype)
    return _FP8(x.detach(), granularity, dtype) if one_node(x) else fp8_anew(x, granularity, dtype)


def results_like(x: torch.Tensor, k: int, granularity: str, dtype: torch.dtype) -> Pair:
    """Codes and scales for rows of K values, as many as x has rows, with nothing in them."""
    lead = x.shape[:-1]
    scale = x.new_empty(_scale_shape(lead, k, granularity), dtype=torch.float32)
    return x.new_empty((*lead, k), dtype=dtype), scale


def _int8_in_graphs(x: torch.Tensor, granularity: str) -> Pair:
    return (kernels.repeated(x, "int8", granularity) or int8_anew(x, granularity, True))[:2]


def _int8_zero_in_graphs(x: torch.Tensor, granularity: str) -> kernels.Results:
    return kernels.repeated(x, "int8_zero", granularity) or int8_anew(x, granularity, False)


def _fp8_in_graphs(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    again = kernels.repeated(x, name_of(dtype), granularity)
    return fp8_anew(x, granularity, dtype) if again is None else again[:2]


def _int8_like(x: torch.Tensor, granularity: str) -> Pair:
    return results_like(x, x.size(-1), granularity, torch.int8)


def _int8_zero_like(x: torch.Tensor, granularity: str) -> _Triple:
    q, scale = _int8_like(x, granularity)
    return q, scale, torch.empty_like(scale, dtype=torch.int32)


def _fp8_like(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    return results_like(x, x.size(-1), granularity, dtype)


_INT8: Callable[..., Pair] = define(
    "quantize_int8",
    "(Tensor x, str granularity) -> (Tensor, Tensor)",
    _int8_in_graphs,
    _int8_like,
)
_INT8_ZERO: Callable[..., _Triple] = define(
    "quantize_int8_asymmetric",
    "(Tensor x, str granularity) -> (Tensor, Tensor, Tensor)",
    _int8_zero_in_graphs,
    _int8_zero_like,
)
_FP8: Callable[..., Pair] = define(
    "quantize_fp8",
    "(Tensor x, str granularity, ScalarType dtype) -> (Tensor, Tensor)",
    _fp8_in_graphs,
    _fp8_like,
)
