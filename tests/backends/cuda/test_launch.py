"""Launches without a GPU: what the driver would see at the moment of each one."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from cuda.bindings import driver as driver_module

from omnigemm.backends.cuda import launch
from omnigemm.backends.cuda.launch import Launcher, Matrix
from omnigemm.backends.cuda.sm90 import FETCHES
from omnigemm.core.errors import DeviceError


class Answer(int):
    name = "CUDA_ERROR_FOR_THE_TEST"


class Map:
    """A tensor map: here, just the address in memory of its own."""

    def __init__(self, address: int) -> None:
        self.memory = ctypes.c_uint64(address)

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


class Driver(SimpleNamespace):
    """Takes down (stream, addresses in the maps, values) of each launch, which it reads as late as it may."""

    values = struct.Struct("qi")

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.encoded = self.moved = self.configs = 0
        self.answer, self.delay = Answer(0), 0.0
        self.CUfunction = int
        self.CUlaunchAttributeID = SimpleNamespace(
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=1, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=2
        )

    def cuCtxGetCurrent(self) -> tuple[Answer, int]:
        return Answer(0), 142

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def CUlaunchConfig(self) -> Any:
        self.configs += 1
        return SimpleNamespace()

    def encode(self, matrix: Matrix, address: int) -> tuple[Answer, Map]:
        self.encoded += 1
        return Answer(0), Map(address)

    def cuTensorMapReplaceAddress(self, one: Map, address: int) -> tuple[Answer]:
        self.moved += 1
        one.memory.value = address
        return (Answer(0),)

    def cuLaunchKernelEx(self, config: Any, function: int, parameters: int, extra: int) -> tuple[Answer]:
        if self.delay:
            time.sleep(self.delay)
        *maps, values = (ctypes.c_void_p * 4).from_address(parameters)
        found = tuple(ctypes.c_uint64.from_address(one or 0).value for one in maps[:2])
        self.launches.append((config.hStream, found, self.values.unpack(ctypes.string_at(values or 0, 12))))
        return (self.answer,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(launch, "bindings", lambda: made)
    monkeypatch.setattr(Matrix, "encode", lambda matrix, address: made.encode(matrix, address))
    return made


def launcher() -> Launcher:
    """Two matrices and a parameter that the kernel does not read."""
    matrix = Matrix(64, 64, 2, 128, (64, 64))
    kernel = SimpleNamespace(handle=1)
    return Launcher(
        kernel, grid=1, threads=128, shared_bytes=0, cluster=2, matrices=(matrix, matrix, None), values="qi"
    )


def test_each_launch_has_its_own_addresses_stream_and_values(driver: Driver) -> None:
    one, wanted = launcher(), []
    for turn in range(40):
        addresses = 16 * (turn % 5 + 1), 160 * (turn % 3 + 1)
        one(turn % 2, (*addresses, turn), turn, -turn)
        wanted.append((turn % 2, addresses, (turn, -turn)))
    assert driver.launches == wanted
    assert driver.configs == 2  # one for each stream


def test_addresses_that_come_again_cost_nothing(driver: Driver) -> None:
    one = launcher()
    for turn in range(40):
        one(0, (16 * (turn % 5 + 1), 160, 320), turn, 0)
    assert (driver.encoded, driver.moved) == (10, 0)


def test_maps_are_moved_where_there_are_many(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded, and addresses that came before are still right, or made right."""
    monkeypatch.setattr(Launcher, "SLOTS", 4)
    one, wanted = launcher(), []
    for turn in range(40):
        addresses = 16 * (turn % 10 + 1), 160
        one(0, (*addresses, 0), turn, 0)
        wanted.append((0, addresses, (turn, 0)))
    assert driver.launches == wanted
    assert driver.encoded == 8
    assert 0 < driver.moved <= 36
    assert len(one._free) == 4


def test_threads_never_share_a_slot(driver: Driver) -> None:
    """The driver reads while other threads launch: none of them may write what it reads."""
    one, driver.delay = launcher(), 1e-4

    def work(number: int) -> None:
        for turn in range(50):
            one(number, (16 * (turn % 3), 160, 0), number, turn)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [(number, (16 * (turn % 3), 160), (number, turn)) for number in range(8) for turn in range(50)]
    assert sorted(driver.launches) == sorted(wanted)


def test_a_refused_launch_is_an_error_and_the_next_one_goes_on(driver: Driver) -> None:
    one = launcher()
    driver.answer = Answer(700)
    with pytest.raises(DeviceError, match=r"launching a kernel: CUDA_ERROR_FOR_THE_TEST \(700\)"):
        one(0, (16, 32, 0), 1, 2)
    driver.answer = Answer(0)
    one(0, (16, 32, 0), 3, 4)
    assert driver.launches[-1] == (0, (16, 32), (3, 4))
    assert driver.encoded == 2


class Cold(Driver):
    """With a context for each thread, which is 0 at first: maps and launches need one."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.context, self.held, self.taken, self.broken = threading.local(), 0, 0, broken

    def cuCtxGetCurrent(self) -> tuple[Answer, int]:
        return Answer(0), getattr(self.context, "value", 0)

    def cuDeviceGet(self, index: int) -> tuple[Answer, int]:
        return Answer(0), 40 + index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Answer, int]:
        self.held += 1
        return Answer(0), 100 + device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Answer]:
        self.held -= 1
        return (Answer(0),)

    def cuCtxSetCurrent(self, context: int) -> tuple[Answer]:
        self.context.value, self.taken = context, self.taken + 1
        return (Answer(0),)

    def _cold(self) -> bool:
        return getattr(self.context, "value", 0) != 142

    def encode(self, matrix: Matrix, address: int) -> tuple[Answer, Map]:
        if self._cold():
            return Answer(201), Map(0)
        return super().encode(matrix, address)

    def cuTensorMapReplaceAddress(self, one: Map, address: int) -> tuple[Answer]:
        return (Answer(201),) if self._cold() else super().cuTensorMapReplaceAddress(one, address)

    def cuLaunchKernelEx(self, *arguments: Any) -> tuple[Answer]:
        return (Answer(201),) if self.broken or self._cold() else super().cuLaunchKernelEx(*arguments)


@pytest.mark.parametrize("first", ["map", "replace", "launch"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_thread_that_did_nothing_with_cuda_before(monkeypatch: pytest.MonkeyPatch, first: str, broken: bool) -> None:
    """It takes the context of the device, once, whatever it asks for first; what is refused for another reason still
    is."""
    driver = Cold()
    monkeypatch.setattr(launch, "bindings", lambda: driver)
    monkeypatch.setattr(Matrix, "encode", lambda matrix, address: driver.encode(matrix, address))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 2, raising=False)
    one, wrong = launcher(), []
    if first != "map":  # made by a thread that is warm
        driver.context.value = 142
        one(0, (16 if first == "launch" else 64, 32, 0), -1, -1)
        driver.launches.clear()
    if first == "replace":
        monkeypatch.setattr(Launcher, "SLOTS", 1)
    driver.broken = broken

    def work() -> None:
        for turn in range(3):
            try:
                one(0, (16, 32, 0), turn, 0)
            except DeviceError as error:
                wrong.append(str(error))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert wrong == ["launching a kernel: CUDA_ERROR_FOR_THE_TEST (201)"] * (6 * broken)
    launched = [] if broken else [(0, (16, 32), (turn, 0)) for turn in range(3)] * 2
    assert driver.launches == launched
    assert driver.held == 0
    assert driver.taken == 2
    assert (driver.encoded, driver.moved) == (2, first == "replace")


@pytest.mark.parametrize(("size", "kind"), [(1, "UINT8"), (2, "UINT16"), (4, "FLOAT32")])
def test_results_of_4_bytes_are_floats_to_the_copy_engine(
    monkeypatch: pytest.MonkeyPatch, size: int, kind: str
) -> None:
    """It adds to them, and of integers it would add the bits."""
    driver = MagicMock()
    monkeypatch.setattr(launch, "bindings", lambda: driver)
    monkeypatch.setattr(launch, "checked", lambda answer, what: answer)
    Matrix(64, 64, size, 256, (128 // size, 64)).encode(4096)
    given = driver.cuTensorMapEncodeTiled.call_args.args
    assert given[0] is getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")
    assert given[8] is driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B


@pytest.mark.parametrize("fetch", FETCHES)
def test_what_l2_takes_from_memory_at_a_time(monkeypatch: pytest.MonkeyPatch, fetch: int) -> None:
    driver = MagicMock()
    monkeypatch.setattr(launch, "bindings", lambda: driver)
    monkeypatch.setattr(launch, "checked", lambda answer, what: answer)
    Matrix(256, 64, 1, 256, (128, 64), fetch=fetch).encode(4096)
    name = f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetch}B"
    assert driver.cuTensorMapEncodeTiled.call_args.args[9] is getattr(driver.CUtensorMapL2promotion, name)
    assert hasattr(driver_module.CUtensorMapL2promotion, name)
