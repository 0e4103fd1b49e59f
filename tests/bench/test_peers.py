"""Building the peers that are compiled for benchmarks: what can be known without nvcc and a GPU."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from omnigemm.backends.cuda.gpu import KNOWN

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
BUILD = runpy.run_path(str(PEERS / "build.py"))


def test_configs_are_numbered_without_gaps() -> None:
    """They are compiled one by one, and callers find them by their place in the list."""
    found = BUILD["configs"]((PEERS / "cutlass_int8.cu").read_text())
    assert found == list(range(len(found)))
    assert len(found) > 10


def build(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PEERS / "build.py"), *map(str, words)], capture_output=True, text=True, timeout=60
    )


def test_a_folder_without_the_headers_is_named(tmp_path: Path) -> None:
    run = build("--cutlass", tmp_path, "--out", tmp_path / "lib.so")
    assert run.returncode == 1
    assert run.stderr.strip() == f"--cutlass {tmp_path}: expected the folder that holds cutlass/cutlass.h"


@pytest.mark.parametrize("nvcc", ["false", "no-such-nvcc"])
def test_a_compiler_that_fails_is_reported(tmp_path: Path, nvcc: str) -> None:
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "cutlass.h").touch()
    run = build("--cutlass", tmp_path, "--out", tmp_path / "lib.so", "--nvcc", nvcc, "--jobs", 2)
    assert run.returncode == 1
    assert nvcc in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "lib.so").exists()


BENCHMARKS = PEERS.parent


def gpu(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, words)], capture_output=True, text=True, timeout=120
    )


def test_a_peer_that_must_be_there_is_missed_before_anything_runs() -> None:
    run = gpu("--peer", "no_such_peer")
    assert run.returncode == 1
    assert run.stderr.strip().endswith("--peer: no_such_peer cannot be imported: No module named 'no_such_peer'")


def test_a_gpu_that_nobody_knows_is_named() -> None:
    run = gpu("--compile-only", "h2000")
    assert run.returncode == 1
    assert "--compile-only is h2000, expected one of h200, h100" in run.stderr


def test_what_is_measured_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --compile-only finds them: of every kind, and of fp8's granularities only the one that was asked for."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("gemm", "groups", "k_groups", "lists"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {one.name for one in runpy.run_path(str(BENCHMARKS / "gpu.py"))["specs"](["fp8_block"], KNOWN["h200"])}
    for part in ("fp8_block_", "int8_token_", "bf16_nn_", "fp16_nn_", "batch_", "masked_", "contiguous_", "list_"):
        assert any(part in name for name in found), part
    assert not any("fp8_token_swap_split" in name for name in found)


def warm(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Where deep_gemm and humming are modules that cannot be imported."""
    for name in ("deep_gemm", "humming"):
        (folder / f"{name}.py").write_text("raise ImportError('its library is missing')")
    return subprocess.run(
        [sys.executable, str(PEERS / "warm.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


@pytest.mark.parametrize("words", [(), ("--peer", "deep_gemm")])
def test_peers_are_asked_for_before_processes_start(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = warm(tmp_path, *words)
    assert run.returncode == 2
    missing = ("deep_gemm",) if words else ("deep_gemm", "humming")
    said = "; ".join(f"{name} cannot be imported: its library is missing" for name in missing)
    assert run.stderr.strip().endswith(f"error: {said}")


def test_a_number_of_jobs_that_does_nothing_is_refused(tmp_path: Path) -> None:
    run = warm(tmp_path, "--jobs", 0)
    assert run.returncode == 2
    assert run.stderr.strip().endswith("--jobs is 0, expected at least 1")
