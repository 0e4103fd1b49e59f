"""What the checkpoint formats share: checking tensors, finding the groups, and the canonical parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...core.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from ...core.strided import need_strided
from ..nibbles import gather_columns

GROUP_SIZES = (32, 64, 128)


class Parts(NamedTuple):
    """The arguments of Int4Weight."""

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    k: int
    group_size: int


class Groups(NamedTuple):
    """Which columns share a scale."""

    size: int
    perm: torch.Tensor | None
    kept: torch.Tensor | None  # the groups that have columns, when others do not


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def check_tensor(
    where: str, name: str, tensor: object, dtypes: Sequence[torch.dtype], like: torch.Tensor | None = None
) -> None:
    """A 2-D or 3-D tensor of one of the dtypes; with `like`, of the same rank, experts and device."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{where}: {name} is a {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise DTypeError(f"{where}: {name} has dtype {tensor.dtype}, expected {dtype_names(dtypes)}")
    need_strided(where, **{name: tensor})
    if like is None:
        if tensor.dim() not in (2, 3):
            raise ShapeError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, expected 2 dimensions, or 3 with experts first"
            )
        return
    if tensor.device != like.device:
        raise DeviceError(f"{where}: {name} is on {tensor.device}, expected {like.device} like the packed weight")


def check_values(where: str, name: str, tensor: torch.Tensor) -> None:
    """It must have some, because they decide shapes."""
    if tensor.is_meta:
        raise DeviceError(f"{where}: {name} is on meta, expected a device, where it has values")


def check_shape(where: str, name: str, tensor: torch.Tensor, wanted: Sequence[int | None], meaning: str) -> None:
    """Every size must be the one wanted; None takes any."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in wanted)
        sizes += "," if len(wanted) == 1 else ""
        raise ShapeError(f"{where}: {name} has shape {shape}, expected {meaning} = ({sizes})")


def check_int(where: str, name: str, value: object, expected: str = "a whole number >= 0") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise DTypeError(f"{where}: {name} is {value!r}, expected {expected}")


def check_words(where: str, name: str, tensor: torch.Tensor, axis: int, values: int, letter: str) -> None:
    """The axis must hold ceil(values / 8) words; counts that fit another bit width are named as that."""
    words = tensor.shape[axis]
    if words == ceil_div(values, 8):
        return
    shape = tuple(tensor.shape)
    for bits in (8, 2, 3):
        if words == ceil_div(values * bits, 32):
            raise UnsupportedError(
                f"{where}: {name} has shape {shape}, and {words} words for {letter} = {values} is {bits}-bit "
                f"packing, expected 4-bit packing, ceil({letter} / 8) = {ceil_div(values, 8)} words"
            )
    raise ShapeError(
        f"{where}: {name} has shape {shape}, expected ceil({letter} / 8) = {ceil_div(values, 8)} words "
        f"for {letter} = {values}"
    )


def one_by_one(
    words: torch.Tensor, shape: tuple[int, int], repack: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The bytes of each expert, of that shape: what repacking takes besides is that of one."""
    out = torch.empty(words.shape[0], *shape, dtype=torch.uint8, device=words.device)
    for target, one in zip(out, words, strict=True):
        target.copy_(repack(one))
    return out


def logical_size(where: str, name: str, given: int | None, natural: int) -> int:
    """The size the caller gave, or else the one that the shapes say."""
    if given is None:
        return natural
    check_int(where, name, given)
    if given < 0:
        raise ShapeError(f"{where}: {name} is {given}, expected a whole number >= 0")
    return given


def find_groups(
    where: str,
    *,
    k: int,
    group_size: int | None,
    scales: torch.Tensor,
    scales_name: str,
    axis: int,
    g_idx: torch.Tensor | None = None,
    g_idx_name: str = "g_idx",
) -> Groups:
    """The group size and, where g_idx is not k // size, the order that brings a group's columns together."""
    count = total = scales.shape[axis]
    kept = None
    if g_idx is not None:
        check_tensor(where, g_idx_name, g_idx, (torch.int32, torch.int64), scales)
        check_values(where, g_idx_name, g_idx)
        lead = tuple(scales.shape[:-2])
        check_shape(where, g_idx_name, g_idx, (*lead, k), "(E, K)" if lead else "(K,)")
        g_idx = g_idx.long()
        _check_range(where, g_idx_name, g_idx, count)
        used = torch.zeros(count, dtype=torch.bool, device=g_idx.device)
        used[g_idx.flatten()] = True
        if not bool(used.all()):
            # A slice of an act-order weight keeps every scale but not every group.
            kept = used.nonzero().flatten()
            g_idx = (used.cumsum(0) - 1)[g_idx]
            count = kept.numel()
            if group_size is None and count == 1:
                # A slice within a group, or zeros that say nothing: what is multiplied by which scale is not known.
                raise UnsupportedError(
                    f"{where}: group_size is None, and {g_idx_name} puts all columns in group {int(kept[0])} of "
                    f"{total}; expected group_size to be given, or no {g_idx_name} if it says nothing"
                )
    own = 0 if g_idx is None else _whole_groups(g_idx, count)  # where there is one, it decides
    size = own if own and group_size is None else _resolve_size(where, group_size, k, count)
    in_order = g_idx is None or _in_order(g_idx, size)
    if not in_order and 0 < own <= size:
        size, in_order = own, True
    if g_idx is None or in_order or size % 32:
        wanted = ceil_div(k, size)
        if count != wanted:
            shape = list(scales.shape)
            shape[axis] = wanted
            letters = ["G", "N"] if axis == -2 else ["N", "G"]
            meaning = f"({', '.join(['E'] * (len(shape) - 2) + letters)})"
            check_shape(where, scales_name, scales, shape, meaning)
        return Groups(size, None, kept)
    return Groups(size, _sort_columns(where, g_idx_name, g_idx, count, size, group_size is not None), kept)


def finish(qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, k: int, groups: Groups) -> Parts:
    """Canonical parts from bytes [.., N, ceil(K/2)], scales and zeros [.., N, G] in the file's order."""
    if groups.kept is not None:
        scales = scales[..., groups.kept]
        zeros = None if zeros is None else zeros[..., groups.kept]
    if zeros is not None and not zeros.is_meta and bool((zeros == 8).all()):
        zeros = None
    if groups.perm is not None:
        qweight = gather_columns(qweight, k, groups.perm)
    size = groups.size
    if size not in GROUP_SIZES and scales.shape[-1] > 1:
        # A larger group is several of 128 (or 64, or 32) that happen to have the same scale.
        part = next(unit for unit in (128, 64, 32) if size % unit == 0)
        used = ceil_div(k if groups.perm is None else groups.perm.shape[-1], part)
        scales = scales.repeat_interleave(size // part, dim=-1)[..., :used]
        zeros = None if zeros is None else zeros.repeat_interleave(size // part, dim=-1)[..., :used]
        size = part
    zeros = None if zeros is None else zeros.contiguous()
    return Parts(qweight, scales.contiguous(), zeros, groups.perm, k, size)


def _resolve_size(where: str, group_size: int | None, k: int, count: int) -> int:
    whole = max(k, 1)
    if group_size is None:
        if count <= 1:
            return whole
        # At most one of them gives `count` groups when that is above 1.
        for size in GROUP_SIZES:
            if ceil_div(k, size) == count:
                return size
        raise UnsupportedError(
            f"{where}: group_size is None, and {count} groups over K = {k} fit none of 32, 64 and 128; "
            "expected group_size to be given"
        )
    expected = f"None, -1 or {whole} (whole K), or a multiple of 32"
    check_int(where, "group_size", group_size, expected)
    if group_size in (-1, whole):
        return whole
    if group_size <= 0 or group_size % 32:
        raise UnsupportedError(f"{where}: group_size is {group_size}, expected {expected}")
    if count <= 1 and group_size >= whole and group_size not in GROUP_SIZES:
        return whole
    return group_size


def _in_order(g_idx: torch.Tensor, size: int) -> bool:
    return bool((g_idx == torch.arange(g_idx.shape[-1], dtype=torch.int64, device=g_idx.device) // size).all())


def _whole_groups(g_idx: torch.Tensor, count: int) -> int:
    """The group size of columns that are in order, as g_idx alone tells it; 0 if it does not."""
    k = g_idx.shape[-1]
    size = int((g_idx.reshape(-1, k)[0] == 0).sum()) if g_idx.numel() else 0
    return size if size and size % 32 == 0 and ceil_div(k, size) == count and _in_order(g_idx, size) else 0


def _check_range(where: str, name: str, g_idx: torch.Tensor, count: int) -> None:
    bad = ((g_idx < 0) | (g_idx >= count)).flatten().nonzero()
    if bad.numel():
        at = int(bad[0])
        raise ShapeError(
            f"{where}: {name} holds {int(g_idx.flatten()[at])} at position {at}, "
            f"expected a group number in 0..{count - 1}, as the scales have {count} groups"
        )


def _sort_columns(where: str, name: str, g_idx: torch.Tensor, count: int, size: int, given: bool) -> torch.Tensor:
    """perm [.., count * size]: columns by group, in their own order inside a group, -1 in unused places."""
    k = g_idx.shape[-1]
    flat = g_idx.reshape(-1, k)
    members = torch.zeros(flat.shape[0], count, dtype=torch.int64, device=flat.device)
    members.scatter_add_(1, flat, torch.ones_like(flat))
    if int(members.max()) > size:
        at = int(members.flatten().argmax())
        puts = f"{name} puts {int(members.max())} columns in group {at % count}"
        if not given:  # a slice has fewer columns than its groups had
            raise UnsupportedError(f"{where}: group_size is None, and {puts}; expected group_size to be given")
        raise ShapeError(f"{where}: {puts}, expected at most group_size = {size}")
    ordered, columns = flat.sort(dim=1, stable=True)
    first = members.cumsum(1) - members
    places = torch.arange(k, dtype=torch.int64, device=flat.device)
    slots = ordered * size + places - first.gather(1, ordered)
    perm = torch.full((flat.shape[0], count * size), -1, dtype=torch.int64, device=flat.device)
    perm.scatter_(1, slots, columns)
    return perm.to(torch.int32).reshape(*g_idx.shape[:-1], count * size)
