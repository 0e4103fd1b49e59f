"""`grouped_gemm` on Hopper without a GPU: what the host hands to the kernels, read back by a stand-in that computes."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from list_memory import TYPES, memory_at
from omnigemm.backends.blas import estimate
from omnigemm.backends.cuda import (
    CudaBackend,
    dense,
    explain_on,
    list_choice,
    list_kernel,
    list_launch,
    list_setup,
    lists,
)
from omnigemm.backends.cuda.by_layout import ByLayout
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.jit import KernelSpec, Result
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.plan import Plan
from omnigemm.core.problem import Problem, describe
from omnigemm.ops import _run
from omnigemm.ops.grouped_list import GROUPED_GEMM, grouped_gemm
from op_support import forget_calls

H200 = KNOWN["h200"]
CONFIG = Config(False, 2, 1, 128, 4, right_share=2)


# ------------------------------------------------------------------------------- kernels that compute on the host


class Machine:
    """Stands in for a GPU: launches of the small kernel fill its table, those of the other read it."""

    def __init__(self) -> None:
        self.table: dict[tuple[int, int], dict[str, Any]] = {}
        self.launches: list[str] = []
        self.dtype, self.out_dtype = torch.bfloat16, torch.bfloat16

    def setup(self, launcher: Launcher, raw: bytes) -> None:
        """As list_setup.cuh has it."""
        lines = launcher.lines
        memory, count, first, here, a_turned, b_turned, out_bytes, *rest = struct.unpack_from("P8i3P2q2i", raw)
        assert out_bytes == self.out_dtype.itemsize
        store = launcher.options["matrices"][2]
        assert (store.element_bytes, store.box) == (out_bytes, (128 // out_bytes, 64))
        assert rest[:2] == [CONFIG.tile_m * CONFIG.right_share, CONFIG.tile_n * CONFIG.left_share]
        assert rest[4:7] == [0, 0, 0], "sizes are the host's"
        on_device, steps = rest[2:4], rest[7:]
        assert len(raw) == 88 + 96 * lines
        assert here <= lines
        assert 384 + len(raw) <= (4096 if lines == list_setup.SMALL_LINES else 32764)
        assert launcher.options["grid"] * 4 >= here
        at = 88 + 56 * lines
        columns = [struct.unpack_from(f"{here}Q", raw, at + 8 * lines * i) for i in range(4)]
        factors = [struct.unpack_from(f"{here}f", raw, at + 32 * lines + 4 * lines * i) for i in range(2)]
        for i in range(here):
            m, n, k, tile_end, a_pitch, b_pitch, c_type, place, out_stride, c_row, c_col = struct.unpack_from(
                "4i2I2i3q", raw, 88 + 56 * i
            )
            # Numbers on the device, if they are there, are read now.
            used = [
                float(memory_at(numbers + 4 * place * step, 1, 1, 1, 1, torch.float32)) if numbers else own[i]
                for numbers, step, own in zip(on_device, steps, factors, strict=True)
            ]
            self.table[memory, first + i] = {
                "sizes": (m, n, k), "tile_end": tile_end, "turned": (a_turned, b_turned),
                "pitches": (8 * a_pitch, 8 * b_pitch), "out_stride": out_stride, "c": (c_type, c_row, c_col),
                "addresses": [one[i] for one in columns], "factors": used, "count": count,
            }  # fmt: skip

    def multiply(self, launcher: Launcher, raw: bytes) -> None:
        memory, count = struct.unpack("112xPi4x", raw)
        down, across = CONFIG.tile_m * CONFIG.right_share, CONFIG.tile_n * CONFIG.left_share
        total, last_k = 0, 2**31
        for which in range(count):
            line = self.table.pop((memory, which))
            (m, n, k), (a, b, c, out), (alpha, beta) = line["sizes"], line["addresses"], line["factors"]
            total += -(-m // down) * -(-n // across)
            assert (line["tile_end"], line["count"]) == (total, count)
            assert k <= last_k, "long tiles first"
            last_k = k
            product = torch.zeros(m, n, dtype=torch.float64)
            if k:
                sides = []
                for rows, at, pitch, turned in zip((m, n), (a, b), line["pitches"], line["turned"], strict=True):
                    assert at % 16 == 0
                    steps = (1, pitch) if turned else (pitch, 1)
                    sides.append(memory_at(at, rows, k, *steps, self.dtype).double())
                product = sides[0] @ sides[1].t()
            product *= alpha
            if beta:
                kind, row, col = line["c"]
                product += beta * memory_at(c, m, n, row, col, TYPES[kind]).double()
            memory_at(out, m, n, line["out_stride"], 1, self.out_dtype).copy_(product)
        packs = H200.multiprocessors // CONFIG.cluster
        assert launcher.options["grid"] == min(total, packs) * CONFIG.cluster


class Launcher:
    machine: Machine

    def __init__(self, kernel: KernelSpec, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.lines = int(kernel.name.rsplit("_", 1)[1]) if "setup" in kernel.name else 0
        self.format = struct.Struct(options["values"])

    def __call__(self, stream: int, addresses: Sequence[int], *values: Any) -> None:
        assert len(addresses) == len(self.options["matrices"]) == 3
        raw = self.format.pack(*values)
        self.machine.launches.append(self.kernel.name)
        (self.machine.setup if self.lines else self.machine.multiply)(self, raw)


class Handle:
    local_bytes = 0

    def __init__(self, kernel: KernelSpec) -> None:
        self.kernel = kernel


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Launcher.machine = Machine()
    monkeypatch.setattr(list_launch, "Launcher", Launcher)
    monkeypatch.setattr(dense, "load", lambda spec, index, shared: Handle(spec))
    monkeypatch.setattr(list_launch, "raw_stream", lambda index: 0)
    monkeypatch.setattr(list_setup, "most_lines", lambda: list_setup.LINES[-1])
    here = torch.device("cpu")
    monkeypatch.setattr(list_launch.torch, "device", lambda *_: here)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made
    assert not made.table, "what was prepared was used"


def run(
    machine: Machine,
    a: list[Tensor],
    b: list[Tensor],
    c: list[Tensor] | None = None,
    alpha: list[float] | None = None,
    beta: list[float] | None = None,
    out: list[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    runner: list_launch.Lists | None = None,
) -> list_launch.Lists:
    """Into results of NaN; compared with float64."""
    alpha, beta = alpha or [1.0] * len(a), beta or [0.0] * len(a)
    machine.dtype, machine.out_dtype = a[0].dtype, out_dtype or a[0].dtype
    if out is None:
        out = [
            torch.full((x.size(0), y.size(1)), float("nan"), dtype=machine.out_dtype) for x, y in zip(a, b, strict=True)
        ]
    operands = a, b, c, alpha, beta, None
    specs = GROUPED_GEMM.check(operands, out, None)
    if runner is None:
        runner = list_launch.Lists(GROUPED_GEMM.describe(operands, specs), CONFIG, 0, H200.multiprocessors)
    wanted = [
        alpha[i] * (a[i].double() @ b[i].double()) + (beta[i] * c[i].double() if c and beta[i] else 0.0)
        for i in range(len(a))
    ]
    runner.bind(out, *operands)(out, *operands)
    for one, want in zip(out, wanted, strict=True):
        torch.testing.assert_close(one.double(), want.to(one.dtype).double())
    return runner


def matrix(rows: int, cols: int, layout: str = "row", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    if layout == "col":
        return matrix(cols, rows, dtype=dtype).t()
    if layout == "strided":
        return torch.randn(2 * rows, 2 * cols).to(dtype)[::2, ::2]
    return torch.randn(rows, -(-cols // 8) * 8).to(dtype)[:, :cols]


SHAPES = [(3, 40, 64), (130, 5, 16), (0, 8, 8), (257, 130, 200), (1, 1, 1), (8, 0, 3), (9, 24, 0), (40, 33, 500)]
LAYOUTS = tuple(itertools.product(("row", "col", "strided", "mixed"), repeat=2))


def operands(layouts: tuple[str, str], dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    ways = [[("row", "col")[i >> side & 1] if way == "mixed" else way for i in range(len(SHAPES))]
            for side, way in enumerate(layouts)]  # fmt: skip
    a = [matrix(m, k, way, dtype) for (m, _, k), way in zip(SHAPES, ways[0], strict=True)]
    b = [matrix(k, n, way, dtype) for (_, n, k), way in zip(SHAPES, ways[1], strict=True)]
    return a, b


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_every_layout(machine: Machine, layouts: tuple[str, str]) -> None:
    a, b = operands(layouts)
    run(machine, a, b)
    ways = 2 ** layouts.count("mixed")
    assert len(machine.launches) <= 2 * ways
    # What is prepared comes before all that multiplies: a kernel waits for the one before it.
    assert sorted(machine.launches, key=lambda name: "setup" not in name) == machine.launches


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_alpha_beta_and_c(machine: Machine, out_dtype: torch.dtype) -> None:
    a, b = operands(("row", "col"), torch.float16)
    for kind in (torch.float16, out_dtype):
        c = [torch.randn(m, n).to(kind) for m, n, _ in SHAPES]
        c[0], c[3] = c[0][:1], c[3][:, :1]  # spread
        beta = [0.5, 0.0, 1.0, 2.0, 3.0, 1.0, -1.0, 0.0]
        c[1].fill_(float("nan"))  # beta is 0: not read
        runner = run(machine, a, b, c, [0.5 * i for i in range(8)], beta, out_dtype=out_dtype)
        run(machine, a, b, c, [2.0] * 8, [2 * one for one in beta], out_dtype=out_dtype, runner=runner)


@pytest.mark.parametrize("form", ["one", "all", "strided"])
def test_factors_on_the_device(machine: Machine, form: str) -> None:
    """They are read when kernels run, wherever the products of a list went by their sizes and layouts."""
    a, b = operands(("mixed", "col"))
    c = [torch.randn(m, n).bfloat16() for m, n, _ in SHAPES]
    count = len(a)
    alpha, beta = torch.rand(2, 2 * count) + 0.5
    if form == "one":
        alpha, beta = alpha[:1], beta[3]
    else:
        step = 2 if form == "strided" else 1
        alpha, beta = (one[: step * count : step] for one in (alpha, beta))
    given: list[Any] = [a, b, c, alpha, beta, None]
    outs = [torch.empty(m, n, dtype=torch.bfloat16) for m, n, _ in SHAPES]
    problem = GROUPED_GEMM.describe(tuple(given), GROUPED_GEMM.check(tuple(given), outs, None))
    assert (problem.c, problem.scaled) == (True, True)
    runner = list_launch.Lists(problem, CONFIG, 0, H200.multiprocessors)
    launch = runner.bind(outs, *given)
    for mixed in (False, True):  # one of both may be numbers of the host's
        used = [*given[:3], [2.0] * count if mixed else alpha, beta, None]
        for _ in range(2):
            launch(outs, *used)
            for i in range(count):
                s, t = (float(one[i]) if isinstance(one, list) else float(one.expand(count)[i]) for one in used[3:5])
                want = s * (a[i].double() @ b[i].double()) + t * c[i].double()
                torch.testing.assert_close(outs[i].double(), want.bfloat16().double())
            alpha += 1
            beta *= -2
    beta.zero_()
    for one in c:
        one.fill_(float("nan"))  # not read
    launch(outs, *given)
    assert not any(bool(one.isnan().any()) for one in outs)


def test_c_may_be_out(machine: Machine) -> None:
    a, b = operands(("row", "row"))
    out = [torch.randn(m, n).bfloat16() for m, n, _ in SHAPES]
    run(machine, a, b, out, beta=[2.0] * len(a), out=out)


def test_odd_strides_and_addresses_are_copied_for_those_products_only(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    real = list_launch.gemm.dense.aligned_copy
    monkeypatch.setattr(list_launch.gemm.dense, "aligned_copy", lambda x: copies.append(1) or real(x))
    room = torch.randn(90, 304).bfloat16()
    a = [room[:20, :64], room[3:40, 1:202], room[:37, 8:72], room[:, 3:3]]
    b = [matrix(64, 10), matrix(201, 33, "col"), matrix(64, 9), matrix(0, 5)]
    runner = run(machine, a, b)
    assert len(copies) == 1
    # The same strides with other addresses.
    a[0] = room[:20, 1:65]
    run(machine, a, b, runner=runner)
    assert len(copies) == 3


def test_results_are_written_where_they_were_asked_for(machine: Machine) -> None:
    a, b = [matrix(20, 64), matrix(33, 16)], [matrix(64, 10), matrix(16, 7)]
    room = torch.full((60, 31), float("nan")).bfloat16()
    out = [room[1:21, 3:13], torch.full((7, 33), float("nan")).bfloat16().t()]
    run(machine, a, b, out=out)
    assert int((~room.isnan()).sum()) == 200


@pytest.mark.parametrize("count", [1, 36, 37, 108, 109, 324, 325, 600, 601, 1025, 2100])
def test_long_lists(machine: Machine, count: int) -> None:
    source = random.Random(count)
    shapes = [tuple(source.randint(1, 9) for _ in range(3)) for _ in range(count)]
    run(machine, [matrix(m, k) for m, _, k in shapes], [matrix(k, n) for _, n, k in shapes])
    mains = [name for name in machine.launches if "setup" not in name]
    assert len(mains) == -(-count // list_choice.PRODUCT_LIMIT)


def test_small_parameters_where_the_driver_is_old(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_setup, "most_lines", lambda: list_setup.SMALL_LINES)
    run(machine, [matrix(2, 8)] * 100, [matrix(8, 3)] * 100)
    assert [name for name in machine.launches if "setup" in name] == ["omnigemm_sm90_list_setup_36"] * 3


def test_workspace_is_what_the_plan_says(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = torch.empty

    def empty(size: int, **words: Any) -> Tensor:
        taken.append(size)
        return real(size, **words)

    a, b = operands(("mixed", "mixed"))
    problem = GROUPED_GEMM.describe(
        (a, b, None, [1.0], [0.0], None), GROUPED_GEMM.check((a, b, None, [1.0], [0.0] * 8, None), None, None)
    )
    plan = lists.Sm90List(problem, list_choice.Choice(CONFIG, 1.0), H200).plan(
        problem, type("Device", (), {"index": 0})()
    )
    out = [real(m, n, dtype=torch.bfloat16) for m, n, _ in SHAPES]
    monkeypatch.setattr(list_launch.torch, "empty", empty)
    plan.launch(out, a, b, None, [1.0] * 8, [0.0] * 8)
    assert 0 < sum(taken) <= plan.workspace_bytes


@pytest.mark.parametrize("count", [1, 8, 599, 600, 601, 1500])
@pytest.mark.parametrize("layouts", [("row", "col"), ("mixed", "mixed")], ids="-".join)
def test_a_workspace_of_the_planned_size_is_enough_and_serves_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, layouts: tuple[str, str], count: int
) -> None:
    ways = [["row", "col"] if way == "mixed" else [way] for way in layouts]
    a = [matrix(2, 9, ways[0][i % len(ways[0])]) for i in range(count)]
    b = [matrix(9, 3, ways[1][i // 2 % len(ways[1])]) for i in range(count)]
    numbers = [1.0] * count, [0.0] * count, None
    problem = GROUPED_GEMM.describe((a, b, None, *numbers), GROUPED_GEMM.check((a, b, None, *numbers), None, None))
    plan = lists.Sm90List(problem, list_choice.Choice(CONFIG, 1.0), H200).plan(
        problem, type("Device", (), {"index": 0})()
    )
    assert plan.takes_workspace
    room = torch.zeros(plan.workspace_bytes, dtype=torch.uint8)
    start, most = room.data_ptr(), 0
    beside = lambda *_: lambda: pytest.fail("memory was allocated beside the workspace")  # noqa: E731
    monkeypatch.setattr(list_launch, "bytes_on", beside)
    setup = Machine.setup

    def look(self: Machine, launcher: Launcher, raw: bytes) -> None:
        nonlocal most
        memory, all_of_them = struct.unpack_from("Pi", raw)
        assert (memory - start) % 128 == 0
        assert memory >= start
        most = max(most, memory - start + all_of_them * list_kernel.MEMORY_BYTES + list_kernel._COUNTER_BYTES)
        setup(self, launcher, raw)

    monkeypatch.setattr(Machine, "setup", look)
    for _ in range(2):
        out = [torch.full((2, 3), float("nan"), dtype=torch.bfloat16) for _ in range(count)]
        plan.launch(out, a, b, None, *numbers, workspace=room)
        for x, y, z in zip(a, b, out, strict=True):
            torch.testing.assert_close(z.double(), (x.double() @ y.double()).bfloat16().double())
    assert count * list_kernel.MEMORY_BYTES <= most <= plan.workspace_bytes


@pytest.mark.parametrize("moved", [False, True])
def test_lists_that_are_copied_use_the_workspace_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """Odd strides, which are seen before the launch, and odd addresses, which it sees itself."""
    room = torch.randn(20, 80).bfloat16()
    a, b, out = [room[:, :64]], [matrix(64, 9, "col")], [torch.empty(20, 9, dtype=torch.bfloat16)]
    odd = [room[:, 1:65]] if moved else [torch.randn(20, 67).bfloat16()[:, :64]]
    numbers = [1.0], [0.0], None
    problem = GROUPED_GEMM.describe((a, b, None, *numbers), GROUPED_GEMM.check((a, b, None, *numbers), None, None))
    runner = list_launch.Lists(problem, CONFIG, 0, H200.multiprocessors)
    workspace = torch.zeros(list_kernel.memory_bytes(1), dtype=torch.uint8)
    monkeypatch.setattr(list_launch, "bytes_on", lambda *_: lambda: pytest.fail("the workspace was not used"))
    for launch in (runner, runner.bind(out, odd, b, None, *numbers)):
        out[0].fill_(float("nan"))
        launch(out, odd, b, None, *numbers, workspace=workspace)
        torch.testing.assert_close(out[0].double(), (odd[0].double() @ b[0].double()).bfloat16().double())


def test_nothing_of_an_earlier_call_is_used_again(machine: Machine) -> None:
    """Addresses, then factors, then both: what was packed before is packed anew where they differ."""
    a, b = operands(("row", "col"))
    c = [torch.randn(m, n).bfloat16() for m, n, _ in SHAPES]
    runner = run(machine, a, b, c, [2.0] * 8, [3.0] * 8)
    run(machine, a, b, c, [2.0] * 8, [3.0] * 8, runner=runner)
    run(machine, a, b, c, [5.0] * 8, [3.0] * 8, runner=runner)
    run(machine, a, b, c, [5.0] * 8, [-3.0] * 8, runner=runner)
    for moved in (a, b, c):
        moved[3] = torch.empty_strided(moved[3].shape, moved[3].stride(), dtype=torch.bfloat16).copy_(moved[3] + 1)
        run(machine, a, b, c, [5.0] * 8, [-3.0] * 8, runner=runner)


@pytest.mark.parametrize("with_c", [False, True])
def test_calls_of_users_cold_warm_and_moved(machine: Machine, monkeypatch: pytest.MonkeyPatch, with_c: bool) -> None:
    """Through the operation, which hands on the addresses that it has read."""
    forget_calls()
    plans: list[Problem] = []

    def choose(problem: Problem, device: Any, backend: str | None) -> Plan:
        plans.append(problem)
        here = type("Device", (), {"index": 0})()
        return lists.Sm90List(problem, list_choice.Choice(CONFIG, 1.0), H200).plan(problem, here)

    monkeypatch.setattr(_run, "choose", choose)
    packed: list[int] = []
    pack = list_setup.Setup.pack
    monkeypatch.setattr(list_setup.Setup, "pack", lambda *given: packed.append(1) or pack(*given))
    a, b = operands(("row", "mixed"))
    c = [torch.randn(m, n).bfloat16() for m, n, _ in SHAPES]
    out = [torch.empty(m, n, dtype=torch.bfloat16) for m, n, _ in SHAPES]
    words: dict[str, Any] = {"c": c, "beta": [float(i % 3) for i in range(len(a))]} if with_c else {}

    def check(alpha: float, target: list[Tensor] | None) -> None:
        found = grouped_gemm(a, b, alpha=alpha, out=target, **words)
        assert target is None or found == target
        for i, one in enumerate(found):
            want = alpha * (a[i].double() @ b[i].double())
            want += words["beta"][i] * c[i].double() if with_c else 0.0
            torch.testing.assert_close(one.double(), want.bfloat16().double())

    for one in out:
        one.fill_(float("nan"))
    for alpha, times in ((2.0, 2), (2.0, 0), (3.0, 2)):  # two ways in which B lies
        before = len(packed)
        check(alpha, out)
        assert len(packed) - before == times
    for moved in (a, b, c, out):
        moved[3] = torch.empty_strided(moved[3].shape, moved[3].stride(), dtype=torch.bfloat16).copy_(moved[3] + 1)
        check(3.0, out)
    assert len(plans) == 1
    check(3.0, None)
    check(3.0, None)
    assert len(plans) == 2
    forget_calls()


def test_strides_that_a_plan_remembers_are_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByLayout, "LIMIT", 3)
    b, runner = [matrix(16, 8, "col")], None
    for pitch in range(16, 96, 8):
        runner = run(machine, [torch.randn(4, pitch).bfloat16()[:, :16]], b, runner=runner)
        assert 1 <= len(runner._bound) <= 3


# ------------------------------------------------------------------------------------------ choice and explanation


def described(shapes: Sequence[tuple[int, int, int]], **words: Any) -> Problem:
    return describe("grouped_gemm", m=0, n=0, k=0, shapes=shapes, **words)


def test_explain_says_what_runs() -> None:
    source = random.Random(0)
    shapes = [tuple(source.randrange(64, 8193, 8) for _ in range(3)) for _ in range(50)]
    found = explain_on(described(shapes, b_layout="col"), H200)
    assert found.chosen is not None
    assert found.chosen.kernel.startswith("sm90_bf16_nn_list_rows_")
    assert "one launch for all products" in found.chosen.reason
    assert "copied" not in found.chosen.reason
    odd = explain_on(described([*shapes, (64, 64, 65)], b_layout="col"), H200).chosen
    assert odd is not None
    assert "operands of 1 of 51 products are copied first" in odd.reason


def test_large_products_get_large_tiles_and_small_ones_small() -> None:
    large, small = (
        lists.kernels(described([(size, size, size)] * 40), H200)[0].choice.config
        for size in (4096, 64)  # type: ignore[union-attr]
    )
    assert large.rows * large.cols >= 128 * 256
    assert (small.rows, small.cols) == (64, 64)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_there_is_a_config_for_everything(layouts: tuple[str, str], out_dtype: str) -> None:
    a, b = layouts
    for size in (1, 100, 3000):
        problem = Problem(
            "grouped_gemm", size, size, size, "bf16", "bf16", out_dtype, groups=3, a_layout=a, b_layout=b, c=True,
            shapes=((size,) * 3, (0, 1, 1), (size, 1, 0)),
        )  # fmt: skip
        assert len(lists.kernels(problem, H200)) > 1
        ways = 2 ** layouts.count("mixed")
        assert len(CudaBackend().specs(problem, H200)) == ways + 1


def test_nothing_to_do() -> None:
    found = explain_on(described([(0, 5, 5), (5, 0, 5)]), H200).chosen
    assert found is not None
    assert found.kernel == "nothing"
    assert CudaBackend().specs(described([(0, 5, 5)]), H200) == ()


def test_what_is_refused_and_why() -> None:
    assert "fp32 products" in CudaBackend().supports_on(described([(1, 1, 1)], dtype="fp32"), H200).reason
    huge = described([(2**22, 2**22, 8)])
    assert "tiles of 64x64" in CudaBackend().supports_on(huge, H200).reason


def test_many_products_are_expected_to_be_faster_than_by_cublas() -> None:
    """Where groups are small the host is the limit there; where they are large and few there is little between them."""
    for shapes in ([(64, 64, 64)] * 100, [(1024, 2048, 512)] * 32, [(3000, 3000, 3000)] * 50):
        problem = described(shapes)
        ours = lists.kernels(problem, H200)[0].cost(problem, torch.device("cpu"))
        assert ours < min(estimate.list_seconds(problem, at_once) for at_once in (False, True))


@pytest.mark.parametrize("lines", list_setup.LINES)
def test_the_small_kernel_compiles_clean(
    compile_all: Callable[[Sequence[KernelSpec]], list[Result]], compiles_clean: Callable[[Result], None], lines: int
) -> None:
    compiles_clean(compile_all([list_setup.spec(lines)])[0])
