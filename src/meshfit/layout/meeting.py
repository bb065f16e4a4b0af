"""What ranks tell each other in the middle of a forward or backward: over a process group, or through a server."""

import torch.distributed as dist
from torch import Tensor

from meshfit.events import current
from meshfit.exchange.serving.meeting import Workers
from meshfit.torch_compat import all_gather_single

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
