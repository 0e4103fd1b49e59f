"""Which config of a dense kernel is fastest on the GPU that is here: the model's best are compiled, checked and timed.

Only who calls this measures; a product never does. What is found goes to the user's own table (measured.py).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...bench import graph
from ...core.errors import DeviceError, OmniGemmError, ShapeError, UnsupportedError
from ...core.problem import Problem
from . import CudaBackend, choice, dense, gemm, gpu, jit, measured
from .measured import KINDS, Row
from .sm90 import FETCHES, Config, Variant

CANDIDATES = 32
WITHIN = 1.2  # of the best's time: who is further behind in the first round is not measured again
FEW = 128  # rows up to which it is worth to know which config is best when weights are stated to be constant
MANY = 512  # rows from which on the chip is at its power limit, so that short runs say little
BLAS = "blas"  # torch's own product, in the place of a config
_STAGED = 5  # candidates that are also tried with these parts of the stages that fit, and with another fetch
_STAGES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
_EARLY = (2, 4)  # stages of weights that are loaded early, besides all of them and none
_SIFT_SECONDS, _SIFT_REPLAYS = 0.006, 3
_SECONDS, _SECONDS_MANY, _REPLAYS = 0.006, 0.02, 6
METHOD = (
    f"{graph.METHOD}; but all candidates with {_SIFT_SECONDS * 1e3:.0f} ms and {_SIFT_REPLAYS} replays each, up to "
    f"{FEW} rows then the best {_STAGED} of them with fewer stages, of all of these the best {_STAGED} with the other "
    f"number of bytes that L2 takes from memory at a time, then those near the best in turns, forth and back, up to "
    f"{FEW} rows also with weights of {_EARLY[0]}, {_EARLY[1]} and all stages loaded early, with "
    f"{_SECONDS * 1e3:.0f} ms, from {MANY} rows on {_SECONDS_MANY * 1e3:.0f}, and {_REPLAYS} replays"
)
ABOUT = f"{measured.ABOUT} Method: {METHOD}."
_DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "bf16": torch.bfloat16}
_DEVICE = "cuda"
_TOLERANCE = 0.01  # of the norm: five times what rounding to bf16 makes

Contender = tuple[Config | str, int]  # a config or BLAS, and of how many stages weights are loaded early


class WrongResult(OmniGemmError):
    """A candidate does not compute the product."""


@dataclasses.dataclass(frozen=True)
class Times:
    """What configs for one problem took, in microseconds: the candidates, of which the first is the model's choice, and
    some of them with fewer stages or another fetch."""

    problem: Problem
    kind: str
    tried: tuple[Config, ...]
    took: dict[Contender, float]

    def best(self, constant_weights: bool = False) -> tuple[Config, int]:
        """The fastest config; only if weights are constant one that loads them early, which it then says."""
        ours = (
            (config, early)
            for config, early in self.took
            if isinstance(config, Config) and (constant_weights or not early)
        )
        return min(ours, key=lambda one: self.took[one])

    @property
    def us(self) -> float:
        return self.took[self.best()]

    @property
    def model_us(self) -> float:
        return self.took[self.tried[0], 0]

    @property
    def blas_us(self) -> float | None:
        return self.took.get((BLAS, 0))

    def rows(self, span: tuple[int, int] | None = None) -> Iterator[Row]:
        """Of a table: the fastest of all if weights are constant, and the fastest that does not load them early."""
        p = self.problem
        low, high = span or span_of(p.m)
        for constant in (False, True) if p.m <= FEW else (None,):
            best = self.best(bool(constant))
            row: Row = {"n": p.n, "k": p.k, "scales": self.kind, "m_from": low, "m_to": high, "m": p.m}
            if constant is not None:
                row["constant_weights"] = constant
            if best[1]:
                row["early"] = best[1]
            row["us"] = round(self.took[best], 2)
            if self.blas_us is not None:
                row["blas_us"] = round(self.blas_us, 2)
            yield row | {"config": compact(best[0])}


@dataclasses.dataclass(frozen=True)
class Result:
    """How one problem of `tune` went: times or an error."""

    problem: Problem
    times: Times | None
    error: str | None


# ------------------------------------------------------------------------------------------------ what is measured


def span_of(m: int) -> tuple[int, int]:
    """The numbers of rows that a config measured at M is used for: those that the model takes for the same. They have
    tiles of one width, and (nearly) as many."""
    last = choice.alike(m)
    return bisect.bisect_left(range(1, last + 1), last, key=choice.alike) + 1, last


def problem_of(kind: str, m: int, n: int, k: int) -> Problem:
    """The product that is measured for a kind of scales."""
    what = KINDS[kind]
    scales: dict[str, Any] = {"a_scale": what.a_scale, "b_scale": what.b_scale, "b_layout": what.b_layout}
    return Problem(what.op, m, n, k, what.dtype, what.dtype, "bf16", **scales)


def like(problem: Problem) -> Problem:
    """What is measured in the problem's place: tables do not tell biases, results' types and the like apart."""
    ops = tuple(dict.fromkeys(kind.op for kind in KINDS.values()))
    if problem.op not in ops:
        raise UnsupportedError(f"tune: op is {problem.op}, expected one that has tables: {', '.join(ops)}")
    for name in ("m", "n", "k"):
        if getattr(problem, name) < 1:
            raise ShapeError(f"tune: {name} of {problem} is {getattr(problem, name)}, expected at least 1")
    if problem.batch != 1:
        raise ShapeError(f"tune: batch of {problem} is {problem.batch}, expected 1")
    if problem.op == "gemm" and (problem.a_layout != "row" or problem.b_layout not in ("row", "col")):
        lie = f"a lies {problem.a_layout} and b {problem.b_layout}"
        raise UnsupportedError(f"tune: of {problem}, {lie}, expected row for a, and row or col for b")
    return problem_of(choice.kind_of(dense.variant_of(problem)), problem.m, problem.n, problem.k)


def check(problem: Problem, which: gpu.Gpu) -> Problem:
    """What is measured in the problem's place on such a GPU, or an error that says why it cannot be."""
    answer = CudaBackend().supports_on(problem, which)
    made = like(problem)
    if not answer:
        raise UnsupportedError(f"tune: {problem} has no kernel: {answer.reason}")
    return made


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Each once, and of those with one span, which would have the same row, that with most rows."""
    found: dict[tuple[Any, ...], Problem] = {}
    for one in problems:
        place = (dataclasses.replace(one, m=0), span_of(one.m))
        if place not in found or one.m > found[place].m:
            found[place] = one
    return list(found.values())


def candidates(problem: Problem, which: gpu.Gpu, count: int = CANDIDATES) -> tuple[Config, ...]:
    """The model's best, best first; and what is chosen now, so that a new row is never slower than the old one."""
    variant = dense.variant_of(problem)
    modelled = [one.config for one in choice.modelled(variant, choice.alike(problem.m), which)[:count]]
    return tuple(dict.fromkeys([*modelled, *_now(problem, which)]))


def _now(problem: Problem, which: gpu.Gpu) -> list[Config]:
    variant = dense.variant_of(problem)
    return [choice.choices(variant, problem.m, which, constant)[0].config for constant in (False, True)]


def with_fewer_stages(config: Config, variant: Variant) -> Iterator[Config]:
    """Than fit: for few rows, too many loads at a time can be slower, and the model does not know how many are."""
    most = choice.deepest(config, variant).stages
    for stages in sorted({round(most * part) for part in _STAGES}, reverse=True):
        fewer = dataclasses.replace(config, stages=stages)
        if stages > 2 and variant.fault(fewer) is None:
            yield fewer


def compact(config: Config | str) -> dict[str, Any]:
    """What differs from the defaults."""
    if isinstance(config, str):
        return {config: True}
    fields = dataclasses.fields(config)
    return {one.name: value for one in fields if (value := getattr(config, one.name)) != one.default}


# ------------------------------------------------------------------------------------------------ the measurement


class Bench:
    """Operands of one problem, on the current GPU, and what a config makes of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self._index = problem, torch.cuda.current_device()
        self._gpu = gpu.of(self._index)
        # Of its own, so that whoever tunes gets the same random numbers as without.
        self._random = torch.Generator(_DEVICE).manual_seed(0)
        m, n, k = problem.m, problem.n, problem.k
        self._a = self._filled(m, k)
        sides = (k, n) if self._is_gemm and problem.b_layout == "row" else (n, k)
        count = graph.copies_needed(n * k * self._a.element_size())
        self.weights = [self._filled(*sides) for _ in range(count)]
        blocks = -(-k // 128)
        sizes = ((m, blocks), (-(-n // 128), blocks)) if problem.a_scale == "1x128" else ((m,), (n,))
        scales = [torch.rand(size, dtype=torch.float32, device=_DEVICE, generator=self._random) + 0.5 for size in sizes]
        self._scales = [] if self._is_gemm else scales
        self._out = torch.empty(m, n, device=_DEVICE, dtype=torch.bfloat16)

    @property
    def _is_gemm(self) -> bool:
        return self.problem.op == "gemm"

    def _filled(self, rows: int, columns: int) -> Tensor:
        """At random, with rows that begin where the copy engine wants them."""
        dtype = _DTYPES[self.problem.a_dtype]
        if dtype == torch.int8:
            x = torch.randint(-128, 128, (rows, columns), dtype=dtype, device=_DEVICE, generator=self._random)
        else:
            x = torch.randn(rows, columns, dtype=torch.float32, device=_DEVICE, generator=self._random).to(dtype)
        return x if dense.pitch(x) is not None else dense.aligned_copy(x)

    def _right(self, weight: Tensor) -> Tensor:
        """B as gemm takes it, [K, N]."""
        return weight if self.problem.b_layout == "row" else weight.t()

    def _operands(self, weight: Tensor) -> tuple[Any, ...]:
        """With the result first."""
        if self._is_gemm:
            return self._out, self._a, self._right(weight), None, 1.0, 0.0
        return self._out, self._a, weight, *self._scales, None

    def expected(self) -> Tensor:
        """The product with the first weight, by torch in fp64, which no switch makes less exact."""
        if self._is_gemm:
            return self._a.double() @ self._right(self.weights[0]).double()
        wide = []
        for x, scale in zip((self._a, self.weights[0]), self._scales, strict=True):
            rows, columns = x.shape
            scale = scale.unsqueeze(1) if scale.dim() == 1 else scale.repeat_interleave(128, 1)[:, :columns]
            if scale.size(0) != rows:
                scale = scale.repeat_interleave(128, 0)[:rows]
            wide.append(x.double() * scale)
        return wide[0] @ wide[1].t()

    def call(self, config: Config | str, early: int = 0) -> Callable[[Tensor], object]:
        """The product with a weight, by that config or by BLAS."""
        if isinstance(config, str):
            return lambda weight: torch.mm(self._a, self._right(weight), out=self._out)
        made = gemm.Gemm if self._is_gemm else dense.Launch
        launch = made(self.problem, config, self._index, self._gpu.multiprocessors, early)
        run = launch.bind(*self._operands(self.weights[0]))
        return lambda weight: run(*self._operands(weight))

    def check(self, configs: Iterable[Config]) -> None:
        expected = self.expected()
        for config in configs:
            self._out.fill_(float("nan"))
            self.call(config)(self.weights[0])
            error = ((self._out.double() - expected).norm() / expected.norm()).item()
            if not error < _TOLERANCE:
                raise WrongResult(f"tune: {config} computes {self.problem} with an error of {error:.3g}; please report")

    def sifted(self, configs: Iterable[Config]) -> dict[Contender, float]:
        """Short times, of weights that are not loaded early."""
        return {
            (one, 0): graph.microseconds(self.call(one), self.weights, _SIFT_SECONDS, _SIFT_REPLAYS) for one in configs
        }

    def finals(
        self, sifted: dict[Contender, float], within: float, always: Iterable[Config] = ()
    ) -> dict[Contender, float]:
        """The same, and better ones of those near the best. In 16 bits, BLAS takes part as a contender."""
        limit, stay = within * min(sifted.values()), set(always)
        near = [one for (one, _), us in sifted.items() if isinstance(one, Config) and (us <= limit or one in stay)]
        final: list[Contender] = [(one, 0) for one in near]
        if self._is_gemm:
            final.append((BLAS, 0))
        if self.problem.m <= FEW:
            final += [(one, stages) for one in near for stages in _EARLY if stages < one.stages]
            final += [(one, one.stages) for one in near]
        seconds = _SECONDS_MANY if self.problem.m >= MANY else _SECONDS
        calls = {one: self.call(*one) for one in final}
        return sifted | graph.in_turns(calls, self.weights, seconds, _REPLAYS)


def measure(problem: Problem, count: int = CANDIDATES, within: float = WITHIN) -> Times:
    """Compile, check and time the candidates for a problem on the current GPU. Nothing is kept."""
    which = here()
    problem = check(problem, which)
    variant, tried = dense.variant_of(problem), candidates(problem, which, count)
    bench = Bench(problem)

    def sifted(configs: Sequence[Config]) -> dict[Contender, float]:
        for one in jit.warm([dense.spec(config, variant) for config in configs]):
            if one.error is not None:
                raise one.error
        bench.check(configs)
        return bench.sifted(configs)

    took = sifted(tried)
    if problem.m <= FEW:

        def best() -> list[Config]:
            return [one for one, _ in sorted(took, key=lambda one: took[one])[:_STAGED] if isinstance(one, Config)]

        more = dict.fromkeys(fewer for one in best() for fewer in with_fewer_stages(one, variant))
        took |= sifted([one for one in more if (one, 0) not in took])
        other = (dataclasses.replace(one, fetch=sum(FETCHES) - one.fetch) for one in best())
        took |= sifted([one for one in other if (one, 0) not in took])
    took = bench.finals(took, within, (tried[0], *_now(problem, which)))
    return Times(problem, choice.kind_of(variant), tried, took)


def here() -> gpu.Gpu:
    """The current GPU, if something can be measured on it now."""
    answer = CudaBackend().available()
    if not answer:
        raise DeviceError(f"tune: nothing can be measured here: {answer.reason}")
    if torch.cuda.is_current_stream_capturing():
        raise DeviceError("tune: a CUDA graph is being captured, expected to be called before the capture")
    return gpu.of(torch.cuda.current_device())


def tune(
    problems: Iterable[Problem],
    count: int = CANDIDATES,
    within: float = WITHIN,
    done: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Measure problems on the current GPU and put what was fastest into the user's table, each when it is done.

    Plans that are made from then on take it, also in this process. A problem that cannot be tuned, and a table that
    cannot be written, are errors before anything is measured; what fails later does not stop the others.
    """
    which = here()
    wanted = distinct(check(one, which) for one in problems)
    measured.check_folder()
    results = []
    for problem in wanted:
        result = _one(problem, count, within)
        if result.times is not None:
            try:
                measured.add(which.table, result.times.rows(), ABOUT)
            except measured.NotKept as error:
                result = Result(problem, None, str(error))
        results.append(result)
        if done is not None:
            done(result)
    return results


def _one(problem: Problem, count: int, within: float) -> Result:
    try:
        return Result(problem, measure(problem, count, within), None)
    except OmniGemmError as error:
        return Result(problem, None, str(error))
    except torch.OutOfMemoryError:
        return Result(problem, None, f"tune: {problem} and what it is measured with do not fit in the GPU's memory")
