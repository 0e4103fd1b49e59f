"""GPU tests leave out what a config cannot compute. That no config is left out altogether is seen without a GPU."""

from __future__ import annotations

import pytest

from gpu import compile_ahead, group_cases, test_batches, test_fp8_configs, test_gemm16, test_grouped_configs, test_int8
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.sm90 import Config


@pytest.mark.parametrize(
    ("configs", "cases"),
    [
        (test_fp8_configs.CONFIGS, test_fp8_configs.CASES),
        (test_gemm16.CONFIGS, test_gemm16.CASES),
        (test_int8.CONFIGS, test_int8.CASES),
        (test_gemm16.CONFIGS, test_batches.CASES_16),
        (test_int8.CONFIGS, test_batches.CASES_INT8),
        (group_cases.CONFIGS | group_cases.CONFIGS_16, test_grouped_configs.CASES),
    ],
    ids=["fp8", "16 bits", "int8", "batches in 16 bits", "int8 batches", "groups"],
)
def test_every_config_has_cases(configs: dict[str, Config], cases: dict[str, tuple[Config, object]]) -> None:
    tried = {config for config, _ in cases.values()}
    assert not [name for name, config in configs.items() if config not in tried]


def test_what_they_run_can_be_compiled_without_a_gpu() -> None:
    found = set(compile_ahead.specs(KNOWN["h200"]))
    assert len(found) > 2000
    assert {one.arch for one in found} == {"sm_90", "sm_90a"}
    cases = test_grouped_configs.specs(KNOWN["h200"]) | test_batches.specs(KNOWN["h200"])
    assert cases < found
