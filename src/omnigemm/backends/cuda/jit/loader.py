"""A cubin as a kernel of the driver. A CUkernel belongs to no context: one load serves every GPU of its kind."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from functools import cache
from typing import Any

import torch

from ....core.dispatch import Support
from ....core.errors import CompileError, DeviceError
from .. import driver as nvidia
from ..driver import bindings, checked
from . import nvrtc
from .cache import get_or_compile
from .compiler import Compiled
from .spec import KernelSpec

MISSING = "cuda.core, which loads kernels, is not installed: pip install 'omnigemm[cuda]'"
DEFAULT_SHARED = 48 * 1024  # dynamic shared memory beyond it must be asked for
_kernels: dict[str, Any] = {}
_ready: set[tuple[str, int]] = set()  # what was loaded, for which device
_shared: dict[tuple[str, int], int] = {}
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """`handle` is the CUkernel for cuda.bindings; `kernel` owns it. Local bytes that are not 0 mean spills."""

    kernel: Any
    handle: Any
    num_regs: int
    local_bytes: int


def available() -> Support:
    """Whether kernels can be compiled and loaded with what is installed, and with which NVRTC, or why not. It does not
    ask the driver."""
    answer, (_, reason) = nvrtc.available(), _core()
    return Support(False, reason) if answer and reason else answer


@cache
def driver_fault() -> str:
    """Why the driver here cannot load what NVRTC makes, in words; empty if it can. For who knows that `available` is
    true. Within a major version of CUDA, drivers load what later minor ones make."""
    compiler = nvrtc.version()
    needed = 1000 * int(compiler.split(".")[0])
    try:
        found = nvidia.version()
    except DeviceError as error:
        return str(error)
    if found >= needed:
        return ""
    knows = f"the NVIDIA driver knows CUDA {nvidia.in_words(found)}"
    return f"{knows} and is too old for kernels of NVRTC {compiler}, expected {nvidia.in_words(needed)} or later"


@cache
def _core() -> tuple[Any, str]:
    """cuda.core, and why it cannot be used (empty when it can)."""
    try:
        return importlib.import_module("cuda.core"), ""
    except ModuleNotFoundError as error:
        if error.name in ("cuda", "cuda.core"):
            return None, MISSING
        reason: Exception = error
    except Exception as error:  # it has compiled parts, which may not fit what else is installed
        reason = error
    return None, f"cuda.core, which loads kernels, cannot be imported: {' '.join(str(reason).split())}"


def is_loaded(spec: KernelSpec, device_index: int, dynamic_shared_bytes: int) -> bool:
    """Whether `load` would find everything ready."""
    room = _shared.get((spec.key, device_index), DEFAULT_SHARED)
    return (spec.key, device_index) in _ready and dynamic_shared_bytes <= room


def check_capture(spec: KernelSpec, device_index: int, dynamic_shared_bytes: int, who: str, remedy: str) -> None:
    """DeviceError where a CUDA graph is being captured and `load` would not find everything ready. `who` needs the
    kernel; `remedy` is what to do before the capture."""
    if torch.cuda.is_current_stream_capturing() and not is_loaded(spec, device_index, dynamic_shared_bytes):
        raise DeviceError(
            f"{who} is not compiled yet, and a CUDA graph is being captured; {remedy}, before the capture"
        )


def load(what: Compiled | KernelSpec, device_index: int, dynamic_shared_bytes: int = 0) -> Loaded:
    """Load a kernel for a device, with room for that much dynamic shared memory."""
    driver = bindings()
    compiled = what if isinstance(what, Compiled) else get_or_compile(what)
    name, arch, key = compiled.spec.name, compiled.spec.arch, compiled.spec.key
    device = checked(driver.cuDeviceGet(device_index), f"device {device_index}")
    about, ask = driver.CUdevice_attribute, driver.cuDeviceGetAttribute
    major = checked(ask(about.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), f"device {device_index}")
    minor = checked(ask(about.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), f"device {device_index}")
    if not runs_on(arch, major, minor):
        raise DeviceError(f"kernel {name} is for {arch}, but device {device_index} is sm_{major}{minor}")
    with _lock:
        kernel = _kernels.get(key)
        if kernel is None:
            core, reason = _core()
            if reason:
                raise CompileError(f"kernel {name} cannot be loaded: {reason}")
            try:
                code = core.ObjectCode.from_cubin(compiled.cubin)
                kernel = _kernels[key] = code.get_kernel(name)
            except Exception as error:
                knows = f"which knows CUDA {nvidia.in_words(nvidia.version())}"
                raise CompileError(f"the driver, {knows}, cannot load kernel {name} ({arch}): {error}") from error
        of, handle, size = driver.CUfunction_attribute, kernel.handle, dynamic_shared_bytes
        # Only ever raised: the limit is one for all who use the kernel on this device.
        if size > _shared.get((key, device_index), DEFAULT_SHARED):
            most = of.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(
                driver.cuKernelSetAttribute(most, size, handle, device), f"{size} bytes of shared memory for {name}"
            )
            _shared[key, device_index] = size
    registers = checked(driver.cuKernelGetAttribute(of.CU_FUNC_ATTRIBUTE_NUM_REGS, handle, device), name)
    local = checked(driver.cuKernelGetAttribute(of.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, handle, device), name)
    _ready.add((key, device_index))
    return Loaded(kernel, handle, registers, local)


def runs_on(arch: str, major: int, minor: int) -> bool:
    """A plain cubin also runs on later minors of its major, and so may one of a family ('f'); 'a' only on its own."""
    own = divmod(int(arch[3:].rstrip("af")), 10)
    return (major, minor) == own if arch.endswith("a") else major == own[0] and minor >= own[1]
