"""How near the cost model's choice comes to the fastest config that was measured, for shapes that no table has.

    python benchmarks/model.py judge                  # on what is kept in benchmarks/times/nvidia-h200.json
    python benchmarks/model.py judge --times /tmp/tables/nvidia-h200-times.json     # on what tune.py --random measured
    python benchmarks/model.py fit                    # constants for choice.py from the same, in some minutes; no GPU

The kept file has two sets. On `set` the constants of `backends/cuda/choice.py` were set; `drawn later` was measured
when they were fixed, and is what the model is judged by.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from omnigemm.backends.cuda.gpu import Gpu
    from omnigemm.backends.cuda.sm90 import Config, Variant

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "times" / "nvidia-h200.json"
SET, LATER = "set", "drawn later"
BAR = 1.10  # the goal: the choice takes at most so much of the best's time
FEW = 256  # rows up to which the model has other terms than above
# Of the fit: how sharply the best is told from the rest, what absolute times count for, and what a change costs.
SHARPNESS, NEAR, ABSOLUTE, STAY = 0.035, 1.15, 1.0, 0.001
# These belong to batches, results that tiles cut, and memory and clocks as they were measured by themselves.
FIXED = ("_BLOCK_START", "_TORN", "_CROWD", "_CROWDED", "_START_LATE", "_NEXT_BLOCK", "_OF_MEMORY")

Score = Callable[["Config", "Variant", int], float]
app = typer.Typer(add_completion=False, help=__doc__)


class Measured(NamedTuple):
    """One product, and what configs for it took."""

    kind: str
    m: int
    n: int
    k: int
    times: tuple[tuple[Config, float], ...]

    @property
    def best(self) -> float:
        return min(us for _, us in self.times)

    @property
    def whole_lines(self) -> bool:
        return self.variant.whole_lines

    @property
    def variant(self) -> Variant:
        from omnigemm.backends.cuda import dense, tune

        return dense.variant_of(tune.problem_of(self.kind, self.m, self.n, self.k))


def kept(path: Path = KEPT) -> dict[str, list[Measured]]:
    """The sets of shapes in a file."""
    from omnigemm.backends.cuda.sm90 import Config

    found = json.loads(path.read_text(encoding="utf-8"))
    fields: list[str] = found["fields"]

    def one(row: Mapping[str, Any]) -> Measured:
        times = tuple((Config(**dict(zip(fields, values, strict=True))), us) for us, *values in row["times"])
        return Measured(row["kind"], row["m"], row["n"], row["k"], times)

    return {name: [one(row) for row in rows] for name, rows in found["shapes"].items()}


def of_tuner(path: Path) -> list[Measured]:
    """The same from the times that tune.py writes; of weights that are not loaded early."""
    from omnigemm.backends.cuda.sm90 import Config

    times: dict[tuple[Any, ...], list[tuple[Config, float]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        if not row["early"] and "blas" not in row["config"]:
            shape = row["scales"], row["m"], row["n"], row["k"]
            times.setdefault(shape, []).append((Config(**row["config"]), row["us"]))
    return [Measured(*shape, tuple(found)) for shape, found in times.items()]


def modelled(gpu: Gpu) -> Score:
    from omnigemm.backends.cuda import choice

    return lambda config, variant, m: choice.seconds(config, variant, choice.alike(m), gpu)


def off(shape: Measured, score: Score) -> float:
    """The time of the config that the score takes, in parts of the best's."""
    variant = shape.variant
    chosen = min(shape.times, key=lambda one: score(one[0], variant, shape.m))
    return chosen[1] / shape.best


def line(what: str, found: Sequence[float]) -> str:
    if not found:
        return f"{what:28s} none"
    mean = math.exp(sum(map(math.log, found)) / len(found))
    near = f"{sum(one <= BAR for one in found)} of {len(found)} within {BAR - 1:.0%}"
    return f"{what:28s} {mean:.3f}x the best in the mean, {max(found):.2f}x at worst, {near}"


def lines(shapes: Iterable[Measured], score: Score) -> Iterable[str]:
    found = [(shape, off(shape, score)) for shape in shapes]
    parts: dict[str, Callable[[Measured], bool]] = {
        "all": lambda _: True,
        f"up to {FEW} rows": lambda one: one.m <= FEW,
        "more": lambda one: one.m > FEW,
        "rows of K are whole lines": lambda one: one.whole_lines,
        "rows of K begin anywhere": lambda one: not one.whole_lines,
    }
    for what, belongs in parts.items():
        yield line(what, [value for shape, value in found if belongs(shape)])


# ------------------------------------------------------------------------------------------------ the fit


class Fit:
    """Hill-climbing on the constants: what the choice is expected to lose, if the nearly best may be taken as well, and
    how far the times of the best ones are off."""

    def __init__(self, shapes: Sequence[Measured], gpu: Gpu) -> None:
        from omnigemm.backends.cuda import choice

        self._choice, self._gpu = choice, gpu
        self._shapes = [(one, one.variant, choice.alike(one.m)) for one in shapes]
        values = vars(choice).items()
        self.start = {name: value for name, value in values if type(value) is float and name[0] == "_"}
        self.free = [name for name in self.start if name not in FIXED]
        self.now = dict(self.start)

    def loss(self) -> float:
        lost, wrong, count = 0.0, 0.0, 0
        for shape, variant, m in self._shapes:
            logs = [math.log(self._choice.seconds(one, variant, m, self._gpu) * 1e6) for one, _ in shape.times]
            weights = [math.exp((min(logs) - one) / SHARPNESS) for one in logs]
            pairs = list(zip(logs, weights, (math.log(us) for _, us in shape.times), strict=True))
            best = math.log(shape.best)
            lost += sum(weight * (us - best) for _, weight, us in pairs) / sum(weights)
            near = [us - log for log, _, us in pairs if us - best < math.log(NEAR)]
            wrong, count = wrong + sum(one * one for one in near), count + len(near)
        moved = sum(math.log(self.now[name] / self.start[name]) ** 2 for name in self.free)
        return lost / len(self._shapes) + ABSOLUTE * wrong / count + STAY * moved

    def steps(self, count: int, seed: int) -> Iterable[float]:
        """The loss after each of so many attempts to change one constant. The module keeps the last ones."""
        dice, size, least = random.Random(seed), dict.fromkeys(self.free, 0.25), self.loss()
        for _ in range(count):
            name = dice.choice(self.free)
            before = self.now[name]
            self._put(name, before * math.exp(dice.gauss(0, size[name])))
            loss = self.loss()
            if loss < least:
                least, size[name] = loss, min(0.5, 1.3 * size[name])
            else:
                self._put(name, before)
                size[name] = max(0.02, 0.95 * size[name])
            yield least

    def _put(self, name: str, value: float) -> None:
        self.now[name] = value
        setattr(self._choice, name, value)


@app.command()
def judge(
    times: Annotated[Path | None, typer.Option(help="What tune.py measured, instead of what is kept.")] = None,
) -> None:
    """How near the model's choice comes to the best."""
    from omnigemm.backends.cuda.gpu import KNOWN

    sets = kept() if times is None else {str(times): of_tuner(times)}
    for name, shapes in sets.items():
        print(f"{name}: {len(shapes)} shapes")
        for one in lines(shapes, modelled(KNOWN["h200"])):
            print(f"  {one}")


@app.command()
def fit(
    steps: Annotated[int, typer.Option(help="Attempts to change one constant.")] = 5000,
    seed: Annotated[int, typer.Option(help="Which attempts.")] = 0,
) -> None:
    """Set the model's constants on the first of the kept sets, and judge them by the second."""
    from rich.progress import track

    from omnigemm.backends.cuda.gpu import KNOWN

    sets, gpu = kept(), KNOWN["h200"]
    climber = Fit(sets[SET], gpu)
    for _ in track(climber.steps(steps, seed), "fitting", total=steps):
        pass
    for name, value in climber.now.items():
        print(f"{name} = {value:.3g}" + ("" if value == climber.start[name] else f"  # was {climber.start[name]:.3g}"))
    for name, shapes in sets.items():
        print(line(name, [off(shape, modelled(gpu)) for shape in shapes]))


if __name__ == "__main__":
    app()
