"""The ranks along each axis of the mesh.

Axes from outer to inner: pipeline, data, shard, expert, context, branch, tensor. Neighbours along an inner one are
neighbours in rank, and so usually on one machine: the more an axis communicates, the further in it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from meshfit.comm import group as comm
from meshfit.comm.group import RankGroup, destroy, new_group
from meshfit.plan import DEGREES, Plan
from meshfit.schedule.actions import rank_of, usual_chunks

Group = dist.ProcessGroup | None

SHARES = ("data", "shard", "expert")
"""Axes along which ranks work on different samples."""

TOGETHER = (
    SHARES,
    (*SHARES, "context"),
    ("data", "expert", "context"),
    ("data", "shard", "context"),
    ("pipeline", *SHARES),
    ("shard", "expert", "tensor"),
)
"""Sets of axes over which gradients, losses or metrics are summed, or parameters cut."""

OWN_EXPERT = frozenset({"expert", "all_to_all"})
"""The expert axis again, in a group without gradient traffic: see axes/expert/travel.py."""

SCATTER_SHARD = frozenset({"shard", "reduce_scatter"})
"""The shard axis again, for gradients: weights are gathered over the other group meanwhile."""

SECOND_SUM = frozenset({"all_reduce"})
"""The ranks that sum gradients again: buckets take turns, so that one travels while the next sets out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This rank's place along each axis, and its groups."""

    world: Group = None
    """All ranks; None if there is only one."""
    groups: Mapping[frozenset[str], Group] = field(default_factory=dict)
    """By the axes along which their ranks differ."""
    batch: comm.Group | None = None
    """Ranks that hold, or shard, the same part of the model, and work on different samples; with model servers, those
    of all workers."""
    place: Mapping[str, int] = field(default_factory=dict)
    """This rank's index along each axis."""
    rank: int = 0
    """In the world."""
    part: int = 0
    """Which modules this rank holds, among the parts of the model."""
    share: int = 0
    """Which part of a batch this rank takes."""
    has_results: bool = True
    """Whether this rank reports what the model returns."""
    made: list[Group] = field(default_factory=list)
    """Groups that were created for it, and are not the world's; none once it is closed."""

    @classmethod
    def of(cls, plan: Plan, rank: int, size: int, *, two_sums: bool = False) -> "Mesh":
        """All ranks call it together. ``two_sums``: gradients are summed over two communicators in turn, as on GPUs."""
        if size == 1:
            return cls()
        places = plan.places
        place = places[rank]
        used = frozenset(axis for axis in DEGREES if getattr(plan, axis) > 1)
        made: list[Group] = []

        def along(axes: frozenset[str]) -> Group:
            """The ranks that differ from this one only along ``axes``."""
            fixed = lambda at: tuple(i for axis, i in at.items() if axis not in axes)
            lines: dict[tuple[int, ...], list[int]] = {}
            for other, at in enumerate(places):
                lines.setdefault(fixed(at), []).append(other)
            groups = {line: new_group(ranks) for line, ranks in lines.items()}  # all ranks make all of them
            made.append(groups[fixed(place)])
            return made[-1]

        wanted = dict.fromkeys(used.intersection(axes) for axes in (*([axis] for axis in DEGREES), *TOGETHER))
        groups = {axes: dist.group.WORLD if axes == used else along(axes) for axes in wanted if axes}
        if plan.expert > 1:
            groups[OWN_EXPERT] = along(frozenset({"expert"}))
        if plan.shard > 1:
            groups[SCATTER_SHARD] = along(frozenset({"shard"}))
        elif two_sums and (summing := used.intersection((*SHARES, "context"))):
            groups[SECOND_SUM] = along(summing)
        last = rank_of(plan.schedule, plan.pipeline, plan.pipeline * usual_chunks(plan.schedule) - 1)
        return cls(
            world=dist.group.WORLD,
            groups=groups,
            batch=RankGroup.of(groups.get(used.intersection(SHARES))),
            place=place,
            made=made,
            rank=rank,
            part=place["pipeline"] * plan.branch + place["branch"],
            share=plan.share_at(place),
            has_results=place["pipeline"] == last and place["tensor"] == place["branch"] == place["context"] == 0,
        )

    def over(self, *axes: str) -> Group:
        """The ranks that differ from this one only along ``axes``; None if there is no other."""
        used = frozenset().union(*self.groups)
        return self.groups.get(used.intersection(axes))

    @property
    def stage(self) -> int:
        """Along the pipeline."""
        return self.place.get("pipeline", 0)

    @property
    def shares(self) -> Group:
        """The ranks of ``batch`` in this world: without those of other workers of model servers."""
        return self.over(*SHARES)

    def close(self) -> None:
        """Destroy its groups. All ranks call it together, when no collective is under way."""
        destroy(self.made)
        self.made.clear()
