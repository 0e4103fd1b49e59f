"""One file per checkpoint format: a pure function from the file's tensors to the parts of an Int4Weight."""

from __future__ import annotations

from .awq import from_awq
from .compressed_tensors import from_compressed_tensors
from .gptq import from_gptq
from .marlin import from_marlin
from .parts import GROUP_SIZES, Parts

__all__ = ["GROUP_SIZES", "Parts", "from_awq", "from_compressed_tensors", "from_gptq", "from_marlin"]
