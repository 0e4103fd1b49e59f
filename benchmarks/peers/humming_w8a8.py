"""Humming's products of 8-bit operands (the package humming-kernels), to be measured beside ours.

    peer = Humming(a, a_scale, b_scale, out)
    peer(b)

Its layers keep weights in an order of their own. A weight gets its layer with the first call, which also compiles
kernels; call it once with each weight before capturing it in a graph.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
TOLERANCE = 0.02  # its scales of int8 weights are bf16; operands in a wrong order would show as an error of about 1
# Its types, and as which bytes it takes codes: integers without a sign, with the middle of their range for zero.
TYPES = {torch.int8: "int8", torch.float8_e4m3fn: "float8e4m3"}


class Humming:
    """out[M, N] = bf16(A B^T): int8 with a scale for each row of A and B, or fp8 with scales 1x128 and 128x128.

    N and K are multiples of 128. RuntimeError with the first weight if the package fails, or computes something else.
    """

    def __init__(self, a: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
        self._a, self._b_scale, self._out = a, b_scale, out
        self._block = a.dtype != torch.int8
        self._a_scale = a_scale if self._block else a_scale.reshape(-1, 1)
        self._layers: dict[int, Any] = {}

    def __call__(self, b: Tensor) -> None:
        layer = self._layers.get(b.data_ptr())
        if layer is None:
            layer = self._layers[b.data_ptr()] = self._prepared(b)
        layer(self._a, outputs=self._out, input_scale=self._a_scale)

    def _prepared(self, b: Tensor) -> Any:
        package = importlib.import_module("humming.layer")  # ImportError if it is not here
        try:
            layer = self._layer(package, b)
            if not self._layers:
                self._check(layer, b)
        except Exception as error:  # whatever a package may do
            print(f"humming is left out for {len(self._a)}x{b.size(0)}x{b.size(1)}: {error!r}"[:300], flush=True)
            raise RuntimeError("humming does not take these operands") from error
        return layer

    def _layer(self, package: Any, b: Tensor) -> Any:
        n, k = b.shape
        groups = {"group_size": BLOCK} if self._block else {}
        layer = package.HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config={"dtype": TYPES[b.dtype], **groups, **({"group_size_n": BLOCK} if self._block else {})},
            input_config={"dtype": TYPES[b.dtype], **groups},
            torch_dtype=self._out.dtype,
        ).to(b.device)
        codes = b if self._block else b.view(torch.uint8) ^ 0x80
        scale = self._b_scale if self._block else self._b_scale.reshape(-1, 1)
        layer.load_from_tensors({"weight": codes.view(torch.int32), "weight_scale": scale})
        layer.transform()
        return layer

    def _check(self, layer: Any, b: Tensor) -> None:
        """That it computes this product at all."""
        self._out.fill_(float("nan"))
        layer(self._a, outputs=self._out, input_scale=self._a_scale)
        expected = _wide(self._a, self._a_scale) @ _wide(b, self._b_scale).t()
        error = ((self._out.float() - expected).norm() / expected.norm()).item()
        if not error < TOLERANCE:
            raise ValueError(f"its result is off by {error:.3g}")


def _wide(x: Tensor, scale: Tensor) -> Tensor:
    """An operand's values in fp32."""
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    elif scale.size(1) > 1:
        scale = scale.repeat_interleave(BLOCK, 1)
        scale = scale if scale.size(0) == x.size(0) else scale.repeat_interleave(BLOCK, 0)
    return x.float() * scale
