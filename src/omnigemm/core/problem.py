"""A matrix product described without tensors: what is to be computed, never on which data.

Kernels are chosen, compiled and tested from a Problem alone, on a machine that may have no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from .dtypes import name_of
from .errors import DTypeError, ShapeError, UnsupportedError

OPS = (
    "gemm",
    "int8_gemm",
    "fp8_gemm",
    "int4_gemm",
    "grouped_gemm",
    "grouped_gemm_contiguous",
    "grouped_gemm_masked",
    "grouped_gemm_k_contiguous",
)

SIZE_LIMIT = 2**31 - 4096  # backends count rows and columns in 32 bits, up to the end of a tile
BLOCK = 128  # the side of a scale block, along K and (for weights) along N

# The name users give to a granularity -> how A's and B's scales are laid out.
GRANULARITIES = {
    "tensor": ("tensor", "tensor"),
    "token": ("token", "channel"),
    "128x128": ("1x128", "128x128"),
    "1x128": ("1x128", "1x128"),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product. Hashable, picklable, printable.

    `m` is the total number of rows for contiguous groups and the row capacity of a group for masked ones; for groups
    along K, `k` is the total of all groups, and layouts are those of A [K, M] and B [K, N].
    For `grouped_gemm`, `shapes` holds each group's (m, n, k) and m, n, k are their maxima; with `device_sizes`, that is
    what there is room for.
    """

    op: str
    m: int
    n: int
    k: int
    a_dtype: str
    b_dtype: str
    out_dtype: str
    batch: int = 1
    groups: int = 0
    a_scale: str = "none"  # none, tensor, token, 1x128
    b_scale: str = "none"  # none, tensor, channel, 128x128, 1x128
    group_size: int = 0  # int4: columns that share a scale
    zero_points: bool = False  # int8: a_zero; int4: asymmetric weights
    act_order: bool = False
    bias: bool = False
    c: bool = False  # C is read: beta is not 0
    scaled: bool = False  # alpha is not 1
    a_layout: str = "row"  # row, col, strided: which of the last two strides is 1; of lists also mixed
    b_layout: str = "row"
    shapes: tuple[tuple[int, int, int], ...] = ()
    device_sizes: bool = False  # lists: what of the shapes is in use stands in a tensor, where the matrices are
    # Rows that a masked group may have: a hint for choosing a config, not a part of what is computed. 0: unknown.
    expected_m: int = dataclasses.field(default=0, compare=False)
    # alpha or beta of a list are tensors on the device. Also a hint: libraries that want numbers wait for them.
    device_factors: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            if getattr(self, name) > SIZE_LIMIT:
                raise ShapeError(f"{self.op}: {name} is {getattr(self, name)}, expected at most {SIZE_LIMIT}")

    @property
    def is_int4(self) -> bool:
        return self.b_dtype == "int4"

    @property
    def flops(self) -> int:
        """Multiplications and additions, counted as two operations."""
        if self.shapes:
            return sum(2 * m * n * k for m, n, k in self.shapes)
        copies = self.groups if self.op == "grouped_gemm_masked" else self.batch
        return 2 * copies * self.m * self.n * self.k

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}"
        if self.shapes:
            size = f"{len(self.shapes)} groups up to {size}"
        elif self.groups:
            size = f"{self.groups} groups, {size}"
        elif self.batch != 1:
            size = f"{self.batch} x {size}"
        words = [f"{self.op} {size}", f"{self.a_dtype} x {self.b_dtype} -> {self.out_dtype}"]
        if self.a_scale != "none":
            words.append(f"scales {self.a_scale} x {self.b_scale}")
        if self.is_int4:
            words.append(f"groups of {self.group_size}")
        flags = ("zero_points", "act_order", "bias", "c", "scaled", "device_sizes", "device_factors")
        words += [name.replace("_", " ") for name in flags if getattr(self, name)]
        words += [f"{x} {layout}" for x, layout in (("a", self.a_layout), ("b", self.b_layout)) if layout != "row"]
        return ", ".join(words)


def layout_of(tensor: torch.Tensor) -> str:
    """'row' when the last dimension is dense, 'col' when the one before is, else 'strided'."""
    rows, cols = tensor.stride(-2), tensor.stride(-1)
    if cols == 1 or tensor.size(-1) <= 1:
        return "row"
    return "col" if rows == 1 or tensor.size(-2) <= 1 else "strided"


def _layout_as_seen(layout: str, matrices: Sequence[tuple[int, int]]) -> str:
    """What `layout_of` says of matrices [rows, columns] that are described so: thin ones have fewer ways to lie."""
    if any(min(size) > 1 for size in matrices):
        return layout
    _, columns = matrices[0]  # of a list that is thin throughout, the first speaks for all
    if columns <= 1:
        return "row"
    return "col" if layout == "strided" else layout


def _matrices(op: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """A and B as the operation takes them."""
    if op == "grouped_gemm_k_contiguous":
        return (k, m), (k, n)
    return (m, k), (k, n) if op in ("gemm", "grouped_gemm") else (n, k)


# ------------------------------------------------------------------------------------------------------- scales


Shape = tuple[int, ...]


def blocks_of(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def scale_kinds(
    a: Shape, b: Shape, rows: Shape, lead: Shape, n: int, k: int, blockwise: bool
) -> tuple[str | None, str | None]:
    """How scales of such shapes are laid out, or None. `rows` are A's leading dimensions; `lead` is (G,) for groups.

    Calls ask this of their tensors, descriptions of what quantisers give, so that both name the same problem. Where
    shapes have several meanings the plainest is taken: one value is one for all, also if there is but one row, and
    one per row is just that, also if K is a single block.
    """
    b_kind = _b_kind(b, lead, n, k, blockwise)
    if b_kind in ("128x128", "1x128") and k <= BLOCK and a == (*rows, 1):
        return "1x128", b_kind  # one block covers all of K, so one per row is one per block
    return _a_kind(a, rows, k, blockwise), b_kind


def _is_one(shape: Shape) -> bool:
    """Whether there is one value. Where a tracer does not know, there are several: it only asks whether shapes fit."""
    if all(type(size) is int for size in shape):
        return all(size == 1 for size in shape)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # late: it takes half a second

    return all(guard_or_false(size == 1) for size in shape)


def _a_kind(a: Shape, rows: Shape, k: int, blockwise: bool) -> str | None:
    if _is_one(a):
        return "tensor"
    if a in (rows, (*rows, 1)):
        return "token"
    return "1x128" if blockwise and a == (*rows, blocks_of(k)) else None


def _b_kind(b: Shape, lead: Shape, n: int, k: int, blockwise: bool) -> str | None:
    if _is_one(b) or (lead and b == lead):
        return "tensor"
    if b in ((*lead, n), (*lead, n, 1)):
        return "channel"
    if blockwise and b == (*lead, blocks_of(n), blocks_of(k)):
        return "128x128"
    return "1x128" if blockwise and b == (*lead, n, blocks_of(k)) else None


_USUAL_DTYPE = {"int8_gemm": "int8", "fp8_gemm": "e4m3"}


def describe(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    groups: int | None = None,
    dtype: torch.dtype | str | None = None,
    weight_dtype: torch.dtype | str | None = None,
    out_dtype: torch.dtype | str | None = None,
    granularity: str | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    act_order: bool = False,
    bias: bool = False,
    beta: float = 0.0,
    alpha: float = 1.0,
    a_zero: bool = False,
    a_layout: str | None = None,
    b_layout: str | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    expected_m: int | None = None,
    device_factors: bool = False,
    device_sizes: bool = False,
) -> Problem:
    """A Problem from keywords. What is not given takes the op's usual value."""
    if not isinstance(op, str) or op not in OPS:
        raise UnsupportedError(f"op is {op!r}, expected one of {', '.join(OPS)}")
    flags = {
        "symmetric": symmetric,
        "act_order": act_order,
        "bias": bias,
        "a_zero": a_zero,
        "device_factors": device_factors,
        "device_sizes": device_sizes,
    }
    counts = {"batch": batch, "groups": groups, "expected_m": expected_m}
    _check_types(op, {"m": m, "n": n, "k": k, **counts}, flags, {"alpha": alpha, "beta": beta})
    _check_arguments(op, {**counts, **flags, "alpha": alpha, "beta": beta, "shapes": shapes})
    grouped, along_k = op.startswith("grouped_"), op == "grouped_gemm_k_contiguous"
    if along_k and beta not in (0.0, 1.0):
        raise ShapeError(f"{op}: beta is {beta!r}, expected 0 or 1: C is added as it is")

    a = _USUAL_DTYPE.get(op, "bf16") if dtype is None else name_of(dtype, f"{op}: dtype")
    usual_b = "int4" if op == "int4_gemm" else a
    b = usual_b if weight_dtype is None else name_of(weight_dtype, f"{op}: weight_dtype")
    _check_operands(op, a, b)
    eight_bit = a in ("int8", "e4m3", "e5m2")
    usual_out = "fp32" if along_k else "bf16" if eight_bit else a
    out = usual_out if out_dtype is None else name_of(out_dtype, f"{op}: out_dtype")
    if out not in ("fp16", "bf16", "fp32"):
        raise DTypeError(f"{op}: out_dtype is {out}, expected fp16, bf16 or fp32")

    count = 0
    sizes: tuple[tuple[int, int, int], ...] = ()
    if op == "grouped_gemm":
        sizes = ((m, n, k),) * (1 if groups is None else groups) if shapes is None else _sizes(op, shapes, groups)
        if not sizes:
            given = f"groups is {groups}" if shapes is None else f"shapes is {shapes}"
            raise ShapeError(f"{op}: {given}, expected at least one group")
        m, n, k = (max(size[i] for size in sizes) for i in range(3))
        count = len(sizes)
    elif grouped:
        count = 8 if groups is None else groups

    a_scale = b_scale = "none"
    if eight_bit:
        allowed = granularities(op, a)
        if granularity is None:
            granularity = "token" if a == "int8" else "1x128" if along_k else "128x128"
        if not isinstance(granularity, str) or granularity not in allowed:
            raise ShapeError(f"{op}: granularity is {granularity!r}, expected one of {', '.join(allowed)}")
        a_scale, b_scale = GRANULARITIES[granularity]
        if not along_k:
            a_scale, b_scale = _kinds_as_seen(a_scale, b_scale, *_leading(op, m, batch, count), n, k)
    elif granularity is not None:
        raise ShapeError(f"{op}: granularity is {granularity!r}, but {a} operands have no scales")

    ways = ("row", "col", "strided", "mixed") if op == "grouped_gemm" else ("row", "col", "strided")
    for name, layout in (("a_layout", a_layout), ("b_layout", b_layout)):
        if layout is not None and not (isinstance(layout, str) and layout in ways):
            raise ShapeError(f"{op}: {name} is {layout!r}, expected {', '.join(ways[:-1])} or {ways[-1]}")
    usual_layout = "col" if along_k and eight_bit else "row"  # of fp8, K lies side by side
    a_layout, b_layout = a_layout or usual_layout, b_layout or usual_layout
    matrices = [_matrices(op, *size) for size in sizes or ((m, n, k),)]

    if b == "int4":
        group_size = 128 if group_size is None else (k if group_size == -1 else group_size)
        if not _is_whole(group_size) or group_size not in (32, 64, 128, k):
            raise ShapeError(f"{op}: group_size is {group_size!r}, expected 32, 64, 128 or k = {k}")
        if b_layout != "row":
            raise ShapeError(f"{op}: b_layout is {b_layout!r}, expected None: int4 weights lie in one way")
    else:
        for name, value, usual in (
            ("group_size", group_size, None),
            ("symmetric", symmetric, True),
            ("act_order", act_order, False),
        ):
            if value is not usual:
                raise ShapeError(f"{op}: {name} is {value!r}, expected {usual}: only int4 weights have it")
    return Problem(
        op=op,
        m=m,
        n=n,
        k=k,
        a_dtype=a,
        b_dtype=b,
        out_dtype=out,
        batch=batch,
        groups=count,
        a_scale=a_scale,
        b_scale=b_scale,
        group_size=group_size or 0,
        zero_points=(not symmetric) if b == "int4" else a_zero,
        act_order=act_order,
        bias=bias,
        c=beta != 0.0,
        scaled=alpha != 1.0,
        a_layout=_layout_as_seen(a_layout, [a for a, _ in matrices]),
        b_layout=_layout_as_seen(b_layout, [b for _, b in matrices]),
        shapes=sizes,
        expected_m=expected_m or 0,
        device_factors=device_factors,
        device_sizes=device_sizes,
    )


# Keywords for arguments that only some operations have -> what stands for none, and those operations.
_ONLY: dict[str, tuple[object, tuple[str, ...]]] = {
    "batch": (1, ("gemm", "int8_gemm")),
    "groups": (None, tuple(op for op in OPS if op.startswith("grouped_"))),
    "shapes": (None, ("grouped_gemm",)),
    "expected_m": (None, ("grouped_gemm_masked",)),
    "alpha": (1, ("gemm", "grouped_gemm")),
    "beta": (0, ("gemm", "grouped_gemm", "grouped_gemm_k_contiguous")),
    "bias": (False, ("int8_gemm", "fp8_gemm", "int4_gemm")),
    "a_zero": (False, ("int8_gemm",)),
    "device_factors": (False, ("grouped_gemm",)),
    "device_sizes": (False, ("grouped_gemm",)),
}


def _check_arguments(op: str, given: Mapping[str, object]) -> None:
    """Whether the operation has them; their types are known to be right, except of shapes."""
    for name, (usual, ops) in _ONLY.items():
        value = given[name]
        if op not in ops and (value is not None if usual is None else value != usual):
            *most, last = ops
            who = f"{', '.join(most)} and {last} have" if most else f"{last} has"
            raise ShapeError(f"{op}: {name} is {value!r}, expected {usual}: only {who} it")


def _check_types(
    op: str, sizes: Mapping[str, object], flags: Mapping[str, object], factors: Mapping[str, object]
) -> None:
    for name, size in sizes.items():
        if not _is_whole(size) and not (size is None and name in ("groups", "expected_m")):
            raise ShapeError(f"{op}: {name} is {size!r}, expected a whole number >= 0")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise DTypeError(f"{op}: {name} is {flag!r}, expected True or False")
    for name, factor in factors.items():
        if not isinstance(factor, (int, float)) or isinstance(factor, bool):
            raise DTypeError(f"{op}: {name} is {factor!r}, expected a number")


def _is_whole(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


def _sizes(op: str, shapes: object, groups: int | None) -> tuple[tuple[int, int, int], ...]:
    """M, N, K of each product of a list."""
    if not isinstance(shapes, (list, tuple)):
        raise ShapeError(f"{op}: shapes is {shapes!r}, expected a list of (M, N, K)")
    if groups not in (None, len(shapes)):
        raise ShapeError(f"{op}: groups is {groups}, expected {len(shapes)}, one for each of shapes")
    for i, one in enumerate(shapes):
        if not isinstance(one, (list, tuple)) or len(one) != 3 or not all(map(_is_whole, one)):
            raise ShapeError(f"{op}: shapes[{i}] is {one!r}, expected (M, N, K), whole numbers >= 0")
    return tuple((m, n, k) for m, n, k in shapes)


def _leading(op: str, m: int, batch: int, groups: int) -> tuple[Shape, Shape]:
    """The dimensions of A before K and of B before N. In a batch, each product has its own of both."""
    if op == "grouped_gemm_contiguous":
        return (m,), (groups,)
    if op == "grouped_gemm_masked":
        return (groups, m), (groups,)
    return ((m,), ()) if batch == 1 else ((batch, m), (batch,))


def _kinds_as_seen(a_kind: str, b_kind: str, rows: Shape, lead: Shape, n: int, k: int) -> tuple[str, str]:
    """What `scale_kinds` says of the scales that quantisers give."""
    along_k = blocks_of(k)
    a = {"tensor": (), "token": rows, "1x128": (*rows, along_k)}[a_kind]
    squares, lines = (*lead, blocks_of(n), along_k), (*lead, n, along_k)
    b = {"tensor": (), "channel": (*lead, n), "128x128": squares, "1x128": lines}[b_kind]
    seen = scale_kinds(a, b, rows, lead, n, k, blockwise=True)
    assert seen[0] is not None
    assert seen[1] is not None
    return seen[0], seen[1]


def granularities(op: str, dtype: str) -> tuple[str, ...]:
    """Those that 8-bit operands of the operation may have."""
    if op == "grouped_gemm_k_contiguous":
        return ("1x128",)
    return ("tensor", "token") if dtype == "int8" else tuple(GRANULARITIES)


# op -> the element types of A it takes; weights have the same type unless they are int4 (fp8 may mix both kinds).
OPERANDS = {
    "gemm": ("fp16", "bf16", "fp32"),
    "int8_gemm": ("int8",),
    "fp8_gemm": ("e4m3", "e5m2"),
    "int4_gemm": ("fp16", "bf16"),
    "grouped_gemm": ("fp16", "bf16", "fp32"),
    "grouped_gemm_contiguous": ("fp16", "bf16", "fp32", "e4m3", "e5m2", "int8"),
    "grouped_gemm_masked": ("fp16", "bf16", "fp32", "e4m3", "e5m2", "int8"),
    "grouped_gemm_k_contiguous": ("fp16", "bf16", "fp32", "e4m3", "e5m2"),
}


def _check_operands(op: str, a: str, b: str) -> None:
    if a not in OPERANDS[op]:
        raise DTypeError(f"{op}: dtype is {a}, expected {' or '.join(OPERANDS[op])}")
    fp8 = ("e4m3", "e5m2")
    takes_int4 = op in ("int4_gemm", "grouped_gemm_contiguous", "grouped_gemm_masked") and a in (
        "fp16",
        "bf16",
    )
    fits = (b == "int4" and takes_int4) or (a in fp8 and b in fp8) or (a == b and op != "int4_gemm")
    if not fits:
        raise DTypeError(f"{op}: weight_dtype is {b}, which does not go with {a} activations")
