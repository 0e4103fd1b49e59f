"""`omnigemm warm` with the real compiler, on small products, which compile as any other."""

from __future__ import annotations

import _thread
import time
from pathlib import Path

import pytest

import omnigemm
from nvrtc_here import needs_nvrtc
from omnigemm.backends.cuda import CudaBackend, dense, jit
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.jit import cache, compiler, nvrtc, store
from omnigemm.cli import target
from omnigemm.cli.problems import RANGE_LIMIT, parse_shape, read_problems
from omnigemm.core.dispatch import Support
from omnigemm.core.errors import ShapeError
from omnigemm.core.problem import describe

TINY = ("warm", "fp8_gemm", "--shape", "3x16x32", "--shape", "300x16x32", "--gpu", "h200")


@pytest.fixture(autouse=True)
def _new_process():
    """What other tests compiled is in this process's memory; a command starts with none."""
    cache.forget()
    yield
    cache.forget()


@pytest.fixture
def no_compiler(monkeypatch):
    """In place of NVRTC, for tests of all the rest."""

    def made(spec: jit.KernelSpec) -> compiler.Compiled:
        return compiler.Compiled(spec, b"cubin", "log", 0.1)

    monkeypatch.setattr(nvrtc, "version", lambda: "0.0")
    monkeypatch.setattr(nvrtc, "available", lambda: Support(True, "NVRTC 0.0"))
    monkeypatch.setattr(cache, "compile_cubin", made)


def wanted(*rows: int, n: int = 16, k: int = 32, **words: object) -> set[str]:
    problems = [describe("fp8_gemm", m=m, n=n, k=k, **words) for m in rows]
    return {spec.name for one in problems for spec in CudaBackend().specs(one, KNOWN["h200"])}


@needs_nvrtc
def test_compiles_then_finds(run, tmp_path):
    first = run(*TINY, "--json")
    assert (first.code, first.err) == (0, "")
    found = first.json
    assert (found["path"], found["gpu"], found["ok"], found["refused"]) == (
        str(tmp_path / "cache"),
        "NVIDIA H200",
        True,
        [],
    )
    assert {one["name"] for one in found["kernels"]} == wanted(3, 300)
    assert len(found["kernels"]) == 2
    for one in found["kernels"]:
        assert (one["ok"], one["error"], one["from_disk"], one["problems"]) == (True, None, False, 1)
        assert one["seconds"] > 0
        entry = store.read_entry(store.root(), f"{one['name']}-{one['key'][:16]}")
        assert entry["kernel.cubin"].startswith(b"\x7fELF")
    cache.forget()
    second = run(*TINY)
    assert second.code == 0
    assert second.out.count("already there") == 3  # both rows and the last line
    assert "0 compiled, 2 already there, 0 failed" in second.out
    assert str(tmp_path / "cache") in second.out
    for name in wanted(3, 300):
        assert name in second.out
    assert run("cache", "verify").code == 0


@pytest.mark.usefixtures("no_compiler")
def test_range_shares_kernels(run):
    kernels = run("warm", "fp8_gemm", "--shape", "1-24x16x32", "--shape", "3x16x32", "--json").json["kernels"]
    assert len({one["key"] for one in kernels}) == len(kernels) < 24
    assert {one["name"] for one in kernels} == wanted(*range(1, 25))
    # A problem that is asked for twice is one problem.
    assert sum(one["problems"] for one in kernels) == 24


@pytest.mark.usefixtures("no_compiler")
def test_options_reach_the_problem(run, monkeypatch):
    seen = []
    monkeypatch.setattr(CudaBackend, "specs", lambda _, problem, gpu: seen.append((problem, gpu)) or ())
    words = "--granularity token --dtype e5m2 --weight-dtype e4m3 --out-dtype fp32 --bias --gpu H100 --jobs 2"
    assert run("warm", "fp8_gemm", "--shape", "3x16x32", *words.split()).code == 0
    problem = describe(
        "fp8_gemm",
        m=3,
        n=16,
        k=32,
        granularity="token",
        dtype="e5m2",
        weight_dtype="e4m3",
        out_dtype="fp32",
        bias=True,
    )
    assert seen == [(problem, KNOWN["h100"])]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("op", "options", "line", "words"),
    [
        (
            "gemm",
            "--batch 3 --c --a-layout col",
            "batch=3 c=yes a_layout=col",
            {"batch": 3, "beta": 1.0, "a_layout": "col"},
        ),
        ("int8_gemm", "--asymmetric", "asymmetric=yes", {"a_zero": True}),
        (
            "int4_gemm",
            "--asymmetric --group-size -1 --act-order",
            "asymmetric=yes group_size=-1 act_order=yes",
            {"symmetric": False, "group_size": -1, "act_order": True},
        ),
        (
            "grouped_gemm_masked",
            "--groups 64 --expected-m 2 --dtype e4m3",
            "groups=64 expected_m=2 dtype=e4m3",
            {"groups": 64, "expected_m": 2, "dtype": "e4m3"},
        ),
    ],
)
def test_every_problem_can_be_named(run, tmp_path, monkeypatch, op, options, line, words):
    seen = []
    monkeypatch.setattr(CudaBackend, "supports_on", lambda *_: Support(True, ""))
    monkeypatch.setattr(CudaBackend, "specs", lambda _, problem, gpu: seen.append(problem) or ())
    (tmp_path / "f").write_text(f"{op} 3 16 32 {line}\n")
    assert run("warm", op, "--shape", "3x16x32", *options.split()).code == 0
    assert run("warm", "--file", "f").code == 0
    problem = describe(op, m=3, n=16, k=32, **words)
    assert seen == [problem, problem]
    assert {one.expected_m for one in seen} == {problem.expected_m}


@pytest.mark.usefixtures("no_compiler")
def test_number_of_groups_chooses_the_kernel(run, tmp_path):
    lines = [f"grouped_gemm_contiguous 512 2048 4096 dtype=e4m3 groups={count}" for count in (8, 64, 256)]
    (tmp_path / "f").write_text("\n".join(lines))
    assert len(run("warm", "--file", "f", "--gpu", "h200", "--json").json["kernels"]) == 3


@pytest.mark.usefixtures("no_compiler")
def test_what_a_group_expects_is_told_apart(run, tmp_path):
    lines = [f"grouped_gemm_masked 4096 2048 4096 dtype=e4m3 expected_m={count}" for count in (1, 4096)]
    (tmp_path / "f").write_text("\n".join(lines))
    assert len(run("warm", "--file", "f", "--gpu", "h200", "--json").json["kernels"]) == 2


@pytest.mark.usefixtures("no_compiler")
def test_constant_weights(run, tmp_path):
    (tmp_path / "f").write_text("fp8_gemm 1-64 4096 7168\n")
    problems = [describe("fp8_gemm", m=m, n=4096, k=7168) for m in range(1, 65)]
    found = {}
    for constant in (False, True):
        with omnigemm.settings(constant_weights=constant):
            expected = {spec.key for one in problems for spec in CudaBackend().specs(one, KNOWN["h200"])}
        flag = ["--constant-weights"] * constant
        for words in (["--file", "f"], ["fp8_gemm", "--shape", "1-64x4096x7168"]):
            kernels = run("warm", *words, "--gpu", "h200", "--json", *flag).json["kernels"]
            assert {one["key"] for one in kernels} == expected
        found[constant] = expected
    assert found[False] != found[True]


@pytest.mark.usefixtures("no_compiler")
def test_file_with_a_byte_order_mark(run, tmp_path):
    (tmp_path / "f").write_text("fp8_gemm 3 16 32\n", encoding="utf-8-sig")
    assert run("warm", "--file", "f", "--gpu", "h200").code == 0


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_does_not_wait_for_all(run, tmp_path, monkeypatch, jobs):
    compiled = []
    make = cache.compile_cubin

    def slow(spec: jit.KernelSpec) -> compiler.Compiled:
        compiled.append(spec)
        if len(compiled) == 3:
            _thread.interrupt_main()
        time.sleep(0.1)
        return make(spec)

    monkeypatch.setattr(cache, "compile_cubin", slow)
    shapes = [word for n in range(16, 336, 16) for word in ("--shape", f"3x{n}x32")]
    result = run("warm", "fp8_gemm", *shapes, "--gpu", "h200", "--jobs", str(jobs), "--json")
    assert (result.code, result.out) == (130, "")
    assert len(compiled) < 10
    assert result.err == f"omnigemm: stopped; {len(compiled)} of 20 kernels are ready in {tmp_path / 'cache'}\n"
    assert len(list(store.root().glob("omnigemm*"))) == len(compiled)


def test_usual_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert target.usual_gpu() is KNOWN["h200"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("omnigemm.backends.cuda.gpu.of", lambda index: (KNOWN["h100"], index))
    assert target.usual_gpu() == (KNOWN["h100"], 0)


@pytest.mark.usefixtures("no_compiler")
def test_file(run, tmp_path):
    (tmp_path / "problems.txt").write_text(
        "# a model\n\nfp8_gemm 3 16 32  # decode\n  fp8_gemm 300-302 16 32 granularity=token out_dtype=fp16 bias=yes\n"
    )
    kernels = run("warm", "--file", "problems.txt", "--json").json["kernels"]
    more = wanted(300, 301, 302, granularity="token", out_dtype="fp16", bias=True)
    assert {one["name"] for one in kernels} == wanted(3) | more
    assert sum(one["problems"] for one in kernels) == 4


def test_file_words(tmp_path):
    (tmp_path / "f").write_text("fp8_gemm 3 16 32 dtype=e5m2 weight_dtype=e4m3 granularity=1x128 bias=no\ngemm 1 2 3")
    assert read_problems("warm", tmp_path / "f") == [
        describe("fp8_gemm", m=3, n=16, k=32, dtype="e5m2", weight_dtype="e4m3", granularity="1x128"),
        describe("gemm", m=1, n=2, k=3),
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("fp8_gemm 16 4096", "'fp8_gemm 16 4096' is too short, expected OP M N K"),
        ("fp8_gemm 16 4096 many", "M N K is '16 4096 many', expected three whole numbers above 0"),
        ("fp8_gemm 16 0 64", "M N K is '16 0 64'"),
        ("fp8_gemm 64-1 16 64", "M N K is '64-1 16 64'"),
        ("no_such_op 16 16 64", "op is 'no_such_op', expected one of gemm"),
        ("fp8_gemm 16 16 64 bias", "'bias' is unknown, expected NAME=VALUE"),
        ("fp8_gemm 16 16 64 colour=red", "'colour=red' is unknown, expected NAME=VALUE with a name of dtype"),
        ("fp8_gemm 16 16 64 bias=perhaps", "bias is 'perhaps', expected yes or no"),
        ("fp8_gemm 16 16 64 dtype=e4m3 dtype=e5m2", "'dtype=e5m2' comes after dtype=e4m3, expected dtype once"),
        ("fp8_gemm 16 16 64 granularity=2x2", "granularity is '2x2', expected one of"),
        ("fp8_gemm 16 16 64 dtype=fp7", "dtype is 'fp7', expected one of"),
        ("gemm 16 16 64 batch=٣", "batch is '٣', expected a whole number"),
        ("gemm 16 16 64 batch=-1", "batch is -1, expected a whole number >= 0"),
        ("gemm 16 16 64 groups=2", "groups is 2, expected None: only grouped_gemm"),
        ("grouped_gemm 16 16 64 groups=3000000000", "groups is 3000000000, expected at most 65536"),
        ("fp8_gemm 16 16 64 c=yes", "c is given, but only gemm, grouped_gemm, grouped_gemm_k_contiguous add a C"),
    ],
)
def test_bad_line(run, tmp_path, line, told):
    (tmp_path / "problems.txt").write_text(f"fp8_gemm 3 16 32\n# next\n{line}\n")
    result = run("warm", "--file", "problems.txt", "--json")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("omnigemm: error: problems.txt, line 3: ")
    assert told in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "file problems.txt cannot be read: No such file"),
        (b"\xff\xfe", "file problems.txt cannot be read: it is not text in UTF-8"),
        (b"# nothing\n\n", "file problems.txt has no problems, expected lines such as 'fp8_gemm"),
    ],
)
def test_bad_file(run, tmp_path, content, told):
    if content is not None:
        (tmp_path / "problems.txt").write_bytes(content)
    result = run("warm", "--file", "problems.txt")
    assert result.code == 2
    assert told in result.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "no operation is given, expected one with --shape MxNxK, or --file FILE"),
        (("--shape", "1x2x3"), "no operation is given"),
        (("fp8_gemm",), "fp8_gemm has no --shape, expected at least one"),
        (("fp8_gemm", "--file", "x"), "--file is given together with an operation"),
        (("--file", "x", "--bias"), "--file is given together with an operation or its options"),
        (("no_such_op", "--shape", "1x2x3"), "op is 'no_such_op'"),
        (("fp8_gemm", "--shape", "1x2"), "shape is '1x2', expected MxNxK"),
        (("fp8_gemm", "--shape", "1x2x3", "--gpu", "abacus"), "gpu is 'abacus', expected one of h200, h100"),
        (("fp8_gemm", "--shape", "1x2x3", "--granularity", "2x2"), "granularity is '2x2'"),
        (("fp8_gemm", "--shape", "1x2x3", "--jobs", "0"), "--jobs"),
    ],
)
def test_bad_request(run, words, told):
    result = run("warm", *words)
    assert (result.code, result.out) == (2, "")
    assert told in result.err


def test_shapes():
    assert parse_shape("16x4096x7168") == [(16, 4096, 7168)]
    assert parse_shape("7-9x2x3") == [(7, 2, 3), (8, 2, 3), (9, 2, 3)]
    assert len(parse_shape(f"1-{RANGE_LIMIT}x2x3")) == RANGE_LIMIT
    for text in ("", "0x2x3", "1x0x3", "-1x2x3", "3-2x2x3", "1x2-3x3", "1x2x3x4", f"1-{RANGE_LIMIT + 1}x2x3", "9" * 20):
        with pytest.raises(ShapeError, match="expected MxNxK"):
            parse_shape(text)


@pytest.mark.usefixtures("no_compiler")
def test_unsupported(run, monkeypatch):
    monkeypatch.setattr(
        CudaBackend, "supports_on", lambda _, problem, gpu: Support(problem.m < 4, f"m is {problem.m // 4 * 4} or so")
    )
    result = run("warm", "fp8_gemm", "--shape", "1-7x16x32", "--gpu", "h200")
    assert result.code == 1
    assert "fp8_gemm 4x16x32" in result.out
    assert "and 3 more: m is 4 or so" in result.out
    assert "4 problems without a kernel" in result.out
    found = run("warm", "fp8_gemm", "--shape", "1-7x16x32", "--gpu", "h200", "--json")
    assert (found.code, found.json["ok"]) == (1, False)
    assert [one["reason"] for one in found.json["refused"]] == ["m is 4 or so"] * 4
    # What can be compiled is.
    assert sum(one["problems"] for one in found.json["kernels"]) == 3
    assert all(one["ok"] for one in found.json["kernels"])


@pytest.mark.usefixtures("no_compiler")
def test_operation_without_kernels(run):
    result = run("warm", "grouped_gemm", "--shape", "4x16x32", "--dtype", "fp32", "--gpu", "h200")
    reason = CudaBackend().supports_on(describe("grouped_gemm", m=4, n=16, k=32, dtype="fp32"), KNOWN["h200"])
    assert not reason
    assert result.code == 1
    assert reason.reason in result.out


@needs_nvrtc
def test_failed_compile(run, monkeypatch):
    right = dense.spec

    def wrong(config: object, variant: object) -> jit.KernelSpec:
        spec = right(config, variant)
        return jit.KernelSpec(spec.name, "this is [not] CUDA", spec.arch) if "rows_128" in spec.name else spec

    monkeypatch.setattr(dense, "spec", wrong)
    result = run(*TINY, "--json")
    assert (result.code, result.json["ok"]) == (1, False)
    good, bad = sorted(result.json["kernels"], key=lambda one: not one["ok"])
    assert good["ok"]
    assert "does not compile for sm_90a" in bad["error"]
    cache.forget()
    shown = run(*TINY)
    assert shown.code == 1
    assert "0 compiled, 1 already there, 1 failed" in shown.out
    assert "failed: kernel omnigemm_sm90_fp8" in shown.out


@pytest.mark.usefixtures("no_compiler")
def test_kernel_that_cannot_be_kept_is_a_failure(run, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    result = run(*TINY, "--json")
    assert result.code == 1
    assert all(not one["ok"] and "does not hold it" in one["error"] for one in result.json["kernels"])


def test_without_nvrtc(run, monkeypatch):
    monkeypatch.setattr(nvrtc, "available", lambda: Support(False, nvrtc.MISSING))
    result = run(*TINY)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"omnigemm: error: warm: kernels cannot be compiled: {nvrtc.MISSING}\n"


@pytest.mark.usefixtures("no_compiler")
def test_needs_nothing_that_loads_kernels(run, monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: Support(False, "cuda.core is not installed"))
    assert run(*TINY).code == 0


def test_docs_show_a_file_that_is_read(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    (tmp_path / "f").write_text(text.split("```text\n")[1].split("```")[0])
    assert len(read_problems("warm", tmp_path / "f")) > 1
