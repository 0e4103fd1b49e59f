"""NVRTC for the tests that compile: without it they are skipped, but not in CI, which must have it."""

from __future__ import annotations

import os

import pytest

from omnigemm.backends.cuda.jit import nvrtc

# In CI they run and fail, each with the reason.
needs_nvrtc = pytest.mark.skipif(not nvrtc.available() and not os.environ.get("CI"), reason=nvrtc.available().reason)


def require() -> None:
    """The same inside a test or a fixture."""
    answer = nvrtc.available()
    if not answer:
        if os.environ.get("CI"):
            pytest.fail(f"{answer.reason}: CI must have it")
        pytest.skip(answer.reason)
