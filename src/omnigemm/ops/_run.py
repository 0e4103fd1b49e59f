"""From a call to a kernel: check once per signature, plan once, then look up and launch.

An operation is described by what it checks and by the problem that its operands are. It is registered with
torch.library twice, as a function and as one that writes `out`, so that torch.compile sees one node without breaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.dispatch import PlanCache, choose
from ..core.dtypes import BY_NAME, name_of
from ..core.errors import DTypeError, ShapeError, WorkspaceError
from ..core.plan import AddressLaunch, Launch, Plan
from ..core.problem import Problem
from ..core.settings import Settings, current
from ..core.watched import dispatch_modes, function_modes, watched
from .checks import OutSpec, show
from .overlap import ListReach, Reach, reach

NAMESPACE = "omnigemm"
library = torch.library.Library(NAMESPACE, "DEF")

Operands = tuple[Any, ...]
ListTensors = Callable[[Any, Operands], tuple[Tensor, ...]]
WORKSPACE_ALIGN = 128  # bytes


@dataclasses.dataclass(frozen=True)
class Operation:
    """`check(operands, out, out_dtype)` validates metadata; `describe(operands, result)` names the problem.

    `collect` turns the public arguments (without out, out_dtype and backend) into operands; `distinct` refuses an
    `out` that shares memory with an input. The operand at `may_be_out` may be `out` itself. Operations on lists say
    what is in them: `tensors(out, operands)` has all tensors, results first.
    """

    name: str
    check: Callable[[Operands, Any, torch.dtype | None], Any]
    describe: Callable[[Operands, Any], Problem]
    collect: Callable[..., Operands]
    distinct: Callable[[Operands, Any], None]
    may_be_out: int | None = None
    tensors: ListTensors | None = None


class Ops(NamedTuple):
    """An operation's two forms in torch.library, and what is behind them."""

    name: str
    operation: Operation
    gather: Callable[..., Operands]
    outs: str
    function: Any
    writer: Any


class Call(NamedTuple):
    """All that a warm call needs, worked out once for its signature."""

    plan: Plan
    launch: Launch
    fresh: Callable[[], Any]  # a new result
    reach: Reach | None = None
    list_reach: ListReach | None = None
    at: AddressLaunch | None = None  # the launch for those who know the addresses already, not of lists


class Recent(NamedTuple):
    """The last call with a weight and so many rows, or with lists of such sizes.

    Of (out, out_dtype, backend, *arguments), all must be as then.
    """

    call: Call
    tensors: Callable[[Operands], Operands]  # all of them, also those in lists
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

    RECENT_LIMIT = 65536  # tensors of all calls, of which lists have many

    def __init__(self) -> None:
        super().__init__()
        self.recent: dict[tuple[Any, ...], Recent] = {}
        self._recent_tensors = 0

    def remember(self, place: tuple[Any, ...], recent: Recent, tensors: int) -> None:
        if place not in self.recent:
            if self._recent_tensors + tensors > self.RECENT_LIMIT:
                self.recent.clear()
                self._recent_tensors = 0
            self._recent_tensors += tensors
        self.recent[place] = recent

    def clear(self) -> None:
        super().clear()
        self.recent.clear()
        self._recent_tensors = 0


calls = Calls()


# Only "no C" and "no scaling" choose: all other alphas and betas share a plan.
_kind_of = {0.0: 0.0, 1.0: 1.0}.get


def _kinds(numbers: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(map(_kind_of, numbers))


def _signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Everything about operands that validation and choice depend on, except their data."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found += (value.shape, value.stride(), value.dtype, value.device)
        elif isinstance(value, (list, tuple)):
            numbers = bool(value) and isinstance(value[0], float)
            found.append(_kinds(value) if numbers else _signature(value))
        elif isinstance(value, float):
            found += _kinds((value,))
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
    return _keep(key, operation, plan, spec, operands, out)


def _keep(key: Any, operation: Operation, plan: Plan, spec: Any, operands: Operands, out: Any) -> Call:
    example = allocate(spec) if out is None else out
    launch = plan.launch if plan.bind is None else plan.bind(example, *operands)
    of_lists = None if operation.tensors is None else ListReach(len(example), operation.tensors(example, operands))
    of_others = Reach.of(example, operands) if of_lists is None else None
    at = None if plan.bind_addresses is None else plan.bind_addresses(example, *operands)
    made = Call(plan, launch, _allocator(spec), of_others, of_lists, at)
    return calls.put(key, made, 1 if isinstance(spec, OutSpec) else 1 + len(spec) // 8)


def execute(
    operation: Operation, operands: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """Run, and return what was written."""
    return _launch(operation, call_for(operation, operands, out, out_dtype, backend), operands, out)


_address = Tensor.data_ptr


def _launch(operation: Operation, call: Call, operands: Operands, out: Any) -> Any:
    if operation.tensors is not None:
        return _launch_list(operation, operation.tensors, call, operands, out)
    if out is None:
        out = call.fresh()
    elif call.reach is None or not call.reach.far_apart(out, operands, operation.may_be_out):
        operation.distinct(operands, out)
    return _write(call, operands, out)


def _launch_list(operation: Operation, tensors: ListTensors, call: Call, operands: Operands, out: Any) -> Any:
    """The same for lists. Addresses are read once, to see that results have memory of their own and for the launch."""
    fresh, takes_addresses = out is None, call.plan.takes_addresses
    if fresh:
        out = call.fresh()
    if fresh and not takes_addresses:
        return _write(call, operands, out)
    addresses = [*map(_address, tensors(out, operands))]
    if not fresh:
        assert call.list_reach is not None
        call.list_reach.need_apart(addresses, lambda: operation.distinct(operands, out))
    return _write(call, operands, out, addresses=addresses) if takes_addresses else _write(call, operands, out)


def _write(call: Call, operands: Operands, out: Any, **words: Any) -> Any:
    if call.plan.uses_torch:
        # Parameters that require gradients are fine operands; torch's kernels with out= would refuse them otherwise.
        with torch._C._AutoDispatchBelowAutograd():
            call.launch(out, *operands, **words)
    else:
        call.launch(out, *operands, **words)
    return out


def allocate(spec: OutSpec | Sequence[OutSpec]) -> Any:
    if isinstance(spec, OutSpec):
        return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in spec]


# What torch.compile's own code allocates with, on the current device: three microseconds less than torch.empty.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def _allocator(spec: OutSpec | Sequence[OutSpec]) -> Callable[[], Any]:
    """`allocate(spec)`, prepared."""
    specs: Sequence[OutSpec] = [spec] if isinstance(spec, OutSpec) else spec
    device = specs[0].device
    if device.type != "cuda" or _empty_strided_cuda is None:
        return lambda: allocate(spec)
    index, current_device = device.index, torch._C._cuda_getDevice
    forms = [(tuple(one.shape), torch.empty(one.shape, device="meta").stride(), one.dtype) for one in specs]
    form = forms[0]

    def fresh() -> Tensor:
        made: Tensor = _empty_strided_cuda(*form) if current_device() == index else allocate(spec)
        return made

    def all_fresh() -> list[Tensor]:
        made: list[Tensor] = (
            [_empty_strided_cuda(*one) for one in forms] if current_device() == index else allocate(spec)
        )
        return made

    return fresh if isinstance(spec, OutSpec) else all_fresh


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


PLAIN = frozenset((Tensor, torch.nn.Parameter))


_WORDS = 3  # of (out, out_dtype, backend, *arguments), those before the arguments
ANEW = object()  # what was not done, and must be done from the start

# torch.compile's check that tensors are what they were: one call for all of them. It also compares what torch's
# dispatcher would see here and now, so a tracer or a transform does not pass; modes may.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_is_compiling, _is_grad_enabled, _size = torch.compiler.is_compiling, torch.is_grad_enabled, Tensor.size


def repeated(ops: Ops, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Run a call like the last one with its weight and number of rows, or answer ANEW: then it must be looked at.

    Public functions ask this first, with their arguments as they are. Written out in one piece, because each call of a
    function costs a tenth of a microsecond.
    """
    if _is_compiling() or dispatch_modes() or function_modes():  # first: nobody who looks must see what was remembered
        return ANEW
    first = arguments[0]
    try:
        if type(first) is list:
            recent = calls.recent[_list_place(ops, first)]
        else:
            recent = calls.recent[ops.name, id(arguments[1]), first.shape[-2]]
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


def _shortcut(ops: Ops, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Run a call without torch's dispatcher and remember it, or answer ANEW if it is watched, has subclasses of Tensor,
    or gradients. The dispatcher costs two microseconds, and with none of these it changes nothing."""
    if watched():
        return ANEW
    operation = ops.operation
    given = (out, out_dtype, backend, *arguments)
    _check_words(ops, out, out_dtype, backend)
    if operation.tensors is None:
        tensors = [i for i, one in enumerate(given) if type(one) in PLAIN]
        others = [i for i in range(len(given)) if i not in tensors]
        if any(i >= _WORDS and given[i] is not None and type(given[i]) not in (float, int) for i in others):
            return ANEW
        pick, rest = _picker(tensors), _picker(others)
    else:
        pick, rest = _list_picker(ops, operation.tensors), _list_others
    picked = pick(given)
    if not PLAIN.issuperset(map(type, picked)):
        return ANEW
    gradients = any(one.requires_grad for one in picked)
    if gradients and torch.is_grad_enabled():
        return ANEW
    operands = ops.gather(*arguments)
    # An out says its type itself.
    found = call_for(operation, operands, out, out_dtype if out is None else None, backend)
    result = _launch(operation, found, operands, out)
    if _TensorGuards is not None:
        room, apart = (0, ()) if found.at is None else _spans(ops, given)
        recent = Recent(
            call=found,
            tensors=pick,
            same=_guard(picked),
            others=rest,
            values=rest(given),
            numbers=tuple(one for one in arguments if type(one) is float),
            room=room,
            apart=apart,
            settings=current(),
            gradients=gradients,
        )
        first = arguments[0]
        place = _list_place(ops, first) if operation.tensors else (ops.name, id(arguments[1]), first.size(-2))
        calls.remember(place, recent, len(picked))
    return result


def _spans(ops: Ops, given: Operands) -> tuple[int, tuple[tuple[int, int], ...]]:
    """`room` and `apart` of Recent."""
    out, c = given[0], ops.operation.may_be_out
    if out is None:
        return 0, ()
    tensors = [i for i, one in enumerate(given) if type(one) in PLAIN]
    itself = [i == 0 or (c is not None and i == _WORDS + c and given[i] is out) for i in tensors]
    return reach(out), tuple((at, reach(given[i])) for at, i in enumerate(tensors) if not itself[at])


def _guard(tensors: Operands) -> Callable[..., bool]:
    """Whether tensors are like these. Torch's guard refuses one that comes twice, such as a C that is `out` or a weight
    of several products: it gets each once, and the others are compared with it."""
    first = {id(one): i for i, one in reversed(list(enumerate(tensors)))}
    once = _picker(sorted(first.values()))
    same: Callable[..., bool] = _TensorGuards(*once(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    again = [i for i, one in enumerate(tensors) if first[id(one)] != i]
    if not again:
        return same
    firsts, twins = _picker([first[id(tensors[i])] for i in again]), _picker(again)
    return lambda *given: all(map(is_, firsts(given), twins(given))) and same(*once(given))


def _picker(places: Sequence[int]) -> Callable[[Operands], Operands]:
    """What is at these places, always as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda given: tuple(given[i] for i in places)


def _list_place(ops: Ops, matrices: Sequence[Tensor]) -> tuple[Any, ...]:
    """Lists are made anew for every call, so they are found by what they hold."""
    return (ops.name, *map(_size, matrices))


def _list_picker(ops: Ops, tensors: ListTensors) -> Callable[[Operands], Operands]:
    return lambda given: tensors(given[0] or (), ops.gather(*given[_WORDS:]))


def _list_others(given: Operands) -> Operands:
    """What else a call with lists depends on: how many tensors each of them has, kinds of numbers, and words."""
    found: list[Any] = []
    for value in given:
        kind = type(value)
        if kind is list:
            found.append(_kinds(value) if value and type(value[0]) is float else len(value))
        else:
            found.append(Tensor if kind in PLAIN else value)
    return tuple(found)


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


def run_plan(operation: Operation, plan: Plan, operands: Operands, out: Any, workspace: Any = None) -> Any:
    """Run a plan on operands that must be the problem it was made for."""
    if workspace is not None:
        _need_workspace(operation, plan, workspace, operands, out)
    key = (plan, *_signature((out, *operands)))
    found = calls.get(key)
    if found is None:
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
        found = _keep(key, operation, plan, spec, operands, out)
    if workspace is not None and plan.takes_workspace:
        found = found._replace(launch=partial(found.launch, workspace=workspace))
    return _launch(operation, found, operands, out)


def _need_workspace(operation: Operation, plan: Plan, workspace: Any, operands: Operands, out: Any) -> None:
    name = operation.name
    if not isinstance(workspace, Tensor):
        raise WorkspaceError(f"{name}: workspace is a {type(workspace).__name__}, expected a tensor")
    size = workspace.numel() * workspace.element_size()
    if not workspace.is_contiguous() or size < plan.workspace_bytes:
        what = f"{size} bytes" if workspace.is_contiguous() else f"strides {workspace.stride()}"
        raise WorkspaceError(f"{name}: workspace has {what}, expected {plan.workspace_bytes} bytes side by side")
    here, there = workspace.device, plan.device
    if here.type != there.type or there.index not in (None, here.index):
        raise WorkspaceError(f"{name}: workspace is on {here}, expected {there}, the device of the plan")
    start = workspace.data_ptr()
    if plan.takes_workspace and start % WORKSPACE_ALIGN:
        raise WorkspaceError(f"{name}: workspace begins at {start:#x}, expected a multiple of {WORKSPACE_ALIGN}")
    if operation.tensors is None:
        tensors = [one for one in (out, *operands) if isinstance(one, Tensor)]
    else:
        tensors = list(operation.tensors(out or (), operands))
    for one in tensors:
        if one.data_ptr() < start + size and start < one.data_ptr() + reach(one):
            raise WorkspaceError(f"{name}: workspace shares memory with {show(one)}, expected memory of its own")
