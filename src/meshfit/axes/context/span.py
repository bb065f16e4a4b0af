"""Which positions of a dim each rank has. Plain values."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class SplitDim:
    """How a dim is cut: seen as (outer, positions, inner), of which each rank has a chunk of positions, or two.

    Samples and positions that were flattened into one dim are ``outer`` and positions: a rank then has some of each.
    """

    dim: int
    ends: tuple[int, ...]
    """Where the chunks end, from 0 on: chunk ``c`` is ``ends[c]`` to ``ends[c + 1]``."""

    outer: int = 1
    inner: int = 1
    zigzag: bool = False
    """Rank ``r`` of ``n`` has chunks ``r`` and ``2n - 1 - r``: so causal attention gives all ranks the same work. Else
    it has chunk ``r``."""

    attention: str = "auto"
    """How positions meet in attention: "gather", "ulysses" or "auto"; see attend.py."""

    @staticmethod
    def even(dim: int, length: int, ranks: int, *, zigzag: bool = False, attention: str = "auto") -> "SplitDim":
        """Ranks have the same number of positions, up to one."""
        ends = [length * r // ranks for r in range(ranks + 1)]
        if zigzag:
            counts = [stop - start for start, stop in pairwise(ends)]
            chunks = [count // 2 for count in counts] + [count - count // 2 for count in reversed(counts)]
            ends = [0, *accumulate(chunks)]
        return SplitDim(dim, tuple(ends), zigzag=zigzag, attention=attention)

    def chunks(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Where those of a rank begin and end, in order."""
        last = len(self.ends) - 2
        found = (rank, last - rank) if self.zigzag else (rank,)
        return tuple((self.ends[c], self.ends[c + 1]) for c in found)

    @cached_property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """Of each chunk, in the order of the whole: the rank that has it, where it begins there, and its length."""
        found = []
        for rank in range(len(self.counts)):
            begin = 0
            for start, stop in self.chunks(rank):
                found.append((start, rank, begin, stop - start))
                begin += stop - start
        return tuple(place for _, *place in sorted(found) if place[2])  # type: ignore[misc]

    @property
    def length(self) -> int:
        return self.ends[-1]

    @property
    def plain(self) -> bool:
        """Whether the dim is one of positions alone."""
        return self.outer == self.inner == 1

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Positions of each rank."""
        ranks = (len(self.ends) - 1) // (2 if self.zigzag else 1)
        return tuple(sum(stop - start for start, stop in self.chunks(rank)) for rank in range(ranks))

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
        dim = self.dim if self.plain else self.dim + 1
        apart = whole if self.plain else whole.unflatten(self.dim, (self.outer, self.length, self.inner))
        parts = [apart.narrow(dim, start, stop - start) for start, stop in self.chunks(rank)]
        own = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return own if self.plain else own.flatten(self.dim, self.dim + 2)

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
            found = replace(self, dim=dim, outer=before // ahead, inner=after // behind)
            if found.size == size:
                return found
        return None
