"""What the host packs is what kernels read: sizes and places, compared by the kernels' own compiler."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence

import pytest

from omnigemm.backends.cuda import arguments, dense, sm90
from omnigemm.backends.cuda.jit import KernelSpec, Result
from omnigemm.backends.cuda.sm90 import Config, Variant

SMALL = Config(False, 1, 1, 64, 2)
FP8 = Variant(128, 128, "e4m3", "e4m3", "1x128", "1x128", "bf16", out_by_tma=True)
BF16 = Variant(128, 128, "bf16", "bf16", "none", "none", "bf16", out_by_tma=True)
INT8 = Variant(128, 128, "int8", "int8", "token", "channel", "bf16", out_by_tma=True)
BATCHED = {"batched": True}
GROUPED = {"grouping": "contiguous"}
LIST = {"n": 0, "k": 0, "grouping": "list"}


def before(format: str, last: str) -> int:
    """Where the structure's last part begins."""
    return struct.calcsize(format.removesuffix("0P").removesuffix(last) + "0P")


CASES = {
    "fp8": (FP8, {}, arguments.of_product(1), "a_zero", before(arguments.of_product(1), "PP")),
    "bf16": (BF16, {}, arguments.of_product(2), "c_type", before(arguments.of_product(2), "i")),
    "int8 batch": (INT8, BATCHED, arguments.of_batch(1), "out_step", before(arguments.of_batch(1), "qqiiiiii")),
    "bf16 batch": (BF16, BATCHED, arguments.of_batch(2), "out_step", before(arguments.of_batch(2), "qqiiiiii")),
    "fp8 groups": (FP8, GROUPED, arguments.of_groups(1), "groups", before(arguments.of_groups(1), "Piiiii")),
    "bf16 groups": (BF16, GROUPED, arguments.of_groups(2), "groups", before(arguments.of_groups(2), "Piiiii")),
    "fp8 list": (FP8, LIST, arguments.of_list(1), "list", before(arguments.of_list(1), "Pii")),
    "bf16 list": (BF16, LIST, arguments.of_list(2), "list", before(arguments.of_list(2), "Pi")),
}


@pytest.mark.parametrize("name", CASES)
def test_the_host_packs_what_kernels_read(
    compile_all: Callable[[Sequence[KernelSpec]], list[Result]], name: str
) -> None:
    base, change, format, field, place = CASES[name]
    variant = dataclasses.replace(base, **change)  # type: ignore[arg-type]
    assert variant.fault(SMALL) is None
    made = dense.spec(SMALL, variant)

    def compiled(size: int, at: int) -> Result:
        checks = f"static_assert(sizeof(Arguments) == {size} && __builtin_offsetof(Arguments, {field}) == {at});"
        source = f"{made.source}\n{checks}\n"
        return compile_all([KernelSpec(made.name, source, sm90.ARCH, sm90.OPTIONS)])[0]

    good = compiled(struct.calcsize(format), place)
    assert good.ok, good.error
    assert not compiled(struct.calcsize(format) + 8, place).ok, "the check does not check"
