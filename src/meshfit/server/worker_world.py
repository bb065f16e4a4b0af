"""Worlds of workers: ranks that are one worker of model servers have a world of their own.

Worker i of groups of n is ranks i·n to i·n + n - 1. They talk to other workers where BatchNorm is over the whole batch,
and where gradients are compared; for all else the worker group is the world.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.torch_private.groups import become_world

Group = dist.ProcessGroup | None


def own_world(plan: Plan, world: World, *, timeout: float) -> tuple[World, Group, Group]:
    """The world of this rank's worker, which may wait for others ``timeout`` seconds; the ranks in its place in all
    workers, and those with which it shares a batch where that reaches beyond its own. All ranks call it together, once.
    """
    size = plan.worker_size
    own = World(world.rank % size, size, world.device, world.folder)
    if plan.data == 1 or not dist.is_initialized():
        return own, None, None
    if size == 1:
        return own, dist.group.WORLD, dist.group.WORLD if plan.joins_batchnorms else None

    limit = timedelta(seconds=timeout)

    def line(key: Callable[[int], object]) -> dist.ProcessGroup:
        """Ranks with the same key; all ranks make all such groups."""
        lines: dict[object, list[int]] = {}
        for rank in range(world.size):
            lines.setdefault(key(rank), []).append(rank)
        made = {each: dist.new_group(ranks, timeout=limit) for each, ranks in lines.items()}
        return made[key(world.rank)]  # type: ignore[return-value]

    peers = line(lambda rank: rank % size)
    batch: Group = peers if plan.in_step else None
    if plan.in_step and plan.shares > plan.data:
        places = plan.worker.places
        same = lambda place: tuple(at for axis, at in place.items() if axis not in ("shard", "expert"))
        batch = line(lambda rank: same(places[rank % size]))
    own_group = line(lambda rank: rank // size)
    become_world(own_group, peers, *([batch] if batch not in (None, peers) else []))
    return own, peers, batch
