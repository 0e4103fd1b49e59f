"""Quantisers on a GPU: tensors to a compiled kernel and its launch. Arguments are checked by those who call."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from ...core.dtypes import BY_NAME, name_of
from ...core.errors import DeviceError
from ...core.problem import SIZE_LIMIT
from . import gpu
from .jit import KernelSpec, nvrtc
from .jit.loader import is_loaded, load
from .launch import Launcher, raw_stream
from .quant_source import OLDEST, Shape, Variant, rows, spec, tensor, tiles

_PLANS = 4096  # that are remembered
_ROWS, _TILES, _TENSOR = "PPPPPPqqqif", "PPPqii", "PPPPPqqqi4x"  # struct Arguments of each kernel
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def usable(x: Tensor) -> bool:
    """Whether kernels take this tensor. If not, torch's own operations compute the same: on another device, for a GPU
    that is too old or has no compiler here, for sizes past the limit, and where somebody looks at what torch does (a
    tracer, a mode, a transform, a subclass)."""
    if torch.compiler.is_compiling() or not x.is_cuda or type(x) not in _PLAIN or x.numel() == 0:
        return False
    seen = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if seen or torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
        return False
    k = x.size(-1)
    return k <= SIZE_LIMIT and x.numel() // k <= SIZE_LIMIT and architecture(x.device.index) is not None


@cache
def architecture(index: int) -> str | None:
    """What kernels are compiled for on that GPU; None if they cannot be."""
    major, minor = gpu.of(index).capability
    if torch.version.cuda is None or (major, minor) < OLDEST:
        return None
    # Code for an older minor of the same major runs as well.
    fitting = [one for one in nvrtc.architectures() if one // 10 == major and one % 10 <= minor]
    return f"sm_{max(fitting)}" if fitting else None


def quantize(
    x: Tensor,
    codec: str,
    granularity: str,
    *,
    source: str = "plain",
    weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of x's shape (with swiglu, half as wide), the scales and, for int8_zero, the zero points."""
    k = x.size(-1) // (2 if source == "swiglu" else 1)
    shape = _scale_shape(x.shape[:-1], k, granularity)
    codes = x.new_empty((*x.shape[:-1], k), dtype=torch.int8 if codec == "int8_zero" else BY_NAME[codec])
    scale = x.new_empty(shape, dtype=torch.float32)
    zero = x.new_empty(shape, dtype=torch.int32) if codec == "int8_zero" else None
    write(codes, scale, zero, x, codec, granularity, source=source, weight=weight, eps=eps, residual=residual)
    return codes, scale, zero


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
    matrix = _matrix(x.detach())
    if granularity == "tensor":
        _tensor(matrix, codec, codes, scale, zero)
    elif granularity == "128x128":
        _tiles(matrix, x.size(-2), codec, codes, scale)
    else:
        _rows(matrix, codes.size(-1), codec, granularity, source, codes, scale, zero, weight, eps, residual)
    return None


def _matrix(x: Tensor) -> Tensor:
    """x as rows whose values lie side by side: a copy only if its strides do not allow it."""
    flat = x.reshape(-1, x.size(-1))
    return flat if flat.stride(1) == 1 or flat.size(1) == 1 else flat.contiguous()


def _pitch(matrix: Tensor) -> int:
    """Bytes from row to row."""
    return matrix.stride(0) * matrix.element_size() if matrix.size(0) > 1 else 0


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


def _rows(
    matrix: Tensor,
    k: int,
    codec: str,
    granularity: str,
    source: str,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> None:
    m, index = matrix.size(0), matrix.device.index
    read = [matrix]
    if weight is not None:
        weight = weight.detach().contiguous()
        read.append(weight.unsqueeze(0))
    added = None if residual is None else _matrix(residual.detach())
    if added is not None:
        read.append(added)
    variant = Variant(source, name_of(matrix.dtype), codec, granularity, _aligned(k, *read))
    launch = _rows_plan(variant, m, k, index)
    launch(
        raw_stream(index),
        (),
        matrix.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if added is None else added.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        0 if zero is None else zero.data_ptr(),
        m,
        _pitch(matrix),
        0 if added is None else _pitch(added),
        k,
        eps,
    )
    if residual is not None and added is not None:
        if added.data_ptr() != residual.data_ptr():
            residual.detach().copy_(added.view(residual.shape))
        elif not residual.is_inference():
            torch.autograd.graph.increment_version(residual)


def _tiles(matrix: Tensor, m: int, codec: str, codes: Tensor, scale: Tensor) -> None:
    k, index = matrix.size(1), matrix.device.index
    variant = Variant("plain", name_of(matrix.dtype), codec, "128x128", _aligned(k, matrix))
    launch = _tiles_plan(variant, m, k, matrix.size(0) // m, index)
    pointers = matrix.data_ptr(), codes.data_ptr(), scale.data_ptr()
    launch(raw_stream(index), (), *pointers, _pitch(matrix), m, k)


def _tensor(matrix: Tensor, codec: str, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    index = matrix.device.index
    if matrix.is_contiguous():
        matrix = matrix.view(1, -1)
    m, k = matrix.shape
    variant = Variant("plain", name_of(matrix.dtype), codec, "tensor", _aligned(k, matrix))
    measure, convert, parts = _tensor_plans(variant, m, k, index)
    # From torch's allocator and for this call alone, so that calls on several streams do not meet.
    workspace = matrix.new_empty(3 * parts, dtype=torch.int32)
    values = (
        matrix.data_ptr(),
        workspace.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        0 if zero is None else zero.data_ptr(),
        m,
        k,
        _pitch(matrix),
        parts,
    )
    stream = raw_stream(index)
    measure(stream, (), *values)
    convert(stream, (), *values)


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
    if torch.cuda.is_current_stream_capturing() and not is_loaded(wanted, index, 0):
        raise DeviceError(
            f"quantisers: the kernel {wanted.name} is not compiled yet, and a CUDA graph is being captured; call the "
            f"quantiser once with such a tensor before the capture"
        )
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
