"""Which positions of a dim each rank has. Plain values."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class SplitDim:
    """How a dim is cut: seen as (outer, positions, inner), of which each rank has a range of positions.

    Samples and positions that were flattened into one dim are ``outer`` and positions: a rank then has some of each.
    """

    dim: int
    ends: tuple[int, ...]
    """Where the ranges end, from 0 on: rank ``r`` has ``ends[r]`` to ``ends[r + 1]``."""

    outer: int = 1
    inner: int = 1

    @staticmethod
    def even(dim: int, length: int, ranks: int) -> "SplitDim":
        return SplitDim(dim, tuple(length * r // ranks for r in range(ranks + 1)))

    @property
    def length(self) -> int:
        return self.ends[-1]

    @property
    def plain(self) -> bool:
        """Whether the dim is one of positions alone."""
        return self.outer == self.inner == 1

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.ends, self.ends[1:], strict=False))

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return self.outer * self.length * self.inner

    def size_of(self, rank: int) -> int:
        return self.outer * self.counts[rank] * self.inner

    def at(self, dim: int) -> "SplitDim":
        """The same cut of another dim."""
        return replace(self, dim=dim)

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """The rank's part of ``whole``."""
        start, count = self.ends[rank], self.counts[rank]
        if self.plain:
            return whole.narrow(self.dim, start, count)
        apart = whole.unflatten(self.dim, (self.outer, self.length, self.inner))
        return apart.narrow(self.dim + 1, start, count).flatten(self.dim, self.dim + 2)

    def local(self, shape: tuple[int, ...], rank: int) -> list[int]:
        """What ``shape``, of a whole that is cut like this, is on a rank."""
        return [self.size_of(rank) if dim == self.dim else size for dim, size in enumerate(shape)]

    def through(self, old: tuple[int, ...], new: tuple[int, ...]) -> "SplitDim | None":
        """The cut of what is ``old`` seen as ``new``, element after element; None if its positions come apart."""
        before, after = prod(old[: self.dim]) * self.outer, self.inner * prod(old[self.dim + 1 :])
        for dim, size in enumerate(new):
            ahead, behind = prod(new[:dim]), prod(new[dim + 1 :])
            if before % ahead or after % behind:
                continue
            found = SplitDim(dim, self.ends, before // ahead, after // behind)
            if found.size == size:
                return found
        return None
