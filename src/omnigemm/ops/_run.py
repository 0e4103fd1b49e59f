"""From a call to a kernel: check once per signature, plan once, then look up and launch.

An operation is described by what it checks and by the problem that its operands are. It is registered with
torch.library twice, as a function and as one that writes `out`, so that torch.compile sees one node without breaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.dispatch import PlanCache, choose
from ..core.dtypes import BY_NAME, name_of
from ..core.errors import DTypeError, ShapeError
from ..core.plan import Launch, Plan
from ..core.problem import Problem
from ..core.settings import current
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

    operation: Operation
    gather: Callable[..., Operands]
    outs: str
    function: Any
    writer: Any


class Reach(NamedTuple):
    """Bytes from first to last."""

    out: int
    operands: tuple[tuple[int, int], ...]  # position and bytes of those that are tensors with elements


class Call(NamedTuple):
    """All that a warm call needs, worked out once for its signature."""

    plan: Plan
    result: Any  # OutSpec, or a list of them
    launch: Launch
    strides: tuple[int, ...] | None = None  # of a fresh result, if it is one tensor
    reach: Reach | None = None  # if `out` and operands are tensors


calls: PlanCache[Call] = PlanCache()


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


def execute(
    operation: Operation, operands: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """Run, and return what was written."""
    key = (operation.name, backend, current(), out_dtype, *_signature((out, *operands)))
    call = calls.get(key)
    if call is None:
        spec = operation.check(operands, out, out_dtype)
        device = spec.device if isinstance(spec, OutSpec) else spec[0].device
        plan = choose(operation.describe(operands, spec), device, backend)
        example = allocate(spec) if out is None else out
        launch = plan.launch if plan.bind is None else plan.bind(example, *operands)
        strides = example.stride() if isinstance(example, Tensor) else None
        call = calls.put(key, Call(plan, spec, launch, strides, _reach(example, operands)))
    return _launch(operation, call, operands, out)


def _reach(out: Any, operands: Operands) -> Reach | None:
    if any(isinstance(one, (list, tuple)) for one in (out, *operands)):
        return None
    found = ((i, reach(one)) for i, one in enumerate(operands) if isinstance(one, Tensor))
    return Reach(reach(out), tuple((i, size) for i, size in found if size))


def _far_apart(sizes: Reach, out: Tensor, operands: Operands, may_be_out: int | None) -> bool:
    """Whether `out` begins after or ends before each operand: then it needs no closer look."""
    start = out.data_ptr()
    end = start + sizes.out
    for i, size in sizes.operands:
        other = operands[i].data_ptr()
        if other < end and start < other + size and not (i == may_be_out and operands[i] is out):
            return False
    return True


def _launch(operation: Operation, call: Call, operands: Operands, out: Any) -> Any:
    if out is None:
        if call.strides is None:
            out = allocate(call.result)
        else:  # a microsecond less than torch.empty
            spec = call.result
            out = torch.empty_strided(spec.shape, call.strides, dtype=spec.dtype, device=spec.device)
    elif call.reach is None or not _far_apart(call.reach, out, operands, operation.may_be_out):
        operation.distinct(operands, out)
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
    return Ops(operation, gather, outs, getattr(space, name).default, getattr(space, f"{name}_out").default)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


_LONG_WAY = object()

# Whoever looks at calls. Found once: looking each of them up costs as much as asking it.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracer = torch._C._get_tracing_state


def _shortcut(
    ops: Ops, arguments: Operands, out: Tensor | None, out_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """Run a call without torch's dispatcher, or answer _LONG_WAY if somebody looks: a mode, a tracer, a transform, a
    subclass of Tensor, or gradients. The dispatcher costs two microseconds, and with none of these it changes nothing.

    Written out in one piece, because each call of a function costs a tenth of a microsecond.
    """
    if _dispatch_modes() or _function_modes() or _transforms() is not None or _tracer() is not None:
        return _LONG_WAY
    gradients = torch.is_grad_enabled()
    operation = ops.operation
    key: list[Any] = [operation.name, backend, current(), out_dtype]
    for one in (out, *arguments):
        if one is None:
            key.append(None)
        elif type(one) in _PLAIN and not (gradients and one.requires_grad):
            key += (one.shape, one.stride(), one.dtype, one.device)
        elif type(one) is float:
            key.append(one if one == 0.0 or one == 1.0 else "number")  # as in _signature
        else:
            return _LONG_WAY
    operands = ops.gather(*arguments)
    found = calls.get(tuple(key))
    if found is None:
        return execute(operation, operands, out, out_dtype, backend)
    return _launch(operation, found, operands, out)


def call(ops: Ops, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Call a registered operation from its public function. Dynamo traces this, so it stays plain."""
    name = ops.operation.name
    if backend is not None and not isinstance(backend, str):
        raise DTypeError(f"{name}: backend is {backend!r}, expected None or a name")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise DTypeError(f"{name}: out_dtype is {out_dtype!r}, expected None or a torch dtype")
    looked_at = torch.compiler.is_compiling()
    if out is None:
        done = _LONG_WAY if looked_at else _shortcut(ops, arguments, None, out_dtype, backend)
        return ops.function(*arguments, out_dtype, backend) if done is _LONG_WAY else done
    for one in [out] if ops.outs == "Tensor" else out:
        if not isinstance(one, Tensor):
            raise DTypeError(f"{name}: out is a {type(one).__name__}, expected a tensor")
        if out_dtype is not None and one.dtype != out_dtype:
            raise DTypeError(
                f"{name}: out has dtype {name_of(one.dtype)}, expected {name_of(out_dtype)}, the out_dtype given"
            )
    if looked_at or _shortcut(ops, arguments, out, None, backend) is _LONG_WAY:
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
    return _launch(operation, Call(plan, spec, plan.launch), operands, out)
