"""The products that commands are asked for: an operation with shapes and options, or a file of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import OmniGemmError, ShapeError
from ..core.problem import Problem, describe
from . import output

EXAMPLE = "fp8_gemm 16 4096 7168 granularity=128x128"
RANGE_LIMIT = 65536  # rows in one range: choosing takes milliseconds for each
GROUPS_LIMIT = 65536  # a list of products has a shape for each, and far more would not fit into memory
_NUMBER = r"([0-9]{1,18})"  # longer ones no tensor has
_SHAPE = re.compile(rf"{_NUMBER}(?:-{_NUMBER})?x{_NUMBER}x{_NUMBER}")
_COUNT = re.compile("-?[0-9]{1,18}")
_TEXTS = ("dtype", "weight_dtype", "out_dtype", "granularity", "a_layout", "b_layout")
_FLAGS = ("bias", "c", "asymmetric", "act_order")
_COUNTS = ("batch", "groups", "expected_m", "group_size")
_WORDS = (*_TEXTS, *_FLAGS, *_COUNTS)
_ADDING = ("gemm", "grouped_gemm", "grouped_gemm_k_contiguous")
_YES_NO = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Refused:
    """A problem that the command can do nothing for."""

    problem: str
    reason: str


def asked(
    command: str, op: str | None, shapes: Sequence[str], words: Mapping[str, Any], file: Path | None
) -> list[Problem]:
    """The problems, each once."""
    if file is not None:
        if op is not None or shapes or any(words.values()):
            raise output.CommandError(
                f"{command}: --file is given together with an operation or its options, expected one of the two; "
                f"lines of the file have their own, such as '{EXAMPLE}'"
            )
        found = read_problems(command, file)
    elif op is None:
        raise output.CommandError(f"{command}: no operation is given, expected one with --shape MxNxK, or --file FILE")
    elif not shapes:
        raise output.CommandError(f"{command}: {op} has no --shape, expected at least one such as --shape 16x4096x7168")
    else:
        given = words_of(op, words)
        found = [describe(op, m=m, n=n, k=k, **given) for text in shapes for m, n, k in parse_shape(text)]
    # What is expected of a masked group is no part of what is computed, but another kernel may do it.
    return list({(one, one.expected_m): one for one in found}.values())


def words_of(op: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `describe` from those of options and files; what is not given is left out."""
    given = {name: value for name, value in words.items() if value is not None and value is not False}
    if given.pop("asymmetric", False):
        given |= {"a_zero": True} if op == "int8_gemm" else {"symmetric": False}
    if given.pop("c", False):
        if op not in _ADDING:
            raise ShapeError(f"{op}: c is given, but only {', '.join(_ADDING)} add a C")
        given["beta"] = 1.0
    check_groups(op, given.get("groups"))
    return given


def check_groups(op: str, groups: int | None) -> None:
    if groups is not None and groups > GROUPS_LIMIT:
        raise ShapeError(f"{op}: groups is {groups}, expected at most {GROUPS_LIMIT}")


def parse_shape(text: str) -> list[tuple[int, int, int]]:
    """From '16x4096x7168', or from '1-64x4096x7168' one for each number of rows."""
    found = _sizes(text)
    if found is None:
        raise ShapeError(
            f"shape is {text!r}, expected MxNxK with whole numbers above 0; M may be a range of at most "
            f"{RANGE_LIMIT}, such as 1-64"
        )
    return found


def _sizes(text: str) -> list[tuple[int, int, int]] | None:
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        return None
    first, n, k = int(match[1]), int(match[3]), int(match[4])
    last = first if match[2] is None else int(match[2])
    if min(first, n, k) < 1 or not first <= last < first + RANGE_LIMIT:
        return None
    return [(m, n, k) for m in range(first, last + 1)]


def read_problems(command: str, file: Path) -> list[Problem]:
    """One problem, or a range of rows, in each line; '#' starts a comment."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise output.CommandError(f"{command}: file {file} cannot be read: {reason}") from error
    found = []
    for number, line in enumerate(lines, 1):
        parts = line.split("#", 1)[0].split()
        if not parts:
            continue
        try:
            found += _parse_line(parts)
        except OmniGemmError as error:
            raise output.CommandError(f"{file}, line {number}: {error}") from error
    if not found:
        raise output.CommandError(f"{command}: file {file} has no problems, expected lines such as '{EXAMPLE}'")
    return found


def _parse_line(parts: Sequence[str]) -> list[Problem]:
    if len(parts) < 4:
        raise output.CommandError(f"{' '.join(parts)!r} is too short, expected OP M N K, such as '{EXAMPLE}'")
    op, *sizes = parts[:4]
    found = _sizes("x".join(sizes))
    if found is None:
        raise output.CommandError(
            f"M N K is {' '.join(sizes)!r}, expected three whole numbers above 0; M may be a range of at most "
            f"{RANGE_LIMIT}, such as 1-64"
        )
    words = words_of(op, _parse_words(parts[4:]))
    return [describe(op, m=m, n=n, k=k, **words) for m, n, k in found]


def _parse_words(parts: Sequence[str]) -> dict[str, Any]:
    words: dict[str, str] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in _WORDS or not value:
            raise output.CommandError(f"{part!r} is unknown, expected NAME=VALUE with a name of {', '.join(_WORDS)}")
        if name in words:
            raise output.CommandError(f"{part!r} comes after {name}={words[name]}, expected {name} once")
        words[name] = value
    return {name: _value(name, value) for name, value in words.items()}


def _value(name: str, text: str) -> Any:
    if name in _FLAGS:
        if text not in _YES_NO:
            raise output.CommandError(f"{name} is {text!r}, expected yes or no")
        return _YES_NO[text]
    if name in _COUNTS:
        if not _COUNT.fullmatch(text):
            raise output.CommandError(f"{name} is {text!r}, expected a whole number")
        return int(text)
    return text


def summary(refused: Sequence[Refused]) -> list[str]:
    """A line for each reason: a range of rows has many problems and one reason."""
    by_reason: dict[str, list[str]] = {}
    for one in refused:
        by_reason.setdefault(one.reason, []).append(one.problem)
    return [
        f"{problems[0]}{f' and {len(problems) - 1} more' if len(problems) > 1 else ''}: {reason}"
        for reason, problems in by_reason.items()
    ]
