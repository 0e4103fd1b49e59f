"""The Hopper kernels: which configs are legal, and that they compile without spills or serialised products.

No GPU is needed: NVRTC compiles for sm_90a on any machine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import omnigemm
from omnigemm.backends.cuda import choice, dense, sm90
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.jit import KernelSpec, Result
from omnigemm.backends.cuda.jit.spec import PACKAGE_HEADERS
from omnigemm.backends.cuda.sm90 import Config, Variant

BLOCK, ROWS, TOKEN, TENSOR = ("1x128", "128x128"), ("1x128", "1x128"), ("token", "channel"), ("tensor", "tensor")
MIXED = ("tensor", "channel"), ("token", "tensor")
NO_SCALES = ("none", "none")
_INT8: dict[str, Any] = {"a_dtype": "int8", "b_dtype": "int8"}
_BF16: dict[str, Any] = {"a_dtype": "bf16", "b_dtype": "bf16"}
_FP16: dict[str, Any] = {"a_dtype": "fp16", "b_dtype": "fp16"}
_TURNED: dict[str, Any] = {"a_turned": True, "b_turned": True}
BY_ROWS, SWAPPED = Config(False, 2, 1, 128, 4), Config(True, 1, 1, 8, 8)
TABLE = [(at, row) for at, rows in choice.table(KNOWN["h200"]).items() for row in rows]


def variant(kinds: tuple[str, str] = BLOCK, out: str = "bf16", **changes: Any) -> Variant:
    plain = Variant(4096, 7168, "e4m3", "e4m3", *kinds, out)
    return dataclasses.replace(plain, **changes)


# ------------------------------------------------------------------------------------------------ what is legal

FAULTS = {
    "3 math groups and 1 blocks on a multiprocessor, expected 1 group": Config(False, 3, 1, 128, 4),
    # The registers that math warps take from loaders are there once only: two such blocks would wait forever.
    "2 math groups and 2 blocks on a multiprocessor": Config(False, 2, 1, 32, 4, blocks_per_sm=2),
    "1 math groups and 5 blocks on a multiprocessor": Config(True, 1, 1, 8, 2, blocks_per_sm=5),
    "1 math groups and 0 blocks on a multiprocessor": Config(True, 1, 1, 8, 8, blocks_per_sm=0),
    "swapped with 2 waves": Config(True, 1, 2, 8, 8),
    "waves is 3": Config(False, 1, 3, 16, 4),
    "cols is 24, expected a multiple of 16": Config(False, 1, 1, 24, 4),
    "cols is 12, expected a multiple of 8": Config(True, 1, 1, 12, 8),
    "cols is 272": Config(False, 1, 1, 272, 4),
    "cols is 0": Config(True, 1, 1, 0, 8),
    "depth is 3": Config(True, 1, 1, 8, 8, depth=3),
    "depth is 2, expected 1, or 2 or 4 with one wave": Config(False, 1, 2, 64, 4, depth=2),
    "stages is 3, expected at least the depth 4": Config(True, 1, 1, 8, 3, depth=4),
    "shares are 2 and 2": Config(False, 2, 1, 128, 4, left_share=2, right_share=2),
    "shares are 1 and 3": Config(False, 2, 1, 96, 4, right_share=3),
    "a share of 128x48 is not whole groups": Config(False, 2, 1, 48, 4, right_share=4),
    "a share of 64x8 is not whole groups": Config(True, 1, 1, 8, 8, right_share=2),
    "cols is 20, expected a multiple of 8": Config(False, 2, 1, 20, 4, split=2),
    "split is 2 with 2 waves, expected 1 wave": Config(False, 2, 2, 128, 4, split=2),
    "out_parts is 2, expected 1 if operands are swapped": Config(True, 1, 1, 40, 8, out_parts=2),
    "out_parts is 4, expected 1 if operands are swapped or K is split": Config(
        False, 2, 1, 40, 4, split=5, out_parts=4
    ),
    "fetch is 64, expected 128 or 256": Config(False, 2, 1, 128, 4, fetch=64),
    "pingpong is True, expected False if there is one math group": Config(False, 1, 2, 128, 4, pingpong=True),
    "pingpong is True, expected False if there is one math group, operands are swapped or K is split": Config(
        False, 2, 1, 64, 4, split=2, pingpong=True
    ),
    "the cluster has 16 blocks": Config(True, 1, 1, 32, 8, right_share=4, split=4),
    "the cluster has 9 blocks": Config(True, 1, 1, 8, 8, split=9),
    "stages is 1, expected at least 2": Config(False, 2, 1, 128, 1),
    "band is 0": Config(False, 2, 1, 128, 4, band=0),
    "band is 33, expected at most 32": Config(False, 2, 1, 128, 4, band=33),
    "out_buffers is 9, expected at most 8": Config(True, 1, 1, 8, 8, out_buffers=9),
    "out_parts is 33, expected at most 32": Config(False, 2, 1, 128, 4, out_parts=33),
    "2 stages hold less than the sums of 200 columns": Config(True, 2, 1, 200, 2),
}


@pytest.mark.parametrize("words", FAULTS)
def test_illegal_configs_say_why(words: str) -> None:
    assert words in str(FAULTS[words].fault())
    assert words in str(variant().fault(FAULTS[words]))
    with pytest.raises(ValueError, match=f"^sm90: config is Config.*, expected .* Variant.*: .*{words}"):
        sm90.source(FAULTS[words], variant())


LIMITS: list[tuple[str, Config, Variant, Variant]] = [
    (
        "a tile of 208 columns can meet three blocks of scales, expected at most two",
        Config(False, 1, 1, 208, 3),
        variant(),
        variant(TENSOR),
    ),
    # A scale for each column takes registers too.
    (
        "200 registers for sums, products and scales, expected at most 196",
        Config(False, 2, 1, 160, 3),
        variant(ROWS),
        variant(),
    ),
    (
        "242 registers for sums, products and scales, expected at most 224",
        Config(True, 1, 1, 88, 8, depth=4),
        variant(),
        variant(TENSOR),
    ),
    (
        "90 registers for sums, products and scales, expected at most 80",
        Config(True, 1, 1, 72, 3, depth=1, blocks_per_sm=3),
        variant(),
        variant(TENSOR),
    ),
    # With two waves they are read late. Rows of them that begin anywhere leave no registers for a bias.
    (
        "200 registers for sums, products and scales, expected at most 196",
        Config(False, 2, 2, 128, 3),
        variant(ROWS, k=7296, bias=True),
        variant(ROWS, k=7296),
    ),
    # The results that wait for the copy engine take room too.
    (
        "shared memory is 232552 bytes, expected at most 232448",
        Config(False, 2, 1, 128, 6),
        variant(),
        variant(out_by_tma=False),
    ),
    # They go out in slabs of 128 bytes; others are not parted at all.
    (
        "out_parts is 4, expected 192 columns in whole parts of 64",
        Config(False, 2, 1, 192, 4, out_parts=4),
        variant(),
        variant(out="fp32"),
    ),
    (
        "out_parts is 2, expected 192 columns in whole parts of 64",
        Config(False, 2, 1, 192, 4, out_parts=2),
        variant(),
        variant(out_by_tma=False),
    ),
    (
        "pingpong is True, expected False for e4m3",
        Config(False, 2, 1, 128, 5, pingpong=True),
        variant(),
        variant(TOKEN, **_INT8),
    ),
    (
        "pingpong is True, expected False for a list",
        Config(False, 2, 1, 128, 5, pingpong=True),
        variant(NO_SCALES, grouping="list", **_BF16),
        variant(NO_SCALES, **_BF16),
    ),
    # What makes int8 exact in fp32 takes some.
    (
        "137 registers for sums, products and scales, expected at most 136",
        Config(False, 1, 1, 224, 2, blocks_per_sm=2),
        variant(TOKEN, "fp32", **_INT8),
        variant(TOKEN, "fp32", out_by_tma=False, **_INT8),
    ),
    # Each fits by itself, but the chip must hold both, and 1 KB more for each.
    (
        "2 blocks of 116600 bytes, expected at most 233472 together",
        Config(True, 1, 1, 64, 7, blocks_per_sm=2),
        variant(),
        variant(TENSOR),
    ),
]


@pytest.mark.parametrize(("words", "config", "refused", "fits"), LIMITS)
def test_configs_that_some_variants_cannot_have(words: str, config: Config, refused: Variant, fits: Variant) -> None:
    assert config.fault() is None
    assert refused.fault(config) == words
    with pytest.raises(ValueError) as caught:
        sm90.source(config, refused)
    assert isinstance(caught.value, omnigemm.OmniGemmError)
    assert str(caught.value) == f"sm90: config is {config}, expected one that can compute {refused}: {words}"
    assert fits.fault(config) is None
    assert sm90.source(config, fits)


@pytest.mark.parametrize("cols", [16 * i for i in range(1, 14)])
def test_a_tile_meets_two_blocks_of_scales_or_is_refused(cols: int) -> None:
    """The rule is arithmetic; here it is counted, tile by tile."""
    most = max((start + cols - 1) // 128 - start // 128 + 1 for start in range(0, 128 * cols, cols))
    fault = variant().fault(Config(False, 1, 1, cols, 2))
    assert ("three blocks" in str(fault)) == (most > 2)


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("cols", [16 * i for i in range(1, 17)])
def test_wide_results_wait_in_no_more_memory_than_narrow_ones(cols: int, buffers: int) -> None:
    """So that a config has its stages whatever its results are. A slab of 32 columns is the least there is."""
    narrow, wide = variant(TENSOR), variant(TENSOR, "fp32")
    for parts in (count for count in (1, 2, 4) if cols % (narrow.slab(Config(False, 1, 1, cols, 2)) * count) == 0):
        config = Config(False, 1, 1, cols, 2, out_buffers=buffers, out_parts=parts)
        assert wide.stores_by_tma(config) == (cols % 32 == 0)
        if cols % 32:
            assert wide.shared_bytes(config) < narrow.shared_bytes(config)
            continue
        direct = dataclasses.replace(wide, out_by_tma=False).shared_bytes(config)
        each = cols // wide.out_parts(config)
        assert each % 32 == 0
        assert wide.shared_bytes(config) - direct == buffers * 64 * each * 4
        assert each == 32 or wide.shared_bytes(config) <= narrow.shared_bytes(config)


def test_the_lone_thread_that_loads_asks_nobody() -> None:
    """A shuffle among all lanes, by one of them alone, waits for ever."""
    source = (Path(PACKAGE_HEADERS) / "sm90" / "gemm.cuh").read_text()
    loader = source[source.index("struct Loader {") : source.index('#include "sm90/scales.cuh"')]
    assert "the_left" in loader
    for word in ("uniform(", "waves(", "__shfl", "__syncwarp", "named_barrier", "__syncthreads"):
        assert word not in loader, word


def test_grid() -> None:
    # Persistent blocks: as many as tiles, but no more than run at a time.
    assert BY_ROWS.grid(4096, 4096, 132) == 132
    assert Config(False, 1, 1, 96, 4, blocks_per_sm=2).grid(64, 32768, 132) == 264
    assert BY_ROWS.grid(1, 128, 132) == 1
    assert BY_ROWS.grid(129, 129, 132) == 4
    # Whole clusters, also where the number of multiprocessors is odd.
    pair = dataclasses.replace(BY_ROWS, right_share=2)
    assert [pair.grid(m, 128, 131) for m in (1, 256, 257, 99999)] == [2, 2, 4, 130]
    wide = dataclasses.replace(BY_ROWS, left_share=2)
    assert [wide.grid(128, n, 131) for n in (1, 256, 257, 99999)] == [2, 2, 4, 130]
    # Swapped, a block has one tile, or a part of K of one.
    assert SWAPPED.grid(8, 32768, 132) == 512
    assert dataclasses.replace(SWAPPED, split=3).grid(9, 65, 132) == 2 * 2 * 3
    shared = Config(True, 1, 1, 32, 8, right_share=4, split=2)
    assert [shared.grid(32, n, 132) for n in (1, 256, 257)] == [8, 8, 16]


def test_grid_of_batches() -> None:
    # One tile for a block, or a part of K of one, of every product.
    assert dataclasses.replace(SWAPPED, split=3).grid(9, 65, 132, batch=5) == 5 * 2 * 2 * 3
    # Persistent ones fill the chip, with as many on a multiprocessor as it takes.
    assert [BY_ROWS.grid(1, 128, 132, batch) for batch in (2, 131, 500)] == [2, 131, 132]
    two = Config(False, 1, 1, 96, 4, blocks_per_sm=2)
    assert [two.grid(64, 96, 132, batch) for batch in (2, 200, 500)] == [2, 200, 264]
    pair = Config(False, 1, 1, 96, 4, right_share=2, blocks_per_sm=2)
    assert pair.grid(64, 96, 131, batch=500) == 65 * 2 * 2


def test_words_tell_configs_apart() -> None:
    """Those of one name that the tuner tries: it lists them by name and words."""
    what = variant(NO_SCALES, **_BF16)
    for m in (1, 16, 64, 128):
        tried = [one.config for one in choice.modelled(what, m, KNOWN["h200"])[:30]]
        told = [(sm90.name(config, what), *config.words) for config in tried]
        assert len(set(told)) == len(set(tried))
    assert "4 blocks of K multiplied together" in dataclasses.replace(SWAPPED, depth=4).words
    assert not [word for word in SWAPPED.words if "multiplied" in word]
    more = {*dataclasses.replace(SWAPPED, fetch=256).words} - {*dataclasses.replace(SWAPPED, fetch=128).words}
    assert more == {"memory read two blocks at a time"}


def test_names_tell_kernels_apart() -> None:
    assert sm90.name(dataclasses.replace(SWAPPED, split=3), variant()) == "omnigemm_sm90_fp8_block_swap_split3_8x64"
    assert sm90.name(BY_ROWS, variant()) == "omnigemm_sm90_fp8_block_rows_128x128"
    names = {sm90.name(BY_ROWS, variant(kinds)) for kinds in (BLOCK, ROWS, TOKEN, TENSOR, *MIXED)}
    assert len(names) == 6
    batch = variant(NO_SCALES, batched=True, **_BF16)
    assert sm90.name(BY_ROWS, batch) == "omnigemm_sm90_bf16_nn_batch_rows_128x128"
    assert sm90.name(SWAPPED, batch) == "omnigemm_sm90_bf16_nn_batch_swap_split1_8x64"
    assert all(name.isidentifier() for name in names)


CONFIG_CHANGES: dict[str, Any] = {
    "swap": True,
    "math_groups": 2,
    "waves": 2,
    "cols": 64,
    "stages": 4,
    "left_share": 2,
    "right_share": 2,
    "split": 2,
    "depth": 2,
    "band": 4,
    "out_buffers": 2,
    "out_parts": 2,
    "blocks_per_sm": 2,
    "pingpong": True,
}
VARIANT_CHANGES: dict[str, Any] = {
    "n": 4104,
    "k": 7040,
    "a_dtype": "e5m2",
    "b_dtype": "e5m2",
    "a_scale": "token",
    "b_scale": "channel",
    "out_dtype": "fp16",
    "bias": True,
    "zero_points": True,
    "out_by_tma": False,
    "a_turned": True,
    "b_turned": True,
    "c": True,
    "batched": True,
    "grouping": "masked",
}


def test_whatever_differs_makes_another_source() -> None:
    """Compiled kernels are found by their source, so two that differ must never share one."""

    def body(config: Config, what: Variant) -> str:
        text = sm90.source(config, what)
        named = f"#define KERNEL {sm90.name(config, what)}\n"
        assert named in text
        return text.replace(named, "")  # the name is for people and does not make kernels differ

    base = Config(False, 1, 1, 128, 3)
    # What L2 takes from memory at a time is said by the launch, and not compiled in.
    assert {*CONFIG_CHANGES, "fetch"} == {field.name for field in dataclasses.fields(Config)}
    assert sm90.source(dataclasses.replace(base, fetch=128), variant()) == sm90.source(base, variant())
    assert set(VARIANT_CHANGES) == {field.name for field in dataclasses.fields(Variant)}
    for field, value in CONFIG_CHANGES.items():
        start = dataclasses.replace(base, swap=field == "split")
        what = variant()
        if field == "pingpong":
            start, what = dataclasses.replace(base, math_groups=2), variant(TOKEN, **_INT8)
        assert body(dataclasses.replace(start, **{field: value}), what) != body(start, what), field
    base = dataclasses.replace(base, cols=64)
    plain = variant(TENSOR)
    for field, value in VARIANT_CHANGES.items():
        assert body(base, dataclasses.replace(plain, **{field: value})) != body(base, plain), field


# ------------------------------------------------------------------------------------------------ the measured table


def of_table(kind: str, n: int, k: int) -> Variant:
    scales = {"block": BLOCK, "16": NO_SCALES}.get(kind, TOKEN)
    types = {"int8": _INT8, "16": _BF16}.get(kind, {})
    return variant(scales, n=n, k=k, **types)


def test_table_is_legal_for_its_weights() -> None:
    assert len(TABLE) > 30
    for (n, k, kind), row in TABLE:
        config = Config(**row["config"])
        assert of_table(kind, n, k).fault(config) is None, row
        assert not row.get("early") or row["constant_weights"], row
        assert row["us"] > 0
        assert config.grid(row["m_from"], n, 132) > 0


def test_table_has_one_entry_for_a_number_of_rows() -> None:
    for weight, rows in choice.table(KNOWN["h200"]).items():
        for constant in (False, True):
            held = [row for row in rows if row.get("constant_weights", constant) == constant]
            spans = sorted((row["m_from"], row["m_to"]) for row in held)
            assert all(first <= last for first, last in spans), weight
            assert all(one[1] < other[0] for one, other in itertools.pairwise(spans)), weight


# ------------------------------------------------------------------------------------------------ what compiles

PINGPONG = Config(False, 2, 2, 128, 5, right_share=2, out_buffers=2, out_parts=2, pingpong=True)
ODD: dict[str, Any] = {"n": 4097, "out_by_tma": False}  # rows of results begin anywhere
SWAPS = [
    (Config(True, 1, 1, 8, 8), variant()),
    (Config(True, 1, 1, 8, 6, split=8, depth=4, blocks_per_sm=3), variant(out="fp32", bias=True)),
    (Config(True, 1, 1, 16, 8, split=3, depth=2), variant(ROWS, a_dtype="e5m2", k=1000)),
    (Config(True, 1, 1, 32, 8, right_share=2, split=3, depth=4), variant(TOKEN, "fp16", bias=True, **ODD)),
    (Config(True, 1, 1, 64, 12, right_share=4, depth=4), variant(TENSOR, b_dtype="e5m2", k=192)),
    (Config(True, 1, 1, 64, 6, depth=2, blocks_per_sm=2), variant(ROWS, bias=True, **ODD)),
    (Config(True, 1, 1, 128, 8, depth=2), variant(MIXED[0], bias=True)),
    (Config(True, 2, 1, 64, 7, left_share=2, split=3, depth=4), variant(out="fp16", k=7000, **ODD)),
    (Config(True, 2, 1, 128, 6, right_share=4), variant(ROWS, "fp32")),
    (Config(True, 2, 1, 16, 8, left_share=4, depth=4), variant(MIXED[1], "fp32", a_dtype="e5m2", b_dtype="e5m2")),
]
BY_ROW = [
    (Config(False, 1, 1, 64, 8), variant()),
    (Config(False, 1, 1, 192, 5), variant(bias=True, **ODD)),
    (Config(False, 1, 1, 48, 8), variant(ROWS, "fp16", b_dtype="e5m2", k=1000)),
    (Config(False, 1, 1, 80, 8), variant(TENSOR, "fp32", k=1)),
    (Config(False, 2, 1, 144, 5), variant(bias=True, k=200)),
    (Config(False, 2, 1, 192, 4, right_share=2, band=16), variant(a_dtype="e5m2")),
    (Config(False, 2, 1, 128, 4, right_share=4), variant(ROWS, bias=True)),
    (Config(False, 2, 1, 160, 4), variant(TOKEN, "fp16", bias=True)),
    (Config(False, 2, 1, 192, 4, right_share=2), variant(MIXED[1], **ODD)),
    (Config(False, 1, 2, 64, 6, left_share=4), variant(TOKEN, "fp32", bias=True)),
    (Config(False, 2, 2, 128, 3, right_share=2, out_buffers=2), variant(MIXED[0], "fp16")),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(bias=True)),
    (Config(False, 2, 2, 128, 3, left_share=2), variant(out="fp32", k=1100)),
    (Config(False, 2, 2, 128, 4, left_share=2), variant(out="fp32", n=4097, out_by_tma=False)),
    (Config(False, 2, 1, 192, 4, right_share=2, band=16), variant(out="fp32", bias=True)),
    (Config(False, 2, 1, 128, 5), variant(ROWS, "fp32", bias=True)),
]
MEASURED = [
    (Config(**row["config"]), of_table(kind, n, k)) for (n, k, kind), row in (TABLE[i] for i in (0, 13, 22, 30))
]
INTEGERS = [
    (Config(True, 1, 1, 8, 8, split=8, depth=4, blocks_per_sm=2), variant(TOKEN, **_INT8)),
    (Config(True, 1, 1, 64, 6, split=2, depth=2, left_share=2, blocks_per_sm=2), variant(TENSOR, "fp32", **_INT8)),
    (Config(True, 2, 1, 128, 4, split=2), variant(TOKEN, "fp16", bias=True, **_INT8, **ODD)),
    (Config(True, 1, 1, 128, 8, depth=2), variant(TOKEN, zero_points=True, bias=True, k=1000, **_INT8)),
    (Config(False, 1, 1, 96, 6), variant(MIXED[0], "fp32", bias=True, **_INT8)),
    (Config(False, 2, 1, 256, 3, right_share=2), variant(TOKEN, bias=True, **_INT8)),
    (Config(False, 2, 1, 256, 4, right_share=2, out_buffers=2, out_parts=4), variant(TOKEN, bias=True, **_INT8)),
    (Config(True, 2, 1, 208, 5, right_share=2), variant(TOKEN, **_INT8)),
    (Config(False, 2, 1, 192, 4), variant(TOKEN, zero_points=True, **_INT8)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(TOKEN, **_INT8)),
    (Config(False, 2, 2, 128, 3, left_share=2), variant(MIXED[1], "fp32", zero_points=True, k=129, **_INT8)),
    (Config(False, 2, 1, 256, 4, out_buffers=2, out_parts=4), variant(TOKEN, "fp32", bias=True, **_INT8)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(TOKEN, "fp32", bias=True, **_INT8)),
    (PINGPONG, variant(TOKEN, **_INT8)),
    (PINGPONG, variant(TOKEN, "fp32", bias=True, **_INT8)),
    (Config(False, 2, 1, 256, 4, out_parts=4, pingpong=True), variant(TOKEN, zero_points=True, **_INT8)),
]
SIXTEEN = [
    (Config(True, 1, 1, 8, 8, split=8, depth=4, blocks_per_sm=2), variant(NO_SCALES, **_BF16)),
    (Config(True, 1, 1, 64, 6, split=2, depth=2, blocks_per_sm=2), variant(NO_SCALES, "fp32", c=True, **_FP16)),
    (Config(True, 1, 1, 64, 6, split=2, depth=2), variant(NO_SCALES, c=True, **_BF16, **_TURNED)),
    (Config(True, 2, 1, 128, 4, split=2), variant(NO_SCALES, "fp16", **_FP16, **ODD)),
    (Config(False, 1, 1, 96, 6), variant(NO_SCALES, "fp32", a_turned=True, k=1000, **_BF16)),
    (Config(False, 2, 1, 256, 3, right_share=2), variant(NO_SCALES, c=True, **_BF16, **_TURNED)),
    (Config(False, 2, 1, 256, 4, right_share=2, out_buffers=2, out_parts=4), variant(NO_SCALES, c=True, **_BF16)),
    (Config(True, 1, 1, 144, 8, right_share=2), variant(NO_SCALES, c=True, **_BF16)),
    (Config(False, 2, 1, 192, 4), variant(NO_SCALES, b_turned=True, **_BF16)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(NO_SCALES, "fp16", c=True, **_FP16)),
    (Config(False, 2, 2, 128, 3, left_share=2), variant(NO_SCALES, "fp32", k=129, **_FP16, **_TURNED)),
    (
        Config(False, 2, 1, 256, 4, right_share=2, out_buffers=2, out_parts=4),
        variant(NO_SCALES, "fp32", c=True, **_BF16, **_TURNED),
    ),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(NO_SCALES, "fp32", c=True, **_BF16)),
    (Config(False, 2, 1, 256, 4, right_share=2), variant(NO_SCALES, "fp32", c=True, **_BF16, **ODD)),
    (PINGPONG, variant(NO_SCALES, c=True, **_BF16, **_TURNED)),
    (PINGPONG, variant(NO_SCALES, "fp32", c=True, **_FP16, **ODD)),
    (Config(False, 2, 1, 256, 4, left_share=2, out_parts=4, pingpong=True), variant(NO_SCALES, k=129, **_BF16)),
]
_ROWS: dict[str, Any] = {"grouping": "contiguous"}
_SLABS: dict[str, Any] = {"grouping": "masked"}
GROUPS = [
    (Config(True, 1, 1, 8, 7, depth=4, blocks_per_sm=3), variant(n=7168, k=2048, **_SLABS)),
    (Config(True, 1, 1, 16, 8, depth=4, blocks_per_sm=2), variant(TOKEN, "fp32", **_ROWS, **ODD)),
    (Config(True, 1, 1, 24, 8, depth=4), variant(ROWS, k=1000, **_ROWS)),
    (Config(True, 2, 1, 32, 8, depth=4), variant(out="fp16", **_SLABS)),
    (Config(True, 1, 1, 64, 6, left_share=2, depth=2), variant(TENSOR, a_dtype="e5m2", **_SLABS)),
    (Config(True, 2, 1, 128, 5, right_share=2), variant(b_dtype="e5m2", **_ROWS)),
    (Config(True, 1, 1, 64, 6, depth=2, blocks_per_sm=2), variant(TOKEN, **_INT8, **_ROWS)),
    (Config(False, 1, 1, 96, 6), variant(**_SLABS, **ODD)),
    (Config(False, 2, 1, 128, 4, right_share=2), variant(ROWS, k=1000, **_ROWS)),
    (Config(False, 2, 1, 144, 4), variant(MIXED[1], "fp32", **_ROWS)),
    (Config(False, 2, 1, 192, 4, left_share=2, band=16), variant(**_ROWS)),
    (Config(False, 2, 1, 192, 4, right_share=2, band=16), variant(TOKEN, **_SLABS)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(**_ROWS)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(TOKEN, "fp16", **_SLABS)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(TOKEN, **_INT8, **_SLABS)),
    (Config(True, 1, 1, 8, 7, depth=4, blocks_per_sm=3), variant(NO_SCALES, **_BF16, **_ROWS)),
    (Config(True, 2, 1, 64, 6, depth=2), variant(NO_SCALES, b_turned=True, **_FP16, **_SLABS)),
    (Config(True, 2, 1, 128, 4, right_share=2), variant(NO_SCALES, "fp32", k=1000, **_BF16, **_SLABS)),
    (Config(False, 2, 1, 256, 3, right_share=2, band=16), variant(NO_SCALES, **_BF16, **_ROWS)),
    (Config(False, 2, 1, 256, 4, right_share=2, out_buffers=2, out_parts=4), variant(NO_SCALES, **_BF16, **_ROWS)),
    (Config(False, 2, 1, 192, 4, left_share=2, band=16), variant(NO_SCALES, b_turned=True, **_BF16, **_SLABS)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(NO_SCALES, "fp16", **_FP16, **_ROWS)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(out="fp32", **_ROWS)),
    (Config(False, 1, 1, 192, 2, blocks_per_sm=2), variant(TOKEN, "fp32", **_INT8, **_SLABS)),
    (PINGPONG, variant(NO_SCALES, b_turned=True, **_BF16, **_ROWS)),
    (dataclasses.replace(PINGPONG, left_share=2, right_share=1), variant(TOKEN, "fp32", **_INT8, **_SLABS)),
]
_LIST: dict[str, Any] = {"grouping": "list", "n": 0, "k": 0}
LISTS = [
    (Config(False, 2, 1, 256, 3, band=16), variant(NO_SCALES, **_BF16, **_LIST)),
    (
        Config(False, 2, 1, 256, 4, right_share=2, band=16, out_buffers=2, out_parts=4),
        variant(NO_SCALES, **_BF16, **_LIST),
    ),
    (Config(False, 2, 1, 256, 3, right_share=2), variant(NO_SCALES, c=True, **_BF16, **_TURNED, **_LIST)),
    (Config(False, 2, 1, 192, 4), variant(NO_SCALES, "fp16", b_turned=True, **_FP16, **_LIST)),
    (Config(False, 2, 1, 128, 5), variant(NO_SCALES, "fp32", a_turned=True, **_FP16, **_LIST)),
    (Config(False, 2, 2, 128, 3, out_buffers=2), variant(NO_SCALES, c=True, **_BF16, **_LIST)),
    (Config(False, 2, 2, 128, 3, left_share=2, out_buffers=2), variant(NO_SCALES, "fp32", c=True, **_BF16, **_LIST)),
    (Config(False, 1, 1, 256, 4), variant(NO_SCALES, "fp16", **_BF16, **_LIST)),
    (Config(False, 1, 1, 64, 5, blocks_per_sm=2), variant(NO_SCALES, c=True, **_FP16, **_TURNED, **_LIST)),
    (Config(False, 2, 1, 128, 5, right_share=2), variant(ROWS, c=True, **_LIST)),
    (Config(False, 2, 1, 128, 5), variant(ROWS, "fp32", c=True, a_dtype="e5m2", **_LIST)),
    (
        Config(False, 2, 1, 256, 4, right_share=2, band=16, out_buffers=2, out_parts=4),
        variant(NO_SCALES, "fp32", c=True, **_BF16, **_TURNED, **_LIST),
    ),
    (Config(False, 2, 1, 192, 4), variant(NO_SCALES, "fp32", c=True, **_FP16, **_TURNED, **_LIST)),
    (Config(False, 1, 1, 128, 6, blocks_per_sm=1), variant(ROWS, "fp16", **_LIST)),
    (Config(False, 1, 1, 64, 5, blocks_per_sm=2), variant(ROWS, "fp32", **_LIST)),
]
# Batches are dense kernels with one more coordinate, and registers are as few for them.
BATCHES = [(config, dataclasses.replace(what, batched=True)) for config, what in (*INTEGERS, *SIXTEEN)]
COMPILED = [*SWAPS, *BY_ROW, *MEASURED, *INTEGERS, *SIXTEEN, *GROUPS, *LISTS, *BATCHES]


@pytest.fixture(scope="module")
def results(compile_all: Callable[[Sequence[KernelSpec]], list[Result]]) -> list[Result]:
    return compile_all([dense.spec(config, what) for config, what in COMPILED])


def _label(i: int) -> str:
    config, what = COMPILED[i]
    return f"{i}-{sm90.name(config, what).removeprefix('omnigemm_sm90_fp8_')}-{what.out_dtype}"


@pytest.mark.parametrize("i", range(len(COMPILED)), ids=_label)
def test_compiles_clean(results: list[Result], compiles_clean: Callable[[Result], None], i: int) -> None:
    compiles_clean(results[i])


def test_the_compiled_ones_cover_every_choice() -> None:
    """Whoever shortens the lists above sees what is no longer compiled."""
    for swap in (False, True):
        some = [(config, what) for config, what in COMPILED if config.swap == swap and not what.straight]
        configs, whats = [config for config, _ in some], [what for _, what in some]
        assert {config.math_groups for config in configs} == {1, 2}
        assert {config.left_share for config in configs} == {1, 2, 4} == {config.right_share for config in configs}
        assert {(what.a_scale, what.b_scale) for what in whats} == {BLOCK, ROWS, TOKEN, TENSOR, *MIXED}
        assert {what.out_dtype for what in whats} == {"bf16", "fp16", "fp32"}
        assert {what.bias for what in whats} == {what.out_by_tma for what in whats} == {False, True}
        assert {what.a_dtype for what in whats} == {what.b_dtype for what in whats} == {"e4m3", "e5m2"}
        assert {what.k % 128 == 0 for what in whats} == {what.n % 2 for what in whats} == {False, True}
    assert {config.waves for config, _ in BY_ROW} == {1, 2}
    assert {config.split for config, _ in SWAPS} == {1, 3, 8}
    assert {config.depth for config, _ in SWAPS} == {1, 2, 4}
