"""Which rank runs which events: found once, from the costs of a trace, and carried over to other recordings by name.

Which branches run side by side: see groups.py. What shares a buffer that one of them writes stays together. A
parameter belongs to the trunk, which all ranks run, or to branches: what else uses one of a branch's is run by a rank
that holds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshfit.anatomy.cuts import work
from meshfit.anatomy.trace import Event, Trace
from meshfit.axes.branch.flow import ALL, Flow, Phase
from meshfit.axes.branch.groups import LINK, Groups, candidates, even
from meshfit.axes.branch.order import ends
from meshfit.axes.pipeline.cut import counted
from meshfit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Who runs what, as plain data: the same on all ranks."""

    owners: dict[tuple[str, int], int]
    """By what an event is, and how many like it came before."""

    when: dict[tuple[str, int], float]
    """And when it ends, if ranks run their own work at once."""

    parameters: dict[str, tuple[int, ...]]
    """Those of branches, and the ranks that hold them. All others are the trunk's."""

    buffers: dict[str, int]
    """Those that one rank's branches alone use, and that rank. All others are held by all."""

    late: bool
    """Whether ranks do their own work as late as can be, not as early."""

    loads: tuple[float, ...]
    """Share of the model's cost that each rank runs on its own."""

    trunk: float
    """Share that all of them run."""

    time: float
    """Of a step over that on one device, traffic included."""


def deal(flow: Flow, degree: int) -> Dealt | None:
    """The best way found; None where nothing can run side by side."""
    costs = [work(event) for event in flow.trace.events]
    ways = [_tried(flow, chosen, degree, costs) for chosen in candidates(flow, degree, costs)]
    return min((dealt for dealt in ways if dealt is not None), key=lambda dealt: dealt.time, default=None)


def _tried(flow: Flow, chosen: Groups, degree: int, costs: Sequence[float]) -> Dealt | None:
    """``chosen``, without those groups that cannot run apart."""
    while chosen:
        owner = _owners(flow, chosen, degree)
        against = settle(flow, owner) or flow.torn(owner)
        if not against:
            return _dealt(flow, owner, degree, costs)
        guilty = [parts for parts in chosen if any(not against.isdisjoint(part) for part in parts)]
        chosen.remove(guilty[-1] if guilty else chosen[-1])
    return None


def _owners(flow: Flow, chosen: Groups, degree: int) -> list[int]:
    """Who runs each event; the ranks with the fewest parameters so far take most of the next group."""
    trace, owner, held = flow.trace, [ALL] * len(flow.trace.events), [0] * degree
    for parts in chosen:
        loads = [sum(work(trace.events[event]) for event in part) for part in parts]
        sizes = [_bytes(trace, part) for part in parts]
        at = even(loads, degree)
        most = sorted(range(degree), key=lambda r: -sum(s for s, to in zip(sizes, at, strict=True) if to == r))
        rank = dict(zip(most, sorted(range(degree), key=lambda r: (held[r], r)), strict=True))
        for part, size, to in zip(parts, sizes, at, strict=True):
            held[rank[to]] += size
            for event in part:
                owner[event] = rank[to]
    return owner


def _bytes(trace: Trace, events: Iterable[int]) -> int:
    names = {name for event in events for name in trace.events[event].parameters}
    return sum(trace.parameters[name].bytes for name in names)


def settle(flow: Flow, owner: list[int]) -> set[int]:
    """Give what hangs together one owner, in place; events for which there is none. What leads to no output goes
    with what it reads."""
    trace = flow.trace
    for event in trace.events:
        if owner[event.index] == ALL and not flow.alive[event.index]:
            made = {owner[m] for v in event.reads if (m := trace.values[v].made_by) >= 0} - {ALL}
            owner[event.index] = made.pop() if len(made) == 1 else ALL
    users = [*flow.users(lambda event: event.parameters).values()]
    moved = True
    while moved:
        moved = False
        for events, tied in (*((e, True) for e in flow.bound), *((e, False) for e in users)):
            ranks = {owner[event] for event in events} - {ALL}
            if tied and len(ranks) > 1:
                return set(events)
            for event in events if ranks else ():
                if owner[event] == ALL:
                    owner[event], moved = min(ranks), True
    return {event for event in flow.common if owner[event] != ALL}


def _dealt(flow: Flow, owner: list[int], degree: int, costs: Sequence[float]) -> Dealt:
    trace, total = flow.trace, sum(costs)
    of_parameters, of_buffers = flow.users(lambda event: event.parameters), flow.users(lambda event: event.buffers)
    held = {name: tuple(sorted({owner[e] for e in events})) for name, events in of_parameters.items()}
    used = {name: {owner[e] for e in events} for name, events in of_buffers.items()}
    phases = {late: flow.phases(owner, degree, late=late).phases[0] for late in (False, True)}
    spent, late = min((_time(trace, some, costs), late) for late, some in phases.items())
    names = counted(trace.events)
    return Dealt(
        owners=dict(zip(names, owner, strict=True)),
        when=dict(zip(names, ends(phases[late], costs), strict=True)),
        parameters={name: ranks for name, ranks in held.items() if ranks != (ALL,)},
        buffers={name: min(ranks) for name, ranks in used.items() if len(ranks) == 1 and ranks != {ALL}},
        late=late,
        loads=tuple(sum(c for c, o in zip(costs, owner, strict=True) if o == r) / total for r in range(degree)),
        trunk=sum(c for c, o in zip(costs, owner, strict=True) if o == ALL) / total,
        time=spent / total,
    )


def _time(trace: Trace, phases: Iterable[Phase], costs: Sequence[float]) -> float:
    """Of a step, as ``work`` counts it."""
    spent = 0.0
    for phase in phases:
        loads = [sum(costs[event] for event in own) for own in phase.own]
        joined = sum(trace.values[id].bytes for ids in phase.joins for id in ids)
        entered = sum(trace.values[id].bytes for id in phase.enters if trace.values[id].needs_grad)
        spent += sum(costs[event] for event in phase.trunk) + max(loads) + LINK * (joined + 2 * entered)
    return spent


def owners_like(dealt: Dealt, flow: Flow) -> list[int]:
    """``dealt`` for another recording of the same model: another size, eval mode, no loss. A ``PlanError`` where an
    event needs what no one rank holds."""
    trace, owner = flow.trace, []
    for event, what in zip(trace.events, counted(trace.events), strict=True):
        found = dealt.owners.get(what)
        if found is None:  # something new goes with what it reads
            made = {owner[m] for v in event.reads if (m := trace.values[v].made_by) >= 0} - {ALL}
            found = made.pop() if len(made) == 1 else ALL
        held = [set(dealt.parameters.get(name, (ALL,))) for name in event.parameters]
        held += [{dealt.buffers[name]} for name in event.buffers if name in dealt.buffers]
        held += [{dealt.buffers.get(name, ALL)} for name in event.changes if name in trace.buffers]
        may = set.intersection(*held) if held else {found}
        if not may:
            raise _unlike(event, "uses parameters or buffers that are held by different devices")
        owner.append(found if found in may else min(may))
    for events in flow.bound:
        if len(found := {owner[event] for event in events}) > 1:
            ranks = found - {ALL}
            if len(ranks) > 1 or any(owner[e] == ALL and trace.events[e].parameters for e in events):
                raise _unlike(trace.events[events[-1]], "changes what another device uses too")
            for event in events:
                owner[event] = min(ranks)
    against = flow.torn(owner) | {event for event in flow.common if owner[event] != ALL}
    if against:
        raise _unlike(trace.events[max(against)], "changes in place what another device uses too")
    return owner


def _unlike(event: Event, why: str) -> PlanError:
    return PlanError(
        "branch=: this batch cannot be run in the branches found for the first",
        f"{event.name} in {event.inside or 'the model itself'} ({event.line}) {why}",
        "data= takes the model as it is",
    )
