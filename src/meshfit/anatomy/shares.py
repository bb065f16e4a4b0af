"""Shares of channels: who owns what, and which elements noise on one share has changed. Pure functions."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfit.anatomy.aten import Op, Storage, StridedView, real
from meshfit.anatomy.dataflow import AtenTrace

Ranges = tuple[tuple[int, int], ...]
"""Indices as (start, stop) of each run of them."""

CONTRACTIONS = {  # the two factors among the positional arguments, and the dim of each that is summed over
    "mm": ((0, 1), (1, 0)),
    "addmm": ((1, 1), (2, 0)),
    "bmm": ((0, 2), (1, 1)),
    "baddbmm": ((1, 2), (2, 1)),
    "mv": ((0, 1), (1, 0)),
    "addmv": ((1, 1), (2, 0)),
    "_grouped_mm": ((0, -1), (1, -2)),
    "convolution": ((0, 1), (1, 1)),
}


def cut_into(sizes: Sequence[int], degree: int) -> list[Tensor]:
    """The indices of each rank when every block is cut in ``degree`` equal parts."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [torch.arange(size).view(degree, -1) + start for size, start in zip(sizes, starts, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(degree)]


def divisors(size: int) -> list[int]:
    """In order."""
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})


def as_ranges(index: Iterable[int]) -> Ranges:
    runs: list[list[int]] = []
    for i in index:
        if runs and runs[-1][1] == i:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return tuple((start, stop) for start, stop in runs)


def runs_of(owners: Tensor, degree: int) -> tuple[Ranges, ...]:
    return tuple(as_ranges(owners.eq(rank).nonzero().flatten().tolist()) for rank in range(degree))


def held_alike(shares: Sequence[Ranges], degree: int) -> tuple[Ranges, ...]:
    """For each of ``degree`` ranks its share, where neighbours hold the same one if there are fewer."""
    return tuple(shares[rank * len(shares) // degree] for rank in range(degree))


WIDE = 2**18
"""Elements from which on a matrix gets noise in some of its input channels only."""

SOME = 64
"""So many of them."""


class Noise:
    """Noise on one rank's share of a parameter's channels at a time: put on what was recorded, and taken off again."""

    def __init__(self, trace: AtenTrace, name: str, dim: int, shares: Sequence[Tensor]):
        random = torch.Generator().manual_seed(1)
        value = trace.value_of[name]
        self.tensor = trace.whole[value].on(trace.contents[value])
        self.storage, self.dim = trace.contents[value], dim
        some = self.tensor.flatten()[: 2**16] if self.tensor.is_contiguous() else self.tensor.flatten()
        scale = 0.1 + float(some.std()) if some.numel() > 1 else 1.0
        self.places: list[tuple[Tensor, ...]] = []
        self.before, self.after = [], []
        for share in shares:
            place: list[Any] = [slice(None)] * self.tensor.dim()
            place[dim] = share
            if self._is_wide(trace, value):
                other = self.tensor.shape[1 - dim]
                some = torch.arange(min(SOME, other)) * other // min(SOME, other)
                place = [share[:, None], some] if dim == 0 else [some[:, None], share]
            before = self.tensor[tuple(place)]
            noise = (torch.rand(before.shape, generator=random, dtype=torch.float64) + 0.5) * scale
            self.places.append(tuple(place))
            self.before.append(before)
            self.after.append(before + noise.to(before.dtype))

    def _is_wide(self, trace: AtenTrace, value: int) -> bool:
        """Whether the parameter is a large matrix that is used in products only."""
        if self.tensor.dim() != 2 or self.tensor.numel() < WIDE:
            return False
        return all(factors_of(trace.ops[i]) for i in trace.users[value])

    def put(self, rank: int) -> Storage:
        self.tensor[self.places[rank]] = self.after[rank]
        return self.storage

    def take(self, rank: int) -> None:
        self.tensor[self.places[rank]] = self.before[rank]


def overlapping(masks: Sequence[Tensor]) -> bool:
    return bool((torch.stack(list(masks)).sum(0) > 1).any())


def is_blunt(trace: AtenTrace, op: Op, value: int, reads: Collection[int]) -> bool:
    """Whether ``value`` may mix shares and not show it: numbers of places, or bits that sum up several elements."""
    whole = trace.whole[value]
    if whole.dtype != torch.bool:
        return not real(whole.dtype)
    return math.prod(whole.size) < max(math.prod(w.size) for w in op.reads if w.value in reads)


def in_common(supports: Sequence[Tensor]) -> bool:
    """Whether all that is read, is read by every rank, at least in part."""
    return bool(torch.stack(list(supports)).all(0).any())


def owners_of(masks: Iterable[Tensor]) -> tuple[int, Tensor] | None:
    """The dim along which masks part a tensor, and the rank of each index; -2 for an index in no mask."""
    stack = torch.stack(list(masks))
    for dim in range(stack.dim() - 1):
        each = stack.movedim(dim + 1, 1).reshape(len(stack), stack.shape[dim + 1], -1).any(2)
        if bool((each.sum(0) <= 1).all()):
            return dim, torch.where(each.any(0), each.int().argmax(0), -2)
    return None


def factors_of(op: Op) -> tuple[tuple[StridedView, int], tuple[StridedView, int]] | None:
    """The two factors of a product, each with the dim that is summed over; None if it is no plain product."""
    if op.name not in CONTRACTIONS:
        return None
    arguments = op.arguments
    (one, one_dim), (two, two_dim) = CONTRACTIONS[op.name]
    if op.name == "convolution":
        if arguments[8] != 1:
            return None
        two_dim = 0 if arguments[6] else 1
    return (arguments[one], one_dim), (arguments[two], two_dim)


def filled_up(owners: Tensor, degree: int) -> Tensor | None:
    """Owners with channels that are always zero given to whom an even cut would give them."""
    if bool((owners == -1).any()):
        return None
    if bool((owners >= 0).all()):
        return owners
    even = torch.arange(len(owners)) * degree // len(owners)
    known = owners >= 0
    return even if torch.equal(owners[known], even[known]) else None


def coarser(owners: Tensor, times: int) -> Tensor:
    """Owners where so many ranks count as one."""
    return torch.where(owners >= 0, owners // times, owners)


def same_owners(one: Tensor, two: Tensor) -> bool:
    return not bool(((one >= 0) & (two >= 0) & (one != two)).any())
