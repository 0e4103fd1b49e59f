"""`grouped_gemm` whose M, N and K come in a tensor: only what they say is read, multiplied and written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
import reference
from omnigemm.backends.blas import takes
from omnigemm.backends.blas.vendors import VENDORS
from omnigemm.backends.cuda import CudaBackend
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.core.problem import describe
from op_support import FLOATS, LAYOUTS, NAN, SENTINEL, assert_accumulated, floats, indices, laid_out, scales

Sizes = list[tuple[int, int, int]]
ROOM: Sizes = [(5, 7, 9), (1, 1, 1), (0, 4, 3), (17, 2, 33), (3, 0, 2), (2, 5, 0), (33, 16, 64), (8, 129, 8), (9, 9, 9)]
USED: Sizes = [(5, 7, 9), (1, 1, 0), (0, 2, 1), (16, 1, 31), (2, 0, 1), (1, 5, 0), (0, 16, 64), (7, 128, 5), (3, 0, 4)]


def within_room(values: Tensor, rows: int, cols: int, layout: str) -> Tensor:
    """A matrix of NaN but for its first rows and columns."""
    whole = torch.full_like(values, NAN)
    whole[:rows, :cols] = values[:rows, :cols]
    return laid_out(whole, layout)


class Case:
    """Lists of which only the sizes in use have numbers; results have sentinels outside of them, and NaN inside."""

    def __init__(self, used: Sizes, dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        self.used, kind = used, out_dtype or dtype
        self.a, self.b, self.c, self.out = [], [], [], []
        for i, ((m, n, k), (rows, cols, inner)) in enumerate(zip(ROOM, used, strict=True)):
            ways = [LAYOUTS[(i + step) % len(LAYOUTS)] for step in (0, 2, 3, 1)]
            self.a.append(within_room(floats(m, k, dtype=dtype), rows, inner, ways[0]))
            self.b.append(within_room(floats(k, n, dtype=dtype), inner, cols, ways[1]))
            self.c.append(within_room(floats(m, n, dtype=kind), rows, cols, ways[2]))
            self.out.append(laid_out(torch.full((m, n), SENTINEL, dtype=kind), ways[3]))
            self.out[i][:rows, :cols] = NAN
        self.sizes = torch.tensor(used, dtype=torch.int32)

    def check(
        self, results: list[Tensor], c: list[Tensor] | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        for i, (m, n, k) in enumerate(self.used):
            x, y = self.a[i][:m, :k], self.b[i][:k, :n]
            z = None if c is None else c[i].expand(ROOM[i][:2])[:m, :n]
            magnitude = reference.gemm(x.abs(), y.abs(), None if z is None else z.abs(), abs(alpha), abs(beta))
            assert_accumulated(results[i][:m, :n], reference.gemm(x, y, z, alpha, beta), magnitude, k)

    def check_guards(self) -> None:
        for i, (m, n, _) in enumerate(self.used):
            outside = torch.ones(ROOM[i][:2], dtype=torch.bool)
            outside[:m, :n] = False
            assert bool((self.out[i][outside] == SENTINEL).all()), f"outside of what group {i} uses"


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_against_float64(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    made = Case(USED, dtype, out_dtype)
    assert omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, out=made.out) == made.out
    made.check(made.out)
    made.check_guards()
    omnigemm.grouped_gemm(made.a, made.b, made.c, alpha=-2.0, beta=0.5, sizes=made.sizes, out=made.out)
    made.check(made.out, made.c, -2.0, 0.5)
    made.check_guards()
    fresh = omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, out_dtype=out_dtype)
    assert [tuple(one.shape) for one in fresh] == [room[:2] for room in ROOM]
    made.check(fresh)


def test_no_k_is_beta_c_or_zero() -> None:
    used = [(m, n, 0) for m, n, _ in ROOM]
    made = Case(used, torch.float32)
    omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, out=made.out)
    assert all(bool((one == 0).all()) for one in made.out)
    omnigemm.grouped_gemm(made.a, made.b, made.c, beta=2.0, sizes=made.sizes, out=made.out)
    assert all(torch.equal(one, 2 * c) for one, c in zip(made.out, made.c, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_k_does_not_round_beta(dtype: torch.dtype) -> None:
    """Neither of matrices without K, nor where sizes say that none of it is in use."""
    c = [(0.01 * scales(4, 6)).to(dtype), (0.01 * scales(6)).to(dtype), floats(4, 6, dtype=dtype)]
    beta = [1e5, 0.1, 1.0]
    for room in (0, 5):
        a = [floats(4, room, dtype=dtype), floats(4, room, dtype=dtype), floats(4, 7, dtype=dtype)]
        b = [floats(room, 6, dtype=dtype), floats(room, 6, dtype=dtype), floats(7, 6, dtype=dtype)]
        sizes = torch.tensor([(4, 6, 0), (4, 6, 0), (4, 6, 7)], dtype=torch.int32)
        for given in (sizes, None) if room == 0 else (sizes,):
            results = omnigemm.grouped_gemm(a, b, c, beta=beta, sizes=given)
            for i, (m, n, k) in enumerate(sizes.tolist()):
                x, y = a[i][:m, :k], b[i][:k, :n]
                magnitude = reference.gemm(x.abs(), y.abs(), c[i].abs(), 1.0, beta[i])
                assert_accumulated(results[i], reference.gemm(x, y, c[i], 1.0, beta[i]), magnitude, k)


def test_sizes_are_read_by_every_call() -> None:
    """A call is recognised by what its tensors are like; what stands in them may differ."""
    made = Case(ROOM, torch.float32)
    for used in (ROOM, USED, [(0, 0, 0)] * len(ROOM), ROOM):
        made.sizes.copy_(torch.tensor(used, dtype=torch.int32))
        made.used = used
        for i, (m, n, _) in enumerate(used):
            made.out[i].fill_(SENTINEL)
            made.out[i][:m, :n] = NAN
        omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, out=made.out)
        made.check(made.out)
        made.check_guards()
    omnigemm.grouped_gemm(made.a, made.b, out=made.out)  # and without them
    made.check(made.out)


def test_in_place_spread_and_strided() -> None:
    made = Case(USED, torch.float32)
    before = [one.clone() for one in made.c]
    for one, c in zip(made.out, made.c, strict=True):
        one.copy_(torch.where(c.isnan(), SENTINEL, c))
    strided = torch.full((len(ROOM), 2, 3), -1, dtype=torch.int32).transpose(1, 2)[..., 1]
    strided.copy_(made.sizes)
    assert not strided.is_contiguous()
    omnigemm.grouped_gemm(made.a, made.b, made.out, alpha=0.5, beta=-1.0, sizes=strided, out=made.out)
    made.check(made.out, before, 0.5, -1.0)
    made.check_guards()
    spread = [floats(n) if i % 2 else floats(m, 1) for i, (m, n, _) in enumerate(ROOM)]
    omnigemm.grouped_gemm(made.a, made.b, spread, beta=1.0, sizes=made.sizes, out=made.out)
    made.check(made.out, spread, 1.0, 1.0)
    made.check_guards()


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("value", [-1, 1])
def test_sizes_outside_are_refused_before_anything_is_written(column: int, value: int) -> None:
    made = Case(ROOM, torch.float32)
    last, room = len(ROOM) - 1, ROOM[-1][column]
    given = value if value < 0 else room + value
    made.sizes[last, column] = given
    for one in made.out:
        one.fill_(SENTINEL)
    where = rf"sizes\[{last}, {column}\]"
    words = rf"{where} is {given}, expected 0 <= {where} <= {'MNK'[column]} = {room}"
    for _ in range(2):  # cold and warm
        with pytest.raises(omnigemm.ShapeError, match=words):
            omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, out=made.out)
        assert all(bool((one == SENTINEL).all()) for one in made.out)
    made.sizes[last, column] = room
    omnigemm.grouped_gemm(made.a, made.b, sizes=made.sizes, out=made.out)
    made.check(made.out)


def test_sizes_may_not_be_a_result() -> None:
    room = torch.zeros(64, dtype=torch.int32)
    out = [room[:16].view(torch.float32).view(4, 4)]
    sizes = room[2:5].view(1, 3)
    with pytest.raises(omnigemm.LayoutError, match=r"out\[0\] shares memory with sizes"):
        omnigemm.grouped_gemm([floats(4, 4)], [floats(4, 4)], sizes=sizes, out=out)


def test_plans() -> None:
    a, b, sizes = [floats(4, 6)] * 2, [floats(6, 5)] * 2, indices([3, 5, 6, 4, 2, 1]).view(2, 3)
    words: dict[str, Any] = {"m": 4, "n": 5, "k": 6, "groups": 2, "dtype": "fp32"}
    plan = omnigemm.plan("grouped_gemm", device_sizes=True, **words)
    out = [torch.full((4, 5), SENTINEL) for _ in range(2)]
    for _ in range(2):
        plan.run(a, b, sizes=sizes, out=out)
        for i, (m, n, k) in enumerate(sizes.tolist()):
            torch.testing.assert_close(out[i][:m, :n], a[i][:m, :k] @ b[i][:k, :n])
            assert bool((out[i][m:] == SENTINEL).all())
    with pytest.raises(omnigemm.ShapeError, match=r"device_sizes is False \(planned True\)"):
        plan.run(a, b)
    with pytest.raises(omnigemm.ShapeError, match=r"device_sizes is True \(planned False\)"):
        omnigemm.plan("grouped_gemm", **words).run(a, b, sizes=sizes)


def test_who_takes_them() -> None:
    for dtype in ("fp16", "bf16", "fp32"):
        with_sizes = describe("grouped_gemm", m=4, n=5, k=6, groups=2, dtype=dtype, device_sizes=True)
        assert str(with_sizes).endswith("device sizes")
        assert takes(VENDORS["nvidia"], with_sizes)
        assert bool(CudaBackend().supports_on(with_sizes, KNOWN["h200"])) == (dtype != "fp32")
        assert omnigemm.explain("grouped_gemm", m=4, n=5, k=6, dtype=dtype, device_sizes=True).chosen is not None
    with pytest.raises(omnigemm.ShapeError, match="device_sizes is True, expected False: only grouped_gemm has it"):
        describe("gemm", m=4, n=4, k=4, device_sizes=True)
