"""torch's default dtype and default device belong to the user's program: no result depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm import Int4Weight, Problem
from omnigemm.backends.cpu import dense, fp8, int4, int8
from omnigemm.backends.cpu.isa import int8_products_are_exact
from omnigemm.backends.cpu.kernel import CpuKernel
from omnigemm.backends.cpu.prepared import store
from omnigemm.bench import workloads
from omnigemm.ops.int4 import parts_of
from op_support import floats, forget_calls, int4_weight

Calls = dict[str, Callable[[], Any]]
LONG_K = int8.INT32_K + 9


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def without_copies(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with omnigemm.settings(weight_cache_mib=0):
            return call()

    return run


def operations() -> Calls:
    """Every operation; a name begins with the function's."""
    x, w = floats(4, 300), floats(200, 300)
    half, weight16 = x.bfloat16(), w.bfloat16()
    a8, a8_scale, a8_zero = omnigemm.quantize_int8(x, symmetric=False)
    b8, b8_scale = omnigemm.quantize_int8(w)
    long_a, long_b = (torch.randint(-128, 128, (rows, LONG_K), dtype=torch.int8) for rows in (2, 3))
    a, a_scale = omnigemm.quantize_fp8(x, granularity="1x128")
    b, b_scale = omnigemm.quantize_fp8(w, granularity="128x128")
    experts, experts_scale = omnigemm.quantize_fp8(floats(2, 200, 300), granularity="128x128")
    k_a, k_a_scale = omnigemm.quantize_fp8(floats(6, 256), granularity="1x128")
    k_b, k_b_scale = omnigemm.quantize_fp8(floats(5, 256), granularity="1x128")
    ends, k_ends, counts = (torch.tensor(values, dtype=torch.int32) for values in ([1, 4], [128, 256], [2, 1]))
    sizes = torch.tensor([(3, 200, 300), (4, 150, 0)], dtype=torch.int32)
    packed, ordered = int4_weight(200, 300), int4_weight(200, 300, symmetric=False, act_order=True)
    stack = int4_weight(200, 300, symmetric=False, experts=2)
    slab = floats(2, 2, 300)
    slab8, slab8_scale = omnigemm.quantize_fp8(slab, granularity="1x128")
    plan = omnigemm.plan("int8_gemm", m=4, n=200, k=300, a_zero=True)
    found: Calls = {
        "gemm fp32": lambda: omnigemm.gemm(x, w.t(), alpha=0.5),
        "gemm bf16 to fp32": lambda: omnigemm.gemm(half, weight16.t(), out_dtype=torch.float32),
        "gemm without K": lambda: omnigemm.gemm(half[:, :0], weight16.t()[:0], half[:, :200], beta=0.1),
        "int8_gemm": lambda: omnigemm.int8_gemm(a8, b8, a8_scale, b8_scale, a_zero=a8_zero),
        "int8_gemm numbers": lambda: omnigemm.int8_gemm(a8, b8, 0.5, 0.25, a_zero=3),
        "int8_gemm long K": lambda: omnigemm.int8_gemm(long_a, long_b, 0.5, 0.25),
        "int8_gemm one row": lambda: omnigemm.int8_gemm(a8[:1].expand(4, 300), b8, 0.5, 0.25),
        "int8_gemm plan": lambda: plan.run(a8, b8, a8_scale, b8_scale, a_zero=a8_zero),
        "fp8_gemm": lambda: omnigemm.fp8_gemm(a, b, a_scale, b_scale),
        "fp8_gemm numbers": lambda: omnigemm.fp8_gemm(a, b, 0.5, 0.25),
        "int4_gemm bf16": lambda: omnigemm.int4_gemm(half, packed),
        "int4_gemm fp16": lambda: omnigemm.int4_gemm(x.half(), ordered),
        "int4_gemm many rows": lambda: omnigemm.int4_gemm(weight16, ordered),
        "grouped_gemm": lambda: omnigemm.grouped_gemm([x, half.float()], [w.t(), w.t()], alpha=[0.5, 2.0]),
        "grouped_gemm sizes": lambda: omnigemm.grouped_gemm(
            [x, x], [w.t(), w.t()], [x[:, :200]] * 2, beta=0.1, sizes=sizes, out=[x[:, :200].clone() for _ in range(2)]
        ),
        "grouped_gemm_contiguous fp8": lambda: omnigemm.grouped_gemm_contiguous(
            a, experts, ends, a_scale=a_scale, b_scale=experts_scale
        ),
        "grouped_gemm_contiguous int4": lambda: omnigemm.grouped_gemm_contiguous(half, stack, ends),
        "grouped_gemm_masked fp8": lambda: omnigemm.grouped_gemm_masked(
            slab8, experts, counts, a_scale=slab8_scale, b_scale=experts_scale, out=slab[..., :200].clone()
        ),
        "grouped_gemm_k_contiguous": lambda: omnigemm.grouped_gemm_k_contiguous(half, weight16[:4], ends),
        "grouped_gemm_k_contiguous fp8": lambda: omnigemm.grouped_gemm_k_contiguous(
            k_a.t(), k_b.t(), k_ends, a_scale=k_a_scale, b_scale=k_b_scale
        ),
    }
    prepared = [name for name in found if name.split("_")[0] in ("fp8", "int4") or "grouped_gemm_" in name]
    return found | {f"{name}, no copies": without_copies(found[name]) for name in prepared}


def quantisers() -> Calls:
    return quantisers_of(torch.float32) | quantisers_of(torch.bfloat16)


def quantisers_of(dtype: torch.dtype) -> Calls:
    """With enough values that they are walked over in parts."""
    x, weight, w = floats(140, 2048, dtype=dtype), floats(2048, dtype=dtype), floats(200, 300, dtype=dtype)
    found: Calls = {
        "quantize_int8": lambda: omnigemm.quantize_int8(x),
        "quantize_int8 zeros": lambda: omnigemm.quantize_int8(x, symmetric=False),
        "quantize_int8 nothing": lambda: omnigemm.quantize_int8(x[:0], granularity="tensor"),
        "quantize_int4": lambda: tensors_of(omnigemm.quantize_int4(w)),
        "quantize_int4 zeros": lambda: tensors_of(omnigemm.quantize_int4(w, symmetric=False)),
        "rms_norm_quantize": lambda: omnigemm.rms_norm_quantize(x, weight, residual=x.clone()),
        "rms_norm_quantize int8": lambda: omnigemm.rms_norm_quantize(x, weight, dtype=torch.int8),
        "swiglu_quantize": lambda: omnigemm.swiglu_quantize(x, granularity="1x128"),
        "swiglu_quantize int8": lambda: omnigemm.swiglu_quantize(x, dtype=torch.int8),
        "swiglu_quantize few": lambda: omnigemm.swiglu_quantize(x[:3]),
    }
    for kind in ("tensor", "token", "1x128", "128x128"):
        found[f"quantize_fp8 {kind}"] = partial(omnigemm.quantize_fp8, x, granularity=kind)
    return {f"{name} of {dtype}": call for name, call in found.items()}


def tensors_of(weight: Int4Weight) -> list[Tensor]:
    return [*weight.state_dict().values(), weight.dequantize(), weight.dequantize(torch.bfloat16)]


def weights() -> Calls:
    """4-bit weights from every format, and what is made of them."""

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)

    n, k = 64, 256
    scales, rows = torch.rand(2, n).half(), torch.rand(n, 2).half()
    by_k, by_n, zeros = words(k // 8, n), words(k, n // 8), words(2, n // 8)
    tiles, by_row, row_zeros = words(k // 16, 2 * n), words(n, k // 8), words(n // 8, 2)
    order = torch.arange(k, dtype=torch.int32)[torch.randperm(k)] // 128
    plain, act_order = int4_weight(n, k), int4_weight(n, k, symmetric=False, act_order=True)
    state = act_order.state_dict()
    return {
        "gptq": lambda: tensors_of(Int4Weight.from_gptq(by_k, scales, zeros)),
        "gptq act-order": lambda: tensors_of(Int4Weight.from_gptq(by_k, scales, zeros, order)),
        "awq": lambda: tensors_of(Int4Weight.from_awq(by_n, scales, zeros)),
        "marlin": lambda: tensors_of(Int4Weight.from_marlin(tiles, scales)),
        "compressed-tensors": lambda: tensors_of(
            Int4Weight.from_compressed_tensors(by_row, rows, weight_zero_point=row_zeros)
        ),
        "stack": lambda: [one for each in Int4Weight.stack([plain, plain]) for one in tensors_of(each)],
        "state": lambda: tensors_of(Int4Weight.from_state_dict(state)),
        "checked": lambda: tensors_of(Int4Weight(**_parts(act_order), k=k, group_size=32)),
    }


def _parts(weight: Int4Weight) -> dict[str, Any]:
    return {"qweight": weight.qweight, "scales": weight.scales, "zeros": weight.zeros, "perm": weight.perm}


def kernels() -> Calls:
    """Every kernel of the processor, also those that nothing chooses here."""
    found: Calls = {}

    def run(launch: Callable[..., None], like: Tensor, *operands: Any) -> Tensor:
        out = torch.full_like(like, float("nan"))
        launch(out, *operands)
        return out

    def add(family: str, all_kernels: Sequence[CpuKernel], problem: Problem, like: Tensor, *operands: Any) -> None:
        for kernel in all_kernels:
            if kernel.accepts(problem):
                found[f"{family}/{kernel.name} {like.dtype}"] = partial(run, kernel.bind(problem), like, *operands)

    m, n, k = 4, 200, 300
    x, w = floats(m, k), floats(n, k)
    a8, a8_scale, zero = omnigemm.quantize_int8(x, symmetric=False)
    b8, b8_scale = omnigemm.quantize_int8(w)
    a, a_scale = omnigemm.quantize_fp8(x, granularity="1x128")
    b, b_scale = omnigemm.quantize_fp8(w, granularity="128x128")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out, size = x[:, :n].to(dtype), {"m": m, "n": n, "k": k}
        problem = omnigemm.plan("int8_gemm", **size, out_dtype=dtype).problem
        add("int8", int8.KERNELS, problem, out, a8, b8, a8_scale, b8_scale, zero, None, None)
        problem = omnigemm.plan("fp8_gemm", **size, granularity="128x128", out_dtype=dtype).problem
        add("fp8", fp8.KERNELS, problem, out, a, b, a_scale, b_scale, None)
        problem = omnigemm.plan("gemm", **size, dtype=dtype).problem
        add("gemm", dense.KERNELS, problem, out, x.to(dtype), w.to(dtype).t(), None, 1.0, 0.0)
        if dtype != torch.float32:
            packed = int4_weight(n, k, symmetric=False, dtype=dtype)
            problem = omnigemm.plan("int4_gemm", **size, dtype=dtype, symmetric=False, group_size=32).problem
            add("int4", int4.KERNELS, problem, out, x.to(dtype), parts_of(packed), None)
    return found


def others() -> Calls:
    one = next(case for case in workloads.CASES if case.op == "gemm")
    return {
        "explain": lambda: str(omnigemm.explain("int8_gemm", m=4, n=8, k=16)),
        "workload": lambda: list(workloads.dense(one, workloads.Size(m=2, n=3, k=4))),
    }


DEFAULTS = {
    "bf16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
}


def fresh(call: Callable[[], Any]) -> Any:
    """As the first call in a process."""
    forget_calls()
    store.clear()
    int8_products_are_exact.cache_clear()
    result = call()
    return [result] if isinstance(result, (Tensor, str)) else list(result)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("made", [operations, quantisers, weights, kernels, others], ids=lambda made: made.__name__)
def test_nothing_depends_on_defaults(made: Callable[[], Calls], default: str) -> None:
    calls = made()
    expected = {name: fresh(call) for name, call in calls.items()}
    for name, call in calls.items():
        with DEFAULTS[default]():
            found = fresh(call)
        assert len(found) == len(expected[name])
        for one, other in zip(found, expected[name], strict=True):
            if isinstance(other, str):
                assert one == other, name
                continue
            assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape), name
            assert torch.equal(one.double(), other.double()), name


def test_every_function_is_tried() -> None:
    public = {name for name in omnigemm.__all__ if "gemm" in name or "quantize" in name}
    assert public == {name.split()[0].rstrip(",") for name in (*operations(), *quantisers())}
