"""The ranks along each axis of the mesh.

Axes from outer to inner: data, shard, tensor. Neighbours along an inner one are neighbours in rank, and so usually on
one machine: the more an axis talks, the further in it is.
"""

from dataclasses import dataclass
from itertools import product

import torch.distributed as dist

from meshfit.plan import DEGREES, Plan

Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The groups that this rank belongs to; None where it is alone."""

    world: Group = None
    data: Group = None
    """Ranks that hold the same part of different copies."""
    shard: Group = None
    """Ranks that together hold one copy, and work on different samples."""
    tensor: Group = None
    """Ranks that together compute one operation, on the same samples."""
    batch: Group = None
    """Ranks that hold, or shard, the same part of the model, and work on different samples: data and shard at once."""

    share: int = 0
    """Which part of a batch this rank takes."""
    rank: int = 0
    """In the world."""
    first: bool = True
    """Whether it is the first of those that work on the same samples."""

    @classmethod
    def of(cls, plan: Plan, rank: int, size: int) -> "Mesh":
        """All ranks call it together."""
        if size == 1:
            return cls()
        degrees = {axis: getattr(plan, axis) for axis in DEGREES}
        places = list(product(*(range(degree) for degree in degrees.values())))  # by rank
        own = dict(zip(degrees, places[rank], strict=True))

        def along(*axes: str) -> Group:
            """The ranks that differ from this one along ``axes`` alone."""
            if all(degrees[axis] == 1 for axis in axes):
                return None
            if all(degrees[axis] == 1 for axis in degrees if axis not in axes):
                return dist.group.WORLD
            lines: dict[tuple[int, ...], list[int]] = {}
            for other, place in enumerate(places):
                fixed = tuple(at for axis, at in zip(degrees, place, strict=True) if axis not in axes)
                lines.setdefault(fixed, []).append(other)
            groups = {fixed: dist.new_group(ranks) for fixed, ranks in lines.items()}  # all ranks make all of them
            return groups[tuple(at for axis, at in own.items() if axis not in axes)]  # type: ignore[return-value]

        data, shard, tensor = along("data"), along("shard"), along("tensor")
        batch = data if shard is None else shard if data is None else along("data", "shard")
        return cls(
            world=dist.group.WORLD,
            data=data,
            shard=shard,
            tensor=tensor,
            batch=batch,
            share=own["data"] * plan.shard + own["shard"],
            rank=rank,
            first=own["tensor"] == 0,
        )
