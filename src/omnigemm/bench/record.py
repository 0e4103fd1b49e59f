"""Records of runs, as data: one JSON object per machine, read and written here only."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import omnigemm

from ..backends.cpu.isa import processor
from ..core.plan import Plan
from .timing import Timing
from .workloads import OURS, Workload

FIELDS = ("source_hash", "gpu", "cpu", "driver", "versions", "threads", "method", "tests", "stale", "rows")
ROW_FIELDS = ("op", "shape", "us", "floor_us", "peers", "config")


def cuda_source_hash() -> str:
    """SHA-256 of the CUDA sources and their host code: what a GPU run vouches for."""
    package = Path(omnigemm.__file__).parent
    host = package / "backends" / "cuda"
    files = [*(package / "kernels").rglob("*.cuh"), *host.rglob("*.py"), *host.rglob("*.json")]
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def versions() -> dict[str, str]:
    return {
        "omnigemm": omnigemm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.platform(),
    }


def row(work: Workload, timings: Mapping[str, Timing], ours: str = OURS) -> dict[str, Any]:
    """One measurement. What is not ours in `timings` and starts with 'torch' is a peer."""
    peers = {name: round(one.us, 2) for name, one in timings.items() if name.startswith("torch")}
    return {
        "op": work.problem.op,
        "shape": str(work.size),
        "us": round(timings[ours].us, 2),
        "floor_us": None,  # a processor's floor depends on who else uses its memory
        "peers": peers,
        "config": config(work.plan()),
    }


def config(plan: Plan) -> dict[str, Any]:
    """The kernel and what about the problem is not in its shape."""
    p = plan.problem
    words: dict[str, Any] = {
        "kernel": f"{plan.backend}/{plan.kernel}",
        "dtype": p.a_dtype,
        "weight_dtype": p.b_dtype,
        "out_dtype": p.out_dtype,
    }
    if p.a_scale != "none":
        words["scales"] = f"{p.a_scale} x {p.b_scale}"
    if p.is_int4:
        words["group_size"] = p.group_size
    if p.zero_points:
        words["zero_points"] = True
    return {**words, **plan.config}


def new(rows: Sequence[Mapping[str, Any]], method: str, source_hash: str | None = None) -> dict[str, Any]:
    """A record of this machine."""
    return {
        "source_hash": source_hash,
        "gpu": None,
        "cpu": processor(),
        "driver": None,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "method": method,
        "tests": None,
        "stale": None,
        "rows": [dict(one) for one in rows],
    }


def keep_rows(record: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Add what another record has measured and this one has not. Such rows say which kernels they are of."""
    anew = {(one["op"], one["shape"]) for one in record["rows"]}
    record["rows"] += [
        {"source_hash": before["source_hash"], **one} for one in before["rows"] if (one["op"], one["shape"]) not in anew
    ]


def file_name(processor_name: str) -> str:
    """A file name from a processor's name: 'Intel(R) Xeon(R) Gold' -> 'intel-xeon-gold.json'."""
    plain = re.sub(r"\((?:r|tm|c)\)", " ", processor_name.lower())
    return (re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown") + ".json"


def write(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A record, checked for its fields."""
    record = json.loads(path.read_text(encoding="utf-8"))
    missing = [name for name in FIELDS if name not in record]
    for one in record.get("rows", ()):
        missing += [f"rows.{name}" for name in ROW_FIELDS if name not in one]
    if missing:
        raise ValueError(f"{path}: the record lacks {', '.join(sorted(set(missing)))}")
    return dict(record)
