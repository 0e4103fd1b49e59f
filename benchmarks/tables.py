"""Tables of a GPU record for the pages of docs/: benchmarks/standing.py puts them between the marks that name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from goals import COPY_GBPS, FEW, Keeps, Record, Row, any_shape, blas_ratios, few, many, mean, ratios, rows_of

DASH = "\N{EN DASH}"
# A page has `<!-- record: name -->`, the table, and `<!-- up to here -->`.
MARK = re.compile(r"<!-- record: (?P<name>[a-z0-9 ]+) -->\n.*?<!-- up to here -->", re.S)


class Dense(NamedTuple):
    """The shape of a single product."""

    m: int
    n: int
    k: int


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def number(us: float) -> str:
    return f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def dense(record: Record, op: str) -> dict[Dense, Row]:
    return {Dense(*map(int, row["shape"].split("x"))): row for row in record["rows"] if row["op"] == op}


def peer(row: Row, *names: str) -> float:
    """The fastest of a row's peers with one of those words in their names."""
    return min(us for name, us in row["peers"].items() if any(word in name for word in names))


def pair(row: Row, name: str) -> list[float] | None:
    """Ours and the peer's time, in turns by themselves."""
    return next((both for title, both in row.get("pairs", {}).items() if name in title), None)


# ------------------------------------------------------------------------------------------------ single products


def by_weight(
    record: Record, op: str, head: str, columns: Sequence[int], cell: Callable[[Row], str], floors: Sequence[int] = ()
) -> str:
    """A line for each weight that was measured with all those numbers of rows."""
    found = dense(record, op)
    weights = dict.fromkeys((one.n, one.k) for one in found)
    weights = {one: None for one in weights if all(Dense(m, *one) in found for m in columns)}

    def lines() -> Iterator[list[str]]:
        for n, k in weights:
            rows = [found[Dense(m, n, k)] for m in columns]
            lows = [number(found[Dense(m, n, k)]["floor_us"]) for m in floors]
            yield [f"{n} x {k}", *map(cell, rows), *([" / ".join(lows)] if lows else [])]

    titles = [f"M = {columns[0]}", *map(str, columns[1:])]
    last = [f"floor at {' / '.join(map(str, floors))}"] if floors else []
    return table([head, *titles, *last], lines())


def constant_or_not(row: Row) -> str:
    """With constant weights, in brackets without; a star where the goal of few rows is missed."""
    if "us_any_weights" not in row:
        return number(row["us"])
    star = " *" if row["us"] > 1.08 * row["floor_us"] + 3.0 else ""
    return f"{number(row['us'])}{star} ({number(row['us_any_weights'])})"


def fp8_cell(row: Row) -> str:
    many_rows = "us_any_weights" not in row
    return f"{number(row['us'])} / {number(peer(row, 'torch'))}" if many_rows else constant_or_not(row)


def gemm_cell(row: Row) -> str:
    mark = " c" if row["config"].get("backend") == "blas" else ""
    return f"{number(row['us'])} / {number(peer(row, 'torch.mm'))}{mark}"


def many_rows_in_pairs(record: Record, op: str, name: str) -> str:
    def lines() -> Iterator[list[str]]:
        for shape, row in dense(record, op).items():
            both = pair(row, name)
            if shape.m > FEW and both is not None:
                yield [" x ".join(map(str, shape)), *map(number, both), f"{both[1] / both[0]:.2f}x"]

    return table(["M x N x K", "ours", name, ""], lines())


# -------------------------------------------------------------------------------------------------------- groups

GROUPS = (
    ("masked, block scales, over DeepGEMM *", "grouped_masked_fp8_block", ("DeepGEMM",)),
    ("masked, block scales, over torch", "grouped_masked_fp8_block", ("torch",)),
    ("contiguous, block scales, over DeepGEMM *", "grouped_contiguous_fp8_block", ("DeepGEMM",)),
    ("contiguous, block scales, over torch", "grouped_contiguous_fp8_block", ("torch",)),
    ("contiguous, per token, over torch", "grouped_contiguous_fp8_token", ("torch",)),
    ("contiguous, bf16, over torch", "grouped_contiguous_bf16", ("torch",)),
)


def mean_and_lowest(found: dict[str, float]) -> str:
    if not found:
        return DASH
    least = min(found, key=found.__getitem__)
    where = f" at {least}" if found[least] < 1.1 else ""
    return f"{mean(found.values()):.2f}x ({found[least]:.2f}x{where})"


def groups(record: Record) -> str:
    lines = (
        [what, *(mean_and_lowest(ratios(record, [op], keeps, peers)) for keeps in (few, many))]
        for what, op, peers in GROUPS
    )
    return table(["", "up to 20 rows in a group", "192 and more"], lines)


def groups_in_pairs(record: Record, op: str, name: str, keeps: Keeps) -> str:
    """Ours and the peer's time: a line for each number of rows and groups, a column for each weight."""
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for row in rows_of(record, [op], keeps):
        both = pair(row, name)
        if both is not None:
            count, m, n, k = map(int, row["shape"].removeprefix("G").split("x"))
            cells.setdefault((m, count), {})[f"{n} x {k}"] = " / ".join(map(number, both))
    weights = list(dict.fromkeys(weight for line in cells.values() for weight in line))
    lines = ([f"{m} x {count}", *(line.get(weight, "") for weight in weights)] for (m, count), line in cells.items())
    return table(["rows x groups", *weights], lines)


def lists(record: Record) -> str:
    def lines() -> Iterator[list[str]]:
        for row in record["rows"]:
            if row["op"] == "grouped_list_bf16":
                one, loop, host = row["peers"]["one dense torch.mm"], row["peers"]["loop of torch.mm"], row["host_us"]
                parts = [f"{us / one:.2f}" for us in (row["us"], loop)]
                yield [row["shape"][1:], number(row["us"]), *parts, *(f"{us:.0f}" for us in host.values())]

    head = ["products", "us", "of the dense product", "a loop of `torch.mm`", "host, us", "host of the loop"]
    return table(head, lines())


def k_groups(record: Record) -> str:
    times = {(row["op"], row["shape"]): row for row in record["rows"]}

    def lines() -> Iterator[list[str]]:
        for (op, shape), row in times.items():
            added = [times.get((f"grouped_k_{kind}_add", shape)) for kind in ("bf16", "fp8")]
            if op == "grouped_k_bf16" and None not in added:
                peers = (peer(row, name) for name in ("grouped_mm", "loop"))
                yield [shape, *map(number, (row["us"], *peers, *(one["us"] for one in added if one)))]

    head = ["", "bf16 to bf16", "torch grouped", "loop of `torch.mm`", "bf16, added to fp32", "fp8, added to fp32"]
    return table(head, lines())


# -------------------------------------------------------------------------------------------------- BLAS, quantisers

BLAS = {
    "gemm_bf16": "`torch.mm`",
    "gemm_fp16": "`torch.mm`",
    "bmm_bf16": "`torch.bmm`",
    "baddbmm_bf16": "`torch.baddbmm`",
}
HOSTS = (
    ("bf16", "gemm by blas, out=", "torch.mm, out="),
    ("bf16, K = 64", "gemm by blas, K = 64, out=", "torch.mm, K = 64, out="),
    ("bf16, C is `out`", "gemm by blas, C is out", ""),
    ("bf16, another C", "gemm by blas, another C", "torch.addmm, out="),
    ("bf16, batch of 4", "gemm by blas, batch, out=", "torch.bmm, out="),
    ("bf16, batch of 4, allocating", "gemm by blas, batch", "torch.bmm"),
    ("bf16 by our own kernel", "gemm, out=", "torch.mm, out="),
    ("fp32, 16x512x512", "gemm fp32, out=", "torch.mm fp32, out="),
)


def blas(record: Record) -> str:
    def lines() -> Iterator[list[str]]:
        for op, name in BLAS.items():
            found = blas_ratios(record, [op])
            if not found:
                continue
            least, kind = min(found, key=found.__getitem__), op.split("_")[1]
            what = f"`{name}`, {kind}, {len(found)} shapes"
            yield [what, f"{mean(found.values()):.3f}x", f"{found[least]:.3f}x at {least}"]

    return table(["compared with", "geometric mean", "lowest"], lines())


def hosts(record: Record) -> str:
    def lines() -> Iterator[list[str]]:
        for what, *calls in HOSTS:
            ours, theirs = (record["host_us"].get(f"gemm: {call}") for call in calls)
            name = calls[1].split(",")[0].removesuffix(" fp32")
            yield [what, DASH if ours is None else f"{ours:.1f}", "" if theirs is None else f"{theirs:.1f} (`{name}`)"]

    return table(["", "here, us", "torch, us"], lines())


FORMS = (
    "int8 token", "int8 token, zero points", "int8 tensor", "fp8 token", "fp8 tensor", "fp8 1x128", "fp8 128x128",
    "rms_norm fp8 token", "rms_norm fp8 1x128", "rms_norm fp8 1x128, residual", "swiglu fp8 token", "swiglu fp8 1x128",
)  # fmt: skip


def quantisers(record: Record) -> str:
    """In bf16."""
    found = {
        (row["op"], row["shape"]): row for row in record["rows"] if row["config"].get("dtype") == "bfloat16"
    }  # those of other types come later

    def lines() -> Iterator[list[str]]:
        for form in FORMS:
            large, small = (found.get((form, shape)) for shape in ("8192x8192", "64x7168"))
            if large is None or small is None:
                continue
            yield [form, f"{large['config']['gbps'] / COPY_GBPS:.0%}", f"{small['us']:.1f}"]

    return table(["form", "of a copy", "64x7168, us"], lines())


TABLES: dict[str, Callable[[Record], str]] = {
    "fp8 block": lambda record: by_weight(
        record, "fp8_block", "block scales, N x K", (1, 16, 64, 128, 4096), fp8_cell, (1, 128, 4096)
    ),
    "fp8 over deepgemm": lambda record: many_rows_in_pairs(record, "fp8_block", "DeepGEMM"),
    "int8": lambda record: by_weight(
        record, "int8", "N x K", (1, 16, 32, 64, 128, 1024, 4096), constant_or_not, (1, 128, 4096)
    ),
    "bf16": lambda record: by_weight(record, "gemm_bf16", "N x K", (1, 16, 64, 128, 4096), gemm_cell),
    "groups": groups,
    "masked": lambda record: groups_in_pairs(record, "grouped_masked_fp8_block", "DeepGEMM", any_shape),
    "contiguous": lambda record: groups_in_pairs(record, "grouped_contiguous_fp8_block", "DeepGEMM", any_shape),
    "lists": lists,
    "groups along k": k_groups,
    "blas": blas,
    "host": hosts,
    "quantisers": quantisers,
}


def with_tables(text: str, record: Record) -> str:
    """A page with what the record says between its marks."""

    def made(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise ValueError(f"a page asks for the table {name!r}, expected one of {', '.join(TABLES)}")
        return f"<!-- record: {name} -->\n\n{TABLES[name](record)}\n\n<!-- up to here -->"

    return MARK.sub(made, text)
