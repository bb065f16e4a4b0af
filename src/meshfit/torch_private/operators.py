"""Operators: their schemas, and the modes and subclasses that are asked about them."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]  # documented, but only in this place

OpOverload = torch._ops.OpOverload
"""An operation, and not a function that calls some."""


def schema_of(op: Any) -> Any:
    """Names, defaults and aliasing of an operator's arguments and results."""
    return op._schema


def packet_of(overload: Any) -> Any:
    """``aten.mm`` of ``aten.mm.default``."""
    return overload._overloadpacket


def qualified_name(packet: Any) -> str:
    """``aten::mm`` of ``aten.mm``."""
    return packet._qualified_op_name


def is_composite(overload: Any) -> bool:
    """Whether an operator is written in others, through which autograd goes."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def unregister(library: torch.library.Library) -> None:
    """Take back the kernels of a library now: nothing public does, and garbage is collected some time."""
    library._destroy()


def forget_dispatch(overload: Any) -> None:
    """Look up its kernels anew: tracers remember those that they found."""
    overload._dispatch_cache.clear()


def without_torch_function() -> AbstractContextManager[None]:
    """No mode or subclass is asked about functions called within."""
    return torch._C.DisableTorchFunction()  # type: ignore[return-value]


def in_function_transform() -> bool:
    """Whether this runs within ``torch.func``'s grad, vmap or the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
