"""Reads of 16 bytes of rows that begin anywhere, compiled by the system's C++ compiler."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

import host_compiler

SHIM = """
#include "common/sliding.cuh"
extern "C" void row(const float* origin, int at, int count, float* out) {
    Sliding one;
    one.begin(origin, at);
    for (int i = 0; i < count; i += 4) {
        float values[4];
        one.next(origin, values, count - i);
        for (int j = 0; j < 4 && i + j < count; ++j) out[i + j] = values[j];
    }
}
"""
AT_ONCE = 4  # numbers in a read


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_compiler.library(
        tmp_path_factory.mktemp("sliding"), SHIM, "-O1", "-fsanitize=undefined", "-fno-sanitize-recover"
    )


@pytest.mark.parametrize("origin", range(AT_ONCE))
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 7, 30])
def test_all_numbers_of_a_row_in_their_order(library: ctypes.CDLL, origin: int, at: int) -> None:
    """Wherever it begins and however long it is."""
    memory = (ctypes.c_float * 256)()
    start = -ctypes.addressof(memory) // 4 % AT_ONCE + AT_ONCE  # at a multiple of 16 bytes
    for i in range(256):
        memory[i] = i - start
    for count in range(1, 42):
        out = (ctypes.c_float * count)()
        library.row(ctypes.byref(memory, 4 * (start + origin)), at, count, out)
        assert list(out) == [origin + at + i for i in range(count)]


def test_nothing_is_read_that_has_none_of_the_row(library: ctypes.CDLL) -> None:
    """Rows that begin and end with a page, between pages that must not be touched: in a process of its own."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    pages = mmap.mmap(-1, 3 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    child = os.fork()
    if child == 0:
        for outside in (0, 2):
            if libc.mprotect(ctypes.c_void_p(base + outside * page), ctypes.c_size_t(page), 0) != 0:
                os._exit(2)
        out = (ctypes.c_float * 41)()
        for count in range(1, 42):
            for place in range(min(count, AT_ONCE)):  # of the row's first and last number in their 16 bytes
                first = base + page + 4 * place
                library.row(ctypes.c_void_p(first), 0, count, out)
                last = base + 2 * page - 4 * (count + place)
                library.row(ctypes.c_void_p(last), 0, count, out)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
