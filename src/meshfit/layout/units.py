"""Which parameters are gathered together, and by which calls: the units of sharding, from a trace.

A unit is some parameters and its *entrances*: the modules whose calls use them. It is there while one of those calls
runs. Usually a unit is a block and its own entrance; what the model's own code uses, or what the trace does not show,
belongs to the whole (entrance ""). A parameter that two blocks use (an embedding tied to the head) is a unit with two
entrances: it need not be there between them.

Every rank must gather the same units in the same order. So inside a module that looks at a tensor's value, or at a
random number, to decide what to run, nothing is an entrance: the parameters in it come with that module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshfit.anatomy.blocks import Module, blocks, bytes_of, modules
from meshfit.anatomy.record import TraceError, record
from meshfit.anatomy.trace import Trace

SHARE = 1 / 8
"""Of all parameters: a module that holds no more, or no more than the largest block that repeats, is gathered as one."""

SMALL = 1 / 8
"""Of the largest unit: the smallest ones that together hold no more than this are not worth a gather of their own."""

VARYING = ("inputs", "random", "activations")
"""What differs between ranks: a decision by one of these may come out differently on each."""


@dataclass(frozen=True, slots=True)
class Unit:
    entrances: tuple[str, ...]
    """Paths of modules, in the order of their first calls; ("",): the whole."""

    parameters: tuple[str, ...]
    """By the names they are first known by."""


class Whole(nn.Module):
    """A model and its objective as one module, so that a trace shows all that a training step calls."""

    def __init__(self, model: nn.Module, objective: Callable[[nn.Module, Any], Any]):
        super().__init__()
        self.model, self._objective = model, objective

    def forward(self, batch: Any) -> Any:
        return self._objective(self.model, batch)


def traced(
    model: nn.Module, objective: Callable[[nn.Module, Any], Any], batch: Any, meter: Any = None
) -> Trace | TraceError:
    """What a training step calls; or why that cannot be told."""
    try:
        trace = record(Whole(model, objective), (batch,), meter=meter).trace
    except TraceError as error:
        return error
    return trace


PREFIX = "model"  # of every path in the trace of a ``Whole``


def units(trace: Trace, names: tuple[str, ...]) -> tuple[Unit, ...]:
    """The units of a model whose parameters are ``names``, in the order of their first use."""
    may_enter = _may_enter(trace)
    dynamic = {place.module for place in trace.dynamic if place.depends_on in VARYING}
    found: dict[str, list[str]] = {}
    for event in trace.events:
        above = (*event.within, event.name) if event.kind == "module" else event.within
        entrance = ""
        for path in above:
            if path in may_enter:
                entrance = path.removeprefix(PREFIX + ".")
            if path in dynamic:
                break
        for name in event.parameters:
            entrances = found.setdefault(name.removeprefix(PREFIX + "."), [])
            if entrance not in entrances:
                entrances.append(entrance)
    grouped: dict[tuple[str, ...], list[str]] = {("",): []}
    for name in names:
        entrances = tuple(found.get(name, ("",)))
        grouped.setdefault(("",) if "" in entrances else entrances, []).append(name)
    _merge_small(grouped, {name: parameter.bytes for name, parameter in trace.parameters.items()})
    order = {path: at for at, path in enumerate(dict.fromkeys(e for many in found.values() for e in many))}
    ordered = sorted(grouped.items(), key=lambda unit: min(order.get(path, -1) for path in unit[0]))
    return tuple(Unit(entrances, tuple(names)) for entrances, names in ordered)


def _merge_small(grouped: dict[tuple[str, ...], list[str]], sizes: dict[str, int]) -> None:
    """Move the smallest units into the whole, which is there all the time."""
    bytes_of = {unit: sum(sizes[f"{PREFIX}.{name}"] for name in names) for unit, names in grouped.items()}
    room = max(bytes_of.values()) * SMALL - bytes_of[("",)]
    for unit in sorted(grouped, key=lambda unit: bytes_of[unit]):
        room -= bytes_of[unit]
        if unit != ("",) and room >= 0:
            grouped[("",)] += grouped.pop(unit)


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
    return found - {PREFIX}
