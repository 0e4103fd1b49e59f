"""The cuda backend on a machine without a GPU: what it says about itself and about GPUs that are elsewhere."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

import omnigemm
from nvrtc_here import needs_nvrtc
from omnigemm.backends.cuda import CudaBackend, dense, gpu, jit, sm90
from omnigemm.backends.cuda.gpu import KNOWN, Gpu
from omnigemm.core.dispatch import Support
from omnigemm.core.dtypes import BY_NAME
from omnigemm.core.problem import GRANULARITIES, SIZE_LIMIT, Problem, describe
from omnigemm.core.settings import BACKEND_NAMES

H200 = KNOWN["h200"]
BACKEND = CudaBackend()
NO_GPU = "torch finds no usable NVIDIA GPU|this torch is built without CUDA"


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that has one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the backend asks: an H200, and beside it a card of another generation."""
    found = (H200, Gpu("NVIDIA L40S", (8, 9), 142))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(gpu, "of", lambda index: found[index])
    monkeypatch.setattr(jit, "driver_fault", lambda: "")


def problem(**changes: object) -> Problem:
    return dataclasses.replace(describe("fp8_gemm", m=16, n=256, k=512), **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ availability


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(("built", "words"), [(None, "built without CUDA"), ("13.0", "no usable NVIDIA GPU")])
def test_unavailable_without_a_gpu(monkeypatch: pytest.MonkeyPatch, built: str | None, words: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    answer = BACKEND.available()
    assert not answer
    assert words in answer.reason


@pytest.mark.usefixtures("_two_gpus")
def test_available_names_the_gpus_and_needs_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "available", lambda: Support(True, "NVRTC 13.9"))
    assert BACKEND.available()
    for words in ("NVIDIA H200 (sm_90, 132 multiprocessors)", "NVIDIA L40S (sm_89", "NVRTC 13.9"):
        assert words in BACKEND.available().reason
    monkeypatch.setattr(jit, "available", lambda: Support(False, "no compiler today"))
    assert BACKEND.available() == Support(False, "no compiler today")


@pytest.mark.usefixtures("_two_gpus")
def test_unavailable_with_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "available", lambda: Support(True, "NVRTC 13.9"))
    monkeypatch.setattr(jit, "driver_fault", lambda: "the driver is from the last century")
    assert BACKEND.available() == Support(False, "the driver is from the last century")


# ------------------------------------------------------------------------------------------------ supports


def test_tensors_elsewhere_are_refused() -> None:
    for device in ("cpu", "meta"):
        answer = BACKEND.supports(problem(), torch.device(device))
        assert not answer
        assert f"the tensors are on {device}" in answer.reason


@pytest.mark.usefixtures("_two_gpus")
def test_the_device_that_is_asked_about_answers() -> None:
    assert BACKEND.supports(problem(), torch.device("cuda:0"))
    assert "NVIDIA L40S is sm_89" in BACKEND.supports(problem(), torch.device("cuda:1")).reason
    # Without a number it is the current one, here the second.
    assert "NVIDIA L40S is sm_89" in BACKEND.supports(problem(), torch.device("cuda")).reason
    answer = BACKEND.supports(problem(), torch.device("cuda:2"))
    assert not answer
    assert "there is no cuda:2: torch finds 2 GPUs" in answer.reason


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp32"])
def test_fp8_runs_on_hopper_whatever_the_scales(granularity: str, out_dtype: str) -> None:
    for dtype, other in itertools.product(("e4m3", "e5m2"), repeat=2):
        one = describe(
            "fp8_gemm", m=3, n=5, k=7, dtype=dtype, weight_dtype=other, granularity=granularity, out_dtype=out_dtype
        )
        assert BACKEND.supports_on(one, H200)
        assert "NVIDIA H200" in BACKEND.supports_on(one, H200).reason


@pytest.mark.parametrize(
    ("op", "weight"),
    [("int4_gemm", None), ("grouped_gemm_contiguous", "int4"), ("grouped_gemm_masked", "int4")],
)
def test_other_operations_are_refused(op: str, weight: str | None) -> None:
    one = describe(op, m=16, n=256, k=512, weight_dtype=weight)
    answer = BACKEND.supports_on(one, H200)
    assert not answer
    assert "fp8" in answer.reason
    assert BACKEND.specs(one, H200) == ()


@pytest.mark.parametrize("op", ["grouped_gemm_contiguous", "grouped_gemm_masked"])
@pytest.mark.parametrize(
    ("dtype", "granularity"),
    [("e4m3", "128x128"), ("e5m2", "1x128"), ("int8", "token"), ("bf16", None), ("fp16", None)],
)
def test_groups_of_rows_run_on_hopper(op: str, dtype: str, granularity: str | None) -> None:
    one = describe(op, m=16, n=256, k=512, groups=9, dtype=dtype, granularity=granularity)
    assert BACKEND.supports_on(one, H200)
    assert len(BACKEND.specs(one, H200)) == 1
    assert BACKEND.specs(dataclasses.replace(one, groups=0), H200) == ()
    many = BACKEND.supports_on(dataclasses.replace(one, groups=10000), H200)
    assert not many
    assert many.reason == "10000 groups, expected at most 8192"


def test_int8_sums_that_could_overflow_are_refused() -> None:
    assert BACKEND.supports_on(describe("int8_gemm", m=16, n=256, k=131071), H200)
    answer = BACKEND.supports_on(describe("int8_gemm", m=16, n=256, k=131072), H200)
    assert not answer
    assert answer.reason == "k is 131072: sums of int8 products fit in 32 bits up to k = 131071"


def test_batches_that_cannot_be_counted_are_refused() -> None:
    assert BACKEND.supports_on(describe("int8_gemm", m=16, n=256, k=512, batch=65536), H200)
    for words, sizes in {
        "a has 2147483648 rows in all products": {"m": 2**16, "n": 8, "batch": 2**15},
        "b has 2147483648 rows in all products": {"m": 8, "n": 2**16, "batch": 2**15},
        "up to 4294967296 tiles": {"m": 2**14, "n": 2**14, "batch": 2**11},
    }.items():
        answer = BACKEND.supports_on(describe("int8_gemm", k=16, **sizes), H200)
        assert not answer
        assert words in answer.reason
    assert BACKEND.supports_on(describe("int8_gemm", m=2**30, n=2**20, k=16), H200), "a single product has no batch"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_generations_are_refused(capability: tuple[int, int]) -> None:
    """Code for sm_90a runs on nothing else, newer chips included."""
    other = Gpu("NVIDIA Other", capability, 100)
    answer = BACKEND.supports_on(problem(), other)
    assert not answer
    assert f"NVIDIA Other is sm_{capability[0]}{capability[1]}" in answer.reason
    assert BACKEND.specs(problem(), other) == ()


@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_sizes_above_the_limit_are_refused(size: str) -> None:
    assert BACKEND.supports_on(problem(**{size: SIZE_LIMIT}), H200)
    with pytest.raises(omnigemm.ShapeError, match=f"{size} is {SIZE_LIMIT + 1}, expected at most {SIZE_LIMIT}"):
        problem(**{size: SIZE_LIMIT + 1})


# ------------------------------------------------------------------------------------------------ kernels and specs


@needs_nvrtc
@pytest.mark.parametrize(
    "changes", [{}, {"m": 4096, "n": 131, "k": 100}, {"n": SIZE_LIMIT}, {"k": SIZE_LIMIT}], ids=str
)
def test_what_is_supported_has_one_kernel_that_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, int]
) -> None:
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path))
    assert BACKEND.supports_on(problem(**changes), H200)
    (spec,) = BACKEND.specs(problem(**changes), H200)
    assert spec.arch == "sm_90a"
    assert jit.compile_cubin(spec).cubin[:4] == b"\x7fELF"


@pytest.mark.usefixtures("_two_gpus")
def test_kernels_are_the_choice_and_its_runners_up() -> None:
    device = torch.device("cuda:0")
    kernels = BACKEND.kernels(problem(), device)
    assert len(kernels) > 1
    costs = [kernel.cost(problem(), device) for kernel in kernels]
    assert costs == sorted(costs)
    assert all(kernel.name.startswith("sm90_fp8_block_") for kernel in kernels)
    assert all(kernel.supports(problem(), device) for kernel in kernels)
    (spec,) = BACKEND.specs(problem(), H200)
    assert spec.name == f"omnigemm_{kernels[0].name}"


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(("change", "copied"), [({}, False), ({"k": 520}, True), ({"b_layout": "col"}, True)])
def test_kernels_say_when_operands_are_copied(change: dict[str, object], copied: bool) -> None:
    one, device = problem(**change), torch.device("cuda:0")
    assert ("operands are copied" in BACKEND.kernels(one, device)[0].supports(one, device).reason) == copied


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("words", "early"),
    [
        ({}, True),
        ({"k": 1032}, False),
        ({"op": "gemm"}, True),
        ({"op": "gemm", "b_layout": "row", "n": 1020}, False),
        ({"op": "gemm", "a_layout": "strided"}, True),
    ],
)
def test_kernels_say_when_weights_are_read_early(words: dict[str, object], early: bool) -> None:
    """Not where they are copied first, as those of A may be."""
    sizes = {"m": 4, "n": 1024, "k": 1024}
    usual = {"dtype": "bf16", "b_layout": "col"} if "op" in words else {"op": "fp8_gemm", "granularity": "token"}
    one, device = describe(**{**sizes, **usual, **words}), torch.device("cuda:0")
    with omnigemm.settings(constant_weights=True):
        answer = BACKEND.kernels(one, device)[0].supports(one, device)
    assert ("stages of weights are read before" in answer.reason) == early


def test_batches_of_nothing_need_no_kernel() -> None:
    for op, others in (("gemm", (None, 1.0, 0.0)), ("int8_gemm", (None,) * 4)):
        one = describe(op, m=2, n=3, k=4, batch=0)
        assert BACKEND.specs(one, H200) == ()
        (kernel,) = dense.kernels(one, H200)
        out = torch.empty(0, 2, 3)
        kernel.plan(one, torch.device("cuda")).launch(out, None, None, *others)
        assert out.shape == (0, 2, 3)


@pytest.mark.parametrize(("dtype", "out_dtype"), [*itertools.product(("bf16", "fp16"), ("bf16", "fp16", "fp32"))])
@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1)])
@pytest.mark.parametrize(("value", "beta"), [(6e4, 1e-3), (1e6, 1e-3), (1e-6, 1e4), (1.37, -3.0)])
def test_a_product_of_nothing_is_beta_c_rounded_once(
    dtype: str, out_dtype: str, shape: tuple[int, int], value: float, beta: float
) -> None:
    one = describe("gemm", m=2, n=3, k=0, dtype=dtype, out_dtype=out_dtype, beta=beta)
    (kernel,) = dense.kernels(one, H200)
    c = torch.full(shape, value).to(BY_NAME[dtype])
    before, out = c.clone(), torch.full((2, 3), float("nan"), dtype=BY_NAME[out_dtype])
    kernel.plan(one, torch.device("cuda")).launch(out, None, None, c, 1.0, beta)
    assert torch.equal(out, (c.float() * beta).to(out.dtype).expand(2, 3))
    assert torch.equal(c, before)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_products_of_nothing_need_no_kernel(size: str) -> None:
    one, device = problem(**{size: 0}), torch.device("cuda:0")
    assert BACKEND.supports_on(one, H200)
    assert BACKEND.specs(one, H200) == ()
    (kernel,) = BACKEND.kernels(one, device)
    launch = kernel.plan(one, device).launch
    out = torch.full((2, 3), float("nan"))
    launch(out, None, None, None, None, None)
    assert torch.equal(out, torch.zeros(2, 3))
    bias = torch.tensor([1.0, -2.0, 0.5])
    launch(out, None, None, None, None, bias)
    assert torch.equal(out, bias.expand(2, 3))


@pytest.mark.parametrize(
    ("change", "by_tma"),
    [
        ({}, True),
        ({"n": 252}, False),
        ({"n": 264}, True),
        ({"out_dtype": "fp32"}, True),
        ({"out_dtype": "fp32", "n": 252}, True),
        ({"out_dtype": "fp32", "n": 254}, False),
        ({"out_dtype": "fp32", "n": 253}, False),
    ],
)
def test_results_go_out_by_the_copy_engine_where_rows_allow(change: dict[str, object], by_tma: bool) -> None:
    one = problem(bias=True, a_dtype="e5m2", **change)
    variant = dense.variant_of(one)
    assert variant.out_by_tma == by_tma
    # The rest is the problem's own.
    for field in dataclasses.fields(sm90.Variant):
        if field.name not in ("out_by_tma", "a_turned", "b_turned", "batched", "grouping"):
            assert getattr(variant, field.name) == getattr(one, field.name)


# ------------------------------------------------------------------------------------------------ the user's view


@pytest.mark.usefixtures("_no_gpu")
def test_plans_and_explanations_carry_the_reason() -> None:
    with pytest.raises(omnigemm.UnsupportedError, match=rf"fp8_gemm.*16x256x512.*on cuda\. cuda/\*: ({NO_GPU})"):
        omnigemm.plan("fp8_gemm", m=16, n=256, k=512, device="cuda")
    found = omnigemm.explain("fp8_gemm", m=16, n=256, k=512, device="cuda")
    assert found.chosen is None
    assert [one.backend for one in found.candidates] == list(BACKEND_NAMES)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forced_backend_says_why_not(device: str) -> None:
    a, b = (torch.zeros(size, 64, device=device).to(torch.float8_e4m3fn) for size in (2, 3))
    scale = torch.ones((), device=device)
    with pytest.raises(omnigemm.UnsupportedError, match=rf"cuda/\*: ({NO_GPU})"):
        omnigemm.fp8_gemm(a, b, scale, scale, backend="cuda")


@pytest.mark.usefixtures("_two_gpus")
def test_a_forced_backend_refuses_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "available", lambda: Support(True, "NVRTC 13.9"))
    a = torch.zeros(3, 72).to(torch.float8_e4m3fn)
    with pytest.raises(omnigemm.UnsupportedError, match=r"cuda/\*: the tensors are on cpu"):
        omnigemm.fp8_gemm(a, a, 1.0, 1.0, backend="cuda")
