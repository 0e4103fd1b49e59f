"""`omnigemm doctor`: what this machine has, what the library makes of it, and whether the results are right."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from rich.markup import escape

from ..backends import backends
from ..backends.cpu import isa
from ..backends.cuda import jit
from ..bench.record import versions
from ..bench.workloads import CASES, Case, Size, Workload
from ..core.errors import OmniGemmError
from ..core.settings import ENVIRONMENT, cache_dir
from . import output
from .folders import why_not_writable

# Odd on purpose: no dimension is a multiple of a tile or of a scale block.
CHECK_SIZE = Size(5, 136, 264, 3)


def run_doctor(*, as_json: bool = False) -> int:
    """Print the report; 1 if a self-check failed."""
    found = report()
    if as_json:
        output.print_json(found)
    else:
        _show(found)
    return 0 if found["ok"] else 1


def report() -> dict[str, Any]:
    checks = self_check()
    return {
        "versions": versions(),
        "processor": _processor(),
        "cuda": _cuda(),
        "nvrtc": _nvrtc(),
        "backends": [_backend(one) for one in backends()],
        "cache": _cache(),
        "environment": {
            name: {"value": os.environ.get(name), "meaning": meaning, "default": default}
            for name, (meaning, default) in ENVIRONMENT.items()
        },
        "checks": checks,
        "ok": all(one["ok"] for one in checks),
    }


def self_check() -> list[dict[str, Any]]:
    """Every operation once, on a small odd shape, against float64; on the GPU too, where it runs there."""
    jobs = [(one, "cpu") for one in CASES] + [(one, "cuda") for one in _cases_on_gpu()]
    results = []
    with output.progress() as bar:
        task = bar.add_task("self-check", total=len(jobs))
        for one, device in jobs:
            results.append(_check(one, device))
            bar.advance(task)
    return results


def _cases_on_gpu() -> list[Case]:
    cuda = next(one for one in backends() if one.name == "cuda")
    if not cuda.available():
        return []
    return [one for one in CASES if cuda.supports(one.problem(CHECK_SIZE), torch.device("cuda"))]


def _check(one: Case, device: str) -> dict[str, Any]:
    about = {"op": one.op, "title": one.title, "device": device}
    try:
        verdict = Workload(one, CHECK_SIZE, device=device).verify()
    except (OmniGemmError, RuntimeError) as error:
        return {**about, "ok": False, "error": None, "tolerance": None, "note": str(error)}
    kept = dataclasses.asdict(verdict)
    return {**about, **{name: kept[name] for name in ("ok", "error", "tolerance", "note")}}


def _processor() -> dict[str, Any]:
    faults = isa.amx_faults()
    return {
        "name": isa.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "int8_exact": isa.int8_products_are_exact(),
        "native_16_bit": sorted(isa.native_halves()),
        "amx_faults": faults,
        "advice": _advice() if faults else None,
    }


def _advice() -> str:
    return (
        "This machine announces AMX but hides how to configure it, so torch's bf16 products crash. "
        f"Set ONEDNN_MAX_CPU_ISA={isa.ISA_WITHOUT_AMX} before Python starts; this program did so for itself."
    )


def _cuda() -> dict[str, Any]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "this torch is built without CUDA" if built is None else "torch finds no usable GPU"
        return {"available": False, "reason": reason, "devices": []}
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"available": True, "reason": f"CUDA {torch.version.cuda}", "devices": names}


def _nvrtc() -> dict[str, Any]:
    answer = jit.available()
    return {"available": answer.ok, "reason": answer.reason}


def _backend(one: Any) -> dict[str, Any]:
    answer = one.available()
    return {"name": one.name, "available": answer.ok, "reason": answer.reason}


def _cache() -> dict[str, Any]:
    """Reported like all else: a variable that means nothing is what somebody may run this for."""
    try:
        folder = cache_dir()
    except ValueError as error:
        return {"path": None, "exists": False, "writable": False, "reason": str(error)}
    reason = why_not_writable(folder)
    return {"path": str(folder), "exists": os.path.isdir(folder), "writable": not reason, "reason": reason}


# ------------------------------------------------------------------------------------------------ for people


def _cache_in_words(cache: dict[str, Any]) -> str:
    if cache["writable"]:
        return f"{escape(cache['path'])} (writable{'' if cache['exists'] else ', not made yet'})"
    return f"{escape(cache['path'] or 'none')} ([red]not writable[/red]: {escape(cache['reason'])})"


def _show(found: dict[str, Any]) -> None:
    screen = output.console()
    cpu, cuda, cache = found["processor"], found["cuda"], found["cache"]
    facts = output.table("This machine", ("what", "value"))
    for name, value in found["versions"].items():
        facts.add_row(name, value)
    facts.add_row("processor", f"{cpu['name']}, {cpu['cores']} cores, torch uses {cpu['threads']} threads")
    facts.add_row("instructions", cpu["capability"])
    facts.add_row("int8 products", "exact" if cpu["int8_exact"] else "saturate; exact fp32 products replace them")
    facts.add_row("native 16-bit", ", ".join(cpu["native_16_bit"]) or "none; they go through fp32")
    facts.add_row("AMX", "[yellow]announced but faulty[/yellow]" if cpu["amx_faults"] else "no defect found")
    facts.add_row("CUDA", ", ".join(cuda["devices"]) or f"no: {cuda['reason']}")
    nvrtc = found["nvrtc"]
    facts.add_row("NVRTC", escape(nvrtc["reason"] if nvrtc["available"] else f"no: {nvrtc['reason']}"))
    for one in found["backends"]:
        facts.add_row(f"backend {one['name']}", ("yes: " if one["available"] else "no: ") + escape(one["reason"]))
    facts.add_row("cache folder", _cache_in_words(cache))
    screen.print(facts)
    if cpu["advice"]:
        screen.print(f"[yellow]{cpu['advice']}[/yellow]\n", soft_wrap=True)

    settings = output.table("Environment", ("variable", "value", "meaning"))
    for name, one in found["environment"].items():
        value = escape(one["value"]) if one["value"] is not None else f"[dim]not set ({one['default']})[/dim]"
        settings.add_row(name, value, one["meaning"])
    screen.print(settings)

    checks = output.table(
        "Self-check against float64",
        ("operation", "operands", "on", "error", "allowed", "result"),
        right=("error", "allowed"),
    )
    for one in found["checks"]:
        error = "" if one["error"] is None else f"{one['error']:.1e}"
        allowed = "" if one["tolerance"] is None else f"{one['tolerance']:.1e}"
        checks.add_row(one["op"], one["title"], one["device"], error, allowed, output.mark(one["ok"], one["note"]))
    screen.print(checks)
    failed = sum(not one["ok"] for one in found["checks"])
    total = len(found["checks"])
    screen.print(
        f"[red]{failed} of {total} self-checks failed.[/red]"
        if failed
        else f"[green]All {total} self-checks passed.[/green]"
    )
