"""Batches of `gemm` and `int8_gemm` in one launch, against float64: every kind of config, operands, scales and C of
each product or of all, batches that lie any way, and nothing read or written of the product next door."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda import batches, dense
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.core.problem import Problem

from . import test_gemm16, test_int8

B = 3
OUTS = test_int8.OUTS
SHAPES = [(1, 328, 520), (7, 392, 640), (33, 136, 3584), (130, 577, 136), (257, 264, 200)]
LAYOUTS = test_gemm16.LAYOUTS
NAN = float("nan")


def sixteen(m: int, n: int, k: int, layouts: tuple[str, str], dtype: str, out: str, c: bool) -> Problem:
    a, b = layouts
    return Problem("gemm", m, n, k, dtype, dtype, out, batch=B, a_layout=a, b_layout=b, c=c, scaled=c)


def integers(m: int, n: int, k: int, out: str, bias: bool, zeros: bool) -> Problem:
    kinds: dict[str, Any] = {"a_scale": "token", "b_scale": "channel", "bias": bias, "zero_points": zeros}
    return Problem("int8_gemm", m, n, k, "int8", "int8", out, batch=B, **kinds)


CASES_16 = {
    f"{name}-{m}x{n}x{k}-{a}-{b}-{dtype}-{out}{'-c' * c}": (config, made)
    for name, config in test_gemm16.CONFIGS.items()
    for m, n, k in SHAPES
    for (a, b), dtype, out, c in (
        (LAYOUTS[1], "bf16", "bf16", False),
        (LAYOUTS[1], "fp16", "fp32", True),
        (LAYOUTS[0], "fp16", "fp16", True),
        (LAYOUTS[3], "bf16", "fp32", False),
    )
    if (m <= config.tile_m or not config.swap)
    and dense.variant_of(made := sixteen(m, n, k, (a, b), dtype, out, c)).fault(config) is None
}
CASES_INT8 = {
    f"{name}-{m}x{n}x{k}-{out}{'-bias' * bias}{'-zeros' * zeros}": (config, integers(m, n, k, out, bias, zeros))
    for name, config in test_int8.CONFIGS.items()
    for m, n, k in test_int8.SHAPES
    for out, bias, zeros in (("bf16", False, False), ("fp16", True, False), ("fp32", False, True))
    if m <= config.tile_m * config.left_share or not config.swap
}


def specs(_: Gpu) -> set[KernelSpec]:
    return {dense.spec(config, dense.variant_of(made)) for config, made in (CASES_16 | CASES_INT8).values()}


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def poisoned(m: int, n: int, dtype: torch.dtype, batch: int = B) -> tuple[Tensor, Tensor]:
    """A result with rows and columns around each product's, all of which is nothing yet."""
    room = torch.full((batch, m + 2, -(-n // 8) * 8 + 8), NAN, device="cuda", dtype=dtype)
    return room, room[:, 1:-1, :n]


def untouched(room: Tensor, out: Tensor) -> None:
    assert bool(out.isfinite().all())
    assert int(room.isnan().logical_not().sum()) == out.numel()


def matrices(batch: int, rows: int, columns: int, dtype: torch.dtype, layout: str = "row") -> Tensor:
    """One behind the other, with rows that the copy engine can address, and nothing between them but poison."""
    if layout == "col":
        return matrices(batch, columns, rows, dtype).mT
    room = torch.full((batch, rows + 1, -(-columns // 8) * 8), NAN, device="cuda").to(dtype)
    room[:, :rows, :columns] = torch.randn(batch, rows, columns, device="cuda").to(dtype)
    return room[:, :rows, :columns]


# ------------------------------------------------------------------------------------------------ every config


@pytest.mark.parametrize("title", CASES_16)
def test_sixteen_bits_against_float64(title: str) -> None:
    torch.manual_seed(len(title))
    config, made = CASES_16[title]
    launch = batches.GemmBatch(made, config, 0, multiprocessors())
    assert launch._loaded.local_bytes == 0, "registers are spilled"
    dtype = test_gemm16.DTYPES[made.a_dtype]
    a, b = matrices(B, made.m, made.k, dtype, made.a_layout), matrices(B, made.k, made.n, dtype, made.b_layout)
    c = torch.randn(B, made.m, made.n, device="cuda").to(dtype) if made.c else None
    alpha, beta = (0.75, -1.5) if made.c else (1.0, 0.0)
    room, out = poisoned(made.m, made.n, OUTS[made.out_dtype])
    launch(out, a, b, c, alpha, beta)
    want = alpha * (a.double() @ b.double())
    test_gemm16.close(out, want if c is None else want + beta * c.double(), made.k)
    untouched(room, out)


@pytest.mark.parametrize("title", CASES_INT8)
def test_int8_is_exact(title: str) -> None:
    torch.manual_seed(len(title))
    config, made = CASES_INT8[title]
    launch = batches.Int8Batch(made, config, 0, multiprocessors())
    assert launch._loaded.local_bytes == 0, "registers are spilled"
    m, n, k = made.m, made.n, made.k
    a, b = test_int8.random(B, m, k), test_int8.random(B, n, k)
    a_scale, b_scale = test_int8.scales(B * m).view(B, m), test_int8.scales(B * n).view(B, n)
    zero = torch.randint(-128, 128, (B, m), dtype=torch.int32, device="cuda") if made.zero_points else None
    bias = torch.randn(n, device="cuda") if made.bias else None
    room, out = poisoned(m, n, OUTS[made.out_dtype])
    launch(out, a, b, a_scale, b_scale, zero, bias, None)
    for i in range(B):
        of_zero = None if zero is None else zero[i]
        test_int8.close(out[i], test_int8.exact(a[i], b[i], a_scale[i], b_scale[i], bias, of_zero))
    assert int(room.isnan().logical_not().sum()) == out.numel()


# ------------------------------------------------------------------------------------------------ by the operation


def gemm(*operands: Any, **words: Any) -> Tensor:
    return omnigemm.gemm(*operands, backend="cuda", **words)


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_every_number_of_rows(layouts: tuple[str, str]) -> None:
    b = matrices(4, 144, 328, torch.bfloat16, layouts[1])
    for m in (*range(1, 20), 31, 33, 63, 64, 65, 127, 128, 129, 255, 257):
        a = matrices(4, m, 144, torch.bfloat16, layouts[0])
        room, out = poisoned(m, 328, torch.bfloat16, 4)
        gemm(a, b, out=out)
        test_gemm16.close(out, a.double() @ b.double(), 144)
        untouched(room, out)


@pytest.mark.parametrize("m", [1, 40, 200])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("k", [40, 64, 136])
def test_no_product_sees_the_next_one(m: int, k: int, layouts: tuple[str, str]) -> None:
    """Tiles reach over the ends of M, N and K, and what lies there belongs to another product."""
    a, b = matrices(5, m, k, torch.bfloat16, layouts[0]), matrices(5, k, 72, torch.bfloat16, layouts[1])
    for poison in (a, b):
        before = poison[2].clone()
        poison[2] = NAN
        result = gemm(a, b)
        assert bool(result[2].isnan().all())
        others = [0, 1, 3, 4]
        test_gemm16.close(result[others], (a.double() @ b.double())[others], k)
        poison[2] = before


@pytest.mark.parametrize("m", [3, 140])
def test_operands_of_all_products(m: int) -> None:
    a, b = torch.randn(4, m, 200, device="cuda").half(), torch.randn(4, 200, 88, device="cuda").half()
    for left, right in (
        (a, b[0]),
        (a[0], b),
        (a[:1], b),
        (a, b[:1]),
        (a[:1].expand(4, -1, -1), b),
        (a, b[:1].expand_as(b)),
    ):
        for shape in ((4, m, 88), (1, m, 88), (m, 88), (4, 1, 88), (88,), (4, m, 1)):
            c = torch.randn(shape, device="cuda").half()
            want = 2.0 * (left.double() @ right.double()) + 0.5 * c.double()
            test_gemm16.close(gemm(left, right, c, alpha=2.0, beta=0.5), want, 200)
    both = torch.randn(4, m, 88, device="cuda").half()
    want = a.double() @ b.double() + 2.0 * both.double()
    assert gemm(a, b, both, beta=2.0, out=both) is both
    test_gemm16.close(both, want, 200)


@pytest.mark.parametrize("m", [1, 16, 100, 300])
def test_heads_between_rows(m: int) -> None:
    """[rows, heads, columns] as a batch of heads: matrices lie closer together than their rows, on both sides."""
    heads, k, n = 12, 128, 512
    a = torch.randn(m, heads, k, device="cuda").bfloat16().transpose(0, 1)
    for b in (
        torch.randn(heads, k, n, device="cuda").bfloat16(),
        torch.randn(heads, n, k, device="cuda").bfloat16().mT,
    ):
        room = torch.full((m, heads, n + 8), NAN, device="cuda", dtype=torch.bfloat16)
        out = room[..., :n].transpose(0, 1)
        gemm(a, b, out=out)
        test_gemm16.close(out, a.double() @ b.double(), k)
        untouched(room, out)


def test_strides_that_the_copy_engine_cannot_address() -> None:
    room = torch.randn(4, 90, 301, device="cuda").bfloat16()
    for a in (room[:, 3:40, 1:202], room[:, :37, :201], room[:, ::2, ::3][:, :37, :99], room.mT[:, :201, :37].mT):
        k = a.size(-1)
        for b in (torch.randn(4, k, 77, device="cuda").bfloat16(), torch.randn(4, 77, k, device="cuda").bfloat16().mT):
            want = a.double() @ b.double()
            test_gemm16.close(gemm(a, b), want, k)
            gaps = torch.full((4, 37, 2, 77), NAN, device="cuda", dtype=torch.bfloat16)
            gemm(a, b, out=gaps[:, :, 0])
            test_gemm16.close(gaps[:, :, 0], want, k)
            assert bool(gaps[:, :, 1].isnan().all())
            columns = torch.full((4, 77, 37), NAN, device="cuda", dtype=torch.bfloat16).mT
            test_gemm16.close(gemm(a, b, out=columns), want, k)


@pytest.mark.parametrize("shape", [(1, 64, 64), (20, 136, 72), (64, 64, 16), (130, 264, 64)])
@pytest.mark.parametrize("batch", [2, 133, 1000])
def test_many_products(batch: int, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = (torch.randn(batch, rows, k, device="cuda").bfloat16() for rows in (m, n))
    room, out = poisoned(m, n, torch.bfloat16, batch)
    gemm(a, b.mT, out=out)
    test_gemm16.close(out, a.double() @ b.double().mT, k)
    untouched(room, out)


@pytest.mark.parametrize("m", [1, 30, 140])
@pytest.mark.parametrize("zeros", [None, "one", "rows", "each"])
def test_int8_scales_of_each_product_or_of_all(m: int, zeros: str | None) -> None:
    n, k = 88, 208
    a, b = test_int8.random(4, m, k), test_int8.random(4, n, k)
    zero = {
        None: None,
        "one": torch.tensor(-7, dtype=torch.int32, device="cuda"),
        "rows": torch.randint(-128, 128, (m,), dtype=torch.int32, device="cuda"),
        "each": torch.randint(-128, 128, (4, m), dtype=torch.int32, device="cuda"),
    }[zeros]
    bias = torch.randn(n, device="cuda")
    for left, right in ((a, b), (a, b[0]), (a[0], b), (a[:1], b)):
        for a_scale in (test_int8.scales(1), test_int8.scales(m), test_int8.scales(4 * m).view(4, m)):
            for b_scale in (test_int8.scales(1), test_int8.scales(n), test_int8.scales(4 * n).view(4, n)):
                result = omnigemm.int8_gemm(left, right, a_scale, b_scale, a_zero=zero, bias=bias, backend="cuda")
                for i in range(4):
                    one, other = (x[min(i, len(x) - 1)] if x.dim() == 3 else x for x in (left, right))
                    rows, columns = (x[i] if x.dim() == 2 else x for x in (a_scale, b_scale))
                    of_zero = zero if zero is None or zero.dim() < 2 else zero[i]
                    test_int8.close(result[i], test_int8.exact(one, other, rows, columns, bias, of_zero))
                words = {"a_zero": zero, "bias": bias, "b_sums": right.sum(-1, dtype=torch.int32), "backend": "cuda"}
                assert torch.equal(omnigemm.int8_gemm(left, right, a_scale, b_scale, **words), result)


@pytest.mark.parametrize("m", [12, 300])
def test_graph_and_repeats(m: int) -> None:
    a, b = (torch.randn(6, rows, 256, device="cuda").bfloat16() for rows in (m, 576))
    whole = test_int8.random(6, m, 256), test_int8.random(6, 576, 256), test_int8.scales(m), test_int8.scales(576)
    out, exact = gemm(a, b.mT), omnigemm.int8_gemm(*whole, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            gemm(a, b.mT, out=out)
            omnigemm.int8_gemm(*whole, out=exact, backend="cuda")
    a.copy_(torch.randn(6, m, 256, device="cuda"))
    whole[0].copy_(test_int8.random(6, m, 256))
    out.fill_(NAN)
    exact.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    test_gemm16.close(out, a.double() @ b.double().mT, 256)
    for i in range(6):
        test_int8.close(exact[i], test_int8.exact(whole[0][i], whole[1][i], *whole[2:]))
    assert all(torch.equal(gemm(a, b.mT), out) for _ in range(20))
    assert all(torch.equal(omnigemm.int8_gemm(*whole, backend="cuda"), exact) for _ in range(20))


@pytest.mark.parametrize("m", [1, 20])
def test_constant_weights(m: int) -> None:
    """Weights that are read before the kernel before is done, here one that makes the activations."""
    b = torch.randn(8, 512, 256, device="cuda").bfloat16()
    with omnigemm.settings(constant_weights=True):
        torch.cuda.synchronize()
        for _ in range(20):
            a = torch.randn(8, m, 256, device="cuda").bfloat16()
            test_gemm16.close(gemm(a, b.mT), a.double() @ b.double().mT, 256)


def test_batches_of_one_and_of_none() -> None:
    a, b = torch.randn(1, 5, 64, device="cuda").half(), torch.randn(1, 64, 24, device="cuda").half()
    test_gemm16.close(gemm(a, b), a.double() @ b.double(), 64)
    test_gemm16.close(gemm(a[0], b, a[:, :, :24], beta=1.0), a.double() @ b.double() + a[:, :, :24].double(), 64)
    whole = test_int8.random(1, 5, 64), test_int8.random(1, 24, 64)
    scales = test_int8.scales(5).view(1, 5), test_int8.scales(24)
    result = omnigemm.int8_gemm(*whole, *scales, backend="cuda")
    test_int8.close(result[0], test_int8.exact(whole[0][0], whole[1][0], *scales))
    assert gemm(a[:0], b).shape == (0, 5, 24)
