"""`grouped_gemm` on Hopper with sizes in device memory, without a GPU: the small kernel itself, run by the emulator,
and a stand-in for the one that multiplies, which reads what the small one wrote."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import list_memory
from omnigemm.backends.cuda import CudaBackend, dense, explain_on, list_choice, list_launch, list_setup, lists
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.jit import KernelSpec, Result
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import Problem, describe
from omnigemm.ops.grouped_list import GROUPED_GEMM

H200 = KNOWN["h200"]
CONFIG = Config(False, 2, 1, 128, 4, right_share=2)
DOWN, ACROSS = CONFIG.tile_m * CONFIG.right_share, CONFIG.tile_n * CONFIG.left_share
NAN, GUARD = float("nan"), 77.0
Sizes = tuple[int, int, int]


@pytest.fixture(scope="module")
def small_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """By their names, to run on the processor."""

    specs = [list_setup.spec(lines) for lines in list_setup.LINES]
    return {one.name: emulated.compiled(one, tmp_path_factory.mktemp(one.name)) for one in specs}


class Machine:
    """Stands in for a GPU."""

    def __init__(self, small_kernels: dict[str, ctypes.CDLL]) -> None:
        self.small_kernels = small_kernels
        self.launches: list[str] = []
        self.tiles: list[int] = []  # of each launch that multiplied
        self.dtype, self.out_dtype = torch.bfloat16, torch.bfloat16
        self.grid = 0

    def multiply(self, launcher: Launcher, raw: bytes) -> None:
        """As gemm.cuh does with work_list.cuh."""
        memory, count = struct.unpack("112xPi4x", raw)
        turned = [way == "t" for way in launcher.kernel.name.split("_")[3]]
        total = 0
        for one in list_memory.read(memory, count):
            m, n = one.m, one.n
            total += -(-m // DOWN) * -(-n // ACROSS)
            assert one.tile_end == total
            if not (m and n):
                continue
            result = torch.zeros(m, n, dtype=torch.float64)
            if one.k_blocks:
                sides = []
                for map, side, way in zip(one.maps, (m, n), turned, strict=False):
                    found = map.matrix(self.dtype).double()
                    found = found.t() if way else found
                    assert found.size(0) == side
                    assert -(-found.size(1) // 64) == one.k_blocks
                    sides.append(found)
                result = sides[0] @ sides[1].t()
            one.check_store(self.out_dtype)
            target = list_memory.memory_at(one.out, m, n, one.out_row, 1, self.out_dtype)
            target.copy_(one.alpha * result + one.added())
        self.tiles.append(total)
        self.grid = launcher.options["grid"]


class Launcher:
    machine: Machine

    def __init__(self, kernel: KernelSpec, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.format = struct.Struct(options["values"])

    def __call__(self, stream: int, addresses: Sequence[int], *values: Any) -> None:
        assert len(addresses) == len(self.options["matrices"]) == 3
        raw = self.format.pack(*values)
        self.machine.launches.append(self.kernel.name)
        small = self.machine.small_kernels.get(self.kernel.name)
        if small is None:
            self.machine.multiply(self, raw)
        else:
            emulated.run(small, raw, grid=self.options["grid"], threads=self.options["threads"])


class Handle:
    local_bytes = 0

    def __init__(self, kernel: KernelSpec) -> None:
        self.kernel = kernel


@pytest.fixture
def machine(small_kernels: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Launcher.machine = Machine(small_kernels)
    here = torch.device("cpu")
    monkeypatch.setattr(list_launch, "Launcher", Launcher)
    monkeypatch.setattr(dense, "load", lambda spec, index, shared: Handle(spec))
    monkeypatch.setattr(list_launch, "raw_stream", lambda index: 0)
    monkeypatch.setattr(list_setup, "most_lines", lambda: list_setup.LINES[-1])
    monkeypatch.setattr(list_launch.torch, "device", lambda *_: here)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def matrix(rows: int, cols: int, way: str, dtype: torch.dtype) -> Tensor:
    """Lines at multiples of 16 bytes, or not ("odd")."""
    if way == "col":
        return matrix(cols, rows, "row", dtype).t()
    width = cols + 3 if way == "odd" else -(-cols // 8) * 8
    return torch.randn(rows, width).to(dtype)[:, :cols]


class Case:
    """Products of which all that is not in use is NaN, with guards in the results."""

    def __init__(
        self,
        room: Sequence[Sizes],
        ways: tuple[str, str] = ("row", "col"),
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
        c: bool = False,
        out_way: str = "row",
    ) -> None:
        self.room, self.dtype, self.out_dtype = room, dtype, out_dtype or dtype
        both = [[("row", "col")[i >> side & 1] if way == "mixed" else way for i in range(len(room))]
                for side, way in enumerate(ways)]  # fmt: skip
        self.a = [matrix(m, k, way, dtype) for (m, _, k), way in zip(room, both[0], strict=True)]
        self.b = [matrix(k, n, way, dtype) for (_, n, k), way in zip(room, both[1], strict=True)]
        self.c = [torch.randn(m, n).to(self.out_dtype) for m, n, _ in room] if c else None
        self.alpha = [1.0 - 0.5 * (i % 3) if c else 1.0 for i in range(len(room))]
        self.beta = [0.5 * (i % 4) if c else 0.0 for i in range(len(room))]
        self.out = [matrix(m, n, out_way, self.out_dtype) for m, n, _ in room]
        self.sizes = torch.empty(len(room), 3, dtype=torch.int32)
        self.on_device = True
        self.runner: list_launch.Lists | None = None

    def used(self) -> list[Sizes]:
        """What sizes are taken for."""
        given = self.sizes.tolist() if self.on_device else self.room
        clamped = [
            [min(max(x, 0), y) for x, y in zip(one, room, strict=True)]
            for one, room in zip(given, self.room, strict=True)
        ]
        return [(m, n, k) for m, n, k in clamped]

    def run(self, machine: Machine, sizes: Sequence[Sizes], workspace: Tensor | None = None) -> None:
        machine.dtype, machine.out_dtype = self.dtype, self.out_dtype
        machine.tiles.clear()
        self.sizes.copy_(torch.tensor(sizes))
        # What is not in use must not matter, so each run has operands of its own.
        a = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in self.a]
        b = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in self.b]
        for i, (m, n, k) in enumerate(self.used()):
            a[i][m:], a[i][:, k:], b[i][k:], b[i][:, n:] = NAN, NAN, NAN, NAN
            self.out[i].fill_(GUARD)
            self.out[i][:m, :n] = NAN
        operands = a, b, self.c, self.alpha, self.beta, self.sizes if self.on_device else None
        if self.runner is None:
            problem = GROUPED_GEMM.describe(operands, GROUPED_GEMM.check(operands, self.out, None))
            assert problem.device_sizes == self.on_device
            self.runner = list_launch.Lists(problem, CONFIG, 0, H200.multiprocessors)
        self.runner.bind(self.out, *operands)(self.out, *operands, workspace=workspace)
        for i, (m, n, k) in enumerate(self.used()):
            want = self.alpha[i] * (self.a[i][:m, :k].double() @ self.b[i][:k, :n].double())
            if self.c is not None:
                want += self.beta[i] * self.c[i][:m, :n].double()
            got = self.out[i]
            torch.testing.assert_close(got[:m, :n].double(), want.to(got.dtype).double())
            assert bool((got[m:] == GUARD).all()), f"rows below product {i}"
            assert bool((got[:, n:] == GUARD).all()), f"columns beside product {i}"
        wanted = sum(-(-m // DOWN) * -(-n // ACROSS) for m, n, _ in self.used())
        assert sum(machine.tiles) == wanted


ROOM: list[Sizes] = [(40, 64, 72), (257, 130, 200), (1, 1, 1), (130, 24, 8), (300, 264, 64), (9, 8, 0), (0, 8, 8)]
NOTHING = [(0, 0, 0)] * len(ROOM)
SIZES: dict[str, list[Sizes]] = {
    "all": list(ROOM),
    "nothing": NOTHING,
    "some": [(39, 63, 71), (256, 128, 1), (1, 1, 0), (128, 16, 8), (1, 264, 63), (9, 7, 0), (0, 8, 8)],
    "rows only": [(m // 2, n, k) for m, n, k in ROOM],
    "columns only": [(m, n // 2, k) for m, n, k in ROOM],
    "no rows": [(0, n, k) for m, n, k in ROOM],
    "no columns": [(m, 0, k) for m, n, k in ROOM],
    "no k": [(m, n, 0) for m, n, k in ROOM],
    "too large": [(m + 1, n + 100, 2**31 - 1) for m, n, k in ROOM],
    "negative": [(-1, n, k) if i % 2 else (m, n, -(2**31)) for i, (m, n, k) in enumerate(ROOM)],
    "one at the end": [*NOTHING[:4], (300, 264, 64), (0, 0, 0), (0, 0, 0)],
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(machine: Machine, name: str) -> None:
    made = Case(ROOM)
    made.run(machine, SIZES[name])
    assert ["setup" in one for one in machine.launches] == [True, False]


@pytest.mark.parametrize(
    "ways", [(x, y) for x in ("row", "col", "mixed", "odd") for y in ("row", "col", "odd")], ids="-".join
)
def test_every_layout_and_sizes_that_change(machine: Machine, ways: tuple[str, str]) -> None:
    """One binding, as a graph has it: only what stands in the tensor differs."""
    made = Case(ROOM, ways)
    for sizes in SIZES.values():
        made.run(machine, sizes)


@pytest.mark.parametrize("out_way", ["row", "odd", "col"])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_results_and_c(machine: Machine, out_dtype: torch.dtype, out_way: str) -> None:
    """Transposed results are copied, with what they hold beside."""
    made = Case(ROOM, dtype=torch.float16, out_dtype=out_dtype, c=True, out_way=out_way)
    for sizes in SIZES.values():
        made.run(machine, sizes)


@pytest.mark.parametrize("count", [1, 7, 400])
def test_sizes_of_the_host_by_the_same_kernel(machine: Machine, count: int) -> None:
    made = Case((ROOM * count)[:count], ("mixed", "row"), c=True)
    made.on_device = False
    made.run(machine, NOTHING[:1] * count)  # not read


def test_results_leave_by_the_copy_engine_where_what_is_used_ends_at_16_bytes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    real = list_memory.read

    def look(memory: int, count: int) -> list[list_memory.Product]:
        lines = real(memory, count)
        found.extend(one.straight for one in lines)
        return lines

    monkeypatch.setattr(list_memory, "read", look)
    Case([(64, 64, 64)] * 4).run(machine, [(64, 64, 64), (3, 56, 9), (64, 63, 64), (64, 60, 64)])
    assert found == [1, 1, 0, 0]


def test_blocks_are_as_many_as_there_may_be_tiles(machine: Machine) -> None:
    made = Case([(DOWN * 3, ACROSS * 2, 8)])
    made.run(machine, [(1, 1, 8)])
    assert machine.tiles == [1]
    assert machine.grid == 6 * CONFIG.cluster


@pytest.mark.parametrize("count", [1, 5, 36, 37, 109, 324, 325, 600, 601, 1000])
def test_long_lists(machine: Machine, count: int) -> None:
    """Tiles are counted on from one launch of the small kernel to the next."""
    source = random.Random(count)

    def some(most: Sizes) -> Sizes:
        m, n, k = (source.choice((source.randint(-1, size + 1), 0, size)) for size in most)
        return m, n, k

    room: list[Sizes] = [(source.choice((4, 300)), source.choice((5, 140)), source.randint(0, 9)) for _ in range(count)]
    made = Case(room)
    for _ in range(2):
        made.run(machine, [some(one) for one in room])
    assert len(machine.tiles) == -(-count // list_choice.PRODUCT_LIMIT)


def test_small_parameters_where_the_driver_is_old(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_setup, "most_lines", lambda: list_setup.SMALL_LINES)
    made = Case([(300, 5, 8)] * 100)
    made.run(machine, [(3 * i, i % 6, 8) for i in range(100)])
    assert [name for name in machine.launches if "setup" in name] == ["omnigemm_sm90_list_setup_36"] * 3


def test_sizes_may_lie_apart(machine: Machine) -> None:
    made = Case(ROOM)
    made.sizes = torch.full((5, 2 * len(ROOM)), -1, dtype=torch.int32).t()[::2, 1:4]
    for sizes in SIZES.values():
        made.run(machine, sizes)


def test_a_workspace_serves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_launch, "bytes_on", lambda *_: lambda: pytest.fail("the workspace was not used"))
    problem = described(ROOM, b_layout="col")
    plan = lists.Sm90List(problem, list_choice.Choice(CONFIG, 1.0), H200).plan(
        problem, type("Device", (), {"index": 0})()
    )
    workspace = torch.full((plan.workspace_bytes + 128,), 255, dtype=torch.uint8)
    made = Case(ROOM)
    for sizes in SIZES.values():
        made.run(machine, sizes, workspace[-workspace.data_ptr() % 128 :])


# ------------------------------------------------------------------------------------------ choice and explanation


def described(shapes: Sequence[Sizes], **words: Any) -> Problem:
    return describe("grouped_gemm", m=0, n=0, k=0, shapes=shapes, device_sizes=True, **words)


def test_explain_says_who_reads_them() -> None:
    found = explain_on(described([(512, 512, 512)] * 4, b_layout="col"), H200).chosen
    assert found is not None
    assert "sizes are read on the GPU" in found.reason
    # The kernels are those of other lists: nothing is compiled anew.
    same = describe("grouped_gemm", m=512, n=512, k=512, groups=4)
    assert CudaBackend().specs(described([(512, 512, 512)] * 4), H200) == CudaBackend().specs(same, H200)


@pytest.mark.parametrize("size", [64, 500, 4096])
@pytest.mark.parametrize("words", [{}, {"out_dtype": "fp32", "beta": 1.0}, {"a_layout": "col", "beta": 1.0}], ids=str)
def test_kernels_compile_clean(
    compile_all: Callable[[Sequence[KernelSpec]], list[Result]],
    compiles_clean: Callable[[Result], None],
    words: dict[str, Any],
    size: int,
) -> None:
    for result in compile_all(CudaBackend().specs(described([(size, size, size)] * 8, **words), H200)):
        compiles_clean(result)
