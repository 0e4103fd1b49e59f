"""CUTLASS's int8 products, from the library that build.py makes.

    peer = CutlassInt8("libcutlass_int8.so")
    for config, name in enumerate(peer.configs()):
        peer(config, a, b, a_scale, b_scale, out)

The kernels need sm_90. Call a config once with a shape before capturing it in a graph: the first call loads the
kernel and allocates its workspace.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor


class CutlassInt8:
    """out[M, N] = bf16(a_scale * b_scale * (a[M, K] @ b[N, K]^T)): int8 a and b, one scale a row of each in float32.

    All tensors are contiguous and on one GPU; N is a multiple of 8 and K of 16.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        library = ctypes.CDLL(os.fspath(path))
        self._count = library.cutlass_int8_configs
        self._name = library.cutlass_int8_config_name
        self._workspace_bytes = library.cutlass_int8_workspace
        self._launch = library.cutlass_int8
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._count.argtypes, self._count.restype = [], number
        self._name.argtypes, self._name.restype = [number], ctypes.c_char_p
        self._workspace_bytes.argtypes, self._workspace_bytes.restype = [number] * 4, ctypes.c_longlong
        self._launch.argtypes, self._launch.restype = [number, *[pointer] * 5, *[number] * 3, *[pointer] * 2], number
        self._names = [self._name(config).decode() for config in range(self._count())]
        self._workspaces: dict[tuple[int, int, int, int, torch.device], Tensor] = {}

    def configs(self) -> list[str]:
        """The name of each config: its tile of M x N x K, its cluster of M x N blocks and its schedule."""
        return list(self._names)

    def __call__(self, config: int, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        """Launch on the current stream. RuntimeError if CUTLASS refuses, as it does what TMA can't address."""
        (m, k), n = a.shape, b.shape[0]
        expected = {
            "a": (a, (m, k), torch.int8),
            "b": (b, (n, k), torch.int8),
            "a_scale": (a_scale, (m,), torch.float32),
            "b_scale": (b_scale, (n,), torch.float32),
            "out": (out, (m, n), torch.bfloat16),
        }
        for name, (tensor, shape, dtype) in expected.items():
            # Scales may come as [M, 1] or [1, N]: the memory is the same.
            if tensor.dtype != dtype or tensor.squeeze().shape != torch.Size(s for s in shape if s != 1):
                raise ValueError(f"{name} is {tensor.dtype} of {tuple(tensor.shape)}, expected {dtype} of {shape}")
            if not tensor.is_contiguous() or tensor.device != a.device:
                lies = f"on {tensor.device} with strides {tensor.stride()}"
                raise ValueError(f"{name} is {lies}, expected a contiguous tensor on {a.device}")
        workspace = self._workspace(config, m, n, k, a.device)
        status = self._launch(
            config,
            *(tensor.data_ptr() for tensor in (a, b, a_scale, b_scale, out)),
            *(m, n, k),
            workspace.data_ptr(),
            torch.cuda.current_stream(a.device).cuda_stream,
        )
        if status:
            raise RuntimeError(f"CUTLASS {self._names[config]} refused M={m}, N={n}, K={k}: status {status}")

    def _workspace(self, config: int, m: int, n: int, k: int, device: torch.device) -> Tensor:
        key = (config, m, n, k, device)
        if key not in self._workspaces:
            size = self._workspace_bytes(config, m, n, k)
            if size < 0:
                raise ValueError(f"config is {config}, expected 0 to {len(self._names) - 1}")
            self._workspaces[key] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._workspaces[key]
