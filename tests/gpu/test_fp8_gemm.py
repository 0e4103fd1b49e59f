"""`fp8_gemm` on a GPU as its users call it: any strides, graphs, streams, threads, torch.compile, and errors."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import omnigemm
from omnigemm.backends.cuda.gpu import of

from .fp8_cases import E4M3, SCALES, close, exact, operands, problem


def call(given: tuple[Tensor | None, ...], **words: object) -> Tensor:
    a, b, a_scale, b_scale, bias = given
    return omnigemm.fp8_gemm(a, b, a_scale, b_scale, bias=bias, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("m", [1, 5, 16, 31, 64, 100, 128, 200, 300, 1000, 4096])
def test_every_number_of_rows_gets_a_kernel(m: int, kind: str) -> None:
    given = operands(problem(m, 768, 1152, kind))
    result = call(given)
    assert result.dtype == torch.bfloat16
    close(result, given)
    plan = omnigemm.plan("fp8_gemm", m=m, n=768, k=1152, device="cuda", granularity=kind.replace("block", "128x128"))
    assert plan.backend == "cuda"
    assert torch.equal(plan.run(*given[:4]), result)


def test_scales_of_two_kinds_and_numbers() -> None:
    given = operands(problem(40, 96, 256, "token"))
    one = torch.tensor(0.5, device="cuda")
    close(call((*given[:2], given[2], one, None)), (*given[:2], given[2], one, None))
    close(call((*given[:2], one, given[3], None)), (*given[:2], one, given[3], None))
    a, b = given[0], given[1]
    assert torch.equal(omnigemm.fp8_gemm(a, b, 0.5, 2.0), omnigemm.fp8_gemm(a, b, one, one * 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_of_each_type(dtype: torch.dtype) -> None:
    given = operands(problem(20, 264, 256, "block"))
    bias = torch.randn(264 * 2, device="cuda").to(dtype)
    close(call((*given[:4], bias[:264])), (*given[:4], bias[:264]))
    close(call((*given[:4], bias[::2])), (*given[:4], bias[::2]))


@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("k", [100, 129, 255, 256])
def test_operands_that_the_copy_engine_cannot_address(m: int, k: int) -> None:
    n = 200
    made = operands(problem(m, n, k))
    for a in (made[0], made[0].t().contiguous().t(), torch.cat([made[0].float()] * 2, 1).to(E4M3)[:, :k]):
        for b in (made[1], made[1].t().contiguous().t()):
            given = (a, b, *made[2:])
            close(call(given), given)
    shifted = torch.empty(m * k + 1, device="cuda", dtype=torch.uint8)[1:].view(E4M3).view(m, k)
    shifted.view(torch.uint8).copy_(made[0].view(torch.uint8))
    wide = torch.rand(m, 2 * made[2].size(1), device="cuda") + 0.5
    given = (shifted, made[1], wide[:, ::2], *made[3:])
    close(call(given), given)
    rows = made[0][:1].expand(m, k)
    given = (rows, *made[1:])
    close(call(given), given)


@pytest.mark.parametrize("m", [5, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_written_where_they_were_asked_for(m: int, dtype: torch.dtype) -> None:
    given = operands(problem(m, 136, 512))
    want = call(given, out_dtype=dtype)
    frames = [
        torch.full((m, 137), float("nan"), device="cuda", dtype=dtype)[:, 1:],  # rows at odd places
        torch.full((136, m), float("nan"), device="cuda", dtype=dtype).t(),  # columns side by side
        torch.full((2 * m, 136), float("nan"), device="cuda", dtype=dtype)[::2],
    ]
    for out in frames:
        assert call(given, out=out) is out
        assert torch.equal(out, want)
    whole = torch.full((m + 2, 140), float("nan"), device="cuda", dtype=dtype)
    call(given, out=whole[1:-1, 2:-2])
    assert torch.equal(whole[1:-1, 2:-2], want)
    assert int(whole.isnan().sum()) == whole.numel() - want.numel()


@pytest.mark.parametrize("shape", [(0, 64, 128), (5, 0, 128), (5, 64, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.empty(m, k, device="cuda", dtype=E4M3), torch.empty(n, k, device="cuda", dtype=E4M3)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    result = omnigemm.fp8_gemm(a, b, 1.0, 1.0, bias=bias)
    assert torch.equal(result, bias.expand(m, n))
    assert not omnigemm.fp8_gemm(a, b, 1.0, 1.0).any()


@pytest.mark.parametrize(("m", "kind"), [(16, "token"), (300, "token"), (16, "tensor"), (300, "tensor")])
def test_no_worse_than_torch(m: int, kind: str) -> None:
    given = operands(problem(m, 512, 2048, kind))
    a, b, a_scale, b_scale, _ = given
    shapes = ((-1, 1), (1, -1)) if kind == "token" else ((), ())
    theirs = torch._scaled_mm(
        a, b.t(), a_scale.reshape(shapes[0]), b_scale.reshape(shapes[1]), out_dtype=torch.bfloat16
    )
    want = exact(a, b, a_scale, b_scale)
    ours = float((call(given).double() - want).norm())
    assert ours < 2 * float((theirs.double() - want).norm())


@pytest.mark.parametrize("m", [12, 300])
def test_graph_replays_on_new_data(m: int) -> None:
    given = operands(problem(m, 576, 1024))
    out = call(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # back to back, each allowed to start before the last one ends
            call(given, out=out)
        fresh_out = call(given)
    fresh = operands(problem(m, 576, 1024))
    for old, new in zip(given[:4], fresh[:4], strict=True):
        assert isinstance(old, Tensor)
        assert isinstance(new, Tensor)
        old.copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    close(out, fresh)
    assert torch.equal(out, fresh_out)


def test_a_capture_that_would_compile_is_refused() -> None:
    given = operands(problem(17, 1016, 272))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(omnigemm.DeviceError, match=r"not compiled yet, and a CUDA graph is being captured"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            call(given)
    close(call(given), given)


def test_the_same_result_every_time() -> None:
    for m in (4, 64, 1000):
        given = operands(problem(m, 2112, 2048))
        first = call(given)
        assert all(torch.equal(first, call(given)) for _ in range(20))


def test_streams_and_threads() -> None:
    cases = [operands(problem(m, 776, 1040)) for m in (1, 9, 64, 200)]
    want = [call(one) for one in cases]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(50):
                which = (number + turn) % len(cases)
                result = call(cases[which])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(result, want[which]):
                    wrong.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]


def test_a_thread_that_did_nothing_with_cuda_before() -> None:
    """With a launch that knows these addresses, or has its tensor maps still to make or to move."""
    given = operands(problem(16, 776, 1040))
    want = call(given)
    known, other = torch.empty_like(want), torch.empty_like(want)
    call(given, out=known)
    for out in (known, other):
        out.fill_(float("nan"))
    torch.cuda.synchronize()
    wrong: list[BaseException] = []

    def work(out: torch.Tensor) -> None:
        try:
            call(given, out=out)
        except BaseException as error:
            wrong.append(error)

    for out in (known, other):
        thread = threading.Thread(target=work, args=(out,))
        thread.start()
        thread.join()
        assert not wrong, wrong
        assert torch.equal(out, want)


def test_each_call_waits_for_what_came_before_on_its_stream() -> None:
    """Kernels start early, but must not read what an earlier one has still to write: a chain of products shows it."""
    given = operands(problem(64, 1024, 1024))
    a, b, a_scale, b_scale, _ = given
    x, y = a.clone(), a.clone()
    for _ in range(20):
        x = (omnigemm.fp8_gemm(x, b, a_scale, b_scale) * 0.02).to(E4M3)
        torch.cuda.synchronize()
    for _ in range(20):
        y = (omnigemm.fp8_gemm(y, b, a_scale, b_scale) * 0.02).to(E4M3)
    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("m", [1, 16, 60, 100, 300])
def test_constant_weights_change_nothing_but_the_time(m: int) -> None:
    """Kernels then read weights while the ones before still run, here each other's results included."""
    given = [operands(problem(m, n, 1536)) for n in (1536, 1536, 1536)]

    def chain() -> list[Tensor]:
        found = []
        for one in given * 8:
            result = call(one)
            found.append(result)
            given[0][0].copy_(result.to(given[0][0].dtype))  # the next one's activations are this one's results
        return found

    start = given[0][0].clone()
    plain = chain()
    given[0][0].copy_(start)
    with omnigemm.settings(constant_weights=True):
        early = chain()
    assert all(torch.equal(one, other) for one, other in zip(plain, early, strict=True))


def test_weights_may_change_unless_stated_otherwise() -> None:
    given = operands(problem(16, 2112, 1536))
    other = operands(problem(16, 2112, 1536))
    weight, expected = given[1], [call(given), call((given[0], other[1], *given[2:]))]
    both = [weight.clone(), other[1]]
    for i in range(200):
        weight.copy_(both[i % 2])
        assert torch.equal(call(given), expected[i % 2]), i


def test_compiled_and_traced() -> None:
    given = operands(problem(24, 264, 512))
    compiled = torch.compile(lambda a, b, s, t: omnigemm.fp8_gemm(a, b, s, t) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given[:4]), call(given) + 1)
    a, b, a_scale, b_scale, _ = given
    # Its other checks compare fp8 tensors on the GPU, which torch cannot.
    checks = ("test_autograd_registration", "test_faketensor")
    arguments = (a, b, a_scale, b_scale, None, None, None)
    torch.library.opcheck(torch.ops.omnigemm.fp8_gemm.default, arguments, test_utils=checks)


def test_parameters_that_require_gradients() -> None:
    given = operands(problem(24, 264, 512, "token"))
    scale = torch.nn.Parameter(given[3])
    assert torch.equal(omnigemm.fp8_gemm(given[0], given[1], given[2], scale), call(given))


def test_what_is_refused_and_why() -> None:
    given = operands(problem(4, 64, 128))
    with pytest.raises(omnigemm.DeviceError, match="b_scale is on cpu, expected cuda:0"):
        omnigemm.fp8_gemm(given[0], given[1], given[2], given[3].cpu())
    with pytest.raises(omnigemm.UnsupportedError, match="the tensors are on cuda:0"):
        call(given, backend="cpu")
    with pytest.raises(omnigemm.UnsupportedError, match="no cuda:31"):
        omnigemm.plan("fp8_gemm", m=1, n=8, k=16, device="cuda:31")


def test_explanation_shows_the_choice_and_the_runners_up() -> None:
    found = omnigemm.explain("fp8_gemm", m=16, n=576, k=7168, device="cuda:0", granularity="128x128")
    assert found.chosen is not None
    assert found.chosen.backend == "cuda"
    assert sum(one.ok for one in found.candidates) >= 3
    if of(0).name == "NVIDIA H200":
        assert "measured" in found.chosen.reason
