"""Between regions: each rank computes its share of the rows (tokens) of what every rank would compute whole.

What leaves a region is summed and cut in one collective, what enters the next is put together again. Norms, dropout and
sums in between see 1/n of the rows; together both collectives move as much as the one sum they stand for. Rows are
those of the dim before the last; they are cut evenly, up to one.

    leave    the rank's rows of the sum over all ranks; backward all rows of the gradient   (after rows of weights)
    enter    all rows; backward the rank's rows of the sum over all ranks' gradients        (before columns)
    own      the rank's rows of what every rank has whole; backward all rows
    whole    all rows, for code that every rank runs alike; backward the rank's
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfit.axes.tensor.ops import Group

AT = -2
"""The dim of the rows."""


def span(length: int, rank: int, size: int) -> tuple[int, int]:
    """Where a rank's rows of ``length`` begin, and how many they are."""
    least, more = divmod(length, size)
    return rank * least + min(rank, more), least + (rank < more)


def leave(x: Tensor, group: Group) -> Tensor:
    return _Rows.apply(x, "leave", x.shape[AT], group)  # type: ignore[return-value]


def enter(x: Tensor, length: int, group: Group) -> Tensor:
    return _Rows.apply(x, "enter", length, group)  # type: ignore[return-value]


def own(x: Tensor, group: Group) -> Tensor:
    return _Rows.apply(x, "own", x.shape[AT], group)  # type: ignore[return-value]


def whole(x: Tensor, length: int, group: Group) -> Tensor:
    return _Rows.apply(x, "whole", length, group)  # type: ignore[return-value]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, what: str, length: int, group: Group) -> Tensor:
        ctx.what, ctx.length, ctx.group = what, length, group
        if what == "own":
            return x.narrow(AT, *span(length, group.rank, group.size)).contiguous()
        return _summed(x, group) if what == "leave" else _together(x, length, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        back = {"leave": "enter", "enter": "leave", "own": "whole", "whole": "own"}[ctx.what]
        return _Rows.apply(grad, back, ctx.length, ctx.group), None, None, None  # type: ignore[return-value]


def _summed(x: Tensor, group: Group) -> Tensor:
    parts = [x.narrow(AT, *span(x.shape[AT], rank, group.size)) for rank in range(group.size)]
    mine = group.scatter(torch.stack([_padded(part, x.shape[AT], group) for part in parts]))
    return mine.narrow(AT, 0, parts[group.rank].shape[AT])


def _together(x: Tensor, length: int, group: Group) -> Tensor:
    parts = group.parts(_padded(x, length, group))
    return torch.cat([part.narrow(AT, 0, span(length, rank, group.size)[1]) for rank, part in enumerate(parts)], AT)


def _padded(x: Tensor, length: int, group: Group) -> Tensor:
    """As many rows as the rank with most has."""
    missing = -(-length // group.degree) * group.degree // group.size - x.shape[AT]
    return F.pad(x, (0, 0, 0, missing)) if missing else x
