"""From operands to a launch: looked up by their signature, or checked and planned once for it.

The signature has all that validation and choice depend on, so operands that passed once need no second check. Only
whether `out` overlaps an input depends on addresses, and is seen anew each time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.dispatch import PlanCache, choose
from ..core.errors import LayoutError
from ..core.plan import AddressLaunch, Launch, Plan
from ..core.settings import current
from ._operation import ListTensors, Operands, Operation
from ._results import allocate, allocator
from .checks import OutSpec
from .overlap import ListReach, Reach


class Call(NamedTuple):
    """All that a warm call needs, worked out once for its signature."""

    plan: Plan
    launch: Launch
    fresh: Callable[[], Any]  # a new result
    reach: Reach | None = None
    list_reach: ListReach | None = None
    launch_at: AddressLaunch | None = None  # for those who know the addresses already; not of lists


calls: PlanCache[Call] = PlanCache()


# Only "no C" and "no scaling" choose: all other alphas and betas share a plan.
_kind_of = {0.0: 0.0, 1.0: 1.0}.get


def kinds(numbers: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(map(_kind_of, numbers))


def signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Everything about operands that validation and choice depend on, except their data."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found += (value.shape, value.stride(), value.dtype, value.device)
        elif isinstance(value, (list, tuple)):
            numbers = bool(value) and isinstance(value[0], float)
            found.append(kinds(value) if numbers else signature(value))
        elif isinstance(value, float):
            found += kinds((value,))
        else:
            found.append(value)
    return tuple(found)


def execute(
    operation: Operation, operands: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None
) -> Any:
    """Run, and return what was written."""
    return launch(operation, call_for(operation, operands, out, out_dtype, backend), operands, out)


def call_for(
    operation: Operation, operands: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None
) -> Call:
    """What runs such operands."""
    key = (operation.name, backend, current(), out_dtype, *signature((out, *operands)))
    found = calls.get(key)
    if found is not None:
        return found
    spec = operation.check(operands, out, out_dtype)
    device = spec.device if isinstance(spec, OutSpec) else spec[0].device
    plan = choose(operation.describe(operands, spec), device, backend)
    return keep(key, operation, plan, spec, operands, out)


def keep(key: Hashable, operation: Operation, plan: Plan, spec: Any, operands: Operands, out: Any) -> Call:
    """Prepare a plan for operands that lie like these. `spec` is what their check returned."""
    example = allocate(spec) if out is None else out
    bound = plan.launch if plan.bind is None else in_given_types(plan.bind, example, *operands)
    of_lists = None if operation.tensors is None else ListReach(len(example), operation.tensors(example, operands))
    made = Call(
        plan,
        launch=bound,
        fresh=allocator(spec),
        reach=Reach.of(example, operands) if of_lists is None else None,
        list_reach=of_lists,
        launch_at=None if plan.bind_addresses is None else plan.bind_addresses(example, *operands),
    )
    return calls.put(key, made, 1 if isinstance(spec, OutSpec) else 1 + len(spec) // 8)


def launch(operation: Operation, call: Call, operands: Operands, out: Any) -> Any:
    """Run a call, after a look at whether `out` has memory of its own, and return what was written."""
    if operation.tensors is not None:
        return _launch_list(operation, operation.tensors, call, operands, out)
    if out is None:
        out = call.fresh()
    elif call.reach is None or not call.reach.far_apart(out, operands, operation.may_be_out):
        operation.distinct(operands, out)
    return write(call, operands, out)


_address = Tensor.data_ptr


def _launch_list(operation: Operation, tensors: ListTensors, call: Call, operands: Operands, out: Any) -> Any:
    """The same for lists. Addresses are read once, to see that results have memory of their own and for the launch."""
    fresh, takes_addresses = out is None, call.plan.takes_addresses
    if fresh:
        out = call.fresh()
    if fresh and not takes_addresses:
        return write(call, operands, out)
    addresses = [*map(_address, tensors(out, operands))]
    if not fresh:
        assert call.list_reach is not None
        call.list_reach.need_apart(addresses, lambda: operation.distinct(operands, out))
    return write(call, operands, out, addresses=addresses) if takes_addresses else write(call, operands, out)


def write(call: Call, operands: Operands, out: Any, **words: Any) -> Any:
    """Run a call whose `out` is known to be apart from its operands."""
    if call.plan.uses_torch:
        kept = out.is_inference() if isinstance(out, Tensor) else any(map(Tensor.is_inference, out))
        if kept and not torch.is_inference_mode_enabled():  # torch refuses it, too, but only when it has written it
            expected = "a normal tensor, or a call under torch.inference_mode()"
            raise LayoutError(f"{call.plan.problem.op}: out is an inference tensor, expected {expected}")
        # Parameters that require gradients are fine operands; torch's kernels with out= would refuse them otherwise.
        with torch._C._AutoDispatchBelowAutograd():
            in_given_types(call.launch, out, *operands, **words)
    else:
        call.launch(out, *operands, **words)
        changed((out,) if isinstance(out, Tensor) else out)
    return out


# Tells autograd that tensors were written to, which it cannot see of what is written by address: a backward pass that
# needs what was there must fail, not go on with what is there now.
changed: Callable[[Sequence[Tensor]], None] = torch._C._increment_version

_any_autocast = torch._C._is_any_autocast_enabled


def in_given_types(function: Callable[..., Any], *arguments: Any, **words: Any) -> Any:
    """Call what uses operations of torch, which autocast must not change: operands say at which precision they are."""
    if not _any_autocast():
        return function(*arguments, **words)
    with torch._C._ExcludeDispatchKeyGuard(_autocast_keys()):
        return function(*arguments, **words)


@functools.cache
def _autocast_keys() -> Any:
    keys = (key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast"))
    return functools.reduce(operator.or_, map(torch._C.DispatchKeySet, keys))
