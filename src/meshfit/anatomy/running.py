"""Operations while they run: a mode that sees each, what an operation makes, and the memory behind tensors."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshfit.anatomy.flops import has_flops, known_as
from meshfit.torch_private.kernels import VIEWS_NOT_SAID
from meshfit.torch_private.operators import (
    OpOverload,
    TorchDispatchMode,
    is_composite,
    packet_of,
    schema_of,
    without_torch_function,
)
from meshfit.torch_private.tensors import is_wrapper

aten = torch.ops.aten

EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
_FREE = {*VIEWS_NOT_SAID, *EMPTY}
"""Operators that make memory without content; and those that read and write none."""


def worth_keeping(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether to keep what ``func`` made when the rest is computed again: products, convolutions, attention.

    Not what has drawn random numbers: left out when the rest runs again, it would shift those that follow.
    """
    if not _is_dear(func):
        return False
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return True
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return given == 0
    return False


@cache
def _is_dear(func: Any) -> bool:
    return isinstance(func, OpOverload) and not schema_of(func).is_mutable and has_flops(known_as(packet_of(func)))


class Operations(TorchDispatchMode):
    """Calls ``count`` after every operation. No mode of functions sees what runs below autograd, nor ``count``."""

    def __init__(self, count: Callable[[Any, tuple, dict[str, Any], Any], None]):
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(_wraps(kind) for kind in types):
            return NotImplemented  # a tensor made of others (DTensor): it comes back here with those
        kwargs = kwargs or {}
        with without_torch_function():
            if func.namespace == "prim":  # a fake tensor is asked for its device
                return func(*args, **kwargs)
            if _composite(func):
                with self:
                    return func.decompose(*args, **kwargs)
            out = func(*args, **kwargs)
            self._count(func, args, kwargs, out)
        return out


@cache
def is_view(func: Any) -> bool:
    """Whether ``func`` makes nothing: a view of what it was given, or memory without content."""
    returns = [result.alias_info for result in schema_of(func).returns]
    aliases = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    return aliases or packet_of(func) in _FREE


_composite, _wraps = cache(is_composite), cache(is_wrapper)


def has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not _wraps(type(tensor))


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def bytes_of(tensor: Tensor) -> int:
    """An expanded tensor is no larger than the memory behind it."""
    if not has_storage(tensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
