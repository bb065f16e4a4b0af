"""Shares of channels: who owns what, and which elements noise on one share has changed. Pure functions."""

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from meshfit.anatomy.aten import AtenTrace, Op, Storage, Window, real

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


def cut_into(sizes: Sequence[int], ways: int) -> list[Tensor]:
    """The indices of each rank when every block is cut in ``ways`` equal parts."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [torch.arange(size).view(ways, -1) + start for size, start in zip(sizes, starts, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(ways)]


def as_ranges(index: Iterable[int]) -> Ranges:
    runs: list[list[int]] = []
    for i in index:
        if runs and runs[-1][1] == i:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return tuple((start, stop) for start, stop in runs)


def runs_of(owners: Tensor, ways: int) -> tuple[Ranges, ...]:
    return tuple(as_ranges(owners.eq(rank).nonzero().flatten().tolist()) for rank in range(ways))


def noised(trace: AtenTrace, name: str, dim: int, shares: Sequence[Tensor]) -> list[Storage]:
    random = torch.Generator().manual_seed(1)
    value = trace.value_of[name]
    window, recorded = trace.whole[value], trace.elements(value)
    scale = 0.1 + float(recorded.std()) if recorded.numel() > 1 else 1.0
    noised = []
    for share in shares:
        storage = trace.contents[value].clone()
        tensor = window.on(storage)
        size = (*tensor.shape[:dim], len(share), *tensor.shape[dim + 1 :])
        noise = (torch.rand(size, generator=random, dtype=torch.float64) + 0.5) * scale
        tensor.index_add_(dim, share, noise.to(tensor.dtype))
        noised.append(storage)
    return noised


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


def factors_of(op: Op) -> tuple[tuple[Window, int], tuple[Window, int]] | None:
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


def filled_up(owners: Tensor, ways: int) -> Tensor | None:
    """Owners with channels that are always zero given to whom an even cut would give them."""
    if bool((owners == -1).any()):
        return None
    if bool((owners >= 0).all()):
        return owners
    even = torch.arange(len(owners)) * ways // len(owners)
    known = owners >= 0
    return even if torch.equal(owners[known], even[known]) else None


def same_owners(one: Tensor, two: Tensor) -> bool:
    return not bool(((one >= 0) & (two >= 0) & (one != two)).any())


def uses_of(trace: AtenTrace, value: int) -> int:
    return len(trace.users.get(value, ()))


def is_uniform(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[:1]).all())
