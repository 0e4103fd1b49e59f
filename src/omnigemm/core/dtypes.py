"""Short names for element types, as users, problems and records spell them."""

from __future__ import annotations

import torch

from .errors import DTypeError

BY_NAME: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# Python-side spellings that people type out of habit.
_ALIASES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "fp8": "e4m3"}


def name_of(dtype: torch.dtype | str, what: str = "dtype") -> str:
    """The short name of a dtype; names pass through, habitual spellings are translated. A message says `what` it is."""
    if isinstance(dtype, torch.dtype):
        return NAME.get(dtype, str(dtype).removeprefix("torch."))
    if not isinstance(dtype, str):
        raise DTypeError(f"{what} is {dtype!r}, expected a torch dtype or one of {', '.join(BY_NAME)}, int4")
    name = dtype.removeprefix("torch.")
    name = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(name, _ALIASES.get(name, name))
    if name not in BY_NAME and name != "int4":
        raise DTypeError(f"{what} is {dtype!r}, expected one of {', '.join(BY_NAME)}, int4")
    return name


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """'fp16, bf16 or fp32', for messages."""
    words = [name_of(dtype) for dtype in dtypes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
