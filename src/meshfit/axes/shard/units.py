"""Which parameters are gathered together, and by which calls: the units of sharding, from a trace.

A unit is some parameters and its *entrances*: the modules whose calls use them. It is there while one of those calls
runs. Usually a unit is a block and its own entrance; what the model's own code uses, or what the trace does not show,
belongs to the whole (entrance ""). A parameter that two blocks use (an embedding tied to the head) is a unit with two
entrances.

[Note: the unit that stays]
The largest unit of several entrances is gathered once a forward, and stays for all of it: most is held when the head
runs, which needs it anyway. Its gradient is summed over its uses and scattered once. All others are there for one use
at a time: a model may use each of its blocks twice.

Ranks gather fastest where all gather the same units in the same order. So inside a module that looks at a tensor's
value, or at a random number, to decide what to run, nothing is an entrance: the parameters in it come with that module.
Where a trace does not show it, ranks serve each other (lockstep.py).
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from meshfit.anatomy.blocks import Module, blocks, bytes_of, modules
from meshfit.anatomy.copies import twin
from meshfit.anatomy.cost import Meter
from meshfit.anatomy.record import SHARE as ATOM
from meshfit.anatomy.record import TraceError, record
from meshfit.anatomy.trace import Event, Parameter, Trace
from meshfit.axes import bf16_compute
from meshfit.plan import Plan

SHARE = 1 / 8
"""Of all parameters: a module that holds no more, or no more than the largest block that repeats, is one unit."""

SMALL = 1 / 8
"""Of the largest unit: the smallest ones that together hold no more than this are not worth a gather of their own."""

VARYING = ("inputs", "random", "activations")
"""What differs between ranks: a decision by one of these may come out differently on each."""

ROUNDED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Modules whose forward under autocast uses their parameters rounded."""


@dataclass(frozen=True, slots=True)
class Unit:
    entrances: tuple[str, ...]
    """Paths of modules, in the order of their first calls; ("",): the whole."""

    parameters: tuple[str, ...]
    """By the names they are first known by."""

    rounded: frozenset[str] = frozenset()
    """Those that are used by modules alone which autocast lets round their parameters; under ``bf16-compute`` all that
    the model computes with in bf16."""

    rows: tuple[frozenset[str], ...] = ()
    """Parameters that share a flat buffer with no others, and so are cut in the same places on every rank that holds
    them. Those in none of these sets share buffers freely."""

    stays: bool = False
    """From its first use in a forward to its last: see the note."""

    def row(self, name: str) -> frozenset[str]:
        """The parameters that ``name`` must share its flat buffer with; empty: any."""
        return next((row for row in self.rows if name in row), frozenset())


class Whole(nn.Module):
    """A model and its objective as one module, so that a trace shows all that a training step calls."""

    def __init__(self, model: nn.Module, objective: Callable[[nn.Module, Any], Any]):
        super().__init__()
        self.model, self._objective = model, objective

    def forward(self, batch: Any) -> Any:
        return self._objective(self.model, batch)


def traced(
    model: nn.Module,
    objective: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    device: str = "cuda",
    plan: Plan | None = None,
    operations: bool = False,
    share: float = ATOM,
) -> Trace | TraceError:
    """What a training step calls and what that costs on ``device``, in the precision of ``plan``; or why that cannot be
    told. ``operations``: they are listed, too; ``share``: see ``record``."""
    plan = plan or Plan()
    computes = plan.precision == bf16_compute.WORD
    shared = plan.cuts or plan.tensor > 1  # whose layers take one rounded copy of an input
    rounds = "" if plan.precision == "fp32" or computes else "shared" if shared else "each"
    precision = plan.precision.removesuffix("-true").removesuffix("-compute") if operations else ""
    meter = partial(Meter, target=device, rounds=rounds, precision=precision)
    looked_at = bf16_compute.as_computed(twin(model, meta=True)) if computes else model
    try:
        trace = _relative(record(Whole(looked_at, objective), (batch,), meter=meter, share=share).trace)
    except TraceError as error:
        return error
    if computes:
        trace = bf16_compute.as_held(trace, bf16_compute.rounded(model))
    return replace(trace, blocks=blocks(trace))


def _relative(trace: Trace) -> Trace:
    """The trace of a ``Whole`` with every path as the model itself knows it."""

    def path(name: str) -> str:
        return "" if name == "model" else name.removeprefix("model.")

    def paths(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(path, names))

    def held(parameters: dict[str, Parameter]) -> dict[str, Parameter]:
        return {path(name): replace(p, name=path(name)) for name, p in parameters.items()}

    return replace(
        trace,
        events=tuple(
            replace(
                event,
                name=path(event.name) if event.kind == "module" else event.name,
                inside=path(event.inside),
                parameters=paths(event.parameters),
                buffers=paths(event.buffers),
                changes=paths(event.changes),
                within=paths(event.within),
            )
            for event in trace.events
        ),
        parameters=held(trace.parameters),
        buffers=held(trace.buffers),
        ties={path(name): path(first) for name, first in trace.ties.items()},
        dynamic=tuple(replace(place, module=path(place.module)) for place in trace.dynamic),
        kinds={path(name): kind for name, kind in trace.kinds.items() if name},
    )


def units(trace: Trace, names: tuple[str, ...]) -> tuple[Unit, ...]:
    """The units of a model whose parameters are ``names``, in the order of their first use."""
    may_enter = _may_enter(trace)
    dynamic = {place.module for place in trace.dynamic if place.depends_on in VARYING}
    found: dict[str, list[str]] = {}
    aliases: dict[str, list[str]] = {}
    for name, first in trace.ties.items():
        aliases.setdefault(first, []).append(name)
    for event in trace.events:
        for name in event.parameters:
            entrance = entrance_of(event, may_enter, dynamic)
            if not any(own.startswith(f"{entrance}.") for own in (name, *aliases.get(name, ()))):
                entrance = ""  # it may have been read before that module was called, and handed to it
            entrances = found.setdefault(name, [])
            if entrance not in entrances:
                entrances.append(entrance)
    grouped: dict[tuple[str, ...], list[str]] = {("",): []}
    for name in names:
        entrances = tuple(found.get(name, ("",)))
        grouped.setdefault(("",) if "" in entrances else entrances, []).append(name)
    sizes = {name: parameter.bytes for name, parameter in trace.parameters.items()}
    rounded = frozenset(name for name, p in trace.parameters.items() if p.computed) or _rounded(trace)
    _merge_unrounded(grouped, sizes, rounded)
    _merge_small(grouped, sizes)
    order = {path: at for at, path in enumerate(dict.fromkeys(e for many in found.values() for e in many))}
    ordered = sorted(grouped.items(), key=lambda unit: min(order.get(path, -1) for path in unit[0]))
    tied = [many for many, _ in ordered if len(many) > 1]
    stays = max(tied, key=lambda many: sum(sizes[name] for name in grouped[many]), default=None)
    return tuple(Unit(many, tuple(own), rounded & {*own}, stays=many == stays) for many, own in ordered)


def entrance_of(event: Event, may_enter: Container[str], dynamic: Container[str] = ()) -> str:
    """The innermost entrance among the modules under way in an event; nothing inside a ``dynamic`` one is."""
    entrance = ""
    if "" in dynamic:
        return entrance
    for path in (*event.within, event.name) if event.kind == "module" else event.within:
        if path in may_enter:
            entrance = path
        if path in dynamic:
            break
    return entrance


def _rounded(trace: Trace) -> frozenset[str]:
    """Parameters that nothing uses but the modules of ``ROUNDED`` that hold them (or what was traced as one with them
    inside)."""
    kinds, owners = {kind.__name__ for kind in ROUNDED}, {name: {name.rpartition(".")[0]} for name in trace.parameters}
    for name, first in trace.ties.items():
        owners[first].add(name.rpartition(".")[0])
    found = {name for name, paths in owners.items() if all(trace.kinds.get(path) in kinds for path in paths)}
    for event in trace.events:
        inside = lambda path, event=event: event.kind == "module" and f"{path}.".startswith(f"{event.name}.")
        found.difference_update(name for name in event.parameters if not any(map(inside, owners[name])))
        found.difference_update(event.changes)
    return frozenset(found)


def _merge_small(grouped: dict[tuple[str, ...], list[str]], sizes: dict[str, int]) -> None:
    """Move the smallest units into the whole, which is there all the time."""
    bytes_of = {unit: sum(sizes[name] for name in names) for unit, names in grouped.items()}
    room = max(bytes_of.values()) * SMALL - bytes_of[("",)]
    for unit in sorted(grouped, key=lambda unit: bytes_of[unit]):
        room -= bytes_of[unit]
        if unit != ("",) and room >= 0:
            grouped[("",)] += grouped.pop(unit)


def _merge_unrounded(grouped: dict[tuple[str, ...], list[str]], sizes: dict[str, int], rounded: frozenset[str]) -> None:
    """Move what autocast does not round (norms, mostly) out of units of what it does into the whole, if that is little:
    each of those units then travels as one row."""
    apart = {u: [n for n in own if n not in rounded] for u, own in grouped.items() if not rounded.isdisjoint(own)}
    apart.pop(("",), None)
    largest = max(sum(sizes[name] for name in names) for names in grouped.values())
    if sum(sizes[name] for names in (grouped[("",)], *apart.values()) for name in names) <= largest * SMALL:
        for unit, names in apart.items():
            grouped[("",)] += names
            grouped[unit] = [name for name in grouped[unit] if name not in names]


def _may_enter(trace: Trace) -> set[str]:
    """Modules to gather as one: going down from the model, the first that are small enough, or cannot be opened."""
    called = {event.name for event in trace.events if event.kind == "module"}
    called |= {path for event in trace.events for path in event.within}
    repeated = [block.parameters for block in blocks(trace) if len(block.paths) > 1]
    limit = max([*repeated, trace.parameter_bytes * SHARE])
    found: set[str] = set()

    def visit(module: Module) -> None:
        for child in module.children:
            if child.path in called and (bytes_of(trace, child) <= limit or not child.children):
                found.add(child.path)
            else:
                visit(child)

    visit(modules(trace))
    return found
