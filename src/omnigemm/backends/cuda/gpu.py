"""What choosing a kernel needs to know of a GPU, so that it can be done for one that is not there."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import torch


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates are what kernels reach, not what datasheets say; where nobody measured them, those of an H200 stand in."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock: float = 1.9e9  # cycles a second when the memory is the limit
    dense_clock: float = 1.65e9  # under full load of the tensor cores, where power is
    memory: float = 4.5e12  # bytes a second, read
    l2: float = 1.6e13  # bytes a second, from L2 to the multiprocessors
    # Of 1 to 8 blocks, with a multiprocessor for each block: as many as the driver of an H200 says. A cluster lies in
    # one of the chip's parts, and these are cut unevenly.
    clusters: tuple[int, ...] = (132, 66, 39, 30, 22, 17, 15, 15)

    @property
    def table(self) -> str:
        """The name of its measured table."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def has_room(self, cluster: int) -> bool:
        """Whether so many blocks can run at a time, as those of a cluster must."""
        return cluster <= self.multiprocessors

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]}, {self.multiprocessors} multiprocessors)"


# For compiling without a GPU.
KNOWN = {
    "h200": Gpu("NVIDIA H200", (9, 0), 132),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, memory=3.1e12),
}


@cache
def of(index: int) -> Gpu:
    """The GPU that torch calls cuda:index."""
    about = torch.cuda.get_device_properties(index)
    like = next((one for one in KNOWN.values() if one.name == about.name), KNOWN["h200"])
    return dataclasses.replace(
        like,
        name=about.name,
        capability=(about.major, about.minor),
        multiprocessors=about.multi_processor_count,
    )
