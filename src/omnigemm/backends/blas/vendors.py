"""What tells one cuBLAS-compatible library from another: names, types, codes, and what its owner must be waited for.

Adding a vendor is adding a record here. What a record does not say is as NVIDIA has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# What we call, by the name of the C function in NVIDIA's library. The ABI is the same everywhere.
SYMBOLS: Mapping[str, str] = {
    "create": "cublasCreate_v2",
    "destroy": "cublasDestroy_v2",
    "set_stream": "cublasSetStream_v2",
    "set_workspace": "cublasSetWorkspace_v2",
    "set_math_mode": "cublasSetMathMode",
    "gemm": "cublasGemmStridedBatchedEx",
    "gemm_single": "cublasGemmEx",
    "gemm_grouped": "cublasGemmGroupedBatchedEx",
}
# Without them, the library finds its own memory, reduces as it likes, takes a single product for a batch of one, and a
# list of products is a loop.
OPTIONAL = frozenset({"set_workspace", "set_math_mode", "gemm_single", "gemm_grouped"})

# The same for the library that chooses an algorithm once and runs it many times.
LT_SYMBOLS: Mapping[str, str] = {
    "create": "cublasLtCreate",
    "destroy": "cublasLtDestroy",
    "version": "cublasLtGetVersion",
    "create_operation": "cublasLtMatmulDescCreate",
    "set_operation": "cublasLtMatmulDescSetAttribute",
    "destroy_operation": "cublasLtMatmulDescDestroy",
    "create_layout": "cublasLtMatrixLayoutCreate",
    "set_layout": "cublasLtMatrixLayoutSetAttribute",
    "destroy_layout": "cublasLtMatrixLayoutDestroy",
    "create_preference": "cublasLtMatmulPreferenceCreate",
    "set_preference": "cublasLtMatmulPreferenceSetAttribute",
    "destroy_preference": "cublasLtMatmulPreferenceDestroy",
    "choose": "cublasLtMatmulAlgoGetHeuristic",
    "multiply": "cublasLtMatmul",
}
# Without the first, a version is not shown; the others are for those who choose.
LT_OPTIONAL = frozenset({"version", "create_preference", "set_preference", "destroy_preference", "choose"})

STATUSES: Mapping[int, str] = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}

# Element types, by our names, and their codes there: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF.
CODES: Mapping[str, int] = {"fp32": 0, "fp16": 2, "bf16": 14}
TYPES = tuple(CODES)


@dataclasses.dataclass(frozen=True)
class Asks:
    """Which functions of torch, by names below `torch`, tell about the thread that calls."""

    device: str
    stream: str  # of a device
    capturing: str  # whether the current stream's work goes into a graph
    stream_address: str | None = None  # the attribute of a stream that is the driver's address; None: it is that itself


# Private ones, because the public ones cost microseconds a call.
CUDA = Asks("_C._cuda_getDevice", "_C._cuda_getCurrentRawStream", "_C._cuda_isCurrentStreamCapturing")


@dataclasses.dataclass(frozen=True)
class Lt:
    """A vendor's second library: without it, or without one of its functions, the first serves."""

    title: str
    libraries: tuple[str, ...] = ()  # beside the first; none: the first one has these functions too
    pathfinder: str | None = None
    symbols: Mapping[str, str] = dataclasses.field(default_factory=lambda: LT_SYMBOLS)
    types: tuple[str, ...] = TYPES  # whose products go through it
    chooses: bool = True  # else no algorithm is named with a product, and functions for choosing need not be there


@dataclasses.dataclass(frozen=True)
class Vendor:
    """One library. Parts proven on hardware and parts proven against a stand-in are listed in docs/blas.md."""

    name: str
    title: str
    libraries: tuple[str, ...]  # file names, the likeliest first
    device_type: str = "cuda"  # torch's name for its devices, and for its module with what concerns them
    asks: Asks | None = None  # None: CUDA's for cuda, else the usual public functions of that module
    home: str | None = None  # the environment variable that holds the vendor's folder; then nothing else is searched
    folders: tuple[str, ...] = ()  # below it, or below the folders that Python packages are in
    pathfinder: str | None = None  # the library's name in cuda.pathfinder
    symbols: Mapping[str, str] = dataclasses.field(default_factory=lambda: SYMBOLS)
    statuses: Mapping[int, str] = dataclasses.field(default_factory=lambda: STATUSES)
    codes: Mapping[str, int] = dataclasses.field(default_factory=lambda: CODES)
    compute: int = 68  # CUBLAS_COMPUTE_32F
    compute_tf32: int = 77  # CUBLAS_COMPUTE_32F_FAST_TF32
    types: tuple[str, ...] = TYPES  # of products by handles: fp32, and 16-bit types that need not go through copies
    workspace_bytes: int = 32 * 2**20  # for each handle, from torch's allocator; what torch gives cuBLAS on Hopper
    runtime: tuple[str, ...] = ()  # the library with the function that waits for a stream,
    runtime_folders: tuple[str, ...] = ()  # below `home`, if it is not beside the first library,
    wait: str | None = None  # and that function: called before memory that a product uses is given back
    lt: Lt | None = None  # where products are chosen apart from being run, or have types that handles lack

    @property
    def asked(self) -> Asks:
        if self.asks is not None or self.device_type == "cuda":
            return self.asks or CUDA
        there = self.device_type
        capturing = f"{there}.is_current_stream_capturing"
        return Asks(f"{there}.current_device", f"{there}.current_stream", capturing, f"{there}_stream")


VENDORS: Mapping[str, Vendor] = {
    "nvidia": Vendor(
        name="nvidia",
        title="NVIDIA cuBLAS",
        libraries=("libcublas.so.13", "libcublas.so.12", "libcublas.so"),
        folders=("nvidia/cu13/lib", "nvidia/cublas/lib"),  # where NVIDIA's wheels for CUDA 13 and 12 put it
        pathfinder="cublas",
        lt=Lt(
            title="cuBLASLt",
            libraries=("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"),
            pathfinder="cublasLt",
        ),
    ),
    "kunlun": Vendor(
        name="kunlun",
        title="Kunlun xpu_blas",
        libraries=("libxpu_blas.so",),
        home="KUNLUN_HOME",
        folders=("lib", "lib64", "so", "xhpc/xblas/so"),
        types=("fp32", "fp16"),
        runtime=("libxpurt.so",),
        runtime_folders=("lib", "lib64", "so", "xre/so"),
        wait="xpu_wait",
        lt=Lt(title="cublasLt of xpu_blas", types=("bf16",), chooses=False),
    ),
}
