"""Our Hopper kernels on a processor: a launcher that compiles a kernel's own source for the host, with the emulator of
`backends/cuda/emulator` in the place of the instructions' wrappers, and runs it. Tensors of the CPU stand in for the
GPU's; everything above the driver is what a GPU gets."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
import struct
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import host_compiler
import list_memory
from omnigemm.backends.cpu import CpuBackend
from omnigemm.backends.cuda import CudaBackend, batches, dense, gemm, gpu, groups, k_groups, list_launch, list_setup
from omnigemm.backends.cuda.jit import KernelSpec
from omnigemm.backends.cuda.launch import Matrix
from omnigemm.core import dispatch, fresh
from omnigemm.core.dispatch import Support
from op_support import forget_calls

# So small that blocks have more than one tile to do.
SMALL = dataclasses.replace(gpu.KNOWN["h200"], multiprocessors=8)
_MODULES = (batches, dense, gemm, groups, k_groups, list_launch, list_setup)
_MEMORY = "extern __shared__ __align__(1024) char memory[];"
_INSTRUCTION = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k(?P<depth>\d+)\.(?:f32|s32)\.(?P<left>\w+)\.(?P<right>\w+) "
    r".*add(?:, 1, 1)?(?P<turned>(?:, [01]){2})?;"
)
_ENTRY = """
static TensorMap maps[3];
static Arguments given;
extern "C" const char* launch(const void* map_bytes, const void* values, int size, const emulator::Launch* how) {{
    const int more = int(sizeof given) - size;
    if (more < 0 || more >= 8) return "arguments of another size than the kernel has";
    memcpy(static_cast<void*>(maps), map_bytes, sizeof maps);
    memcpy(static_cast<void*>(&given), values, size);
    return emulator::launch([] {{ {call}; }}, *how);
}}
"""
_MAPS = 3 * 128  # bytes
_EARLY = 7  # where arguments.py has the stages of weights to load at once,
_GROUPS = {1: 12, 2: 18}  # and how many groups there are, by bytes of an element
_OPTIONS = ("-O2", "-march=native", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")


class _Written(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("instead", ctypes.c_void_p)]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("grid", "threads", "cluster", "shared_bytes", "at_once")),
        ("seed", ctypes.c_uint64),
        ("before", ctypes.POINTER(_Written)),
        ("written", ctypes.c_int),
    ]


Region = tuple[int, int, int]  # an address, bytes, and the address of what is there until it is written, or 0
Change = tuple[str, str, str]  # a header, a part of it, and what is to be there instead
# Blocks run side by side here, so shared memory is each block's own.
_ALWAYS: Change = ("sm90/gemm.cuh", _MEMORY, "char* memory = emulator::shared_memory();")


def _host_source(spec: KernelSpec) -> str:
    """What the host compiles for a kernel."""
    source, maps = spec.source, "maps[0], maps[1], maps[2], " if '#include "sm90/' in spec.source else ""
    found = _INSTRUCTION.search(source)
    if found is not None:
        kinds = ", ".join(f"emulator::{found[side]}" for side in ("left", "right"))
        flags = found["turned"] or ", 0, 0"
        constants, rest = source.split("__device__", 1)
        source = (
            f'{constants}#include "common/ptx.cuh"\n'
            "template <class Sum, int count>\nvoid wgmma(Sum (&d)[count], u64 left, u64 right, bool add) {\n"
            f"    emulator::multiply<{found['columns']}, {found['depth']}, {kinds}{flags}>(d, left, right, add);\n}}\n"
            + rest[rest.index("#include") :]
        )
    return source + _ENTRY.format(call=f"{spec.name}({maps}given)")


@cache
def compiled(spec: KernelSpec, parent: Path, changes: tuple[Change, ...] = ()) -> ctypes.CDLL:
    """A kernel for the processor, built in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    texts: dict[str, str] = {}
    for header, old, new in (_ALWAYS, *changes):
        text = texts.get(header) or (host_compiler.KERNELS / header).read_text()
        assert text.count(old) == 1, f"{header} has {text.count(old)} times {old!r}"
        texts[header] = text.replace(old, new)
    for header, text in texts.items():
        (folder / header).parent.mkdir(exist_ok=True)
        (folder / header).write_text(text)
    options = (*_OPTIONS, f"-I{folder}")
    library = host_compiler.library(folder, _host_source(spec), *options, only_gcc=True, emulated=True)
    library.launch.restype = ctypes.c_char_p
    return library


def run(
    library: ctypes.CDLL,
    values: bytes,
    *,
    grid: int,
    threads: int,
    cluster: int = 1,
    shared_bytes: int = 0,
    maps: bytes = b"",
    at_once: int = 1,
    seed: int = 0,
    written: Sequence[Region] = (),
) -> None:
    """Launch it. `at_once`: clusters that run side by side; kernels with variables in shared memory have one.
    `written`: by the kernel before, so that something else is there until that is done."""
    before = (_Written * len(written))(*(_Written(*one) for one in written))
    how = _Launch(grid, threads, cluster, shared_bytes, at_once, seed, before, len(written))
    fault = library.launch(maps.ljust(_MAPS, b"\xff"), values, len(values), ctypes.byref(how))
    assert not fault, f"seed {seed}: {fault.decode()}"


class Hopper:
    """Stands in for a GPU. Under a `seed`, warps take turns by lot and copies come when they come; without one all is
    as late as it may be. Operands and results, and tensors that are `written`, are not yet there when a kernel begins;
    where one of these is `stale`, that tensor's values are. `changes`: kernels that are not as they should be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seed = 0
        self.at_once = 3
        self.limit = 0  # products (of two numbers) in a launch: a test with more is skipped
        self.written: list[Tensor] = []
        self.stale: dict[int, Tensor] = {}  # by the address of a tensor that is written
        self.changes: tuple[Change, ...] = ()
        self.launches: list[str] = []

    def run(self, spec: KernelSpec, values: bytes, late: Sequence[Region], **how: Any) -> None:
        self.launches.append(spec.name)
        side_by_side = self.at_once if "gemm.cuh" in spec.source else 1
        library = compiled(spec, self._folder, self.changes)
        written = [(one.data_ptr(), one.nbytes, self._until_then(one.data_ptr())) for one in self.written]
        run(library, values, **how, at_once=side_by_side, seed=self.seed, written=[*late, *written])

    def _until_then(self, address: int) -> int:
        return self.stale[address].data_ptr() if address in self.stale else 0


class Launcher:
    """As launch.Launcher is."""

    gpu: Hopper

    def __init__(
        self,
        kernel: KernelSpec,
        *,
        grid: int,
        threads: int,
        shared_bytes: int,
        cluster: int,
        matrices: Sequence[Matrix | None],
        values: str,
        overlap: bool = True,
    ) -> None:
        self.kernel, self.matrices, self.values = kernel, tuple(matrices), struct.Struct(values)
        self.shape = {"grid": grid, "threads": threads, "shared_bytes": shared_bytes, "cluster": cluster}

    def __call__(self, stream: int, addresses: tuple[int, ...], *values: Any) -> None:
        self.launch(stream, addresses, values)

    def launch(self, stream: int, addresses: tuple[int, ...], values: tuple[Any, ...]) -> None:
        if self.gpu.limit and (work := self._work(values)) > self.gpu.limit:
            pytest.skip(f"{work:.1e} products are too many for the emulator")
        maps = b"".join(_packed(one, at) for one, at in zip(self.matrices, addresses, strict=True))
        self.gpu.run(self.kernel, self.values.pack(*values), self._late(addresses, values), maps=maps, **self.shape)

    def _work(self, values: tuple[Any, ...]) -> int:
        """Products of two numbers, as far as this is known here: of a list it is not."""
        source = self.kernel.source
        if "#define LIST 0" not in source:
            return 0
        left, right = self.matrices[:2]
        assert left is not None
        assert right is not None
        # Of groups, each row meets one weight of all.
        groups = (
            values[_GROUPS[2 if "#define ELEMENT_BYTES 2" in source else 1]] if "#define GROUPED 1" in source else 1
        )
        return max(left.count, 1) * left.rows * right.rows * min(left.columns, right.columns) // groups

    def _late(self, addresses: tuple[int, ...], values: tuple[Any, ...]) -> list[Region]:
        """What this kernel must wait for before it reads it: what the small kernel made of a list; else operands, less
        weights that are stated to be constant, and results."""
        source = self.kernel.source
        if "#define LIST 1" in source:
            memory, count = values[2:4] if "#define ELEMENT_BYTES 1" in source else values
            return [(memory, list_memory.BYTES * count + 4, 0)]
        if "gemm.cuh" not in source:
            return []
        weights = 0 if "#define SWAP 1" in source else 1
        constant = values[_EARLY] > 0
        return [
            (at, _size(one), 0)
            for i, (one, at) in enumerate(zip(self.matrices, addresses, strict=True))
            if one is not None and not (i == weights and constant)
        ]


def _size(matrix: Matrix) -> int:
    """Bytes from its first to its last."""
    steps = max(matrix.count - 1, 0) * matrix.step_bytes + (matrix.rows - 1) * matrix.pitch_bytes
    return steps + matrix.columns * matrix.element_bytes


def _packed(matrix: Matrix | None, address: int) -> bytes:
    """As threads.cuh has them, if the driver would take them."""
    if matrix is None:
        return b"\xff" * 128
    assert address % 16 == 0
    assert matrix.pitch_bytes % 16 == 0
    assert 0 < matrix.pitch_bytes < 2**40
    assert min(matrix.columns, matrix.rows, *matrix.box) > 0
    assert max(matrix.box) <= 256
    assert matrix.step_bytes % 16 == 0
    sizes = address, matrix.pitch_bytes, matrix.columns, matrix.rows, matrix.step_bytes, matrix.count
    return struct.pack("QQIIQIIII80x", *sizes, *matrix.box, matrix.element_bytes)


def _here(words: dict[str, Any]) -> dict[str, Any]:
    """Keywords that ask for a tensor of the GPU, with the processor instead."""
    device = words.get("device")
    return words if device is None or torch.device(device).type != "cuda" else {**words, "device": "cpu"}


def whole(*shape: int) -> Tensor:
    """Numbers whose sums are exact: whatever is wrong with one shows."""
    return torch.randint(-3, 4, shape).float()


class _OnTheProcessor(TorchFunctionMode):
    """New tensors of the GPU are the processor's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **_here(kwargs or {}))


@contextlib.contextmanager
def emulated(folder: Path, *, cuda_tensors: bool = True) -> Iterator[Hopper]:
    """While this lasts, launches of the CUDA backend run here, on tensors of the CPU. `cuda_tensors`: who asks torch
    for a GPU's gets those."""
    made = Launcher.gpu = Hopper(folder)
    replaced = {
        "Launcher": Launcher,
        "load": lambda spec, index, shared_bytes=0: SimpleNamespace(kernel=spec, local_bytes=0),
        "is_loaded": lambda *_: True,
        "raw_stream": lambda index: 0,
    }
    mode = _OnTheProcessor() if cuda_tensors else contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as patch, mode:
        for module in _MODULES:
            for name, other in replaced.items():
                if hasattr(module, name):
                    patch.setattr(module, name, other)
        patch.setattr(dispatch, "resolve_device", lambda op, device: torch.device("cpu"))
        patch.setattr(list_setup, "most_lines", lambda: list_setup.LINES[-1])
        patch.setattr(fresh, "empty_strided_cuda", None)
        empty = torch.empty  # also below torch's dispatcher, where no mode is
        patch.setattr(torch, "empty", lambda *sizes, **words: empty(*sizes, **_here(words)))
        patch.setattr(gpu, "of", lambda index: SMALL)
        patch.setattr(CudaBackend, "available", lambda self: Support(True, "emulated"))
        patch.setattr(CudaBackend, "supports", lambda self, problem, device: self.supports_on(problem, SMALL))
        patch.setattr(CpuBackend, "supports", lambda *_: Support(False, "the processor is taken for a GPU"))
        about = SimpleNamespace(multi_processor_count=SMALL.multiprocessors)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: about)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        forget_calls()
        yield made
    forget_calls()
