"""Operands, the exact result and the check that the GPU's fp8 tests share."""

from __future__ import annotations

import torch
from torch import Tensor

from omnigemm.backends.cuda import dense, gpu, sm90
from omnigemm.core.problem import Problem

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = {
    "block": ("1x128", "128x128"),
    "1x128": ("1x128", "1x128"),
    "token": ("token", "channel"),
    "tensor": ("tensor", "tensor"),
}
_NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
_OUTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# One of each kind: both orientations, one and two warpgroups and waves, every depth, clusters that share and split.
CONFIGS = {
    "rows 64x96": sm90.Config(False, 1, 1, 96, 6),
    "rows 128x144": sm90.Config(False, 2, 1, 144, 4),
    "rows 128x192 shared": sm90.Config(False, 2, 1, 192, 4, right_share=2, band=3),
    "rows 256x128 shared": sm90.Config(False, 2, 2, 128, 3, left_share=2),
    "rows 64x40 split 5": sm90.Config(False, 1, 1, 40, 8, split=5, depth=4),
    "rows 64x32 split 2": sm90.Config(False, 1, 1, 32, 6, split=2, depth=2, blocks_per_sm=2, fetch=128),
    "rows 128x72 split 4": sm90.Config(False, 2, 1, 72, 6, split=4),
    "rows 128x88 split 2": sm90.Config(False, 2, 1, 88, 5, split=2),  # 5 and 6 groups of columns
    "rows 128x64 split 2 shared": sm90.Config(False, 2, 1, 64, 5, split=2, left_share=2),
    "swap 8 split 8": sm90.Config(True, 1, 1, 8, 8, split=8, depth=4, blocks_per_sm=2),
    "swap 16 split 3": sm90.Config(True, 1, 1, 16, 6, split=3, depth=4, right_share=2, fetch=128),
    "swap 32 shared weights": sm90.Config(True, 1, 1, 32, 6, split=3, depth=4, left_share=2, blocks_per_sm=2),
    "swap 64 shared": sm90.Config(True, 1, 1, 64, 6, split=2, depth=2, right_share=4, blocks_per_sm=2),
    "swap 128": sm90.Config(True, 1, 1, 128, 4, depth=2),
    "swap 128x128": sm90.Config(True, 2, 1, 128, 4, split=2, right_share=2),
}


def problem(
    m: int,
    n: int,
    k: int,
    kind: str = "block",
    out: str = "bf16",
    a: torch.dtype = E4M3,
    b: torch.dtype = E4M3,
    bias: bool = False,
) -> Problem:
    a_scale, b_scale = SCALES[kind]
    return Problem("fp8_gemm", m, n, k, _NAMES[a], _NAMES[b], out, a_scale=a_scale, b_scale=b_scale, bias=bias)


def guarded(*shape: int) -> Tensor:
    """Random scales with NaN before and behind them: whatever is read outside shows."""
    count = int(torch.Size(shape).numel())
    room = torch.full((count + 128,), float("nan"), device="cuda")
    scale = room[64 : 64 + count].view(shape)
    return scale.copy_(torch.rand(shape, device="cuda") + 0.5)


def operands(made: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    types = {name: dtype for dtype, name in _NAMES.items()}
    blocks = -(-made.k // 128)
    scales = {
        "1x128": lambda rows: guarded(rows, blocks),
        "128x128": lambda rows: guarded(-(-rows // 128), blocks),
        "token": guarded,
        "channel": guarded,
        "tensor": lambda rows: guarded(1),
    }
    return (
        torch.randn(made.m, made.k, device="cuda").to(types[made.a_dtype]),
        torch.randn(made.n, made.k, device="cuda").to(types[made.b_dtype]),
        scales[made.a_scale](made.m),
        scales[made.b_scale](made.n),
        torch.randn(made.n, device="cuda") if made.bias else None,
    )


def exact(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        if scale.dim() == 2:
            rows = scale.double().repeat_interleave(1 if scale.size(0) == x.size(0) else 128, 0)[: x.size(0)]
            return x.double() * rows.repeat_interleave(128, 1)[:, : x.size(1)]
        return x.double() * scale.double().reshape(-1, 1)

    result = scaled(a, a_scale) @ scaled(b, b_scale).t()
    return result if bias is None else result + bias.double()


def close(result: Tensor, given: tuple[Tensor | None, ...]) -> None:
    """One rounding of the output. Inside a block of 128, Hopper's tensor cores align fp8 products to some 13 bits."""
    a, b, a_scale, b_scale, bias = given
    assert a is not None
    assert b is not None
    assert a_scale is not None
    assert b_scale is not None
    want = exact(a, b, a_scale, b_scale, bias)
    size = exact(a.float().abs(), b.float().abs(), a_scale, b_scale)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[result.dtype]
    error = (result.double() - want).abs()
    assert bool((error <= want.abs() * rounding + size * 2**-12).all()), f"worst {float((error / size).max()):.2e}"
    assert float((result.double() - want).norm() / want.norm()) < max(0.0025, rounding)


def run(config: sm90.Config, made: Problem) -> None:
    """Compute with that config, into a frame of NaN, and compare."""
    given = operands(made)
    # Rows of the frame begin at multiples of 16 bytes whatever N is, so that the kernel itself writes into it.
    frame = torch.full((made.m + 2, -(-made.n // 8) * 8 + 8), float("nan"), device="cuda", dtype=_OUTS[made.out_dtype])
    launch = dense.Launch(made, config, 0, gpu.of(0).multiprocessors)
    assert launch._loaded.local_bytes == 0, "registers are spilled"
    launch(frame[1:-1, : made.n], *given)
    close(frame[1:-1, : made.n], given)
    assert bool(frame[0].isnan().all())
    assert bool(frame[-1].isnan().all())
    assert bool(frame[:, made.n :].isnan().all())


def fits(config: sm90.Config, made: Problem) -> bool:
    return dense.variant_of(made).fault(config) is None
