"""The stand-in for a vendor library does what cuBLAS documents: otherwise what it lets pass would prove nothing."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .conftest import Standin

SUCCESS, NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 7, 15
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CODES = {F32: 0, F16: 2, BF16: 14}
TYPES = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)]
INT, LONG, POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
MATRIX = [POINTER, INT, INT, LONG]
SIGNATURE = [POINTER, *[INT] * 5, POINTER, *MATRIX, *MATRIX, POINTER, *MATRIX, INT, INT, INT]


def create(standin: Standin) -> int:
    handle = POINTER()
    assert standin.lib.cublasCreate_v2(ctypes.byref(handle)) == SUCCESS
    assert handle.value
    return handle.value


@dataclass(frozen=True)
class Call:
    """The arguments of cublasGemmStridedBatchedEx, in its order."""

    handle: int | None
    transa: int = 0
    transb: int = 0
    m: int = 2
    n: int = 3
    k: int = 4
    alpha: Any = field(default_factory=lambda: ctypes.pointer(ctypes.c_float(1)))
    a: int | None = None
    a_type: int = 0
    lda: int = 2
    stride_a: int = 0
    b: int | None = None
    b_type: int = 0
    ldb: int = 4
    stride_b: int = 0
    beta: Any = field(default_factory=lambda: ctypes.pointer(ctypes.c_float(0)))
    c: int | None = None
    c_type: int = 0
    ldc: int = 2
    stride_c: int = 0
    batch: int = 1
    compute: int = 68
    algo: int = -1

    def __call__(self, standin: Standin) -> int:
        function = standin.lib["cublasGemmStridedBatchedEx"]  # a fresh object: its types are nobody else's
        function.argtypes = SIGNATURE
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        status = function(*(ctypes.cast(x, POINTER) if isinstance(x, ctypes._Pointer) else x for x in values))
        return int(status)


def stored(batch: int, columns: int, lead: int, dtype: torch.dtype) -> Tensor:
    """Column-major matrices as torch sees them: [batch, columns, leading dimension]. Values whose sums are exact."""
    return (torch.randint(-16, 17, (batch, columns, lead)) / 8).to(dtype)


def matrix(storage: Tensor, rows: int, transposed: int) -> Tensor:
    """op(X) in float64, of a storage whose matrices have this many rows as stored."""
    columns_first = storage.double()[:, :, :rows]
    return columns_first if transposed else columns_first.mT


@dataclass
class Product:
    """A call on tensors, all leading dimensions and strides larger than they need be, and what it should give."""

    call: Call
    c: Tensor
    expected: Tensor
    kept: tuple[Tensor, ...]


def product(
    handle: int,
    types: tuple[torch.dtype, torch.dtype] = (F32, F32),
    transposed: tuple[int, int] = (0, 0),
    size: tuple[int, int, int] = (5, 6, 7),
    batch: int = 1,
    shared: str = "",
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Product:
    (ta, tb), (m, n, k), (given, wanted) = transposed, size, types
    a_rows, a_columns = (k, m) if ta else (m, k)
    b_rows, b_columns = (n, k) if tb else (k, n)
    a = stored(1 if "a" in shared else batch, a_columns + 1, a_rows + 2, given)
    b = stored(1 if "b" in shared else batch, b_columns + 2, b_rows + 1, given)
    c = stored(batch, n + 1, m + 3, wanted)
    expected = c.double()
    part = expected[:, :n, :m]
    result = alpha * matrix(a[:, :a_columns], a_rows, ta) @ matrix(b[:, :b_columns], b_rows, tb)
    part.copy_(result.mT + (beta * part if beta else 0))
    factors = [ctypes.pointer(ctypes.c_float(x)) for x in (alpha, beta)]
    call = Call(
        handle, ta, tb, m, n, k,
        factors[0], a.data_ptr(), CODES[given], a.size(2), 0 if "a" in shared else a.stride(0),
        b.data_ptr(), CODES[given], b.size(2), 0 if "b" in shared else b.stride(0),
        factors[1], c.data_ptr(), CODES[wanted], c.size(2), c.stride(0), batch,
    )  # fmt: skip
    return Product(call, c, expected, (a, b))


def check(standin: Standin, given: Product) -> None:
    """The exact result, rounded once; what lies between the columns is left alone."""
    assert given.call(standin) == SUCCESS
    assert given.expected.isfinite().all()
    assert torch.equal(given.c, given.expected.to(given.c.dtype))  # few bits: rounding by way of float32 is the same


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)], ids=str)
def test_every_transposition_and_type(
    standin: Standin, transposed: tuple[int, int], types: tuple[torch.dtype, torch.dtype]
) -> None:
    handle = create(standin)
    for size in [(1, 1, 1), (5, 6, 7), (8, 3, 2), (1, 9, 33), (17, 1, 64)]:
        check(standin, product(handle, types, transposed, size))


@pytest.mark.parametrize("shared", ["", "a", "b", "ab"])
@pytest.mark.parametrize("transposed", [(0, 0), (1, 0)], ids=str)
def test_batches_and_stride_0(standin: Standin, transposed: tuple[int, int], shared: str) -> None:
    check(standin, product(create(standin), (F16, F16), transposed, batch=4, shared=shared, beta=0.5))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.0), (-0.5, 1.0), (1.0, -0.25), (0.0, 3.0), (0.0, 0.0)])
def test_alpha_and_beta(standin: Standin, alpha: float, beta: float, types: tuple[torch.dtype, torch.dtype]) -> None:
    check(standin, product(create(standin), types, (1, 0), batch=2, alpha=alpha, beta=beta))


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_c_is_read_only_if_beta_is_not_0(standin: Standin, types: tuple[torch.dtype, torch.dtype]) -> None:
    handle = create(standin)
    given = product(handle, types)
    given.c[:, :6, :5] = torch.nan
    check(standin, given)
    given = product(handle, types, beta=1.0)
    given.c[0, 0, 0] = torch.nan
    assert given.call(standin) == SUCCESS
    assert given.c.isnan().sum() == 1
    assert given.c[0, 0, 0].isnan()


def test_real_numbers_in_float32(standin: Standin) -> None:
    a, b = torch.randn(40, 30), torch.randn(30, 20)
    c = torch.empty(20, 40)  # column-major storage of the product
    call = Call(
        create(standin), 1, 1, 40, 20, 30, a=a.data_ptr(), lda=30, b=b.data_ptr(), ldb=20, c=c.data_ptr(), ldc=40
    )
    assert call(standin) == SUCCESS
    torch.testing.assert_close(c.mT, (a.double() @ b.double()).float(), rtol=2**-23, atol=1e-12)
    c.zero_()
    assert replace(call, compute=77)(standin) == SUCCESS
    torch.testing.assert_close(c.mT, (a.double() @ b.double()).float(), rtol=2**-23, atol=1e-12)


@pytest.mark.parametrize(("m", "n", "k", "batch"), [(0, 3, 4, 1), (2, 0, 4, 1), (2, 3, 4, 0)])
def test_nothing_to_do_touches_nothing(standin: Standin, m: int, n: int, k: int, batch: int) -> None:
    assert Call(create(standin), m=m, n=n, k=k, batch=batch)(standin) == SUCCESS  # with null pointers


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_an_empty_sum_still_scales_c(standin: Standin, beta: float) -> None:
    check(standin, product(create(standin), size=(3, 4, 0), beta=beta))


# ---- Its other products


def single(standin: Standin, given: Product, **changes: Any) -> int:
    """The same product by cublasGemmEx, which has no steps and no batch."""
    function = standin.lib["cublasGemmEx"]
    function.argtypes = [kind for kind in SIGNATURE[:-3] if kind is not LONG] + [INT, INT]
    call = replace(given.call, **changes)
    names = [name for name in call.__dataclass_fields__ if not name.startswith("stride") and name != "batch"]
    values = [getattr(call, name) for name in names]
    return int(function(*(ctypes.cast(x, POINTER) if isinstance(x, ctypes._Pointer) else x for x in values)))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_single_products(standin: Standin, transposed: tuple[int, int], types: tuple[torch.dtype, torch.dtype]) -> None:
    given = product(create(standin), types, transposed, alpha=2.0, beta=0.5)
    assert single(standin, given) == SUCCESS
    assert torch.equal(given.c, given.expected.to(given.c.dtype))
    assert single(standin, given, lda=1, m=2) == INVALID_VALUE
    assert single(standin, given, algo=50) == NOT_SUPPORTED


def grouped(standin: Standin, handle: int, given: list[Product], **changes: int) -> int:
    """The products by one call of cublasGemmGroupedBatchedEx, each a group of its own."""
    calls = [one.call for one in given]
    ints = {
        name: (INT * len(calls))(*(getattr(call, name) for call in calls))
        for name in ("transa", "transb", "m", "n", "k", "lda", "ldb", "ldc")
    }
    addresses = {name: (POINTER * len(calls))(*(getattr(call, name) for call in calls)) for name in ("a", "b", "c")}
    factors = [(ctypes.c_float * len(calls))(*(getattr(x, name)[0] for x in calls)) for name in ("alpha", "beta")]
    kinds = {name: changes.get(name, getattr(calls[0], name)) for name in ("a_type", "b_type", "c_type", "compute")}
    status = standin.lib["cublasGemmGroupedBatchedEx"](
        POINTER(handle), ints["transa"], ints["transb"], ints["m"], ints["n"], ints["k"],
        factors[0], addresses["a"], kinds["a_type"], ints["lda"], addresses["b"], kinds["b_type"], ints["ldb"],
        factors[1], addresses["c"], kinds["c_type"], ints["ldc"],
        len(calls), (INT * len(calls))(*[1] * len(calls)), kinds["compute"],
    )  # fmt: skip
    return int(status)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_grouped_products(standin: Standin, dtype: torch.dtype) -> None:
    handle = create(standin)
    some = [
        product(handle, (dtype, dtype), transposed, size, alpha=alpha, beta=beta)
        for transposed, size, alpha, beta in [
            ((0, 0), (5, 6, 7), 1.0, 0.0), ((1, 0), (1, 9, 3), 2.0, 0.5), ((1, 1), (8, 1, 4), -1.0, 1.0),
        ]
    ]  # fmt: skip
    assert grouped(standin, handle, some) == SUCCESS
    for one in some:
        assert torch.equal(one.c, one.expected.to(one.c.dtype))
    log = standin.log()
    assert log[1] == "gemm_grouped h1 groups=3"
    assert [line.split()[0] for line in log[2:]] == ["group"] * 3
    assert grouped(standin, handle, some, c_type=0 if dtype != F32 else 2) == NOT_SUPPORTED
    shifted = replace(some[1], call=replace(some[1].call, b=(some[1].call.b or 0) + 8))
    assert grouped(standin, handle, [some[0], shifted]) == INVALID_VALUE


def test_setting_the_stream_takes_the_workspace_away(standin: Standin) -> None:
    handle = create(standin)
    standin.lib.cublasSetWorkspace_v2(POINTER(handle), POINTER(0x200), ctypes.c_size_t(16))
    check(standin, product(handle))
    assert "workspace=0x200" in standin.log()[-1]
    standin.lib.cublasSetStream_v2(POINTER(handle), POINTER(0x10))
    check(standin, product(handle))
    assert "workspace=0x0" in standin.log()[-1]


# ---- Rounding


def dot(standin: Standin, a: Tensor, b: list[float]) -> Tensor:
    """Each row of a times b, in a's type."""
    weights = torch.tensor(b, dtype=a.dtype)
    assert torch.equal(weights.double(), torch.tensor(b, dtype=torch.float64))
    (m, k), code = a.shape, CODES[a.dtype]
    c = torch.empty(m, dtype=a.dtype)
    call = Call(
        create(standin), 1, 0, m, 1, k, a=a.data_ptr(), a_type=code, lda=k,
        b=weights.data_ptr(), b_type=code, ldb=k, c=c.data_ptr(), c_type=code, ldc=m,
    )  # fmt: skip
    assert call(standin) == SUCCESS
    return c


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_16_bit_number_is_read_and_written(standin: Standin, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    result = dot(standin, every[:, None], [1.0])
    assert torch.equal(result.isnan(), every.isnan())
    some = ~every.isnan() & (every != 0)  # a sum that starts with +0 has no -0
    assert torch.equal(bits(result[some]), bits(every[some]))
    assert (result[every == 0] == 0).all()


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_between_any_two_neighbours_it_rounds_to_nearest_even(
    standin: Standin, sign: float, dtype: torch.dtype
) -> None:
    infinity = int(bits(torch.tensor([torch.inf], dtype=dtype)))
    low = torch.arange(0, infinity - 1, dtype=torch.int16)  # with low + 1: all pairs of finite neighbours, 0 included
    pair = torch.stack([low.view(dtype), (low + 1).view(dtype)], dim=1)
    for weights, expected in [([0.5, 0.5], low + low % 2), ([0.75, 0.25], low), ([0.25, 0.75], low + 1)]:
        result = dot(standin, pair, [sign * w for w in weights])
        assert torch.equal(bits(result.abs()), expected)
        assert (result[result != 0].sign() == sign).all()


@pytest.mark.parametrize(("dtype", "half_step"), [(F16, 2.0**-11), (BF16, 2.0**-8)])
def test_rounding_happens_once(standin: Standin, dtype: torch.dtype, half_step: float) -> None:
    # A float32 on the way would drop 2^-40, and then round the tie down.
    row = torch.tensor([[1.0, half_step, 2.0**-20]], dtype=dtype)
    assert dot(standin, row, [1.0, 1.0, 2.0**-20]).item() == 1 + 2 * half_step
    assert dot(standin, row, [1.0, 1.0, -(2.0**-20)]).item() == 1
    assert dot(standin, row, [1.0, 1.0, 0.0]).item() == 1


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_overflow_is_infinite_from_half_a_step_on(standin: Standin, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    half_step = {F16: 16.0, BF16: 2.0**119}[dtype]
    rows = torch.tensor(
        [[top, half_step], [top, half_step * (1 - 2.0**-7)], [-top, -half_step], [top, top]], dtype=dtype
    )
    assert dot(standin, rows, [1.0, 1.0]).tolist() == [torch.inf, top, -torch.inf, torch.inf]
    assert dot(standin, torch.full((1, 2), torch.inf, dtype=dtype), [1.0, -1.0]).isnan().all()


def test_float32_overflows_too(standin: Standin) -> None:
    rows = torch.tensor([[3e38, 3e38], [-3e38, -3e38], [1e-45, 0.0]])
    assert dot(standin, rows, [1.0, 1.0]).tolist() == [torch.inf, -torch.inf, rows[2, 0].item()]


# ---- What it refuses


INVALID: list[dict[str, Any]] = [
    {"handle": None},
    *({name: value} for name in ("transa", "transb") for value in (-1, 3)),
    *({name: -1} for name in ("m", "n", "k", "batch")),
    {"lda": 4},
    {"transa": 1, "lda": 6},
    {"ldb": 6},
    {"transb": 1, "ldb": 5},
    {"ldc": 4},
    {"m": 0, "lda": 0},
    {"k": 0, "ldb": 0},
    {"m": 0, "ldc": 0},
    {"a": None},
    {"b": None},
    {"c": None},
    {"alpha": None},
    {"beta": None},
]
UNSUPPORTED: list[dict[str, Any]] = [
    {"a_type": 1, "b_type": 1},
    {"a_type": 2},
    {"b_type": 14},
    {"c_type": 2},
    {"a_type": 2, "b_type": 2, "c_type": 14},
    {"a_type": 3, "b_type": 3, "c_type": 10},
    {"a_type": 2, "b_type": 2, "compute": 77},
    {"compute": 64},
    {"compute": 0},
    {"algo": 24},
]


@pytest.mark.parametrize(
    ("change", "status"),
    [*((change, INVALID_VALUE) for change in INVALID), *((change, NOT_SUPPORTED) for change in UNSUPPORTED)],
    ids=str,
)
def test_refused_arguments(standin: Standin, change: dict[str, Any], status: int) -> None:
    given = product(create(standin))
    before = given.c.clone()
    assert replace(given.call, **change)(standin) == status
    assert standin.log()[-1].endswith(f" -> {status}")
    assert torch.equal(given.c, before)
    check(standin, given)  # and the handle is still good


def test_the_smallest_leading_dimensions_do(standin: Standin) -> None:
    handle = create(standin)
    a, b, c = torch.ones(20), torch.ones(20), torch.zeros(20)
    call = Call(handle, a=a.data_ptr(), b=b.data_ptr(), c=c.data_ptr())
    for change in ({}, {"transa": 1, "lda": 4}, {"transb": 1, "ldb": 3}):
        assert replace(call, **change)(standin) == SUCCESS
        assert c.tolist() == [4.0] * 6 + [0.0] * 14
    for name, smallest in (("lda", 2), ("ldb", 4), ("ldc", 2)):
        assert replace(call, **{name: smallest - 1})(standin) == INVALID_VALUE


def test_handles_end(standin: Standin) -> None:
    lib, handle = standin.lib, create(standin)
    other = create(standin)
    assert standin.live_handles() == 2
    assert lib.cublasDestroy_v2(POINTER(handle)) == SUCCESS
    assert standin.live_handles() == 1
    assert product(handle).call(standin) == NOT_INITIALIZED
    assert product(0x1234).call(standin) == NOT_INITIALIZED
    for bad, status in [(handle, NOT_INITIALIZED), (0x1234, NOT_INITIALIZED), (None, INVALID_VALUE)]:
        assert lib.cublasSetStream_v2(POINTER(bad), None) == status
        assert lib.cublasSetMathMode(POINTER(bad), 0) == status
        assert lib.cublasSetWorkspace_v2(POINTER(bad), None, ctypes.c_size_t(0)) == status
        assert lib.cublasDestroy_v2(POINTER(bad)) == status
    assert lib.cublasCreate_v2(None) == INVALID_VALUE
    assert lib.cublasSetMathMode(POINTER(other), 9) == INVALID_VALUE
    assert lib.cublasSetWorkspace_v2(POINTER(other), None, ctypes.c_size_t(1)) == INVALID_VALUE
    standin.reset()
    assert standin.live_handles() == 0
    assert product(other).call(standin) == NOT_INITIALIZED
    assert create(standin) not in (handle, other)


# ---- Its controls


def test_log(standin: Standin, standin_runtime: Standin) -> None:
    lib, handle = standin.lib, create(standin)
    lib.cublasSetStream_v2(POINTER(handle), POINTER(0x10))
    lib.cublasSetMathMode(POINTER(handle), 3)
    lib.cublasSetWorkspace_v2(POINTER(handle), POINTER(0x200), ctypes.c_size_t(2**33))
    given = product(handle, (F16, F32), (1, 0), (3, 4, 5), batch=2, shared="b")
    given.call(standin)
    assert standin_runtime.lib.xpu_wait(POINTER(0x10)) == SUCCESS
    assert standin_runtime.lib.xpu_wait(None) == SUCCESS
    lib.cublasDestroy_v2(POINTER(handle))
    lib.cublasDestroy_v2(POINTER(handle))
    create(standin)
    assert standin.log() == [
        "create h1",
        "set_stream h1 0x10",
        "set_math_mode h1 3",
        "set_workspace h1 0x200 8589934592",
        "gemm h1 stream=0x10 ta=1 tb=0 m=3 n=4 k=5 lda=7 ldb=6 ldc=6 sa=28 sb=0 sc=30 batch=2 types=2,2,0 compute=68 "
        "mode=3 workspace=0x200",
        "destroy h1",
        "destroy h1 -> 1",
        "create h2",
    ]
    assert standin_runtime.log() == ["wait 0x10", "wait 0x0"]
    standin.reset()
    assert standin.log() == []
    create(standin)
    assert standin.log() == ["create h1"]
    assert len(standin_runtime.log()) == 2


def test_a_long_log(standin: Standin) -> None:
    handle = create(standin)
    for stream in range(1000):
        standin.lib.cublasSetStream_v2(POINTER(handle), POINTER(stream))
    assert standin.log()[1:] == [f"set_stream h1 {stream:#x}" for stream in range(1000)]


def test_failures_on_request(standin: Standin, standin_runtime: Standin) -> None:
    lib, given = standin.lib, product(create(standin))
    before = given.c.clone()
    standin.fail("cublasGemmStridedBatchedEx", 13, times=2)
    assert [given.call(standin), given.call(standin)] == [13, 13]
    assert torch.equal(given.c, before)
    check(standin, given)
    handle = POINTER(given.call.handle)
    for name, arguments in {
        "cublasSetStream_v2": (handle, POINTER(0x77)),
        "cublasSetMathMode": (handle, 0),
        "cublasSetWorkspace_v2": (handle, None, ctypes.c_size_t(0)),
        "cublasDestroy_v2": (handle,),
    }.items():
        standin.fail(name, 14)
        assert lib[name](*arguments) == 14
        if name == "cublasSetStream_v2":
            assert given.call(standin) == SUCCESS
            assert "stream=0x0 " in standin.log()[-1]
        assert standin.live_handles() == 1
        assert lib[name](*arguments) == SUCCESS
    empty = POINTER()
    standin.fail("cublasCreate_v2", 3)
    assert lib.cublasCreate_v2(ctypes.byref(empty)) == 3
    assert empty.value is None
    assert standin.log()[-1] == "create -> 3"
    standin_runtime.fail("xpu_wait", 700)
    assert [standin_runtime.lib.xpu_wait(None), standin_runtime.lib.xpu_wait(None)] == [700, 0]
    standin.fail("cublasCreate_v2", 3)
    standin.reset()
    create(standin)
    for name in ("cublasSgemm", "standin_reset", "xpu_wait"):
        with pytest.raises(ValueError, match=name):
            standin.fail(name, 1)


def in_threads(*calls: Any) -> None:
    start = threading.Barrier(len(calls))

    def one(call: Any) -> None:
        start.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(one, calls))  # raises what a call raised


def test_overlaps_are_counted(standin: Standin) -> None:
    one, two = create(standin), create(standin)
    standin.set_delay(200_000)
    in_threads(*(partial(check, standin, product(handle)) for handle in (one, two)))
    assert standin.overlaps() == 0
    check(standin, product(one))
    check(standin, product(one))
    assert standin.overlaps() == 0
    in_threads(*(partial(check, standin, product(one)) for _ in range(3)))
    assert standin.overlaps() == 2
    standin.reset()
    assert standin.overlaps() == 0


def test_setting_the_stream_of_a_busy_handle_is_an_overlap(standin: Standin) -> None:
    given = product(create(standin))
    standin.set_delay(300_000)
    thread = threading.Thread(target=given.call, args=(standin,))
    thread.start()
    while not standin.log()[-1].startswith("gemm"):
        pass
    assert standin.lib.cublasSetStream_v2(POINTER(given.call.handle), None) == SUCCESS
    thread.join()
    assert standin.overlaps() == 1


def test_many_threads(standin: Standin) -> None:
    def work() -> None:
        for _ in range(50):
            handle = create(standin)
            check(standin, product(handle))
            assert standin.lib.cublasDestroy_v2(POINTER(handle)) == SUCCESS

    in_threads(*[work] * 8)
    assert standin.live_handles() == standin.overlaps() == 0
    log = standin.log()
    assert len(log) == 8 * 50 * 3
    assert not [line for line in log if "->" in line]


# ---- Its parts


def test_missing_functions(
    standin: Standin,
    standin_without_workspace: Standin,
    standin_without_gemm: Standin,
    standin_of_batches: Standin,
    standin_runtime: Standin,
) -> None:
    blas = {"cublasCreate_v2", "cublasDestroy_v2", "cublasSetStream_v2"}
    workspace, mode, gemm, wait = (
        "cublasSetWorkspace_v2", "cublasSetMathMode", "cublasGemmStridedBatchedEx", "xpu_wait",
    )  # fmt: skip
    others = {"cublasGemmEx", "cublasGemmGroupedBatchedEx"}
    every = {*blas, workspace, mode, gemm, *others, wait}

    def functions(library: Standin) -> set[str]:
        return {name for name in every if hasattr(library.lib, name)}

    assert functions(standin) == every - {wait}
    assert functions(standin_without_workspace) == every - {wait, workspace}
    assert functions(standin_without_gemm) == {*blas, workspace, mode}
    assert functions(standin_of_batches) == {*blas, workspace, gemm}
    assert functions(standin_runtime) == {wait}
    assert len({x.path for x in (standin, standin_without_workspace, standin_without_gemm, standin_runtime)}) == 4
    check(standin_without_workspace, product(create(standin_without_workspace)))
    assert standin.log() == []


def test_what_a_reset_forgot_is_destroyed_without_a_word(standin: Standin) -> None:
    """Tests before leave handles that are collected at any time, and must take no failure away that is to come."""
    handle, other = create(standin), create(standin)
    assert standin.lib.cublasDestroy_v2(POINTER(other)) == SUCCESS
    assert standin.lib.cublasDestroy_v2(POINTER(other)) == NOT_INITIALIZED
    assert standin.log()[-1] == "destroy h2 -> 1"
    standin.reset()
    standin.fail("cublasDestroy_v2", 14)
    assert standin.lib.cublasDestroy_v2(POINTER(handle)) == NOT_INITIALIZED
    assert standin.log() == []
    assert standin.lib.cublasDestroy_v2(POINTER(create(standin))) == 14


def test_without_bf16(standin_without_bf16: Standin) -> None:
    handle = create(standin_without_bf16)
    for types in TYPES:
        given = product(handle, types)
        if BF16 in types:
            assert given.call(standin_without_bf16) == NOT_SUPPORTED
        else:
            check(standin_without_bf16, given)
