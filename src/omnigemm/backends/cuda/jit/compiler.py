"""One spec to one cubin."""

from __future__ import annotations

import dataclasses
import re
import time
from functools import cached_property

from ....core.errors import CompileError
from . import nvrtc, store
from .spec import BASE_OPTIONS, KernelSpec, headers

ERROR_LINES = 8  # of the log, in the message


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas said about the kernel; shared memory is the static part."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A cubin with its log. `seconds` is what NVRTC took, also when the cubin comes from the disk."""

    spec: KernelSpec
    cubin: bytes = dataclasses.field(repr=False)
    log: str = dataclasses.field(repr=False)
    seconds: float
    from_disk: bool = False

    @cached_property
    def resources(self) -> Resources | None:
        """None when the log does not tell."""
        return parse_resources(self.log, self.spec.name)


def compile_cubin(spec: KernelSpec) -> Compiled:
    """Compile, without looking at the cache. A failure keeps the source and the log, and says where."""
    version = nvrtc.version()
    options = [f"--gpu-architecture={spec.arch}", *BASE_OPTIONS, *spec.options]
    start = time.perf_counter()
    cubin, log = nvrtc.run(spec.source, headers(spec.header_root), options)
    seconds = time.perf_counter() - start
    if cubin is None:
        lines = [line for line in log.splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if "error" in line), 0)
        told = "\n".join(lines[first : first + ERROR_LINES])
        kept = store.keep_failed(spec, log)
        raise CompileError(f"kernel {spec.name} does not compile for {spec.arch} with NVRTC {version}:\n{told}\n{kept}")
    return Compiled(spec, cubin, log, seconds)


def parse_resources(log: str, name: str) -> Resources | None:
    """The figures of one entry function in ptxas's verbose log."""
    start = log.find(f"Compiling entry function '{name}'")
    if start < 0:
        return None
    part = log[start:]
    after = part.find("Compiling entry function", 1)
    part = part[:after] if after > 0 else part
    registers = re.search(r"Used (\d+) registers", part)
    if registers is None:
        return None
    spills = sum(int(one) for one in re.findall(r"(\d+) bytes spill (?:stores|loads)", part))
    shared = re.search(r"(\d+) bytes smem", part)
    return Resources(int(registers[1]), spills, int(shared[1]) if shared else 0)
