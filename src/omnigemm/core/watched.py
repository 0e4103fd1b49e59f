"""Whether somebody looks at calls. Shortcuts past torch's dispatcher ask this first: nobody must miss a call."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # the types of tensors that have no say in calls

# Found once: looking each of them up costs as much as asking it.
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracer = torch._C._get_tracing_state


def functions_watched() -> bool:
    """By a mode that is more than torch's default device, which has a say only in what makes new tensors."""
    return bool(function_modes()) and any(type(one) is not DeviceContext for one in _get_current_function_mode_stack())


def watched() -> bool:
    """By a mode, a tracer or a transform."""
    return bool(dispatch_modes() or functions_watched() or _transforms() is not None or _tracer() is not None)
