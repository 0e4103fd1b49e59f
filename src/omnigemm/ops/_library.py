"""Operations as torch's operators, so that torch.compile sees one node without breaks, and calls to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.errors import OmniGemmError
from ._again import ANEW
from ._gradients import look_for_gradients
from ._operation import Operands, Operation, Operators
from ._recent import shortcut
from ._results import allocate
from ._run import execute
from ._signs import with_signs
from .checks import need_words

NAMESPACE = "omnigemm"
library = torch.library.Library(NAMESPACE, "DEF")


def define(name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator, which graphs see as one node: `fake` says what it gives, `real` runs when the graph does."""
    library.define(f"{name}{schema}")
    library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register(operation: Operation, name: str, schema: str, gather: Callable[..., Operands]) -> Operators:
    """Define `name` and `name_out` for a schema of operands; `gather` makes operands of the schema's arguments.

    The function ends with out_dtype and backend, the writer with out and backend.
    """
    many = "" if operation.tensors is None else "[]"
    makes = f"({schema}, ScalarType? out_dtype, str? backend) -> Tensor{many}"
    writes = f"({schema}, Tensor(a!){many} out, str? backend) -> ()"

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

    makers = define(name, makes, function, function_fake), define(f"{name}_out", writes, writer, writer_fake)
    return Operators(name, operation, gather, *makers)


def call(ops: Operators, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    """Call a registered operation from its public function. Dynamo traces this, so it stays plain."""
    operation = ops.operation
    need_words(operation.name, out, out_dtype, backend, many=operation.tensors is not None)
    if torch.compiler.is_compiling():
        return _dispatch(ops, arguments, out, out_dtype, backend)
    try:
        done = shortcut(ops, arguments, out, out_dtype, backend)
        if done is not ANEW:
            return done
        if out is not None:
            look_for_gradients(operation.name, arguments, out, depth=4)
        arguments = with_signs(operation.name, arguments, out)
        return _dispatch(ops, arguments, out, out_dtype, backend)
    except RuntimeError as error:
        if not isinstance(error, OmniGemmError):
            operation.check(ops.gather(*arguments), out, out_dtype)  # a tensor may have no strides to be looked up by
        raise


def _dispatch(ops: Operators, arguments: Operands, out: Any, out_dtype: torch.dtype | None, backend: str | None) -> Any:
    if out is None:
        return ops.function(*arguments, out_dtype, backend)
    ops.writer(*arguments, out, backend)
    return out
