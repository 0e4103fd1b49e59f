"""`grouped_gemm` in bf16 and fp16 on Hopper: one launch for a whole list of products, after one that prepares it.

Sizes, strides, addresses and factors travel as kernel parameters. A small kernel makes tensor maps and a table of them
in device memory of this call (list_memory.cuh), and the kernel that multiplies follows. Nothing is copied from the
host, so a CUDA graph replays what it captured.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dispatch import Support
from ...core.dtypes import name_of
from ...core.errors import DeviceError
from ...core.plan import Plan
from ...core.problem import Problem, layout_of
from . import choice, dense, gemm, list_choice, sm90
from .driver import bindings, checked
from .gpu import Gpu
from .jit import KernelSpec
from .jit.loader import Loaded, is_loaded, load
from .launch import Launcher, Matrix, raw_stream

OP = "grouped_gemm"
MEMORY_BYTES = 464  # of device memory for a product: list_memory.cuh
_COUNTER_BYTES = 4  # after those of all products
_MEMORY_STEP = 512  # where the memory of each launch begins
# Products that one launch of the small kernel takes: within 4 KB of parameters, or (CUDA 12.1) within 32 KB.
LINES, _SMALL_LINES = (36, 108, 324), 36
_SIZES = struct.Struct("4i2I2i3q")  # struct Sizes of list_setup.cuh
_SETUP_WARPS = 4
MAIN_VALUES = f"{struct.calcsize(gemm._VALUES)}xPii"  # struct Arguments of gemm.cuh: of a list, only the end is read
TILE_LIMIT = 2**30  # that blocks can count

_ARGUMENTS = "6i2Q2i"  # struct Arguments of list_setup.cuh between the memory and the sizes
_BOUND_LIMIT = 64  # ways in which tensors lie that a plan remembers
# What torch.compile's own code allocates with, on the current device: three microseconds less than torch.empty.
_empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_address = Tensor.data_ptr

Tensors = Sequence[Tensor]
Numbers = Sequence[float] | Tensor  # a tensor is read by the device
Turned = tuple[bool, bool]  # of A and of B: K does not lie side by side in memory


def supports(problem: Problem) -> Support:
    if sum(-(-m // 64) * -(-n // 64) for m, n, _ in problem.shapes) >= TILE_LIMIT:
        return Support(False, f"the results have {TILE_LIMIT} tiles of 64x64 or more together, expected fewer")
    return Support(True, "")


def layouts(problem: Problem) -> tuple[Turned, ...]:
    """The ways in which operands lie: each takes a launch of its own. What lies in no way is copied, K innermost."""
    a = {"col": (True,), "mixed": (False, True)}.get(problem.a_layout, (False,))
    b = {"row": (True,), "mixed": (False, True)}.get(problem.b_layout, (False,))  # [K, N]
    return tuple(itertools.product(a, b))


def variant_of(problem: Problem, turned: Turned) -> sm90.Variant:
    return sm90.Variant(
        0,
        0,
        problem.a_dtype,
        problem.b_dtype,
        problem.a_scale,
        problem.b_scale,
        problem.out_dtype,
        out_by_tma=problem.out_dtype != "fp32",
        a_turned=turned[0],
        b_turned=turned[1],
        c=problem.c,
        grouping="list",
    )


def setup_spec(lines: int) -> KernelSpec:
    name = f"omnigemm_sm90_list_setup_{lines}"
    source = f'#define KERNEL {name}\n#define LINES {lines}\n#include "sm90/list_setup.cuh"\n'
    return KernelSpec(name, source, sm90.ARCH, sm90.OPTIONS)


def setup_sizes(products: int, most: int = LINES[-1]) -> list[tuple[int, int]]:
    """(products, lines) of each launch of the small kernel."""
    found = []
    while products > 0:
        here = min(products, most)
        found.append((here, next(lines for lines in LINES if lines >= here)))
        products -= here
    return found


def _setup_arguments(here: int, room: int) -> struct.Struct:
    """struct Arguments of list_setup.cuh, without the memory; `here` of its lines are used."""
    rest = room - here

    def some(code: str, size: int) -> str:
        return f"{here}{code}{rest * size}x"

    columns = 4 * some("Q", 8) + 2 * some("f", 4)
    return struct.Struct(f"{_ARGUMENTS}{here * _SIZES.size}s{rest * _SIZES.size}x{columns}")


def _most_lines() -> int:
    driver = bindings()
    return LINES[-1] if checked(driver.cuDriverGetVersion(), "driver version") >= 12010 else _SMALL_LINES


# What differs between calls with tensors that lie alike. Of all products: the addresses of D, then those of A, of B and
# of C, the alphas and the betas; then where alpha and beta are on the device (0: they are not), and the steps from one
# to the next.
Values = tuple[Any, ...]
_COLUMNS = (1, 2, 3, 0, 4, 5)  # in the order in which struct Arguments has them


def _factors(numbers: Numbers) -> tuple[Sequence[float], int, int]:
    """Numbers, or where they are on the device and how far apart."""
    if not isinstance(numbers, Tensor):
        return numbers, 0, 0
    return (), numbers.data_ptr(), numbers.stride(0) if numbers.numel() > 1 else 0


@dataclasses.dataclass(frozen=True)
class Form:
    """How one product's matrices lie. Pitches are bytes from line to line."""

    turned: Turned
    a_pitch: int
    b_pitch: int
    out_stride: int

    @classmethod
    def of(cls, out: Tensor, a: Tensor, b: Tensor, turned: Turned) -> Form | None:
        """None where something must be copied first."""
        out_pitch = dense.pitch(out, straight=False)
        a_pitch, b_pitch = (
            dense.pitch(gemm.as_lines(x, way)) if a.size(1) else dense.ALIGN
            for x, way in zip((a, b.t()), turned, strict=True)
        )
        if a_pitch is None or b_pitch is None or out_pitch is None or max(a_pitch, b_pitch) >= 2**36:
            return None
        return cls(turned, a_pitch, b_pitch, out_pitch // out.element_size())


@dataclasses.dataclass(frozen=True)
class Setup:
    """One launch of the small kernel, for some of a part's products."""

    launcher: Launcher
    arguments: struct.Struct  # all but the memory
    counts: tuple[int, ...]
    sizes: bytes
    device_factors: Callable[[Values], Values]
    columns: Callable[[Values], Values]

    def pack(self, values: Values) -> bytes:
        return self.arguments.pack(*self.counts, *self.device_factors(values), self.sizes, *self.columns(values))


@dataclasses.dataclass(frozen=True)
class Part:
    """Products of one launch, in the order in which they are worked on."""

    order: list[int]
    memory: int  # where its device memory begins
    tiles: int
    setups: list[Setup]
    launcher: Launcher


def memory_bytes(products: int) -> int:
    """Device memory of one launch, up to where that of the next may begin."""
    return -(-(products * MEMORY_BYTES + _COUNTER_BYTES) // _MEMORY_STEP) * _MEMORY_STEP


def main_shape(config: sm90.Config) -> dict[str, Any]:
    """Of the launch that multiplies, what the config alone says."""
    matrices = (None, None, None)  # each product has its own, in device memory
    return {"threads": config.threads, "cluster": config.cluster, "matrices": matrices}


def main_grid(config: sm90.Config, tiles: int, multiprocessors: int) -> int:
    """Persistent blocks, or as many as there are tiles."""
    return min(tiles, multiprocessors // config.cluster * config.blocks_per_sm) * config.cluster


def like_matrices(config: sm90.Config, turned: Turned, by_tma: bool, element_bytes: int = 2) -> list[Matrix | None]:
    """Matrices with the right boxes, whose maps the small kernel copies and points elsewhere."""
    sides = config.rows // config.left_share, config.cols // config.right_share
    block = sm90.BLOCK_K // element_bytes
    boxes = [(sm90.SLAB, sm90.SLAB) if way else (block, rows) for way, rows in zip(turned, sides, strict=True)]
    store = Matrix(64, 64, 2, 128, (config.slab, 64)) if by_tma else None
    return [*(Matrix(128 // element_bytes, 64, element_bytes, 128, box) for box in boxes), store]


class Lists:
    """Runs lists of the problem's shapes with one config. Strides and addresses may differ from call to call."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int) -> None:
        self._problem, self._config = problem, config
        self._index, self._multiprocessors = index, multiprocessors
        self._device = torch.device("cuda", index)
        self._quick = _empty_strided is not None and getattr(self._device, "type", "") == "cuda"
        self._layouts = layouts(problem)
        self._by_tma = problem.out_dtype != "fp32"
        self._most = _most_lines()
        for turned in self._layouts:
            self._loaded(turned)
        for lines in LINES:
            if lines <= setup_sizes(min(problem.groups, self._most), self._most)[-1][1]:
                self._load(setup_spec(lines), 0)
        self._bound: dict[Any, core_plan.Launch] = {}
        # Tensor maps that are only copied must point somewhere.
        self._somewhere = torch.empty(1, dtype=torch.uint8, device=self._device).data_ptr()

    def _load(self, spec: KernelSpec, shared_bytes: int) -> Loaded:
        if torch.cuda.is_current_stream_capturing() and not is_loaded(spec, self._index, shared_bytes):
            raise DeviceError(
                f"{OP}: a kernel for {self._problem} is not compiled yet, and a CUDA graph is being captured; call "
                f"{OP} once with such operands, or make the plan with omnigemm.plan, before the capture"
            )
        return load(spec, self._index, shared_bytes)

    def _loaded(self, turned: Turned) -> tuple[Loaded, int]:
        variant = variant_of(self._problem, turned)
        shared_bytes = variant.shared_bytes(self._config) + list_choice.TABLE_BYTES
        return self._load(dense.spec(self._config, variant), shared_bytes), shared_bytes

    def __call__(
        self,
        out: Tensors,
        a: Tensors,
        b: Tensors,
        c: Tensors | None,
        alpha: Numbers,
        beta: Numbers,
        workspace: Tensor | None = None,
    ) -> None:
        self.bind(out, a, b, c, alpha, beta)(out, a, b, c, alpha, beta, workspace)

    def bind(
        self, out: Tensors, a: Tensors, b: Tensors, c: Tensors | None, alpha: Numbers, beta: Numbers
    ) -> core_plan.Launch:
        """The launch for lists of tensors that lie like these."""
        adds = self._problem.c and c is not None
        read = [adds] * len(out) if isinstance(beta, Tensor) else [adds and one != 0.0 for one in beta]
        used_c = [c[i] if read[i] and c is not None else None for i in range(len(out))]
        strides = tuple((x.stride(), y.stride(), z.stride()) for x, y, z in zip(out, a, b, strict=True))
        of_c = tuple(None if one is None else (one.shape, one.stride(), one.dtype) for one in used_c)
        key = strides, of_c
        found = self._bound.get(key)
        if found is None:
            found = self._prepare(out, a, b, used_c)
            if len(self._bound) >= _BOUND_LIMIT:
                self._bound.clear()
            self._bound[key] = found
        return found

    def _turned(self, a: Tensor, b: Tensor) -> Turned:
        """How a product's operands are read. What lies in one way throughout the list is compiled for that only."""
        a_ways, b_ways = ({one[side] for one in self._layouts} for side in (0, 1))
        a_turned = layout_of(a) == "col" if len(a_ways) > 1 else True in a_ways
        b_turned = layout_of(b) == "row" if len(b_ways) > 1 else True in b_ways
        return a_turned, b_turned

    def _prepare(self, out: Tensors, a: Tensors, b: Tensors, c: Sequence[Tensor | None]) -> core_plan.Launch:
        by_layout: dict[Turned, list[int]] = {}
        forms: dict[int, Form] = {}
        for i in range(len(out)):
            if not out[i].numel():
                continue
            form = Form.of(out[i], a[i], b[i], self._turned(a[i], b[i]))
            if form is None:
                return self._with_copies
            forms[i] = form
            by_layout.setdefault(form.turned, []).append(i)
        parts: list[Part] = []
        start = 0
        for turned, members in by_layout.items():
            # Long tiles first, so that the last ones, for which not all blocks have work, are short.
            members.sort(key=lambda i: -a[i].size(1))
            for first in range(0, len(members), list_choice.PRODUCT_LIMIT):
                order = members[first : first + list_choice.PRODUCT_LIMIT]
                parts.append(self._part(turned, order, start, forms, out, a, c))
                start += memory_bytes(len(order))
        return self._run(parts, start, len(out), any(one is not None for one in c))

    def _part(
        self,
        turned: Turned,
        order: list[int],
        start: int,
        forms: dict[int, Form],
        out: Tensors,
        a: Tensors,
        c: Sequence[Tensor | None],
    ) -> Part:
        """Everything but addresses and factors, worked out once."""
        config, count = self._config, len(order)
        lines, tiles = [], 0
        down, across = config.tile_m * config.right_share, config.tile_n * config.left_share
        for i in order:
            (m, n), form, own_c = out[i].shape, forms[i], c[i]
            tiles += -(-m // down) * -(-n // across)
            of_c = (0, 0, 0)
            if own_c is not None:
                spread = own_c.expand(out[i].shape)  # along dimensions of 1 by a stride of 0
                of_c = sm90.TYPES[name_of(own_c.dtype)], spread.stride(0), spread.stride(1)
            pitches = form.a_pitch // dense.ALIGN, form.b_pitch // dense.ALIGN
            lines.append(_SIZES.pack(m, n, a[i].size(1), tiles, *pitches, of_c[0], i, form.out_stride, *of_c[1:]))
        main, shared_bytes = self._loaded(turned)
        setups, first = [], 0
        for here, room in setup_sizes(count, self._most):
            arguments = _setup_arguments(here, room)
            launcher = self._setup_launcher(turned, here, room, arguments.size)
            counts = count, first, here, *map(int, turned), int(self._by_tma)
            total, some = len(out), order[first : first + here]
            columns = itemgetter(*(column * total + i for column in _COLUMNS for i in some))
            last = itemgetter(*range(len(_COLUMNS) * total, len(_COLUMNS) * total + 4))
            sizes = b"".join(lines[first : first + here])
            setups.append(Setup(launcher, arguments, counts, sizes, last, columns))
            first += here
        grid = main_grid(config, tiles, self._multiprocessors)
        launcher = Launcher(main.kernel, grid=grid, shared_bytes=shared_bytes, **main_shape(config), values=MAIN_VALUES)
        return Part(order, start, tiles, setups, launcher)

    def _setup_launcher(self, turned: Turned, here: int, room: int, argument_bytes: int) -> Launcher:
        return Launcher(
            self._load(setup_spec(room), 0).kernel,
            grid=-(-here // _SETUP_WARPS),
            threads=32 * _SETUP_WARPS,
            shared_bytes=0,
            cluster=1,
            matrices=like_matrices(self._config, turned, self._by_tma),
            values=f"P{argument_bytes}s",
        )

    def _run(self, parts: Sequence[Part], total_bytes: int, count: int, adds: bool) -> core_plan.Launch:
        index = self._index
        like, none = (self._somewhere,) * 3, (0,) * 3
        current_device = torch._C._cuda_getDevice
        no_c, no_numbers = (0,) * count, (0.0,) * count
        setups = [(part.memory, setup.launcher, setup) for part in parts for setup in part.setups]
        read = [first + i for part in parts for i in part.order for first in (count, 2 * count)]  # A and B
        latest: tuple[Values, list[bytes]] = (), []

        def run(
            out: Tensors,
            a: Tensors,
            b: Tensors,
            c: Tensors | None,
            alpha: Numbers,
            beta: Numbers,
            workspace: Tensor | None = None,
            addresses: Sequence[int] = (),
        ) -> None:
            nonlocal latest
            if not parts:
                return None
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, c, alpha, beta, workspace, addresses)
            addresses = addresses or [*map(_address, (*out, *a, *b, *(c or ())))]
            alphas, alpha_at, alpha_step = _factors(alpha)
            betas, beta_at, beta_step = _factors(beta)
            values = (
                *addresses[: 3 * count], *(addresses[3 * count : 4 * count] if adds else no_c),
                *(alphas or no_numbers), *(betas or no_numbers), alpha_at, beta_at, alpha_step, beta_step,
            )  # fmt: skip
            known, packed = latest  # read at once: other threads write it
            if values != known:
                if reduce(or_, map(values.__getitem__, read)) % dense.ALIGN:
                    return self._with_copies(out, a, b, c, alpha, beta, workspace)
                packed = [setup.pack(values) for _, _, setup in setups]
                latest = values, packed
            # From torch's allocator and for this call alone, so that calls on several streams do not meet.
            memory = self._empty(total_bytes) if workspace is None else workspace
            stream, start = raw_stream(index), memory.data_ptr()
            for (at, launcher, _), arguments in zip(setups, packed, strict=True):
                launcher(stream, like, start + at, arguments)
            for part in parts:
                part.launcher(stream, none, start + part.memory, len(part.order), part.tiles)
            return None

        return run

    def _empty(self, size: int) -> Tensor:
        """Memory on this device, which is the current one."""
        if self._quick:
            made: Tensor = _empty_strided((size,), (1,), torch.uint8)
            return made
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _with_copies(
        self,
        out: Tensors,
        a: Tensors,
        b: Tensors,
        c: Tensors | None,
        alpha: Numbers,
        beta: Numbers,
        workspace: Tensor | None = None,
        addresses: Sequence[int] = (),
    ) -> None:
        """Copy what the kernel cannot read or write in its place, of those products only."""
        with torch._C._AutoDispatchBelowAutograd(), torch.cuda.device(self._index):
            targets, left, right = list(out), list(a), list(b)
            for i in range(len(out)):
                if not out[i].numel():
                    continue
                if dense.pitch(out[i], straight=False) is None:
                    targets[i] = dense.aligned(out[i])
                if not a[i].size(1):  # nothing is read
                    left[i], right[i] = a[i].new_empty(a[i].shape), b[i].new_empty(b[i].shape)
                    continue
                turned = self._turned(a[i], b[i])
                left[i] = gemm.readable(a[i], turned[0])
                right[i] = gemm.readable(b[i].t(), turned[1]).t()
            self(targets, left, right, c, alpha, beta, workspace)
            for one, target in zip(out, targets, strict=True):
                if target is not one:
                    one.copy_(target)


def _copied(problem: Problem) -> int:
    """How many products have an operand that must be copied, as far as sizes and layouts tell."""
    if "strided" in (problem.a_layout, problem.b_layout):
        return problem.groups
    found = 0
    for m, n, k in problem.shapes:
        lines = m if problem.a_layout == "col" else k, n if problem.b_layout == "row" else k
        found += k > 0 and any(2 * line % dense.ALIGN for line in lines)
    return found


@dataclasses.dataclass(frozen=True)
class Sm90List:
    """One config for one problem, as dispatch sees it."""

    problem: Problem
    choice: choice.Choice
    gpu: Gpu

    @property
    def name(self) -> str:
        variant = variant_of(self.problem, layouts(self.problem)[0])
        return sm90.name(self.choice.config, variant).removeprefix("omnigemm_")

    def supports(self, problem: Problem, device: torch.device) -> Support:
        config, ways, count = self.choice.config, len(layouts(problem)), problem.groups
        launches = ways + max(0, count - 1) // list_choice.PRODUCT_LIMIT
        words = ["one launch for all products" if launches == 1 else f"up to {launches} launches for all products"]
        words.append(f"{config.stages} stages")
        if config.share > 1:
            words.append(f"clusters of {config.share} share loads")
        if config.blocks_per_sm > 1:
            words.append(f"{config.blocks_per_sm} blocks on a multiprocessor")
        words.append(f"{list_choice.used(config, problem.shapes):.0%} of the tiles used")
        words.append(f"{self.choice.seconds * 1e6:.1f} us modelled")
        if copied := _copied(problem):
            what = "operands of " + ("all products" if copied == count else f"{copied} of {count} products")
            words.append(f"{what} are copied first: their rows do not begin at multiples of 16 bytes")
        return Support(True, ", ".join(words))

    def cost(self, problem: Problem, device: torch.device) -> float:
        copied = _copied(problem)
        moved = sum(2.0 * 2 * (m * k + k * n) for m, n, k in problem.shapes) * copied / max(1, problem.groups)
        return self.choice.seconds + moved / self.gpu.memory + 10e-6 * copied

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        index = torch.cuda.current_device() if device.index is None else device.index
        run = Lists(problem, self.choice.config, index, self.gpu.multiprocessors)
        launches = len(layouts(problem)) + problem.groups // list_choice.PRODUCT_LIMIT
        return Plan(
            problem,
            device,
            "cuda",
            self.name,
            run,
            dataclasses.asdict(self.choice.config),
            workspace_bytes=problem.groups * MEMORY_BYTES + launches * memory_bytes(0),  # or a little less
            bind=run.bind,
            uses_torch=False,
            takes_workspace=True,
            takes_addresses=True,
        )


@dataclasses.dataclass(frozen=True)
class Nothing:
    """Lists of results without elements."""

    name: str = "nothing"

    def supports(self, problem: Problem, device: torch.device) -> Support:
        return Support(True, "no result has elements")

    def cost(self, problem: Problem, device: torch.device) -> float:
        return 0.0

    def plan(self, problem: Problem, device: torch.device) -> Plan:
        return Plan(problem, device, "cuda", self.name, lambda *_: None)


def kernels(problem: Problem, gpu: Gpu) -> tuple[Sm90List | Nothing, ...]:
    """The choice and its runners-up."""
    if not any(m and n for m, n, _ in problem.shapes):
        return (Nothing(),)
    variants = [variant_of(problem, turned) for turned in layouts(problem)]
    return tuple(Sm90List(problem, one, gpu) for one in list_choice.choices(variants, problem.shapes, gpu))


def specs(problem: Problem, gpu: Gpu) -> tuple[KernelSpec, ...]:
    """What must be compiled to run the problem on such a GPU."""
    chosen = kernels(problem, gpu)[0]
    if isinstance(chosen, Nothing):
        return ()
    mains = (dense.spec(chosen.choice.config, variant_of(problem, turned)) for turned in layouts(problem))
    most = setup_sizes(min(problem.groups, LINES[-1]))[-1][1]
    return (*mains, *(setup_spec(lines) for lines in LINES if lines <= most))
