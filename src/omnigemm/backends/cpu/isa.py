"""What this processor's instructions can be trusted with, found out at the first use and remembered.

Two defects of real machines matter, because both are silent until it is too late:
- oneDNN's int8 products saturate in 16 bits on processors without VNNI, so they are not exact there.
- Some virtual machines announce AMX but hide CPUID leaf 0x1D, which describes its tiles. oneDNN then configures
  no tiles, and the first bf16 product kills the process with SIGILL.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import torch

AMX_PALETTE_LEAF = 0x1D
# The highest instruction set of oneDNN that does not use AMX.
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"


@cache
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return ""


def _amx_defect(cpuinfo: str) -> bool:
    level = re.search(r"^cpuid level\s*:\s*(\d+)", cpuinfo, re.M)
    return " amx_tile" in cpuinfo and level is not None and int(level[1]) < AMX_PALETTE_LEAF


def amx_faults() -> bool:
    """Whether AMX is announced without the leaf that oneDNN configures it from."""
    return _amx_defect(_cpuinfo())


def shield_onednn() -> bool:
    """Keep oneDNN off a faulty AMX, in this process and its children. True if that was needed.

    It works only before oneDNN's first product, so programs (the command line, the tests) call it when they start;
    the library itself does not touch its user's environment.
    """
    if amx_faults() and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        os.environ["ONEDNN_MAX_CPU_ISA"] = ISA_WITHOUT_AMX
        return True
    return False


@cache
def bf16_products_are_safe() -> bool:
    """Whether torch's own bf16 products may be called. Asked once: oneDNN also reads the variable once."""
    return not amx_faults() or os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT") not in (
        "DEFAULT",
        "AVX512_CORE_AMX",
    )


@cache
def native_halves() -> frozenset[str]:
    """The 16-bit types whose products torch runs in the processor's own instructions."""
    found = set()
    ops = torch.ops.mkldnn
    if torch.backends.mkldnn.is_available():
        if bf16_products_are_safe() and ops._is_mkldnn_bf16_supported():
            found.add("bf16")
        if ops._is_mkldnn_fp16_supported():
            found.add("fp16")
    return frozenset(found)


@cache
def has_amx_bf16() -> bool:
    return bf16_products_are_safe() and " amx_bf16" in _cpuinfo() and "ONEDNN_MAX_CPU_ISA" not in os.environ


@cache
def int8_products_are_exact() -> bool:
    """Whether `torch._int_mm` adds without saturating, tried with the largest products there are.

    Asked of the behaviour, not of CPUID: the answer also depends on how oneDNN was built and limited.
    """
    for m in (1, 3, 32):
        for left in (-128, 127):
            for right in (-128, 127):
                a = torch.full((m, 64), left, dtype=torch.int8, device="cpu")
                b = torch.full((48, 64), right, dtype=torch.int8, device="cpu")
                if not bool((torch._int_mm(a, b.t()) == 64 * left * right).all()):
                    return False
    return True


def processor() -> str:
    """The processor's name, for reports."""
    match = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.M)
    return match[1].strip() if match else "unknown processor"
