"""What a model is built of: the units to shard, recompute and compile.

Going down from the model itself, a module is a block if it repeats: siblings of one class and one numbered name
(``layers.0`` ... ``layers.31``, ``stage1`` ... ``stage4``), one after another, with the same parameters and the same
modules called on the same shapes. Glue is not compared: the first and the last of a stack often do a little more. What
does not repeat is opened while it is large, and is a block of its own once it is not. Together the blocks hold every
parameter that is used, but for those that a larger module's own code uses: they are the rest of the model.
O(events x depth).
"""

import re
from dataclasses import dataclass, field

from meshfit.anatomy.cuts import work
from meshfit.anatomy.record_known import above
from meshfit.anatomy.trace import Block, EventCost, Trace

LARGE = 1 / 16
"""Share of the model's cost or bytes above which a module that stands alone is opened."""

Signature = tuple[object, ...]


@dataclass(eq=False, slots=True)
class Module:
    """A module as the trace saw it: what ran inside it, all in all."""

    path: str
    kind: str
    first: int
    """The first event inside it."""

    called: bool = False
    """Whether it was taken as a whole: its inside is not known."""

    cost: EventCost = field(default_factory=EventCost)
    work: float = 0.0
    names: dict[str, None] = field(default_factory=dict)
    """Parameters used inside it, by canonical name."""

    inside: list[tuple[object, ...]] = field(default_factory=list)
    """The modules called inside it, with the shapes they made."""

    children: list["Module"] = field(default_factory=list)
    """In forward order."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def modules(trace: Trace) -> Module:
    """The model as a tree of the modules that took part in its forward."""
    root = Module("", trace.kinds.get("", "model"), 0)
    known = {"": root}

    def reach(path: str, at: int) -> Module:
        if path not in known:
            parent = reach(path.rpartition(".")[0], at)
            known[path] = Module(path, trace.kinds.get(path, ""), at)
            parent.children.append(known[path])
        return known[path]

    for event in trace.events:
        path = event.name if event.kind == "module" else event.inside
        spent, made = work(event), tuple((trace.values[v].shape, trace.values[v].dtype) for v in event.writes)
        reach(path, event.index).called |= event.kind == "module"
        for outer in above(path):
            module = known[outer]
            module.cost += event.cost
            module.work += spent
            module.names.update(dict.fromkeys(event.parameters))
            if made and event.kind == "module":
                module.inside.append((event.name[len(outer) :], made))
    return root


def bytes_of(trace: Trace, module: Module) -> int:
    """Bytes of the parameters used inside a module."""
    return sum(trace.parameters[name].bytes for name in module.names)


def runs(trace: Trace, siblings: list[Module]) -> list[list[Module]]:
    """``siblings`` in forward order, with those that repeat one another together."""
    found: list[list[Module]] = []
    last: Signature = ()
    skipped: list[list[Module]] = []  # without parameters, so they do not end a run
    for module in siblings:
        signature = _signature(trace, module)
        if not module.names:
            skipped.append([module])
            continue
        if found and signature == last:
            found[-1].append(module)
        else:
            found.append([module])
        last = signature
    return sorted((*found, *skipped), key=lambda run: run[0].first)


def _signature(trace: Trace, module: Module) -> Signature:
    stem = re.sub(r"\d+$", "", module.name)
    shapes = tuple(trace.parameters[name].shape for name in module.names)
    alone = () if stem != module.name else (module.name,)  # a name without a number stands once
    return (module.kind, stem, alone, shapes, tuple(module.inside))


def blocks(trace: Trace) -> tuple[Block, ...]:
    """The blocks of a model in forward order; each of those that stand once has one path."""
    root = modules(trace)
    total, held = max(root.work, 1e-9), max(bytes_of(trace, root), 1)
    found: list[Block] = []

    def large(module: Module) -> bool:
        return max(module.work / total, bytes_of(trace, module) / held) > LARGE

    def stacks(module: Module, more_than: int) -> bool:
        """Whether most of a module is a longer stack further down: a tower of layers, say."""
        for run in runs(trace, module.children):
            if sum(each.work for each in run) > 0.5 * module.work:
                return len(run) > more_than or stacks(run[0], more_than)
        return False

    def visit(siblings: list[Module]) -> None:
        for run in runs(trace, siblings):
            one = run[0]
            opened = bool(one.children) and large(one) and (len(run) == 1 or stacks(one, len(run)))
            if opened:
                for module in run:
                    visit(module.children)
            elif one.names or one.work / total > 0.01:
                found.append(Block(tuple(m.path for m in run), one.kind, bytes_of(trace, one), one.cost))

    visit(root.children)
    return tuple(found)


def folded(paths: tuple[str, ...]) -> str:
    """Paths in short: ("layers.0", "layers.1", "layers.2") as "layers.0-2"."""
    if len(paths) == 1:
        return paths[0]
    stem = re.sub(r"\d+$", "", paths[0])
    numbers = [int(path[len(stem) :]) for path in paths]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{stem}{numbers[0]}-{numbers[-1]}"
    return f"{stem}{','.join(map(str, numbers))}" if len(numbers) < 4 else f"{stem}{numbers[0]}..{numbers[-1]}"
