"""Collectives that a compiler can trace: operators of torch, with shapes and derivatives of their own.

The same collectives as in collectives.py, of even parts. A group goes by its number, since operators take no objects.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshfit.comm.collectives import BACKWARD, FORWARD
from meshfit.comm.group import Group

_groups: WeakValueDictionary[int, Group] = WeakValueDictionary()


def number_of(group: Group) -> int:
    """By which ``group`` is known here, as long as it lives."""
    _groups[id(group)] = group
    return id(group)


@torch.library.custom_op("meshfit::collective", mutates_args=())
def _collective(x: Tensor, name: str, group: int, size: int, dim: int) -> Tensor:
    found = FORWARD[name](x, _groups[group], *_parts(x, name, size, dim)).contiguous()
    return found.clone() if found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else found


def _parts(x: Tensor, name: str, size: int, dim: int) -> tuple[Any, ...]:
    if name == "all_gather":
        return dim, [x.shape[dim]] * size
    return (dim, [x.shape[dim] // size] * size) if name == "reduce_scatter" else ()


@_collective.register_fake
def _(x: Tensor, name: str, group: int, size: int, dim: int) -> Tensor:
    shape = list(x.shape)
    if name == "all_gather":
        shape[dim] *= size
    elif name == "reduce_scatter":
        shape[dim] //= size
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.name, *ctx.rest = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    name = BACKWARD[ctx.name]
    return grad if name == "copy" else _collective(grad, name, *ctx.rest), None, None, None, None


_collective.register_autograd(_backward, setup_context=_setup)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _collective(grad, "reduce", ctx.group, ctx.size, 0), None, None


collective: Callable[..., Tensor] = _collective
"""``collective(x, name, number of the group, its size, dim)``: "reduce", "all_gather", "reduce_scatter"."""


def copy(x: Tensor, group: int, size: int) -> Tensor:
    return _Copy.apply(x, group, size)  # type: ignore[return-value]
