"""What a tensor plan says: regions of the model, each cut over the ranks of a tensor group. Plain values.

A region is the inside of one module. Between ``enters`` and ``leaves`` each rank computes its share of the channels
from its share of the weights; outside, all ranks compute the same. A layer whose output is gathered is a region of its
own: it is entered, and ``gathers`` what it returns.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshfit.anatomy.shares import Ranges
from meshfit.anatomy.trace import Trace
from meshfit.comm.group import Group, Traffic

VOCABULARY = ("embedding", "head", "tied")
"""Kinds of regions that are cut along the vocabulary: their traffic is that of a whole forward."""

SEQUENCE = -2
"""The dim of tokens, of which sequence=split gives each rank some between regions."""


def even_ranges(size: int, degree: int) -> tuple[Ranges, ...]:
    """By rank, its share of ``size`` indices."""
    return tuple(((rank * size // degree, (rank + 1) * size // degree),) for rank in range(degree))


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter or buffer is cut."""

    name: str
    """Within the module of the region."""

    dim: int
    ranges: tuple[Ranges, ...]
    """For each rank, the indices of ``dim`` that it holds: those of no other, or the same as some others."""

    @property
    def copies(self) -> int:
        """How many ranks hold each share. If more than one, each has part of its gradient."""
        held = [ranges for ranges in self.ranges if ranges]
        return len(held) // len(set(held))

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold what ``rank`` holds, itself among them."""
        return tuple(other for other, ranges in enumerate(self.ranges) if ranges == self.ranges[rank])

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return sum(stop - start for ranges in dict.fromkeys(self.ranges) for start, stop in ranges)

    @property
    def own(self) -> int:
        """Of a rank's share of it."""
        return sum(stop - start for start, stop in self.ranges[0])

    def index(self, rank: int) -> Tensor:
        return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in self.ranges[rank])])

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """The rank's share of ``tensor``: a view, where that is possible."""
        if len(self.ranges[rank]) == 1:
            ((start, stop),) = self.ranges[rank]
            return tensor.narrow(self.dim, start, stop - start)
        return tensor.index_select(self.dim, self.index(rank).to(tensor.device))

    def of(self, tensor: Tensor, rank: int) -> Tensor:
        """The same in memory of its own."""
        share = self.part(tensor, rank)
        return share.clone(memory_format=torch.contiguous_format) if len(self.ranges[rank]) == 1 else share

    def whole(self, part: Tensor, group: Group) -> Tensor:
        """What the parts of all ranks make together: gathered where they are of one size, else summed. All call it."""
        size = list(part.shape)
        size[self.dim] = self.size
        whole = part.new_zeros(size)
        indices = [self.index(rank).to(whole.device) for rank in range(group.size)]
        if len({len(index) for index in indices}) == 1:
            for index, each in zip(indices, group.all_gather(part), strict=True):
                whole.index_copy_(self.dim, index, each)
            return whole
        if self.ranges.index(self.ranges[group.rank]) == group.rank:
            whole.index_copy_(self.dim, indices[group.rank], part)
        return group.all_reduce_(whole.view(torch.uint8) if whole.dtype == torch.bool else whole).view(whole.dtype)


@dataclass(frozen=True, slots=True)
class Leave:
    """A module whose output is the rank's part of a sum."""

    module: str
    bias: str = ""
    """The parameter that the module would add to it: left out, and added once, after the sum."""

    dim: int = -1
    """The dim of the output that the bias lies along."""

    rows: bool = False
    """Each rank goes on with its rows of the sum."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A module whose code multiplies with weights of its own, which no layer holds: see ``border.Products``."""

    module: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """An attribute that says how many channels, groups or heads there are: what it is on a rank."""

    module: str
    attribute: str
    """ "heads", or "config.heads" for one of an object that the module holds."""

    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Paths of modules and names of parameters are within ``module``; "" is the module itself."""

    module: str
    kind: str
    """ "attention", "mlp", "conv", "experts", "" as found; "gather" for a layer whose output is gathered; "embedding",
    "head" and, for one weight that is both, "tied" for those cut along the vocabulary; "rows" for what lies between."""

    cuts: tuple[Cut, ...]
    enters: tuple[str, ...] = ()
    """Modules that take inputs which every rank has whole, and return the rank's share."""

    leaves: tuple[Leave, ...] = ()
    gathers: tuple[tuple[str, int], ...] = ()
    """Modules that return the rank's share of a dim, and the dim: it is gathered."""

    lookups: tuple[str, ...] = ()
    """Embeddings that are cut by rows: each rank looks up those it holds, and the sum over ranks has all."""

    slices: tuple[str, ...] = ()
    """Modules that return the rank's share of the last dim, and leave it at that: see sliced.py."""

    rows: tuple[str, ...] = ()
    """Modules between regions, of which each rank computes its own rows."""

    raw: tuple[Raw, ...] = ()
    sources: tuple[str, ...] = ()
    """Modules inside that return a whole, of which each rank goes on to read something else."""

    partial: tuple[str, ...] = ()
    """Parameters that stay whole, and of whose gradient each rank has a part."""

    patches: tuple[Patch, ...] = ()
    heads: tuple[str, ...] = ()
    """nn.MultiheadAttention, whose forward is replaced: torch's asserts that it has all heads."""

    draws: bool = False
    """Random numbers are drawn inside: other ones on each rank."""

    traffic: tuple[Traffic, ...] = ()
    """Of one call of the module, on the batch that the plan was made with."""

    calls: int = 1
    """Of the module, in one forward."""

    @property
    def inner(self) -> tuple[str, ...]:
        """Full paths of modules at whose own calls it acts, wherever in ``module`` they are."""
        return tuple(joined(self.module, path) for path in (*self.lookups, *self.slices, *self.rows))

    def renamed(self, module: str, name: Callable[[str], str]) -> "Region":
        """As a region of ``module``, where a path or name is ``name`` of what it is here."""

        def every(names: Collection[str]) -> tuple[str, ...]:
            return tuple(map(name, names))

        return replace(
            self,
            module=module,
            cuts=tuple(replace(each, name=name(each.name)) for each in self.cuts),
            enters=every(self.enters),
            leaves=tuple(
                replace(each, module=name(each.module), bias=each.bias and name(each.bias)) for each in self.leaves
            ),
            gathers=tuple((name(path), dim) for path, dim in self.gathers),
            lookups=every(self.lookups),
            slices=every(self.slices),
            rows=every(self.rows),
            raw=tuple(Raw(name(each.module), every(each.columns), every(each.rows)) for each in self.raw),
            sources=every(self.sources),
            partial=every(self.partial),
            patches=tuple(replace(each, module=name(each.module)) for each in self.patches),
            heads=every(self.heads),
        )

    def part(self, modules: Container[str], tensors: Container[str]) -> "Region | None":
        """What of it lies in a part of the model with ``modules`` and ``tensors``, if anything."""
        if not self.inner:
            return self if self.module in modules else None

        def held(names: Collection[str], by: Container[str] = modules) -> tuple[str, ...]:
            return tuple(name for name in names if joined(self.module, name) in by)

        own = replace(
            self,
            cuts=tuple(each for each in self.cuts if joined(self.module, each.name) in tensors),
            enters=held(self.enters),
            lookups=held(self.lookups),
            slices=held(self.slices),
            rows=held(self.rows),
            partial=held(self.partial, tensors),
            patches=tuple(each for each in self.patches if joined(self.module, each.module) in modules),
        )
        return own if own.inner else None


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model is spread over ``degree`` ranks, so that together they compute what one would."""

    degree: int
    regions: tuple[Region, ...] = ()
    notes: tuple[str, ...] = ()
    """What was refused, and why."""

    why: dict[str, str] = field(default_factory=dict)
    """Of each parameter that stays whole, what stood against cutting it."""

    samples: int = 0
    """That the model was given when the plan was made."""

    elements: dict[str, int] = field(default_factory=dict)
    """Of each parameter."""

    traffic: tuple[Traffic, ...] = ()
    """Of a whole forward and backward, where that is not what regions say one by one: rows are cut between them."""

    @property
    def collectives(self) -> list[tuple[int, Traffic]]:
        """Of a forward and backward: how often, and what."""
        if self.traffic:
            return [(1, each) for each in self.traffic]
        return [(region.calls, each) for region in self.regions for each in region.traffic]

    @property
    def cuts(self) -> dict[str, Cut]:
        """By the name of the parameter or buffer."""
        return {joined(region.module, cut.name): cut for region in self.regions for cut in region.cuts}

    @property
    def partial(self) -> tuple[str, ...]:
        return tuple(joined(region.module, name) for region in self.regions for name in region.partial)

    def only(self, trace: Trace) -> "TensorPlan":
        """What it says of the modules that ``trace`` calls: those of one rank's part of the model."""
        names, times = trace.parameters, Counter(event.name for event in trace.events if event.kind == "module")
        inside = lambda region: any(joined(region.module, each.name) in names for each in region.cuts) or region.rows
        called = lambda region: region.calls if region.kind in VOCABULARY else times[region.module] or region.calls
        regions = tuple(replace(region, calls=called(region)) for region in self.regions if inside(region))
        elements = {name: size for name, size in self.elements.items() if name in names}
        return replace(self, regions=regions, elements=elements)

    def part(self, modules: Container[str], tensors: Container[str]) -> "TensorPlan":
        """What of it lies in one rank's part of the model, with ``modules`` and ``tensors``."""
        own = (region.part(modules, tensors) for region in self.regions)
        return replace(self, regions=tuple(region for region in own if region is not None))

    def inside_modules(self) -> "TensorPlan":
        """Without what is in the model's own code, which no rank runs as a whole where modules are spread."""
        return replace(self, regions=tuple(r for r in self.regions if r.module or r.inner))

    @property
    def copied(self) -> tuple[str, ...]:
        """Parameters and buffers of which several ranks hold the same share."""
        return tuple(name for name, each in self.cuts.items() if each.copies > 1)

    @property
    def shared(self) -> tuple[str, ...]:
        """Parameters of whose gradient several ranks have a part."""
        return tuple(name for name in (*self.partial, *self.copied) if name in self.elements)

    @property
    def share(self) -> float:
        """Of the parameters, how many are cut."""
        cuts = self.cuts
        return sum(n for name, n in self.elements.items() if name in cuts) / max(sum(self.elements.values()), 1)

    def explain(self) -> list[str]:
        """A few lines for people, however deep the model: what is cut and how, what is whole and why."""
        from meshfit.axes.tensor.explain import explain

        return explain(self)

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for region in self.regions:
            kinds[region.kind or "other"] = kinds.get(region.kind or "other", 0) + 1
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing to split"
        return "\n".join((f"tensor={self.degree}: {found}", *(f"  {note}" for note in self.notes)))


def joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module and name else module or name
