"""What the emulator finds: kernels with a fault that a GPU may show once in a million launches, or not at all. Each is
our own kernel with one thing left out; as it is, it passes under the same lots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from emulated import Change, Hopper, emulated, whole
from gpu.test_grouped_lists import List
from omnigemm.backends.cuda import dense, gemm, groups
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import describe

SEEDS = range(12)
PINGPONG = Config(False, 2, 1, 64, 3, pingpong=True)
SHARED = Config(False, 1, 1, 64, 3, right_share=2)
SPLIT = Config(True, 1, 1, 16, 3, split=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def hopper(folder: Path) -> Iterator[Hopper]:
    with emulated(folder) as made:
        yield made


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found.float(), wanted), "wrong sums"


def sixteen(hopper: Hopper, config: Config, m: int = 200, n: int = 200, k: int = 520) -> None:
    a, b = whole(m, k).bfloat16(), whole(n, k).bfloat16()
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    problem = describe("gemm", m=m, n=n, k=k, dtype="bf16", b_layout="col")
    gemm.Gemm(problem, config, 0, 2, early=2)(out, a, b.t(), None, 1.0, 0.0)
    check(out, (a.float() @ b.float().t()).bfloat16().float())


def scaled(hopper: Hopper, config: Config, m: int = 100, n: int = 200, k: int = 640) -> None:
    a, b = whole(m, k).to(torch.float8_e4m3fn), whole(n, k).to(torch.float8_e4m3fn)
    a_scale, b_scale = 2.0 ** torch.randint(-1, 2, (m, 5)), 2.0 ** torch.randint(-1, 2, (2, 5))
    out = torch.full((m, n), float("nan"))
    hopper.written = [a_scale, b_scale]
    problem = describe("fp8_gemm", m=m, n=n, k=k, granularity="128x128", out_dtype="fp32")
    dense.Launch(problem, config, 0, 2, early=2)(out, a, b, a_scale, b_scale, None)
    left = a.float() * a_scale.repeat_interleave(128, 1)
    check(out, left @ (b.float() * b_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)).t())


def grouped(hopper: Hopper, config: Config) -> None:
    sizes, n, k = (70, 0, 3, 130), 136, 320
    a, b, ends = whole(210, k).bfloat16(), whole(4, n, k).bfloat16(), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    out = torch.full((210, n), float("nan"), dtype=torch.bfloat16)
    hopper.written = [ends]
    # What the numbers were for an earlier product, the same, or none yet: weights are loaded by them.
    earlier = torch.tensor(((0, 3, 200, 7), sizes)[hopper.seed % 2]).cumsum(0, dtype=torch.int32)
    hopper.stale = {ends.data_ptr(): earlier} if hopper.seed % 3 else {}
    problem = describe("grouped_gemm_contiguous", m=210, n=n, k=k, groups=4, dtype="bf16")
    groups.Launch(problem, config, 0, 2, early=2)(out, a, b, ends, None, None)
    wanted = torch.full((210, n), float("nan"), dtype=torch.bfloat16)
    for group, (last, count) in enumerate(zip(ends.tolist(), sizes, strict=True)):
        rows = slice(last - count, last)
        wanted[rows] = a[rows].float().mm(b[group].float().t()).bfloat16()
    assert torch.equal(out.nan_to_num(99.0), wanted.nan_to_num(99.0)), "wrong sums"


def listed(hopper: Hopper, config: Config) -> None:
    made = List([(70, 136, 200), (1, 1, 1), (130, 64, 72)])
    made.runner(config)(made.out, *made.operands)
    made.check()


@dataclasses.dataclass(frozen=True)
class Fault:
    """`changes`: (header, what is there, what is there instead); `found`: what is said of it."""

    run: Callable[[Hopper, Config], None]
    config: Config
    changes: tuple[Change, ...]
    found: str


ROWS = Config(False, 1, 1, 64, 3)
TWO = Config(False, 2, 1, 64, 3, out_buffers=2)
FAULTS = {
    "results are not shown to the copy engine": Fault(
        sixteen, ROWS, (("sm90/epilogue_tma.cuh", "                fence_proxy_async();\n", ""),), "without a fence"
    ),
    "results are overwritten on their way out": Fault(
        sixteen,
        ROWS,
        (("sm90/epilogue_tma.cuh", "                            bulk_wait_group_read<0>();", ";"),),
        "wrong sums",
    ),
    "a block ends with results on their way": Fault(
        sixteen,
        ROWS,
        (("sm90/epilogue_tma.cuh", "if (storing_thread()) bulk_wait_group_read<0>();\n    }", "}"),),
        "still reads",
    ),
    "a stage is given back with products running": Fault(
        sixteen,
        ROWS,
        (("sm90/mainloop_straight.cuh", "wgmma_wait_group<DEPTH>();", "wgmma_wait_group<DEPTH + 1>();"),),
        "wrong sums",
    ),
    "sums are used before they are there": Fault(
        scaled,
        ROWS,
        (("sm90/mainloop_fp8.cuh", "            wgmma_wait_group<0>();\n", ""),),
        "wrong sums|nobody waited for",
    ),
    "one lane gives a stage back for those behind it": Fault(
        scaled, ROWS, (("sm90/mainloop.cuh", "        __syncwarp();\n", ""),), "wrong sums|nobody can go on"
    ),
    "a byte too few is expected": Fault(
        sixteen,
        ROWS,
        (("sm90/gemm.cuh", "LEFT_BYTES / 2 : STAGE_BYTES);", "LEFT_BYTES / 2 : STAGE_BYTES - 1);"),),
        "nobody can go on",
    ),
    "a stage is free when one of two blocks has read it": Fault(
        sixteen,
        SHARED,
        (("sm90/gemm.cuh", "4 * GROUPS_OF_TILE * SHARE);", "4 * GROUPS_OF_TILE);"),),
        "wrong sums|more arrive",
    ),
    "a block of a cluster ends before others are done with it": Fault(
        sixteen,
        SHARED,
        (("sm90/gemm.cuh", "    if constexpr (SHARE > 1) {  // nobody", "    if constexpr (false) {  // nobody"),),
        "not there any more|still on its way",
    ),
    "copies to a block that has no barriers yet": Fault(
        sixteen,
        SHARED,
        (
            ("sm90/gemm.cuh", "    if constexpr (CLUSTER > 1) cluster_arrive();\n", ""),
            ("sm90/gemm.cuh", "    if constexpr (SHARE > 1) cluster_wait();\n", ""),
        ),
        "nobody has initialised",
    ),
    "sums are sent to a block that has no barrier yet": Fault(
        scaled,
        SPLIT,
        (
            (
                "sm90/gemm.cuh",
                "        // anyhow.\n        if constexpr (CLUSTER > 1 && SHARE == 1) cluster_wait();\n",
                "",
            ),
        ),
        "nobody has initialised|not there any more",
    ),
    "sums take the place of operands that are still read": Fault(
        scaled,
        SPLIT,
        (("sm90/epilogue_reduce.cuh", "named_barrier_sync(1, MATH_THREADS);  // the last products are read", ""),),
        "wrong sums",
    ),
    "fewer bytes of sums are waited for than are sent": Fault(
        scaled,
        SPLIT,
        (("sm90/parts.cuh", "owned() * (SPLIT - 1) * PART_BYTES", "owned() * (SPLIT - 1) * PART_BYTES / 2"),),
        "wrong sums|on its way|nobody can",
    ),
    "activations are read before they are written": Fault(
        sixteen, ROWS, (("sm90/gemm.cuh", "#endif\n        griddepcontrol_wait();\n", "#endif\n"),), "wrong sums"
    ),
    "scales are read before they are written": Fault(
        scaled, ROWS, (("sm90/scales.cuh", "    griddepcontrol_wait();\n", ""),), "wrong sums"
    ),
    "ends are read before they are written": Fault(
        grouped, ROWS, (("sm90/work_groups.cuh", "        griddepcontrol_wait();\n", ""),), "wrong sums"
    ),
    "numbers that have changed are not looked at again": Fault(
        grouped,
        ROWS,
        (("sm90/work_groups.cuh", "        if (__syncthreads_and(stands)) return;", "        return;"),),
        "wrong sums",
    ),
    "weights on a wrong guess are taken for others": Fault(
        grouped,
        ROWS,
        (("sm90/gemm.cuh", " && guess.place == weight_place(tile);", " || true;"),),
        "wrong sums",
    ),
    "weights on a guess are not waited for": Fault(
        grouped, ROWS, (("sm90/gemm.cuh", "        mbarrier_wait(work.guessed, 0);\n", ""),), "wrong sums"
    ),
    "a list is read before it is made": Fault(
        listed, ROWS, (("sm90/work_list.cuh", "        griddepcontrol_wait();\n", ""),), "off by nan"
    ),
    "turns are not waited for": Fault(
        sixteen,
        PINGPONG,
        (("sm90/turns.cuh", "if (PINGPONG) named_barrier_sync(FIRST_BARRIER + group, BOTH);", ""),),
        "wrong sums|more arrive",
    ),
    "one thread shuffles": Fault(
        grouped,
        ROWS,
        (
            (
                "sm90/work_groups.cuh",
                "        const Place place = found(index);\n",
                "        const Place place = found(uniform(index));\n",
            ),
        ),
        "lanes of a warp meet",
    ),
    "a tile is overwritten before all have seen it": Fault(
        grouped,
        TWO,
        (("sm90/tile_queue.cuh", "ring.init(1, warps); }", "ring.init(1, 1); }"),),
        "wrong sums|more arrive|nobody can go on",
    ),
    "a tensor map of another kernel is not asked for": Fault(
        listed,
        ROWS,
        (("sm90/work_list.cuh", "        fence_proxy_tensormap_acquire(right);\n", ""),),
        "a fence that acquires it",
    ),
}


def run_all(hopper: Hopper, run: Callable[[Hopper, Config], None], config: Config) -> None:
    for hopper.seed in SEEDS:
        run(hopper, config)


@pytest.mark.parametrize("name", FAULTS)
def test_is_found(hopper: Hopper, name: str) -> None:
    fault = FAULTS[name]
    hopper.changes = fault.changes
    with pytest.raises(AssertionError, match=fault.found):
        run_all(hopper, fault.run, fault.config)


@pytest.mark.parametrize(
    ("run", "config"),
    {(fault.run, fault.config): None for fault in FAULTS.values()},
    ids=lambda one: getattr(one, "__name__", None),
)
def test_kernels_as_they_are_pass(hopper: Hopper, run: Callable[[Hopper, Config], None], config: Config) -> None:
    run_all(hopper, run, config)
