"""What ranks tell each other in the middle of a forward or backward: over a process group, or through a server."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshfit.errors import DataError
from meshfit.events import current
from meshfit.server.workers import Workers
from meshfit.torch_private import all_gather_single

Group = dist.ProcessGroup | Workers


def place(group: Group) -> tuple[int, int]:
    """(rank, ranks) of this one among those that meet."""
    if isinstance(group, Workers):
        return group.rank, group.size
    return dist.get_rank(group), dist.get_world_size(group)


def gather(mine: Tensor, group: Group) -> Tensor:
    """What each rank gives, all of one shape, by rank: [ranks, ...]."""
    if isinstance(group, Workers):
        return group.gather(mine)
    ranks = dist.get_world_size(group)
    every = mine.new_empty(ranks, *mine.shape)
    with current().waiting("meet"):
        all_gather_single(every.view(ranks * len(mine), *mine.shape[1:]), mine, group=group)
    return every


def add(mine: Tensor, group: Group) -> Tensor:
    """The sum over the ranks; ``mine`` may become it."""
    if isinstance(group, Workers):
        return group.sum(mine)
    with current().waiting("meet"):
        dist.all_reduce(mine, group=group)
    return mine


def rows(mine: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, any number from each, in their order. Backward sums over the ranks the gradients that came
    to this one's rows: ranks that each go backward from a part of one loss then have the gradient of the whole."""
    return _Rows.apply(mine, group)  # type: ignore[return-value]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Group) -> Tensor:
        rank, ranks = place(group)
        shapes = gather(torch.tensor(mine.shape, device=mine.device), group).tolist()
        counts, others = [shape[0] for shape in shapes], {tuple(shape[1:]) for shape in shapes if shape[0]}
        if len(others) > 1:
            raise DataError(
                f"rows of different ranks differ in shape: {' and '.join(map(str, sorted(others)))}",
                "to be put together they must be of one: pad sequences to one length",
            )
        padded = mine.new_zeros(max(counts), *(next(iter(others), mine.shape[1:])))
        if len(mine):
            padded[: len(mine)] = mine
        if isinstance(group, dist.ProcessGroup):  # workers of servers count for themselves
            current().moved("all_gather", ranks * padded.nbytes)
        ctx.group, ctx.first, ctx.count, ctx.shape = group, sum(counts[:rank]), len(mine), mine.shape
        every = gather(padded.view(torch.uint8) if padded.dtype == torch.bool else padded, group).view(padded.dtype)
        return torch.cat([part[:count] for part, count in zip(every, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if isinstance(ctx.group, dist.ProcessGroup):
            current().moved("all_reduce", grad.nbytes)
        total = add(grad.contiguous().clone(), ctx.group)
        return total[ctx.first : ctx.first + ctx.count].view(ctx.shape), None
