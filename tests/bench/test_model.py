"""The cost model beside what was measured for shapes that no table has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from omnigemm.backends.cuda import choice
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.backends.cuda.sm90 import Config

ROOT = Path(__file__).parents[2]
SMALL, LARGE = Config(True, 1, 1, 8, 12, fetch=128), Config(False, 2, 1, 64, 7, split=2)


@pytest.fixture(scope="module")
def model(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("model")


@pytest.fixture(scope="module")
def kept(model: ModuleType) -> Any:
    return model.kept()


def test_what_is_kept_was_measured_with_legal_configs(kept: Any) -> None:
    shapes = [one for found in kept.values() for one in found]
    assert len({one[:4] for one in shapes}) == len(shapes) > 300
    for one in shapes:
        assert all(us > 0 for _, us in one.times)
        assert all(one.variant.fault(config) is None for config, _ in one.times)
        assert len({config for config, _ in one.times}) == len(one.times) > 3


def test_the_models_choice_is_near_the_best_of_shapes_that_it_was_not_set_on(model: ModuleType, kept: Any) -> None:
    """In the mean, and for most; docs/kernels/sm90_straight.md says for how many."""
    found = [model.off(one, model.modelled(KNOWN["h200"])) for one in kept[model.LATER]]
    assert math.exp(sum(map(math.log, found)) / len(found)) < 1.05
    assert sum(one <= model.BAR for one in found) >= 55
    # Who takes the narrowest tile is farther off, so this can fail.
    blind = [model.off(one, lambda config, variant, m: config.cols) for one in kept[model.LATER]]
    assert math.exp(sum(map(math.log, blind)) / len(blind)) > 1.1


def test_off_is_the_choices_time_in_parts_of_the_bests(model: ModuleType) -> None:
    shape = model.Measured("block", 128, 4096, 7168, ((SMALL, 30.0), (LARGE, 10.0)))
    assert model.off(shape, lambda config, variant, m: config.cols) == 3.0
    assert model.off(shape, lambda config, variant, m: -config.cols) == 1.0
    assert model.line("few", [1.0, 1.21]) == (
        f"{'few':28s} 1.100x the best in the mean, 1.21x at worst, 1 of 2 within 10%"
    )
    assert model.line("none", []).endswith(" none")


def test_the_tuners_times_are_read_without_early_weights_and_blas(model: ModuleType, tmp_path: Path) -> None:
    shape = {"m": 128, "n": 4096, "k": 7168, "scales": "16"}
    compact = {"swap": False, "math_groups": 2, "waves": 1, "cols": 64, "stages": 7, "split": 2}
    rows = [
        {**shape, "early": 0, "us": 9.0, "config": compact},
        {**shape, "early": 2, "us": 8.0, "config": compact},
        {**shape, "early": 0, "us": 7.0, "config": {"blas": True}},
    ]
    file = tmp_path / "times.json"
    file.write_text(json.dumps(rows))
    assert model.of_tuner(file) == [model.Measured("16", 128, 4096, 7168, ((LARGE, 9.0),))]
    result = CliRunner().invoke(model.app, ["judge", "--times", str(file)])
    assert result.exit_code == 0
    assert "1 of 1 within 10%" in result.output


def test_a_fit_only_gets_better_and_moves_what_is_free(model: ModuleType, kept: Any) -> None:
    climber = model.Fit(kept[model.SET][:12], KNOWN["h200"])
    try:
        assert climber.start["_ARRIVING"] == choice._ARRIVING
        first = climber.loss()
        losses = list(climber.steps(60, seed=1))
        assert losses == sorted(losses, reverse=True)
        assert climber.loss() == losses[-1] < first
        assert all(climber.now[name] == climber.start[name] for name in model.FIXED)
        assert climber.now["_ARRIVING"] == choice._ARRIVING
    finally:
        for name, value in climber.start.items():
            setattr(choice, name, value)
