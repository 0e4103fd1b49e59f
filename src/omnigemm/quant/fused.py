"""What decoders compute right before a product, quantised in the same pass: RMSNorm and SwiGLU.

Both are in fp32 up to the codes, with no rounding to the input's type between. Below is what they mean, in torch; on
GPUs that kernels can be compiled for, those run instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..backends.cuda import quant as kernels
from ..core.dtypes import FP8, name_of
from ..core.errors import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedError
from ..core.strided import need_strided
from ..ops._library import define
from ..ops.checks import need_all_distinct, need_number
from ..ops.overlap import overlaps_itself
from .formats.parts import dtype_names
from .nibbles import row_blocks
from .quantizers import (
    Pair,
    check_input,
    check_option,
    for_kernels,
    fp8_anew,
    in_memory,
    int8_anew,
    one_node,
    results_like,
)

_CHUNK = 1 << 18  # elements of a temporary

_Compute = Callable[[torch.Tensor], torch.Tensor]


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    granularity: str = "token",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension.

    With a residual, x is first added to it, in place: it then holds x + residual in x's dtype, and that is normalised.
    The result is that of `quantize_fp8` (per "token" or "1x128") or, with dtype int8, `quantize_int8` per token. A row
    whose sum of squares is not finite in fp32 has scale NaN and codes 0.
    """
    where = "rms_norm_quantize"
    if torch.compiler.is_compiling():
        return _trace_rms_norm(x, weight, eps, residual, granularity, dtype)
    codec = name_of(dtype) if isinstance(dtype, torch.dtype) else ""
    readable = in_memory(x, weight, residual)
    try:
        again = kernels.repeated(x, codec, granularity, "rms_norm", weight, eps, residual) if readable else None
    except RuntimeError:
        need_strided(where, x=x, weight=weight, residual=residual)
        raise
    if again is not None:
        return again[0], again[1]
    return _rms_norm_anew(x, weight, eps, residual, granularity, dtype)


def swiglu_quantize(
    x: torch.Tensor, *, granularity: str = "token", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of silu(gate) * up, where x is [.., 2F]: F gates, then F values. silu(g) = g / (1 + exp(-g)).

    The result is that of `quantize_fp8` (per "token" or "1x128") or, with dtype int8, `quantize_int8` per token.
    """
    if torch.compiler.is_compiling():
        return _trace_swiglu(x, granularity, dtype)
    codec = name_of(dtype) if isinstance(dtype, torch.dtype) else ""
    try:
        again = kernels.repeated(x, codec, granularity, "swiglu") if in_memory(x) else None
    except RuntimeError:
        check_input("swiglu_quantize", "x", x)
        raise
    return _swiglu_anew(x, granularity, dtype) if again is None else (again[0], again[1])


def _rms_norm_anew(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    granularity: str,
    dtype: torch.dtype,
) -> Pair:
    """What `rms_norm_quantize` gives where no call like it is remembered."""
    _check_rms_norm(x, weight, eps, residual, granularity, dtype)
    if for_kernels(x, weight, residual):
        return kernels.quantize(
            x, name_of(dtype), granularity, source="rms_norm", weight=weight, eps=eps, residual=residual
        )[:2]
    x, weight = x.detach(), weight.detach()
    if residual is not None:
        x = residual.detach().copy_(x + residual.detach())
    return _quantize(_rms_norm(x, weight, eps), granularity, dtype)


def _swiglu_anew(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    """What `swiglu_quantize` gives where no call like it is remembered."""
    _check_swiglu(x, granularity, dtype)
    if for_kernels(x):
        return kernels.quantize(x, name_of(dtype), granularity, source="swiglu")[:2]
    return _quantize(_swiglu(x.detach()), granularity, dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    def norm(v: torch.Tensor) -> torch.Tensor:
        # In fp64, so that this is the sum's nearest fp32 number; other implementations come near it.
        total = v.double().square().sum(-1, keepdim=True).float()
        # By a tensor: on a GPU, torch multiplies by the reciprocal of a number.
        scale = torch.ones_like(total) / (total / torch.full_like(total, v.size(-1)) + eps).sqrt()
        return v.float() * torch.where(total.isfinite(), scale, math.nan) * weight.float()

    return _by_rows(norm, x, x.size(-1))


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    def glu(v: torch.Tensor) -> torch.Tensor:
        gate, up = v.float().chunk(2, -1)
        return gate / (1.0 + torch.exp(-gate)) * up

    return _by_rows(glu, x, x.size(-1) // 2)


def _by_rows(compute: _Compute, x: torch.Tensor, width: int) -> torch.Tensor:
    """compute(rows of x), in fp32 and with that many columns, for parts of x that stay in a core's cache."""
    shape = (*x.shape[:-1], width)
    if torch.compiler.is_compiling() or x.numel() <= _CHUNK or x.device.type != "cpu":
        return compute(x).reshape(shape)
    rows = x.reshape(-1, x.size(-1))
    out = torch.empty(rows.size(0), width, dtype=torch.float32, device=x.device)
    for part in row_blocks(rows.size(0), rows.size(1), _CHUNK):
        out[part] = compute(rows[part])
    return out.reshape(shape)


def _quantize(values: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    if dtype == torch.int8:
        return int8_anew(values, granularity, True)[:2]
    return fp8_anew(values, granularity, dtype)


def _check_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    granularity: str,
    dtype: torch.dtype,
) -> None:
    where = "rms_norm_quantize"
    check_input(where, "x", x)
    _check_form(where, granularity, dtype)
    _check_eps(where, eps)
    _check_like(where, "weight", weight, x, (x.size(-1),))
    if residual is not None:
        _check_like(where, "residual", residual, x, tuple(x.shape))
        _check_own_memory(where, residual, x, weight)


def _check_swiglu(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> None:
    where = "swiglu_quantize"
    check_input(where, "x", x)
    _check_form(where, granularity, dtype)
    if x.size(-1) % 2:
        raise ShapeError(f"{where}: x has shape {tuple(x.shape)}, expected an even last dimension: gates, then values")


def _check_form(where: str, granularity: str, dtype: torch.dtype) -> None:
    if dtype not in (*FP8, torch.int8):
        raise DTypeError(f"{where}: dtype is {dtype}, expected {dtype_names((*FP8, torch.int8))}")
    check_option(where, "granularity", granularity, ("token", "1x128"))
    if dtype == torch.int8 and granularity != "token":
        raise UnsupportedError(f"{where}: granularity is {granularity!r} with dtype torch.int8, expected 'token'")


def _check_eps(where: str, eps: float) -> None:
    if not 0.0 <= need_number(where, "eps", eps) < math.inf:
        raise UnsupportedError(f"{where}: eps is {eps}, expected a finite number >= 0")


def _check_like(where: str, name: str, tensor: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{where}: {name} is a {type(tensor).__name__}, expected a torch.Tensor")
    need_strided(where, **{name: tensor})
    if tensor.dtype != x.dtype:
        raise DTypeError(f"{where}: {name} has dtype {tensor.dtype}, expected {x.dtype} like x")
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{where}: {name} has shape {tuple(tensor.shape)}, expected {shape} for x {tuple(x.shape)}")
    if tensor.device != x.device:
        raise DeviceError(f"{where}: {name} is on {tensor.device}, expected {x.device} like x")


def _check_own_memory(where: str, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """What is written shares no memory with what is read, or with itself."""
    if not torch.compiler.is_compiling():  # where tensors have no address, and Dynamo sorts no symbols
        _check_apart_in_itself(where, residual)
        need_all_distinct(where, {"residual": residual}, {"x": x, "weight": weight})
    elif residual is x:
        raise LayoutError(f"{where}: residual shares memory with x, expected memory of its own")


def _check_apart_in_itself(where: str, residual: torch.Tensor) -> None:
    if overlaps_itself(residual):
        strides = tuple(residual.stride())
        raise LayoutError(f"{where}: residual has strides {strides}, expected memory of its own for every element")


# As operators of graphs, like the quantisers without anything before them.


def _trace_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    granularity: str,
    dtype: torch.dtype,
) -> Pair:
    _check_rms_norm(x, weight, eps, residual, granularity, dtype)
    if not one_node(x):
        return _rms_norm_anew(x, weight, eps, residual, granularity, dtype)
    added = None if residual is None else residual.detach()
    return _RMS_NORM(x.detach(), weight.detach(), float(eps), added, granularity, dtype)


def _trace_swiglu(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    _check_swiglu(x, granularity, dtype)
    return _SWIGLU(x.detach(), granularity, dtype) if one_node(x) else _swiglu_anew(x, granularity, dtype)


def _rms_norm_in_graphs(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    granularity: str,
    dtype: torch.dtype,
) -> Pair:
    again = kernels.repeated(x, name_of(dtype), granularity, "rms_norm", weight, eps, residual)
    return _rms_norm_anew(x, weight, eps, residual, granularity, dtype) if again is None else again[:2]


def _swiglu_in_graphs(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    again = kernels.repeated(x, name_of(dtype), granularity, "swiglu")
    return _swiglu_anew(x, granularity, dtype) if again is None else again[:2]


def _rms_norm_like(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    granularity: str,
    dtype: torch.dtype,
) -> Pair:
    if residual is not None:
        _check_apart_in_itself("rms_norm_quantize", residual)
    return results_like(x, x.size(-1), granularity, dtype)


def _swiglu_like(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> Pair:
    return results_like(x, x.size(-1) // 2, granularity, dtype)


_RMS_NORM: Callable[..., Pair] = define(
    "rms_norm_quantize",
    "(Tensor x, Tensor weight, float eps, Tensor(a!)? residual, str granularity, ScalarType dtype) -> (Tensor, Tensor)",
    _rms_norm_in_graphs,
    _rms_norm_like,
)
_SWIGLU: Callable[..., Pair] = define(
    "swiglu_quantize",
    "(Tensor x, str granularity, ScalarType dtype) -> (Tensor, Tensor)",
    _swiglu_in_graphs,
    _swiglu_like,
)
