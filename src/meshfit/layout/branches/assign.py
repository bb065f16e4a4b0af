"""Which rank runs which events: found once, from the costs of a trace, and carried over to other recordings by name.

Of nested groups of branches those are chosen that save most, and the branches of each are dealt out so that the
largest load is as small as can be. What shares a buffer that one of them writes stays together. A parameter belongs to
the trunk, which all ranks run, or to branches: what else uses one of a branch's is run by a rank that holds it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from meshfit.anatomy.branches import Branch, branches
from meshfit.anatomy.cuts import work
from meshfit.anatomy.trace import Event, Trace
from meshfit.errors import PlanError
from meshfit.layout.branches.flow import ALL, Flow

LEAST = 0.002
"""Share of the model's cost below which a branch is left in the trunk."""

LINK = 200
"""What a device computes while one byte goes to another: as ``FLOPS_PER_BYTE``, for links between devices."""

TRIED = 4096
"""Ways to deal out the branches of a group that are all tried; beyond it the largest goes first."""


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Who runs what, as plain data: the same on all ranks."""

    owners: dict[tuple[str, int], int]
    """By what an event is, and how many like it came before."""

    parameters: dict[str, tuple[int, ...]]
    """Those of branches, and the ranks that hold them. All others are the trunk's."""

    buffers: dict[str, int]
    """Those that a branch writes, and its rank. All others are held by all."""

    loads: tuple[float, ...]
    """Share of the model's cost that each rank runs on its own."""

    trunk: float
    """Share that all of them run."""

    time: float
    """Of a step over that on one device, traffic included."""


def deal(flow: Flow, degree: int) -> Dealt | None:
    """The best way found; None where nothing can run side by side."""
    trace = flow.trace
    costs = [work(event) for event in trace.events]
    chosen = _chosen(flow, degree, costs)
    while chosen:
        owner = _owners(flow, chosen, degree)
        against = settle(flow, owner) or flow.torn(owner)
        if not against:
            return _dealt(flow, owner, degree, costs)
        guilty = [parts for parts in chosen if any(not against.isdisjoint(part) for part in parts)]
        chosen.remove(guilty[-1] if guilty else chosen[-1])
    return None


def _chosen(flow: Flow, degree: int, costs: Sequence[float]) -> list[list[tuple[int, ...]]]:
    """Groups that do not overlap, each as the events of its branches; those that save most first."""
    groups: dict[int, list[Branch]] = defaultdict(list)
    for branch in branches(flow.trace, worth=LEAST):
        groups[branch.group].append(branch)
    parts = {number: _kept_together(flow, [branch.events for branch in group]) for number, group in groups.items()}
    gains = {number: _gain(flow.trace, each, degree, costs) for number, each in parts.items()}
    inside: dict[int | None, list[int]] = defaultdict(list)
    for number, group in groups.items():
        own = {event for branch in group for event in branch.events}
        around = [n for n, g in groups.items() if n != number and any(own < {*b.events} for b in g)]
        inside[min(around, key=lambda n: sum(len(b.events) for b in groups[n]), default=None)].append(number)

    def best(number: int) -> tuple[float, list[int]]:
        inner = [best(each) for each in inside[number]]
        gain, found = sum(g for g, _ in inner), [n for _, some in inner for n in some]
        return (gains[number], [number]) if gains[number] > gain else (gain, found)

    found = [number for outer in inside[None] for number in best(outer)[1]]
    return [parts[number] for number in sorted(found, key=lambda number: -gains[number])]


def _kept_together(flow: Flow, parts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Branches that share what one of them changes, as one."""
    found = [set(part) for part in parts]
    for events in flow.bound:
        touched = [part for part in found if not part.isdisjoint(events)]
        if len(touched) > 1:
            found = [part for part in found if part not in touched] + [set().union(*touched)]
    return [tuple(sorted(part)) for part in found]


def _gain(trace: Trace, parts: list[tuple[int, ...]], degree: int, costs: Sequence[float]) -> float:
    """What running ``parts`` side by side saves, less what their ranks say to each other."""
    if len(parts) < 2:
        return 0.0
    loads = [sum(costs[event] for event in part) for part in parts]
    at = _even(loads, degree)
    largest = max(sum(load for load, rank in zip(loads, at, strict=True) if rank == r) for r in range(degree))
    place = {event: number for number, part in enumerate(parts) for event in part}
    moved = 0
    for id, value in trace.values.items():
        maker, readers = place.get(value.made_by), {place.get(event) for event in value.used_by}
        if maker is not None and (readers - {maker} or id in trace.outputs):
            moved += value.bytes
        if value.needs_grad and readers - {maker, None}:
            moved += 2 * value.bytes  # its gradient, summed
    return sum(loads) - largest - LINK * moved


def _even(loads: Sequence[float], degree: int) -> tuple[int, ...]:
    """The rank of each load, so that the largest sum is least."""
    if degree ** len(loads) <= TRIED:

        def largest(at: tuple[int, ...]) -> float:
            sums = [0.0] * degree
            for load, rank in zip(loads, at, strict=True):
                sums[rank] += load
            return max(sums)

        return min(product(range(degree), repeat=len(loads)), key=largest)
    sums, found = [0.0] * degree, [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: -loads[i]):
        found[i] = min(range(degree), key=sums.__getitem__)
        sums[found[i]] += loads[i]
    return tuple(found)


def _owners(flow: Flow, chosen: list[list[tuple[int, ...]]], degree: int) -> list[int]:
    """Who runs each event; the ranks with the fewest parameters so far take most of the next group."""
    trace, owner, held = flow.trace, [ALL] * len(flow.trace.events), [0] * degree
    for parts in chosen:
        loads = [sum(work(trace.events[event]) for event in part) for part in parts]
        sizes = [_bytes(trace, part) for part in parts]
        at = _even(loads, degree)
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
    held = {name: tuple(sorted({owner[e] for e in events})) for name, events in flow.users(_parameters).items()}
    written = {name: owner[event.index] for event in trace.events for name in event.changes}
    spent = 0.0
    for phase in flow.phases(owner, degree):
        loads = [sum(costs[event] for event in own) for own in phase.own]
        joined = sum(trace.values[id].bytes for ids in phase.joins for id in ids)
        entered = sum(trace.values[id].bytes for id in phase.enters if trace.values[id].needs_grad)
        spent += sum(costs[event] for event in phase.trunk) + max(loads) + LINK * (joined + 2 * entered)
    return Dealt(
        owners=dict(zip(counted(trace.events), owner, strict=True)),
        parameters={name: ranks for name, ranks in held.items() if ranks != (ALL,)},
        buffers={name: rank for name, rank in written.items() if rank != ALL and name in trace.buffers},
        loads=tuple(sum(c for c, o in zip(costs, owner, strict=True) if o == r) / total for r in range(degree)),
        trunk=sum(c for c, o in zip(costs, owner, strict=True) if o == ALL) / total,
        time=spent / total,
    )


def _parameters(event: Event) -> tuple[str, ...]:
    return event.parameters


def counted(events: Iterable[Event]) -> list[tuple[str, int]]:
    """What each event is, and how many like it came before."""
    seen: Counter[str] = Counter()
    found = []
    for event in events:
        what = f"{event.kind} {event.name} in {event.inside}"
        found.append((what, seen[what]))
        seen[what] += 1
    return found


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
