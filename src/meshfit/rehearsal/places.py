"""Which ranks of a plan run different programs, and what those that run none would have issued.

Ranks differ by what they hold: by stage and branch. Along the other axes all do the same with other samples, rows or
parts, so of these the first and the last along all of them run. What a rank would issue that does not run, is what the
nearest one issued, with the ranks of its own lines in the mesh.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from meshfit.comm.order_check import Operation, communicator
from meshfit.plan import DEGREES, Plan

MODULES = ("pipeline", "branch")
"""Axes along which ranks hold other modules: all of these ranks run."""

Place = tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """The ranks of a plan, by their index along each axis, as ``axes.mesh`` has them."""

    plan: Plan

    @cached_property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self.plan, axis) for axis in DEGREES}

    @cached_property
    def all(self) -> list[Place]:
        """By rank."""
        return list(product(*(range(degree) for degree in self.degrees.values())))

    @cached_property
    def ranks(self) -> dict[Place, int]:
        return {place: rank for rank, place in enumerate(self.all)}

    @cached_property
    def _named(self) -> list[dict[str, int]]:
        return [dict(zip(self.degrees, place, strict=True)) for place in self.all]

    def of(self, rank: int) -> dict[str, int]:
        """Its index along each axis."""
        return self._named[rank]

    def share(self, rank: int) -> int:
        """Which part of a batch it takes."""
        at = self.of(rank)
        return (at["data"] * self.plan.shard + at["shard"]) * self.plan.expert + at["expert"]

    def sample(self) -> list[int]:
        """Ranks whose programs may differ."""
        last = {axis: degree - 1 for axis, degree in self.degrees.items() if axis not in MODULES}
        return sorted({*self.column({}), *self.column(last)})

    def column(self, at: dict[str, int]) -> list[int]:
        """The ranks of all stages and branches at one place along the other axes, which is 0 where not said."""
        own = [range(self.degrees[axis]) if axis in MODULES else [at.get(axis, 0)] for axis in self.degrees]
        return [self.ranks[place] for place in product(*own)]

    def stage(self, stage: int, branch: int = 0) -> list[int]:
        """The ranks that hold it."""
        at = {"pipeline": stage, "branch": branch}
        return [rank for rank, place in enumerate(self._named) if all(place[axis] == i for axis, i in at.items())]

    def columns(self) -> list[list[int]]:
        """All ranks, by their place along the axes along which they hold the same modules."""
        free = [axis for axis in self.degrees if axis not in MODULES]
        return [
            self.column(dict(zip(free, at, strict=True))) for at in product(*(range(self.degrees[a]) for a in free))
        ]

    def nearest(self, rank: int, among: Iterable[int]) -> int | None:
        """Of ``among`` the one that holds the same modules, and differs along the fewest axes."""
        mine, fixed = self.all[rank], [i for i, axis in enumerate(self.degrees) if axis in MODULES]
        alike = [other for other in among if all(self.all[other][i] == mine[i] for i in fixed)]
        apart = lambda other: (sum(a != b for a, b in zip(self.all[other], mine, strict=True)), other)
        return min(alike, key=apart, default=None)

    def moved(self, ranks: Sequence[int], source: int, target: int) -> tuple[int, ...]:
        """The ranks that are to ``target`` what ``ranks`` are to ``source``: along axes on which these differ the same
        ones, along the others those of ``target``."""
        places = [self.all[rank] for rank in ranks]
        fixed = [len(set(along)) == 1 and along[0] == own for along, own in self._along(places, source)]
        goal = self.all[target]
        return tuple(
            self.ranks[tuple(own if same else i for i, own, same in zip(place, goal, fixed, strict=True))]
            for place in places
        )

    def _along(self, places: Sequence[Place], source: int) -> list[tuple[tuple[int, ...], int]]:
        return list(zip(zip(*places, strict=True), self.all[source], strict=True))

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

    def axes_of(self, ranks: Sequence[int]) -> str:
        """Along which axes they differ, in words."""
        along = zip(self.degrees, zip(*(self.all[rank] for rank in ranks), strict=True), strict=True)
        return " and ".join(axis for axis, at in along if len(set(at)) > 1)

    def named(self, rank: int) -> str:
        """A rank, and where it is."""
        at = [f"{axis} {i}" for axis, i in self.of(rank).items() if self.degrees[axis] > 1]
        return f"rank {rank} ({', '.join(at)})" if at else f"rank {rank}"
