"""Whether somebody looks at calls. Shortcuts past torch's dispatcher ask this first: nobody must miss a call."""

from __future__ import annotations

import torch

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # the types of tensors that have no say in calls

# Found once: looking each of them up costs as much as asking it.
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracer = torch._C._get_tracing_state


def watched() -> bool:
    """By a mode, a tracer or a transform."""
    return bool(dispatch_modes() or function_modes() or _transforms() is not None or _tracer() is not None)
