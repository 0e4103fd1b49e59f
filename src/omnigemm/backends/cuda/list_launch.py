"""What a call of `grouped_gemm` does on Hopper: one launch for a whole list of products, after one that prepares it.

Sizes, strides, addresses and factors travel as kernel parameters. A small kernel makes tensor maps and a table of them
in device memory of this call (list_memory.cuh), and the kernel that multiplies follows. Nothing is copied from the
host, so a CUDA graph replays what it captured. Factors and sizes that are on the device stay there: the small kernel
reads them, and what the host knows of sizes is then how much room there is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ...core import plan as core_plan
from ...core.dtypes import name_of
from ...core.fresh import bytes_on
from ...core.problem import Problem, layout_of
from . import arguments, dense, gemm, list_choice, list_kernel, list_setup, sm90
from .by_layout import ByLayout
from .jit import KernelSpec
from .jit.loader import Loaded
from .launch import Launcher, raw_stream
from .list_kernel import Turned
from .list_setup import Numbers, Setup, Values, factors, sizes_at

_address = Tensor.data_ptr

Tensors = Sequence[Tensor]


def layouts(problem: Problem) -> tuple[Turned, ...]:
    """The ways in which operands lie: each takes a launch of its own. What lies in no way is copied, K innermost."""
    a = {"col": (True,), "mixed": (False, True)}.get(problem.a_layout, (False,))
    b = {"row": (True,), "mixed": (False, True)}.get(problem.b_layout, (False,))  # [K, N]
    return tuple(itertools.product(a, b))


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
class Part:
    """Products of one launch, in the order in which they are worked on."""

    order: list[int]
    memory: int  # where its device memory begins
    setups: list[Setup]
    launcher: Launcher


class Lists:
    """Runs lists of the problem's shapes with one config. Strides and addresses may differ from call to call."""

    def __init__(self, problem: Problem, config: sm90.Config, index: int, multiprocessors: int) -> None:
        self._problem, self._config = problem, config
        self._index, self._multiprocessors = index, multiprocessors
        self._device = torch.device("cuda", index)
        self._layouts = layouts(problem)
        self._most = list_setup.most_lines()
        for turned in self._layouts:
            self._loaded(turned)
        for lines in list_setup.LINES:
            if lines <= list_setup.launches(min(problem.groups, self._most), self._most)[-1][1]:
                self._load(list_setup.spec(lines), 0)
        self._bound: ByLayout[core_plan.Launch] = ByLayout()
        # Tensor maps that are only copied must point somewhere.
        self._somewhere = torch.empty(1, dtype=torch.uint8, device=self._device).data_ptr()

    def _load(self, spec: KernelSpec, shared_bytes: int) -> Loaded:
        return dense.loaded_spec(self._problem, spec, self._index, shared_bytes)

    def _loaded(self, turned: Turned) -> tuple[Loaded, int]:
        variant = list_kernel.variant_of(self._problem, turned)
        shared_bytes = variant.shared_bytes(self._config) + list_choice.TABLE_BYTES
        return self._load(dense.spec(self._config, variant), shared_bytes), shared_bytes

    def __call__(self, out: Tensors, *operands: Any, workspace: Tensor | None = None) -> None:
        self.bind(out, *operands)(out, *operands, workspace=workspace)

    def bind(
        self,
        out: Tensors,
        a: Tensors,
        b: Tensors,
        c: Tensors | None,
        alpha: Numbers,
        beta: Numbers,
        sizes: Tensor | None = None,
    ) -> core_plan.Launch:
        """The launch for lists of tensors that lie like these."""
        adds = self._problem.c and c is not None
        read = [adds] * len(out) if isinstance(beta, Tensor) else [adds and one != 0.0 for one in beta]
        used_c = [c[i] if read[i] and c is not None else None for i in range(len(out))]
        strides = tuple((x.stride(), y.stride(), z.stride()) for x, y, z in zip(out, a, b, strict=True))
        of_c = tuple(None if one is None else (one.shape, one.stride(), one.dtype) for one in used_c)
        return self._bound.get((strides, of_c), lambda: self._prepare(out, a, b, used_c))

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
                start += list_kernel.memory_bytes(len(order))
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
            sizes = m, n, a[i].size(1), tiles, *pitches, of_c[0], i, form.out_stride, *of_c[1:]
            lines.append(list_setup.SIZES.pack(*sizes))
        main, shared_bytes = self._loaded(turned)
        setups, first = [], 0
        for here, room in list_setup.launches(count, self._most):
            told = list_setup.arguments(here, room)
            launcher = self._setup_launcher(turned, here, room, told.size)
            counts = count, first, here, *map(int, turned), sm90.OUT_BYTES[self._problem.out_dtype], down, across
            some = slice(first, first + here)
            setups.append(Setup.of(launcher, told, counts, b"".join(lines[some]), order[some], len(out)))
            first += here
        grid = list_kernel.grid(config, tiles, self._multiprocessors)
        launcher = Launcher(
            main.kernel, grid=grid, shared_bytes=shared_bytes, **list_kernel.shape(config), values=arguments.of_list(2)
        )
        return Part(order, start, setups, launcher)

    def _setup_launcher(self, turned: Turned, here: int, room: int, argument_bytes: int) -> Launcher:
        return Launcher(
            self._load(list_setup.spec(room), 0).kernel,
            grid=-(-here // list_setup.WARPS),
            threads=32 * list_setup.WARPS,
            shared_bytes=0,
            cluster=1,
            matrices=list_kernel.like_matrices(self._config, list_kernel.variant_of(self._problem, turned)),
            values=f"P{argument_bytes}s",
        )

    def _run(self, parts: Sequence[Part], total_bytes: int, count: int, adds: bool) -> core_plan.Launch:
        index, own_memory = self._index, bytes_on(self._device, total_bytes)
        like, none = (self._somewhere,) * 3, (0,) * 3
        current_device = torch._C._cuda_getDevice
        no_c, no_numbers, no_sizes = (0,) * count, (0.0,) * count, (0, 0, 0)
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
            sizes: Tensor | None = None,
            workspace: Tensor | None = None,
            addresses: Sequence[int] = (),
        ) -> None:
            nonlocal latest
            if not parts:
                return None
            if current_device() != index:
                with torch.cuda.device(index):
                    return run(out, a, b, c, alpha, beta, sizes, workspace, addresses)
            addresses = addresses or [*map(_address, (*out, *a, *b, *(c or ())))]
            alphas, alpha_at, alpha_step = factors(alpha)
            betas, beta_at, beta_step = factors(beta)
            values = (
                *addresses[: 3 * count], *(addresses[3 * count : 4 * count] if adds else no_c),
                *(alphas or no_numbers), *(betas or no_numbers),
                alpha_at, beta_at, *(no_sizes if sizes is None else sizes_at(sizes)), alpha_step, beta_step,
            )  # fmt: skip
            known, packed = latest  # read at once: other threads write it
            if values != known:
                if reduce(or_, map(values.__getitem__, read)) % dense.ALIGN:
                    return self._with_copies(out, a, b, c, alpha, beta, sizes, workspace=workspace)
                packed = [setup.pack(values) for _, _, setup in setups]
                latest = values, packed
            # From torch's allocator and for this call alone, so that calls on several streams do not meet.
            memory = own_memory() if workspace is None else workspace
            stream, start = raw_stream(index), memory.data_ptr()
            for (at, launcher, _), told in zip(setups, packed, strict=True):
                launcher(stream, like, start + at, told)
            for part in parts:
                part.launcher(stream, none, start + part.memory, len(part.order))
            return None

        return run

    def _with_copies(
        self,
        out: Tensors,
        a: Tensors,
        b: Tensors,
        c: Tensors | None,
        alpha: Numbers,
        beta: Numbers,
        sizes: Tensor | None = None,
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
                    if sizes is not None:  # what is not in use stays as it was
                        targets[i].copy_(out[i])
                if not a[i].size(1):  # nothing is read
                    left[i], right[i] = a[i].new_empty(a[i].shape), b[i].new_empty(b[i].shape)
                    continue
                turned = self._turned(a[i], b[i])
                left[i] = gemm.readable(a[i], turned[0])
                right[i] = gemm.readable(b[i].t(), turned[1]).t()
            self(targets, left, right, c, alpha, beta, sizes, workspace=workspace)
            for one, target in zip(out, targets, strict=True):
                if target is not one:
                    one.copy_(target)
