"""From a call to a kernel: check once per signature, plan once, then look up and launch.

An operation is described by what it checks and by the problem that its operands are. It is registered with
torch.library twice, as a function and as one that writes `out`, so that torch.compile sees one node without breaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.dispatch import PlanCache, choose
from ..core.dtypes import BY_NAME, name_of
from ..core.errors import DTypeError, ShapeError
from ..core.plan import AddressLaunch, Launch, Plan
from ..core.problem import Problem
from ..core.settings import Settings, current
from ..core.watched import dispatch_modes, function_modes, watched
from .checks import OutSpec, reach

NAMESPACE = "omnigemm"
library = torch.library.Library(NAMESPACE, "DEF")

Operands = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """`check(operands, out, out_dtype)` validates metadata; `describe(operands, result)` names the problem.

    `collect` turns the public arguments (without out, out_dtype and backend) into operands; `distinct` refuses an
    `out` that shares memory with an input. The operand at `may_be_out` may be `out` itself.
    """

    name: str
    check: Callable[[Operands, Any, torch.dtype | None], Any]
    describe: Callable[[Operands, Any], Problem]
    collect: Callable[..., Operands]
    distinct: Callable[[Operands, Any], None]
    may_be_out: int | None = None


class Ops(NamedTuple):
    """An operation's two forms in torch.library, and what is behind them."""

    name: str
    operation: Operation
    gather: Callable[..., Operands]
    outs: str
    function: Any
    writer: Any


class Reach(NamedTuple):
    """Bytes from the first to the last element. For tensors that lie like these, overlaps show in addresses alone."""

    out: Any  # of `out`, or a list with those of each result
    operands: tuple[tuple[int, Any], ...]  # the same of operands that are tensors, or lists of them, by their positions


class Call(NamedTuple):
    """All that a warm call needs, worked out once for its signature."""

    plan: Plan
    launch: Launch
    fresh: Callable[[], Any]  # a new result
    reach: Reach | None = None
    at: AddressLaunch | None = None  # the launch for those who know the addresses already


class Recent(NamedTuple):
    """The last call with a weight and so many rows. Of (out, out_dtype, backend, *arguments), all must be as then."""

    call: Call
    tensors: Callable[[Operands], Operands]
    same: Callable[..., bool]  # their types, shapes, strides, dtypes, devices and gradients
    others: Callable[[Operands], Operands]
    values: Operands  # of the others
    numbers: tuple[float, ...]  # those of them that are operands
    room: int  # bytes from the first element of `out` to its last
    apart: tuple[tuple[int, int], ...]  # the same of all that must not overlap it, by their places among the tensors
    settings: Settings
    gradients: bool  # of some tensor: not for us while gradients are recorded


class Calls(PlanCache[Call]):
    """By signature; and the last one with each weight and number of rows, which is found in less time."""

    RECENT_LIMIT = 16384

    def __init__(self) -> None:
        super().__init__()
        self.recent: dict[tuple[str, int, int], Recent] = {}

    def remember(self, place: tuple[str, int, int], recent: Recent) -> None:
        if len(self.recent) >= self.RECENT_LIMIT:
            self.recent.clear()
        self.recent[place] = recent

    def clear(self) -> None:
        super().clear()
        self.recent.clear()


calls = Calls()


def _signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Everything about operands that validation and choice depend on, except their data."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found += (value.shape, value.stride(), value.dtype, value.device)
        elif isinstance(value, (list, tuple)):
            found.append(_signature(value))
        elif isinstance(value, float) and value not in (0.0, 1.0):
            found.append("number")  # only "no C" and "no scaling" choose; other alphas and betas share a plan
        else:
            found.append(value)
    return tuple(found)


def call_for(
    operation: Operation, operands: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None
) -> Call:
    """What runs such operands: looked up by their signature, or checked and planned."""
    key = (operation.name, backend, current(), out_dtype, *_signature((out, *operands)))
    found = calls.get(key)
    if found is not None:
        return found
    spec = operation.check(operands, out, out_dtype)
    device = spec.device if isinstance(spec, OutSpec) else spec[0].device
    plan = choose(operation.describe(operands, spec), device, backend)
    example = allocate(spec) if out is None else out
    launch = plan.launch if plan.bind is None else plan.bind(example, *operands)
    at = None if plan.bind_addresses is None else plan.bind_addresses(example, *operands)
    return calls.put(key, Call(plan, launch, _allocator(spec), _reach(example, operands), at))


def execute(
    operation: Operation, operands: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """Run, and return what was written."""
    return _launch(operation, call_for(operation, operands, out, out_dtype, backend), operands, out)


def _reach(out: Any, operands: Operands) -> Reach | None:
    if not isinstance(out, Tensor):
        lists = [(i, one) for i, one in enumerate(operands) if _tensors(one)]
        return Reach([reach(one) for one in out], tuple((i, [reach(each) for each in one]) for i, one in lists))
    if any(isinstance(one, (list, tuple)) for one in operands):
        return None  # tensors inside of other things: always a closer look
    found = ((i, reach(one)) for i, one in enumerate(operands) if isinstance(one, Tensor))
    return Reach(reach(out), tuple((i, size) for i, size in found if size))


def _tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Tensor)


def _far_apart(sizes: Reach, out: Any, operands: Operands, may_be_out: int | None) -> bool:
    """Whether `out` begins after or ends before each operand: then it needs no closer look."""
    if isinstance(sizes.out, list):
        return _all_far_apart(sizes, out, operands)
    start = out.data_ptr()
    end = start + sizes.out
    for i, size in sizes.operands:
        other = operands[i].data_ptr()
        if other < end and start < other + size and not (i == may_be_out and operands[i] is out):
            return False
    return True


def _all_far_apart(sizes: Reach, outs: Sequence[Tensor], operands: Operands) -> bool:
    """The same for lists: each of `outs`, also from the others of them. One sweep over addresses."""
    spans = [(one.data_ptr(), size, True) for one, size in zip(outs, sizes.out, strict=True) if size]
    for i, each in sizes.operands:
        spans += [(one.data_ptr(), size, False) for one, size in zip(operands[i], each, strict=True) if size]
    spans.sort()
    written = anything = 0  # how far what came before reaches
    for start, size, is_out in spans:
        if start < (anything if is_out else written):
            return False
        anything = max(anything, start + size)
        if is_out:
            written = max(written, start + size)
    return True


def _launch(operation: Operation, call: Call, operands: Operands, out: Any) -> Any:
    if out is None:
        out = call.fresh()
    elif call.reach is None or not _far_apart(call.reach, out, operands, operation.may_be_out):
        operation.distinct(operands, out)
    return _write(call, operands, out)


def _write(call: Call, operands: Operands, out: Any) -> Any:
    if call.plan.uses_torch:
        # Parameters that require gradients are fine operands; torch's kernels with out= would refuse them otherwise.
        with torch._C._AutoDispatchBelowAutograd():
            call.launch(out, *operands)
    else:
        call.launch(out, *operands)
    return out


def allocate(spec: OutSpec | Sequence[OutSpec]) -> Any:
    if isinstance(spec, OutSpec):
        return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in spec]


# What torch.compile's own code allocates with, on the current device: three microseconds less than torch.empty.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def _allocator(spec: OutSpec | Sequence[OutSpec]) -> Callable[[], Any]:
    """`allocate(spec)`, prepared."""
    if not isinstance(spec, OutSpec) or spec.device.type != "cuda" or _empty_strided_cuda is None:
        return lambda: allocate(spec)
    shape, strides, dtype = tuple(spec.shape), torch.empty(spec.shape, device="meta").stride(), spec.dtype
    index, current_device = spec.device.index, torch._C._cuda_getDevice

    def fresh() -> Tensor:
        if current_device() != index:
            return torch.empty(shape, dtype=dtype, device=spec.device)
        made: Tensor = _empty_strided_cuda(shape, strides, dtype)
        return made

    return fresh


def register(
    operation: Operation, name: str, schema: str, gather: Callable[..., Operands], outs: str = "Tensor"
) -> Ops:
    """Define `name` and `name_out` for a schema of operands; `gather` makes operands of the schema's arguments.

    `outs` is 'Tensor' or 'Tensor[]'. The function ends with out_dtype and backend, the writer with out and backend.
    """
    mutable = outs.replace("Tensor", "Tensor(a!)")
    library.define(f"{name}({schema}, ScalarType? out_dtype, str? backend) -> {outs}")
    library.define(f"{name}_out({schema}, {mutable} out, str? backend) -> ()")

    def function(*arguments: Any) -> Any:
        *rest, out_dtype, backend = arguments
        return execute(operation, gather(*rest), None, out_dtype, backend)

    def function_fake(*arguments: Any) -> Any:
        *rest, out_dtype, _ = arguments
        return allocate(operation.check(gather(*rest), None, out_dtype))

    def writer(*arguments: Any) -> None:
        *rest, out, backend = arguments
        execute(operation, gather(*rest), out, None, backend)

    def writer_fake(*arguments: Any) -> None:
        *rest, out, _ = arguments
        operation.check(gather(*rest), out, None)

    for key, real, fake in ((name, function, function_fake), (f"{name}_out", writer, writer_fake)):
        library.impl(key, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{key}", fake, lib=library)
    space = getattr(torch.ops, NAMESPACE)
    return Ops(name, operation, gather, outs, getattr(space, name).default, getattr(space, f"{name}_out").default)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


_WORDS = 3  # of (out, out_dtype, backend, *arguments), those before the arguments
ANEW = object()  # what was not done, and must be done from the start

# torch.compile's check that tensors are what they were: one call for all of them. It also compares what torch's
# dispatcher would see here and now, so a tracer or a transform does not pass; modes may.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_is_compiling, _is_grad_enabled, _address = torch.compiler.is_compiling, torch.is_grad_enabled, Tensor.data_ptr


def repeated(
    ops: Ops, arguments: Operands, out: Tensor | None, out_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """Run a call like the last one with its weight and number of rows, or answer ANEW: then it must be looked at.

    Public functions ask this first, with their arguments as they are. Written out in one piece, because each call of a
    function costs a tenth of a microsecond.
    """
    if _is_compiling() or dispatch_modes() or function_modes():  # first: nobody who looks must see what was remembered
        return ANEW
    try:
        recent = calls.recent[ops.name, id(arguments[1]), arguments[0].shape[-2]]
    except (KeyError, AttributeError, IndexError, TypeError):  # unknown, or not even a matrix
        return ANEW
    call, pick, same, others, values, numbers, room, apart, settings, gradients = recent
    given = (out, out_dtype, backend, *arguments)
    tensors, now = pick(given), current()
    if (
        others(given) != values
        or not same(*tensors)
        or not (settings is now or settings == now)
        or (gradients and _is_grad_enabled())
    ):
        return ANEW
    launch = call.at
    if launch is None:
        return _launch(ops.operation, call, ops.gather(*arguments), out)
    if out is None:
        out = call.fresh()
        addresses = [out.data_ptr(), *map(_address, tensors)]
    else:
        addresses = list(map(_address, tensors))
        start = addresses[0]
        end = start + room
        for i, size in apart:
            other = addresses[i]
            if other < end and start < other + size:  # a closer look
                return _launch(ops.operation, call, ops.gather(*arguments), out)
    return out if launch(*numbers, *addresses) else _write(call, ops.gather(*arguments), out)


def _shortcut(
    ops: Ops, arguments: Operands, out: Tensor | None, out_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """Run a call without torch's dispatcher and remember it, or answer ANEW if it is watched, has subclasses of Tensor,
    or gradients. The dispatcher costs two microseconds, and with none of these it changes nothing."""
    if watched():
        return ANEW
    operation = ops.operation
    given = (out, out_dtype, backend, *arguments)
    _check_words(ops, out, out_dtype, backend)
    tensors = [i for i, one in enumerate(given) if type(one) in _PLAIN]
    others = [i for i in range(len(given)) if i not in tensors]
    if any(i >= _WORDS and given[i] is not None and type(given[i]) not in (float, int) for i in others):
        return ANEW
    gradients = any(given[i].requires_grad for i in tensors)
    if gradients and torch.is_grad_enabled():
        return ANEW
    operands = ops.gather(*arguments)
    # An out says its type itself.
    found = call_for(operation, operands, out, out_dtype if out is None else None, backend)
    result = _launch(operation, found, operands, out)
    if _TensorGuards is not None:
        place = ops.name, id(arguments[1]), arguments[0].size(-2)
        calls.remember(place, _recent(ops, found, given, tensors, others, gradients))
    return result


def _recent(ops: Ops, found: Call, given: Operands, tensors: list[int], others: list[int], gradients: bool) -> Recent:
    """`tensors` and `others` are places in (out, out_dtype, backend, *arguments)."""
    pick, rest = _picker(tensors), _picker(others)
    out, room, apart = given[0], 0, []
    if out is not None:
        c = None if ops.operation.may_be_out is None else _WORDS + ops.operation.may_be_out
        other = [i != 0 and not (i == c and given[i] is out) for i in tensors]
        room, apart = reach(out), [(at, reach(given[i])) for at, i in enumerate(tensors) if other[at]]
    return Recent(
        call=found,
        tensors=pick,
        same=_guard(pick(given)),
        others=rest,
        values=rest(given),
        numbers=tuple(given[i] for i in others if i >= _WORDS and type(given[i]) is float),
        room=room,
        apart=tuple(apart),
        settings=current(),
        gradients=gradients,
    )


def _guard(tensors: Operands) -> Callable[..., bool]:
    """Whether tensors are like these. Torch's guard refuses one that comes twice, such as a C that is `out`: it gets
    each once, and the others are compared with it."""
    first = {id(one): i for i, one in reversed(list(enumerate(tensors)))}
    once = sorted(first.values())
    same: Callable[..., bool] = _TensorGuards(
        *(tensors[i] for i in once), dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check
    twins = [(first[id(one)], i) for i, one in enumerate(tensors) if first[id(one)] != i]
    if not twins:
        return same
    return lambda *given: all(given[i] is given[j] for i, j in twins) and same(*(given[i] for i in once))


def _picker(places: Sequence[int]) -> Callable[[Operands], Operands]:
    """What is at these places, always as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda given: tuple(given[i] for i in places)


def _check_words(ops: Ops, out: Any, out_dtype: Any, backend: Any) -> None:
    name = ops.operation.name
    if backend is not None and not isinstance(backend, str):
        raise DTypeError(f"{name}: backend is {backend!r}, expected None or a name")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise DTypeError(f"{name}: out_dtype is {out_dtype!r}, expected None or a torch dtype")
    if out is None:
        return
    for one in [out] if ops.outs == "Tensor" else out:
        if not isinstance(one, Tensor):
            raise DTypeError(f"{name}: out is a {type(one).__name__}, expected a tensor")
        if out_dtype is not None and one.dtype != out_dtype:
            raise DTypeError(
                f"{name}: out has dtype {name_of(one.dtype)}, expected {name_of(out_dtype)}, the out_dtype given"
            )


def call(ops: Ops, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Call a registered operation from its public function. Dynamo traces this, so it stays plain."""
    if not torch.compiler.is_compiling():
        done = _shortcut(ops, arguments, out, out_dtype, backend)
        if done is not ANEW:
            return done
    _check_words(ops, out, out_dtype, backend)
    if out is None:
        return ops.function(*arguments, out_dtype, backend)
    ops.writer(*arguments, out, backend)
    return out


def run_plan(operation: Operation, plan: Plan, operands: Operands, out: Any) -> Any:
    """Run a plan on operands that must be the problem it was made for."""
    wanted = plan.problem
    spec = operation.check(operands, out, None if out is not None else BY_NAME[wanted.out_dtype])
    problem = operation.describe(operands, spec)
    if problem != wanted:
        given, planned = dataclasses.asdict(problem), dataclasses.asdict(wanted)
        differences = ", ".join(
            f"{field} is {given[field]!r} (planned {planned[field]!r})"
            for field in given
            if given[field] != planned[field]
        )
        raise ShapeError(f"{operation.name}: the operands are not the plan's problem: {differences}")
    return _launch(operation, Call(plan, plan.launch, lambda: allocate(spec)), operands, out)
