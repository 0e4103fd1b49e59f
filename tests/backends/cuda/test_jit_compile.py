"""Specs, keys and real compilations by NVRTC; no GPU is needed."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

import omnigemm
from nvrtc_here import needs_nvrtc
from omnigemm.backends.cuda import driver as driver_module
from omnigemm.backends.cuda import jit
from omnigemm.backends.cuda.jit import Compiled, KernelSpec, cache, compile_cubin, get_or_compile, loader, nvrtc, warm
from omnigemm.backends.cuda.jit import spec as spec_module
from omnigemm.backends.cuda.jit.compiler import parse_resources
from omnigemm.core.dispatch import Support

SOURCE = 'extern "C" __global__ void copy(float* a) { __shared__ float s[64]; s[threadIdx.x] = a[threadIdx.x];\n'
SOURCE += "__syncthreads(); a[threadIdx.x] = s[63 - threadIdx.x]; }"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()


def spec_of(tmp_path: Path, **changes: object) -> KernelSpec:
    root = tmp_path / "headers"
    root.mkdir(exist_ok=True)
    return dataclasses.replace(KernelSpec("copy", SOURCE, "sm_90a", header_root=str(root)), **changes)


@needs_nvrtc
def test_compiles_with_headers_that_include_headers(tmp_path):
    (tmp_path / "headers" / "common").mkdir(parents=True)
    (tmp_path / "headers" / "common" / "inner.cuh").write_text("#pragma once\nconstexpr int ROWS = 96;\n")
    (tmp_path / "headers" / "outer.cuh").write_text('#include "common/inner.cuh"\n')
    source = '#include "outer.cuh"\n' + SOURCE.replace("s[64]", "s[ROWS]")
    made = compile_cubin(spec_of(tmp_path, source=source))
    assert made.cubin[:4] == b"\x7fELF"
    assert made.seconds > 0
    if "ptxas info" not in made.log:
        pytest.skip("this NVRTC does not tell what ptxas says")
    assert made.resources is not None
    assert made.resources.shared_bytes == 96 * 4
    assert 0 < made.resources.registers < 64
    assert made.resources.spill_bytes == 0


@needs_nvrtc
def test_error_names_kernel_arch_version_and_place(tmp_path):
    with pytest.raises(omnigemm.CompileError) as caught:
        compile_cubin(spec_of(tmp_path, source=SOURCE + "\nint broken = nowhere;"))
    text = str(caught.value)
    for part in ("kernel copy", "sm_90a", nvrtc.version(), 'identifier "nowhere" is undefined', "kernel.cu(3)"):
        assert part in text
    (kept,) = (tmp_path / "cache" / "kernels" / ".failed").iterdir()
    assert str(kept) in text
    assert (kept / "kernel.cu").read_text().endswith("nowhere;")
    assert "nowhere" in (kept / "log.txt").read_text()


@needs_nvrtc
def test_unknown_option_is_a_compile_error(tmp_path):
    with pytest.raises(omnigemm.CompileError, match="--no-such-thing"):
        compile_cubin(spec_of(tmp_path, options=("--no-such-thing",)))


def test_key_follows_content(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "version", lambda: "1.0")
    base = spec_of(tmp_path)
    roots = []
    for name, text in (("one", "a"), ("two", "b"), ("same", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.cuh").write_text(text)
        roots.append(spec_of(tmp_path, header_root=str(tmp_path / name)).key)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "y.cuh").write_text("a")
    keys = [
        base.key,
        *roots[:2],
        spec_of(tmp_path, header_root=str(tmp_path / "moved")).key,
        spec_of(tmp_path, options=("-G",)).key,
        spec_of(tmp_path, options=("-a", "-b")).key,
        spec_of(tmp_path, options=("-b", "-a")).key,
        spec_of(tmp_path, arch="sm_90").key,
        spec_of(tmp_path, source=SOURCE + " ").key,
        spec_of(tmp_path, name="other").key,
    ]
    assert len(set(keys)) == len(keys)
    assert roots[0] == roots[2]
    monkeypatch.setattr(nvrtc, "version", lambda: "1.1")
    spec_module._key.cache_clear()  # as after a restart with a newer NVRTC
    assert base.key != keys[0]
    spec_module._key.cache_clear()


def test_spec_is_a_value(tmp_path):
    spec = spec_of(tmp_path)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, spec_of(tmp_path)}) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../evil"),
        ("name", "two words"),
        ("arch", "90"),
        ("arch", "sm_90a --help"),
        ("options", ["-G"]),
        ("options", ("-I/usr/include",)),
        ("options", ("--gpu-architecture=sm_80",)),
    ],
)
def test_bad_specs_are_refused(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"KernelSpec: {field}"):
        spec_of(tmp_path, **{field: value})


def test_missing_bindings_are_said(monkeypatch, tmp_path):
    def absent(name: str) -> None:
        raise ImportError(name)

    nvrtc._library.cache_clear()
    monkeypatch.setattr(nvrtc.importlib, "import_module", absent)
    try:
        assert nvrtc.available() == Support(False, nvrtc.MISSING)
        with pytest.raises(omnigemm.CompileError, match=r"pip install 'omnigemm\[cuda\]'"):
            compile_cubin(spec_of(tmp_path))
    finally:
        nvrtc._library.cache_clear()


def test_resources_are_those_of_the_named_kernel():
    log = "\n".join(
        f"ptxas info : Compiling entry function '{name}' for 'sm_90a'\n"
        f"  {i} bytes stack frame, {i} bytes spill stores, {2 * i} bytes spill loads\n"
        f"ptxas info : Used {10 + i} registers{smem}"
        for i, (name, smem) in enumerate([("a", ""), ("b", ", 128 bytes smem"), ("c", "")])
    )
    found = parse_resources(log, "b")
    assert found is not None
    assert (found.registers, found.spill_bytes, found.shared_bytes) == (11, 3, 128)
    last = parse_resources(log, "a")
    assert last is not None
    assert (last.registers, last.spill_bytes, last.shared_bytes) == (10, 0, 0)
    assert parse_resources(log, "d") is None


@needs_nvrtc
def test_warm_goes_on_after_a_failure(tmp_path):
    specs = [spec_of(tmp_path, source=f"{SOURCE} // warm {i}") for i in range(4)]
    specs[1] = spec_of(tmp_path, source="this is not C++")
    told = []
    results = warm(specs, jobs=2, progress=told.append)
    assert [one.spec for one in results] == specs
    assert [one.ok for one in results] == [True, False, True, True]
    assert isinstance(results[1].error, omnigemm.CompileError)
    assert sorted(map(id, told)) == sorted(map(id, results))
    assert get_or_compile(specs[0]) is results[0].compiled
    with pytest.raises(ValueError, match="jobs is 0"):
        warm(specs, jobs=0)


@pytest.mark.parametrize(
    ("arch", "device", "expected"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100a", (10, 0), True),
        ("sm_120a", (12, 1), False),
    ],
)
def test_which_device_runs_a_cubin(arch, device, expected):
    assert loader.runs_on(arch, *device) is expected


def test_load_without_a_driver_says_so(monkeypatch, tmp_path):
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", absent)
    driver_module.bindings.cache_clear()
    with pytest.raises(omnigemm.DeviceError, match=r"driver is not installed: libcuda\.so\.1"):
        loader.load(spec_of(tmp_path), 0)


@pytest.fixture
def libcuda(monkeypatch):
    """Stand-in for the driver's library, which tells the given status and version."""

    def use(status: int, version: int) -> None:
        def tell(found) -> int:
            found._obj.value = version
            return status

        monkeypatch.setattr(driver_module.ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=tell))
        driver_module.version.cache_clear()
        loader.driver_fault.cache_clear()

    yield use
    driver_module.version.cache_clear()
    loader.driver_fault.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "version", "told"),
    [
        ("13.4.92", 13000, ""),  # a minor version behind: such cubins load
        ("13.4.92", 14010, ""),
        ("12.9", 12020, ""),
        (
            "13.4.92",
            12080,
            "the NVIDIA driver knows CUDA 12.8 and is too old for kernels of NVRTC 13.4.92, expected 13.0 or later",
        ),
        ("12.9", 11080, "the NVIDIA driver knows CUDA 11.8 and is too old for kernels of NVRTC 12.9, expected 12.0"),
    ],
)
def test_driver_that_is_too_old(libcuda, monkeypatch, compiler, version, told):
    monkeypatch.setattr(nvrtc, "version", lambda: compiler)
    libcuda(0, version)
    assert loader.driver_fault().startswith(told)
    assert bool(loader.driver_fault()) == bool(told)


def test_driver_that_cannot_be_asked(libcuda, monkeypatch):
    monkeypatch.setattr(nvrtc, "version", lambda: "13.4")
    libcuda(34, 0)
    assert loader.driver_fault() == "the NVIDIA driver does not tell its version (34)"

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    loader.driver_fault.cache_clear()
    monkeypatch.setattr(driver_module.ctypes, "CDLL", absent)
    assert "the NVIDIA driver is not installed: libcuda.so.1" in loader.driver_fault()


class FakeDriver:
    """Answers as the driver of one sm_90 device would, and notes the limits that are set."""

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 9, 0

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 1
        CU_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 168, 0

    def __init__(self) -> None:
        self.limits: list[int] = []

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetAttribute(self, attribute, device):
        return 0, attribute

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.limits.append(value)
        return (0,)

    def cuKernelGetAttribute(self, attribute, kernel, device):
        return 0, attribute


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(loader, "bindings", lambda: fake)
    monkeypatch.setattr(nvrtc, "version", lambda: "1.0")
    monkeypatch.setattr(loader, "_shared", {})
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "_ready", set())
    monkeypatch.setattr(driver_module, "version", lambda: 13020)
    return fake


@pytest.fixture
def core(monkeypatch):
    """Stand-in for importing cuda.core: what the given function returns or raises."""

    def use(imported) -> None:
        real = importlib.import_module
        monkeypatch.setattr(importlib, "import_module", lambda name: imported() if name == "cuda.core" else real(name))
        loader._core.cache_clear()

    yield use
    monkeypatch.undo()
    loader._core.cache_clear()


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'cuda.core'", name="cuda.core"), loader.MISSING),
        (ModuleNotFoundError("No module named 'cuda'", name="cuda"), loader.MISSING),
        (
            ModuleNotFoundError("No module named 'cuda.bindings'", name="cuda.bindings"),
            "cuda.core, which loads kernels, cannot be imported: No module named 'cuda.bindings'",
        ),
        (RuntimeError("made for\n another"), "cuda.core, which loads kernels, cannot be imported: made for another"),
    ],
    ids=["not there", "nothing of it there", "half there", "not fitting"],
)
def test_without_cuda_core_kernels_cannot_be_loaded(core, driver, monkeypatch, tmp_path, error, told):
    core(lambda: _raise(error))
    monkeypatch.setattr(nvrtc, "available", lambda: Support(True, "NVRTC 1.0"))
    assert jit.available() == Support(False, told)
    with pytest.raises(omnigemm.CompileError) as caught:
        loader.load(Compiled(spec_of(tmp_path, source="no core"), b"", "", 0.0), 0)
    assert str(caught.value) == f"kernel copy cannot be loaded: {told}"


def test_the_compiler_is_asked_for_first(core, monkeypatch):
    core(lambda: _raise(ImportError()))
    monkeypatch.setattr(nvrtc, "available", lambda: Support(False, nvrtc.MISSING))
    assert jit.available() == Support(False, nvrtc.MISSING)


def test_with_all_that_is_needed_the_compiler_is_told(core, monkeypatch):
    core(SimpleNamespace)
    monkeypatch.setattr(nvrtc, "available", lambda: Support(True, "NVRTC 1.0"))
    assert jit.available() == Support(True, "NVRTC 1.0")


def test_shared_memory_limit_is_only_raised(driver, monkeypatch, tmp_path):
    made = Compiled(spec_of(tmp_path, source="limits"), b"", "", 0.0)
    loader._kernels[made.spec.key] = SimpleNamespace(handle=1)
    for size in (0, 48 * 1024, 100_000, 60_000, 100_000, 200_000):
        found = loader.load(made, 0, size)
    assert driver.limits == [100_000, 200_000]
    assert (found.num_regs, found.local_bytes) == (168, 0)
    loader.load(made, 1, 60_000)
    assert driver.limits[-1] == 60_000


def test_a_kernel_is_ready_where_it_was_loaded(driver, tmp_path):
    made = Compiled(spec_of(tmp_path, source="ready"), b"", "", 0.0)
    loader._kernels[made.spec.key] = SimpleNamespace(handle=1)
    assert not loader.is_loaded(made.spec, 0, 0)
    loader.load(made, 0, 60_000)
    assert [loader.is_loaded(made.spec, 0, size) for size in (0, 60_000, 60_001)] == [True, True, False]
    assert not loader.is_loaded(made.spec, 1, 0)


def test_load_names_what_does_not_fit(driver, core, tmp_path):
    other = Compiled(spec_of(tmp_path, arch="sm_100a"), b"", "", 0.0)
    with pytest.raises(omnigemm.DeviceError, match="copy is for sm_100a, but device 0 is sm_90"):
        loader.load(other, 0)

    refuse = SimpleNamespace(from_cubin=lambda cubin: _raise(RuntimeError("CUDA_ERROR_INVALID_IMAGE")))
    core(lambda: SimpleNamespace(ObjectCode=refuse))
    with pytest.raises(omnigemm.CompileError, match=r"CUDA 13\.2, cannot load kernel copy .*INVALID_IMAGE"):
        loader.load(Compiled(spec_of(tmp_path, source="image"), b"", "", 0.0), 0)
