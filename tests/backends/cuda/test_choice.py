"""Which config is chosen: always a legal one, the measured one where there is one, and in order. No GPU is needed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigemm.backends.cuda import choice, dense, kernels_on
from omnigemm.backends.cuda.choice import RUNNERS_UP, Choice, choices, deepest, kind_of, table
from omnigemm.backends.cuda.gpu import KNOWN, Gpu
from omnigemm.backends.cuda.jit import KernelSpec, Result
from omnigemm.backends.cuda.sm90 import SHARED_BYTES, SHARED_PER_SM, Config, Variant
from omnigemm.core.problem import describe

H200 = KNOWN["h200"]
STRANGER = dataclasses.replace(H200, name="NVIDIA Unheard Of")
BLOCK = ("1x128", "128x128")
KINDS = (BLOCK, ("1x128", "1x128"), ("token", "channel"), ("tensor", "tensor"), ("tensor", "channel"))
# Both sides of every edge at which another tile comes into question, and what lies between.
ROWS: tuple[int, ...] = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256, 257)
ROWS += (511, 512, 513, 1000, 2048, 2049, 4096, 4097, 8192, 9000)
WEIGHTS = ((1, 1), (3, 17), (7, 128), (64, 129), (129, 513), (576, 7168), (4096, 7168), (4097, 100), (7168, 16384))


def variant(n: int, k: int, kinds: tuple[str, str] = BLOCK, out: str = "bf16", bias: bool = False) -> Variant:
    return Variant(n, k, "e4m3", "e4m3", *kinds, out, bias, out_by_tma=n % (4 if out == "fp32" else 8) == 0)


def check(what: Variant, m: int, gpu: Gpu) -> tuple[Choice, ...]:
    found = choices(what, m, gpu)
    assert 1 <= len(found) <= 1 + RUNNERS_UP
    assert len({one.config for one in found}) == len(found)
    for one in found:
        assert what.fault(one.config) is None
        grid = one.config.grid(m, what.n, gpu.multiprocessors)
        assert grid > 0
        assert grid % one.config.cluster == 0
        assert one.seconds > 0
    assert all(one.seconds <= other.seconds for one, other in itertools.pairwise(found))
    assert not any(one.measured for one in found[1:])
    return found


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_choices_are_legal_and_in_order(n: int, k: int, kinds: tuple[str, str]) -> None:
    for m in ROWS:
        check(variant(n, k, kinds), m, H200)


@pytest.mark.parametrize("gpu", [KNOWN["h100"], STRANGER, dataclasses.replace(STRANGER, multiprocessors=78)], ids=str)
def test_gpus_that_nobody_measured(gpu: Gpu) -> None:
    assert table(gpu) == {}
    for (n, k), m in itertools.product(WEIGHTS, ROWS):
        assert not check(variant(n, k), m, gpu)[0].measured


@settings(deadline=None, max_examples=150)
@given(
    m=st.integers(1, 20000),
    n=st.integers(1, 40000),
    k=st.integers(1, 20000),
    kinds=st.sampled_from(KINDS),
    out=st.sampled_from(["bf16", "fp16", "fp32"]),
    multiprocessors=st.integers(8, 160),
)
def test_any_size_has_choices(m: int, n: int, k: int, kinds: tuple[str, str], out: str, multiprocessors: int) -> None:
    check(variant(n, k, kinds, out), m, dataclasses.replace(H200, multiprocessors=multiprocessors))


@pytest.mark.parametrize("multiprocessors", range(1, 9))
def test_a_slice_of_a_gpu_gets_clusters_that_fit(multiprocessors: int) -> None:
    """Also where the table, which goes by the name, has larger ones."""
    for gpu in (dataclasses.replace(one, multiprocessors=multiprocessors) for one in (H200, STRANGER)):
        for m in (1, 16, 33, 64, 128, 256, 1000, 4096):
            for what in (variant(576, 7168), variant(4096, 7168)):
                found = [*check(what, m, gpu), *choices(what, m, gpu, constant_weights=True)]
                assert all(one.config.cluster <= multiprocessors for one in found)
        for op, words in (
            ("gemm", {"batch": 3}),
            ("grouped_gemm_contiguous", {"groups": 4}),
            ("grouped_gemm_masked", {"groups": 4, "dtype": "e4m3"}),
            ("grouped_gemm_k_contiguous", {"groups": 4}),
            ("grouped_gemm", {"groups": 4}),
        ):
            for m in (8, 512, 4096):
                for kernel in kernels_on(describe(op, m=m, n=4096, k=4096, **words), gpu):
                    assert kernel.choice.config.cluster <= multiprocessors  # type: ignore[attr-defined]


def test_the_same_every_time() -> None:
    """The order of candidates must not depend on what was asked before, or processes would compile other kernels."""
    asked = [(variant(n, k), m) for (n, k), m in itertools.product(WEIGHTS, ROWS)]
    first = {one: choices(*one, H200) for one in asked}
    choice._best.cache_clear()
    assert {one: choices(*one, H200) for one in reversed(asked)} == first


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_what_was_measured_leads(kinds: tuple[str, str], constant: bool) -> None:
    """For the scales it was measured with and their relatives; runners-up never look better than what beat them."""
    for (n, k, kind), rows in table(H200).items():
        what = variant(n, k, kinds)
        if kind_of(what) != kind:
            continue
        for row in rows:
            if row.get("constant_weights", constant) != constant:
                continue
            config = Config(**row["config"])
            for m in {row["m_from"] if not 32 < row["m"] <= 128 else row["m"], min(row["m_to"], 10000)}:
                lead, *others = choices(what, m, H200, constant)
                assert lead.measured == (what.fault(config) is None)
                if kinds in (BLOCK, ("token", "channel")):
                    assert lead.measured
                if lead.measured:
                    assert lead.config == config
                    if "constant_weights" in row:
                        assert lead.early == row.get("early", 0)
                        assert lead.early <= config.stages
                    assert lead.seconds == pytest.approx(row["us"] * 1e-6)
                    assert all(one.seconds >= lead.seconds for one in others)
                else:
                    assert config not in [one.config for one in others]


def test_beside_the_table_the_model_chooses() -> None:
    (n, k), rows = (576, 7168), table(H200)[576, 7168, "block"]
    assert not any(row["m_from"] <= 200 <= row["m_to"] for row in rows)
    assert not choices(variant(n, k), 200, H200)[0].measured
    assert not choices(variant(n + 8, k), 1, H200)[0].measured
    assert choices(variant(n, k), 1, H200)[0].measured


@pytest.mark.parametrize("m", [33, 50, 63, 65, 100, 127])
def test_between_the_measured_rows_the_model_chooses(m: int) -> None:
    """From 33 to 128 rows, where tiles are as wide as there are tokens; how cuBLAS fares is still the table's word."""
    seen = 0
    for n, k, kind in table(H200):
        if kind not in ("block", "16"):
            continue
        what = variant(n, k) if kind == "block" else Variant(n, k, "bf16", "bf16", "none", "none", "bf16")
        lead, measured = choices(what, m, H200)[0], choices(what, 64 if m < 64 else 128, H200)[0]
        seen += measured.measured
        assert not lead.measured
        assert lead.config == choice.modelled(what, choice.alike(m), H200)[0].config
        assert lead.against_blas == measured.against_blas
    assert seen > 5


def test_the_model_is_asked_for_few_numbers_of_rows() -> None:
    """Each costs the host milliseconds. The number is never below M, and little above."""
    rows = range(1, 20000)
    assert all(m <= choice.alike(m) < m + max(8, m / 8) for m in rows)
    assert len({choice.alike(m) for m in rows}) < 150
    assert all(choice.alike(m) == m for m in (64, 128, 512, 1024, 4096))
    # As many tokens wide as there are: the same tiles as for M itself.
    for m, share in itertools.product(range(1, 257), (1, 2, 4)):
        assert choice.token_width(m, share) == choice.token_width(choice.alike(m), share)


def test_clusters_that_find_no_room_take_another_round() -> None:
    """On an H200 fifteen clusters of eight ran at a time, and not sixteen."""
    assert 8 * H200.clusters[7] == 120
    config = Config(True, 1, 1, 16, 8, split=8, depth=4)
    room, more = (choice.seconds(config, variant(64 * clusters, 65536), 16, H200) for clusters in (15, 16))
    assert more > 1.2 * room


def test_rows_at_odd_multiples_of_16_bytes_cost_more_of_l2() -> None:
    config = Config(False, 2, 1, 128, 5, band=16)
    whole, even, odd = (choice.seconds(config, variant(4096, k), 4096, H200) for k in (4096, 4096 - 32, 4096 - 16))
    assert whole < even < odd


def test_weights_are_read_early_only_where_they_are_constant_and_it_pays() -> None:
    for what, m in itertools.product((variant(576, 7168), variant(1000, 1000)), (1, 16, 64, 128, 4096)):
        assert not any(one.early for one in choices(what, m, H200))
    for m in (1, 32):
        assert all(one.early == one.config.stages for one in choices(variant(1000, 1000), m, H200, True))
    for m, most in ((33, 4), (64, 4), (65, 2), (512, 2), (513, 0), (4096, 0)):
        for one in choices(variant(1000, 4000), m, H200, True):
            assert one.early == (0 if one.config.split > 6 else min(most, one.config.stages))
    assert all(one.early == one.config.stages for one in choices(variant(1000, 1000), 1, H200, True, batch=8))
    assert not any(one.early for one in choices(variant(1000, 1000), 64, H200, True, batch=8))
    assert choices(variant(576, 7168), 1, H200, True)[0].early


def test_what_an_older_table_says_of_early_weights_is_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**row, "early": True} if "early" in row else row for row in table(H200)[576, 7168, "block"]]
    monkeypatch.setattr(choice, "table", lambda _: {(576, 7168, "block"): rows})
    (lead, *_) = choices(variant(576, 7168), 1, H200, True)
    assert lead.measured
    assert lead.early == lead.config.stages


def test_a_row_for_constant_weights_and_others_loads_early_by_the_models_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"swap": False, "math_groups": 2, "waves": 1, "cols": 64, "stages": 6}
    row = {"m_from": 257, "m_to": 700, "m": 512, "us": 20.0, "config": config}
    monkeypatch.setattr(choice, "table", lambda _: {(576, 7168, "block"): [row]})
    for m, constant, early in ((512, True, 2), (512, False, 0), (600, True, 0)):
        (lead, *_) = choices(variant(576, 7168), m, H200, constant)
        assert lead.measured
        assert lead.early == early


def test_few_rows_swap_and_many_do_not() -> None:
    """A tile of 64 rows of A would be padding for one token; for thousands, B on the left would be read again."""
    assert choices(variant(4096, 7168), 1, STRANGER)[0].config.swap
    assert not choices(variant(4096, 7168), 4096, STRANGER)[0].config.swap


def test_l2_takes_what_is_asked_for() -> None:
    """More was measured to be no better, and up to 18 % slower where rows begin within lines of memory."""
    for m, (n, k) in itertools.product((1, 16, 64, 200, 4096), ((4096, 7168), (576, 7168), (32768, 528))):
        assert {one.config.fetch for one in choice.modelled(variant(n, k), m, STRANGER)} == {128}


def test_narrow_tiles_of_many_rows_do_not_share_weights() -> None:
    """Blocks that share wait for one another: 1.1 to 1.5 times as long with 32 and 48 columns."""
    shared = set()
    for m, (n, k) in itertools.product((200, 640, 1400), ((1280, 4352), (512, 3584))):
        for one in choice.modelled(variant(n, k), m, STRANGER):
            if one.config.persistent and one.config.right_share > 1:
                shared.add(one.config.cols)
    assert min(shared) == 112


@pytest.mark.parametrize("blocks_per_sm", [1, 2, 3])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_deepest_fills_shared_memory_and_no_more(kinds: tuple[str, str], blocks_per_sm: int) -> None:
    for swap, cols, k in itertools.product((False, True), (16, 64, 128), (1, 129, 1000, 7168)):
        what = variant(4096, k, kinds)
        config = deepest(Config(swap, 1, 1, cols, 0, depth=2 if swap else 1, blocks_per_sm=blocks_per_sm), what)
        size = what.shared_bytes(config)
        assert size <= SHARED_BYTES
        assert blocks_per_sm * (size + 1024) <= SHARED_PER_SM
        more = what.shared_bytes(dataclasses.replace(config, stages=config.stages + 1))
        full = more > SHARED_BYTES or blocks_per_sm * (more + 1024) > SHARED_PER_SM
        # Else there is nothing that one more stage could hold.
        assert full or config.stages == 16 or (swap and config.stages * 128 >= k)


# ------------------------------------------------------------------------------------------------ what is chosen runs

CHOSEN = [
    (variant(n, k, kinds, out, bias), m)
    for (m, n, k), kinds in itertools.product(((1, 576, 7168), (4096, 4096, 7168), (4096, 32768, 512)), KINDS)
    for out, bias in (("bf16", True), ("fp32", False))
    if m > 1 or out == "bf16"
]


@pytest.fixture(scope="module")
def results(compile_all: Callable[[Sequence[KernelSpec]], list[Result]]) -> list[Result]:
    return compile_all([dense.spec(choices(what, m, H200)[0].config, what) for what, m in CHOSEN])


def _label(i: int) -> str:
    what, m = CHOSEN[i]
    return f"{m}x{what.n}x{what.k}-{what.a_scale}-{what.b_scale}-{what.out_dtype}{'-bias' if what.bias else ''}"


@pytest.mark.parametrize("i", range(len(CHOSEN)), ids=_label)
def test_what_is_chosen_compiles_without_spills(
    results: list[Result], compiles_clean: Callable[[Result], None], i: int
) -> None:
    """A config that spills is not what the model or the measurement had in mind, and a warning to the user."""
    compiles_clean(results[i])


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("m", [1, 16, 64, 128, 1000])
def test_batches_have_legal_configs_that_take_longer_with_more(m: int) -> None:
    what = Variant(512, 128, "bf16", "bf16", "none", "none", "bf16", batched=True)
    times = []
    for batch in (2, 16, 128, 4096):
        found = choices(what, m, H200, batch=batch)
        assert all(what.fault(one.config) is None for one in found)
        assert not any(one.measured for one in found)
        times.append(found[0].seconds)
    assert times == sorted(times)
    assert times[-1] > 10 * times[0]


def test_tables_are_for_single_products() -> None:
    (n, k), m = (576, 7168), 1
    assert choices(variant(n, k), m, H200)[0].measured
    assert not choices(variant(n, k), m, H200, batch=2)[0].measured


def test_batches_alike_share_an_answer() -> None:
    """One that is another in each call must not cost the host milliseconds each time."""
    for batch in range(1, 5000):
        asked = choice._alike_batch(batch)
        assert batch <= asked <= batch * 17 / 16
    assert [choice._alike_batch(batch) for batch in (1, 2, 31, 33, 1000)] == [1, 2, 31, 34, 1024]
