"""Copies of weights in the form that a kernel wants, made once and kept as long as the weight lives.

A copy is used only while the weight still is what it was made from: the same tensor in the same place, the same
version counter and the same values at a grid of sample positions. The place tells of other memory, as after
`weight.data = ...`. The samples catch writes that bypass the version counter, as `weight.data.copy_(...)` does when a
server reloads its model. What goes unseen is such a write that changes only unsampled elements.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.forks import in_children
from ...core.memory import physical_bytes
from ...core.settings import current

T = TypeVar("T")
_SAMPLES_PER_DIM = 8
_COMPARED_WHOLE = 1 << 16  # scales up to this many are compared one by one, which costs some microseconds


def _version(tensor: Tensor) -> int:
    # Inference tensors have no version counter; the samples alone watch them.
    return -1 if tensor.is_inference() else tensor._version


class _Mark:
    """What a tensor looked like when a copy was made from it, and where it was."""

    def __init__(self, tensor: Tensor) -> None:
        self.version = _version(tensor)
        self.address, self.dtype = tensor.data_ptr(), tensor.dtype
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.steps = tuple(slice(None, None, max(1, size // _SAMPLES_PER_DIM)) for size in tensor.shape)
        self.sample = self._sample(tensor).clone()

    def _sample(self, tensor: Tensor) -> Tensor:
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return raw[self.steps]

    def fits(self, tensor: Tensor) -> bool:
        return (
            self.version == _version(tensor)
            and self.address == tensor.data_ptr()
            and self.dtype is tensor.dtype
            and self.shape == tensor.shape
            and self.strides == tensor.stride()
            and torch.equal(self.sample, self._sample(tensor))
        )


class _Companion:
    """A small tensor that went into a copy (scales, zero points). Another one with equal values will do."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.mark = _Mark(tensor)
        self.values = tensor.clone()

    def fits(self, given: Tensor) -> bool:
        if given is self.tensor and given.numel() > _COMPARED_WHOLE and self.mark.fits(given):
            return True
        return torch.equal(self.values, given)


@dataclasses.dataclass
class _Entry:
    weight: _Mark
    companions: tuple[_Companion, ...]
    value: Any
    nbytes: int

    def fits(self, weight: Tensor, companions: tuple[Tensor, ...]) -> bool:
        return self.weight.fits(weight) and all(
            mine.fits(given) for mine, given in zip(self.companions, companions, strict=True)
        )


class PreparedWeights:
    """The store. Bounded by the setting `weight_cache_mib`; beyond that, callers prepare as they go."""

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()
        self._renew_lock()
        in_children(self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def get(
        self,
        weight: Tensor,
        form: Hashable,
        companions: tuple[Tensor, ...],
        nbytes: int,
        build: Callable[[], T],
    ) -> T | None:
        """The `form` of `weight` (and of the small tensors that go with it), or None if it has no room."""
        if current().weight_cache_mib == 0:  # not even one that is there: it might miss an unseen write
            return None
        with self._lock:
            forms: dict[Hashable, _Entry] = self._entries.get(weight) or {}
            entry = forms.get(form)
            if entry is not None and entry.fits(weight, companions):
                kept: T = entry.value
                return kept
            forms.pop(form, None)
            if self.nbytes() + nbytes > _limit():
                return None
            value = build()
            if isinstance(value, Tensor) and not value.numel():  # there is no such form, which is worth knowing
                nbytes = 0
            forms[form] = _Entry(_Mark(weight), tuple(map(_Companion, companions)), value, nbytes)
            self._entries[weight] = forms
            return value

    def nbytes(self) -> int:
        with self._lock:
            return sum(entry.nbytes for forms in self._entries.values() for entry in forms.values())

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def _limit() -> int:
    mib = current().weight_cache_mib
    return physical_bytes() // 4 if mib is None else mib << 20


store = PreparedWeights()
