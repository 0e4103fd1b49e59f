"""The goals that omnigemm has set itself on a GPU, and what a record says of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

FEW = 128  # the most rows of what is called few
FLOOR_TBPS = 4.6  # what floors of products that memory bounds are computed with
COPY_GBPS = 4260.0

Row = Mapping[str, Any]
Record = Mapping[str, Any]
Keeps = Callable[["Shape"], bool]


class Shape(NamedTuple):
    """What a row's shape begins with."""

    groups: int
    m: int


class Reading(NamedTuple):
    """What a record says of a goal: numbers, whether they are good enough, and more about them."""

    numbers: str
    holds: bool
    detail: str = ""  # to be read on from the numbers


class Goal(NamedTuple):
    what: str
    bar: str
    read: Callable[[Record], Reading | None]  # None: the record has nothing to say


def shape_of(text: str) -> Shape | None:
    """None for batches, lists and what is no product."""
    found = re.fullmatch(r"(?:G(\d+)x)?(\d+)x\d+x\d+", text)
    return Shape(int(found[1] or 0), int(found[2])) if found else None


def few(shape: Shape) -> bool:
    return shape.m <= FEW


def many(shape: Shape) -> bool:
    return shape.m > FEW


def thin(shape: Shape) -> bool:
    """Experts with a few tokens each."""
    return shape.groups >= 64 and shape.m <= 16


def any_shape(_: Shape) -> bool:
    return True


def rows_of(record: Record, ops: Sequence[str], keeps: Keeps = any_shape) -> list[Row]:
    found = ((row, shape_of(row["shape"])) for row in record["rows"] if row["op"] in ops)
    return [row for row, shape in found if shape is not None and keeps(shape)]


def mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def over(row: Row, *peers: str) -> float | None:
    """How many times as fast as the fastest of those peers, by words of their names; measured in a pair if it was."""
    pairs = [theirs / ours for name, (ours, theirs) in row.get("pairs", {}).items() if any(p in name for p in peers)]
    turns = [us / row["us"] for name, us in row["peers"].items() if any(p in name for p in peers)]
    return min(pairs or turns, default=None)


def name_of(row: Row, ops: Sequence[str]) -> str:
    return str(row["shape"]) if len(ops) == 1 else f"{row['op']} {row['shape']}"


def ratios(record: Record, ops: Sequence[str], keeps: Keeps, peers: Sequence[str]) -> dict[str, float]:
    found = {name_of(row, ops): over(row, *peers) for row in rows_of(record, ops, keeps)}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def of_ratios(found: Mapping[str, float], mean_bar: float = 0.0, each_bar: float = 0.0) -> Reading | None:
    if not found:
        return None
    average, where = mean(found.values()), min(found, key=found.__getitem__)
    holds = average >= mean_bar and found[where] >= each_bar
    return Reading(f"{average:.3f}, lowest {found[where]:.3f}", holds, f" at {where}")


def ahead(
    what: str, ops: Sequence[str], keeps: Keeps, peers: Sequence[str], *, average: float = 0.0, each: float = 0.0
) -> Goal:
    """Of so many times a peer's speed in the geometric mean, and for each shape."""
    bars = (("in the mean", average), ("each", each))
    words = ", ".join(f"{bar:.2f} {of}" for of, bar in bars if bar)
    return Goal(what, f"at least {words}", lambda record: of_ratios(ratios(record, ops, keeps, peers), average, each))


def decode(what: str, op: str) -> Goal:
    """Of each shape with few rows to be near its floor."""

    def read(record: Record) -> Reading | None:
        found = rows_of(record, [op], few)
        if not found:
            return None
        misses = [(row["shape"], row["us"], 1.08 * row["floor_us"] + 3.0) for row in found]
        misses = sorted((one for one in misses if one[1] > one[2]), key=lambda one: one[2] / one[1])
        words = ", ".join(f"{shape} {us:.2f} of {bar:.2f}" for shape, us, bar in misses)
        return Reading(f"{len(found) - len(misses)} of {len(found)}", not misses, f", not {words}" if misses else "")

    return Goal(what, "at most 1.08 floors + 3 us each", read)


def blas_ratios(record: Record, ops: Sequence[str]) -> dict[str, float]:
    """The blas backend's speed in parts of torch's, which calls the same library."""
    found = {}
    for row in (row for row in record["rows"] if row["op"] in ops):
        ours = row.get("us_blas", row["us"] if row["config"].get("backend") == "blas" else None)
        theirs = [us for name, us in row["peers"].items() if name in ("torch.mm", "torch.bmm", "torch.baddbmm")]
        if ours is not None and theirs:
            found[name_of(row, ops)] = theirs[0] / ours
    return found


def blas(record: Record) -> Reading | None:
    return of_ratios(blas_ratios(record, ("gemm_bf16", "gemm_fp16", "bmm_bf16", "baddbmm_bf16")), each_bar=0.98)


def lists(record: Record) -> Reading | None:
    found = {}
    for row in record["rows"]:
        if row["op"] == "grouped_list_bf16" and re.fullmatch(r"G\d+", row["shape"]):
            found[row["shape"]] = row["us"] / row["peers"]["one dense torch.mm"]
    words = ", ".join(f"{name[1:]}: {ratio:.2f}" for name, ratio in found.items())
    return Reading(words, max(found.values()) <= 1.15) if found else None


def bandwidth(record: Record) -> Reading | None:
    found = rows_of(record, ["grouped_masked_fp8_block"], lambda shape: shape.m == 20)
    rates = [FLOOR_TBPS * row["floor_us"] / row["us"] for row in found]
    return Reading(", ".join(f"{rate:.2f}" for rate in rates), min(rates) >= 4.0) if rates else None


def quantisers(record: Record, shape: str) -> list[Row]:
    found = [row for row in record["rows"] if row["config"].get("backend") == "quant" and row["shape"] == shape]
    return [row for row in found if row["config"]["dtype"] == "bfloat16"]


def large_quantisers(record: Record) -> Reading | None:
    shares = {row["op"]: row["config"]["gbps"] / COPY_GBPS for row in quantisers(record, "8192x8192")}
    if not shares:
        return None
    least = min(shares, key=shares.__getitem__)
    return Reading(f"{shares[least]:.0%} to {max(shares.values()):.0%}", shares[least] >= 0.8, f", lowest {least}")


def small_quantisers(record: Record) -> Reading | None:
    times = [row["us"] for row in quantisers(record, "64x7168")]
    return Reading(f"{min(times):.1f} to {max(times):.2f}", max(times) <= 3.0) if times else None


def number(field: str, name: str, bar: float, beside: str = "") -> Callable[[Record], Reading | None]:
    """One number of a record, and `torch.mm`'s for comparison."""

    def read(record: Record) -> Reading | None:
        numbers = record.get(field, {})
        if name not in numbers:
            return None
        other = f", `torch.mm` took {numbers[beside]:.1f}" if beside in numbers else ""
        return Reading(f"{numbers[name]:.1f}", numbers[name] <= bar, other)

    return read


def slowest(field: str, names: Mapping[str, str], bar: float) -> Callable[[Record], Reading | None]:
    """The largest of some numbers, which one it is, and what torch took for that."""

    def read(record: Record) -> Reading | None:
        numbers = record.get(field, {})
        found = [name for name in names if name in numbers]
        if not found:
            return None
        name = max(found, key=numbers.__getitem__)
        other = numbers.get(names[name])
        words = f" ({name.split(': ')[-1]})" + (f", `{names[name].split(': ')[-1]}` took {other:.1f}" if other else "")
        return Reading(f"{numbers[name]:.1f}", numbers[name] <= bar, words)

    return read


TORCH_FP8 = ("torch scaled_mm rowwise", "torch scaled_mm tensorwise")
GROUPED = {"masked, fp8 block scales": "masked_fp8_block", "contiguous, fp8 block scales": "contiguous_fp8_block"}
GOALS: tuple[Goal, ...] = (
    decode("`fp8_gemm`, block scales, up to 128 rows", "fp8_block"),
    ahead("the same with many rows, over DeepGEMM", ["fp8_block"], many, ["DeepGEMM"], average=1.03, each=0.97),
    ahead("per token, all rows, over torch", ["fp8_token"], any_shape, TORCH_FP8, each=1.0),
    ahead("per token, up to 128 rows, over torch", ["fp8_token"], few, TORCH_FP8, average=1.3),
    ahead("per tensor, all rows, over torch", ["fp8_tensor"], any_shape, TORCH_FP8, each=1.0),
    ahead("per tensor, up to 128 rows, over torch", ["fp8_tensor"], few, TORCH_FP8, average=1.3),
    Goal("host time of a warm `fp8_gemm`, us", "at most 12", number("host_us", "with out=", 12, "torch.mm, out=")),
    Goal("longest compilation, s", "at most 1.5", number("compile_seconds", "alone, longest of 6", 1.5)),
    decode("`int8_gemm`, up to 128 rows", "int8"),
    ahead("the same with many rows, over CUTLASS", ["int8"], many, ["CUTLASS"], average=1.03, each=0.97),
    ahead("`gemm`, 16 bits, over cuBLAS", ["gemm_bf16", "gemm_fp16"], any_shape, ["torch.mm"], each=0.98),
    Goal("the blas backend over `torch.mm`, `bmm`, `baddbmm`", "at least 0.98 each", blas),
    Goal(
        "host time of a warm `gemm` through cuBLAS, us",
        "at most 12",
        number("host_us", "gemm: gemm by blas, out=", 12, "gemm: torch.mm, out="),
    ),
    Goal(
        "the same with C and of batches, us",
        "at most 12",
        slowest(
            "host_us",
            {
                "gemm: gemm by blas, C is out": "",
                "gemm: gemm by blas, another C": "gemm: torch.addmm, out=",
                "gemm: gemm by blas, batch, out=": "gemm: torch.bmm, out=",
            },
            12,
        ),
    ),
    Goal(
        "the same of batches, without `out=`, us",
        "at most 12",
        slowest("host_us", {"gemm: gemm by blas, batch": "gemm: torch.bmm"}, 12),
    ),
    Goal(
        "the same in fp32, 16x512x512, us",
        "at most 12",
        number("host_us", "gemm: gemm fp32, out=", 12),
    ),
    Goal("quantisers, 8192x8192 bf16, of a copy's bandwidth", "at least 80 %", large_quantisers),
    Goal("quantisers, 64x7168, us", "at most 3", small_quantisers),
    *(
        ahead(f"groups {name}, over DeepGEMM", [f"grouped_{op}"], any_shape, ["DeepGEMM"], average=1.1)
        for name, op in GROUPED.items()
    ),
    ahead(
        "groups contiguous, per token, over torch", ["grouped_contiguous_fp8_token"], any_shape, ["torch"], average=1.1
    ),
    ahead("groups contiguous, bf16, over torch", ["grouped_contiguous_bf16"], any_shape, ["torch"], average=1.1),
    ahead(
        "thin experts (64 to 256 groups of 1 to 16 rows), over torch",
        ["grouped_masked_fp8_block", "grouped_contiguous_fp8_token", "grouped_contiguous_bf16"],
        thin,
        ["torch"],
        each=1.3,
    ),
    Goal("groups of 20 rows, masked, fp8 block scales, TB/s", "at least 4.0", bandwidth),
    Goal("lists of unequal products, time over one dense product's", "at most 1.15", lists),
)
