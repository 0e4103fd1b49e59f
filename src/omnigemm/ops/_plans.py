"""Running a plan that somebody made before, if they like in memory of theirs."""

from __future__ import annotations

import dataclasses
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from ..core.dtypes import BY_NAME
from ..core.errors import DeviceError, ShapeError, WorkspaceError
from ..core.plan import Plan
from ._gradients import look_for_gradients
from ._operation import Operands, Operation, tensors_in
from ._run import calls, keep, launch, signature
from ._signs import with_signs
from .checks import OutSpec, need_words, show
from .overlap import span

WORKSPACE_ALIGN = 128  # bytes

_requires_grad, _is_neg = attrgetter("requires_grad"), Tensor.is_neg


def run_plan(operation: Operation, plan: Plan, operands: Operands, out: Any, workspace: Any = None) -> Any:
    """Run a plan on operands that must be the problem it was made for."""
    need_words(operation.name, out, None, None, many=operation.tensors is not None)
    tensors = tensors_in(out, *operands)  # of a list hundreds, so they are looked at closely only where it matters
    if any(map(_requires_grad, tensors)):
        look_for_gradients(operation.name, operands, out, depth=5)
    if any(map(_is_neg, tensors)):
        operands = with_signs(operation.name, operands, out)
    if workspace is not None:
        _need_workspace(operation, plan, workspace, operands, out)
    key = (plan, *signature((out, *operands)))
    found = calls.get(key)
    if found is None:
        wanted = plan.problem
        spec = operation.check(operands, out, None if out is not None else BY_NAME[wanted.out_dtype])
        here, there = (spec if isinstance(spec, OutSpec) else spec[0]).device, plan.device
        if here.type != there.type or there.index not in (None, here.index):
            raise DeviceError(f"{operation.name}: the operands are on {here}, expected {there}, the device of the plan")
        problem = operation.describe(operands, spec)
        if problem != wanted:
            given, planned = dataclasses.asdict(problem), dataclasses.asdict(wanted)
            differences = ", ".join(
                f"{field} is {given[field]!r} (planned {planned[field]!r})"
                for field in given
                if given[field] != planned[field]
            )
            raise ShapeError(f"{operation.name}: the operands are not the plan's problem: {differences}")
        found = keep(key, operation, plan, spec, operands, out)
    if workspace is not None and plan.takes_workspace:
        found = found._replace(launch=partial(found.launch, workspace=workspace))
    return launch(operation, found, operands, out)


def _need_workspace(operation: Operation, plan: Plan, workspace: Any, operands: Operands, out: Any) -> None:
    name = operation.name
    if not isinstance(workspace, Tensor):
        raise WorkspaceError(f"{name}: workspace is a {type(workspace).__name__}, expected a tensor")
    if plan.workspace_bytes and not plan.takes_workspace:
        own = f"{plan.backend}/{plan.kernel} takes its {plan.workspace_bytes} bytes from torch's allocator"
        raise WorkspaceError(f"{name}: workspace has shape {show(workspace)}, expected None: {own}")
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
        first, end = span(one)
        if first < start + size and start < end:
            other = f"a tensor of shape {show(one)}"
            raise WorkspaceError(f"{name}: workspace shares memory with {other}, expected memory of its own")
