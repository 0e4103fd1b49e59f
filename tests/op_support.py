"""What the operation tests share: sample operands, guarded outputs, and measures of error."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from omnigemm import Int4Weight
from omnigemm.ops._recent import recent_calls
from omnigemm.ops._run import calls

NAN = float("nan")
SENTINEL = -776.0  # exact in every output type
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# (M, N, K): empty, single and odd sizes, and both sides of the usual tile edges.
SHAPES = (
    (0, 3, 5),
    (3, 0, 5),
    (3, 5, 0),
    (0, 0, 0),
    (1, 1, 1),
    (1, 257, 33),
    (2, 1, 127),
    (3, 7, 2),
    (5, 9, 1),
    (7, 3, 129),
    (16, 16, 16),
    (17, 33, 64),
    (33, 17, 255),
    (64, 1, 16),
    (127, 2, 257),
    (128, 129, 17),
    (257, 127, 128),
)
LAYOUTS = ("plain", "rows", "columns", "transposed", "steps")
# Operands may also lie so that their elements share memory, as expanded ones do: the strides of rows and columns.
SHARING = {"one row": (0, 1), "one column": (1, 0), "one value": (0, 0), "sliding": (1, 1)}
READ_LAYOUTS = (*LAYOUTS, *SHARING)


class Watch(TorchDispatchMode):
    """Takes down what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class WatchFunctions(TorchFunctionMode):
    """The same, one layer further out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def forget_calls() -> None:
    """The next call is checked and planned, as the first in a process is."""
    calls.clear()
    recent_calls.clear()


# ------------------------------------------------------------------------------------------------ operands


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def int8s(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def fp8s(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).to(dtype)


def scales(*shape: int) -> Tensor:
    """Positive, with all the bits of fp32."""
    return torch.rand(shape) * 0.9 + 0.1


# How A's and B's scales may be laid out together.
GRANULARITIES = (
    ("tensor", "tensor"),
    ("tensor", "row"),
    ("row", "tensor"),
    ("row", "row"),
    ("1x128", "128x128"),
    ("1x128", "1x128"),
)


def fp8_scales(kind: str, rows: int, k: int, lead: tuple[int, ...] = ()) -> Tensor:
    """Scales of a [*lead, rows, k] operand."""
    columns = -(-k // 128)
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (),
        "group": lead,
        "row": (*lead, rows),
        "1x128": (*lead, rows, columns),
        "128x128": (*lead, -(-rows // 128), columns),
    }
    return scales(*shapes[kind])


def indices(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _window(shape: Sequence[int], layout: str, make: Callable[[Sequence[int]], Tensor]) -> tuple[Tensor, Tensor]:
    """A buffer larger than `shape` and the part of it that has this shape and layout."""
    *lead, m, n = shape
    if layout == "plain":  # contiguous, with memory before and after
        size = 1
        for one in shape:
            size *= one
        buffer = make([size + 128])
        return buffer, buffer[64 : 64 + size].view(tuple(shape))
    lead = [one + 2 for one in lead]
    if layout == "rows":
        buffer = make([*lead, m + 3, n])
        window = buffer[..., 1 : 1 + m, :]
    elif layout == "columns":
        buffer = make([*lead, m, n + 5])
        window = buffer[..., 2 : 2 + n]
    elif layout == "transposed":
        buffer = make([*lead, n + 3, m + 2])
        window = buffer.transpose(-1, -2)[..., 1 : 1 + m, 2 : 2 + n]
    else:
        buffer = make([*lead, 2 * m + 1, 3 * n + 2])
        window = buffer[..., 1::2, 2::3]
    return buffer, window[1:-1] if lead else window


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides, inside a buffer of NaN (or the largest integer).

    Where elements share memory, they are not the same any more: compare with what is returned.
    """
    if layout in SHARING:
        *lead, m, n = x.shape
        line = x.reshape(*lead, m * n)[..., : max(0, m + n - 1)].contiguous()
        return line.as_strided(x.shape, (*line.stride()[:-1], *SHARING[layout]))
    filler = NAN if x.is_floating_point() else 127
    view = _window(x.shape, layout, lambda shape: torch.full(tuple(shape), filler).to(x.dtype))[1]
    view.copy_(x)
    return view


def guarded(shape: Sequence[int], dtype: torch.dtype, layout: str = "columns") -> tuple[Tensor, Callable[[], None]]:
    """An output full of NaN inside a buffer of sentinels, and the check that only it was written."""
    buffer, out = _window(shape, layout, lambda size: torch.full(tuple(size), SENTINEL, dtype=dtype))
    mine, window = _window(shape, layout, lambda size: torch.zeros(tuple(size), dtype=torch.bool))
    window.fill_(True)
    out.fill_(NAN)

    def check() -> None:
        assert bool((buffer[~mine] == SENTINEL).all()), "memory outside of out was written"

    return out, check


def int4_weight(
    n: int,
    k: int,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    experts: int | None = None,
) -> Int4Weight:
    """Random values, scales and zero points; group 0 means the whole of K. Act-order has padding where it may."""
    size = group or max(k, 1)
    width, perm = k, None
    if act_order:
        if group:
            width = (-(-k // group) + 1) * group  # a whole group more than is needed
        order = [*range(k), *([-1] * (width - k))]
        perms: list[Tensor] = []
        for _ in range(experts or 1):
            random.Random(n + k + len(perms)).shuffle(order)
            perms.append(indices(order))
        perm = perms[0] if experts is None else torch.stack(perms)
    lead = () if experts is None else (experts,)
    groups = -(-width // size)
    q = torch.randint(0, 256, (*lead, n, (width + 1) // 2), dtype=torch.uint8)
    scale = ((torch.rand(*lead, n, groups) + 0.5) / 16).to(dtype)
    zeros = None if symmetric else torch.randint(0, 17, (*lead, n, groups), dtype=torch.uint8)
    return Int4Weight(q, scale, zeros, perm, k=k, group_size=size)


def dequantized(w: Int4Weight) -> Tensor:
    """float64 [N, K] or [E, N, K], by the reference."""
    if w.experts is not None:
        return torch.stack([dequantized(w[e]) for e in range(w.experts)])
    return reference.int4_weight(w.qweight, w.scales, w.zeros, w.perm, w.k, w.group_size)


# ------------------------------------------------------------------------------------------------- measures


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` around float64 x."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x)[1].to(torch.float64) - 1
    lowest = torch.frexp(torch.tensor(info.tiny, dtype=torch.float64))[1].item() - 1
    exponent = torch.where(x == 0, float(lowest), exponent).clamp(min=lowest)
    return torch.exp2(exponent) * info.eps


def roundings(result: Tensor, exact: Tensor) -> float:
    """The largest distance in ulps of the result's type; a correct rounding has 0.5. Infinities and NaN must agree."""
    assert result.shape == exact.shape
    expected = exact.to(result.dtype)
    special = ~expected.isfinite()
    torch.testing.assert_close(result[special], expected[special], rtol=0, atol=0, equal_nan=True)
    ordinary, goal = result[~special].to(torch.float64), exact[~special]
    assert bool(ordinary.isfinite().all())
    return float(((ordinary - goal).abs() / ulp(goal, result.dtype)).max()) if goal.numel() else 0.0


# Three fp32 steps and one rounding to 16 bits stay below this; a second rounding to 16 bits would not.
ONE_ROUNDING = 0.501


def assert_accumulated(
    result: Tensor, exact: Tensor, magnitude: Tensor, k: int, operand_eps: float = 0.0, roundings: float = 0.5
) -> None:
    """Within the bound of fp32 accumulation in any order plus one rounding of the output.

    `magnitude` is the same sum over absolute values; `operand_eps` allows for operands that are rounded on the way.
    """
    assert result.shape == exact.shape
    assert bool(result.isfinite().all())
    slack = ((k + 8) * 2.0**-24 + operand_eps) * magnitude
    limit = roundings * ulp(exact.abs() + slack, result.dtype) + slack
    excess = (result.to(torch.float64) - exact).abs() - limit
    worst = float(excess.max()) if excess.numel() else 0.0
    assert worst <= 0, f"exceeds the bound by {worst}"


def assert_no_worse(result: Tensor, exact: Tensor, peer: Tensor, allowance: float = 0.0) -> None:
    """At most twice the peer's largest error; half a unit of the largest value is always allowed."""
    assert result.shape == exact.shape == peer.shape
    assert bool(result.isfinite().all())
    if not exact.numel():
        return
    mine = float((result.to(torch.float64) - exact).abs().max())
    theirs = float((peer.to(torch.float64) - exact).abs().max())
    allowed = 2 * theirs + 0.5 * float(ulp(exact.abs().max(), result.dtype)) + allowance
    assert mine <= allowed, f"error {mine}, torch's {theirs}"
