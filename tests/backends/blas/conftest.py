"""A vendor library with cuBLAS's interface that computes on the host: `standin.c`, compiled here, whole or in part."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("standin.c")
LT_SOURCE = Path(__file__).with_name("standin_lt.c")


class Standin:
    """A compiled stand-in and its controls. Whoever else loads `path` in this process shares its state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        self.lib.standin_reset.restype = None
        self.lib.standin_log.restype = ctypes.c_char_p
        self.lib.standin_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self.lib.standin_fail.restype = None
        self.lib.standin_set_delay.argtypes = [ctypes.c_int]
        self.lib.standin_set_delay.restype = None

    def reset(self) -> None:
        """No log, no failures to come, no delay, no overlaps; every handle is as if destroyed."""
        self.lib.standin_reset()
        if hasattr(self.lib, "standin_lt_reset"):
            self.lib.standin_lt_reset()

    def fail(self, name: str, status: int, times: int = 1) -> None:
        """The next calls of the C function return this status and do nothing else but write to the log."""
        if not name.startswith(("cublas", "xpu_")) or not hasattr(self.lib, name):
            raise ValueError(f"{self.path.name} has no function {name!r} that could fail")
        self.lib.standin_fail(name.encode(), status, times)

    def log(self) -> list[str]:
        """A line for each call since the reset, in order; ' -> status' ends those that did not succeed."""
        text: bytes = self.lib.standin_log()
        return text.decode().splitlines()

    def set_delay(self, us: int) -> None:
        """How long each product keeps its handle busy before it computes."""
        self.lib.standin_set_delay(us)

    def live_handles(self) -> int:
        return int(self.lib.standin_live_handles())

    def overlaps(self) -> int:
        """How many calls came with a handle that another thread's product was using."""
        return int(self.lib.standin_overlaps())


class Pair:
    """Two stand-ins in one folder, named as NVIDIA's. `path` is that of the first, as it is for one alone."""

    def __init__(self, blas: Standin, lt: Standin) -> None:
        self.blas, self.lt, self.path = blas, lt, blas.path

    def find(self, count: int, state: int = 0) -> None:
        """How many algorithms later searches find, and the status that each carries."""
        self.lt.lib.standin_lt_find(count, state)

    def propose(self, waves: float) -> None:
        """Later searches find two algorithms: one with so many waves, and one with a wave that needs no workspace."""
        self.lt.lib.standin_lt_propose(ctypes.c_float(waves))

    def live_objects(self) -> int:
        """Operations, layouts and preferences that were made and not destroyed."""
        return int(self.lt.lib.standin_lt_live_objects())


Build = Callable[..., Standin]


class Kunlun:
    """A vendor's folder as KUNLUN_HOME points to it, with its two libraries, which it keeps apart."""

    def __init__(self, home: Path, blas: Standin, runtime: Standin) -> None:
        self.home, self.blas, self.runtime, self.path = home, blas, runtime, blas.path


def compiled(source: Path, path: Path, options: tuple[str, ...] = (), linked: tuple[str, ...] = ()) -> Standin:
    compiler = shutil.which("cc")
    if compiler is None:
        missing = "no C compiler 'cc' on this machine to build the stand-in for a vendor library"
        pytest.fail(f"{missing}: CI must have one") if os.environ.get("CI") else pytest.skip(missing)
    command = [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
    command += [*(f"-D{option}" for option in options), str(source), "-o", str(path), "-lm", *linked]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return Standin(path)


@pytest.fixture(scope="session")
def build_standin(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile the stand-in with these -D options, once for each set of them, and reset it."""
    folder = tmp_path_factory.mktemp("standin")
    built: dict[tuple[str, ...], Standin] = {}

    def build(*options: str) -> Standin:
        if options not in built:
            path = folder / f"lib{'_'.join(('standin', *options)).lower()}.so"
            built[options] = compiled(SOURCE, path, options)
        built[options].reset()
        return built[options]

    return build


@pytest.fixture(scope="session")
def build_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Compile both libraries, the second with these -D options; once for each set of them."""
    built: dict[tuple[str, ...], Pair] = {}

    def build(*options: str) -> Pair:
        if options not in built:
            folder = tmp_path_factory.mktemp("pair")
            blas = compiled(SOURCE, folder / "libcublas.so.13")
            built[options] = Pair(blas, compiled(LT_SOURCE, folder / "libcublasLt.so.13", options))
        built[options].blas.reset()
        built[options].lt.reset()
        return built[options]

    return build


@pytest.fixture(scope="session")
def build_kunlun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Kunlun]:
    """Compile both of the vendor's libraries: the first, without bf16 by handles, with cublasLt in it or not."""
    built: dict[tuple[bool, tuple[str, ...]], Kunlun] = {}

    def build(lt: bool, *options: str) -> Kunlun:
        if (lt, options) not in built:
            home = tmp_path_factory.mktemp("kunlun")
            blas, runtime = home / "xhpc" / "xblas" / "so", home / "xre" / "so"
            blas.mkdir(parents=True)
            runtime.mkdir(parents=True)
            waits = compiled(SOURCE, runtime / "libxpurt.so", ("STANDIN_RUNTIME",), ("-Wl,-soname,libxpurt.so",))
            # As the vendor's may: it is only found if the runtime is in the process already.
            needs = ("-Wl,--no-as-needed", f"-L{runtime}", "-lxpurt")
            ways = ("NO_BF16", "WITHOUT_HEURISTIC", "WITHOUT_ALGORITHM", *options)
            first = compiled(LT_SOURCE if lt else SOURCE, blas / "libxpu_blas.so", ways, needs)
            built[lt, options] = Kunlun(home, first, waits)
        built[lt, options].blas.reset()
        built[lt, options].runtime.reset()
        return built[lt, options]

    return build


@pytest.fixture(params=[True, False], ids=["with cublasLt", "without cublasLt"])
def kunlun(
    build_kunlun: Callable[..., Kunlun], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Kunlun:
    """Both ways that bf16 may go."""
    made = build_kunlun(request.param)
    monkeypatch.setenv("KUNLUN_HOME", str(made.home))
    return made


@pytest.fixture
def pair(build_pair: Callable[..., Pair]) -> Pair:
    """cuBLAS and cuBLASLt beside it."""
    return build_pair()


@pytest.fixture
def standin(build_standin: Build) -> Standin:
    """All of the library."""
    return build_standin()


@pytest.fixture
def standin_without_workspace(build_standin: Build) -> Standin:
    """No cublasSetWorkspace_v2."""
    return build_standin("WITHOUT_WORKSPACE")


@pytest.fixture
def standin_without_gemm(build_standin: Build) -> Standin:
    """No products."""
    return build_standin("WITHOUT_GEMM")


@pytest.fixture
def standin_of_batches(build_standin: Build) -> Standin:
    """Of products, only cublasGemmStridedBatchedEx; and no cublasSetMathMode."""
    return build_standin("ONLY_BATCHES")


@pytest.fixture
def standin_without_bf16(build_standin: Build) -> Standin:
    """Products answer 15, not supported, to bf16."""
    return build_standin("NO_BF16")


@pytest.fixture
def standin_runtime(build_standin: Build) -> Standin:
    """The vendor's runtime: a library of its own, with its own log, and only xpu_wait."""
    return build_standin("STANDIN_RUNTIME")
