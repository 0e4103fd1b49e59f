"""Int4Weight: a matrix of 4-bit weights in the one form that every backend reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.functional import pad

from ..core.dtypes import FLOATS
from ..core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from . import formats
from .formats.parts import GROUP_SIZES, ceil_div, check_int, check_shape, check_tensor, check_values, dtype_names
from .nibbles import row_blocks, unpack_nibbles

FORMAT_VERSION = 1
_META = "meta"  # state_dict's int64 [version, n, k, group_size, experts or -1]


class Int4Weight:
    """Weights [N, K], or [E, N, K] for E experts, as 4-bit values with a scale for each group of columns.

    qweight  uint8 [.., N, ceil(Kp/2)]  values 0..15, two a byte, the even column in the low half
    scales   fp16, bf16 or fp32 [.., N, G]
    zeros    uint8 [.., N, G], 0..16, or None: symmetric, the zero point is 8 everywhere
    perm     int32 [.., Kp], or None: stored column j is input column perm[j], -1 marks padding

    W[n, perm[j]] = scales[n, g] * (q[n, j] - zeros[n, g]) with g = j // group_size. Without perm, perm[j] is
    j and Kp is K; with it, Kp is G * group_size. group_size is 32, 64, 128 or K (one group).

    `validate=False` skips looking at the values in zeros and perm, which on a GPU waits for the device.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    n: int
    k: int
    group_size: int
    experts: int | None

    def __init__(
        self,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        perm: torch.Tensor | None = None,
        *,
        k: int,
        group_size: int,
        validate: bool = True,
    ) -> None:
        _check_parts(qweight, scales, zeros, perm, k, group_size)
        if validate:
            _check_values(zeros, perm, k)
        self.qweight = qweight.contiguous()
        self.scales = (scales.detach() if scales.requires_grad else scales).contiguous()
        self.zeros = None if zeros is None else zeros.contiguous()
        self.perm = None if perm is None else perm.contiguous()
        self.n = qweight.shape[-2]
        self.k = k
        self.group_size = group_size
        self.experts = qweight.shape[0] if qweight.dim() == 3 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K), or (E, N, K)."""
        return (self.n, self.k) if self.experts is None else (self.experts, self.n, self.k)

    @property
    def num_groups(self) -> int:
        """G, the scales in a row."""
        return self.scales.shape[-1]

    @property
    def padded_k(self) -> int:
        """Kp, the stored columns."""
        return self.k if self.perm is None else self.perm.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.qweight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales."""
        return self.scales.dtype

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    @property
    def act_order(self) -> bool:
        return self.perm is not None

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def __repr__(self) -> str:
        experts = "" if self.experts is None else f"experts={self.experts}, "
        zeros = "symmetric" if self.symmetric else "zero points"
        order = ", act-order" if self.act_order else ""
        return (
            f"Int4Weight({experts}n={self.n}, k={self.k}, group_size={self.group_size}, {zeros}{order}, "
            f"scales={self.dtype}, device={str(self.device)!r})"
        )

    def __getitem__(self, expert: int) -> Int4Weight:
        """One expert, as views."""
        check_int("Int4Weight", "the expert's index", expert, "a whole number")
        if self.experts is None:
            raise ShapeError(
                f"Int4Weight: index {expert} into a weight of shape {self.shape}, expected one with experts"
            )
        if not -self.experts <= expert < self.experts:
            # The kind of error that ends a for loop over the experts.
            raise IndexError(f"Int4Weight: index {expert}, expected one of {self.experts} experts")
        parts = {name: tensor[expert] for name, tensor in self._tensors().items()}
        return self._with(parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights as floating point [N, K] or [E, N, K]: computed in fp32, then rounded to dtype."""
        if dtype not in (*FLOATS, torch.float64):
            raise DTypeError(
                f"Int4Weight.dequantize: dtype is {dtype}, expected {dtype_names((*FLOATS, torch.float64))}"
            )
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for expert in range(1 if self.experts is None else self.experts):
            weight, target = (self, out) if self.experts is None else (self[expert], out[expert])
            columns = weight._column_positions()
            for rows in row_blocks(weight.n, weight.padded_k):
                values = weight._dequantize_rows(rows)
                target[rows] = values if columns is None else values.index_select(1, columns)
        return out

    def to(self, device: torch.device | str | int) -> Int4Weight:
        """The same weight on a device; self if it is there already."""
        try:
            device = torch.device(device)
        except (TypeError, RuntimeError) as error:
            raise DeviceError(f"Int4Weight.to: device is {device!r}, expected a torch.device or its name") from error
        try:
            moved = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        except (AssertionError, NotImplementedError) as error:  # torch has no such devices, or there are no values
            why = f"expected one that tensors on {self.device} can be moved to: {error}"
            raise DeviceError(f"Int4Weight.to: device is {str(device)!r}, {why}") from error
        return self if moved["qweight"] is self.qweight else self._with(moved)

    def cpu(self) -> Int4Weight:
        return self.to("cpu")

    def cuda(self) -> Int4Weight:
        return self.to("cuda")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors only, so that safetensors can store them; from_state_dict reads them back."""
        experts = -1 if self.experts is None else self.experts
        fields = [FORMAT_VERSION, self.n, self.k, self.group_size, experts]
        meta = torch.tensor(fields, dtype=torch.int64, device="cpu")
        return {**self._tensors(), _META: meta}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, torch.Tensor]) -> Int4Weight:
        """The weight whose state_dict this is."""
        where = "Int4Weight.from_state_dict"
        if not isinstance(state, Mapping):
            raise DTypeError(f"{where}: state is a {type(state).__name__}, expected a mapping of names to tensors")
        missing = [name for name in ("qweight", "scales", _META) if name not in state]
        if missing:
            keys = sorted(map(str, state))
            raise ShapeError(
                f"{where}: state has keys {keys} and lacks {missing}, expected qweight, scales and {_META}"
            )
        unknown = sorted(map(str, set(state) - {"qweight", "scales", "zeros", "perm", _META}))
        if unknown:
            raise ShapeError(
                f"{where}: state has the unknown keys {unknown}, expected qweight, scales, zeros, perm, meta"
            )
        meta = state[_META]
        if not isinstance(meta, torch.Tensor) or meta.dtype != torch.int64 or meta.dim() != 1 or not len(meta):
            raise DTypeError(f"{where}: {_META} is {meta!r}, expected a 1-D torch.int64 tensor")
        check_values(where, _META, meta)
        version, *fields = meta.tolist()
        if version != FORMAT_VERSION:
            raise UnsupportedError(f"{where}: {_META} says version {version}, expected {FORMAT_VERSION}")
        if len(fields) != 4:
            raise ShapeError(f"{where}: {_META} has shape {tuple(meta.shape)}, expected (5,)")
        n, k, group_size, experts = fields
        weight = cls(
            state["qweight"],
            state["scales"],
            state.get("zeros"),
            state.get("perm"),
            k=k,
            group_size=group_size,
        )
        stored = (n, k) if experts == -1 else (experts, n, k)
        if weight.shape != stored:
            raise ShapeError(f"{where}: {_META} says shape {stored}, expected {weight.shape}, that of qweight")
        return weight

    @classmethod
    def stack(cls, weights: Sequence[Int4Weight]) -> Int4Weight:
        """Weights of equal size and group size as the experts of one."""
        where = "Int4Weight.stack"
        if not isinstance(weights, Iterable):
            raise DTypeError(f"{where}: weights is a {type(weights).__name__}, expected a sequence of Int4Weight")
        weights = list(weights)
        if not weights:
            raise ShapeError(f"{where}: weights is empty, expected at least one Int4Weight")
        first = weights[0]
        for i, weight in enumerate(weights):
            if not isinstance(weight, Int4Weight):
                raise DTypeError(f"{where}: weights[{i}] is a {type(weight).__name__}, expected an Int4Weight")
            if weight.experts is not None:
                raise ShapeError(f"{where}: weights[{i}] has shape {weight.shape}, expected (N, K) without experts")
            for name in ("shape", "group_size", "num_groups"):
                got, expected = getattr(weight, name), getattr(first, name)
                if got != expected:
                    raise ShapeError(f"{where}: weights[{i}] has {name} {got}, expected {expected} like weights[0]")
            if weight.dtype != first.dtype:
                raise DTypeError(f"{where}: weights[{i}] has scales of {weight.dtype}, expected {first.dtype}")
            if weight.device != first.device:
                raise DeviceError(f"{where}: weights[{i}] is on {weight.device}, expected {first.device}")
        if any(weight.act_order for weight in weights):
            weights = [weight._with_perm() for weight in weights]
        if any(not weight.symmetric for weight in weights):
            weights = [weight._with_zeros() for weight in weights]
        parts = {name: torch.stack([weight._tensors()[name] for weight in weights]) for name in weights[0]._tensors()}
        return first._with(parts)

    @classmethod
    def from_gptq(
        cls,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        qzeros: torch.Tensor | None = None,
        g_idx: torch.Tensor | None = None,
        *,
        group_size: int | None = None,
        checkpoint_format: str = "gptq",
        n: int | None = None,
        k: int | None = None,
    ) -> Int4Weight:
        """From GPTQ: qweight int32 [ceil(K/8), N], scales [G, N], qzeros int32 [G, ceil(N/8)], g_idx [K].

        checkpoint_format "gptq" stores zero points minus one, "gptq_v2" as they are. Without qzeros the
        weight is symmetric. k is needed only where K is no multiple of 8 and there is no g_idx.
        """
        parts = formats.from_gptq(
            qweight,
            scales,
            qzeros,
            g_idx,
            group_size=group_size,
            checkpoint_format=checkpoint_format,
            n=n,
            k=k,
        )
        return cls._from_parts(parts)

    @classmethod
    def from_awq(
        cls,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        qzeros: torch.Tensor | None = None,
        *,
        group_size: int | None = None,
        n: int | None = None,
        k: int | None = None,
    ) -> Int4Weight:
        """From AWQ, version "gemm": qweight int32 [K, ceil(N/8)], scales [G, N], qzeros [G, ceil(N/8)]."""
        return cls._from_parts(formats.from_awq(qweight, scales, qzeros, group_size=group_size, n=n, k=k))

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: torch.Tensor,
        weight_scale: torch.Tensor,
        *,
        weight_shape: torch.Tensor | Sequence[int] | None = None,
        weight_zero_point: torch.Tensor | None = None,
        weight_g_idx: torch.Tensor | None = None,
        group_size: int | None = None,
    ) -> Int4Weight:
        """From compressed-tensors, format "pack-quantized": weight_packed int32 [N, ceil(K/8)], weight_scale
        [N, G] or [N, 1], weight_zero_point int32 [ceil(N/8), G], weight_g_idx int32 [K], weight_shape (N, K).
        """
        parts = formats.from_compressed_tensors(
            weight_packed,
            weight_scale,
            weight_shape=weight_shape,
            weight_zero_point=weight_zero_point,
            weight_g_idx=weight_g_idx,
            group_size=group_size,
        )
        return cls._from_parts(parts)

    @classmethod
    def from_marlin(
        cls,
        b: torch.Tensor,
        s: torch.Tensor,
        *,
        n: int | None = None,
        k: int | None = None,
        group_size: int | None = None,
    ) -> Int4Weight:
        """From legacy Marlin: b int32 [K/16, 2 N] and s [G, N]; a single row of s is a scale per column."""
        return cls._from_parts(formats.from_marlin(b, s, n=n, k=k, group_size=group_size))

    @classmethod
    def _from_parts(cls, parts: formats.Parts) -> Int4Weight:
        qweight, scales, zeros, perm, k, group_size = parts
        return cls(qweight, scales, zeros, perm, k=k, group_size=group_size, validate=False)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are there, by name."""
        tensors = {"qweight": self.qweight, "scales": self.scales}
        if self.zeros is not None:
            tensors["zeros"] = self.zeros
        if self.perm is not None:
            tensors["perm"] = self.perm
        return tensors

    def _with(self, parts: Mapping[str, torch.Tensor]) -> Int4Weight:
        """A weight of the same K and groups from other tensors."""
        return Int4Weight(
            parts["qweight"],
            parts["scales"],
            parts.get("zeros"),
            parts.get("perm"),
            k=self.k,
            group_size=self.group_size,
            validate=False,
        )

    def _with_zeros(self) -> Int4Weight:
        if self.zeros is not None:
            return self
        return self._with({**self._tensors(), "zeros": torch.full_like(self.scales, 8, dtype=torch.uint8)})

    def _with_perm(self) -> Int4Weight:
        if self.perm is not None:
            return self
        width = self.num_groups * self.group_size
        columns = torch.arange(self.k, dtype=torch.int32, device=self.device)
        perm = pad(columns, (0, width - self.k), value=-1)
        qweight = pad(self.qweight, (0, ceil_div(width, 2) - self.qweight.shape[-1]), value=0x88)
        return self._with({**self._tensors(), "qweight": qweight, "perm": perm})

    def _column_positions(self) -> torch.Tensor | None:
        """Where each input column is stored, or None when in order; of static shape, to be traceable."""
        if self.perm is None:
            return None
        stored = torch.arange(self.padded_k, dtype=torch.int64, device=self.device)
        # Padding lands in a place past the end, which is cut off.
        index = torch.where(self.perm < 0, self.k, self.perm).long()
        return stored.new_zeros(self.k + 1).scatter(0, index, stored)[: self.k]

    def _dequantize_rows(self, rows: slice) -> torch.Tensor:
        """fp32 [rows, Kp] in stored order."""
        width, size = self.padded_k, self.group_size
        values = unpack_nibbles(self.qweight[rows], width).float()
        scales = self.scales[rows].float()
        zeros = scales.new_full((1, self.num_groups), 8.0) if self.zeros is None else self.zeros[rows].float()
        full = width // size
        whole = torch.unflatten(values[:, : full * size], 1, (full, size))
        whole.sub_(zeros[:, :full, None]).mul_(scales[:, :full, None])
        if full * size < width:
            values[:, full * size :].sub_(zeros[:, full:]).mul_(scales[:, full:])
        return values


def _check_parts(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    k: int,
    group_size: int,
) -> None:
    """Every shape, dtype and device; nothing that reads the tensors' values."""
    where = "Int4Weight"
    check_int(where, "k", k)
    if k < 0:
        raise ShapeError(f"{where}: k is {k}, expected a whole number >= 0")
    check_int(where, "group_size", group_size, "32, 64, 128 or k")
    if group_size not in (*GROUP_SIZES, max(k, 1)):
        whole = f"k = {k}" if k else "1, as k is 0"
        raise UnsupportedError(f"{where}: group_size is {group_size}, expected 32, 64, 128 or {whole}")
    check_tensor(where, "qweight", qweight, (torch.uint8,))
    check_tensor(where, "scales", scales, FLOATS, qweight)
    lead, n = tuple(qweight.shape[:-2]), qweight.shape[-2]
    experts = "E, " if lead else ""
    width = k
    if perm is not None:
        check_tensor(where, "perm", perm, (torch.int32,), qweight)
        check_shape(where, "perm", perm, (*lead, None), f"({experts}Kp)")
        width = perm.shape[-1]
        if width < k or width % group_size or (group_size not in GROUP_SIZES and width != k):
            raise ShapeError(
                f"{where}: perm has shape {tuple(perm.shape)}, expected Kp to be a multiple of group_size = "
                f"{group_size} and at least k = {k}"
            )
    groups = ceil_div(width, group_size)
    check_shape(where, "qweight", qweight, (*lead, n, ceil_div(width, 2)), f"({experts}N, ceil(Kp/2))")
    check_shape(where, "scales", scales, (*lead, n, groups), f"({experts}N, G)")
    if zeros is not None:
        check_tensor(where, "zeros", zeros, (torch.uint8,), qweight)
        check_shape(where, "zeros", zeros, (*lead, n, groups), f"({experts}N, G)")


def _check_values(zeros: torch.Tensor | None, perm: torch.Tensor | None, k: int) -> None:
    """Zero points in range and every input column named once, or else a backend reads out of bounds."""
    if zeros is not None and zeros.numel() and not zeros.is_meta and int(zeros.max()) > 16:
        raise ShapeError(f"Int4Weight: zeros holds {int(zeros.max())}, expected values in 0..16")
    if perm is None or perm.numel() == 0 or perm.is_meta:
        return
    outside = (perm < -1) | (perm >= k)
    if bool(outside.any()):
        raise ShapeError(
            f"Int4Weight: perm holds {int(perm[outside][0])}, expected -1 or an input column in 0..{k - 1}"
        )
    index = torch.where(perm < 0, k, perm).long().reshape(-1, perm.shape[-1])
    uses = torch.zeros(index.shape[0], k + 1, dtype=torch.int64, device=perm.device)
    uses = uses.scatter_add_(1, index, torch.ones_like(index))[:, :k]
    wrong = (uses != 1).nonzero()
    if len(wrong):
        expert, column = wrong[0].tolist()
        raise ShapeError(
            f"Int4Weight: perm holds input column {column} {int(uses[expert, column])} times, expected once"
        )
