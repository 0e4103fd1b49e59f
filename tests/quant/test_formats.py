"""Checkpoint formats: packed here value by value from their closed forms, and read back by the library."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omnigemm.core.errors import DeviceError, DTypeError, LayoutError, ShapeError, UnsupportedError
from omnigemm.quant import Int4Weight

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_k_major(q: np.ndarray) -> np.ndarray:
    """GPTQ qweight from q [N, K]: nibble i of word r is column 8r + i. Unused nibbles get junk."""
    n, k = q.shape
    out = np.zeros(((k + 7) // 8, n), dtype=np.int32)
    for r in range(out.shape[0]):
        for c in range(n):
            word = 0
            for i in range(8):
                word |= (int(q[c, 8 * r + i]) if 8 * r + i < k else 9) << (4 * i)
            out[r, c] = signed(word)
    return out


def pack_columns(values: np.ndarray, order: list[int]) -> np.ndarray:
    """[R, N] -> int32 [R, ceil(N/8)]: nibble i of word c is column 8c + order[i]."""
    rows, n = values.shape
    out = np.zeros((rows, (n + 7) // 8), dtype=np.int32)
    for r in range(rows):
        for c in range(out.shape[1]):
            word = 0
            for i, column in enumerate(order):
                word |= (int(values[r, 8 * c + column]) if 8 * c + column < n else 5) << (4 * i)
            out[r, c] = signed(word)
    return out


def pack_marlin(q: np.ndarray) -> np.ndarray:
    n, k = q.shape
    out = np.zeros((k // 16, 2 * n), dtype=np.int32)
    for row in range(k // 16):
        for c in range(2 * n):
            chunk, lane, j = c // 128, (c % 128) // 4, c % 4
            word = 0
            for p in range(8):
                at_k = 16 * row + 2 * (lane % 4) + 8 * (p & 1) + (p >> 2)
                at_n = 64 * chunk + 16 * j + 8 * ((p >> 1) & 1) + lane // 4
                word |= int(q[at_n, at_k]) << (4 * p)
            out[row, c] = signed(word)
    return out


def permute_marlin_scales(s: np.ndarray) -> np.ndarray:
    """s [G, N] as the files have it."""
    out = np.empty_like(s)
    for g in range(s.shape[0]):
        for c in range(s.shape[1]):
            if s.shape[0] > 1:
                i, j = divmod(c % 64, 8)
                out[g, c] = s[g, c - c % 64 + i + 8 * j]
            else:
                i, t = divmod(c % 32, 8)
                out[g, c] = s[g, c - c % 32 + 2 * i + [0, 1, 8, 9, 16, 17, 24, 25][t]]
    return out


class Example:
    """A random weight: values q [N, K], scales and zeros [G, N], the group of each column, the dense truth."""

    def __init__(
        self, n: int, k: int, size: int, zeros: range | None = None, *, shuffle: bool = False, seed: int = 0
    ) -> None:
        rng = np.random.default_rng([n, k, size, seed])
        self.n, self.k, self.size = n, k, size
        groups = -(-k // size)
        self.q = rng.integers(0, 16, (n, k))
        self.scales = rng.uniform(0.01, 2, (groups, n)).astype(np.float16)
        self.zeros = np.full((groups, n), 8) if zeros is None else rng.choice(list(zeros), (groups, n))
        self.g_idx = np.arange(k) // size
        if shuffle:
            rng.shuffle(self.g_idx)

    @property
    def dense(self) -> np.ndarray:
        out = np.empty((self.n, self.k), dtype=np.float32)
        for c, g in enumerate(self.g_idx):
            out[:, c] = self.scales[g].astype(np.float32) * (self.q[:, c] - self.zeros[g])
        return out


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def stored_value(weight: Int4Weight, row: int, column: int) -> int:
    return (int(weight.qweight[row, column // 2]) >> (4 * (column % 2))) & 15


def assert_matches(weight: Int4Weight, example: Example, *, symmetric: bool, shuffled: bool = False) -> None:
    assert weight.shape == (example.n, example.k)
    assert weight.experts is None
    assert weight.symmetric is symmetric
    assert weight.act_order is shuffled
    assert weight.dtype == torch.float16
    columns = list(range(example.k)) if weight.perm is None else weight.perm.tolist()
    assert sorted(c for c in columns if c >= 0) == list(range(example.k))
    assert weight.padded_k == len(columns)
    for j, column in enumerate(columns):
        if column < 0:
            continue
        g = j // weight.group_size
        assert g == example.g_idx[column]
        for row in range(example.n):
            assert stored_value(weight, row, j) == example.q[row, column]
    assert torch.equal(weight.scales, tensor(example.scales.T))
    if weight.zeros is not None:
        assert torch.equal(weight.zeros, tensor(example.zeros.T.astype(np.uint8)))
    assert np.array_equal(weight.dequantize().numpy(), example.dense)


def gptq_tensors(example: Example, offset: int = 1) -> dict[str, torch.Tensor]:
    return {
        "qweight": tensor(pack_k_major(example.q)),
        "scales": tensor(example.scales),
        "qzeros": tensor(pack_columns(example.zeros - offset, list(range(8)))),
        "g_idx": tensor(example.g_idx.astype(np.int32)),
    }


def awq_tensors(example: Example) -> dict[str, torch.Tensor]:
    return {
        "qweight": tensor(pack_columns(example.q.T, AWQ_ORDER)),
        "scales": tensor(example.scales),
        "qzeros": tensor(pack_columns(example.zeros, AWQ_ORDER)),
    }


def compressed_tensors(example: Example) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": tensor(pack_k_major(example.q).T),
        "weight_scale": tensor(example.scales.T),
        "weight_shape": torch.tensor([example.n, example.k]),
        "weight_zero_point": tensor(pack_columns(example.zeros, list(range(8))).T),
        "weight_g_idx": tensor(example.g_idx.astype(np.int32)),
    }


def marlin_tensors(example: Example) -> dict[str, torch.Tensor]:
    return {"b": tensor(pack_marlin(example.q)), "s": tensor(permute_marlin_scales(example.scales))}


READERS = {
    "gptq": (Int4Weight.from_gptq, gptq_tensors),
    "awq": (Int4Weight.from_awq, awq_tensors),
    "compressed-tensors": (Int4Weight.from_compressed_tensors, compressed_tensors),
    "marlin": (Int4Weight.from_marlin, marlin_tensors),
}


# --- every value of every format -----------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [None, range(1, 16)])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(("offset", "name"), [(1, "gptq"), (0, "gptq_v2")])
def test_gptq(offset: int, name: str, size: int, zeros: range | None) -> None:
    example = Example(16, 2 * size, size, zeros)
    weight = Int4Weight.from_gptq(**gptq_tensors(example, offset), checkpoint_format=name)
    assert weight.group_size == size
    assert_matches(weight, example, symmetric=zeros is None)


def test_gptq_symmetric_files_hold_the_published_words() -> None:
    words = {name: pack_columns(np.full((1, 8), 8 - offset), list(range(8))) for offset, name in ((1, "v1"), (0, "v2"))}
    assert words["v1"][0, 0] == 0x77777777
    assert words["v2"][0, 0] == signed(0x88888888)


@pytest.mark.parametrize(("offset", "name"), [(1, "gptq"), (0, "gptq_v2")])
def test_gptq_zero_point_0(offset: int, name: str) -> None:
    """Minus one, in four bits, it is 15 in the first format. 16 is no zero point of values that include 0."""
    example = Example(8, 64, 32, range(3))
    assert 0 in example.zeros
    words = gptq_tensors(example, 0)
    words["qzeros"] = tensor(pack_columns((example.zeros - offset) & 15, list(range(8))))
    assert_matches(Int4Weight.from_gptq(**words, checkpoint_format=name), example, symmetric=False)


def test_gptq_formats_differ_by_one() -> None:
    tensors = gptq_tensors(Example(8, 64, 32, range(2, 9)))
    first = Int4Weight.from_gptq(**tensors, checkpoint_format="gptq").zeros
    second = Int4Weight.from_gptq(**tensors, checkpoint_format="gptq_v2").zeros
    assert first is not None
    assert second is not None
    assert torch.equal(first, second + 1)


def test_gptq_without_zero_points_or_order_is_symmetric() -> None:
    example = Example(8, 64, 32)
    tensors = gptq_tensors(example)
    weight = Int4Weight.from_gptq(tensors["qweight"], tensors["scales"])
    assert_matches(weight, example, symmetric=True)


@pytest.mark.parametrize(("k", "size"), [(256, 32), (192, 64), (256, 128), (100, 32), (37, 32), (300, 64)])
@pytest.mark.parametrize("reader", ["gptq", "compressed-tensors"])
def test_act_order(reader: str, k: int, size: int) -> None:
    read, pack = READERS[reader]
    example = Example(9, k, size, range(1, 16), shuffle=True)
    weight = read(**pack(example))
    assert weight.group_size == size
    assert weight.padded_k == weight.num_groups * size
    assert_matches(weight, example, symmetric=False, shuffled=True)
    assert weight.perm is not None
    for g in range(weight.num_groups):
        group = [c for c in weight.perm[g * size : (g + 1) * size].tolist() if c >= 0]
        assert group == sorted(group)


def test_act_order_of_a_slice_drops_unused_groups_and_pads_short_ones() -> None:
    # Rows 0..63 of a shuffled weight of 128 columns: all four scales are there, only three groups have members.
    example = Example(8, 64, 32, range(1, 16))
    example.scales = np.concatenate([example.scales, example.scales * 2])
    example.zeros = np.concatenate([example.zeros, example.zeros[::-1]])
    example.g_idx = np.array([3, 0, 0, 1] * 16)
    weight = Int4Weight.from_gptq(**gptq_tensors(example), group_size=32)
    assert weight.num_groups == 3
    assert weight.padded_k == 96
    assert np.array_equal(weight.dequantize().numpy(), example.dense)


def test_a_slice_in_order_needs_no_permutation() -> None:
    example = Example(8, 128, 32, range(1, 16))
    tensors = gptq_tensors(example)
    weight = Int4Weight.from_gptq(
        tensors["qweight"][8:], tensors["scales"], tensors["qzeros"], tensors["g_idx"][64:], group_size=32
    )
    assert weight.perm is None
    assert weight.num_groups == 2
    assert np.array_equal(weight.dequantize().numpy(), example.dense[:, 64:])


@pytest.mark.parametrize("given", [None, 64, -1, 96])
def test_g_idx_decides_when_it_disagrees_with_the_group_size(given: int | None) -> None:
    """And nothing is padded for it."""
    example = Example(8, 64, 32, range(1, 16))
    weight = Int4Weight.from_gptq(**gptq_tensors(example), group_size=given)
    assert_matches(weight, example, symmetric=False)
    assert (weight.group_size, weight.num_groups, weight.padded_k) == (32, 2, 64)


def test_g_idx_tells_other_group_sizes() -> None:
    example = Example(8, 192, 96, range(1, 16))
    weight = Int4Weight.from_gptq(**gptq_tensors(example))
    assert (weight.group_size, weight.num_groups, weight.act_order) == (32, 6, False)
    assert np.array_equal(weight.dequantize().numpy(), example.dense)


def test_a_slice_within_one_group_needs_the_group_size() -> None:
    example = Example(8, 128, 64, range(1, 16))
    words = gptq_tensors(example)
    words |= {"qweight": words["qweight"][12:], "g_idx": words["g_idx"][96:]}
    weight = Int4Weight.from_gptq(**words, group_size=64)
    assert np.array_equal(weight.dequantize().numpy(), example.dense[:, 96:])
    with pytest.raises(UnsupportedError, match=r"group_size is None, and g_idx puts all columns in group 1 of 2; exp"):
        Int4Weight.from_gptq(**words)


@pytest.mark.parametrize("zeros", [None, range(16)])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_awq(size: int, zeros: range | None) -> None:
    example = Example(24, 2 * size, size, zeros)
    assert_matches(Int4Weight.from_awq(**awq_tensors(example)), example, symmetric=zeros is None)


def test_awq_column_shifts() -> None:
    # One word, column j holding the value j: the order of the nibbles, written out.
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    weight = Int4Weight.from_awq(word, torch.ones(1, 8))
    assert [stored_value(weight, row, 0) for row in range(8)] == list(range(8))


@pytest.mark.parametrize("zeros", [None, range(16)])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_compressed_tensors(size: int, zeros: range | None) -> None:
    example = Example(16, 2 * size, size, zeros)
    weight = Int4Weight.from_compressed_tensors(**compressed_tensors(example))
    assert_matches(weight, example, symmetric=zeros is None)


@pytest.mark.parametrize(
    "shape", [(9, 45), [9, 45], torch.tensor([9, 45]), torch.tensor([9, 45], dtype=torch.int32), torch.Size([9, 45])]
)
def test_compressed_tensors_shapes(shape: Any) -> None:
    example = Example(9, 45, 32, range(16))
    tensors = {**compressed_tensors(example), "weight_shape": shape}
    del tensors["weight_g_idx"]
    assert_matches(Int4Weight.from_compressed_tensors(**tensors), example, symmetric=False)


def test_compressed_tensors_order_of_all_minus_one_means_none() -> None:
    example = Example(8, 64, 32)
    tensors = {**compressed_tensors(example), "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    assert_matches(Int4Weight.from_compressed_tensors(**tensors), example, symmetric=True)


def test_gptq_empty_order_means_none() -> None:
    example = Example(8, 64, 32)
    tensors = {**gptq_tensors(example), "g_idx": torch.empty(0, dtype=torch.int32)}
    assert_matches(Int4Weight.from_gptq(**tensors), example, symmetric=True)


@pytest.mark.parametrize(("n", "k", "size"), [(64, 256, 128), (128, 64, 32), (192, 48, 48), (64, 128, 128)])
def test_marlin(n: int, k: int, size: int) -> None:
    example = Example(n, k, size)
    weight = Int4Weight.from_marlin(**marlin_tensors(example))
    assert weight.group_size == size
    assert_matches(weight, example, symmetric=True)


def test_marlin_padding_is_cut_off() -> None:
    example = Example(128, 64, 32)
    weight = Int4Weight.from_marlin(**marlin_tensors(example), n=100, k=50)
    assert weight.shape == (100, 50)
    assert np.array_equal(weight.dequantize().numpy(), example.dense[:100, :50])


# --- sizes that fill no word, groups that fill no block, experts ---------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 5), (7, 33), (13, 100), (9, 63), (8, 127), (17, 129)])
@pytest.mark.parametrize("reader", ["gptq", "awq", "compressed-tensors"])
def test_odd_sizes(reader: str, n: int, k: int) -> None:
    read, pack = READERS[reader]
    example = Example(n, k, 32, range(1, 16))
    weight = read(**pack(example), group_size=32)
    assert_matches(weight, example, symmetric=False)


def test_gptq_odd_k_without_order_is_said() -> None:
    example = Example(5, 45, 32, range(1, 16))
    tensors = gptq_tensors(example)
    del tensors["g_idx"]
    assert_matches(Int4Weight.from_gptq(**tensors, k=45, n=5), example, symmetric=False)


@pytest.mark.parametrize("given", [None, -1, 80, 96, 4096])
@pytest.mark.parametrize("reader", ["gptq", "awq", "compressed-tensors"])
def test_whole_k(reader: str, given: int | None) -> None:
    read, pack = READERS[reader]
    example = Example(8, 80, 80, range(1, 16))
    weight = read(**pack(example), group_size=given)
    assert weight.group_size == 80
    assert weight.num_groups == 1
    assert_matches(weight, example, symmetric=False)


@pytest.mark.parametrize(("size", "parts", "k"), [(256, 128, 512), (96, 32, 288), (192, 64, 400), (256, 128, 300)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_other_group_sizes_become_several_equal_groups(size: int, parts: int, k: int, shuffle: bool) -> None:
    example = Example(8, k, size, range(1, 16), shuffle=shuffle)
    weight = Int4Weight.from_gptq(**gptq_tensors(example), group_size=size)
    assert weight.group_size == parts
    assert weight.act_order is shuffle
    assert np.array_equal(weight.dequantize().numpy(), example.dense)


def test_a_group_wider_than_k_is_one_short_group() -> None:
    example = Example(8, 40, 128, range(1, 16))
    weight = Int4Weight.from_awq(**awq_tensors(example), group_size=128)
    assert (weight.group_size, weight.num_groups, weight.padded_k) == (128, 1, 40)
    assert_matches(weight, example, symmetric=False)


@pytest.mark.parametrize(
    ("reader", "zeros"),
    [(reader, zeros) for reader in READERS for zeros in (None, range(1, 16)) if reader != "marlin" or zeros is None],
)
def test_experts(reader: str, zeros: range | None) -> None:
    read, pack = READERS[reader]
    examples = [Example(64, 64, 32, zeros, seed=seed) for seed in range(3)]
    packed = [pack(example) for example in examples]
    weight = read(**{name: torch.stack([tensors[name] for tensors in packed]) for name in packed[0]})
    assert weight.shape == (3, 64, 64)
    for expert, example in enumerate(examples):
        assert np.array_equal(weight.dequantize()[expert].numpy(), example.dense)
        if zeros is not None:
            assert_matches(weight[expert], example, symmetric=False)


def test_experts_with_and_without_order() -> None:
    examples = [Example(5, 50, 32, range(1, 16), shuffle=seed == 1, seed=seed) for seed in range(3)]
    packed = [gptq_tensors(example) for example in examples]
    weight = Int4Weight.from_gptq(**{name: torch.stack([t[name] for t in packed]) for name in packed[0]})
    assert weight.act_order
    for expert, example in enumerate(examples):
        assert_matches(weight[expert], example, symmetric=False, shuffled=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype(dtype: torch.dtype) -> None:
    tensors = awq_tensors(Example(8, 64, 32))
    scales = tensors["scales"].to(dtype)
    weight = Int4Weight.from_awq(tensors["qweight"], scales)
    assert weight.dtype == dtype
    assert torch.equal(weight.scales, scales.T)


@pytest.mark.parametrize("reader", list(READERS))
def test_empty_sizes(reader: str) -> None:
    no_columns = {
        "gptq": lambda: Int4Weight.from_gptq(torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 3)),
        "awq": lambda: Int4Weight.from_awq(torch.empty(0, 1, dtype=torch.int32), torch.empty(0, 3)),
        "compressed-tensors": lambda: Int4Weight.from_compressed_tensors(
            torch.empty(3, 0, dtype=torch.int32), torch.empty(3, 0)
        ),
        "marlin": lambda: Int4Weight.from_marlin(torch.empty(0, 128, dtype=torch.int32), torch.empty(0, 64), n=3),
    }[reader]()
    assert no_columns.shape == (3, 0)
    assert no_columns.dequantize().shape == (3, 0)
    no_rows = {
        "gptq": lambda: Int4Weight.from_gptq(torch.empty(8, 0, dtype=torch.int32), torch.empty(2, 0)),
        "awq": lambda: Int4Weight.from_awq(torch.empty(64, 0, dtype=torch.int32), torch.empty(2, 0)),
        "compressed-tensors": lambda: Int4Weight.from_compressed_tensors(
            torch.empty(0, 8, dtype=torch.int32), torch.empty(0, 2)
        ),
        "marlin": lambda: Int4Weight.from_marlin(torch.empty(4, 0, dtype=torch.int32), torch.empty(2, 0)),
    }[reader]()
    assert no_rows.shape == (0, 64)
    assert no_rows.group_size == 32


def test_strided_tensors_are_read_by_value() -> None:
    example = Example(16, 64, 32, range(1, 16))
    tensors = {name: t.repeat_interleave(2, dim=-1)[..., ::2] for name, t in gptq_tensors(example).items()}
    assert not tensors["qweight"].is_contiguous()
    assert_matches(Int4Weight.from_gptq(**tensors), example, symmetric=False)


def test_one_word_with_any_stride() -> None:
    """As a slice of zero points has it."""
    example = Example(8, 64, 32, range(1, 16))
    words = compressed_tensors(example)
    wide = torch.zeros(1, 4, dtype=torch.int32)
    wide[:, 3:] = words["weight_zero_point"][:, 1:]
    scale = words["weight_scale"][:, 1:]
    weight = Int4Weight.from_compressed_tensors(words["weight_packed"][:, 4:], scale, weight_zero_point=wide[:, 3:])
    assert np.array_equal(weight.dequantize().numpy(), example.dense[:, 32:])


@pytest.mark.parametrize("reader", list(READERS))
def test_shapes_alone_will_do(reader: str) -> None:
    """Of tensors without values; but for those whose values decide shapes."""
    read, pack = READERS[reader]
    words = pack(Example(64, 64, 32, None if reader == "marlin" else range(1, 16)))
    order = words.pop("g_idx", words.pop("weight_g_idx", None))
    words.pop("weight_shape", None)
    meta = {name: one.to("meta") for name, one in words.items()}
    weight = read(**meta)
    assert (weight.shape, weight.device.type, weight.group_size) == ((64, 64), "meta", 32)
    assert weight.to("meta") is weight
    with pytest.raises(DeviceError, match=r"Int4Weight\.to: device is 'cpu', expected one that tensors on meta can be"):
        weight.to("cpu")
    if order is not None:
        name = "g_idx" if reader == "gptq" else "weight_g_idx"
        with pytest.raises(DeviceError, match=f"{name} is on meta, expected a device, where it has values"):
            read(**meta, **{name: order.to("meta")})


class Live(TorchDispatchMode):
    """The most bytes of results that were there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def _gone(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                size = one.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(one, self._gone, size)
        return result


@pytest.mark.parametrize("reader", list(READERS))
def test_experts_take_little_room_beside_the_result(reader: str) -> None:
    """One expert at a time is taken apart."""
    read, pack = READERS[reader]
    example = Example(64, 64, 32, shuffle=reader == "gptq")
    words = {name: one.expand(64, *one.shape) for name, one in pack(example).items()}
    with Live() as live:
        weight = read(**words)
    assert weight.qweight.nbytes <= live.most < 2.5 * weight.nbytes
    assert np.array_equal(weight[63].dequantize().numpy(), example.dense)


# --- errors --------------------------------------------------------------------------------------------------


def bad(reader: str, **changes: Any) -> Any:
    """Read a good weight (N 64, K 64, groups of 32) with some arguments replaced; a callable changes the good one."""
    read, pack = READERS[reader]
    example = Example(64, 64, 32, None if reader == "marlin" else range(1, 16))
    arguments: dict[str, Any] = dict(pack(example))
    for name, value in changes.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    return read(**arguments)


INT = torch.int32
ERRORS = [
    ("gptq", {"checkpoint_format": "marlin"}, UnsupportedError, ["checkpoint_format", "'marlin'", "gptq_v2"]),
    ("gptq", {"qweight": [1, 2]}, DTypeError, ["qweight", "list", "torch.Tensor"]),
    ("gptq", {"qweight": lambda t: t.long()}, DTypeError, ["qweight", "torch.int64", "torch.int32"]),
    ("gptq", {"qweight": lambda t: t[0]}, ShapeError, ["qweight", "(64,)", "2 dimensions"]),
    ("gptq", {"scales": lambda t: t.double()}, DTypeError, ["scales", "torch.float64", "torch.bfloat16"]),
    ("gptq", {"scales": lambda t: t[:1]}, ShapeError, ["qzeros", "(2, 8)", "(G, ceil(N/8)) = (1, any)"]),
    ("gptq", {"scales": lambda t: t[:, :8]}, ShapeError, ["scales", "(2, 8)", "(G, N) = (any, 64)"]),
    ("gptq", {"scales": lambda t: t[None]}, ShapeError, ["scales", "(1, 2, 64)", "(any, 64)"]),
    ("gptq", {"scales": lambda t: t.to("meta")}, DeviceError, ["scales", "meta", "cpu"]),
    ("gptq", {"qzeros": lambda t: t.short()}, DTypeError, ["qzeros", "torch.int16"]),
    ("gptq", {"qzeros": lambda t: t[:, :5]}, ShapeError, ["qzeros", "(2, 5)", "ceil(N / 8) = 8"]),
    ("gptq", {"qzeros": lambda t: t.repeat(1, 2)}, UnsupportedError, ["qzeros", "(2, 16)", "8-bit"]),
    ("gptq", {"qweight": lambda t: t.repeat(2, 1)}, UnsupportedError, ["qweight", "(16, 64)", "8-bit", "K = 64"]),
    ("gptq", {"qweight": lambda t: t[:4]}, UnsupportedError, ["qweight", "(4, 64)", "2-bit"]),
    ("gptq", {"qweight": lambda t: t[:6]}, UnsupportedError, ["qweight", "(6, 64)", "3-bit"]),
    ("gptq", {"qweight": lambda t: t[:7]}, ShapeError, ["qweight", "(7, 64)", "ceil(K / 8) = 8"]),
    ("gptq", {"g_idx": lambda t: t.float()}, DTypeError, ["g_idx", "torch.float32", "torch.int32"]),
    ("gptq", {"g_idx": lambda t: t[:60], "k": 64}, ShapeError, ["g_idx", "(60,)", "(K,) = (64,)"]),
    ("gptq", {"g_idx": lambda t: t + 1}, ShapeError, ["g_idx holds 2 at position 32", "0..1"]),
    ("gptq", {"g_idx": lambda t: t - 1}, ShapeError, ["g_idx holds -1 at position 0", "0..1"]),
    ("gptq", {"checkpoint_format": {"bits": 4}}, UnsupportedError, ["checkpoint_format is {'bits': 4}", "gptq_v2"]),
    ("gptq", {"qweight": lambda t: t.to_sparse()}, LayoutError, ["qweight is a sparse_coo tensor", "strides"]),
    (
        "gptq",
        {"g_idx": lambda t: t * 0},
        UnsupportedError,
        ["group_size is None", "g_idx puts all columns in group 0 of"],
    ),
    (
        "gptq",
        {"g_idx": torch.tensor([0, 1] * 2 + [0] * 60, dtype=INT)},
        UnsupportedError,
        ["group_size is None, and g_idx puts 62 columns in group 0; expected group_size to be given"],
    ),
    (
        "gptq",
        {"g_idx": torch.tensor([0, 1] * 2 + [0] * 60, dtype=INT), "group_size": 32},
        ShapeError,
        ["g_idx puts 62 columns in group 0", "group_size = 32"],
    ),
    ("gptq", {"group_size": 64, "g_idx": None}, ShapeError, ["scales", "(2, 64)", "(G, N) = (1, 64)"]),
    ("gptq", {"group_size": -1, "g_idx": None}, ShapeError, ["scales", "(2, 64)", "(G, N) = (1, 64)"]),
    ("gptq", {"group_size": 16, "g_idx": None}, UnsupportedError, ["group_size is 16", "multiple of 32"]),
    ("gptq", {"group_size": 0}, UnsupportedError, ["group_size is 0", "multiple of 32"]),
    ("gptq", {"group_size": "128"}, DTypeError, ["group_size is '128'"]),
    ("gptq", {"n": 63}, ShapeError, ["qweight", "(8, 64)", "(8, 63)"]),
    ("gptq", {"k": 65, "g_idx": None}, ShapeError, ["qweight", "(8, 64)", "K = 65"]),
    ("gptq", {"k": -1, "g_idx": None}, ShapeError, ["k is -1"]),
    ("gptq", {"k": 64.0, "g_idx": None}, DTypeError, ["k is 64.0"]),
    (
        "gptq",
        {"scales": lambda t: t[:1].expand(3, -1), "qzeros": None, "g_idx": None},
        UnsupportedError,
        ["group_size is None", "3 groups over K = 64"],
    ),
    ("awq", {"qweight": lambda t: t.short()}, DTypeError, ["qweight", "torch.int16"]),
    ("awq", {"qweight": lambda t: t.repeat(1, 2)}, UnsupportedError, ["qweight", "(64, 16)", "8-bit", "N = 64"]),
    ("awq", {"qweight": lambda t: t[:, :7]}, ShapeError, ["qweight", "(64, 7)", "ceil(N / 8) = 8"]),
    ("awq", {"scales": lambda t: t[None]}, ShapeError, ["scales", "(1, 2, 64)"]),
    ("awq", {"scales": lambda t: t.repeat(2, 1), "qzeros": None, "group_size": 32}, ShapeError, ["(4, 64)", "(2, 64)"]),
    ("awq", {"qzeros": lambda t: t[:1]}, ShapeError, ["qzeros", "(1, 8)", "(2, any)"]),
    ("awq", {"qzeros": lambda t: t.repeat(1, 2)}, UnsupportedError, ["qzeros", "(2, 16)", "8-bit"]),
    ("awq", {"qzeros": lambda t: t.to("meta")}, DeviceError, ["qzeros", "meta"]),
    ("awq", {"n": 60}, ShapeError, ["scales", "(2, 64)", "60"]),
    ("awq", {"k": 63}, ShapeError, ["qweight", "(64, 8)", "63"]),
    ("compressed-tensors", {"weight_packed": lambda t: t.byte()}, DTypeError, ["weight_packed", "torch.uint8"]),
    (
        "compressed-tensors",
        {"weight_packed": lambda t: t.repeat(1, 2)},
        UnsupportedError,
        ["weight_packed", "(64, 16)", "8-bit", "K = 64"],
    ),
    ("compressed-tensors", {"weight_scale": lambda t: t.T}, ShapeError, ["weight_scale", "(2, 64)", "(64, any)"]),
    (
        "compressed-tensors",
        {"weight_scale": lambda t: t[:, :1], "weight_zero_point": None, "weight_g_idx": None, "group_size": 32},
        ShapeError,
        ["weight_scale", "(64, 1)", "(N, G) = (64, 2)"],
    ),
    ("compressed-tensors", {"weight_shape": (63, 64)}, ShapeError, ["weight_shape", "(63, 64)", "N = 64"]),
    ("compressed-tensors", {"weight_shape": (64,)}, ShapeError, ["weight_shape", "[64]"]),
    ("compressed-tensors", {"weight_shape": 5}, DTypeError, ["weight_shape is 5", "two whole numbers, N and K"]),
    (
        "compressed-tensors",
        {"weight_shape": lambda t: t.to("meta")},
        DeviceError,
        ["weight_shape is on meta", "where it has values"],
    ),
    ("compressed-tensors", {"weight_g_idx": lambda t: t.to("meta")}, DeviceError, ["weight_g_idx is on meta", "cpu"]),
    ("compressed-tensors", {"weight_g_idx": [0, 1]}, DTypeError, ["weight_g_idx is a list"]),
    ("compressed-tensors", {"weight_shape": (64, 64.0)}, DTypeError, ["weight_shape[1]", "64.0"]),
    ("compressed-tensors", {"weight_shape": torch.ones(2)}, DTypeError, ["weight_shape", "torch.float32"]),
    ("compressed-tensors", {"weight_shape": torch.tensor([64, 64, 1])}, ShapeError, ["weight_shape", "[64, 64, 1]"]),
    ("compressed-tensors", {"weight_zero_point": lambda t: t.T}, ShapeError, ["weight_zero_point", "(2, 8)"]),
    ("compressed-tensors", {"weight_zero_point": lambda t: t[:7]}, ShapeError, ["weight_zero_point", "(7, 2)"]),
    ("compressed-tensors", {"weight_g_idx": lambda t: t * 9}, ShapeError, ["weight_g_idx holds 9 at position 32"]),
    ("compressed-tensors", {"weight_g_idx": lambda t: t[:9]}, ShapeError, ["weight_g_idx", "(9,)", "(64,)"]),
    ("marlin", {"b": lambda t: t.long()}, DTypeError, ["b has dtype", "torch.int64"]),
    ("marlin", {"b": lambda t: t.repeat(1, 2)}, UnsupportedError, ["b has shape (4, 256)", "8-bit"]),
    ("marlin", {"b": lambda t: t[:, :100]}, ShapeError, ["b has shape (4, 100)", "(4, 128)"]),
    ("marlin", {"s": lambda t: t[:, :60]}, ShapeError, ["s has shape (2, 60)", "multiple of 64"]),
    ("marlin", {"s": lambda t: t[0]}, ShapeError, ["s has shape (64,)", "(G, N)"]),
    ("marlin", {"group_size": 64}, ShapeError, ["s has shape (2, 64)", "(G, N) = (1, 64)"]),
    ("marlin", {"n": 65}, ShapeError, ["n is 65", "64"]),
    ("marlin", {"k": 48}, ShapeError, ["k is 48", "64"]),
]


@pytest.mark.parametrize(("reader", "changes", "error", "words"), ERRORS)
def test_errors(reader: str, changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        bad(reader, **changes)
    message = str(caught.value)
    assert message.startswith(f"from_{reader.replace('-', '_')}: ")
    for word in words:
        assert word in message


def test_the_unchanged_example_of_the_errors_is_good() -> None:
    for reader in READERS:
        assert bad(reader).shape == (64, 64)
