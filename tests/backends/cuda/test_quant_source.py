"""The quantisers' kernels compile for every architecture that they may meet, without spills."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from omnigemm.backends.cuda import quant_source
from omnigemm.backends.cuda.jit import KernelSpec, Result
from omnigemm.backends.cuda.quant_source import CODECS, SOURCES, TYPES, Variant

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90")
LONGEST = 16384  # of rows that are held in registers: the most of them


def forms() -> list[tuple[str, str, str, str]]:
    """Source, input, codec and granularity, all that there are."""
    found = []
    for source, dtype, codec in itertools.product(SOURCES, TYPES, CODECS):
        fp8 = codec in ("e4m3", "e5m2")
        if source == "plain":
            kinds = ("token", "tensor", "1x128", "128x128") if fp8 else ("token", "tensor")
        else:
            kinds = ("token", "1x128") if fp8 else ("token",) if codec == "int8" else ()
        found += [(source, dtype, codec, kind) for kind in kinds]
    return found


def specs_of(variant: Variant, k: int, arch: str, m: int = 4096) -> list[KernelSpec]:
    if variant.granularity == "tensor":
        shape = quant_source.tensor(variant, m, k, 132)
        return [quant_source.spec(variant, shape, arch, measure) for measure in (False, True)]
    if variant.granularity == "128x128":
        return [quant_source.spec(variant, quant_source.tiles(m, k, 1), arch)]
    return [quant_source.spec(variant, quant_source.rows(variant, m, k), arch)]


def wanted() -> list[KernelSpec]:
    """Every form for Hopper; for the others a third each; and for all of them all ways to hold a row."""
    found: dict[KernelSpec, None] = {}
    for i, form in enumerate(forms()):
        found.update(dict.fromkeys(specs_of(Variant(*form, True), LONGEST, "sm_90")))
        other = ("sm_75", "sm_80", "sm_89")[(i + i // 3 + i // 9) % 3]
        found.update(dict.fromkeys(specs_of(Variant(*form, i % 2 == 0), LONGEST, other)))
    for dtype, (codec, kind) in itertools.product(TYPES, (("e4m3", "1x128"), ("int8", "token"))):
        found.update(dict.fromkeys(specs_of(Variant("rms_norm", dtype, codec, kind, True, True), LONGEST, "sm_90")))
    for arch in ARCHITECTURES:
        variant = Variant("rms_norm", "bf16", "e4m3", "1x128", arch != "sm_80", True)
        found.update(dict.fromkeys(specs_of(variant, LONGEST + 8, arch)))
    for dtype, arch in itertools.product(TYPES, ARCHITECTURES):
        for aligned, m in ((True, 64), (False, 64), (True, 4096)):  # few tiles, and many
            found.update(dict.fromkeys(specs_of(Variant("plain", dtype, "e4m3", "128x128", aligned), 7168, arch, m)))
    for source, arch in itertools.product(SOURCES, ARCHITECTURES):
        for k, aligned in ((8, True), (1000, False), (2048, True), (LONGEST + 8, True), (LONGEST + 1, False)):
            found.update(dict.fromkeys(specs_of(Variant(source, "bf16", "e4m3", "token", aligned), k, arch, 64)))
    return list(found)


WANTED = wanted()


@pytest.fixture(scope="module")
def results(compile_all: Callable[[Sequence[KernelSpec]], list[Result]]) -> list[Result]:
    return compile_all(WANTED)


@pytest.mark.parametrize("i", range(len(WANTED)), ids=lambda i: f"{i}-{WANTED[i].name[15:]}-{WANTED[i].arch}")
def test_compiles_clean(results: list[Result], compiles_clean: Callable[[Result], None], i: int) -> None:
    compiles_clean(results[i])


def test_bits_are_not_left_to_the_compiler() -> None:
    assert {spec.options for spec in WANTED} == {("--std=c++17", "--fmad=false")}


def test_the_compiled_ones_cover_every_choice() -> None:
    for arch in ARCHITECTURES:
        sources = [spec.source for spec in WANTED if spec.arch == arch]
        for key, values in {
            "IN_TYPE": TYPES.values(),
            "CODE_TYPE": CODECS.values(),
            "ALIGNED": (0, 1),
            "WARP_ROWS": (0, 1),
            "MEASURE": (0, 1),
            "BLOCKS": (0, 1),
            "RESIDUAL": (0, 1),
            "THREADS": (256, 512),
            "EACH": (0, 1, 4),
        }.items():
            for value in values:
                assert any(f"#define {key} {value}\n" in source for source in sources), (arch, key, value)
