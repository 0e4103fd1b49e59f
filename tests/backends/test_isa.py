"""The processor's defects: found where they are, and gone around."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from omnigemm.backends.cpu import isa

GOOD = "model name\t: Good CPU\ncpuid level\t: 32\nflags\t\t: fpu amx_bf16 amx_tile amx_int8"
HIDDEN = GOOD.replace("32", "28")
WITHOUT = "cpuid level\t: 22\nflags\t\t: fpu avx512_vnni"


@pytest.mark.parametrize(("cpuinfo", "faulty"), [(GOOD, False), (HIDDEN, True), (WITHOUT, False), ("", False)])
def test_amx_defect(cpuinfo: str, faulty: bool) -> None:
    assert isa._amx_defect(cpuinfo) is faulty


def test_shield_sets_the_variable_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(isa, "_cpuinfo", lambda: GOOD)
    assert not isa.shield_onednn()
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    monkeypatch.setattr(isa, "_cpuinfo", lambda: HIDDEN)
    assert isa.shield_onednn()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == isa.ISA_WITHOUT_AMX
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not isa.shield_onednn()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_a_user_without_the_shield_survives_bf16() -> None:
    """On a machine whose AMX faults, torch's own bf16 product would end this process with SIGILL."""
    code = (
        "import torch, omnigemm\n"
        "a, b = torch.ones(32, 64).bfloat16(), torch.ones(64, 48).bfloat16()\n"
        "assert (omnigemm.gemm(a, b) == 64).all()\n"
        "w = omnigemm.quantize_int4(torch.ones(48, 64).bfloat16(), group_size=32)\n"
        "for m in (1, 32, 300): omnigemm.int4_gemm(torch.ones(m, 64).bfloat16(), w)\n"
        "print(omnigemm.plan('gemm', m=32, n=48, k=64).kernel)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ("mm_fp32" if isa.amx_faults() else "mm")
