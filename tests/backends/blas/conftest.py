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


Build = Callable[..., Standin]


@pytest.fixture(scope="session")
def build_standin(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile the stand-in with these -D options, once for each set of them, and reset it."""
    compiler = shutil.which("cc")
    if compiler is None:
        missing = "no C compiler 'cc' on this machine to build the stand-in for a vendor library"
        pytest.fail(f"{missing}: CI must have one") if os.environ.get("CI") else pytest.skip(missing)
    folder = tmp_path_factory.mktemp("standin")
    built: dict[tuple[str, ...], Standin] = {}

    def build(*options: str) -> Standin:
        if options not in built:
            path = folder / f"lib{'_'.join(('standin', *options)).lower()}.so"
            command = [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
            command += [*(f"-D{option}" for option in options), str(SOURCE), "-o", str(path), "-lm"]
            run = subprocess.run(command, capture_output=True, text=True)
            assert run.returncode == 0, run.stderr
            built[options] = Standin(path)
        built[options].reset()
        return built[options]

    return build


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
