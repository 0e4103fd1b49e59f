"""Records are whole, and those of GPUs vouch for the kernels in this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnigemm.bench.record import cuda_source_hash, read

RECORDS = sorted((Path(__file__).parents[1] / "benchmarks" / "records").glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record(path: Path) -> None:
    record = read(path)
    assert record["rows"]
    if record["gpu"] is None:
        return
    assert record["tests"]["passed"] > 0
    assert record["tests"]["failed"] == 0
    current = record["source_hash"] == cuda_source_hash()
    assert current or record["stale"], "kernels changed since the last GPU run: run benchmarks/gpu.py on a GPU"


def test_there_is_a_record_of_a_gpu_and_one_of_a_cpu() -> None:
    assert {read(path)["gpu"] is None for path in RECORDS} == {True, False}
