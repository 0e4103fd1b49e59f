"""Tables of measured configs: the user's own before the shipped one, and what becomes of a bad one. Real processes."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigemm.backends.cuda import choice, dense, explain_on, measured, tune
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.jit import owned
from omnigemm.backends.cuda.measured import NotKept, Row
from omnigemm.backends.cuda.sm90 import Config
from omnigemm.core.problem import describe

H200 = KNOWN["h200"]
STRANGER = dataclasses.replace(H200, name="NVIDIA Unheard Of")
# Legal, and nothing that the model or the shipped table would take.
ODD = {"swap": True, "math_groups": 1, "waves": 1, "cols": 8, "stages": 5, "split": 3}
WIDE = {"swap": False, "math_groups": 2, "waves": 1, "cols": 128, "stages": 4}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def row(m: int = 1, n: int = 576, k: int = 7168, kind: str = "block", us: float = 9.5, **others: Any) -> Row:
    low, high = tune.span_of(m)
    made = {"n": n, "k": k, "scales": kind, "m_from": low, "m_to": high, "m": m, "us": us, "config": dict(ODD)}
    return made | others


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING, logger="omnigemm")
    measured.forget()
    return tmp_path / "cache" / "tables"


@pytest.fixture
def file(folder: Path) -> Path:
    """A table of one row."""
    return measured.add(H200.table, [row()])


def lead(m: int = 1, n: int = 576, k: int = 7168, gpu: Any = H200, constant: bool = False) -> choice.Choice:
    variant = dense.variant_of(tune.problem_of("block", m, n, k))
    return choice.choices(variant, m, gpu, constant)[0]


def test_without_a_table_of_ones_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert lead().measured
    assert not lead().here
    assert measured.table(STRANGER) == {}
    assert not folder.exists()
    assert caplog.text == ""


@pytest.mark.usefixtures("file")
def test_ones_own_rows_go_before_the_shipped_ones(caplog: pytest.LogCaptureFixture) -> None:
    for m, constant in ((1, False), (8, True)):  # a row that does not say so holds for both
        found = lead(m, constant=constant)
        assert (found.config, found.here, found.measured) == (Config(**ODD), True, True)
        assert found.seconds == pytest.approx(9.5e-6)
    assert lead(9).measured
    assert not lead(9).here
    assert not lead(1, k=7168 + 16).measured
    assert "9.5 us measured here" in str(explain_on(describe("fp8_gemm", m=1, n=576, k=7168), H200))
    assert "here" not in str(explain_on(describe("fp8_gemm", m=9, n=576, k=7168), H200))
    # Other scales have rows of their own.
    assert "here" not in str(explain_on(describe("fp8_gemm", m=1, n=576, k=7168, granularity="token"), H200))
    assert caplog.text == ""


def test_a_gpu_without_a_shipped_table() -> None:
    assert not lead(gpu=STRANGER).measured
    measured.add(STRANGER.table, [row()])
    assert lead(gpu=STRANGER).here
    assert not lead().here


@pytest.mark.parametrize(("m", "holds"), [(40, False), (41, True), (45, True), (48, True), (49, False)])
def test_from_33_to_128_rows_a_span_of_one_width_holds_as_a_whole(m: int, holds: bool) -> None:
    measured.add(H200.table, [row(m=45)])
    assert lead(m).here == holds


def test_from_33_to_128_rows_a_wide_span_holds_for_the_measured_rows_alone() -> None:
    measured.add(H200.table, [row(m=48, m_from=33, m_to=64)])
    assert [m for m in range(33, 65) if lead(m).here] == [48]


def test_a_config_that_another_result_cannot_have_is_left_to_the_model() -> None:
    wide = {"swap": False, "math_groups": 2, "waves": 1, "cols": 192, "stages": 4}
    measured.add(H200.table, [row(m=4096, config=wide)])
    assert lead(4096).here
    variant = dataclasses.replace(dense.variant_of(tune.problem_of("block", 1, 576, 7168)), b_scale="1x128")
    expected = variant.fault(Config(**wide)) is None
    assert choice.choices(variant, 4096, H200)[0].here == expected


# ------------------------------------------------------------------------------------------------ what is not used


def not_used(caplog: pytest.LogCaptureFixture, *told: str) -> None:
    """The shipped table is, and one warning says why the own one is not."""
    measured.forget()
    caplog.clear()
    for _ in range(3):
        found = lead()
        assert found.measured
        assert not found.here
    assert len(caplog.records) == 1
    for words in told:
        assert words in caplog.text


@pytest.mark.parametrize("which", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o770, 0o606])
def test_what_others_can_write(file: Path, which: str, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    place = {"file": file, "folder": file.parent}[which]
    place.chmod(mode)
    not_used(caplog, str(file), "can be written by others")
    before = file.read_bytes()
    with pytest.raises(NotKept, match="can be written by others"):
        measured.add(H200.table, [row(m=16)])
    assert file.read_bytes() == before


@as_root
@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_belongs_to_others(file: Path, which: str, caplog: pytest.LogCaptureFixture) -> None:
    os.chown({"file": file, "folder": file.parent}[which], 12345, -1)
    not_used(caplog, "belongs to user 12345")
    with pytest.raises(NotKept, match="belongs to user 12345"):
        measured.add(H200.table, [row(m=16)])


@pytest.mark.parametrize("which", ["file", "folder"])
def test_links_are_not_followed(file: Path, which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = {"file": file, "folder": file.parent}[which]
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    not_used(caplog, "is a symbolic link")
    with pytest.raises(NotKept, match="is a symbolic link"):
        measured.add(H200.table, [row(m=16)])


DAMAGE = {
    "empty": (b"", "is not JSON"),
    "half": (b'{"about": "x", "rows": [{"n": 576', "is not JSON"),
    "binary": (b"\xff\xfe\x00", "is not JSON"),
    "nested": (b"[" * 100_000, "is not JSON"),
    "list": (b"[]", "is not a JSON object"),
    "no rows": (b"{}", "has no list of rows"),
    "rows of another kind": (b'{"rows": 3}', "has no list of rows"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(file: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    content, told = DAMAGE[name]
    file.write_bytes(content)
    not_used(caplog, str(file), "damaged", told)
    measured.add(H200.table, [row(m=16)])
    assert "written anew" in caplog.text
    assert lead(16).here


def test_a_folder_in_the_place_of_the_file(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.unlink()
    file.mkdir()
    not_used(caplog, "is not a file")


def test_a_file_in_the_place_of_the_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("in the way")
    not_used(caplog, "cannot be read")
    with pytest.raises(NotKept):
        measured.check_folder()
    assert folder.read_text() == "in the way"


BAD = {
    "it is not an object": 3,
    "n is 0, expected": row() | {"n": 0},
    "k is True, expected": row() | {"k": True},
    "m_to is None, expected": {key: value for key, value in row().items() if key != "m_to"},
    "m is 9, expected one from m_from 1 to m_to 8": row() | {"m": 9},
    "scales is 'fp3', expected one of block": row() | {"scales": "fp3"},
    "scales is ['block']": row() | {"scales": ["block"]},
    "us is 0, expected": row() | {"us": 0},
    "us is nan": row() | {"us": float("nan")},
    "us is '3'": row() | {"us": "3"},
    "blas_us is inf": row() | {"blas_us": float("inf")},
    "early is -1, expected true, false or a number of stages up to 64": row() | {"early": -1},
    "early is 65, expected": row() | {"early": 65},
    "early is 2.0, expected": row() | {"early": 2.0},
    "constant_weights is 'yes'": row() | {"constant_weights": "yes"},
    "config is None": row() | {"config": None},
    "config has 'colour', expected names of swap": row() | {"config": {**ODD, "colour": 3}},
    "config has cols = '8', expected int": row() | {"config": {**ODD, "cols": "8"}},
    "config has swap = 1, expected bool": row() | {"config": {**ODD, "swap": 1}},
    "config has no waves": row() | {"config": {key: value for key, value in ODD.items() if key != "waves"}},
    "cols is 12, expected a multiple of 8": row() | {"config": {**ODD, "cols": 12}},
    "split is 0, expected at least 1": row() | {"config": {**ODD, "split": 0}},
    "band is 1000000000, expected at most 32": row() | {"config": {**ODD, "band": 10**9}},
    "out_buffers is 1000000000, expected at most 8": row() | {"config": {**ODD, "out_buffers": 10**9}},
    "out_parts is 1000000000, expected at most 32": row() | {"n": 577, "config": {**WIDE, "out_parts": 10**9}},
    "shared memory is": row() | {"config": {**ODD, "stages": 10**9}},
}


@pytest.mark.parametrize("told", BAD)
def test_bad_rows_are_told_and_the_others_used(file: Path, told: str, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(json.dumps({"rows": [BAD[told], row(m=16)]}))
    not_used(caplog, f"{file} has rows that are not used: row 1: {told}")
    assert lead(16).here
    measured.add(H200.table, [row(m=4096)])
    assert [one["m"] for one in json.loads(file.read_text())["rows"]] == [16, 4096]


def test_a_config_that_its_limits_stumble_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    assert measured.fault(row()) is None
    monkeypatch.setattr(Config, "fault", stumble)
    assert "cannot be judged: ZeroDivisionError" in str(measured.fault(row()))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = [one.name for one in dataclasses.fields(Config)]


@settings(deadline=None, max_examples=300)
@given(
    changed=st.dictionaries(st.sampled_from([*row(), "early", "blas_us", "constant_weights"]), ANYTHING, max_size=2),
    config=st.dictionaries(st.sampled_from(FIELDS), st.integers(-3, 300) | st.booleans(), max_size=4),
)
def test_whatever_a_row_holds_is_an_answer(changed: dict[str, Any], config: dict[str, Any]) -> None:
    """And what is called legal can be used."""
    one = row() | {"config": {**ODD, **config}} | changed
    if measured.fault(one) is None:
        assert measured.variant_of(one["scales"], one["n"], one["k"]).fault(Config(**one["config"])) is None
        assert one["us"] * 1e-6 > 0


def test_the_shipped_table_would_pass() -> None:
    rows = measured._shipped(H200.table)
    assert len(rows) > 100
    assert [measured.fault(one) for one in rows] == [None] * len(rows)


@pytest.mark.parametrize("kind", measured.KINDS)
def test_rows_are_checked_for_what_is_measured(kind: str) -> None:
    for n in (64, 100):
        variant = dense.variant_of(tune.problem_of(kind, 1, n, 640))
        assert measured.variant_of(kind, n, 640) == variant
        assert choice.kind_of(variant) == kind


# ------------------------------------------------------------------------------------------------ writing


def test_only_the_owner_can_read_or_write_it(file: Path) -> None:
    assert file == measured.root() / "nvidia-h200.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_rows_are_merged_by_weight_kind_and_span() -> None:
    old = [row(1, n=8), row(16, n=8), row(1, n=16), row(1, n=8, kind="int8")]
    new = [row(9, n=8, us=2.0), row(1, n=24)]  # 9 and 16 have one span
    assert measured.merged(old, new) == [row(1, n=8), row(9, n=8, us=2.0), row(1, n=16), row(1, n=24), old[3]]
    both = [row(constant_weights=False), row(constant_weights=True, us=3.0)]
    assert measured.merged([row(us=7.0), *both], both) == both


def test_a_new_row_takes_the_place_of_the_old(file: Path) -> None:
    assert lead().seconds == pytest.approx(9.5e-6)
    measured.add(H200.table, [row(m=5, us=3.25)])
    assert lead().seconds == pytest.approx(3.25e-6)  # seen at once in the process that wrote it
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_a_failed_write_leaves_the_old_table(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = file.read_bytes()
    for name in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(NotKept, match="No space left"):
                measured.add(H200.table, [row(m=16)])
    assert file.read_bytes() == before
    assert [one.name for one in file.parent.iterdir() if one.name.startswith(".tmp-")] == []


def test_a_read_only_cache_is_read_and_not_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o400)
    file.parent.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    measured.forget()
    assert lead().here
    with pytest.raises(NotKept, match="cannot be written"):
        measured.add(H200.table, [row(m=16)])
    with pytest.raises(NotKept, match="cannot be written"):
        measured.check_folder()


def test_without_locks_it_is_written_with_a_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    measured.add(H200.table, [row(m=16)])
    assert "without a lock" in caplog.text
    assert len(json.loads(file.read_text())["rows"]) == 2


def test_what_a_dead_process_left_is_removed(file: Path) -> None:
    old, new = file.parent / ".tmp-1-old", file.parent / ".tmp-2-new"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (time.time() - 4000,) * 2)
    measured.add(H200.table, [row(m=16)])
    assert not old.exists()
    assert new.exists()


WRITER = """
import sys, time, pathlib
from omnigemm.backends.cuda import measured
me, count, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
config = {"swap": True, "math_groups": 1, "waves": 1, "cols": 8, "stages": 5}
(folder / f"ready-{me}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
for i in range(count):
    row = {"n": 64 * (me + 1), "k": 128 * (i + 1), "scales": "block", "m_from": 1, "m_to": 8, "m": 1, "us": 1.5}
    measured.add("nvidia-h200", [row | {"config": config}])
"""


def test_processes_do_not_lose_each_others_rows(folder: Path, tmp_path: Path) -> None:
    """While somebody reads, who always finds a whole table."""
    count, writers = 40, 3
    arguments = [sys.executable, "-c", WRITER]
    running = [subprocess.Popen([*arguments, str(me), str(count), str(tmp_path)]) for me in range(writers)]
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            found = measured.read(folder, H200.table)
            assert found is None or not found.faults
            seen.append(0 if found is None else len(found.rows))

    watcher = threading.Thread(target=watch)
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < writers:
            assert time.monotonic() < end
            time.sleep(0.01)
        watcher.start()
        (tmp_path / "go").touch()
        assert [one.wait(timeout=60) for one in running] == [0] * writers
    finally:
        over.set()
        for one in running:
            one.kill()
    watcher.join()
    found = measured.read(folder, H200.table)
    assert found is not None
    assert len({(one["n"], one["k"]) for one in found.rows}) == len(found.rows) == count * writers
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


def test_a_table_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lead().here
    monkeypatch.setattr(owned, "open_folder", None)
    assert lead().here
