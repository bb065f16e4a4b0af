"""The ranks along each axis of the mesh.

Axes from outer to inner: pipeline, data, shard, expert, context, branch, tensor. Neighbours along an inner one are
neighbours in rank, and so usually on one machine: the more an axis talks, the further in it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist

from meshfit.plan import DEGREES, Plan
from meshfit.schedule.actions import rank_of, usual_chunks
from meshfit.server.workers import Workers
from meshfit.torch_private import timeout_of

Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The groups that this rank belongs to; None where it is alone."""

    world: Group = None
    pipeline: Group = None
    """Ranks that together hold one copy, layer after layer, and work on the same samples."""
    data: Group = None
    """Ranks that hold the same part of different copies."""
    shard: Group = None
    """Ranks that together hold one copy, and work on different samples."""
    expert: Group = None
    """Ranks that together hold the experts of one copy, and work on different samples."""
    context: Group = None
    """Ranks that work on parts of the same sequences."""
    branch: Group = None
    """Ranks that compute different branches of one copy, on the same samples."""
    tensor: Group = None
    """Ranks that together compute one operation, on the same samples."""
    batch: Group | Workers = None
    """Ranks that hold, or shard, the same part of the model, and work on different samples: data, shard and expert
    at once."""

    shares: Group = None
    """The ranks of ``batch`` in this world: without those of other workers of model servers."""

    terms: Group = None
    """Ranks whose gradients are terms of one sum: those of ``batch``, and of parts of the same sequences."""
    copies: Group = None
    """Ranks that hold the same slices of what is sharded: data, expert and context."""
    alike: Group = None
    """Ranks that hold the same experts, where those are spread: data and shard at once."""

    samples: Group = None
    """Ranks that differ in their samples, or in the layers that they hold: all but those of one operation."""

    rank: int = 0
    """In the world."""
    stage: int = 0
    """Along the pipeline."""
    part: int = 0
    """Which modules this rank holds, among the parts of the model."""
    share: int = 0
    """Which part of a batch this rank takes."""
    has_results: bool = True
    """Whether what the model returns is here, and no other rank's task to tell of."""
    made: tuple[Group, ...] = ()
    """Groups that were made for it, and are none of the world's own."""

    @classmethod
    def of(cls, plan: Plan, rank: int, size: int) -> "Mesh":
        """All ranks call it together."""
        if size == 1:
            return cls()
        degrees = {axis: getattr(plan, axis) for axis in DEGREES}
        places = list(product(*(range(degree) for degree in degrees.values())))  # by rank
        own = dict(zip(degrees, places[rank], strict=True))
        made: list[Group] = []

        def along(*axes: str, apart: bool = False) -> Group:
            """The ranks that differ from this one along ``axes`` alone; ``apart``: in a group that is no other's."""
            if all(degrees[axis] == 1 for axis in axes):
                return None
            if not apart and all(degrees[axis] == 1 for axis in degrees if axis not in axes):
                return dist.group.WORLD
            lines: dict[tuple[int, ...], list[int]] = {}
            for other, place in enumerate(places):
                fixed = tuple(at for axis, at in zip(degrees, place, strict=True) if axis not in axes)
                lines.setdefault(fixed, []).append(other)
            groups = {fixed: _made(ranks) for fixed, ranks in lines.items()}  # all ranks make all of them
            made.append(groups[tuple(at for axis, at in own.items() if axis not in axes)])
            return made[-1]

        last = rank_of(plan.schedule, plan.pipeline, plan.pipeline * usual_chunks(plan.schedule) - 1)
        axes = {axis: along(axis, apart=axis == "expert") for axis in DEGREES}  # see axes/expert/travel.py

        def together(*some: str) -> Group:
            there = [axis for axis in some if axes[axis] is not None]
            return axes[there[0]] if len(there) == 1 and there != ["expert"] else along(*there)

        batch = together("data", "shard", "expert")
        return cls(
            **axes,
            world=dist.group.WORLD,
            batch=batch,
            shares=batch,
            terms=together("data", "shard", "expert", "context") if plan.context > 1 else batch,
            copies=together("data", "expert", "context"),
            alike=together("data", "shard") if plan.expert > 1 else None,
            samples=along("pipeline", "data", "shard", "expert"),
            made=tuple(made),
            rank=rank,
            stage=own["pipeline"],
            part=own["pipeline"] * plan.branch + own["branch"],
            share=(own["data"] * plan.shard + own["shard"]) * plan.expert + own["expert"],
            has_results=own["pipeline"] == last and own["tensor"] == own["branch"] == own["context"] == 0,
        )

    def close(self) -> None:
        """Let go of its groups. All ranks call it together, when nothing is under way."""
        destroy(self.made)


def groups(wanted: Iterable[tuple[int, ...]], *, apart: bool = False) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each set of ranks of the world that this rank names. All ranks call it together, each with its own
    sets: all of them make all groups, in one order. ``apart``: none that is another's too, not even the world's."""
    mine, world = set(wanted), dist.get_world_size()
    every: list[set[tuple[int, ...]]] = [mine] * world
    dist.all_gather_object(every, mine)
    some = sorted(ranks for ranks in set().union(*every) if apart or len(ranks) < world)
    found = {ranks: _made(ranks) for ranks in some}
    return {ranks: found.get(ranks, dist.group.WORLD) for ranks in mine}  # type: ignore[misc]


def _made(ranks: Iterable[int]) -> Group:
    """A group whose collectives may wait as long as the world's."""
    assert dist.group.WORLD is not None
    return dist.new_group(list(ranks), timeout=timeout_of(dist.group.WORLD))  # type: ignore[return-value]


def destroy(made: Iterable[Group]) -> None:
    """Let groups go, but for the world's. All their ranks call it, with groups that they share in the same order."""
    for group in made:
        if dist.is_initialized() and group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
