"""A trace as one value that says what is inside a model: its modules folded into a tree, the best splits into stages,
ties, norms, dropout, control flow, and which axes it can take. ``meshfit inspect`` prints it.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from meshfit.anatomy.axes import AxisVerdict, axes, norms
from meshfit.anatomy.blocks import Module, bytes_of, folded, modules, runs
from meshfit.anatomy.cuts import StageCut, stages
from meshfit.anatomy.pair import Pair
from meshfit.anatomy.pairs import Pairs
from meshfit.anatomy.trace import EventCost, Trace
from meshfit.errors import PlanError

LINES = 20  # of the tree of modules
LISTS = ("ModuleList", "ModuleDict")
SHOWN = 0.03  # least share of time or bytes at which a module is opened in the tree


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """A module in the tree, or several that repeat each other, or what stands for the rest. Sums, for one sample."""

    depth: int
    name: str
    path: str
    kind: str
    count: int = 1
    parameters: int
    parameter_bytes: int
    share: float
    """Of the time, as far as flops and bytes tell."""
    flops: float
    kept: float
    """Bytes of activations kept for backward."""


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """A model in a number of stages."""

    stages: int
    possible: bool
    why: str = ""
    before: tuple[str, ...] = ()
    """Where each stage but the first begins."""
    imbalance: float = 0.0
    bytes: tuple[float, ...] = ()
    """Sent over each cut, for one sample."""
    values: tuple[int, ...] = ()
    """Tensors sent over each cut."""
    shares: tuple[float, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    ties: tuple[str, ...] = ()
    indivisible: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Description:
    """All that inspect says of a model. Costs are for one sample."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    samples: int
    parameters: int
    parameter_bytes: int
    trained: int
    events: int
    flops: float
    flops_backward: float
    kept: float
    rows: tuple[ModuleRow, ...]
    ties: dict[str, str]
    norms: tuple[str, ...]
    dropouts: tuple[str, ...]
    dynamic: tuple[dict[str, str], ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]
    splits: tuple[StageSplit, ...]
    axes: dict[str, AxisVerdict]
    pairs: tuple[dict[str, Any], ...]
    """What can be split column then row: module, columns, rows, and the largest degree."""

    gathered: tuple[str, ...]
    """What can only be split by output channels, with the output gathered."""


def describe(
    trace: Trace, *, name: str, samples: int, dropouts: tuple[str, ...] = (), pairs: Pairs | None = None
) -> Description:
    """All that is known of a trace of ``samples`` samples."""
    root, cost = modules(trace), trace.cost
    return Description(
        name=name,
        kind=root.kind,
        inputs=tuple(_shape(trace, value) for value in trace.inputs),
        samples=samples,
        parameters=sum(p.numel for p in trace.parameters.values()),
        parameter_bytes=trace.parameter_bytes,
        trained=sum(p.numel for p in trace.parameters.values() if p.trained),
        events=len(trace.events),
        flops=cost.flops / samples,
        flops_backward=cost.flops_backward / samples,
        kept=cost.kept / samples,
        rows=_tree(trace, root, samples),
        ties=dict(trace.ties),
        norms=norms(trace),
        dropouts=dropouts,
        dynamic=tuple(asdict(found) for found in trace.dynamic),
        unused=tuple(name for name in trace.parameters if name not in root.names),
        notes=trace.notes,
        splits=tuple(_split(trace, k, samples) for k in (2, 4, 8)),
        axes=axes(trace, pairs),
        pairs=() if pairs is None else tuple(map(_pair, pairs.pairs)),
        gathered=() if pairs is None else pairs.gathered,
    )


def _pair(pair: Pair) -> dict[str, Any]:
    columns, rows = ([shard.parameter for shard in side] for side in (pair.columns, pair.rows))
    return {"module": pair.module, "kind": pair.kind, "columns": columns, "rows": rows, "degree": pair.limit}


def _shape(trace: Trace, value: int) -> str:
    found = trace.values[value]
    return f"{found.dtype} {'x'.join(map(str, found.shape)) or 'scalar'}"


def _split(trace: Trace, k: int, samples: int) -> StageSplit:
    try:
        found = stages(trace, k)
    except PlanError as error:
        return StageSplit(stages=k, possible=False, why="; ".join(error.facts))
    total = sum(found.costs) or 1.0
    return StageSplit(
        stages=k,
        possible=True,
        before=tuple(_place(trace, cut) for cut in found.cuts),
        imbalance=found.imbalance,
        bytes=tuple(cut.bytes / samples for cut in found.cuts),
        values=tuple(len(cut.crossing) for cut in found.cuts),
        shares=tuple(cost / total for cost in found.costs),
        parameter_bytes=found.parameter_bytes,
        ties=tuple(found.ties),
        indivisible=tuple(_span(trace, events) for events in found.indivisible),
    )


def _path(trace: Trace, event: int) -> str:
    found = trace.events[event]
    return found.name if found.kind == "module" else found.inside


def _place(trace: Trace, cut: StageCut) -> str:
    """What begins after a cut: the largest module of which nothing ran before it, or a function in one."""
    event = trace.events[cut.after + 1]
    before, after = (list(filter(None, _path(trace, i).split("."))) for i in (cut.after, event.index))
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
    while common < len(after) and trace.kinds.get(".".join(after[: common + 1])) in LISTS:
        common += 1  # a list of modules begins with the first of them
    if common < len(after):
        return ".".join(after[: common + 1])
    return f"{'.'.join((*after, event.name))}()"


def _span(trace: Trace, events: range) -> str:
    names = [_path(trace, event) or trace.events[event].name for event in (events[0], events[-1])]
    return names[0] if names[0] == names[1] else f"{names[0]} to {names[1]}"


# The tree of modules


@dataclass(frozen=True, eq=False)
class _Node:
    """Modules that are one line of the tree: one, or some that repeat each other."""

    label: str
    members: list[Module]
    count: int
    depth: int

    @property
    def work(self) -> float:
        return sum(module.work for module in self.members)

    def bytes(self, trace: Trace) -> int:
        return sum(bytes_of(trace, module) for module in self.members)

    def inside(self, trace: Trace) -> list["_Node"]:
        """What this one is made of, in forward order. Lists of modules are no line of their own."""
        found: list[_Node] = []
        alike = [{child.name: child for child in module.children} for module in self.members]
        for group in runs(trace, self.members[0].children):
            members = [named[one.name] for named in alike for one in group if one.name in named]
            node = _Node(folded(tuple(one.name for one in group)), members, len(group), self.depth + 1)
            if group[0].kind in LISTS and not group[0].called:
                inner = replace(node, depth=self.depth).inside(trace)
                found += [replace(child, label=f"{node.label}.{child.label}") for child in inner]
            else:
                found.append(node)
        return found


def _tree(trace: Trace, root: Module, samples: int) -> tuple[ModuleRow, ...]:
    """The lines of the tree: the largest modules are opened first, while there is room."""
    total, held, kept = max(root.work, 1e-9), max(trace.parameter_bytes, 1), max(root.cost.kept / samples, 1)

    def weight(node: _Node) -> float:
        return max(node.work / total, node.bytes(trace) / held)

    def parts(node: _Node) -> list[_Node]:
        """What is worth a line."""
        inner = [part for part in node.inside(trace) if weight(part) >= 0.001]
        least = sorted(map(weight, inner), reverse=True)[:LINES][-1] if inner else 0
        return [part for part in inner if weight(part) >= least][:LINES]

    def lines(node: _Node) -> Iterator[ModuleRow]:
        if node is not top:
            yield _row(trace, node.members, total, samples, depth=node.depth, name=node.label, count=node.count)
        inner = opened.get(id(node), [])
        for part in inner:
            yield from lines(part)
        rest = _row(trace, node.members, total, samples, depth=node.depth + 1, name="(the rest)")
        for part in inner:
            rest = _less(rest, _row(trace, part.members, total, samples, depth=0, name=""))
        if inner and (rest.share >= 0.02 or rest.kept / kept >= 0.05):
            yield replace(rest, kind="", parameters=max(rest.parameters, 0))

    top = _Node("", [root], 1, -1)
    opened = {id(top): parts(top)}
    closed, room = list(opened[id(top)]), LINES - len(opened[id(top)])
    while closed:
        largest = max(closed, key=weight)
        closed.remove(largest)
        inner = parts(largest)
        if weight(largest) < SHOWN or len(inner) > room:
            break
        if len(inner) > 1:
            opened[id(largest)] = inner
            closed += inner
            room -= len(inner)
    return tuple(lines(top))


def _row(
    trace: Trace, members: list[Module], total: float, samples: int, *, depth: int, name: str, count: int = 1
) -> ModuleRow:
    cost = sum((module.cost for module in members), EventCost())
    return ModuleRow(
        depth=depth,
        name=name,
        path=members[0].path,
        kind=members[0].kind,
        count=count,
        parameters=sum(trace.parameters[name].numel for module in members for name in module.names),
        parameter_bytes=sum(bytes_of(trace, module) for module in members),
        share=sum(module.work for module in members) / total,
        flops=cost.flops / samples,
        kept=cost.kept / samples,
    )


def _less(a: ModuleRow, b: ModuleRow) -> ModuleRow:
    sums = ("parameters", "parameter_bytes", "share", "flops", "kept")
    return replace(a, **{name: getattr(a, name) - getattr(b, name) for name in sums})
