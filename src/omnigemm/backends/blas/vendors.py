"""What tells one cuBLAS-compatible library from another: names, types, and what its owner must be waited for.

Adding a vendor is adding a record here.
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


@dataclasses.dataclass(frozen=True)
class Lt:
    """A vendor's second library, beside the first: without it, or without one of its functions, the first serves."""

    title: str
    libraries: tuple[str, ...]
    pathfinder: str | None = None
    symbols: Mapping[str, str] = dataclasses.field(default_factory=lambda: LT_SYMBOLS)


@dataclasses.dataclass(frozen=True)
class Vendor:
    """One library. Parts proven on hardware and parts proven against a stand-in are listed in docs/blas.md."""

    name: str
    title: str
    device_type: str  # torch's name for its devices
    libraries: tuple[str, ...]  # file names, the likeliest first
    home: str | None = None  # the environment variable that holds the vendor's folder; then nothing else is searched
    folders: tuple[str, ...] = ()  # below it, or below the folders that Python packages are in
    pathfinder: str | None = None  # the library's name in cuda.pathfinder
    symbols: Mapping[str, str] = dataclasses.field(default_factory=lambda: SYMBOLS)
    native_bf16: bool = True  # else bf16 goes through fp32 copies
    workspace_bytes: int = 32 * 2**20  # for each handle, from torch's allocator; what torch gives cuBLAS on Hopper
    runtime: tuple[str, ...] = ()  # the library with the function that waits for a stream,
    wait: str | None = None  # which is called before memory that a product uses is given back
    lt: Lt | None = None  # where products are chosen apart from being run


VENDORS: Mapping[str, Vendor] = {
    "nvidia": Vendor(
        name="nvidia",
        title="NVIDIA cuBLAS",
        device_type="cuda",
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
        device_type="cuda",
        libraries=("libxpu_blas.so",),
        home="KUNLUN_HOME",
        folders=("lib", "lib64", "so", "xhpc/xblas/so"),
        native_bf16=False,
        runtime=("libxpurt.so",),
        wait="xpu_wait",
    ),
}
