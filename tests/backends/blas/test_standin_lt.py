"""The stand-in for cuBLASLt refuses what it must: else the tests of the backend would prove nothing."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import pytest
import torch

INVALID_VALUE, NOT_SUPPORTED = 7, 15


class Call:
    """A product of two 4 by 4 matrices of ones, ready to be chosen and run."""

    def __init__(self, pair: Any) -> None:
        self.lib = pair.lt.lib
        self.room = torch.ones(4, 64)  # a matrix in each row
        self.handle, self.operation, self.preference = c_void_p(), c_void_p(), c_void_p()
        self.lib.cublasLtCreate(byref(self.handle))
        self.lib.cublasLtMatmulDescCreate(byref(self.operation), 68, 0)
        self.lib.cublasLtMatmulPreferenceCreate(byref(self.preference))
        self.layouts = [self.layout() for _ in range(4)]
        for attribute in (5, 6, 7, 8):
            assert self.prefer(attribute, c_uint32(4)) == 0
        self.result = (ctypes.c_uint64 * 12)()

    def layout(self, kind: int = 0, rows: int = 4, leading: int = 4) -> c_void_p:
        made = c_void_p()
        self.lib.cublasLtMatrixLayoutCreate(byref(made), kind, c_uint64(rows), c_uint64(4), c_int64(leading))
        return made

    def prefer(self, attribute: int, value: Any) -> int:
        size = c_size_t(ctypes.sizeof(value))
        return int(self.lib.cublasLtMatmulPreferenceSetAttribute(self.preference, attribute, byref(value), size))

    def choose(self) -> int:
        count = c_int()
        arguments = self.handle, self.operation, *self.layouts, self.preference, 1, byref(self.result), byref(count)
        return int(self.lib.cublasLtMatmulAlgoGetHeuristic(*arguments))

    def run(self, shift: int = 0, algorithm: Any = None) -> int:
        a, b, c, d = (c_void_p(row.data_ptr()) for row in self.room)
        layouts = self.layouts
        return int(
            self.lib.cublasLtMatmul(
                self.handle, self.operation, byref(c_float(1)), c_void_p((a.value or 0) + shift), layouts[0],
                b, layouts[1], byref(c_float(0)), c, layouts[2], d, layouts[3],
                byref(self.result) if algorithm is None else algorithm, None, c_size_t(0), None,
            )
        )  # fmt: skip


@pytest.fixture
def call(pair: Any) -> Call:
    return Call(pair)


def test_a_product(call: Call) -> None:
    assert (call.choose(), call.run()) == (0, 0)
    assert call.room[3, :16].tolist() == [4.0] * 16
    assert call.room[3, 16:].tolist() == [1.0] * 48


def test_attributes_have_sizes(call: Call) -> None:
    assert call.prefer(1, c_uint32(1)) == INVALID_VALUE
    assert call.prefer(3, c_uint64(1)) == INVALID_VALUE
    assert call.prefer(2, c_uint32(1)) == INVALID_VALUE
    for name, opaque, attribute, right, wrong in (
        ("cublasLtMatmulDescSetAttribute", call.operation, 3, c_int32(1), c_int64(1)),
        ("cublasLtMatrixLayoutSetAttribute", call.layouts[0], 5, c_int32(1), c_int64(1)),
        ("cublasLtMatrixLayoutSetAttribute", call.layouts[0], 6, c_int64(1), c_int32(1)),
    ):
        for value, status in ((right, 0), (wrong, INVALID_VALUE)):
            assert call.lib[name](opaque, attribute, byref(value), c_size_t(ctypes.sizeof(value))) == status
        assert call.lib[name](opaque, 99, byref(right), c_size_t(ctypes.sizeof(right))) == INVALID_VALUE


def test_an_algorithm_is_for_what_it_was_chosen_for(call: Call) -> None:
    assert call.choose() == 0
    assert call.run(shift=2) == INVALID_VALUE  # less aligned
    assert call.run(algorithm=byref((ctypes.c_uint64 * 8)())) == INVALID_VALUE
    call.layouts[0] = call.layout(leading=5)
    assert call.run() == INVALID_VALUE
    assert (call.choose(), call.run()) == (0, 0)


def test_without_an_algorithm(call: Call, build_pair: Any) -> None:
    """Only where that is how it is built, and then with none."""
    assert call.run(algorithm=c_void_p()) == INVALID_VALUE
    free = Call(build_pair("WITHOUT_ALGORITHM"))
    assert free.choose() == 0
    assert free.run() == INVALID_VALUE
    assert free.run(shift=4, algorithm=c_void_p()) == 0
    free.layouts[0] = free.layout(rows=3)
    assert free.run(algorithm=c_void_p()) == INVALID_VALUE


def test_what_does_not_fit_together(call: Call) -> None:
    for layout, status in ((call.layout(rows=3), INVALID_VALUE), (call.layout(kind=2), NOT_SUPPORTED)):
        good, call.layouts[0] = call.layouts[0], layout
        assert call.choose() == status
        call.layouts[0] = good
    call.layouts[1] = call.layout(leading=3)
    assert call.choose() == INVALID_VALUE


def test_what_was_destroyed_is_gone(call: Call) -> None:
    assert call.choose() == 0
    assert call.lib.cublasLtMatrixLayoutDestroy(call.layouts[3]) == 0
    assert call.lib.cublasLtMatrixLayoutDestroy(call.layouts[3]) == INVALID_VALUE
    assert (call.choose(), call.run()) == (INVALID_VALUE, INVALID_VALUE)
