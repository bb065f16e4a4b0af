"""The ranks along each axis of the mesh.

Axes from outer to inner: data, shard. Neighbours along the inner one are neighbours in rank, and so usually on one
machine: it is the one that talks most.
"""

from dataclasses import dataclass

import torch.distributed as dist

from meshfit.plan import Plan


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups that this rank belongs to; None where it is alone."""

    world: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    """Ranks that hold the same part of different copies."""
    shard: dist.ProcessGroup | None = None
    """Ranks that together hold one copy."""

    @classmethod
    def of(cls, plan: Plan, rank: int, size: int) -> "Mesh":
        """All ranks call it together."""
        if size == 1:
            return cls()
        whole = dist.group.WORLD
        if plan.shard == 1 or plan.data == 1:
            return cls(whole, whole if plan.shard == 1 else None, whole if plan.data == 1 else None)
        ranks = [[copy * plan.shard + part for part in range(plan.shard)] for copy in range(plan.data)]
        shard = [dist.new_group(each) for each in ranks][rank // plan.shard]
        data = [dist.new_group(list(each)) for each in zip(*ranks, strict=True)][rank % plan.shard]
        return cls(whole, data, shard)  # type: ignore[arg-type]

    @property
    def rank(self) -> int:
        return 0 if self.world is None else dist.get_rank(self.world)
