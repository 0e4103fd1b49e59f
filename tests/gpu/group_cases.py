"""Groups of rows, their exact results and the checks that the GPU's tests of grouped products share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from omnigemm.backends.cuda import gpu, groups, sm90
from omnigemm.core.problem import Problem

from . import fp8_cases
from .fp8_cases import E4M3, E5M2, guarded

BF16, FP16 = torch.bfloat16, torch.float16
SCALES = {**fp8_cases.SCALES, "none": ("none", "none")}
_NAMES = {E4M3: "e4m3", E5M2: "e5m2", torch.int8: "int8", BF16: "bf16", FP16: "fp16"}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
OUTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPS = {"contiguous": "grouped_gemm_contiguous", "masked": "grouped_gemm_masked"}

PINGPONG = sm90.Config(False, 2, 2, 128, 5, right_share=2, out_buffers=2, out_parts=2, pingpong=True)
# One of each kind: both orientations, one and two warpgroups and waves, every depth, clusters that share.
CONFIGS = {
    "swap 8": sm90.Config(True, 1, 1, 8, 6, depth=4, blocks_per_sm=3, fetch=128),
    "swap 16": sm90.Config(True, 1, 1, 16, 8, depth=4, blocks_per_sm=2),
    "swap 24": sm90.Config(True, 1, 1, 24, 8, depth=2),
    "swap 32x128": sm90.Config(True, 2, 1, 32, 6, depth=4),
    "swap 64": sm90.Config(True, 1, 1, 64, 6, depth=2, blocks_per_sm=2),
    "swap 64 shared weights": sm90.Config(True, 1, 1, 64, 6, depth=1, left_share=2),
    "swap 128 shared tokens": sm90.Config(True, 2, 1, 128, 4, right_share=2),
    "rows 64x96": sm90.Config(False, 1, 1, 96, 6),
    "rows 128x144": sm90.Config(False, 2, 1, 144, 4),
    "rows 128x128 shared weights": sm90.Config(False, 2, 1, 128, 4, right_share=2, band=3),
    "rows 128x192 shared rows": sm90.Config(False, 2, 1, 192, 4, left_share=2, band=16),
    "rows 256x128 shared rows": sm90.Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2),
    "rows 256x128 shared weights": sm90.Config(False, 2, 2, 128, 3, right_share=2),
    "pingpong shared weights": PINGPONG,
}
# The same for 16-bit operands, which have wider tiles besides.
CONFIGS_16 = {
    "swap 8": sm90.Config(True, 1, 1, 8, 6, depth=4, blocks_per_sm=3),
    "swap 32x128": sm90.Config(True, 2, 1, 32, 6, depth=4),
    "swap 64 shared weights": sm90.Config(True, 1, 1, 64, 6, depth=2, left_share=2),
    "rows 64x128": sm90.Config(False, 1, 1, 128, 5),
    "rows 128x192 shared rows": sm90.Config(False, 2, 1, 192, 4, left_share=2, band=3),
    "rows 128x256 shared weights": sm90.Config(False, 2, 1, 256, 3, right_share=2, band=16),
    "rows 256x128 shared rows": sm90.Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2),
    "pingpong shared weights": PINGPONG,
    "pingpong shared rows": dataclasses.replace(PINGPONG, left_share=2, right_share=1, band=3),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Groups of so many rows; `capacity` is T or Mmax, and holds more than the groups need."""

    op: str
    sizes: tuple[int, ...]
    n: int
    k: int
    kind: str = "block"
    out: str = "bf16"
    a: torch.dtype = E4M3
    b: torch.dtype = E4M3
    spare: int = 5
    turned: bool = False  # weights that lie as [K, N]

    @property
    def masked(self) -> bool:
        return self.op == "masked"

    @property
    def capacity(self) -> int:
        return (max(self.sizes) if self.masked else sum(self.sizes)) + self.spare

    @property
    def problem(self) -> Problem:
        a_scale, b_scale = SCALES[self.kind]
        return Problem(
            OPS[self.op], self.capacity, self.n, self.k, _NAMES[self.a], _NAMES[self.b], self.out,
            groups=len(self.sizes), a_scale=a_scale, b_scale=b_scale, b_layout="col" if self.turned else "row",
        )  # fmt: skip

    def __str__(self) -> str:
        sizes = "+".join(map(str, self.sizes)) if len(self.sizes) < 12 else f"{len(self.sizes)} groups"
        types = f"{_NAMES[self.a]}-{_NAMES[self.b]}-{self.out}{'-turned' * self.turned}"
        return f"{self.op}-{sizes}x{self.n}x{self.k}-{self.kind}-{types}"


@dataclasses.dataclass(frozen=True)
class Given:
    """Operands; rows of no group hold NaN, as do the scales that belong to them."""

    case: Case
    a: Tensor
    b: Tensor
    groups: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return self.a, self.b, self.groups, self.a_scale, self.b_scale


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
    return torch.randn(shape, device="cuda").to(dtype)


def indices(case: Case, sizes: tuple[int, ...]) -> Tensor:
    found = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    return found if case.masked else found.cumsum(0, dtype=torch.int32)


def spans(case: Case, sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Each group with its first row, counted over all slabs, and the row behind its last."""
    found, last = [], 0
    for group, count in enumerate(sizes):
        first = group * case.capacity if case.masked else last
        last = first + count
        found.append((group, first, last))
    return found


def make(case: Case) -> Given:
    g, blocks = len(case.sizes), -(-case.k // 128)
    lead = (g, case.capacity) if case.masked else (case.capacity,)
    a, b = values((*lead, case.k), case.a), values((g, case.n, case.k), case.b)
    ours = torch.zeros(a.shape[:-1].numel(), dtype=torch.bool, device="cuda")
    for _, first, last in spans(case, case.sizes):
        ours[first:last] = True
    if case.kind == "none":
        a.view(ours.numel(), case.k)[~ours] = float("nan")
        b[torch.tensor(case.sizes, device="cuda") == 0] = float("nan")  # nobody's weights
        b = b.transpose(1, 2).contiguous().transpose(1, 2) if case.turned else b
        return Given(case, a, b, indices(case, case.sizes), None, None)
    a_kind, b_kind = SCALES[case.kind]
    a_scale = guarded(*{"1x128": (*lead, blocks), "token": lead, "tensor": ()}[a_kind])
    b_shape = {"128x128": (g, -(-case.n // 128), blocks), "1x128": (g, case.n, blocks), "channel": (g, case.n)}
    b_scale = guarded(*b_shape.get(b_kind, (g,)))
    if case.a != torch.int8:
        a.view(ours.numel(), case.k).view(torch.uint8)[~ours] = 0x7F  # NaN in both types
    if a_kind != "tensor":
        a_scale.view(ours.numel(), -1)[~ours] = float("nan")
    return Given(case, a, b, indices(case, case.sizes), a_scale, b_scale)


def frame(case: Case) -> tuple[Tensor, Tensor]:
    """NaN all around, and the result's place in it. Its rows begin at multiples of 16 bytes, whatever N is."""
    g, wide = len(case.sizes), -(-case.n // 8) * 8 + 8
    if case.masked:
        whole = torch.full((g, case.capacity + 3, wide), float("nan"), device="cuda", dtype=OUTS[case.out])
        return whole, whole[:, : case.capacity, : case.n]
    whole = torch.full((case.capacity + 2, wide), float("nan"), device="cuda", dtype=OUTS[case.out])
    return whole, whole[1:-1, : case.n]


def check(given: Given, out: Tensor, sizes: tuple[int, ...] | None = None) -> int:
    """Every group against float64; the number of elements that must have been written."""
    case = given.case
    rows = out.reshape(-1, case.n)
    a = given.a.reshape(rows.size(0), case.k)
    count = 0
    for group, first, last in spans(case, case.sizes if sizes is None else sizes):
        if first == last:
            continue
        count += (last - first) * case.n
        if case.k == 0:
            assert not rows[first:last].any()
            continue
        if given.a_scale is None or given.b_scale is None:
            halves(rows[first:last], a[first:last], given.b[group])
            continue
        a_scale, b_scale = given.a_scale, given.b_scale
        if a_scale.numel() > 1:
            a_scale = a_scale.reshape(a.size(0), *a_scale.shape[given.a.dim() - 1 :])[first:last]
        b_scale = b_scale if b_scale.numel() == 1 else b_scale[group]
        close = integers if case.a == torch.int8 else fp8_cases.close
        close(rows[first:last], (a[first:last], given.b[group], a_scale, b_scale, None))
    return count


def halves(result: Tensor, a: Tensor, b: Tensor) -> None:
    """Sums in fp32, rounded once to the result's type: what a random walk of K roundings of the sums' size leaves."""
    want = a.double() @ b.double().t()
    allowed = torch.finfo(result.dtype).eps * want.abs() + 2e-7 * a.size(1) * want.abs().mean().clamp_min(1.0)
    assert bool(((result.double() - want).abs() <= allowed).all())


def integers(result: Tensor, given: tuple[Tensor | None, ...]) -> None:
    """Exact sums, and one rounding of the result."""
    a, b, a_scale, b_scale, _ = given
    assert a is not None and b is not None and a_scale is not None and b_scale is not None  # noqa: PT018
    want = (a.double() @ b.double().t()) * a_scale.double().reshape(-1, 1) * b_scale.double().reshape(1, -1)
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}[result.dtype]
    if result.dtype == torch.float16:
        want = want.clamp(-65504, 65504)
        result = result.clamp(-65504, 65504)
    assert bool(((result.double() - want).abs() <= want.abs() * step * 1.01).all())


def run(config: sm90.Config, case: Case) -> None:
    """Compute with that config, into a frame of NaN, and compare; also with all weights loaded early that may be."""
    given = make(case)
    for early in (0, config.stages):
        whole, out = frame(case)
        launch = groups.Launch(case.problem, config, 0, gpu.of(0).multiprocessors, early)
        assert launch._loaded.local_bytes == 0, "registers are spilled"
        launch(out, *given.operands)
        written = check(given, out)
        assert int((~whole.isnan()).sum()) == written, "rows that belong to nobody were written"


class Checked(Protocol):
    def call(self) -> object: ...

    def check(self) -> None: ...


def on_streams(made: Sequence[Checked]) -> None:
    """Call each on a stream of its own, all in turn, and check what they wrote."""
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    for _ in range(10):
        for one, stream in zip(made, streams, strict=True):
            with torch.cuda.stream(stream):
                one.call()
    torch.cuda.synchronize()
    for one in made:
        one.check()


def fits(config: sm90.Config, case: Case) -> bool:
    return groups.variant_of(case.problem).fault(config) is None
