"""Every refusal: the class, the Python class people catch, a message that helps, and an untouched `out`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import omnigemm
import op_support
from omnigemm import (
    DeviceError,
    DTypeError,
    LayoutError,
    OmniGemmError,
    ShapeError,
    UnsupportedError,
    gemm,
    grouped_gemm,
    grouped_gemm_contiguous,
    grouped_gemm_k_contiguous,
    grouped_gemm_masked,
)
from omnigemm.ops.overlap import overlap, overlaps_itself
from op_support import SENTINEL, floats, fp8s, indices, int4_weight, int8s

ERRORS: dict[str, tuple[type[OmniGemmError], type[Exception]]] = {
    "Shape": (ShapeError, ValueError),
    "DType": (DTypeError, TypeError),
    "Layout": (LayoutError, ValueError),
    "Device": (DeviceError, RuntimeError),
    "Unsupported": (UnsupportedError, NotImplementedError),
}

# The call | the error | the argument and what it was | what it must be. The calls are made of the names below:
# right operands of each operation, and an `out` of [4, 5] that fits them.
TABLE = """
gemm
    gemm([[1.0]], b, out=out) | DType | a is a list | a tensor
    gemm(a, None, out=out) | DType | b is a NoneType | a tensor
    gemm(a, b, 1.0, beta=1.0, out=out) | DType | c is a float | tensor
    gemm(floats(6), b, out=out) | Shape | a has shape (6,) | (M, K) or (B, M, K)
    gemm(a, floats(1, 1, 6, 5), out=out) | Shape | b has shape (1, 1, 6, 5) | (K, N)
    gemm(a, floats(7, 5), out=out) | Shape | b has shape (7, 5) | K = 6
    gemm(floats(3, 4, 6), floats(2, 6, 5), out=out) | Shape | b has shape (2, 6, 5) | batch of 1 or 3
    gemm(a.double(), b, out=out) | DType | a has dtype float64 | fp16, bf16 or fp32
    gemm(int8s(4, 6), int8s(6, 5), out=out) | DType | a has dtype int8 | fp16, bf16 or fp32
    gemm(a, b.half(), out=out) | DType | b has dtype fp16 | fp32
    gemm(a, meta(b), out=out) | Device | b is on meta | cpu
    gemm(a, b, meta(floats(4, 5)), beta=1.0, out=out) | Device | c is on meta | cpu
    gemm(meta(a), b, out=out) | Device | b is on cpu | meta
    gemm(a, b, beta=0.5, out=out) | Shape | c is None | beta is 0.5
    gemm(a, b, floats(3, 5), beta=1.0, out=out) | Shape | c has shape (3, 5) | (4, 5)
    gemm(a, b, floats(1, 4, 5), beta=1.0, out=out) | Shape | c has shape (1, 4, 5) | (4, 5)
    gemm(a, b, floats(3, 5), out=out) | Shape | c has shape (3, 5) | (4, 5)
    gemm(a, b, floats(4, 5).half(), beta=1.0, out=out) | DType | c has dtype fp16 | fp32
    gemm(a, b, alpha="2", out=out) | DType | alpha is '2' | a number
    gemm(a, b, alpha=True, out=out) | DType | alpha is True | a number
    gemm(a, b, out, beta=None, out=out) | DType | beta is None | a number
    gemm(a, b, alpha=1e300, out=out) | DType | alpha is 1e+300 | fits fp32
    gemm(a, b, alpha=10**400, out=out) | DType | alpha has 1329 bits | fits fp32
    gemm(a, b, alpha=10**5000, out=out) | DType | alpha has 16610 bits | fits fp32
    gemm(a, b, floats(4, 5), beta=-(10**39), out=out) | DType | beta is -1000 | fits fp32
    gemm(a.to_sparse(), b, out=out) | Layout | a is a sparse_coo tensor | a dense one
    gemm(a, b.to_sparse_csr(), out=out) | Layout | b is a sparse_csr tensor | a dense one
    gemm(a, b, floats(4, 5).to_sparse_csr(), out=out) | Layout | c is a sparse_csr tensor | a dense one
    gemm(nested(a), b, out=out) | Layout | a is a nested tensor | a dense one
    gemm(nested(a, torch.jagged), b, out=out) | Layout | a is a nested tensor | a dense one
    gemm(a, b, out=out.to_sparse_csr()) | Layout | out is a sparse_csr tensor | a dense one
    gemm(a, b, out=out.to_sparse()) | Layout | out is a sparse_coo tensor | a dense one
    gemm(a, b, out_dtype=FP64) | DType | out_dtype is float64 | fp16, bf16 or fp32
    gemm(a, b, out_dtype="fp32") | DType | out_dtype is 'fp32' | a torch dtype
    gemm(a, b, out=out, out_dtype=BF16) | DType | out has dtype fp32 | bf16
    gemm(a, b, out=[out]) | DType | out is a list | a tensor
    gemm(a, b, out=torch.zeros(4, 5, dtype=FP64)) | DType | out has dtype float64 | fp16, bf16 or fp32
    gemm(a, b, out=out[:3]) | Shape | out has shape (3, 5) | (4, 5)
    gemm(a, b, out=out[None]) | Shape | out has shape (1, 4, 5) | (4, 5)
    gemm(a, b, out=meta(out)) | Device | out is on meta | cpu
    gemm(a, b, out=out[:, :1].expand(4, 5)) | Layout | out has strides (5, 0) | memory of its own
    gemm(a, b, out=out[:1].expand(4, 5)) | Layout | out has strides (0, 1) | memory of its own
    gemm(within(out, 4, 6), b, out=out) | Layout | shares memory with a | memory of its own
    gemm(a, within(out, 6, 5), out=out) | Layout | shares memory with b | memory of its own
    gemm(a, b, within(out, 5), beta=1.0, out=out) | Layout | shares memory with c | memory of its own
    gemm(a, floats(6, 4), out[:, :4].t(), beta=1.0, out=out[:, :4]) | Layout | shares memory with c | memory of its own
    gemm(a, b, out=out, backend="tpu") | Unsupported | backend is 'tpu' | cpu
    gemm(a, b, out=out, backend=1) | DType | backend is 1 | None or a name

int8_gemm
    int8_gemm(None, b8, 1.0, 1.0, out=out) | DType | a is a NoneType | a tensor
    int8_gemm(a8.to(torch.uint8), b8, 1.0, 1.0, out=out) | DType | a has dtype uint8 | int8
    int8_gemm(a8, b8.int(), 1.0, 1.0, out=out) | DType | b has dtype int32 | int8
    int8_gemm(int8s(6), b8, 1.0, 1.0, out=out) | Shape | a has shape (6,) | (M, K) or (B, M, K)
    int8_gemm(a8, int8s(6), 1.0, 1.0, out=out) | Shape | b has shape (6,) | (N, K) or (B, N, K)
    int8_gemm(a8, int8s(5, 7), 1.0, 1.0, out=out) | Shape | b has shape (5, 7) | K = 6
    int8_gemm(a8, int8s(6, 5), 1.0, 1.0, out=out) | Shape | b has shape (6, 5) | (N, K)
    int8_gemm(int8s(3, 4, 6), int8s(2, 5, 6), 1.0, 1.0, out=out) | Shape | b has shape (2, 5, 6) | batch of 1 or 3
    int8_gemm(a8, b8, scales(3), 1.0, out=out) | Shape | a_scale has shape (3,) | one value, (4,)
    int8_gemm(a8, b8, scales(1, 4), 1.0, out=out) | Shape | a_scale has shape (1, 4) | one value, (4,)
    int8_gemm(a8, b8, 1.0, scales(4), out=out) | Shape | b_scale has shape (4,) | (5,)
    int8_gemm(a8, b8, scales(4, 2), scales(5, 2), out=out) | Shape | a_scale has shape (4, 2) | (4,)
    int8_gemm(a8, b8, scales(4).double(), 1.0, out=out) | DType | a_scale has dtype float64 | fp32
    int8_gemm(a8, b8, 1.0, scales(5).half(), out=out) | DType | b_scale has dtype fp16 | fp32
    int8_gemm(a8, b8, None, 1.0, out=out) | DType | a_scale is a NoneType | an fp32 tensor or a number
    int8_gemm(a8, b8, 1.0, True, out=out) | DType | b_scale is a bool | an fp32 tensor or a number
    int8_gemm(a8, b8, 1.0, meta(scales(5)), out=out) | Device | b_scale is on meta | cpu
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=indices([1, 2]), out=out) | Shape | a_zero has shape (2,) | one value or (4,)
    int8_gemm(int8s(2, 4, 6), b8, 1.0, 1.0, a_zero=indices([1] * 2)[:, None]) | Shape | a_zero has shape (2, 1) | (2, 4)
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=int8s(4), out=out) | DType | a_zero has dtype int8 | int32
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=1.5, out=out) | DType | a_zero is a float | a tensor or a whole number
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=True, out=out) | DType | a_zero is a bool | a tensor or a whole number
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=2**31, out=out) | DType | a_zero is 2147483648 | fits int32
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=-(2**9999), out=out) | DType | a_zero has 10000 bits | fits int32
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=3, b_sums=indices([1] * 4), out=out) | Shape | b_sums has shape (4,) | = (5,)
    int8_gemm(int8s(2, 4, 6), int8s(2, 5, 6), 1.0, 1.0, b_sums=indices([1] * 5)) | Shape | b_sums has shape (5,) | (2,
    int8_gemm(a8, b8, 1.0, 1.0, b_sums=indices([1] * 5).long(), out=out) | DType | b_sums has dtype int64 | int32
    int8_gemm(a8, b8, 1.0, 1.0, a_zero=3, b_sums=7, out=out) | DType | b_sums is a int | a tensor
    int8_gemm(a8, b8, 1.0, 1.0, b_sums=meta(indices([1] * 5)), out=out) | Device | b_sums is on meta | cpu
    int8_gemm(a8, b8, 1e39, 1.0, out=out) | DType | a_scale is 1e+39 | fits fp32
    int8_gemm(a8, b8, 1.0, 10**400, out=out) | DType | b_scale has 1329 bits | fits fp32
    int8_gemm(a8, b8, scales(4).to_sparse(), 1.0, out=out) | Layout | a_scale is a sparse_coo tensor | a dense one
    int8_gemm(a8, b8, 1.0, 1.0, bias=floats(4), out=out) | Shape | bias has shape (4,) | (5,)
    int8_gemm(a8, b8, 1.0, 1.0, bias=floats(4, 5), out=out) | Shape | bias has shape (4, 5) | (5,)
    int8_gemm(a8, b8, 1.0, 1.0, bias=indices([0] * 5), out=out) | DType | bias has dtype int32 | fp16, bf16 or fp32
    int8_gemm(a8, b8, 1.0, 1.0, bias=1.0, out=out) | DType | bias is a float | a tensor
    int8_gemm(a8, b8, 1.0, 1.0, bias=meta(floats(5)), out=out) | Device | bias is on meta | cpu
    int8_gemm(a8, b8, 1.0, 1.0, out_dtype=torch.int32) | DType | out_dtype is int32 | fp16, bf16 or fp32
    int8_gemm(a8, b8, 1.0, 1.0, out=int8s(4, 5)) | DType | out has dtype int8 | fp16, bf16 or fp32
    int8_gemm(a8, b8, 1.0, 1.0, out=out.t()) | Shape | out has shape (5, 4) | (4, 5)
    int8_gemm(within(out, 4, 6, dtype=I8), b8, 1.0, 1.0, out=out) | Layout | shares memory with a | memory of its own
    int8_gemm(a8, b8, 1.0, 1.0, bias=within(out, 5), out=out) | Layout | shares memory with bias | memory of its own
    int8_gemm(a8, b8, within(out, 4), 1.0, out=out) | Layout | shares memory with a_scale | memory of its own
    int8_gemm(a8, b8, 1.0, 1.0, out=out, backend="npu") | Unsupported | backend is 'npu' | cpu

fp8_gemm
    fp8_gemm(af.half(), bf, 1.0, 1.0, out=out) | DType | a has dtype fp16 | e4m3 or e5m2
    fp8_gemm(af, int8s(5, 200), 1.0, 1.0, out=out) | DType | b has dtype int8 | e4m3 or e5m2
    fp8_gemm(af, 1.0, 1.0, 1.0, out=out) | DType | b is a float | a tensor
    fp8_gemm(af[None], bf, 1.0, 1.0, out=out) | Shape | a has shape (1, 4, 200) | (M, K)
    fp8_gemm(af, bf[None], 1.0, 1.0, out=out) | Shape | b has shape (1, 5, 200) | (N, K)
    fp8_gemm(af, fp8s(5, 199), 1.0, 1.0, out=out) | Shape | b has shape (5, 199) | K = 200
    fp8_gemm(af, bf, scales(4, 3), 1.0, out=out) | Shape | a_scale has shape (4, 3) | (4, 2) for 1x128 blocks
    fp8_gemm(af, bf, 1.0, scales(2, 2), out=out) | Shape | b_scale has shape (2, 2) | (1, 2) for 128x128 blocks
    fp8_gemm(af, bf, 1.0, scales(1, 2), out=out) | Shape | b_scale (1, 2) | both in blocks
    fp8_gemm(af, bf, scales(4, 2), scales(5), out=out) | Shape | a_scale has shape (4, 2) | both in blocks
    fp8_gemm(af, bf, scales(4).bfloat16(), 1.0, out=out) | DType | a_scale has dtype bf16 | fp32
    fp8_gemm(af, bf, [1.0] * 4, 1.0, out=out) | DType | a_scale is a list | an fp32 tensor or a number
    fp8_gemm(af, bf, meta(scales(4)), 1.0, out=out) | Device | a_scale is on meta | cpu
    fp8_gemm(af, bf, 1.0, 1.0, bias=floats(1), out=out) | Shape | bias has shape (1,) | (5,)
    fp8_gemm(af, bf, 1.0, 1.0, bias=floats(5).double(), out=out) | DType | bias has dtype float64 | fp16, bf16 or fp32
    fp8_gemm(af, bf, 1.0, 1.0, out_dtype=E4M3) | DType | out_dtype is e4m3 | fp16, bf16 or fp32
    fp8_gemm(af, bf, 1.0, 1.0, out=fp8s(4, 5)) | DType | out has dtype e4m3 | fp16, bf16 or fp32
    fp8_gemm(af, bf, 1.0, 1.0, out=out[:, 1:]) | Shape | out has shape (4, 4) | (4, 5)
    fp8_gemm(af, bf, 1.0, 1.0, out=out[:1].expand(4, 5)) | Layout | out has strides (0, 1) | memory of its own
    fp8_gemm(af, bf, 1.0, within(out, 5), out=out) | Layout | shares memory with b_scale | memory of its own
    fp8_gemm(af, bf, 1.0, -1e39, out=out) | DType | b_scale is -1e+39 | fits fp32
    fp8_gemm(af, bf, 1.0, 1.0, bias=floats(5).to_sparse(), out=out) | Layout | bias is a sparse_coo tensor | a dense one
    fp8_gemm(af, bf, 1.0, 1.0, out=out, backend="") | Unsupported | backend is '' | cpu

int4_gemm
    int4_gemm(None, w4(), out=out) | DType | a is a NoneType | a tensor
    int4_gemm(a16, floats(5, 64), out=out) | DType | w is a Tensor | an Int4Weight
    int4_gemm(a16, w4(experts=2), out=out) | Shape | w has shape (2, 5, 64) | (N, K)
    int4_gemm(a16.float(), w4(), out=out) | DType | a has dtype fp32 | fp16 or bf16
    int4_gemm(a16.to_sparse_csr(), w4(), out=out) | Layout | a is a sparse_csr tensor | a dense one
    int4_gemm(a16[None], w4(), out=out) | Shape | a has shape (1, 4, 64) | (M, K)
    int4_gemm(a16[:, 1:], w4(), out=out) | Shape | a has shape (4, 63) | K = 64
    int4_gemm(a16, w4().to("meta"), out=out) | Device | w is on meta | cpu
    int4_gemm(a16, w4(), bias=floats(64), out=out) | Shape | bias has shape (64,) | (5,)
    int4_gemm(a16, w4(), bias=int8s(5), out=out) | DType | bias has dtype int8 | fp16, bf16 or fp32
    int4_gemm(a16, w4(), bias=[0.0] * 5, out=out) | DType | bias is a list | a tensor
    int4_gemm(a16, w4(), out=int8s(4, 5)) | DType | out has dtype int8 | fp16, bf16 or fp32
    int4_gemm(a16, w4(), out=out[:2]) | Shape | out has shape (2, 5) | (4, 5)
    int4_gemm(within(out, 1, 64, dtype=BF16), w4(), out=out[:1]) | Layout | shares memory with a | memory of its own
    int4_gemm(a16, over_scales(out), out=out) | Layout | shares memory with w.scales | memory of its own
    int4_gemm(a16, w4(), out=out, backend="cuda:0") | Unsupported | backend is 'cuda:0' | cpu

grouped_gemm
    grouped_gemm(a, bl, out=outs) | DType | a is a Tensor | a list of matrices
    grouped_gemm(al, [b, None], out=outs) | DType | b[1] is a NoneType | a tensor
    grouped_gemm([], []) | Shape | a has 0 matrices | at least one group
    grouped_gemm(al, bl[:1], out=outs) | Shape | b has 1 matrices | 2
    grouped_gemm(al, bl, [floats(4, 5)], beta=1.0, out=outs) | Shape | c has 1 matrices | 2
    grouped_gemm(al, bl, out=[out]) | Shape | out has 1 matrices | 2
    grouped_gemm(al, bl, alpha=[1.0] * 3, out=outs) | Shape | alpha has 3 numbers | 2, one per group
    grouped_gemm(al, bl, beta=torch.zeros(3), out=outs) | Shape | beta has 3 numbers | 2, one per group
    grouped_gemm(al, bl, alpha="11", out=outs) | DType | alpha is '11' | a number or one per group
    grouped_gemm(al, bl, alpha=[1.0, True], out=outs) | DType | alpha is [1.0, True] | a number or one per group
    grouped_gemm(al, bl, alpha=[1.0, 1e300], out=outs) | DType | alpha[1] is 1e+300 | fits fp32
    grouped_gemm(al, bl, alpha=(float("nan"), -1e39), out=outs) | DType | alpha[1] is -1e+39 | fits fp32
    grouped_gemm(al, bl, alpha=[1.0, 10**400], out=outs) | DType | alpha[1] has 1329 bits | fits fp32
    grouped_gemm(al, bl, alpha=10**400, out=outs) | DType | alpha has 1329 bits | fits fp32
    grouped_gemm(al, bl, alpha=1e39, out=outs) | DType | alpha is 1e+39 | fits fp32
    grouped_gemm(al, bl, alpha=torch.tensor([1e39, 1.0], dtype=FP64), out=outs) | DType | alpha[0] is 1e+39 | fits fp32
    grouped_gemm(al, [b, bl[1].to_sparse()], out=outs) | Layout | b[1] is a sparse_coo tensor | a dense one
    grouped_gemm([a, al[1].to_sparse_csr()], bl, out=outs) | Layout | a[1] is a sparse_csr tensor | a dense one
    grouped_gemm([nested(a), al[1]], bl, out=outs) | Layout | a[0] is a nested tensor | a dense one
    grouped_gemm(al, bl, out=[out, outs[1].to_sparse_csr()]) | Layout | out[1] is a sparse_csr tensor | a dense one
    grouped_gemm([a, floats(1, 3, 2)], bl, out=outs) | Shape | a[1] has shape (1, 3, 2) | (M, K)
    grouped_gemm(al, [b, floats(2)], out=outs) | Shape | b[1] has shape (2,) | (K, N)
    grouped_gemm(al, [b, floats(3, 7)], out=outs) | Shape | b[1] has shape (3, 7) | K = 2
    grouped_gemm([int8s(4, 6)], [int8s(6, 5)], out=[out]) | DType | a[0] has dtype int8 | fp16, bf16 or fp32
    grouped_gemm([a, floats(3, 2).half()], bl, out=outs) | DType | a[1] has dtype fp16 | fp32
    grouped_gemm(al, [b, floats(2, 7).half()], out=outs) | DType | b[1] has dtype fp16 | fp32
    grouped_gemm(al, [b, meta(floats(2, 7))], out=outs) | Device | b[1] is on meta | cpu
    grouped_gemm(al, bl, beta=[0.0, 2.0], out=outs) | Shape | c[1] is None | beta is 2.0
    grouped_gemm(al, bl, [floats(4, 5), floats(4, 5)], beta=1.0, out=outs) | Shape | c[1] has shape (4, 5) | (3, 7)
    grouped_gemm(al, bl, out=[out, floats(7, 3)]) | Shape | out[1] has shape (7, 3) | (3, 7)
    grouped_gemm(al, bl, out=[out, floats(3, 7).half()]) | DType | out[1] has dtype fp16 | fp32 like out[0]
    grouped_gemm(al, bl, out=[out, None]) | DType | out[1] is a NoneType | a tensor
    grouped_gemm(al, bl, out=outs, out_dtype=FP16) | DType | out[0] has dtype fp32 | fp16
    grouped_gemm([a, within(out, 3, 2)], bl, out=outs) | Layout | out[0] shares memory with a[1] | memory of its own
    grouped_gemm(al, bl, sizes=[(4, 5, 6)] * 2, out=outs) | DType | sizes is a list | a tensor
    grouped_gemm(al, bl, sizes=torch.zeros(2, 3), out=outs) | DType | sizes has dtype fp32 | int32
    grouped_gemm(al, bl, sizes=indices([1] * 6).long().view(2, 3), out=outs) | DType | sizes has dtype int64 | int32
    grouped_gemm(al, bl, sizes=indices([4, 5, 6]), out=outs) | Shape | sizes has shape (3,) | M, N, K of each
    grouped_gemm(al, bl, sizes=indices([1] * 6).view(3, 2), out=outs) | Shape | sizes has shape (3, 2) | (2, 3)
    grouped_gemm(al, bl, sizes=meta(indices([1] * 6).view(2, 3)), out=outs) | Device | sizes is on meta | cpu
    grouped_gemm(al, bl, sizes=indices([4, 5, 6, 3, 8, 2]).view(2, 3), out=outs) | Shape | sizes[1, 1] is 8 | N = 7
    grouped_gemm(al, bl, sizes=indices([4, 5, -6, 3, 7, 2]).view(2, 3), out=outs) | Shape | sizes[0, 2] is -6 | 0 <=
    grouped_gemm(al, bl, out=outs, backend="tpu") | Unsupported | backend is 'tpu' | cpu

grouped_gemm_contiguous
    contiguous(out, [a]) | DType | a is a list | a tensor
    contiguous(out, weight=[b]) | DType | b is a list | a tensor
    contiguous(out, index=[1, 2, 4]) | DType | ends is a list | a tensor
    contiguous(out, index=ends.long()) | DType | ends has dtype int64 | int32
    contiguous(out, index=indices([2, 4])) | Shape | ends has shape (2,) | (3,)
    contiguous(out, index=meta(ends)) | Device | ends is on meta | cpu
    contiguous(out, index=indices([2, 1, 4])) | Shape | ends[1] is 1 | 2 <= ends[1] <= T = 4
    contiguous(out, index=indices([-1, 1, 4])) | Shape | ends[0] is -1 | 0 <= ends[0]
    contiguous(out, index=indices([1, 2, 5])) | Shape | ends[2] is 5 | T = 4
    contiguous(out, floats(1, 4, 6)) | Shape | a has shape (1, 4, 6) | (T, K)
    contiguous(out, weight=floats(5, 6)) | Shape | b has shape (5, 6) | (G, N, K)
    contiguous(out, floats(4, 7)) | Shape | a has shape (4, 7) | K = 6
    contiguous(out, a.double()) | DType | a has dtype float64 | fp16, bf16, fp32, e4m3, e5m2 or int8
    contiguous(out, a.half()) | DType | b has dtype fp32 | fp16
    contiguous(out, fp8s(4, 6), int8s(3, 5, 6), a_scale=1.0, b_scale=1.0) | DType | b has dtype int8 | e4m3 or e5m2
    contiguous(out, a_scale=scales(4)) | Shape | a_scale has shape (4,) | None because a is fp32
    int8_rows(out, None, 1.0) | Shape | a_scale is None | because a is int8
    int8_rows(out, 1.0, None) | Shape | b_scale is None | because a is int8
    int8_rows(out, scales(3), 1.0) | Shape | a_scale has shape (3,) | (4,)
    int8_rows(out, 1.0, scales(5)) | Shape | b_scale has shape (5,) | (3, 5)
    int8_rows(out, 1.0, scales(3).half()) | DType | b_scale has dtype fp16 | fp32
    int8_rows(out, "1", 1.0) | DType | a_scale is a str | an fp32 tensor or a number
    contiguous(out, weight=meta(be)) | Device | b is on meta | cpu
    contiguous(out, a16, w4()) | Shape | b has shape (5, 64) | (G, N, K)
    contiguous(out, a16.float(), w4(experts=3)) | DType | a has dtype fp32 | fp16 or bf16
    contiguous(out, a16, w4(experts=3), a_scale=1.0) | Shape | a_scale has shape () | None because b has
    contiguous(out, a16, w4(experts=3), b_scale=scales(3)) | Shape | b_scale has shape (3,) | None because b has
    contiguous(out, weight=be.to_sparse()) | Layout | b is a sparse_coo tensor | a dense one
    contiguous(out[:3]) | Shape | out has shape (3, 5) | (4, 5)
    contiguous(int8s(4, 5)) | DType | out has dtype int8 | fp16, bf16 or fp32
    contiguous(meta(out)) | Device | out is on meta | cpu
    contiguous(out[:1].expand(4, 5)) | Layout | out has strides (0, 1) | memory of its own
    contiguous(out, within(out, 4, 6)) | Layout | shares memory with a | memory of its own
    contiguous(out, index=within(out, 3, dtype=I32)) | Layout | shares memory with ends | memory of its own
    contiguous(out, backend="tpu") | Unsupported | backend is 'tpu' | cpu

grouped_gemm_k_contiguous
    along_k(out, [a]) | DType | a is a list | a tensor
    along_k(out, right=None) | DType | b is a NoneType | a tensor
    along_k(out, index=[6]) | DType | ends is a list | a tensor
    along_k(out, c=1.0) | DType | c is a float | a tensor
    along_k(out, a_scale=1.0) | DType | a_scale is a float | a tensor
    along_k(out, floats(6, 4).double()) | DType | a has dtype float64 | fp16, bf16, fp32, e4m3 or e5m2
    along_k(out, int8s(6, 4)) | DType | a has dtype int8 | fp16, bf16, fp32, e4m3 or e5m2
    along_k(out, floats(6, 4).half()) | DType | b has dtype fp32 | fp16
    along_k(out, fp8s(6, 4)) | DType | b has dtype fp32 | e4m3 or e5m2
    along_k(out, floats(6, 4).to_sparse_csr()) | Layout | a is a sparse_csr tensor | a dense one
    along_k(out, floats(1, 6, 4)) | Shape | a has shape (1, 6, 4) | (T, M)
    along_k(out, right=floats(6)) | Shape | b has shape (6,) | (T, N)
    along_k(out, right=floats(5, 5)) | Shape | b has shape (5, 5) | T = 6
    along_k(out, index=indices([6]).long()) | DType | ends has dtype int64 | int32
    along_k(out, index=indices([6])[None]) | Shape | ends has shape (1, 1) | (G,)
    along_k(out, index=meta(indices([6]))) | Device | ends is on meta | cpu
    along_k(out, index=indices([7])) | Shape | ends[0] is 7 | 0 <= ends[0] <= T = 6
    along_k(out, index=indices([-1])) | Shape | ends[0] is -1 | 0 <= ends[0] <= T = 6
    along_k(None, index=indices([4, 3])) | Shape | ends[1] is 3 | 4 <= ends[1] <= T = 6
    along_k(out, a_scale=scales(4, 1)) | Shape | a_scale has shape (4, 1) | None because a is fp32
    along_k(out, b_scale=scales(5, 1)) | Shape | b_scale has shape (5, 1) | None because a is fp32
    along_k(out, fp8s(6, 4), fp8s(6, 5)) | Shape | a_scale is None | a tensor because a and b are fp8
    along_k(out, fp8s(6, 4), fp8s(6, 5), a_scale=scales(4, 1)) | Shape | b_scale is None | a tensor because a
    along_k(out, fp8s(6, 4), fp8s(6, 5), a_scale=scales(4)) | Shape | a_scale has shape (4,) | ceil(T/128)) = (4, 1)
    along_k(out, fp8s(6, 4), fp8s(6, 5), a_scale=scales(4, 1).half()) | DType | a_scale has dtype fp16 | fp32
    along_k(out, c=floats(4, 5)) | Shape | c has shape (4, 5) | (G, M, N) = (1, 4, 5)
    along_k(out, c=floats(1, 4, 5).half()) | DType | c has dtype fp16 | fp32, the dtype of the result
    along_k(out, c=meta(floats(1, 4, 5))) | Device | c is on meta | cpu
    along_k(out[:3]) | Shape | out has shape (1, 3, 5) | (1, 4, 5)
    along_k(out, floats(6, 4), out_dtype=BF16) | DType | out has dtype fp32 | bf16
    along_k(meta(out)) | Device | out is on meta | cpu
    along_k(out[:1].expand(4, 5)) | Layout | out has strides (0, 0, 1) | memory of its own
    along_k(out, within(out, 6, 3)) | Shape | out has shape (1, 4, 5) | (1, 3, 5)
    along_k(out[:3], within(out, 6, 3)) | Layout | shares memory with a | memory of its own
    along_k(out, c=within(out, 1, 5, 4).transpose(1, 2)) | Layout | shares memory with c | memory of its own
    along_k(out, backend="tpu") | Unsupported | backend is 'tpu' | cpu

grouped_gemm_masked
    masked(out, index=3) | DType | counts is a int | a tensor
    masked(out, index=torch.tensor([3.0])) | DType | counts has dtype fp32 | int32
    masked(out, index=indices([3, 3])) | Shape | counts has shape (2,) | (1,)
    masked(out, index=indices([5])) | Shape | counts[0] is 5 | Mmax = 4
    masked(out, index=indices([-1])) | Shape | counts[0] is -1 | 0 <= counts[0]
    masked(out, index=indices([3]).to_sparse()) | Layout | counts is a sparse_coo tensor | a dense one
    masked(out, a) | Shape | a has shape (4, 6) | (G, Mmax, K)
    masked(out, floats(2, 4, 6)) | Shape | a has shape (2, 4, 6) | G = 1
    masked(out, floats(1, 4, 7)) | Shape | a has shape (1, 4, 7) | K = 6
    masked(out, expected_m=-1) | Shape | expected_m is -1 | a whole number >= 0
    masked(out, expected_m=1.5) | Shape | expected_m is 1.5 | a whole number >= 0
    masked(out, expected_m=True) | Shape | expected_m is True | a whole number >= 0
    masked(out, a8[None], b8[None], a_scale=scales(4), b_scale=1.0) | Shape | a_scale has shape (4,) | (1, 4)
    masked(out, a16[None], w4()) | Shape | b has shape (5, 64) | (G, N, K)
    masked(out[:3]) | Shape | out has shape (1, 3, 5) | (1, 4, 5)
    masked(out, index=within(out, 1, dtype=I32)) | Layout | shares memory with counts | memory of its own
    masked(out, backend="tpu") | Unsupported | backend is 'tpu' | cpu
"""


def cases() -> list[Any]:
    found, op = [], ""
    for line in TABLE.splitlines():
        if "|" in line:
            call, *rest = (part.strip() for part in line.split(" | "))
            found.append(pytest.param(op, call, *rest, id=call))
        elif line:
            op = line
    return found


BF16, FP16, FP64, I8, I32 = torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int32

a, b = floats(4, 6), floats(6, 5)
a8, b8 = int8s(4, 6), int8s(5, 6)
af, bf = fp8s(4, 200), fp8s(5, 200)
a16 = floats(4, 64, dtype=BF16)
al, bl = [a, floats(3, 2)], [b, floats(2, 7)]
be, ends = floats(3, 5, 6), indices([1, 2, 4])


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def nested(tensor: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([tensor, tensor], layout=layout)


def within(out: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input in the memory of `out`."""
    storage = torch.empty(0).set_(out.untyped_storage())
    inside: Tensor = storage.view(dtype)[: torch.Size(shape).numel()].view(shape)
    return inside


def w4(**options: Any) -> omnigemm.Int4Weight:
    return int4_weight(5, 64, 32, **options)


def over_scales(out: Tensor) -> omnigemm.Int4Weight:
    w = w4(dtype=torch.float32)
    w.scales = within(out, 5, 2)
    return w


def along_k(out: Tensor | None, left: Any = None, right: Any = ..., index: Any = None, **more: Any) -> object:
    """One group of all rows, so that `out` has the size of the others'."""
    left = floats(6, 4) if left is None else left
    right = floats(6, 5) if right is ... else right
    index = indices([6]) if index is None else index
    target = None if out is None else out[None]
    return grouped_gemm_k_contiguous(left, right, index, **{"out": target, **more})


def contiguous(out: Tensor, rows: Any = a, weight: Any = be, index: Any = ends, **more: Any) -> object:
    return grouped_gemm_contiguous(rows, weight, index, **{"out": out, **more})


def int8_rows(out: Tensor, a_scale: Any, b_scale: Any) -> object:
    return contiguous(out, a8, int8s(3, 5, 6), a_scale=a_scale, b_scale=b_scale)


def masked(out: Tensor, rows: Any = a[None], weight: Any = be[:1], index: Any = ends[2:], **more: Any) -> object:
    return grouped_gemm_masked(rows, weight, index, **{"out": out[None], **more})


@pytest.mark.parametrize(("op", "call", "error", "argument", "expectation"), cases())
def test_refusals(op: str, call: str, error: str, argument: str, expectation: str) -> None:
    out = torch.full((80,), SENTINEL)[:20].view(4, 5)
    expected_class, python_class = ERRORS[error]
    known = {**vars(omnigemm), **vars(op_support), **globals(), "out": out, "outs": [out, torch.zeros(3, 7)]}
    with pytest.raises(expected_class) as caught:
        eval(call, known)
    assert type(caught.value) is expected_class
    assert isinstance(caught.value, python_class)
    message = str(caught.value)
    assert message.startswith(f"{op}: ")
    assert argument in message
    assert expectation in message.split("expected", 1)[1]
    assert bool((out == SENTINEL).all()), "a refused call wrote to out"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_tensors_in_onednns_layout() -> None:
    with pytest.raises(LayoutError, match="a is a mkldnn tensor, expected a dense one"):
        gemm(a.to_mkldnn(), b)


def test_plans_refuse_tensors_without_strides() -> None:
    plan = omnigemm.plan("gemm", m=4, n=5, k=6, dtype="fp32")
    for odd in (a.to_sparse(), a.to_sparse_csr(), nested(a)):
        with pytest.raises(LayoutError, match=r"a is a (sparse_coo|sparse_csr|nested) tensor, expected a dense one"):
            plan.run(odd, b)


def test_numbers_that_fp32_has() -> None:
    """The largest, infinities and NaN; numpy's doubles are Python's; alone and in lists."""
    most, one = torch.finfo(torch.float32).max, torch.ones(1, 1)
    for number in (most, -most, float("inf"), float("nan"), np.float64(2.0), 3, 2**100):
        want = torch.tensor([[float(number)]])
        results = [gemm(one, one, alpha=number), *grouped_gemm([one, one], [one, one], alpha=[1.0, number])[1:]]
        results += [*grouped_gemm([one], [one], alpha=number), *grouped_gemm([one], [one], alpha=(number,))]
        for result in results:
            assert torch.allclose(result, want, rtol=0.0, equal_nan=True)


@pytest.mark.parametrize("backend", [np.ones(2), torch.ones(2), 1, ["cpu"]], ids=str)
def test_a_backend_that_is_no_name_is_refused_also_of_a_remembered_call(backend: Any) -> None:
    calls: list[Callable[..., object]] = [
        lambda **words: gemm(a, b, **words),
        lambda **words: omnigemm.int8_gemm(a8, b8, 1.0, 1.0, **words),
        lambda **words: omnigemm.fp8_gemm(af, bf, one, one, **words),
        lambda **words: omnigemm.int4_gemm(a16, packed, **words),
        lambda **words: grouped_gemm(al, bl, **words),
        lambda **words: grouped_gemm_contiguous(a, be, ends, **words),
        lambda **words: grouped_gemm_masked(a[None], be[:1], ends[2:], **words),
        lambda **words: grouped_gemm_k_contiguous(a, a, ends, **words),
    ]
    one, packed = torch.ones(()), w4()
    for call in calls:
        call()
        call()
        with pytest.raises(DTypeError, match=r"backend is .*, expected None or a name"):
            call(backend=backend)


def test_a_refusal_is_not_remembered_as_a_plan() -> None:
    """The second, right call of the same shapes works, and the wrong one is refused again."""
    a, b = floats(3, 6), floats(2, 5, 6)
    for _ in range(2):
        with pytest.raises(ShapeError):
            grouped_gemm_contiguous(a, b, indices([3, 2]))
        assert grouped_gemm_contiguous(a, b, indices([2, 3])).shape == (3, 5)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"colour": 1}, TypeError, ("'colour'", "backend")),
        ({"backend": "tpu"}, NotImplementedError, ("backend is 'tpu'", "cpu")),
        ({"weight_cache_mib": -1}, omnigemm.SettingsError, ("weight_cache_mib is -1", ">= 0")),
        ({"weight_cache_mib": 1.5}, ValueError, ("weight_cache_mib is 1.5", "whole number")),
        ({"deterministic": 2}, ValueError, ("deterministic is 2", "True or False")),
    ],
)
def test_unknown_settings(changes: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        omnigemm.settings(**changes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("ask", [omnigemm.plan, omnigemm.explain])
def test_unknown_problems(ask: Callable[..., object]) -> None:
    with pytest.raises(UnsupportedError, match=r"op is 'conv', expected one of gemm"):
        ask("conv", m=1, n=1, k=1)
    with pytest.raises(ShapeError, match=r"gemm: m is -1, expected a whole number >= 0"):
        ask("gemm", m=-1, n=1, k=1)
    with pytest.raises(TypeError, match=r"'tiles' is not part of a problem, expected one of"):
        ask("gemm", m=1, n=1, k=1, tiles=4)
    with pytest.raises(UnsupportedError, match=r"gemm: backend is 'tpu', expected"):
        ask("gemm", m=1, n=1, k=1, backend="tpu")
    with pytest.raises(DeviceError, match=r"gemm: device is 'moon', expected a torch device"):
        ask("gemm", m=1, n=1, k=1, device="moon")
    with pytest.raises(DTypeError, match=r"int8_gemm: dtype is fp16, expected int8"):
        ask("int8_gemm", m=1, n=1, k=1, dtype="fp16")


def test_a_device_without_a_backend() -> None:
    with pytest.raises(UnsupportedError, match=r"nothing here can run .* on meta.*the tensors are on meta"):
        omnigemm.plan("gemm", m=1, n=1, k=1, device="meta")
    assert "nothing here can run it" in str(omnigemm.explain("gemm", m=1, n=1, k=1, device="meta"))


def test_a_plan_refuses_another_problem() -> None:
    plan = omnigemm.plan("gemm", m=4, n=5, k=6, dtype=torch.float32)
    out = torch.full((3, 5), SENTINEL)
    with pytest.raises(ShapeError, match=r"gemm: .*m is 3 \(planned 4\)"):
        plan.run(floats(3, 6), floats(6, 5), out=out)
    assert bool((out == SENTINEL).all())
    a, b = floats(4, 6), floats(6, 5)
    assert torch.equal(plan.run(a, b), gemm(a, b))


def test_out_that_overlaps_itself() -> None:
    out = torch.full((8,), SENTINEL).as_strided((4, 5), (1, 1))
    with pytest.raises(LayoutError, match=r"out has strides \(1, 1\), expected memory of its own"):
        gemm(floats(4, 6), floats(6, 5), out=out)


def test_out_that_has_room_for_every_element() -> None:
    """Also where rows and columns lie between one another, and where there are none."""
    a, b = floats(3, 6), floats(6, 2)
    out = torch.full((8,), SENTINEL).as_strided((3, 2), (2, 3))
    assert torch.allclose(gemm(a, b, out=out), gemm(a, b))
    for empty in (
        torch.empty(2)[:0].expand(3, 0),
        torch.empty(1, 2).expand(3, 2)[:, :0],
        torch.empty(1, 0).expand(3, 0),
    ):
        assert gemm(a, b[:, :0], out=empty).shape == (3, 0)
    with pytest.raises(LayoutError, match=r"out has strides \(2, 4\), expected memory of its own"):
        gemm(a, b, out=torch.zeros(16).as_strided((3, 2), (2, 4)))


@pytest.mark.parametrize("shape", [(3, 2), (4, 4), (2, 5), (1, 3), (3, 0), (2, 3, 2)])
def test_overlaps_of_all_strides(shape: tuple[int, ...]) -> None:
    for strides in itertools.product(range(7), repeat=len(shape)):
        elements = itertools.product(*map(range, shape))
        places = [sum(i * stride for i, stride in zip(one, strides, strict=True)) for one in elements]
        overlaps = len(set(places)) < len(places)
        found = overlaps_itself(torch.empty(100).as_strided(shape, strides))
        assert found == overlaps or (found and len(shape) > 2)


def test_no_overlap_is_missed() -> None:
    """Two tensors of any strides in one buffer, byte by byte. What is refused without need must be the exception."""
    dice, room = random.Random(5), torch.zeros(1024, dtype=torch.uint8)

    def draw() -> tuple[Tensor, set[int]]:
        of = room.view(dice.choice([torch.uint8, torch.int16, torch.float32]))
        rank = dice.randint(0, 3)
        shape = [dice.randint(1, 4) for _ in range(rank)]
        strides = [dice.choice([0, 1, 2, 3, 4, 6, 8, 12, 16, 24]) for _ in range(rank)]
        one = of.as_strided(shape, strides, dice.randint(0, 12))
        first, size = one.storage_offset(), one.element_size()
        places = (
            first + sum(i * stride for i, stride in zip(at, strides, strict=True))
            for at in itertools.product(*map(range, shape))
        )
        return one, {place * size + byte for place in places for byte in range(size)}

    needless = apart = 0
    for _ in range(20_000):
        (x, mine), (y, others) = draw(), draw()
        if mine & others:
            assert overlap(x, y)
        else:
            apart += 1
            needless += overlap(x, y)
    assert apart > 4000
    assert needless < apart / 10


def test_one_value_in_the_memory_of_out() -> None:
    """Without dimensions it is no smaller than with some."""
    room = torch.zeros(8, dtype=torch.float32).view(torch.float16)
    out, scale = room[1:].as_strided((2, 3), (4, 1)), room[4:6].view(torch.float32)
    for one in (scale, scale.reshape(())):
        with pytest.raises(LayoutError, match="shares memory with a_scale"):
            omnigemm.int8_gemm(int8s(2, 6), int8s(3, 6), one, 1.0, out=out)
    free = room.as_strided((2, 2), (4, 1), 2)
    omnigemm.int8_gemm(int8s(2, 6), int8s(2, 6), scale.reshape(()), 1.0, out=free)


def test_outs_that_overlap_each_other() -> None:
    out = torch.full((4, 5), SENTINEL)
    with pytest.raises(LayoutError, match=r"out\[1\] shares memory with out\[0\]"):
        grouped_gemm([floats(4, 6)] * 2, [floats(6, 5)] * 2, out=[out, out])


def test_column_slices_of_a_batch_may_share_a_buffer() -> None:
    buffer, b = floats(2, 4, 16), floats(8, 8)
    gemm(buffer[:, :, :8], b, out=buffer[:, :, 8:])


@pytest.mark.parametrize("listed", [False, True])
def test_an_inference_tensor_is_refused_before_it_is_written(listed: bool) -> None:
    """Outside of inference mode, as torch does, but torch writes it first."""
    a, b = floats(2, 4), floats(4, 3)
    with torch.inference_mode():
        out = torch.full((2, 3), SENTINEL)
        assert gemm(a, b, out=out.clone()).is_inference()

    def call() -> None:
        if listed:
            grouped_gemm([a], [b], out=[out])
        else:
            gemm(a, b, out=out)

    gemm(a, b, out=torch.empty(2, 3))  # is remembered, and would serve this one
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"gemm: out is an inference tensor, expected .* torch\.inference_mode"):
            call()
    assert bool((out == SENTINEL).all())
    with torch.inference_mode():
        call()
    assert torch.allclose(out, a @ b)


def test_numbers_of_numpy() -> None:
    a, b = floats(2, 4), floats(4, 3)
    assert torch.equal(gemm(a, b, alpha=np.float32(0.5)), gemm(a, b, alpha=0.5))
    assert torch.equal(gemm(a, b, alpha=np.int64(2)), gemm(a, b, alpha=2.0))
    codes = int8s(2, 4), int8s(3, 4)
    given = omnigemm.int8_gemm(*codes, np.float16(0.5), np.int8(2), a_zero=np.int32(3))
    assert torch.equal(given, omnigemm.int8_gemm(*codes, 0.5, 2.0, a_zero=3))
    with pytest.raises(DTypeError, match=r"alpha is np\.True_, expected a number"):
        gemm(a, b, alpha=np.True_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operands", "named", "words"),
    [((), {}, "missing a required argument: 'a'"), ((1, 2), {"alhpa": 1.0}, "unexpected keyword argument 'alhpa'")],
)
def test_arguments_of_a_plan_that_do_not_fit(operands: tuple[int, ...], named: dict[str, float], words: str) -> None:
    plan = omnigemm.plan("gemm", m=2, n=3, k=4, dtype="fp32")
    with pytest.raises(TypeError, match=f"^gemm: .*{words}"):
        plan.run(*operands, **named)
