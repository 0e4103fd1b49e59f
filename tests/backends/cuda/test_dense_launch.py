"""What the host hands to the dense kernels, by tensors and by addresses: a stand-in takes the launches down."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omnigemm.backends.cuda import dense, gemm, sm90
from omnigemm.backends.cuda.by_layout import ByLayout
from omnigemm.backends.cuda.launch import Matrix
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import describe

STREAM = 0x70
PLAIN = Config(False, 2, 1, 128, 4, right_share=2)
SWAPPED = Config(True, 1, 1, 16, 4)
FP8 = torch.float8_e4m3fn


class Launcher:
    """A launch is (stream, addresses of the matrices, values), and its values must fit the kernel's structure."""

    launches: list[tuple[int, tuple[int, ...], tuple[Any, ...]]] = []  # noqa: RUF012

    made: list[Any] = []  # noqa: RUF012

    def __init__(self, kernel: object, *, values: str, **options: Any) -> None:
        self.format = struct.Struct(values)
        self.made.append(options["matrices"])

    def launch(self, stream: int, addresses: tuple[int, ...], values: tuple[Any, ...]) -> None:
        self.format.pack(*values)
        self.launches.append((stream, addresses, values))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, which a `with torch.cuda.device` changes."""
    current = [0]

    @contextlib.contextmanager
    def other(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    Launcher.launches.clear()
    for module in (dense, gemm):
        monkeypatch.setattr(module, "Launcher", Launcher)
        monkeypatch.setattr(module, "raw_stream", lambda index: STREAM + index)
    monkeypatch.setattr(dense, "loaded", lambda *_: SimpleNamespace(kernel=None))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", other)
    return current


def aligned(*shape: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> Tensor:
    """Ones that begin `shift` elements behind a multiple of 16 bytes."""
    size, count = dtype.itemsize, torch.Size(shape).numel()
    room = torch.zeros((count + 32) * size, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + shift * size
    return room[start : start + count * size].view(dtype).view(shape)


def places(*tensors: Tensor | None) -> list[int]:
    return [one.data_ptr() for one in tensors if one is not None]


def only_launch() -> tuple[tuple[int, ...], tuple[Any, ...]]:
    ((stream, addresses, values),) = Launcher.launches
    assert stream == STREAM
    Launcher.launches.clear()
    return addresses, values


def one_product(config: Config, **words: Any) -> dense.Launch:
    problem = describe("fp8_gemm", m=4, n=256, k=256, granularity="128x128", **words)
    return dense.Launch(problem, config, 0, 132, early=3)


def fp8_operands() -> list[Tensor]:
    a, b = aligned(4, 256, dtype=FP8), aligned(256, 256, dtype=FP8)
    return [aligned(4, 256, dtype=torch.bfloat16), a, b, aligned(4, 2), aligned(2, 2)]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("config", [PLAIN, SWAPPED], ids=["plain", "swapped"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("zeros", [0, 1, 4])
def test_addresses_and_tensors_give_the_same_launch(config: Config, biased: bool, zeros: int) -> None:
    tensors = fp8_operands()
    out, a, b, a_scale, b_scale = tensors
    bias = aligned(256, dtype=torch.float16) if biased else None
    zero, sums = (aligned(zeros), aligned(256)) if zeros else (None, None)
    run = one_product(config, bias=biased)
    run(*tensors, bias, zero, sums)
    addresses, values = only_launch()
    left, right = a.data_ptr(), b.data_ptr()
    assert addresses == ((right, left) if config.swap else (left, right)) + (out.data_ptr(),)
    at_bias, kind = (bias.data_ptr(), sm90.TYPES["fp16"]) if bias is not None else (0, 0)
    of_zero = (int(zeros > 1), *(places(zero, sums) or (0, 0)))
    assert values == (*places(a_scale, b_scale), at_bias, out.data_ptr(), 256, 4, kind, 3, *of_zero)

    at = run.bind_addresses(*tensors, bias, zero, sums)
    assert at is not None
    assert at(*places(*tensors, bias, zero, sums))
    assert only_launch() == (addresses, values)


def test_addresses_that_will_not_do_are_left_to_tensors(device: list[int]) -> None:
    """Odd ones, and those of another device than the current one."""
    run, tensors = one_product(PLAIN), fp8_operands()
    at = run.bind_addresses(*tensors, None)
    assert at is not None
    for which, tensor in enumerate(tensors):
        odd = list(tensors)
        odd[which] = aligned(*tensor.shape, dtype=tensor.dtype, shift=1)
        assert not at(*places(*odd))
        assert Launcher.launches == []
        run(*odd, None)
        addresses, values = only_launch()
        assert all(one % 16 == 0 for one in (*addresses, *values[:4]))
    device[0] = 1
    assert not at(*places(*tensors))
    assert Launcher.launches == []
    run(*tensors, None)
    assert only_launch()[0][2] == tensors[0].data_ptr()
    assert device == [1]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("odd", ["a", "b", "scales"])
def test_a_copy_of_b_is_not_loaded_early(odd: str) -> None:
    """That no work before writes the weight was said of the weight: its copy was made just now."""
    run = one_product(SWAPPED)
    out, a, b, a_scale, b_scale = fp8_operands()
    early = 8  # of the values
    if odd == "scales":
        a_scale, b_scale = aligned(4, 2, shift=1), aligned(2, 2, shift=1)
    else:
        a, b = (aligned(*x.shape, dtype=FP8, shift=int(name == odd)) for name, x in (("a", a), ("b", b)))
    run(out, a, b, a_scale, b_scale, None)
    assert only_launch()[1][early - 1] == (0 if odd == "b" else 3)
    run(*fp8_operands(), None)  # the launch itself is as it was
    assert only_launch()[1][early - 1] == 3

    sixteen = gemm.Gemm(describe("gemm", m=4, n=256, k=256, dtype="bf16", b_layout="col"), SWAPPED, 0, 132, early=3)
    out, a, b = (aligned(*shape, dtype=torch.bfloat16) for shape in ((4, 256), (4, 256), (256, 256)))
    if odd != "scales":
        a, b = (aligned(*x.shape, dtype=x.dtype, shift=int(name == odd)) for name, x in (("a", a), ("b", b)))
    sixteen(out, a, b.t(), None, 1.0, 0.0)
    assert only_launch()[1][early - 1] == (0 if odd == "b" else 3)


@pytest.mark.usefixtures("device")
def test_what_must_be_copied_has_no_launch_by_addresses() -> None:
    run, (out, a, b, a_scale, b_scale) = one_product(PLAIN), fp8_operands()
    assert run.bind_addresses(out, a, b, aligned(2, 4).t(), b_scale, None) is None
    assert run.bind_addresses(out, aligned(4, 257, dtype=FP8)[:, :256], b, a_scale, b_scale, None) is None
    assert run.bind_addresses(out, a, b, a_scale, b_scale, aligned(512)[::2]) is None


@pytest.mark.usefixtures("device")
def test_int8_launches_by_addresses_without_zero_points() -> None:
    problem = describe("int8_gemm", m=4, n=256, k=256)
    a, b = aligned(4, 256, dtype=torch.int8), aligned(256, 256, dtype=torch.int8)
    out, bias = aligned(4, 256, dtype=torch.bfloat16), aligned(256)
    operands = out, a, b, aligned(4), aligned(256), None, bias, None
    run = dense.Int8(dense.Launch(problem, PLAIN, 0, 132), None)
    run(*operands)
    wanted = only_launch()
    at = run.bind_addresses(*operands)
    assert at is not None
    assert at(*places(*operands))
    assert only_launch() == wanted
    batch = aligned(2, 4, 256, dtype=torch.bfloat16)
    assert run.bind_addresses(batch, *operands[1:]) is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_launches_by_addresses_with_zero_points_if_row_sums_are_given(with_bias: bool) -> None:
    problem = describe("int8_gemm", m=4, n=256, k=256, a_zero=True, bias=with_bias)
    a, b = aligned(4, 256, dtype=torch.int8), aligned(256, 256, dtype=torch.int8)
    out, bias = aligned(4, 256, dtype=torch.bfloat16), aligned(256) if with_bias else None
    zero, sums = aligned(4, dtype=torch.int32), aligned(256, dtype=torch.int32)
    operands = out, a, b, aligned(4), aligned(256), zero, bias
    made: Any = lambda matrix: sums  # noqa: E731
    run = dense.Int8(dense.Launch(problem, PLAIN, 0, 132), made)
    run(*operands, sums)
    wanted = only_launch()
    assert {zero.data_ptr(), sums.data_ptr()} <= {*wanted[1]}
    at = run.bind_addresses(*operands, sums)
    assert at is not None
    assert at(*places(*operands, sums))
    assert only_launch() == wanted
    assert run.bind_addresses(*operands, None) is None  # sums are made in every call
    assert run.bind_addresses(*operands[:5], None, bias, sums) is None  # and may be given for nothing


def sixteen(**words: Any) -> tuple[gemm.Gemm, Sequence[Tensor]]:
    problem = dataclasses.replace(describe("gemm", m=4, n=256, k=256, dtype="bf16", b_layout="col"), **words)
    a, b = aligned(4, 256, dtype=torch.bfloat16), aligned(256, 256, dtype=torch.bfloat16).t()
    return gemm.Gemm(problem, PLAIN, 0, 132), (aligned(4, 256, dtype=torch.bfloat16), a, b)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("c", [None, "row", "whole"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_factors_come_before_addresses(c: str | None, beta: float) -> None:
    adds = c is not None and beta != 0.0
    run, (out, a, b) = sixteen(c=adds, scaled=True)
    added = None if c is None else aligned(1 if c == "row" else 4, 256, dtype=torch.bfloat16)
    run(out, a, b, added, 2.0, beta)
    addresses, values = only_launch()
    assert addresses == tuple(places(a, b, out))
    of_c = (0, 0, 0, 0)
    if adds and added is not None:
        of_c = added.data_ptr(), 0 if c == "row" else 256, 1, sm90.TYPES["bf16"]
    assert values == (0, 0, 0, out.data_ptr(), 256, 4, 0, 0, 0, 0, 0, 2.0, beta, *of_c)
    at = run.bind_addresses(out, a, b, added, 2.0, beta)
    assert at is not None
    assert at(2.0, beta, *places(out, a, b, added))
    assert only_launch() == (addresses, values)


def test_sixteen_bits_on_another_device_or_at_odd_addresses(device: list[int]) -> None:
    run, (out, a, b) = sixteen()
    at = run.bind_addresses(out, a, b, None, 1.0, 0.0)
    assert at is not None
    odd = aligned(4, 256, dtype=torch.bfloat16, shift=1)
    assert not at(1.0, 0.0, *places(out, odd, b))
    run(out, odd, b, None, 1.0, 0.0)
    assert all(one % 16 == 0 for one in only_launch()[0])
    assert run.bind_addresses(aligned(2, 4, 256, dtype=torch.bfloat16), a, b, None, 1.0, 0.0) is None
    device[0] = 1
    assert not at(1.0, 0.0, *places(out, a, b))
    assert Launcher.launches == []
    run(out, a, b, None, 1.0, 0.0)
    assert only_launch()[0] == tuple(places(a, b, out))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("pitch", [256, 260, 257, 258])
@pytest.mark.parametrize("config", [PLAIN, SWAPPED, Config(False, 1, 1, 48, 4)], ids=["plain", "swapped", "48 columns"])
def test_rows_of_fp32_results_may_begin_anywhere(config: Config, pitch: int) -> None:
    """They are written in place, by the copy engine if it can: only then there is a map of them."""
    a, b = aligned(4, 256, dtype=torch.bfloat16), aligned(256, 256, dtype=torch.bfloat16).t()
    out = aligned(4, pitch)[:, :256]
    problem = describe("gemm", m=4, n=256, k=256, dtype="bf16", b_layout="col", out_dtype="fp32")
    gemm.Gemm(problem, config, 0, 132)(out, a, b, None, 1.0, 0.0)
    addresses, values = only_launch()
    assert addresses[2] == values[3] == out.data_ptr()
    store = Launcher.made[-1][2]
    assert (store is not None) == (config is PLAIN and pitch % 4 == 0)
    if store is not None:
        assert store == Matrix(256, 4, 4, 4 * pitch, (32, 64))


@pytest.mark.usefixtures("device")
def test_rows_of_16_bit_results_must_not() -> None:
    run, (_, a, b) = sixteen()
    run(aligned(4, 257, dtype=torch.bfloat16)[:, :256], a, b, None, 1.0, 0.0)
    only_launch()
    assert Launcher.made[-1][2] == Matrix(256, 4, 2, 512, (64, 64))  # of a copy


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("fetch", sm90.FETCHES)
@pytest.mark.parametrize("config", [PLAIN, SWAPPED], ids=["plain", "swapped"])
def test_operands_are_fetched_as_the_config_says(config: Config, fetch: int) -> None:
    config = dataclasses.replace(config, fetch=fetch)
    out, *operands = fp8_operands()
    one_product(config).bind(out, *operands, None)
    assert [one.fetch for one in Launcher.made[-1][:2]] == [fetch, fetch]
    a, b = aligned(4, 256, dtype=torch.bfloat16), aligned(256, 256, dtype=torch.bfloat16)
    problem = describe("gemm", m=4, n=256, k=256, dtype="bf16", b_layout="col")
    gemm.Gemm(problem, config, 0, 132).bind(out, a, b.t(), None, 1.0, 0.0)
    assert [one.fetch for one in Launcher.made[-1][:2]] == [fetch, fetch]


def test_layouts_that_a_plan_remembers_are_bounded(device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByLayout, "LIMIT", 3)
    launch = one_product(PLAIN)
    _, *others = fp8_operands()
    for step in range(256, 256 + 8 * 8, 8):  # slices of ever wider results
        out = aligned(4, step, dtype=torch.bfloat16)[:, :256]
        launch(out, *others, None)
        _, values = only_launch()
        assert step in values
        assert 1 <= len(launch._launchers) <= 3


def test_a_layout_is_prepared_once_also_where_nothing_comes_of_it() -> None:
    made: list[int] = []
    kept: ByLayout[int | None] = ByLayout()
    for _ in range(3):
        assert kept.get((1, 2), lambda: made.append(1)) is None
    assert (len(made), len(kept)) == (1, 1)
