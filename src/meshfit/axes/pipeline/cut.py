"""Which part of a model is whose: the split all ranks agree on, and the part of the model that a rank keeps.

A split is found once, on one recording. Other recordings of the same model (another microbatch size, eval mode, another
branch) are cut to match: as near to the same places as can be, so that every stage finds the parameters it needs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshfit.anatomy.cuts import Stages, cuts, stages_at, storage_of
from meshfit.anatomy.trace import Event, Trace
from meshfit.errors import PlanError
from meshfit.torch_private.modules import non_persistent_buffers, own_buffers, own_modules, own_parameters

LANDMARKS = 8
"""Events after a cut by which its place is found again."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A model in stages, as plain data: found on one rank, sent to the others."""

    parameters: tuple[tuple[str, ...], ...]
    """By stage, by the names they are first known by. One that several stages use stands in each."""

    buffers: tuple[tuple[str, ...], ...]
    landmarks: tuple[tuple[tuple[str, int], ...], ...]
    """Of each cut: the events that follow it, each by what it is and how many like it came before."""

    looked_at: tuple[str, ...] = ()
    """Buffers by whose values the model decides what to run: every rank holds them."""

    @property
    def stages(self) -> int:
        return len(self.parameters)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages hold, and those stages: their gradients are to be summed."""
        users: dict[str, list[int]] = {}
        for stage, names in enumerate(self.parameters):
            for name in names:
                users.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}


def split_of(trace: Trace, found: Stages, *, branches: bool) -> Split:
    """``branches`` says that the forward may take other ways than the one recorded: what this one did not use may be
    used by any stage, and is held by all."""
    used = {name for event in trace.events for name in event.buffers}
    looked_at = dict.fromkeys(name for i in decided(trace) for name in trace.events[i].buffers)
    if changed := [e for e in trace.events if looked_at.keys() & {*e.changes}]:
        name = next(name for name in changed[0].changes if name in looked_at)
        raise PlanError(
            f"the model decides by its buffer {name} what to run, and changes it in its forward",
            f"at {changed[0].line}: only the rank of that stage would know, and no rank could tell what the others do",
            "data= and shard= take the model as it is",
        )
    parameters, buffers = [], []
    for stage, events in enumerate(found.ranges):
        extra = found.unused if branches or stage == 0 else ()
        parameters.append((*found.parameters[stage], *extra))
        own = dict.fromkeys(name for i in events for name in trace.events[i].buffers)
        idle = [name for name in trace.buffers if name not in used] if branches or stage == 0 else []
        again = (name for i in found.recomputed[stage] for name in trace.events[i].buffers)
        buffers.append(tuple(dict.fromkeys((*own, *again, *idle, *looked_at))))
    names = counted(trace.events)
    landmarks = tuple(tuple(names[cut.after + 1 : cut.after + 1 + LANDMARKS]) for cut in found.cuts)
    return Split(parameters=tuple(parameters), buffers=tuple(buffers), landmarks=landmarks, looked_at=tuple(looked_at))


def learnt(trace: Trace) -> set[int]:
    """Memory of values that depend on parameters: activations."""
    found: set[int] = set()
    for event in trace.events:
        if event.parameters or found.intersection(storage_of(trace, v) for v in event.reads):
            found.update(storage_of(trace, v) for v in (*event.writes, *event.mutates))
    return found


def decided(trace: Trace) -> tuple[int, ...]:
    """Events that say which way a forward goes, and those that compute what they look at: as far as no parameter has a
    part in it. Every rank can run these, before anything else. What looks further is checked where it runs."""
    activations = learnt(trace)
    needed: set[int] = set()
    found = []
    for event in reversed(trace.events):
        looks = event.name.startswith("guard ") and not event.parameters
        looks = looks and not activations.intersection(storage_of(trace, v) for v in event.reads)
        if looks or needed.intersection((*event.writes, *event.mutates)):
            found.append(event.index)
            needed.update(event.reads)
    return tuple(found[::-1])


def counted(events: Iterable[Event]) -> list[tuple[str, int]]:
    """What each event is, and how many like it came before."""
    seen: Counter[str] = Counter()
    found = []
    for event in events:
        what = f"{event.kind} {event.name} in {event.inside}"
        found.append((what, seen[what]))
        seen[what] += 1
    return found


def stages_like(split: Split, trace: Trace) -> Stages:
    """``trace`` cut as ``split`` is, as near as may be; a ``PlanError`` if a stage would need what it does not hold.

    A trace that does less (no loss, say) may leave a stage with nothing to do but to hand on what it gets.
    """
    wanted, last, end = _wanted(split, trace), split.stages - 1, len(trace.events)
    places = [0, *(cut.after + 1 for cut in cuts(trace)), end]
    rows: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # by where a stage begins: how far off, and the place before
    for k, held in enumerate(zip(split.parameters, split.buffers, strict=True)):
        before, reach = rows[-1], _reach(trace, *held)
        row: dict[int, tuple[int, int]] = {}
        window: deque[int] = deque()  # where the stage may begin, the nearest to what is wanted first
        for place in places:
            while window and reach[window[0]] < place:
                window.popleft()
            off = abs(place - wanted[k]) if k < last else 0
            choices = [(before[window[0]][0] + off, window[0])] if window else []
            if place in before:  # nothing to do
                choices.append((before[place][0] + off + end, place))
                while window and before[window[-1]][0] >= before[place][0]:
                    window.pop()
                window.append(place)
            if choices and (k < last or place == end):
                row[place] = min(choices)
        if not row:
            raise _unlike(trace, k, trace.events[max(reach[start] for start in before)], held)
        rows.append(row)
    chosen = [end]
    for row in reversed(rows[1:]):
        chosen.append(row[chosen[-1]][1])
    return stages_at(trace, [place - 1 for place in chosen[-2:0:-1]])


def _unlike(trace: Trace, stage: int, event: Event, held: tuple[Sequence[str], Sequence[str]]) -> PlanError:
    """Of a stage that would have to run ``event`` with what it ``held`` for the first batch."""
    missing = [name for name in event.parameters if name not in held[0]]
    missing += [name for name in event.changes if name not in held[1]]
    what, path = event.name or "the model", f"model.{event.name}" if event.name else "model"
    whole = [note.partition(": ")[2] for note in trace.notes if note.startswith(f"{path} taken as a whole: ")]
    return PlanError(
        f"stage {stage} of the model cannot be cut as it was for the first batch",
        f"for this one it also runs {what} in {event.inside or 'the model itself'} ({event.line}),"
        f" which needs {', '.join(missing[:3])}, held by another stage",
        f"{what} is run as a whole: {whole[0]}" if whole else "",
        "cut elsewhere with cut=, or use fewer stages",
    )


def _reach(trace: Trace, parameters: Sequence[str], buffers: Sequence[str]) -> list[int]:
    """From each event on, the first that a stage cannot run with what it holds."""
    holds, writes, first = set(parameters), set(buffers), len(trace.events)
    found = [first]
    for event in reversed(trace.events):
        if not holds.issuperset(event.parameters) or not writes.issuperset(event.changes):
            first = event.index
        found.append(first)
    return found[::-1]


def _wanted(split: Split, trace: Trace) -> list[int]:
    where = {name: index for index, name in enumerate(counted(trace.events))}
    found, least = [], 0
    for marks in split.landmarks:
        at = next((where[mark] - i for i, mark in enumerate(marks) if mark in where), least + 1)
        least = max(least, at)
        found.append(least)
    return found


def stages_before(trace: Trace, modules: Sequence[str]) -> Stages:
    """``trace`` in stages that begin with the modules named."""
    places = []
    for path in modules:
        found = [e.index for e in trace.events if path in (*e.within, e.name if e.kind == "module" else "")]
        inside = [e.index for e in trace.events if path in trace.kinds and f"{path}.".startswith(f"{e.name}.")]
        if not found:
            raise PlanError(
                f"cut={path}: the forward calls no such module",
                f"it runs inside {trace.events[inside[0]].name}, which is taken as a whole" if inside else "",
                "name modules in the order in which they run: " + ", ".join(_some_modules(trace)),
            )
        places.append(_first_legal(trace, found[0]))
    if places != sorted(set(places)) or 0 in places:
        raise PlanError(
            f"cut={','.join(modules)} does not leave a stage between each two cuts",
            f"they begin at events {', '.join(map(str, places))} of {len(trace.events)}",
            "name modules in the order in which they run, none of them the first",
        )
    return stages_at(trace, [place - 1 for place in places])


def _first_legal(trace: Trace, place: int) -> int:
    """Where the cut before event ``place`` is: a legal one with nothing but constants up to it, if there is one."""
    legal = [cut.after + 1 for cut in cuts(trace)]
    return next((p for p in legal if p >= place and not any(e.parameters for e in trace.events[place:p])), place)


def _some_modules(trace: Trace) -> list[str]:
    paths = dict.fromkeys(path for e in trace.events for path in (*e.within, e.name) if path in trace.kinds and path)
    return list(paths)[:12]


# The part of a model that a rank keeps


class Shell(nn.Module):
    """Stands where a module of the model does that this rank holds only in part. It is not called."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise AssertionError("a module that is spread over stages was called as one")


def part_of(model: nn.Module, parameters: Iterable[str], buffers: Iterable[str]) -> nn.Module:
    """``model`` with nothing but ``parameters`` and ``buffers`` (by the names they are first known by), all under
    their own names: the modules that need no more are the model's own."""
    held = {id(p) for name, p in model.named_parameters() if name in set(parameters)}
    held |= {id(b) for name, b in model.named_buffers() if name in set(buffers)}
    made: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            whole = all(id(t) in held for t in (*module.parameters(), *module.buffers()))
            made[id(module)] = module if whole else _shell(module)
        return made[id(module)]

    def _shell(module: nn.Module) -> nn.Module:
        shell = Shell()
        shell.training = module.training
        for name, p in own_parameters(module).items():
            shell.register_parameter(name, p if p is not None and id(p) in held else None)
        for name, b in own_buffers(module).items():
            kept = b if b is not None and id(b) in held else None
            shell.register_buffer(name, kept, persistent=name not in non_persistent_buffers(module))
        for name, thing in vars(module).items():
            if isinstance(thing, Tensor | torch.Generator):
                shell.__dict__[name] = thing
        for name, child in own_modules(module).items():
            own_modules(shell)[name] = None if child is None else visit(child)
        return shell

    return visit(model)


def hollow(model: nn.Module, part: nn.Module) -> None:
    """Let go of what ``model`` holds and ``part`` does not: those tensors stay the same objects, without elements."""
    kept = {id(t) for t in (*part.parameters(), *part.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in kept:
            tensor.data = tensor.data.new_empty(0)
