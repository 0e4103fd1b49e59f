"""Compiling many kernels at once, and what must hold of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from nvrtc_here import require
from omnigemm.backends.cuda.jit import KernelSpec, Result, cache, warm


@pytest.fixture(scope="session")
def compile_all(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[KernelSpec]], list[Result]]:
    """Side by side, and never taken from an earlier run."""

    def run(specs: Sequence[KernelSpec]) -> list[Result]:
        require()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
            cache.forget()
            return warm(specs)

    return run


@pytest.fixture(scope="session")
def compiles_clean() -> Callable[[Result], None]:
    def check(result: Result) -> None:
        assert result.ok, result.error
        compiled = result.compiled
        assert compiled is not None
        assert compiled.cubin[:4] == b"\x7fELF"
        # ptxas says so where it runs the products of wgmma one by one: right, but several times slower.
        for word in ("C7508", "C7514", "serialized"):
            assert word not in compiled.log, compiled.log
        if compiled.resources is None:
            pytest.skip("this NVRTC does not tell what ptxas says; tests/gpu asks the driver for spills")
        assert compiled.resources.spill_bytes == 0, compiled.log

    return check
