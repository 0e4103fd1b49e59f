"""Launches of batches without a GPU: a stand-in does with addresses, maps and steps what the kernels do with them."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omnigemm.backends.cuda import batches, dense, gemm, launch, sm90
from omnigemm.backends.cuda.launch import Matrix
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import Problem

PLAIN = Config(False, 2, 1, 128, 4, right_share=2)
SPLIT = Config(False, 1, 1, 64, 6, split=2)
SWAPPED = Config(True, 1, 1, 64, 6, split=2)
CONFIGS = {"plain": PLAIN, "split": SPLIT, "swapped": SWAPPED}
TYPES = {0: torch.bfloat16, 1: torch.float16, 2: torch.float32}
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8}


def at(address: int, dtype: torch.dtype, sizes: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    """What lies there, with steps in elements."""
    room = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    memory = (ctypes.c_char * (room * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, steps)


class Kernel:
    """What `Launcher` is given instead of a compiled kernel: what it computes."""

    def __init__(self, variant: sm90.Variant, config: Config) -> None:
        self.variant, self.config = variant, config


class Launcher:
    """Runs a launch at once, in float64, as kernels/sm90/work_batch.cuh finds its way."""

    grids: list[int] = []  # noqa: RUF012

    def __init__(self, kernel: Kernel, *, grid: int, matrices: Any, values: str, **options: Any) -> None:
        self.kernel, self.grid, self.matrices, self.format = kernel, grid, matrices, struct.Struct(values)

    def launch(self, stream: int, addresses: tuple[int, ...], values: tuple[Any, ...]) -> None:
        self.format.pack(*values)
        self.grids.append(self.grid)
        variant, config = self.kernel.variant, self.kernel.config
        a_scale, b_scale, bias, out, out_stride, m, bias_type, _, zero_step, a_zero, b_sums = values[:11]
        alpha, beta, c, c_row, c_col, c_type = values[11:17] if variant.element_bytes == 2 else (1.0, 0.0, 0, 0, 0, 0)
        out_step, c_step, a_step, b_step, a_scale_step, b_scale_step, b_sum_step, batch = values[-8:]
        left, right = (self.operand(i, addresses[i]) for i in range(2))
        a, b = (right, left) if config.swap else (left, right)
        assert a.shape[1:] == (m, variant.k)
        assert b.shape[1:] == (variant.n, variant.k)
        for i in range(batch):
            value = alpha * (a[i * a_step] @ b[i * b_step].T)
            if variant.zero_points:
                zeros = at(a_zero + 4 * i * a_scale_step * zero_step, torch.int32, (m, 1), (zero_step, 0))
                sums = at(b_sums + 4 * i * b_sum_step, torch.int32, (1, variant.n), (0, 1))
                value -= zeros.double() * sums.double()
            if variant.a_scale != "none":
                by_row, by_col = int(variant.a_scale == "token"), int(variant.b_scale == "channel")
                rows = at(a_scale + 4 * i * a_scale_step * by_row, torch.float32, (m, 1), (by_row, 0))
                cols = at(b_scale + 4 * i * b_scale_step, torch.float32, (1, variant.n), (0, by_col))
                value *= rows.double() * cols.double()
            if variant.bias:
                value += at(bias, TYPES[bias_type], (variant.n,), (1,)).double()
            if variant.c:
                size = TYPES[c_type].itemsize
                value += beta * at(c + size * i * c_step, TYPES[c_type], (m, variant.n), (c_row, c_col)).double()
            self.target(addresses[2], out + i * out_step, out_stride, i, m).copy_(value)

    def operand(self, which: int, address: int) -> Tensor:
        """[count, rows, K], in float64, as far as the map goes."""
        variant, config, matrix = self.kernel.variant, self.kernel.config, self.matrices[which]
        share = (config.rows // config.left_share, config.cols // config.right_share)[which]
        turned = variant.turned(config.swap)[which]
        assert matrix.box == ((64, 64) if turned else (128 // variant.element_bytes, share))
        assert matrix.element_bytes == variant.element_bytes
        found = self.read(matrix, address, NAMES[variant.a_dtype])
        return (found.mT if turned else found).double()

    def target(self, mapped: int, plain: int, stride: int, number: int, m: int) -> Tensor:
        """Where a product's result goes: by the map, if there is one."""
        variant, matrix = self.kernel.variant, self.matrices[2]
        assert (matrix is not None) == variant.stores_by_tma(self.kernel.config)
        direct = at(plain, NAMES[variant.out_dtype], (m, variant.n), (stride, 1))
        if matrix is None:
            return direct
        assert matrix.box == (variant.slab(self.kernel.config), 64)
        found = self.read(matrix, mapped, NAMES[variant.out_dtype])[number]
        assert found.data_ptr() == direct.data_ptr()
        return found

    def read(self, matrix: Matrix, address: int, dtype: torch.dtype) -> Tensor:
        assert address % 16 == matrix.pitch_bytes % 16 == matrix.step_bytes % 16 == 0
        assert matrix.pitch_bytes > 0
        assert matrix.step_bytes > 0
        steps = matrix.step_bytes // dtype.itemsize, matrix.pitch_bytes // dtype.itemsize, 1
        return at(address, dtype, (matrix.count, matrix.rows, matrix.columns), steps)


class RowSums:
    """The small kernel that adds up the rows of B."""

    def __init__(self, kernel: object, *, values: str, **options: Any) -> None:
        self.format = struct.Struct(values)

    def __call__(self, stream: int, addresses: tuple[int, ...], *values: int) -> None:
        self.format.pack(*values)
        matrix, sums, pitch, rows, columns = values
        found = at(matrix, torch.int8, (rows, columns), (pitch, 1))
        at(sums, torch.int32, (rows,), (1,)).copy_(found.sum(1))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    Launcher.grids.clear()
    monkeypatch.setattr(batches, "Launcher", Launcher)
    monkeypatch.setattr(dense, "Launcher", RowSums)
    monkeypatch.setattr(dense, "load", lambda *_: SimpleNamespace(kernel=None, local_bytes=0))
    for module in (batches, dense):
        monkeypatch.setattr(module, "raw_stream", lambda index: 0)

    def loaded(problem: Problem, config: Config, variant: sm90.Variant, *_: Any) -> Any:
        return SimpleNamespace(kernel=Kernel(variant, config))

    monkeypatch.setattr(dense, "loaded", loaded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.autograd.profiler.record_function("here"))


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    room = torch.zeros(torch.Size(shape).numel() * dtype.itemsize + 16, dtype=torch.uint8)
    start = -room.data_ptr() % 16
    return room[start : start + room.numel() - 16].view(dtype).view(shape)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, of which all sums are exact."""
    found = aligned(*shape, dtype=dtype)
    return found.copy_(torch.randint(-3, 4, shape))


def lying(x: Tensor, way: str) -> Tensor:
    """The same values in another place."""
    batch, rows, columns = x.shape
    if way == "whole":
        return x
    if way == "rows between":  # other rows lie between two matrices, as in slices of weights
        room = some(batch, rows + 3, columns, dtype=x.dtype)
        found = room[:, :rows]
    elif way == "heads":  # [rows, batch, columns]: matrices lie closer together than rows
        found = some(rows, batch, columns, dtype=x.dtype).transpose(0, 1)
    elif way == "wide":  # rows that are part of longer ones
        found = some(batch, rows, columns + 16, dtype=x.dtype)[..., :columns]
    elif way == "odd step":  # a step that the copy engine cannot take
        room = some(batch, rows * columns + 1, dtype=x.dtype)
        found = room[:, : rows * columns].view(batch, rows, columns)
    elif way == "odd address":
        room = some(batch * rows * columns + 1, dtype=x.dtype)
        found = room[1:].view(batch, rows, columns)
    else:
        assert way == "turned"
        found = some(batch, columns, rows, dtype=x.dtype).mT
    return found.copy_(x)


WAYS = ("whole", "rows between", "heads", "wide", "odd step", "odd address", "turned")
B, M, N, K = 5, 6, 48, 32


def sixteen(config: Config, out: str = "bf16", **words: Any) -> batches.GemmBatch:
    problem = Problem("gemm", M, N, K, "bf16", "bf16", out, batch=B, **words)
    return batches.GemmBatch(problem, config, 0, 132)


def poisoned(dtype: torch.dtype, way: str = "whole", sizes: tuple[int, int, int] = (B, M, N)) -> tuple[Tensor, Tensor]:
    """A result that is nothing yet, and the memory around it, which must stay as it is."""
    room = aligned(sizes[0] * (sizes[1] + 2) * (sizes[2] + 8), dtype=dtype).fill_(float("nan"))
    b, m, n = sizes
    steps = {
        "whole": (m * n, n),
        "gaps": ((m + 2) * (n + 8), n + 8),
        "heads": (n + 8, b * (n + 8)),
        "odd": (m * n + 1, n),
    }
    return room, room.as_strided(sizes, (*steps[way], 1))


def untouched(room: Tensor, out: Tensor) -> bool:
    """Whether there is nothing but the result."""
    return int(room.isnan().logical_not().sum()) == out.numel()


# ------------------------------------------------------------------------------------------------ gemm


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layouts", [("row", "col"), ("row", "row"), ("col", "col"), ("col", "row")], ids="-".join)
@pytest.mark.parametrize("shared", ["", "a", "b", "a of one", "b of one", "a expanded", "b expanded"])
def test_operands_of_each_product_or_of_all(name: str, layouts: tuple[str, str], shared: str) -> None:
    config = CONFIGS[name]
    run = sixteen(config, a_layout=layouts[0], b_layout=layouts[1])
    assert run._variant.fault(config) is None
    sides = {"a": some(B, M, K, dtype=torch.bfloat16), "b": some(B, K, N, dtype=torch.bfloat16)}
    for i, side in enumerate("ab"):
        if layouts[i] == "col":
            sides[side] = lying(sides[side], "turned")
        if shared.startswith(side):
            first = sides[side][:1]
            sides[side] = first if "one" in shared else first.expand(B, -1, -1) if "expanded" in shared else first[0]
    room, out = poisoned(torch.bfloat16)
    run(out, sides["a"], sides["b"], None, 1.0, 0.0)
    assert torch.equal(out.double(), (sides["a"].double() @ sides["b"].double()).expand(B, M, N))
    assert untouched(room, out)
    assert Launcher.grids == [config.grid(M, N, 132, B)], "one launch"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", ["whole", "gaps", "heads", "odd"])
@pytest.mark.parametrize("out_type", ["bf16", "fp32"])
def test_however_batches_lie(name: str, way: str, to: str, out_type: str) -> None:
    run = sixteen(CONFIGS[name], out_type, b_layout="col")
    a, b = some(B, M, K, dtype=torch.bfloat16), some(B, N, K, dtype=torch.bfloat16)
    room, out = poisoned(NAMES[out_type], to)
    run(out, lying(a, way), lying(b, way).mT, None, 1.0, 0.0)
    assert torch.equal(out.double(), a.double() @ b.double().mT)
    assert untouched(room, out)
    assert len(Launcher.grids) == 1


@pytest.mark.parametrize("way", ["whole", "rows between", "heads", "wide"])
def test_what_the_copy_engine_can_address_is_not_copied(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def no_copy(x: Tensor) -> Tensor:
        raise AssertionError(f"{tuple(x.stride())} is copied")

    monkeypatch.setattr(dense, "aligned_copy", no_copy)
    monkeypatch.setattr(dense, "aligned", no_copy)
    a, b = some(B, M, K, dtype=torch.bfloat16), some(B, N, K, dtype=torch.bfloat16)
    _, out = poisoned(torch.bfloat16, "heads" if way == "heads" else "gaps")
    sixteen(PLAIN, b_layout="col")(out, lying(a, way), lying(b, way).mT, None, 1.0, 0.0)
    assert torch.equal(out.double(), a.double() @ b.double().mT)


@pytest.mark.parametrize("way", ["whole", "turned"])
def test_a_copy_of_b_is_not_loaded_early(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    seen = []
    real = dense.for_what_is_read
    monkeypatch.setattr(dense, "for_what_is_read", lambda *given: seen.append(made := real(*given)) or made)
    run = sixteen(PLAIN, b_layout="col")
    run.early = 2
    a, b = some(B, M, K, dtype=torch.bfloat16), some(B, N, K, dtype=torch.bfloat16)
    _, out = poisoned(torch.bfloat16, "odd")
    run(out, a, lying(b, way).mT, None, 1.0, 0.0)
    assert torch.equal(out.double(), a.double() @ b.double().mT)
    (one,) = seen
    assert (one.early, run.early) == (2 if way == "whole" else 0, 2)


@pytest.mark.parametrize("shape", [(B, M, N), (1, M, N), (M, N), (B, 1, N), (1, 1, N), (N,), (B, M, 1), (B, 1, 1)])
@pytest.mark.parametrize("c_type", [torch.bfloat16, torch.float32])
def test_alpha_beta_and_c(shape: tuple[int, ...], c_type: torch.dtype) -> None:
    run = sixteen(PLAIN, "fp32", b_layout="col", c=True, scaled=True)
    a, b, c = some(B, M, K, dtype=torch.bfloat16), some(B, N, K, dtype=torch.bfloat16), some(*shape, dtype=c_type)
    _, out = poisoned(torch.float32)
    run(out, a, b.mT, c, 0.5, -2.0)
    assert torch.equal(out.double(), 0.5 * (a.double() @ b.double().mT) - 2.0 * c.double())
    other = out.clone()  # C may be the result itself
    run(out, a, b.mT, out, 1.0, 1.0)
    assert torch.equal(out.double(), a.double() @ b.double().mT + other.double())


def test_one_binding_serves_tensors_that_lie_alike() -> None:
    run = sixteen(PLAIN, b_layout="col")
    a, b = some(B, M, K, dtype=torch.bfloat16), some(B, N, K, dtype=torch.bfloat16)
    _, out = poisoned(torch.bfloat16)
    bound = run.bind(out, a, b.mT, None, 1.0, 0.0)
    for _ in range(3):
        other = some(B, M, K, dtype=torch.bfloat16)
        bound(out, other, b.mT, None, 2.0, 0.0)
        assert torch.equal(out.double(), 2.0 * (other.double() @ b.double().mT))
    # The first matrix alone has the strides of all.
    run(out, a[:1], b.mT, None, 1.0, 0.0)
    assert torch.equal(out.double(), a[:1].double() @ b.double().mT)
    odd = lying(a, "odd address")
    bound(out, odd, b.mT, None, 1.0, 0.0)
    assert torch.equal(out.double(), a.double() @ b.double().mT)


# ------------------------------------------------------------------------------------------------ int8


def wanted(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    def by_row(x: Tensor) -> Tensor:
        return x.double() if x.numel() == 1 else x.double().reshape(-1, x.size(1) if x.dim() > 1 else x.size(0), 1)

    sums = a.double() @ b.double().mT
    if zero is not None:
        sums = sums - by_row(zero) * b.double().sum(-1, keepdim=True).mT
    columns = b_scale.double() if b_scale.numel() == 1 else b_scale.double().reshape(-1, 1, N)
    value = sums * by_row(a_scale) * columns
    return value if bias is None else value + bias.double()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("a_shape", [(), (M,), (B, M), (B, M, 1)], ids=str)
@pytest.mark.parametrize("b_shape", [(1,), (N,), (B, N), (B, N, 1)], ids=str)
@pytest.mark.parametrize("zero_shape", [None, (), (M,), (B, M)], ids=str)
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_scales_and_zero_points_of_each_product_or_of_all(
    name: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...], zero_shape: tuple[int, ...] | None, shared: str
) -> None:
    kinds = {"a_scale": "token" if M in a_shape else "tensor", "b_scale": "channel" if N in b_shape else "tensor"}
    flags: dict[str, Any] = {"zero_points": zero_shape is not None, "bias": zero_shape != (M,)}
    problem = Problem("int8_gemm", M, N, K, "int8", "int8", "fp32", batch=B, **kinds, **flags)
    run = batches.Int8Batch(problem, CONFIGS[name], 0, 132)
    a, b = some(B, M, K, dtype=torch.int8), some(B, N, K, dtype=torch.int8)
    a, b = a[0] if shared == "a" else a, b[:1] if shared == "b" else b
    zero = None if zero_shape is None else some(*zero_shape, dtype=torch.int32)
    operands = a, b, some(*a_shape), some(*b_shape), zero, some(N) if problem.bias else None
    for sums in (None, b.sum(-1, dtype=torch.int32)) if zero is not None else (None,):
        Launcher.grids.clear()
        room, out = poisoned(torch.float32)
        run(out, *operands, sums)
        assert torch.equal(out.double(), wanted(*operands).expand(B, M, N))
        assert untouched(room, out)
        assert len(Launcher.grids) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("zeros", [False, True])
def test_however_int8_batches_lie(way: str, zeros: bool) -> None:
    flags: dict[str, Any] = {"a_scale": "token", "b_scale": "channel", "zero_points": zeros}
    problem = Problem("int8_gemm", M, N, K, "int8", "int8", "bf16", batch=B, **flags)
    a, b = some(B, M, K, dtype=torch.int8), some(B, N, K, dtype=torch.int8)
    zero = some(B, M, dtype=torch.int32) if zeros else None
    scales = torch.ones(M), torch.ones(2 * N)[::2]
    room, out = poisoned(torch.bfloat16, "gaps")
    batches.Int8Batch(problem, PLAIN, 0, 132)(out, lying(a, way), lying(b, way), *scales, zero, None, None)
    assert torch.equal(out.double(), wanted(a, b, *scales, zero, None).to(torch.bfloat16).double())
    assert untouched(room, out)


def test_batches_of_one_row() -> None:
    """Whose pitch says nothing, and whose scales look like one for each product."""
    flags: dict[str, Any] = {"a_scale": "token", "b_scale": "tensor"}
    problem = Problem("int8_gemm", 1, N, K, "int8", "int8", "fp32", batch=B, **flags)
    a, b = some(B, 1, K, dtype=torch.int8), some(B, N, K, dtype=torch.int8)
    scales, one = torch.arange(1.0, B + 1)[:, None], torch.ones(())
    room, out = poisoned(torch.float32, "gaps", (B, 1, N))
    batches.Int8Batch(problem, SWAPPED, 0, 132)(out, a, b, scales, one, None, None, None)
    assert torch.equal(out.double(), (a.double() @ b.double().mT) * scales[:, :, None].double())
    assert untouched(room, out)


# ------------------------------------------------------------------------------------------------ around it


@pytest.mark.parametrize("c", [False, True])
def test_a_batch_of_one_is_a_single_product(monkeypatch: pytest.MonkeyPatch, c: bool) -> None:
    seen: list[tuple[Tensor, ...]] = []
    problem = Problem("gemm", M, N, K, "bf16", "bf16", "bf16", b_layout="col", c=c)
    assert not dense.variant_of(problem).batched
    run = gemm.Gemm(problem, PLAIN, 0, 132)
    monkeypatch.setattr(run, "bind_addresses", lambda *operands: seen.append(operands[:4]) or (lambda *_: True))
    out, a, b = aligned(1, M, N), aligned(M, K), aligned(1, N, K).mT
    bound = run.bind(out, a, b, aligned(1, 1, N), 1.0, 1.0)
    bound(out, a, b, aligned(1, 1, N), 1.0, 1.0)
    shapes = [None if one is None else tuple(one.shape) for one in seen[0]]
    assert shapes == [(M, N), (M, K), (K, N), (M, N) if c else None]


def test_maps_with_a_third_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Driver:
        cuuint64_t = cuuint32_t = int

        def __getattr__(self, name: str) -> _Names:
            return _Names()

        def cuTensorMapEncodeTiled(self, *given: Any) -> tuple[int, str]:
            asked.append(given)
            return 0, "a map"

    monkeypatch.setattr(launch, "bindings", Driver)
    flat = Matrix(64, 100, 2, 256, (64, 32))
    assert flat.encode(4096) == (0, "a map")
    assert dataclasses.replace(flat, count=7, step_bytes=48).encode(4096) == (0, "a map")
    assert [one[1:7] for one in asked] == [
        (2, 4096, [64, 100], [256], [64, 32], [1, 1]),
        (3, 4096, [64, 100, 7], [256, 48], [64, 32, 1], [1, 1, 1]),
    ]


class _Names:
    """An enumeration, whose values are nobody's business here."""

    def __getattr__(self, name: str) -> str:
        return name
