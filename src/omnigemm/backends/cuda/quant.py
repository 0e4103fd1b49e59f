"""Quantisers on a GPU: tensors to a compiled kernel and its launch. Arguments are checked by those who call."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.dtypes import BY_NAME, name_of
from ...core.errors import DeviceError
from ...core.fresh import bytes_on, empty_strided_cuda
from ...core.problem import SIZE_LIMIT
from ...core.settings import current
from ...core.watched import watched
from . import gpu, jit
from .jit import KernelSpec, nvrtc
from .jit.loader import check_capture, load
from .launch import Launcher, raw_stream
from .quant_source import OLDEST, Shape, Variant, rows, spec, tensor, tiles

_PLANS = 4096  # that are remembered, and calls
_ROWS, _TILES, _TENSOR = "PPPPPPqqqifi4x", "PPPqii", "PPPPPqqqi4x"  # struct Arguments of each kernel
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

Results = tuple[Tensor, Tensor, Tensor | None]  # codes, scales and, for int8_zero, zero points
_Run = Callable[[Tensor, Tensor | None, float, Tensor | None], Results | None]
_Fill = Callable[[int, int, int, int, int, int, float], None]  # addresses: codes, scale, zero, x, weight, residual; eps

_calls: dict[tuple[Any, ...], _Run] = {}


def usable(x: Tensor) -> bool:
    """Whether kernels take this tensor. If not, torch's own operations compute the same: on another device, for a GPU
    that is too old or has no compiler or no fitting driver here, for sizes past the limit, and where somebody looks at
    what torch does (a tracer, a mode, a transform, a subclass)."""
    if torch.compiler.is_compiling() or not x.is_cuda or type(x) not in _PLAIN or x.numel() == 0 or watched():
        return False
    k = x.size(-1)
    return k <= SIZE_LIMIT and x.numel() // k <= SIZE_LIMIT and architecture(x.device.index) is not None


@cache
def architecture(index: int) -> str | None:
    """What kernels are compiled for on that GPU; None if they cannot be, or not be loaded."""
    major, minor = gpu.of(index).capability
    if torch.version.cuda is None or (major, minor) < OLDEST or not jit.available() or jit.driver_fault():
        return None
    # Code for an older minor of the same major runs as well.
    fitting = [one for one in nvrtc.architectures() if one // 10 == major and one % 10 <= minor]
    return f"sm_{max(fitting)}" if fitting else None


def repeated(
    x: Tensor,
    codec: str,
    granularity: str,
    source: str = "plain",
    weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Results | None:
    """What a call gives that is like an earlier one, whose arguments were found good. None: look at it from the start.

    Public functions ask this first, with their arguments as they are."""
    if torch.compiler.is_compiling() or watched():
        return None
    try:
        run = _calls[_key(x, codec, granularity, source, weight, residual)]
    except (KeyError, AttributeError, TypeError):  # unknown, or not even tensors
        return None
    return run(x, weight, eps, residual)


def _key(
    x: Tensor, codec: str, granularity: str, source: str, weight: Tensor | None, residual: Tensor | None
) -> tuple[Any, ...]:
    """All that checks and kernels depend on, except data and where it overlaps."""
    about = codec, granularity, source, type(x), x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16
    return about if weight is None else (about, _about(weight), None if residual is None else _about(residual))


def _about(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16


def quantize(
    x: Tensor,
    codec: str,
    granularity: str,
    *,
    source: str = "plain",
    weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Results:
    """Codes of x's shape (with swiglu, half as wide), and what belongs to them. The call is remembered."""
    k = x.size(-1) // (2 if source == "swiglu" else 1)
    shape = _scale_shape(x.shape[:-1], k, granularity)
    codes = x.new_empty((*x.shape[:-1], k), dtype=_code_type(codec))
    scale = x.new_empty(shape, dtype=torch.float32)
    zero = x.new_empty(shape, dtype=torch.int32) if codec == "int8_zero" else None
    write(codes, scale, zero, x, codec, granularity, source=source, weight=weight, eps=eps, residual=residual)
    if x.is_cuda and empty_strided_cuda is not None:
        run = prepared(codes, scale, x, codec, granularity, source, weight, residual)
        if run is not None:
            if len(_calls) >= _PLANS:
                _calls.clear()
            _calls[_key(x, codec, granularity, source, weight, residual)] = run
    return codes, scale, zero


def prepared(
    codes: Tensor,
    scale: Tensor,
    x: Tensor,
    codec: str,
    granularity: str,
    source: str,
    weight: Tensor | None,
    residual: Tensor | None,
) -> _Run | None:
    """`quantize` for tensors that lie like these and results like those; None where something must be copied first. It
    answers None to those that it cannot vouch for: on another device than the current one, or with a residual that
    may share memory with what is read."""
    matrix, factors, added = _operands(x, weight, residual)
    for given, used in ((x, matrix), (weight, factors), (residual, added)):
        if given is not None and used is not None and given.data_ptr() != used.data_ptr():
            return None
    fill = _bind(matrix, x.shape, codec, granularity, source, factors, added)
    shape, strides, dtype = tuple(codes.shape), codes.stride(), codes.dtype
    scale_shape, scale_strides = tuple(scale.shape), scale.stride()
    has_zero = codec == "int8_zero"
    sizes = [0 if one is None else _reach(one) for one in (matrix, factors, added)]
    index, current_device = x.device.index, torch._C._cuda_getDevice

    def run(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None) -> Results | None:
        if current_device() != index or type(eps) is not float or not 0.0 <= eps < math.inf:
            return None
        at, weight_at, residual_at = x.data_ptr(), 0, 0
        if weight is not None:
            weight_at = weight.data_ptr()
        if residual is not None:
            residual_at = residual.data_ptr()
            end = residual_at + sizes[2]
            apart = (end <= at or at + sizes[0] <= residual_at) and (
                end <= weight_at or weight_at + sizes[1] <= residual_at
            )
            if not apart:
                return None
        codes = empty_strided_cuda(shape, strides, dtype)
        scale = empty_strided_cuda(scale_shape, scale_strides, torch.float32)
        zero, zero_at = None, 0
        if has_zero:
            zero = empty_strided_cuda(scale_shape, scale_strides, torch.int32)
            zero_at = zero.data_ptr()
        fill(codes.data_ptr(), scale.data_ptr(), zero_at, at, weight_at, residual_at, eps)
        if residual is not None:
            _changed(residual)
        return codes, scale, zero

    return run


def write(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    x: Tensor,
    codec: str,
    granularity: str,
    *,
    source: str = "plain",
    weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> None:
    """The same into tensors that are there, contiguous and at multiples of 16 bytes."""
    index = x.device.index
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return write(
                codes, scale, zero, x, codec, granularity, source=source, weight=weight, eps=eps, residual=residual
            )
    matrix, factors, added = _operands(x, weight, residual)
    copied = factors is not None and weight is not None and factors.data_ptr() != weight.data_ptr()
    fill = _bind(matrix, x.shape, codec, granularity, source, factors, added, copied)
    outputs = codes.data_ptr(), scale.data_ptr(), 0 if zero is None else zero.data_ptr()
    fill(
        *outputs,
        matrix.data_ptr(),
        0 if factors is None else factors.data_ptr(),
        0 if added is None else added.data_ptr(),
        eps,
    )
    if residual is not None and added is not None:
        if added.data_ptr() != residual.data_ptr():
            residual.detach().copy_(added.view(residual.shape))
        else:
            _changed(residual)
    return None


def _changed(residual: Tensor) -> None:
    if not residual.is_inference():
        torch.autograd.graph.increment_version(residual)


def _operands(x: Tensor, weight: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As matrices that kernels can read: copies where they could not."""
    factors = None if weight is None else weight.detach().contiguous().unsqueeze(0)
    return _matrix(x.detach()), factors, None if residual is None else _matrix(residual.detach())


def _code_type(codec: str) -> torch.dtype:
    return torch.int8 if codec == "int8_zero" else BY_NAME[codec]


def _matrix(x: Tensor) -> Tensor:
    """x as rows whose values lie side by side: a copy only if its strides do not allow it."""
    flat = x.reshape(-1, x.size(-1))
    return flat if flat.stride(1) == 1 or flat.size(1) == 1 else flat.contiguous()


def _pitch(matrix: Tensor) -> int:
    """Bytes from row to row."""
    return matrix.stride(0) * matrix.element_size() if matrix.size(0) > 1 else 0


def _reach(matrix: Tensor) -> int:
    """Bytes from the first to the last of it."""
    return (matrix.size(0) - 1) * _pitch(matrix) + matrix.size(1) * matrix.element_size()


def _aligned(k: int, *matrices: Tensor) -> bool:
    """Whether kernels may move 16 bytes at a time."""
    size = matrices[0].element_size()
    return k * size % 16 == 0 and not any((one.data_ptr() | _pitch(one)) % 16 for one in matrices)


def _scale_shape(lead: torch.Size, k: int, granularity: str) -> tuple[int, ...]:
    if granularity == "tensor":
        return ()
    if granularity == "token":
        return tuple(lead)
    if granularity == "1x128":
        return (*lead, -(-k // 128))
    return (*lead[:-1], -(-lead[-1] // 128), -(-k // 128))


def _bind(
    matrix: Tensor,
    shape: torch.Size,
    codec: str,
    granularity: str,
    source: str,
    factors: Tensor | None,
    added: Tensor | None,
    factors_copied: bool = False,
) -> _Fill:
    """The launch for matrices that lie like these; x had that shape. A copy of the weight is not read early: it has
    just been written."""
    index, pitch = matrix.device.index, _pitch(matrix)
    if granularity == "tensor" and matrix.is_contiguous():
        matrix = matrix.view(1, -1)
    m, k = matrix.size(0), matrix.size(1) // (2 if source == "swiglu" else 1)
    read = [one for one in (matrix, factors, added) if one is not None]
    aligned = _aligned(k, *read)
    variant = Variant(source, name_of(matrix.dtype), codec, granularity, aligned, added is not None)
    if granularity == "tensor":
        return _bind_tensor(variant, m, k, pitch, matrix.device)
    if granularity == "128x128":
        height = shape[-2]
        launch_tiles = _tiles_plan(variant, height, k, m // height, index)

        def fill_tiles(codes: int, scale: int, zero: int, x: int, weight: int, residual: int, eps: float) -> None:
            launch_tiles(raw_stream(index), (), x, codes, scale, pitch, height, k)

        return fill_tiles
    launch = _rows_plan(variant, m, k, index)
    added_pitch = 0 if added is None else _pitch(added)
    may_be_early = factors is not None and not factors_copied

    def fill(codes: int, scale: int, zero: int, x: int, weight: int, residual: int, eps: float) -> None:
        early = may_be_early and current().constant_weights
        launch(raw_stream(index), (), x, weight, residual, codes, scale, zero, m, pitch, added_pitch, k, eps, early)

    return fill


def _bind_tensor(variant: Variant, m: int, k: int, pitch: int, device: torch.device) -> _Fill:
    index = device.index
    measure, convert, parts = _tensor_plans(variant, m, k, index)
    own_memory = bytes_on(device, 12 * parts)  # three numbers for each

    def fill(codes: int, scale: int, zero: int, x: int, weight: int, residual: int, eps: float) -> None:
        # From torch's allocator and for this call alone, so that calls on several streams do not meet.
        workspace = own_memory()
        values = x, workspace.data_ptr(), codes, scale, zero, m, k, pitch, parts
        stream = raw_stream(index)
        measure(stream, (), *values)
        convert(stream, (), *values)

    return fill


@lru_cache(_PLANS)
def _rows_plan(variant: Variant, m: int, k: int, index: int) -> Launcher:
    shape = rows(variant, m, k)
    return _launcher(spec(variant, shape, _architecture(index)), shape, _ROWS, index)


@lru_cache(_PLANS)
def _tiles_plan(variant: Variant, m: int, k: int, batch: int, index: int) -> Launcher:
    shape = tiles(m, k, batch)
    return _launcher(spec(variant, shape, _architecture(index)), shape, _TILES, index)


@lru_cache(_PLANS)
def _tensor_plans(variant: Variant, m: int, k: int, index: int) -> tuple[Launcher, Launcher, int]:
    """The kernel that measures, the one that converts, and how many parts the first leaves to the second."""
    shape = tensor(variant, m, k, gpu.of(index).multiprocessors)
    both = [spec(variant, shape, _architecture(index), measure) for measure in (True, False)]
    # Both are checked before one of them is launched.
    measure, convert = [_launcher(one, shape, _TENSOR, index) for one in both]
    return measure, convert, shape.grid


def _architecture(index: int) -> str:
    arch = architecture(index)
    if arch is None:
        raise DeviceError(f"quantisers: cuda:{index} is {gpu.of(index)}, for which no kernel can be compiled here")
    return arch


def _launcher(wanted: KernelSpec, shape: Shape, values: str, index: int) -> Launcher:
    who = f"quantisers: the kernel {wanted.name}"
    check_capture(wanted, index, 0, who, "call the quantiser once with such a tensor")
    overlap = gpu.of(index).capability >= (9, 0)
    return Launcher(
        load(wanted, index).kernel,
        grid=shape.grid,
        threads=shape.threads,
        shared_bytes=0,
        cluster=1,
        matrices=(),
        values=values,
        overlap=overlap,
    )
