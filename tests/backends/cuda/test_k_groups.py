"""`grouped_gemm_k_contiguous` on Hopper without a GPU: the small kernel itself, run by the emulator, and a stand-in for
the one that multiplies, which reads what the small one wrote."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import host_compiler
import list_memory
from list_memory import memory_at
from omnigemm.backends.blas import estimate
from omnigemm.backends.cuda import CudaBackend, dense, explain_on, group_choice, k_groups, list_choice, list_kernel
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.jit import KernelSpec, Result
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import Problem, describe
from omnigemm.ops.grouped_k import GROUPED_K_CONTIGUOUS

H200 = KNOWN["h200"]
CONFIG = Config(False, 2, 1, 128, 4, right_share=2)
NAN = float("nan")
BEFORE = """
#include "common/k_groups.cuh"
extern "C" int before(const int* ends, int first, int here, int group, int lane, int lanes) {
    return KGroups{ends, first, here}.before(group, lane, lanes);
}
"""


@pytest.fixture(scope="module")
def small_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """For 16 bits and for fp8, to run on the processor."""
    specs = [k_groups.setup_spec(size) for size in (1, 2)]
    return {one.name: emulated.compiled(one, tmp_path_factory.mktemp(one.name)) for one in specs}


class Machine:
    """Stands in for a GPU."""

    def __init__(self, small_kernels: dict[str, ctypes.CDLL]) -> None:
        self.small_kernels = small_kernels
        self.launches: list[str] = []
        self.dtypes, self.out_dtype = (torch.bfloat16,) * 2, torch.float32

    def operand(self, map: list_memory.Map, side: int, k: int, dtype: torch.dtype) -> Tensor:
        """[M or N, K] in float64."""
        assert map.address % 16 == 0
        assert map.pitch % 16 == 0
        assert (map.columns, map.rows) == ((k, side) if self.fp8 else (side, k))
        found = map.matrix(dtype).double()
        return found if self.fp8 else found.t()

    @property
    def fp8(self) -> bool:
        return self.dtypes[0].itemsize == 1

    def multiply(self, launcher: Launcher, raw: bytes) -> None:
        """As gemm.cuh does with work_list.cuh, for what list_memory.cuh says."""
        scales: list[int] = []
        if self.fp8:
            *scales, memory, count, scale_pitch = struct.unpack("PP56xPii", raw)
        else:
            memory, count = struct.unpack("112xPi4x", raw)
        down, across = CONFIG.tile_m * CONFIG.right_share, CONFIG.tile_n * CONFIG.left_share
        total, last_blocks = 0, 2**31
        for one in list_memory.read(memory, count):
            m, n = one.m, one.n
            total += -(-m // down) * -(-n // across)
            assert one.tile_end == total
            assert one.k_blocks <= last_blocks or self.fp8, "long tiles first"
            last_blocks = one.k_blocks
            result = torch.zeros(m, n, dtype=torch.float64)
            if one.k_blocks:
                k = one.maps[0].columns if self.fp8 else one.maps[0].rows
                assert -(-k // (128 if self.fp8 else 64)) == one.k_blocks
                sides = [self.operand(one.maps[i], (m, n)[i], k, self.dtypes[i]) for i in range(2)]
                for i, at in enumerate(scales):
                    first = at + 4 * one.first_block
                    some = memory_at(first, (m, n)[i], one.k_blocks, scale_pitch, 1, torch.float32)
                    sides[i] = sides[i] * some.double().repeat_interleave(128, 1)[:, :k]
                result = sides[0] @ sides[1].t()
            one.check_store(self.out_dtype)
            memory_at(one.out, m, n, one.out_row, 1, self.out_dtype).copy_(one.alpha * result + one.added())
        packs = H200.multiprocessors // CONFIG.cluster
        assert launcher.options["grid"] == min(total, packs) * CONFIG.cluster


class Launcher:
    machine: Machine

    def __init__(self, kernel: KernelSpec, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.format = struct.Struct(options["values"])

    def __call__(self, stream: int, addresses: Sequence[int], *values: Any) -> None:
        assert len(addresses) == len(self.options["matrices"]) == 3
        raw = self.format.pack(*values)
        self.machine.launches.append(self.kernel.name)
        if "setup" in self.kernel.name:
            store, size = self.options["matrices"][2], self.machine.out_dtype.itemsize
            assert (store.element_bytes, store.box) == (size, (128 // size, 64))
            small = self.machine.small_kernels[self.kernel.name]
            emulated.run(small, raw, grid=self.options["grid"], threads=self.options["threads"])
        else:
            self.machine.multiply(self, raw)


class Handle:
    local_bytes = 0

    def __init__(self, kernel: KernelSpec) -> None:
        self.kernel = kernel


@pytest.fixture
def machine(small_kernels: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Launcher.machine = Machine(small_kernels)
    monkeypatch.setattr(k_groups, "Launcher", Launcher)
    monkeypatch.setattr(dense, "load", lambda spec, index, shared: Handle(spec))
    monkeypatch.setattr(k_groups, "raw_stream", lambda index: 0)
    here = torch.device("cpu")
    monkeypatch.setattr(k_groups.torch, "device", lambda *_: here)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def clamped(ends: Sequence[int], total: int) -> list[slice]:
    """What bad ends are taken for."""
    found, last = [], 0
    for end in ends:
        here = min(max(end, last), total)
        found.append(slice(last, here))
        last = here
    return found


def run(
    machine: Machine,
    a: Tensor,
    b: Tensor,
    ends: Sequence[int],
    c: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    runner: k_groups.KGroups | None = None,
    index: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> k_groups.KGroups:
    """Into a result of NaN; compared with float64."""
    if out is None:
        out = torch.full((len(ends), a.size(1), b.size(1)), NAN, dtype=out_dtype)
    machine.dtypes, machine.out_dtype = (a.dtype, b.dtype), out.dtype
    index = torch.tensor(ends, dtype=torch.int32) if index is None else index
    operands = a, b, index, c, *(scales or (None, None))
    spec = GROUPED_K_CONTIGUOUS.check(operands, out, None)
    if runner is None:
        runner = k_groups.KGroups(GROUPED_K_CONTIGUOUS.describe(operands, spec), CONFIG, 0, H200.multiprocessors)
    left, right, total = a.double(), b.double(), a.size(0)
    if scales is not None:
        spread = [one.double().repeat_interleave(128, 1)[:, :total].t() for one in scales]
        left, right = left * spread[0], right * spread[1]
    wanted = torch.stack([left[rows].t() @ right[rows] for rows in clamped(ends, total)])
    if scales is not None:
        for group, rows in enumerate(clamped(ends, total)):
            if any(one % 128 and one != total for one in (rows.start, rows.stop)):
                wanted[group] = NAN
    if c is not None:
        wanted += c.double()
    runner.bind(out, *operands)(out, *operands)
    torch.testing.assert_close(out.double(), wanted.to(out.dtype).double(), equal_nan=True)
    return runner


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows at multiples of 16 bytes."""
    return torch.randn(rows, -(-cols // 8) * 8).to(dtype)[:, :cols]


ENDS = ([5, 5, 70, 71, 300], [300], [0, 0], [64, 128, 300], [1])
BAD_ENDS = ([7, 3, 400, 20], [-5, -1, 9], [2**31 - 1, 0, 5], [-(2**31), 300, 301])


@pytest.mark.parametrize("ends", [*ENDS, *BAD_ENDS], ids=str)
@pytest.mark.parametrize("sizes", [(40, 24), (1, 1), (130, 7), (257, 136)], ids=str)
def test_every_group(machine: Machine, sizes: tuple[int, int], ends: list[int]) -> None:
    a, b = matrix(300, sizes[0]), matrix(300, sizes[1])
    for out_dtype in (torch.float32, torch.bfloat16):
        run(machine, a, b, ends, out_dtype=out_dtype)
    setup, main = machine.launches[:2]
    assert "k_groups_setup" in setup
    assert "bf16_tt_list_rows" in main


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c(machine: Machine, dtype: torch.dtype) -> None:
    a, b, ends = matrix(90, 20, dtype), matrix(90, 33, dtype), [10, 10, 90]
    for kind in (torch.float32, dtype):
        c = torch.randn(3, 20, 33).to(kind)
        runner = run(machine, a, b, ends, c, out_dtype=kind)
        run(machine, a, b, ends, torch.randn(3, 33, 20).to(kind).transpose(1, 2), out_dtype=kind, runner=runner)
        run(machine, a, b, ends, c[:, :1].expand(3, 20, 33), out_dtype=kind, runner=runner)
        run(machine, a, b, ends, c, out=c, runner=runner)


def test_odd_strides_and_addresses_are_copied(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    real = dense.aligned_copy
    monkeypatch.setattr(dense, "aligned_copy", lambda x: copies.append(1) or real(x))
    room = torch.randn(90, 304).bfloat16()
    runner = run(machine, room[:80, :20], room[:80, 8:24], [30, 80])
    assert not copies
    run(machine, room[:80, 1:21], room[:80, 8:24], [30, 80], runner=runner)  # the same strides, another address
    assert len(copies) == 1
    run(machine, room[:80, :20], torch.randn(80, 16).bfloat16(), [30, 80])
    assert len(copies) == 1
    run(machine, torch.randn(80, 17).bfloat16(), torch.randn(16, 80).bfloat16().t(), [30, 80])
    assert len(copies) == 3
    run(machine, room[::2, ::3], room[::2, ::2], [3, 45])
    assert len(copies) == 5


def test_results_are_written_where_they_were_asked_for(machine: Machine) -> None:
    a, b, ends = matrix(50, 20), matrix(50, 10), [20, 20, 50]
    for kind in (torch.float32, torch.bfloat16):
        room = torch.full((5, 30, 31), NAN, dtype=kind)
        run(machine, a, b, ends, out=room[1:4, 3:23, 7:17])
        assert int((~room.isnan()).sum()) == 600
        turned = torch.full((3, 10, 20), NAN, dtype=kind).transpose(1, 2)
        run(machine, a, b, ends, out=turned)
        before = torch.randn(3, 10, 20).to(kind).transpose(1, 2)
        run(machine, a, b, ends, before, out=before)


def test_ends_may_lie_apart(machine: Machine) -> None:
    apart = torch.tensor([3, 99, 3, 99, 40, 99], dtype=torch.int32)[::2]
    run(machine, matrix(40, 8), matrix(40, 9), [3, 3, 40], index=apart)


@pytest.mark.parametrize("count", [1, 4, 5, 33, 700, 701, 1500])
def test_many_groups(machine: Machine, count: int) -> None:
    source = random.Random(count)
    ends = sorted(source.randint(0, 600) for _ in range(count))
    run(machine, matrix(600, 5), matrix(600, 3), ends)
    launches = -(-count // list_choice.PRODUCT_LIMIT)
    assert ["setup" in name for name in machine.launches] == [True] * launches + [False] * launches


def test_workspace_is_what_the_plan_says(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = torch.empty

    def empty(size: int, **words: Any) -> Tensor:
        taken.append(size)
        return real(size, **words)

    problem = described(m=8, n=8, k=64, groups=800)
    found = k_groups.Sm90KGroups(problem, list_choice.Choice(CONFIG, 1.0), H200)
    plan = found.plan(problem, type("Device", (), {"index": 0})())
    a, b, ends = matrix(64, 8), matrix(64, 8), torch.full((800,), 64, dtype=torch.int32)
    out = real(800, 8, 8)
    monkeypatch.setattr(k_groups.torch, "empty", empty)
    plan.launch(out, a, b, ends, None, None, None)
    assert 800 * list_kernel.MEMORY_BYTES <= sum(taken) == plan.workspace_bytes


@pytest.mark.parametrize("way", ["in place", "odd strides", "odd address"])
@pytest.mark.parametrize("groups", [1, 600, 601, 1300])
def test_a_workspace_of_the_planned_size_is_enough_and_serves_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, groups: int, way: str
) -> None:
    """Also where operands are copied first, because of strides, which binding sees, or addresses, which a call does."""
    problem = described(m=8, n=5, k=64, groups=groups)
    here = type("Device", (), {"index": 0})()
    plan = k_groups.Sm90KGroups(problem, list_choice.Choice(CONFIG, 1.0), H200).plan(problem, here)
    assert plan.takes_workspace
    beside = lambda *_: lambda: pytest.fail("memory was allocated beside the workspace")  # noqa: E731
    monkeypatch.setattr(k_groups, "bytes_on", beside)
    room = torch.full((plan.workspace_bytes + 256,), 77, dtype=torch.uint8)
    room = room[-room.data_ptr() % 128 :]
    workspace, behind = room[: plan.workspace_bytes], room[plan.workspace_bytes :]
    a = matrix(64, 16)[:, :8]
    if way != "in place":
        a = torch.randn(64, 9).bfloat16()[:, :8] if way == "odd strides" else matrix(64, 16)[:, 1:9]
    b, ends = matrix(64, 5), torch.arange(1, groups + 1, dtype=torch.int32).clamp(max=64)
    wanted = [a[rows].double().t() @ b[rows].double() for rows in clamped(ends.tolist(), 64)]
    for _ in range(2):
        out = torch.full((groups, 8, 5), NAN)
        plan.launch(out, a, b, ends, None, None, None, workspace=workspace)
        torch.testing.assert_close(out.double(), torch.stack(wanted))
    assert bool((behind == 77).all())


FP8 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_ENDS = ([128, 128, 384, 512], [512, 700], [700], [0, 256, 512, 999], [128, 0, 256])
FP8_BAD_ENDS = ([100, 256, 700], [128, 200, 200, 384], [64, 64], [699, 700])


@pytest.mark.parametrize("ends", [*FP8_ENDS, *FP8_BAD_ENDS], ids=str)
@pytest.mark.parametrize("way", ["col", "row"])
def test_fp8(machine: Machine, ends: list[int], way: str) -> None:
    """With a last block that is not whole; and groups that share one are NaN."""
    a, b = torch.randn(40, 704).to(FP8[1])[:, :700].t(), torch.randn(24, 704).to(FP8[0])[:, :700].t()
    if way == "row":  # copied
        a, b = (x.view(torch.uint8).contiguous().view(x.dtype) for x in (a, b))
    scales = torch.rand(40, 6), torch.rand(24, 6)
    for out_dtype in (torch.float32, torch.bfloat16):
        machine.launches.clear()
        runner = run(machine, a, b, ends, out_dtype=out_dtype, scales=scales)
        apart = torch.rand(6, 40).t(), torch.rand(24, 12)[:, ::2]
        run(machine, a, b, ends, out_dtype=out_dtype, scales=apart, runner=runner)
        c = torch.randn(len(ends), 40, 24).to(out_dtype)
        run(machine, a, b, ends, c, out=c, scales=scales)
        assert "fp8_1x128_list_rows" in machine.launches[1]


def test_longer_groups_come_first(tmp_path: Path) -> None:
    library = host_compiler.library(tmp_path, BEFORE)
    source = random.Random(0)
    for _ in range(50):
        ends = sorted(source.randint(0, 40) for _ in range(source.randint(1, 80)))
        first = source.randrange(len(ends))
        here = source.randint(1, len(ends) - first)
        numbers = (ctypes.c_int * len(ends))(*ends)
        places = [
            sum(library.before(numbers, first, here, group, lane, 7) for lane in range(7))
            for group in range(first, first + here)
        ]
        assert sorted(places) == list(range(here))
        rows = {place: ends[first + i] - ([0, *ends][first + i]) for i, place in enumerate(places)}
        assert [rows[place] for place in range(here)] == sorted(rows.values(), reverse=True)


# ------------------------------------------------------------------------------------------ choice and explanation


def described(**words: Any) -> Problem:
    return describe("grouped_gemm_k_contiguous", **words)


def test_explain_says_what_runs() -> None:
    found = explain_on(described(m=4096, n=2048, k=32768, groups=8), H200).chosen
    assert found is not None
    assert found.kernel.startswith("sm90_bf16_tt_list_rows_")
    assert "for 4096 rows in a group" in found.reason
    assert "copied" not in found.reason
    for words in ({"m": 4097}, {"n": 2044}, {"a_layout": "col"}, {"b_layout": "strided"}):
        odd = explain_on(described(**{"m": 4096, "n": 2048, "k": 32768, **words}), H200).chosen
        assert odd is not None
        assert "operands are copied first" in odd.reason


def test_nothing_to_add_up() -> None:
    for words in ({"k": 0}, {"m": 0}, {"n": 0}, {"groups": 0}):
        problem = described(**{"m": 4, "n": 8, "k": 16, "groups": 3, **words})
        found = k_groups.kernels(problem, H200)
        assert [one.name for one in found] == ["fill"]
        assert CudaBackend().specs(problem, H200) == ()
    launch = found[0].plan(problem, torch.device("cpu")).launch
    for c in (None, torch.randn(2, 3, 4)):
        out = torch.full((2, 3, 4), NAN)
        launch(out, torch.zeros(0, 3), torch.zeros(0, 4), torch.zeros(2, dtype=torch.int32), c, None, None)
        assert torch.equal(out, torch.zeros(2, 3, 4) if c is None else c)


def test_what_is_refused_and_why() -> None:
    many = described(m=8, n=8, k=64, groups=group_choice.GROUP_LIMIT + 1)
    assert "8193 groups, expected at most 8192" in CudaBackend().supports_on(many, H200).reason
    huge = described(m=2**22, n=2**22, k=64, groups=2)
    assert "tiles of 64x64" in CudaBackend().supports_on(huge, H200).reason
    wide = described(m=8, n=8, k=64, dtype="fp32")
    assert "fp32 products" in CudaBackend().supports_on(wide, H200).reason


def test_groups_are_never_left_to_a_library_that_waits_for_the_device() -> None:
    for m, n, k in ((64, 64, 64), (2048, 1024, 4096), (7168, 4096, 65536)):
        problem = described(m=m, n=n, k=k, groups=16)
        assert k_groups.kernels(problem, H200)[0].cost(problem, torch.device("cpu")) < estimate.seconds(problem)


@pytest.mark.parametrize(
    "words",
    [
        {"m": 4096, "n": 2048, "k": 32768},
        {"m": 4096, "n": 2048, "k": 32768, "beta": 1.0},
        {"m": 4096, "n": 2048, "k": 32768, "beta": 1.0, "out_dtype": "bf16"},
        {"m": 64, "n": 64, "k": 512, "dtype": "fp16", "out_dtype": "fp16"},
        {"m": 4096, "n": 2048, "k": 32768, "dtype": "e4m3", "beta": 1.0},
        {"m": 4096, "n": 2048, "k": 32768, "dtype": "e5m2", "weight_dtype": "e4m3", "out_dtype": "bf16", "beta": 1.0},
        {"m": 64, "n": 64, "k": 512, "dtype": "e4m3"},
    ],
    ids=str,
)
def test_kernels_compile_clean(
    compile_all: Callable[[Sequence[KernelSpec]], list[Result]],
    compiles_clean: Callable[[Result], None],
    words: dict[str, Any],
) -> None:
    for result in compile_all(CudaBackend().specs(described(**words), H200)):
        compiles_clean(result)
