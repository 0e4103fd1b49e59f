"""The Hopper kernels compile for sm_90a on a machine without a GPU, without spills and without serialised products."""

from __future__ import annotations

import dataclasses

import pytest

from omnigemm.backends.cuda import sm90
from omnigemm.backends.cuda.jit import KernelSpec, available, compile_cubin

CONFIGS = tuple(sm90.configs())
needs_nvrtc = pytest.mark.skipif(not available(), reason=available().reason)


def spec(config: sm90.Config, n: int = 4096, k: int = 7168, a: str = "e4m3", b: str = "e4m3") -> KernelSpec:
    return KernelSpec(sm90.KERNEL, sm90.source(config, n, k, a, b), "sm_90a", sm90.OPTIONS)


def test_enumerated_configs_are_legal_and_deep() -> None:
    assert {config.block_n for config in CONFIGS} == {128, 192}
    for config in CONFIGS:
        assert config.fault() is None
        assert "shared memory" in str(dataclasses.replace(config, stages=config.stages + 1).fault())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_m": 64}, "block_m is 64"),
        ({"block_n": 160}, "block_n is 160"),
        ({"stages": 1}, "stages is 1"),
        ({"band": 0}, "band is 0"),
        ({"stages": 9}, "shared memory is"),
    ],
)
def test_illegal_configs_say_why(change: dict[str, int], word: str) -> None:
    config = dataclasses.replace(sm90.Config(), **change)
    assert word in str(config.fault())
    with pytest.raises(ValueError, match=word):
        sm90.source(config, 128, 128)


def test_grid_is_persistent() -> None:
    assert sm90.Config().grid(4096, 4096, 132) == 132
    assert sm90.Config().grid(1, 192, 132) == 1
    assert sm90.Config().grid(129, 193, 132) == 4


@needs_nvrtc
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e5m2", "e4m3")], ids="-".join)
def test_compiles_clean(config: sm90.Config, types: tuple[str, str]) -> None:
    compiled = compile_cubin(spec(config, 2112, 7168, *types))
    assert "serialized" not in compiled.log, compiled.log
    if compiled.resources is None:
        pytest.skip("this NVRTC does not tell what ptxas says; tests/gpu asks the driver for spills")
    assert compiled.resources.spill_bytes == 0
    # Three warpgroups of 128 share 65536 registers; setmaxnreg moves them from there.
    assert compiled.resources.registers <= 168


@needs_nvrtc
def test_shapes_are_part_of_the_key() -> None:
    keys = {spec(sm90.Config(), n, k).key for n, k in ((4096, 7168), (4096, 512), (512, 7168))}
    assert len(keys) == 3
