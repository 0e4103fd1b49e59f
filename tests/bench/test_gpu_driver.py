"""benchmarks/gpu.py from its first line to the record, with a CUDA that is pretended: nothing is computed, and all
times are the same. What it would cost to find a mistake there on a GPU is the machine's time."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import omnigemm
from backends.blas.cases import NVIDIA
from backends.blas.conftest import SOURCE, compiled
from emulated import emulated
from omnigemm.backends.blas import BlasBackend
from omnigemm.backends.blas.caller import Caller
from omnigemm.backends.cuda import CudaBackend, jit
from omnigemm.bench import graph, host, record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("gemm", "groups", "k_groups", "lists", "quant", "peers", "peers.humming_w8a8", "peers.cutlass_int8")
HALF_A_MINUTE = 30.0  # of each replay, in milliseconds as events have them: one replay is long enough to count


class Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: Event) -> float:
        return HALF_A_MINUTE


def nothing(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program, with one small shape of each kind."""
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("gpu_driver", BENCHMARKS / "gpu.py")  # `gpu` is a folder of tests
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import gemm
    import groups
    import k_groups
    import lists

    import quant

    stream = SimpleNamespace(wait_stream=nothing)
    pretended = {
        "CUDAGraph": lambda: SimpleNamespace(replay=nothing, capture_begin=nothing, capture_end=nothing),
        "Event": Event,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "empty_cache": nothing,
        "get_device_name": lambda index: "NVIDIA H200",
        "is_available": lambda: True,
        "stream": nothing,
        "synchronize": nothing,
    }
    library = compiled(SOURCE, tmp_path / "libcublas.so")
    blas = BlasBackend(NVIDIA, str(library.path), Caller(lambda: 0, lambda index: 1, lambda: False, nothing))
    here = CudaBackend(), blas
    changes: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, pretended),
        (graph, {"COLD_BYTES": 1}),
        (host, {"CALLS": 2, "TURNS": 2}),
        (jit, {"warm": lambda *_, **__: []}),
        (omnigemm.backends, {"backends": lambda: here}),
        (module, {"SHAPES": [(1, 128, 256), (256, 256, 384)], "INT8_SHAPES": [(1, 128, 256), (256, 256, 384)]}),
        (module, {"driver_version": lambda: "580.1"}),
        (module, {"run_tests": lambda: {"passed": 7, "failed": 0, "skipped": 0}, "compile_all": lambda ops: {}}),
        (gemm, {"SHAPES": {op: [(8, 64, 128)] for op in gemm.SHAPES}}),
        (gemm, {name: [(2, 8, 64, 64)] for name in ("BATCHES", "HEADS", "GROUPS")}),
        (groups, {"SHAPES": {op: [(4, 10, 128, 256)] for op in groups.SHAPES}}),
        (k_groups, {"SHAPES": [(4, 128, 64, 64)]}),
        (lists, {"_DENSE": 64, "shapes": lambda count: [(8, 16, 24)] * (count // 10)}),
        (quant, {"LARGE": (16, 256), "SMALL": (4, 256)}),
    ]
    for owner, names in changes:
        for name, other in names.items():
            monkeypatch.setattr(owner, name, other)
    with emulated(tmp_path) as hopper:
        monkeypatch.setattr(hopper, "run", nothing)
        yield module


def written(driver: ModuleType, folder: Path, **words: Any) -> dict[str, Any]:
    """The record of a run with these options."""
    usual: dict[str, Any] = dict.fromkeys(("op", "part", "cutlass", "peer", "compile_only", "keep"))
    driver.main(**{**usual, "out": folder, "rows_only": False, "deep_gemm_groups": True, "seconds": 1e9, **words})
    return record.read(folder / "nvidia-h200.json")


def test_all_of_it_runs_to_the_record(driver: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = written(driver, tmp_path)
    assert (made["gpu"], made["driver"], made["tests"]["passed"]) == ("NVIDIA H200", "580.1", 7)
    assert made["source_hash"] == record.cuda_source_hash()
    ops = {row["op"] for row in made["rows"]}
    assert {"fp8_block", "fp8_token", "fp8_tensor", "int8", "gemm_bf16", "baddbmm_bf16", "bmm_bf16"} <= ops
    assert {"grouped_list_bf16", *driver.K_GROUPS, "grouped_masked_fp8_block", "fp8 1x128"} <= ops
    assert all(row["us"] > 0 and "kernel" in row["config"] for row in made["rows"] if "backend" not in row["config"])
    assert {"with out=", "gemm: gemm by blas, out=", "quantisers: fp8 tensor"} <= {*made["host_us"]}
    said = capsys.readouterr().out
    assert "left out: deep_gemm cannot be imported" in said
    assert "left out: humming cannot be imported" in said


def test_rows_of_another_record_are_kept(driver: ModuleType, tmp_path: Path) -> None:
    before = written(driver, tmp_path, part=["int8", "quantisers"])
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**before, "source_hash": "of then"}))
    made = written(driver, tmp_path, part=["int8"], keep=old)
    kept = [row for row in made["rows"] if row.get("source_hash") == "of then"]
    assert {row["op"] for row in kept} == {row["op"] for row in before["rows"]} - {"int8"}
    assert len(made["rows"]) == len(before["rows"])


def test_what_was_measured_before_it_was_stopped_is_kept(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = driver.measure_int8

    def stopped(m: int, *rest: Any) -> dict[str, Any]:
        if m > 1:
            raise KeyboardInterrupt
        row: dict[str, Any] = real(m, *rest)
        return row

    monkeypatch.setattr(driver, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(driver, "measure_int8", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(driver, tmp_path, part=["int8"])
    (row,) = record.read(tmp_path / "nvidia-h200.json")["rows"]
    assert (row["op"], row["shape"]) == ("int8", "1x128x256")


@dataclasses.dataclass
class HummingLayer:
    """As the one of humming-kernels 0.1.19 is used."""

    shape_n: int
    shape_k: int
    weight_config: dict[str, Any]
    input_config: dict[str, Any]
    torch_dtype: torch.dtype
    off = 1.0

    def to(self, _: torch.device) -> HummingLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert tensors["weight"].shape == (self.shape_n, self.shape_k // 4)
        assert tensors["weight"].dtype == torch.int32
        eight = self.weight_config["dtype"] == "int8"
        codes = tensors["weight"].view(torch.uint8 if eight else torch.float8_e4m3fn).float()
        scale = tensors["weight_scale"]
        if eight:
            codes, scale = codes - 128, scale.bfloat16().float()
            assert self.weight_config == self.input_config == {"dtype": "int8"}
            assert scale.shape == (self.shape_n, 1)
        else:
            assert self.weight_config == {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128}
            assert self.input_config == {"dtype": "float8e4m3", "group_size": 128}
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.weight = codes * scale * self.off

    def transform(self) -> None:
        pass

    def __call__(self, a: torch.Tensor, outputs: torch.Tensor, input_scale: torch.Tensor) -> None:
        scale = input_scale if a.dtype == torch.int8 else input_scale.repeat_interleave(128, 1)
        outputs.copy_((a.float() * scale) @ self.weight.t())


@pytest.mark.parametrize("off", [1.0, 1.1])
def test_humming_is_measured_beside_ours_if_it_computes_the_same(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], off: float
) -> None:
    monkeypatch.setattr(HummingLayer, "off", off)
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=HummingLayer))  # type: ignore[misc]
    rows = written(driver, tmp_path, op=["fp8_block"], part=["fp8", "int8"])["rows"]
    assert {row["op"] for row in rows} == {"fp8_block", "int8"}
    expected = {"Humming"} if off == 1.0 else set()
    assert all({*row.get("pairs", {})} == expected for row in rows)
    said = capsys.readouterr().out
    assert "humming is measured, too" in said
    assert ("humming is left out for 1x128x256: ValueError('its result is off by" in said) == (off != 1.0)
