"""Tensors as one stretch of bytes, laid out alike by all who hold the model.

A parcel lists tensors by dtype, each dtype in one run: so a run is summed, copied or sent as one tensor, and every
tensor is a view into it, aligned, with the strides of its own. ``digest`` tells whether two sides mean the same.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from meshfit.comm.flat import FlatLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """All tensors of one dtype, one after another."""

    names: tuple[str, ...]
    layout: FlatLayout
    start: int
    """In bytes."""

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Parcel:
    """Where each of some tensors is in a buffer of ``bytes`` bytes. What is between them must be zero."""

    runs: tuple[Segment, ...]

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> "Parcel":
        runs: list[Segment] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in named.values()):
            some = {name: tensor for name, tensor in named.items() if tensor.dtype == dtype}
            start = runs[-1].start + runs[-1].bytes if runs else 0
            runs.append(Segment(tuple(some), FlatLayout(list(some.values())), start))
        return cls(tuple(runs))

    @cached_property
    def bytes(self) -> int:
        return sum(run.bytes for run in self.runs)

    @cached_property
    def names(self) -> list[str]:
        return [name for run in self.runs for name in run.names]

    def flats(self, buffer: Tensor) -> list[Tensor]:
        """Each run of ``buffer`` (of bytes) as one tensor of its dtype."""
        return [buffer[run.start : run.start + run.bytes].view(run.dtype) for run in self.runs]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each tensor, by name, as a view of ``buffer``."""
        return {
            name: view
            for run, flat in zip(self.runs, self.flats(buffer), strict=True)
            for name, view in zip(run.names, run.layout.views(flat), strict=True)
        }

    @cached_property
    def digest(self) -> str:
        told = [
            [name, str(run.dtype), shape, stride, at, run.start]
            for run in self.runs
            for name, shape, stride, at in zip(
                run.names, run.layout.shapes, run.layout.strides, run.layout.starts, strict=True
            )
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


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


def balanced(named: Mapping[str, T], servers: int) -> list[dict[str, T]]:
    """Tensors by server, balanced by bytes."""
    names = list(named)
    lots = split([named[name].numel() * named[name].element_size() for name in names], servers)
    return [{names[i]: named[names[i]] for i in lot} for lot in lots]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are. A tied one is there once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def shares(model: nn.Module, servers: int) -> list[dict[str, nn.Parameter]]:
    """The trained parameters by server."""
    return balanced(trained(model), servers)
