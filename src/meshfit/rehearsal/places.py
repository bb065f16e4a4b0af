"""Which ranks of a plan run different programs, and what those that run none would have issued.

Ranks differ by what they hold: by stage and branch. Along the other axes all do the same with other samples, rows or
parts, so of these the first and the last along all of them run. What a rank would issue that does not run, is what the
nearest one issued, with the ranks of its own lines in the mesh.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshfit.comm.order_check import Operation, communicator
from meshfit.plan import DEGREES, Plan

MODULES = ("pipeline", "branch")
"""Axes along which ranks hold other modules: all of these ranks run."""

ALIKE = tuple(axis for axis in DEGREES if axis not in MODULES)


@dataclass(frozen=True)
class Places:
    """The ranks of a plan, by their index along each axis."""

    plan: Plan

    @cached_property
    def all(self) -> list[dict[str, int]]:
        """By rank."""
        return self.plan.places

    @cached_property
    def _ranks(self) -> dict[tuple[int, ...], int]:
        return {tuple(place.values()): rank for rank, place in enumerate(self.all)}

    def share(self, rank: int) -> int:
        """Which part of a batch it takes."""
        return self.plan.share_at(self.all[rank])

    def sample(self) -> list[int]:
        """Ranks whose programs may differ."""
        last = {axis: getattr(self.plan, axis) - 1 for axis in ALIKE}
        return sorted({*self.column({}), *self.column(last)})

    def column(self, at: Mapping[str, int]) -> list[int]:
        """The ranks of all stages and branches at one place along the other axes, which is 0 where not said."""
        return [rank for rank, own in enumerate(self.all) if all(own[axis] == at.get(axis, 0) for axis in ALIKE)]

    def stage(self, stage: int, branch: int = 0) -> list[int]:
        """The ranks that hold it."""
        return [rank for rank, at in enumerate(self.all) if (at["pipeline"], at["branch"]) == (stage, branch)]

    def columns(self) -> list[list[int]]:
        """All ranks, by their place along the axes along which they hold the same modules."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self.all):
            found.setdefault(tuple(place[axis] for axis in ALIKE), []).append(rank)
        return list(found.values())

    def nearest(self, rank: int, among: Iterable[int]) -> int | None:
        """Of ``among`` the one that holds the same modules, and differs along the fewest axes."""
        mine = self.all[rank]
        alike = [other for other in among if all(self.all[other][axis] == mine[axis] for axis in MODULES)]
        apart = lambda other: (sum(self.all[other][axis] != i for axis, i in mine.items()), other)
        return min(alike, key=apart, default=None)

    def moved(self, ranks: Sequence[int], source: int, target: int) -> tuple[int, ...]:
        """The ranks that are to ``target`` what ``ranks`` are to ``source``: along axes on which these differ the same
        ones, along the others those of ``target``."""
        goal, differing = self.all[target], self.differing((*ranks, source))
        fixed = {axis: i for axis, i in goal.items() if axis not in differing}
        return tuple(self._ranks[tuple((self.all[rank] | fixed).values())] for rank in ranks)

    def differing(self, ranks: Iterable[int]) -> list[str]:
        """The axes along which they differ."""
        places = [self.all[rank] for rank in ranks]
        return [axis for axis in DEGREES if len({place[axis] for place in places}) > 1]

    def log_of(self, target: int, source: int, log: Iterable[Operation]) -> list[Operation]:
        """What ``target`` issues if it does what ``source`` did."""
        if target == source:
            return list(log)
        known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]] = {}
        found = []
        for operation in log:
            key = (operation.communicator, operation.ranks)
            if key not in known:
                members, _, number = operation.communicator.partition("#")
                group = self.moved([int(r) for r in members.split(",")], source, target)
                known[key] = communicator(group, int(number)), self.moved(operation.ranks, source, target)
            name, ranks = known[key]
            found.append(replace(operation, communicator=name, ranks=ranks))
        return found

    def named(self, rank: int) -> str:
        """A rank, and where it is."""
        at = [f"{axis} {i}" for axis, i in self.all[rank].items() if getattr(self.plan, axis) > 1]
        return f"rank {rank} ({', '.join(at)})" if at else f"rank {rank}"
