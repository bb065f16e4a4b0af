"""What ranks of a context group say to each other, and its derivatives.

    gather   the positions of all ranks; backward sums the gradients that all ranks have of this rank's positions
    total    the sum over ranks; backward the same

Every rank goes backward from its part of the loss, 1/n of it. Then a gradient on a rank is of what depends on that
rank's copy of a tensor, and the true gradient of a tensor that all ranks hold, a parameter say, is the sum over the
ranks: whatever was computed from it, from all positions or from some. Both functions are the transposes that this asks
for. No list of parameters is kept, and no rank needs to know what another does with its copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.context.span import Span
from meshfit.axes.tensor.ops import Group, Ranks, draw_own
from meshfit.axes.tensor.region import Traffic
from meshfit.torch_private import in_backward


class Imagined(Group):
    """A rank of a group of which there is no other: what it hears is what it says. Shapes are right, and it counts."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.log: list[Traffic] = []

    def _heard(self, op: str, x: Tensor, times: int = 1) -> Tensor:
        self.log.append(Traffic(op, in_backward(), x.numel() * times, tuple(x.shape)))
        return x.detach()

    def sum(self, x: Tensor) -> Tensor:
        return self._heard("all_reduce", x).clone()

    def max(self, x: Tensor) -> Tensor:
        return self._heard("all_reduce", x).clone()

    def parts(self, x: Tensor) -> list[Tensor]:
        return [self._heard("all_gather", x, self.size)] * self.size

    def scatter(self, x: Tensor) -> Tensor:
        return self._heard("reduce_scatter", x)[self.rank]


def gather(x: Tensor, span: Span, group: Group) -> Tensor:
    """The whole of which ``x`` is this rank's part."""
    return _Gather.apply(x, span, group)  # type: ignore[return-value]


def total(x: Tensor, group: Group) -> Tensor:
    return _Total.apply(x, group)  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, span: Span, group: Group) -> Tensor:
        ctx.span, ctx.group = span, group
        at, most = span.dim + 1, max(span.counts)
        x = x.unflatten(span.dim, (span.outer, span.counts[group.rank], span.inner))
        parts = group.parts(_padded(x, at, most).contiguous())
        parts = [part.narrow(at, 0, count) for part, count in zip(parts, span.counts, strict=True)]
        return torch.cat(parts, at).flatten(span.dim, span.dim + 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Scatter.apply(grad, ctx.span, ctx.group), None, None  # type: ignore[return-value]


class _Scatter(torch.autograd.Function):
    """This rank's part of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: Span, group: Group) -> Tensor:
        ctx.span, ctx.group = span, group
        at, most = span.dim + 1, max(span.counts)
        x = x.unflatten(span.dim, (span.outer, span.length, span.inner))
        rows = torch.stack([_padded(part, at, most) for part in x.split(span.counts, at)])
        own = group.scatter(rows).narrow(at, 0, span.counts[group.rank])
        return own.flatten(span.dim, span.dim + 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gather(grad, ctx.span, ctx.group), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return total(grad, ctx.group), None


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] == size:
        return x
    fill = list(x.shape)
    fill[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(fill)], dim)


@contextmanager
def own_draws(group: Group, device: torch.device) -> Iterator[None]:
    """Random numbers of this rank alone, which follow from the common ones; those go on after it as if one had been
    drawn: what is computed again draws the same again."""
    if not isinstance(group, Ranks):
        yield
        return
    common = draw_own(group.rank, device)
    try:
        yield
    finally:
        common()
