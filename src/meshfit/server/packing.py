"""Tensors as one stretch of bytes, laid out alike by all who hold the model.

A parcel lists tensors by dtype, each dtype in one run without gaps: so a run is summed, copied or sent as one tensor,
and every tensor is a view into it, with the strides of its own. ``digest`` tells whether two sides mean the same.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes, between runs


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int
    """Elements before it in its run."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """All tensors of one dtype, one after another."""

    dtype: torch.dtype
    start: int
    """In bytes."""
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Parcel:
    """Where each of some tensors lies in a buffer of ``bytes`` bytes."""

    runs: tuple[Segment, ...]

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> "Parcel":
        kinds: dict[torch.dtype, list[Slot]] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, tensor in named.items():
            at = sizes.get(tensor.dtype, 0)
            stride = tensor.stride() if _dense(tensor) else _contiguous(tuple(tensor.shape))
            slot = Slot(name, tensor.dtype, tuple(tensor.shape), tuple(stride), at)
            kinds.setdefault(tensor.dtype, []).append(slot)
            sizes[tensor.dtype] = at + slot.size
        runs, start = [], 0
        for dtype, slots in kinds.items():
            run = Segment(dtype, start, tuple(slots))
            runs.append(run)
            start += behind(run.bytes)
        return cls(tuple(runs))

    @cached_property
    def bytes(self) -> int:
        return max((run.start + run.bytes for run in self.runs), default=0)

    @cached_property
    def payload(self) -> int:
        """Bytes of the tensors alone."""
        return sum(run.bytes for run in self.runs)

    @cached_property
    def names(self) -> list[str]:
        return [slot.name for run in self.runs for slot in run.slots]

    def flats(self, buffer: Tensor) -> list[Tensor]:
        """Each run of ``buffer`` (of bytes) as one tensor of its dtype."""
        return [buffer[run.start : run.start + run.bytes].view(run.dtype) for run in self.runs]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each tensor, by name, as a view of ``buffer``."""
        return {
            slot.name: flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.at)
            if slot.size
            else flat.new_empty(slot.shape)
            for run, flat in zip(self.runs, self.flats(buffer), strict=True)
            for slot in run.slots
        }

    @cached_property
    def digest(self) -> str:
        told = [[s.name, str(s.dtype), s.shape, s.stride, s.at, run.start] for run in self.runs for s in run.slots]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def behind(size: int) -> int:
    """Where a second parcel begins that follows one of ``size`` bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def split(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of things of ``sizes`` bytes in ``parts`` lots of nearly the same weight, each lot in order.

    The heaviest goes first, always to the lightest lot: at most a third more than the best there is.
    """
    lots: list[list[int]] = [[] for _ in range(parts)]
    weights = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = min(range(parts), key=lambda part: (weights[part], part))
        lots[lightest].append(index)
        weights[lightest] += sizes[index]
    return [sorted(lot) for lot in lots]


T = TypeVar("T", bound=Tensor)


def widely(named: Mapping[str, T], servers: int) -> list[dict[str, T]]:
    """Tensors by server, balanced by bytes."""
    names = list(named)
    lots = split([named[name].numel() * named[name].element_size() for name in names], servers)
    return [{names[i]: named[names[i]] for i in lot} for lot in lots]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are. A tied one is there once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def shares(model: nn.Module, servers: int) -> list[dict[str, nn.Parameter]]:
    """The trained parameters by server."""
    return widely(trained(model), servers)


def _dense(tensor: Tensor) -> bool:
    """Whether it fills a stretch of memory, each element once, in whatever order of dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
