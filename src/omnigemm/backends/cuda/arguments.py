"""struct Arguments of gemm.cuh as the host packs it: formats of Python's `struct`, by bytes of an operand's element."""

from __future__ import annotations

import struct

_ALWAYS = "PPPPqiiiiPP"  # scales, bias, D and its stride; rows, what bias it is, early weights; zero points
_FACTORS = {1: "", 2: "ffPqqi"}  # alpha, beta, and C with its strides and type
_BATCH = "qqiiiiii"  # steps from product to product: D, C, A, B, scales, sums of B's rows; how many products
_GROUPS = "Piiiii"  # where groups are, how many; rows from one to the next, and scales
_LIST = {1: "Pii", 2: "Pi"}  # the list's memory and its products; in fp8, the pitch of scales
_END = "0P"  # where the next of such structures could begin


def of_product(element_bytes: int) -> str:
    return _ALWAYS + _FACTORS[element_bytes] + _END


def of_batch(element_bytes: int) -> str:
    return _ALWAYS + _FACTORS[element_bytes] + _BATCH + _END


def of_groups(element_bytes: int) -> str:
    return _ALWAYS + _FACTORS[element_bytes] + _GROUPS + _END


def of_list(element_bytes: int) -> str:
    """Only its own end and, in fp8, the scales at the beginning: a list has the rest in device memory."""
    scales = "PP" if element_bytes == 1 else ""
    unread = struct.calcsize(of_product(element_bytes)) - struct.calcsize(scales)
    return f"{scales}{unread}x{_LIST[element_bytes]}{_END}"
