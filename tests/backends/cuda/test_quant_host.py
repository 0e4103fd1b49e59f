"""The quantisers on a machine without a GPU: when kernels are used, for which GPU, and what a capture meets."""

from __future__ import annotations

import pytest
import torch

import omnigemm
from nvrtc_here import require
from omnigemm.backends.cuda import gpu, jit, quant, quant_source
from omnigemm.backends.cuda.gpu import Gpu
from omnigemm.backends.cuda.jit import nvrtc
from omnigemm.backends.cuda.quant_source import Variant
from omnigemm.core.dispatch import Support


def test_tensors_elsewhere_are_torchs() -> None:
    for device in ("cpu", "meta"):
        assert not quant.usable(torch.ones(3, 4, device=device))


@pytest.mark.parametrize(
    ("capability", "known", "expected"),
    [
        ((9, 0), (75, 80, 89, 90, 100), "sm_90"),
        ((8, 6), (75, 80, 86, 89), "sm_86"),
        ((8, 9), (75, 80, 86), "sm_86"),  # code for an older minor
        ((8, 0), (75, 86, 89), None),  # but not for a newer one
        ((7, 5), (75, 80), "sm_75"),
        ((7, 0), (70, 75), None),  # too old for our kernels
        ((12, 0), (75, 90), None),  # too new for the compiler
        ((9, 0), (), None),  # no compiler
    ],
)
def test_architecture(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: tuple[int, ...], expected: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu, "of", lambda index: Gpu("NVIDIA Some", capability, 100))
    monkeypatch.setattr(nvrtc, "architectures", lambda: known)
    monkeypatch.setattr(jit, "available", lambda: Support(True, "NVRTC 13.9"))
    monkeypatch.setattr(jit, "driver_fault", lambda: "")
    assert quant.architecture.__wrapped__(0) == expected
    for owner, name, other in (
        (torch.version, "cuda", None),
        (jit, "available", lambda: Support(False, "cuda.core is not installed")),
        (jit, "driver_fault", lambda: "the driver is too old"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert quant.architecture.__wrapped__(0) is None


def test_nvrtc_says_what_it_compiles_for() -> None:
    found = nvrtc.architectures()
    assert found == () if not nvrtc.available() else 90 in found


def test_a_capture_that_would_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Variant("plain", "bf16", "e4m3", "token", True)
    shape = quant_source.rows(variant, 4, 64)
    require()
    wanted = quant_source.spec(variant, shape, "sm_90")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    words = "omnigemm_quant_bf16_e4m3_token is not compiled yet, and a CUDA graph is being captured; call the quantiser"
    with pytest.raises(omnigemm.DeviceError, match=words):
        quant._launcher(wanted, shape, "P", 0)


def test_kernels_are_named_after_what_they_do() -> None:
    def name(*words: str, measure: bool = False) -> str:
        variant = Variant(*words, True)
        return quant_source.spec(variant, quant_source.Shape(1, 32), "sm_90", measure).name

    assert name("plain", "fp32", "int8_zero", "token") == "omnigemm_quant_fp32_int8_zero_token"
    assert name("rms_norm", "bf16", "e4m3", "1x128") == "omnigemm_quant_rms_norm_bf16_e4m3_1x128"
    assert name("plain", "fp16", "e5m2", "tensor", measure=True) == "omnigemm_quant_fp16_measure_tensor"


def test_codes_without_zero_points_are_measured_by_one_kernel() -> None:
    made = {
        quant_source.spec(Variant("plain", "bf16", codec, "tensor", True), quant_source.Shape(1, 256), "sm_90", True)
        for codec in quant_source.CODECS
    }
    assert len(made) == 2
