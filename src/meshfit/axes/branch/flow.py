"""What waits for what in a recording, and what its ranks then do in turns.

Every event has an *owner*: one rank, or ALL. A *phase* is what all ranks do alike (the trunk), then what each does on
its own. Before its own work a rank is handed what the trunk made (*enters*), after it all are handed what the trunk
needs of it (*joins*). An event is in the first phase in which all that it waits for is there; or, *late*, in the last
in which it is in time for those that wait for it.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshfit.anatomy.branches import successors
from meshfit.anatomy.cuts import storage_of
from meshfit.anatomy.record_known import objects_in
from meshfit.anatomy.replay import Recording
from meshfit.anatomy.trace import Event, Trace

ALL = -1


@dataclass(frozen=True, slots=True)
class Phase:
    trunk: tuple[int, ...]
    """Events that all ranks run."""
    own: tuple[tuple[int, ...], ...]
    """Events that each rank runs, by rank."""
    enters: tuple[int, ...]
    """Values that all have, and own events read from this phase on."""
    joins: tuple[tuple[int, ...], ...]
    """Values that each rank hands to all afterwards, by rank."""


class Flow:
    """The order of a recording's events."""

    def __init__(self, recording: Recording):
        self.trace = trace = recording.trace
        self.guards = {i for i, step in enumerate(recording.steps) if step.kind == "guard"}
        """They look at the inputs, and were asked before: nobody runs them."""
        self.bound, self.common = _bound(recording)
        """Events that must have one owner; and those that must be the trunk's."""
        after = successors(trace)
        self.before: list[set[int]] = [set() for _ in trace.events]
        for event, others in enumerate(after):
            for other in others - {len(trace.events)}:
                self.before[other].add(event)
        for events in self.bound:
            for a, b in pairwise(events):
                self.before[b].add(a)
        self.alive = [len(trace.events) in others for others in after]
        for event in reversed(range(len(after))):
            if self.alive[event]:
                for other in self.before[event]:
                    self.alive[other] = True

    def users(self, what: Callable[[Event], Sequence[str]]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for event in self.trace.events:
            for name in what(event):
                found[name].append(event.index)
        return found

    def phases(self, owner: Sequence[int], degree: int, *, late: bool = False) -> tuple[Phase, ...]:
        """``late`` is for what ranks do on their own."""
        level = self._levels(owner)
        if late:
            self._delay(owner, level)
        count = max(level, default=0) + 1
        trunk: list[list[int]] = [[] for _ in range(count)]
        own: list[list[list[int]]] = [[[] for _ in range(degree)] for _ in range(count)]
        for event in range(len(owner)):
            if event not in self.guards:
                (trunk[level[event]] if owner[event] == ALL else own[level[event]][owner[event]]).append(event)
        enters, joins = self._crossing(owner, level, degree, count)
        return tuple(
            Phase(tuple(trunk[k]), tuple(map(tuple, own[k])), tuple(enters[k]), tuple(map(tuple, joins[k])))
            for k in range(count)
        )

    def _levels(self, owner: Sequence[int]) -> list[int]:
        level: list[int] = []
        for event, waits in enumerate(self.before):
            mine = owner[event]
            level.append(max((level[b] + (owner[b] not in (ALL, mine)) for b in waits), default=0))
        return level

    def _delay(self, owner: Sequence[int], level: list[int]) -> None:
        latest: list[int | None] = [None] * len(level)
        for event in reversed(range(len(level))):
            if owner[event] != ALL and (last := latest[event]) is not None:
                level[event] = last
            for b in self.before[event]:
                at = level[event] - (owner[b] != owner[event])
                latest[b] = at if (known := latest[b]) is None else min(known, at)

    def _crossing(
        self, owner: Sequence[int], level: Sequence[int], degree: int, count: int
    ) -> tuple[list[list[int]], list[list[list[int]]]]:
        changed = self.changes()
        enters: list[list[int]] = [[] for _ in range(count)]
        joins: list[list[list[int]]] = [[[] for _ in range(degree)] for _ in range(count)]
        outputs = set(self.trace.outputs)
        for id, value in self.trace.values.items():
            maker = owner[value.made_by] if value.made_by >= 0 else ALL
            readers = [event for event in value.used_by if event not in self.guards]
            if maker != ALL and (id in outputs or any(owner[event] != maker for event in readers)):
                made = [value.made_by, *(e for e in changed.get(storage_of(self.trace, id), ()) if owner[e] == maker)]
                joins[max(level[event] for event in made)][maker].append(id)
            entering = [level[event] for event in readers if owner[event] not in (ALL, maker)]
            if entering:
                enters[min(entering)].append(id)
        return enters, joins

    def changes(self) -> dict[int, list[int]]:
        """Events that change a storage in place, by storage."""
        found: dict[int, list[int]] = defaultdict(list)
        for event in self.trace.events:
            for storage in {storage_of(self.trace, value) for value in event.mutates}:
                found[storage].append(event.index)
        return found

    def torn(self, owner: Sequence[int]) -> set[int]:
        """Events that change memory which others hold a copy of: with these owners they would not see the change.

        Memory may pass once between a rank and the trunk, as a copy of one value."""
        trace, changed, found = self.trace, self.changes(), set()
        given = {storage_of(trace, value) for value in trace.inputs}
        touched: dict[int, list[int]] = defaultdict(list)
        for event in trace.events if changed else ():
            if event.index not in self.guards:
                for storage in {storage_of(trace, v) for v in (*event.reads, *event.writes, *event.mutates)}:
                    touched[storage].append(event.index)
        for storage, events in changed.items():
            uses = touched[storage]
            first = owner[uses[0]]
            turn = next((i for i, event in enumerate(uses) if owner[event] != first), len(uses))
            if turn == len(uses) and not (first != ALL and storage in given and self._given_out(storage)):
                continue
            rest = {owner[event] for event in uses[turn:]}
            late = events[-1] >= uses[turn] if turn < len(uses) else False
            passed = {v for e in uses[turn:] for v in trace.events[e].reads if storage_of(trace, v) == storage}
            passed = {v for v in passed if owner[trace.values[v].made_by] == first or trace.values[v].made_by < 0}
            several = len(rest) > 1 or ALL not in {first, *rest} or len(passed) > 1
            if (first != ALL and storage in given) or (late and several):
                found.update(uses)
        return found

    def _given_out(self, storage: int) -> bool:
        return any(storage_of(self.trace, value) == storage for value in self.trace.outputs)


def detached(trace: Trace, id: int, events: Container[int]) -> bool:
    """Whether all of ``events`` that read a value detach it: no gradient comes back from there, not even a zero."""
    readers = [trace.events[event] for event in trace.values[id].used_by if event in events]
    return all(event.kind == "glue" and event.name == "detach" for event in readers)


def _bound(recording: Recording) -> tuple[list[list[int]], set[int]]:
    """Events that share something which one of them changes: a buffer, an attribute, an object handed from call to
    call; and those that share such an object with the outputs."""
    trace = recording.trace
    written = {name for event in trace.events if event.changes for name in (*event.changes, *event.buffers)}
    assigned = {step.target.name for step in recording.steps if step.kind == "assign"}
    users: dict[object, list[int]] = defaultdict(list)
    for event, step in zip(trace.events, recording.steps, strict=True):
        used = (*event.buffers, *event.parameters, *event.changes, *(h.name.removeprefix("model.") for h in step.held))
        keys: list[object] = [("name", name) for name in written.intersection(used)]
        if step.kind == "assign":
            keys.append(("attribute", step.target.name))
        keys += [("attribute", held.name) for held in step.held if held.name in assigned]
        keys += [("object", thing.number) for thing in objects_in((step.args, step.kwargs))]
        for key in dict.fromkeys(keys):
            users[key].append(event.index)
    returned = {("object", thing.number) for thing in objects_in(recording.outputs)}
    common = {event for key in returned for event in users.get(key, ())}
    return [events for events in users.values() if len(events) > 1], common
