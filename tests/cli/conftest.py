"""The command line as its user meets it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import omnigemm
from omnigemm.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", str(tmp_path / "cache"))

    def call(*args: str) -> Result:
        with pytest.raises(SystemExit) as stop:
            main(args)
        captured = capsys.readouterr()
        return Result(int(stop.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def break_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong element in what int8_gemm returns."""
    right = omnigemm.int8_gemm

    def wrong(*args: Any, **named: Any) -> torch.Tensor:
        out = right(*args, **named)
        out[-1, -1] += 1.0
        return out

    monkeypatch.setattr(omnigemm, "int8_gemm", wrong)
