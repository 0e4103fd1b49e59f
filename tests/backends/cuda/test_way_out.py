"""How results leave a block by the copy engine (epilogue_tma.cuh), run by the emulator: where they are staged, what is
written, what is added to what is there, and what lies around it."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import host_compiler
from omnigemm.backends.cuda import sm90
from omnigemm.backends.cuda.sm90 import Config, Variant

SHIM = """
#include "common/pipeline.cuh"
constexpr int TILE_ROWS = 64 * WAVES * MATH_GROUPS, GROUP_ROWS = GROUPED ? 64 : 64 * WAVES;
constexpr int WAVE_ROWS = GROUPED ? 64 * MATH_GROUPS : 64, SHARE = 1, CLUSTER = 1, K_BLOCKS = 1, SCALES_AT_ONCE = 4;
constexpr int SCALE_WARPS = 0, THREADS = 128 * MATH_GROUPS;
constexpr bool ONE_READ = false;
enum : int { NO_SCALE, PER_ROW, PER_BLOCK };
struct Arguments {
    const float *a_scale, *b_scale;
    const void* bias;
    void* out;
    long long out_stride;
    int shape_m, bias_type, zero_step;
    const int *a_zero, *b_sums;
    float alpha, beta;
    const void* c;
    long long c_row, c_col;
    int c_type, straight, first_row;
    const int* groups;
    int group_count, a_slab, b_slab, out_slab, b_scale_step, list_count, scale_pitch;
    char* list;
};
#if GROUPED
#include "sm90/work_groups.cuh"
#elif LIST
#include "sm90/work_list.cuh"
#else
#include "sm90/work_dense.cuh"
#endif
#include "sm90/epilogue.cuh"

static Arguments given;
static TensorMap map;
static int columns;
static const float* products;

static Place place(int row, int col) {
#if GROUPED
    return {{row, col}, 0, given.first_row, given.shape_m};
#elif LIST
    const Ending ending{given.c, given.out, given.c_row, given.c_col, given.out_stride, given.alpha, given.beta,
                        given.c_type, given.straight};
    return {{row, col}, 0, 0, given.shape_m, columns, 1, ending};
#else
    return {{row, col}};
#endif
}

// As gemm.cuh has it, with sums that are known.
static void kernel(const TensorMap map) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int first = group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int row = 0; row * TILE_ROWS < given.shape_m; ++row)
        for (int col = 0; col * TILE_COLS < columns; ++col) {
            const Place tile = place(row, col);
            if (Work::waves(tile, group) == 0) continue;
            float sums[WAVES][TILE_COLS / 2];
            for (int wave = 0; wave < WAVES; ++wave)
                for (int i = 0; i < TILE_COLS / 2; ++i) {
                    const int m = row * TILE_ROWS + first + wave * WAVE_ROWS + i / 2 % 2 * 8;
                    const int n = col * TILE_COLS + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    sums[wave][i] = m < given.shape_m && n < columns ? products[m * columns + n] : 1e30f;
                }
            const Epilogue::Ahead ahead(given, tile, first);
            Epilogue::store(sums, ahead, emulator::shared_memory(), nullptr, nullptr, &map, given, group, tile, first);
        }
    Epilogue::finish();
}

extern "C" const char* run(const Arguments* arguments, const float* sums, int n, int rows, int box, int element_bytes) {
    given = *arguments, products = sums, columns = n;
    map = {reinterpret_cast<u64>(given.out), u64(given.out_stride) * OUT_BYTES, u32(n), u32(rows), 0, 0, u32(box), 64,
           u32(element_bytes)};
    emulator::stored = emulator::added = emulator::worst_of_stores = 0;
    emulator::watches_stores = true;
    return emulator::launch([] { kernel(map); }, {1, THREADS, 1, Epilogue::BYTES});
}
extern "C" int stored() { return emulator::stored; }
extern "C" int added() { return emulator::added; }
extern "C" int worst_store() { return emulator::worst_of_stores; }
extern "C" int staged_bytes() { return Epilogue::BYTES; }
"""


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a_scale", "b_scale", "bias", "out")),
        ("out_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("shape_m", "bias_type", "zero_step")),
        *((name, ctypes.c_void_p) for name in ("a_zero", "b_sums")),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("c", ctypes.c_void_p),
        ("c_row", ctypes.c_longlong),
        ("c_col", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("c_type", "straight", "first_row")),
        ("groups", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in ("group_count", "a_slab", "b_slab", "out_slab", "b_scale_step", "list_count", "scale_pitch")
        ),
        ("list", ctypes.c_void_p),
    ]


BF16: tuple[str, ...] = ("bf16", "bf16", "none", "none")
LIST = Variant(0, 0, *BF16, "fp32", c=True, grouping="list")
DENSE = Variant(300, 64, *BF16, "fp32", c=True)
WIDE = Config(False, 2, 1, 256, 3, out_buffers=2, out_parts=4)
TALL = Config(False, 2, 2, 128, 3, out_buffers=2)
KERNELS = {
    "list-256": (WIDE, LIST),
    "list-256x128": (TALL, LIST),
    "list-64": (Config(False, 1, 1, 64, 3), LIST),
    "list-bf16": (WIDE, dataclasses.replace(LIST, out_dtype="bf16")),
    "dense-128": (Config(False, 2, 1, 128, 3), DENSE),
    "dense-96": (Config(False, 1, 1, 96, 3, out_buffers=2), DENSE),
    "dense-fp16-48": (Config(False, 1, 1, 48, 3), dataclasses.replace(DENSE, n=304, out_dtype="fp16")),
    "dense-bf16-96": (Config(False, 1, 1, 96, 3), dataclasses.replace(DENSE, n=304, out_dtype="bf16")),
    "scaled-160": (
        Config(False, 2, 1, 160, 3),
        Variant(300, 64, "e4m3", "e4m3", "token", "channel", "fp32", bias=True),
    ),
    "groups-128": (TALL, dataclasses.replace(DENSE, c=False, grouping="contiguous")),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Block:
    """Stands in for a multiprocessor with one block."""

    def __init__(self, library: ctypes.CDLL, config: Config, variant: Variant) -> None:
        self.library, self.config, self.variant = library, config, variant
        self.dtype = TYPES[variant.out_dtype]

    def run(self, out: Tensor, sums: Tensor, rows: int = 0, **others: Any) -> None:
        """`rows`: of the matrix that the tensor map shows, if they are not those of the result."""
        (m, n), row_bytes = out.shape, out.stride(0) * out.element_size()
        straight = not (out.data_ptr() | row_bytes | n * out.element_size()) % 16
        lies = {"out": out.data_ptr(), "out_stride": out.stride(0), "straight": int(straight)}
        given = Arguments(**{"shape_m": m, "alpha": 1.0, **lies, **others})
        box = self.variant.slab(self.config), self.variant.out_bytes
        fault = self.library.run(ctypes.byref(given), ctypes.c_void_p(sums.data_ptr()), n, rows or m, *box)
        assert not fault, fault.decode()


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Block]:
    made: dict[str, Block] = {}

    def get(name: str) -> Block:
        if name not in made:
            config, variant = KERNELS[name]
            assert variant.stores_by_tma(config)
            constants = sm90.source(config, variant).split("__device__")[0]
            folder = tmp_path_factory.mktemp("out")
            options = "-O1", "-Wno-psabi", "-Wno-narrowing"
            library = host_compiler.library(folder, constants + SHIM, *options, only_gcc=True, emulated=True)
            library.run.restype = ctypes.c_char_p
            made[name] = Block(library, config, variant)
        return made[name]

    return get


def some(*shape: int) -> Tensor:
    """Numbers whose sums are exact in all types."""
    return torch.randint(-8, 9, shape).float()


def of_c(c: Tensor, beta: float) -> dict[str, Any]:
    kind = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[c.dtype]
    return {"c": c.data_ptr(), "c_row": c.stride(0), "c_col": c.stride(1), "c_type": kind, "beta": beta}


def framed(m: int, n: int, dtype: torch.dtype, pitch: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix within others' memory, and all of that memory. Its first row begins at a multiple of 16 bytes, or
    `shift` elements behind one."""
    raw = torch.full(((m + 2) * pitch + 64,), 77.0, dtype=dtype)
    step = 16 // raw.element_size()
    start = -(raw.data_ptr() // raw.element_size()) % step
    first = -(-(start + pitch) // step) * step + shift
    return raw.as_strided((m, n), (pitch, 1), first), raw


def check(out: Tensor, raw: Tensor, wanted: Tensor) -> None:
    assert torch.equal(out, wanted.to(out.dtype))
    out.fill_(77.0)
    assert bool((raw == 77.0).all()), "written outside of the result"


SIZES = [(1, 4), (64, 32), (130, 300), (257, 264), (200, 256)]
PITCHES = {"straight": (512, 0), "odd pitch": (513, 0), "pitch of 8 bytes": (514, 0), "odd address": (512, 1)}


@pytest.mark.parametrize("where", PITCHES)
@pytest.mark.parametrize("name", [one for one in KERNELS if one.startswith("list")])
def test_lists(block: Callable[[str], Block], name: str, where: str) -> None:
    one, (pitch, shift) = block(name), PITCHES[where]
    for m, n in (*SIZES, (70, 3), (65, 259), (3, 1)):
        sums = some(m, n)
        out, raw = framed(m, n, one.dtype, pitch, shift)
        one.run(out, sums, alpha=2.0)
        check(out, raw, 2.0 * sums)
        # C is D itself.
        for beta in (1.0, 0.5, -1.0):
            out, raw = framed(m, n, one.dtype, pitch, shift)
            before = some(m, n)
            out.copy_(before)
            one.run(out, sums, alpha=4.0, **of_c(out, beta))
            check(out, raw, 4.0 * sums + beta * before)
        # C is another, in pairs or not, and one that must not be looked at.
        for c in (some(m, n), some(n, m).t(), some(1, n).expand(m, n), some(m, n + 1)[:, 1:], some(m, n).bfloat16()):
            out, raw = framed(m, n, one.dtype, pitch, shift)
            one.run(out, sums, **of_c(c, 1.0))
            check(out, raw, sums + c)
        out, raw = framed(m, n, one.dtype, pitch, shift)
        one.run(out, sums, **of_c(torch.full((m, n), float("nan")), 0.0))
        check(out, raw, sums)


@pytest.mark.parametrize("name", ["list-256", "list-bf16", "dense-128"])
def test_the_copy_engine_adds_where_c_is_the_result_and_beta_is_1(block: Callable[[str], Block], name: str) -> None:
    one, m, n = block(name), 70, 300 if name.startswith("dense") else 304
    out, _ = framed(m, n, one.dtype, 320)
    out.zero_()
    slabs = 2 * -(-n // one.config.cols) * (one.config.cols // one.variant.slab(one.config))  # of 64 rows each
    apart, turned = framed(m, n, one.dtype, 320)[0], of_c(out, 1.0) | {"c_col": 0}
    for given in (of_c(out, 1.0), of_c(out, 0.5), of_c(apart, 1.0), turned, of_c(out, 1.0) | {"c_type": 0}):
        one.run(out, some(m, n), **given)
        adds = given == of_c(out, 1.0) and one.dtype == torch.float32
        assert (one.library.stored(), one.library.added()) == ((0, slabs) if adds else (slabs, 0))
    odd, _ = framed(m, n, one.dtype, 321)
    if one.dtype == torch.float32 or name.startswith("list"):
        one.run(odd, some(m, n), **of_c(odd, 1.0))
        assert (one.library.stored(), one.library.added()) == (0, 0)


@pytest.mark.parametrize("where", ["straight", "odd pitch"])
@pytest.mark.parametrize("name", ["dense-128", "dense-96"])
def test_dense_fp32(block: Callable[[str], Block], name: str, where: str) -> None:
    one, (pitch, shift) = block(name), PITCHES[where]
    for m in (1, 64, 130, 257):
        sums = some(m, 300)
        for beta in (1.0, 0.5):
            for apart in (False, True):
                out, raw = framed(m, 300, one.dtype, pitch, shift)
                before = some(m, 300)
                out.copy_(before)
                one.run(out, sums, **of_c(before if apart else out, beta))
                check(out, raw, sums + beta * before)


@pytest.mark.parametrize("name", ["dense-fp16-48", "dense-bf16-96"])
def test_dense_in_16_bits(block: Callable[[str], Block], name: str) -> None:
    one = block(name)
    for m in (1, 130):
        sums, c = some(m, 304), some(m, 304)
        out, raw = framed(m, 304, one.dtype, 320)
        one.run(out, sums, **of_c(c, 0.5))
        check(out, raw, sums + 0.5 * c)


def test_scales_and_bias_of_columns_meet_their_own(block: Callable[[str], Block]) -> None:
    one, m, n = block("scaled-160"), 150, 300
    sums, of_rows, of_columns, bias = some(m, n), some(m), some(n), some(n)
    out, raw = framed(m, n, torch.float32, 304)
    at = {"a_scale": of_rows.data_ptr(), "b_scale": of_columns.data_ptr(), "bias": bias.data_ptr(), "bias_type": 2}
    one.run(out, sums, **at)
    check(out, raw, of_rows[:, None] * of_columns * sums + bias)


@pytest.mark.parametrize("pitch", [304, 301])
@pytest.mark.parametrize("m", [1, 63, 64, 130, 256, 300])
def test_a_groups_rows_end_where_the_next_one_begins(block: Callable[[str], Block], m: int, pitch: int) -> None:
    one, first, total, n = block("groups-128"), 5, 400, 300
    sums = some(m, n)
    every, raw = framed(total, n, torch.float32, pitch)
    out = every[first : first + m]
    one.run(every[:m], sums, rows=total, first_row=first)
    check(out, raw, sums)


def test_nan_and_infinity_are_added_as_numbers_are(block: Callable[[str], Block]) -> None:
    one, inf, nan = block("list-64"), float("inf"), float("nan")
    out, _ = framed(4, 8, torch.float32, 8)
    before = torch.tensor([1.0, inf, -inf, nan, inf, 2.0, 0.0, -3.0]).expand(4, 8)
    sums = torch.tensor([inf, -inf, -inf, 1.0, 1.0, nan, 0.0, 3.0]).repeat(4, 1)
    out.copy_(before)
    one.run(out, sums, **of_c(out, 1.0))
    torch.testing.assert_close(out, before + sums, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, (_, variant) in KERNELS.items() if variant.out_dtype == "fp32"])
def test_no_two_lanes_wait_for_a_bank(block: Callable[[str], Block], name: str) -> None:
    one, sums, ones = block(name), some(70, 300), torch.ones(300)
    at = dict.fromkeys(("a_scale", "b_scale", "bias"), ones.data_ptr())
    one.run(torch.zeros(70, 300), sums, bias_type=2, **at, **of_c(sums, 1.0))
    assert one.library.worst_store() == 1


@pytest.mark.parametrize("name", KERNELS)
def test_staged_results_take_the_memory_that_the_host_sets_aside(block: Callable[[str], Block], name: str) -> None:
    one = block(name)
    empty = dataclasses.replace(one.variant, out_by_tma=False)
    assert one.library.staged_bytes() == one.variant.shared_bytes(one.config) - empty.shared_bytes(one.config)
