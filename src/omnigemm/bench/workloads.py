"""One table of workloads: for each operation its operands, the omnigemm call, the torch peers and a float64 reference.

A workload is made from a Problem. Its dense matrices are random; what the problem says about types and scales decides
how they are quantised, and the float64 reference starts from the quantised operands, so that an error of the kernel
and an error of the quantisation are seen apart.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import omnigemm

from ..backends.cpu import isa
from ..core.dispatch import choose
from ..core.dtypes import BY_NAME
from ..core.errors import ShapeError, UnsupportedError
from ..core.plan import Plan
from ..core.problem import BLOCK, Problem, describe
from .timing import Contender

OURS = "omnigemm"
USUAL_GROUPS = 8
_ALONG_K = "grouped_gemm_k_contiguous"
_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "e4m3": 8, "e5m2": 8, "int4": 4}
# The largest relative error of one rounding; an fp32 sum also carries the rounding of its many additions.
_ROUNDING = {"fp32": 1e-5, "fp16": 2.0**-11, "bf16": 2.0**-8}


_NUMBER = "([0-9]{1,18})"  # longer ones no tensor has
_SHAPE = re.compile(f"(?:[gG]{_NUMBER}x)?{_NUMBER}x{_NUMBER}x{_NUMBER}")


@dataclasses.dataclass(frozen=True)
class Size:
    """M x N x K. Grouped operations have `groups` weights and M rows per group on average. A layer's weight gradients
    have the layer's own size: groups of M rows, and results [N, K]."""

    m: int
    n: int
    k: int
    groups: int = 0

    @classmethod
    def parse(cls, text: str) -> Size:
        """From '16x4096x4096' or 'G8x16x4096x4096'."""
        match = _SHAPE.fullmatch(text.strip())
        sizes = [int(one or 0) for one in match.groups()] if match else [0]
        if min(sizes[1:], default=0) < 1:
            raise ShapeError(f"shape is {text!r}, expected MxNxK or G<groups>xMxNxK with whole numbers above 0")
        groups, m, n, k = sizes
        return cls(m, n, k, groups)

    def __str__(self) -> str:
        return (f"G{self.groups}x" if self.groups else "") + f"{self.m}x{self.n}x{self.k}"


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation and the keywords of `explain` that say at which precision."""

    op: str
    title: str
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def grouped(self) -> bool:
        return self.op.startswith("grouped_")

    def fit(self, size: Size) -> Size:
        """The size with the number of groups that the operation needs: none, or the usual one."""
        return dataclasses.replace(size, groups=(size.groups or USUAL_GROUPS) if self.grouped else 0)

    def problem(self, size: Size) -> Problem:
        size = self.fit(size)
        words = dict(self.words)
        if self.op == _ALONG_K:
            if words.get("dtype", "bf16") not in ("fp16", "bf16", "fp32"):
                raise UnsupportedError(f"{self.op}: dtype is {words['dtype']}, expected fp16, bf16 or fp32 here")
            return describe(self.op, m=size.n, n=size.k, k=size.groups * size.m, groups=size.groups, **words)
        if self.op in ("gemm", "grouped_gemm"):
            words.setdefault("b_layout", "col")  # the weight is [N, K], as in nn.Linear, and goes in transposed
        m = size.m
        if self.op == "grouped_gemm":
            words["shapes"] = [(rows, size.n, size.k) for rows in group_rows(size)]
        elif self.grouped:
            words["groups"] = size.groups
            m = size.groups * m if self.op == "grouped_gemm_contiguous" else _capacity(size)
        return describe(self.op, m=m, n=size.n, k=size.k, **words)


def case(op: str, **words: Any) -> Case:
    """A case from the keywords of `explain`; None means the usual value."""
    given = {name: value for name, value in words.items() if value is not None}
    extra = [f"{name.replace('_', ' ')} {value}" for name, value in given.items()]
    return Case(op, ", ".join(extra), given)


def group_rows(size: Size) -> list[int]:
    """Rows per group, drawn apart by up to 30 % around the mean, which they keep. Experts are never equally busy."""
    pairs = max(1, size.groups // 2)
    apart = [int(size.m * 0.3 * (pair + 1) / pairs) for pair in range(pairs)]
    rows = [size.m + (apart[i // 2] if i % 2 else -apart[i // 2]) for i in range(2 * (size.groups // 2))]
    return rows + [size.m] * (size.groups % 2)


def _capacity(size: Size) -> int:
    return 2 * size.m


class Dense(NamedTuple):
    """The unquantised matrices: one tensor, a stack of them, or a list where groups differ."""

    x: Any
    w: Any


def drawn(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Random numbers in fp32 on the processor, where a seed gives the same ones everywhere."""
    return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")


def dense(one: Case, size: Size, seed: int = 0) -> Dense:
    """Random matrices of the layout that the operation takes; the products have about unit size."""
    size = one.fit(size)
    random = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return drawn(shape, random)

    def weight(*shape: int) -> Tensor:
        return draw(*shape).mul_(size.k**-0.5)

    if one.op == "grouped_gemm":
        rows = group_rows(size)
        return Dense([draw(m, size.k) for m in rows], [weight(size.n, size.k) for _ in rows])
    if one.op == "grouped_gemm_contiguous":
        return Dense(draw(size.groups * size.m, size.k), weight(size.groups, size.n, size.k))
    if one.op == _ALONG_K:  # gradients of the layer's results, and its activations
        total = size.groups * size.m
        return Dense(draw(total, size.n), draw(total, size.k).mul_(size.m**-0.5))
    if one.op == "grouped_gemm_masked":
        return Dense(draw(size.groups, _capacity(size), size.k), weight(size.groups, size.n, size.k))
    return Dense(draw(size.m, size.k), weight(size.n, size.k))


class Operand(NamedTuple):
    """Values (a tensor, a list of them or an Int4Weight) with their scales and zero points."""

    values: Any
    scale: Any = None
    zero: Any = None

    def to(self, device: torch.device) -> Operand:
        return Operand(*(_moved(part, device) for part in self))


def _moved(part: Any, device: torch.device) -> Any:
    if part is None:
        return None
    return [one.to(device) for one in part] if isinstance(part, list) else part.to(device)


# ------------------------------------------------------------------------------------------- quantise and back


def quantise(matrix: Any, dtype: str, kind: str, *, zero_points: bool = False, per_group: bool = False) -> Operand:
    """A dense matrix, a stack [G, R, K] or a list, in the type and with the scales that a problem names."""
    if kind == "none":
        wanted = BY_NAME[dtype]
        if isinstance(matrix, list):
            return Operand([one.to(wanted) for one in matrix])
        return Operand(matrix.to(wanted))
    if per_group and matrix.dim() == 3:
        # No group's outliers coarsen another's, even when a whole matrix shares one scale.
        groups = [quantise(one, dtype, kind) for one in matrix.unbind(0)]
        return Operand(*(torch.stack(list(parts)) for parts in zip(*(one[:2] for one in groups), strict=True)))
    granularity = "token" if kind == "channel" else kind
    if dtype == "int8":
        return Operand(*omnigemm.quantize_int8(matrix, granularity=granularity, symmetric=not zero_points))
    return Operand(*omnigemm.quantize_fp8(matrix, granularity=granularity, dtype=BY_NAME[dtype]))


def wide(operand: Operand, kind: str) -> Any:
    """The operand's exact values in float64."""
    values = operand.values
    if isinstance(values, list):
        return [one.double() for one in values]
    if not isinstance(values, Tensor):
        return values.dequantize(torch.float64)
    exact = values.double()
    if operand.zero is not None:
        exact -= operand.zero.double().reshape(-1, 1)
    if operand.scale is None:
        return exact
    scale = operand.scale.double()
    if kind == "tensor":
        return exact.mul_(scale if scale.numel() == 1 else scale.reshape(-1, 1, 1))
    if kind in ("token", "channel"):
        return exact.mul_(scale.reshape(*exact.shape[:-1], 1))
    scale = scale.repeat_interleave(BLOCK, -1)[..., : exact.size(-1)]
    if kind == "128x128":
        scale = scale.repeat_interleave(BLOCK, -2)[..., : exact.size(-2), :]
    return exact.mul_(scale)


# ------------------------------------------------------------------------------------------- the calls


def _gemm(work: Workload, b: Operand, **out: Any) -> Any:
    return omnigemm.gemm(work.a.values, b.values.t(), **out)


def _int8_gemm(work: Workload, b: Operand, **out: Any) -> Any:
    a = work.a
    return omnigemm.int8_gemm(a.values, b.values, a.scale, b.scale, a_zero=a.zero, **out)


def _fp8_gemm(work: Workload, b: Operand, **out: Any) -> Any:
    return omnigemm.fp8_gemm(work.a.values, b.values, work.a.scale, b.scale, **out)


def _int4_gemm(work: Workload, b: Operand, **out: Any) -> Any:
    return omnigemm.int4_gemm(work.a.values, b.values, **out)


def _grouped_gemm(work: Workload, b: Operand, **out: Any) -> Any:
    return omnigemm.grouped_gemm(work.a.values, [one.t() for one in b.values], **out)


def _contiguous(work: Workload, b: Operand, **out: Any) -> Any:
    a = work.a
    return omnigemm.grouped_gemm_contiguous(a.values, b.values, work.ends, a_scale=a.scale, b_scale=b.scale, **out)


def _masked(work: Workload, b: Operand, **out: Any) -> Any:
    a = work.a
    return omnigemm.grouped_gemm_masked(a.values, b.values, work.counts, a_scale=a.scale, b_scale=b.scale, **out)


def _along_k(work: Workload, b: Operand, **out: Any) -> Any:
    return omnigemm.grouped_gemm_k_contiguous(work.a.values, b.values, work.ends, **out)


_CALLS: dict[str, Callable[..., Any]] = {
    "gemm": _gemm,
    "int8_gemm": _int8_gemm,
    "fp8_gemm": _fp8_gemm,
    "int4_gemm": _int4_gemm,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_contiguous": _contiguous,
    "grouped_gemm_masked": _masked,
    _ALONG_K: _along_k,
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How right a result is. Errors are relative: `error` and `quantisation` in the Frobenius norm, `worst` is the
    largest single error against the root mean square of the reference."""

    error: float
    worst: float
    quantisation: float
    tolerance: float
    ok: bool
    note: str = ""


class Workload:
    """One case at one size, with operands. `given` shares dense matrices between cases of the same layout.

    Operands are quantised on the CPU and then go to the device, so that they are the same on every one.
    """

    def __init__(
        self,
        one: Case,
        size: Size,
        given: Dense | None = None,
        b: Operand | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.case = one
        self.size = one.fit(size)
        self.problem = one.problem(size)
        self.dense = given if given is not None else dense(one, size)
        self.rows = group_rows(self.size) if one.grouped else [self.size.m]
        self.counts = torch.tensor(self.rows, dtype=torch.int32, device=self.device)
        self.ends = self.counts.cumsum(0, dtype=torch.int32)
        problem = self.problem
        asymmetric = problem.zero_points and not problem.is_int4
        self.a = quantise(self.dense.x, problem.a_dtype, problem.a_scale, zero_points=asymmetric).to(self.device)
        self._b = b

    @cached_property
    def b(self) -> Operand:
        """The quantised weights; quantising is the slow part, so it waits until somebody asks."""
        if self._b is not None:
            return self._b
        p = self.problem
        if not p.is_int4:
            return quantise(self.dense.w, p.b_dtype, p.b_scale, per_group=True).to(self.device)
        # From a 16-bit weight, as checkpoints are: the scales take its type.
        weight = self.dense.w.to(BY_NAME[p.a_dtype])
        group_size = -1 if p.group_size == p.k else p.group_size
        packed = omnigemm.quantize_int4(weight, group_size=group_size, symmetric=not p.zero_points)
        return Operand(packed).to(self.device)

    def call(self, b: Operand, **out: Any) -> Any:
        return _CALLS[self.problem.op](self, b, **out)

    def plan(self) -> Plan:
        """What the call runs."""
        return choose(self.problem, self.device)

    # -- sizes

    @property
    def flops(self) -> int:
        return 2 * sum(self.rows) * self.size.n * self.size.k

    @property
    def weight_elements(self) -> int:
        if self.problem.op == _ALONG_K:  # what stands in the weights' place
            return self.problem.k * self.problem.n
        return max(1, self.size.groups) * self.size.n * self.size.k

    @property
    def weight_bytes(self) -> int:
        return self.weight_elements * _BITS[self.problem.b_dtype] // 8

    @property
    def traffic_bytes(self) -> int:
        """Weights and activations read once, results written once."""
        p, rows = self.problem, sum(self.rows)
        if p.op == _ALONG_K:
            results = p.groups * p.m * p.n * _BITS[p.out_dtype] // 8
            return self.weight_bytes + rows * p.m * _BITS[p.a_dtype] // 8 + results
        ends = rows * (self.size.k * _BITS[p.a_dtype] + self.size.n * _BITS[p.out_dtype]) // 8
        return self.weight_bytes + ends

    # -- who is timed

    def ours(self) -> Contender:
        # A kernel may keep an fp32 form next to the weight.
        return Contender(self.call, self.b, self.weight_bytes, self.weight_bytes + 4 * self.weight_elements)

    def peers(self) -> dict[str, Contender]:
        """torch with dense weights, one F.linear per group; it gets the rows of each group for nothing."""
        types = [torch.float32]
        if isa.bf16_products_are_safe():
            types.append(torch.bfloat16)
        return {f"torch {_short(dtype)}": self._peer(dtype) for dtype in types}

    def _peer(self, dtype: torch.dtype) -> Contender:
        xs = [x.to(self.device, dtype) for x in self.split(self.dense.x)]
        weights = [w.to(self.device, dtype) for w in self._matrices(self.dense.w)]

        def call(ws: Sequence[Tensor]) -> object:
            return [torch.nn.functional.linear(x, w) for x, w in zip(xs, ws, strict=True)]

        nbytes = self.weight_elements * dtype.itemsize
        return Contender(call, weights, nbytes, nbytes)

    # -- the reference

    def split(self, rows: Any) -> list[Tensor]:
        """Activations or results as one matrix per group, without the rows that a mask hides."""
        if isinstance(rows, (list, tuple)):
            return list(rows)
        if self.problem.op == _ALONG_K:
            return list(rows.unbind(0)) if rows.dim() == 3 else [part.t() for part in rows.split(self.rows)]
        if self.problem.op == "grouped_gemm_contiguous":
            return list(rows.split(self.rows))
        if self.problem.op == "grouped_gemm_masked":
            return [group[:count] for group, count in zip(rows.unbind(0), self.rows, strict=True)]
        return [rows]

    def _matrices(self, weights: Any) -> list[Tensor]:
        if isinstance(weights, list):
            return weights
        if self.problem.op == _ALONG_K:
            return self.split(weights)
        return list(weights.unbind(0)) if weights.dim() == 3 else [weights]

    def _exact_product(self, x: Any, w: Any) -> Tensor:
        pairs = zip(self.split(x), self._matrices(w), strict=True)
        return torch.cat([(rows.double() @ weight.double().t()).flatten() for rows, weight in pairs])

    def reference(self) -> Tensor:
        """The product of the quantised operands in float64, all groups flattened into one vector."""
        host = torch.device("cpu")  # what is to be checked has no part in it
        a, b = self.a.to(host), self.b.to(host)
        return self._exact_product(wide(a, self.problem.a_scale), wide(b, self.problem.b_scale))

    def ideal(self) -> Tensor:
        """The same of the unquantised matrices."""
        return self._exact_product(self.dense.x, self.dense.w)

    def verify(self, ideal: Tensor | None = None) -> Verdict:
        """Run the operation once and compare it with float64. `ideal` saves computing it again."""
        tolerance = _ROUNDING[self.problem.out_dtype]
        note = ""
        if self.problem.op == "grouped_gemm_masked":
            shape = (self.problem.groups, self.problem.m, self.problem.n)
            out = torch.full(shape, math.nan, dtype=BY_NAME[self.problem.out_dtype], device=self.device)
            self.call(self.b, out=out)
            hidden = [group[count:] for group, count in zip(out.unbind(0), self.rows, strict=True)]
            if not all(bool(rows.isnan().all()) for rows in hidden):
                note = "rows past counts were written"
        else:
            out = self.call(self.b)
        result = torch.cat([one.double().flatten().cpu() for one in self.split(out)])
        exact = self.reference()
        ideal = self.ideal() if ideal is None else ideal
        size = exact.norm()
        error = float((result - exact).norm() / size)
        worst = float((result - exact).abs().max() / size * math.sqrt(exact.numel()))
        quantisation = float((exact - ideal).norm() / ideal.norm())
        # A single wrong element vanishes in the norm; no correct rounding errs by this much of the typical size.
        ok = error <= tolerance and worst <= 8 * tolerance and not note
        if not ok and not note:
            note = f"error {error:.2g}, worst element {worst:.2g}; allowed are {tolerance:.2g} and {8 * tolerance:.2g}"
        return Verdict(error, worst, quantisation, tolerance, ok, note)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


# ------------------------------------------------------------------------------------------- the table

# Every operation of the contract at the precisions that it is known for.
CASES: tuple[Case, ...] = (
    Case("gemm", "fp32", {"dtype": "fp32"}),
    Case("gemm", "bf16", {"dtype": "bf16"}),
    Case("int8_gemm", "int8 per token"),
    Case("int8_gemm", "int8, zeros", {"a_zero": True}),
    Case("fp8_gemm", "fp8 per tensor", {"granularity": "tensor"}),
    Case("fp8_gemm", "fp8 per token", {"granularity": "token"}),
    Case("fp8_gemm", "fp8 128x128", {"granularity": "128x128"}),
    Case("fp8_gemm", "fp8 1x128", {"granularity": "1x128"}),
    Case("int4_gemm", "bf16 x int4", {"dtype": "bf16"}),
    Case("int4_gemm", "bf16 x int4, zeros", {"dtype": "bf16", "symmetric": False}),
    Case("int4_gemm", "fp16 x int4", {"dtype": "fp16"}),
    Case("grouped_gemm", "bf16", {"dtype": "bf16"}),
    Case("grouped_gemm_contiguous", "bf16", {"dtype": "bf16"}),
    Case("grouped_gemm_contiguous", "fp8 128x128", {"dtype": "e4m3"}),
    Case("grouped_gemm_contiguous", "int8 per token", {"dtype": "int8"}),
    Case("grouped_gemm_contiguous", "bf16 x int4", {"dtype": "bf16", "weight_dtype": "int4"}),
    Case("grouped_gemm_masked", "bf16", {"dtype": "bf16"}),
    Case("grouped_gemm_masked", "fp8 128x128", {"dtype": "e4m3"}),
    Case(_ALONG_K, "bf16", {"dtype": "bf16"}),
)
