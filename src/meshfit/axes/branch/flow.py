"""What waits for what in a recording, and what its ranks then do in turns.

Every event has an *owner*: one rank, or ALL. A *phase* is what all ranks do alike (the trunk), then what each does on
its own. Before its own work a rank is handed what the trunk made (*enters*), after it all are handed what the trunk
needs of it (*joins*). An event is in the first phase in which all that it waits for is there; or, *late*, in the last
in which it is in time for those that wait for it.

In a pipeline each stage has its own phases. A value that one rank alone has when a stage ends goes to the same rank of
the next stage, and is joined in the stage in which others need it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest

from meshfit.anatomy.branches import successors
from meshfit.anatomy.cuts import StageCut, Stages, stages_at, storage_of
from meshfit.anatomy.record_program import objects_in
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


@dataclass(frozen=True)
class StagePhases:
    """What the ranks of a branch group do in each stage of a pipeline; without one there is one stage."""

    phases: tuple[tuple[Phase, ...], ...]
    """By stage."""
    held: tuple[dict[int, int], ...]
    """By stage: of what it is handed by the stage before, what one rank alone has, and that rank."""


class Flow:
    """The order of a recording's events."""

    def __init__(self, recording: Recording):
        self.recording, self.trace = recording, (trace := recording.trace)
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

    @cached_property
    def whole(self) -> Stages:
        return stages_at(self.trace, ())

    @cached_property
    def of_parameters(self) -> set[int]:
        """Events that depend on no input."""
        found: set[int] = set()
        for event in self.trace.events:
            makers = {self.trace.values[value].made_by for value in event.reads}
            if -1 not in makers and found.issuperset(self.before[event.index]):
                found.add(event.index)
        return found

    def users(self, what: Callable[[Event], Sequence[str]]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for event in self.trace.events:
            for name in what(event):
                found[name].append(event.index)
        return found

    def phases(
        self, owner: Sequence[int], degree: int, stages: Stages | None = None, *, late: bool = False
    ) -> StagePhases:
        """What the ranks do in each of ``stages``; None: in one. ``late`` is for what they do on their own."""
        stages = stages or self.whole
        found, held = [], [dict[int, int]()]
        for events, cut in zip_longest(stages.ranges, stages.cuts):
            found.append(self._phases(owner, degree, events, held[-1], cut is None, late))
            if cut is not None:
                held.append(self._holders(owner, events, held[-1], found[-1], cut))
        return StagePhases(tuple(found), tuple(held))

    def _phases(
        self,
        owner: Sequence[int],
        degree: int,
        events: range,
        held: Mapping[int, int],
        last: bool,
        late: bool,
    ) -> tuple[Phase, ...]:
        """Of one stage, which is handed what one rank alone has (``held``); after the ``last`` all have the outputs."""
        level = self._levels(owner, events, held)
        if late:
            self._delay(owner, level)
        count = max(level.values(), default=0) + 1
        trunk: list[list[int]] = [[] for _ in range(count)]
        own: list[list[list[int]]] = [[[] for _ in range(degree)] for _ in range(count)]
        for event in events:
            if event not in self.guards:
                (trunk[level[event]] if owner[event] == ALL else own[level[event]][owner[event]]).append(event)
        enters, joins = self._crossing(owner, level, degree, count, held, self.trace.outputs if last else ())
        return tuple(
            Phase(tuple(trunk[k]), tuple(map(tuple, own[k])), tuple(enters[k]), tuple(map(tuple, joins[k])))
            for k in range(count)
        )

    def _levels(self, owner: Sequence[int], events: range, held: Mapping[int, int]) -> dict[int, int]:
        """The phase of each event. What a rank alone was handed is its own work of the first phase."""
        level: dict[int, int] = {}
        for event in events:
            mine = owner[event]
            waits = [level[b] + (owner[b] not in (ALL, mine)) for b in self.before[event] if b in level]
            waits += [1 for value in self.trace.events[event].reads if held.get(value, ALL) not in (ALL, mine)]
            level[event] = max(waits, default=0)
        return level

    def _delay(self, owner: Sequence[int], level: dict[int, int]) -> None:
        latest: dict[int, int] = {}
        for event in sorted(level, reverse=True):
            if owner[event] != ALL and event in latest:
                level[event] = latest[event]
            for b in self.before[event] & level.keys():
                at = level[event] - (owner[b] != owner[event])
                latest[b] = min(latest.get(b, at), at)

    def _crossing(
        self,
        owner: Sequence[int],
        level: Mapping[int, int],
        degree: int,
        count: int,
        held: Mapping[int, int],
        outputs: Collection[int],
    ) -> tuple[list[list[int]], list[list[list[int]]]]:
        changed = self.changes()
        enters: list[list[int]] = [[] for _ in range(count)]
        joins: list[list[list[int]]] = [[[] for _ in range(degree)] for _ in range(count)]
        for id, value in self.trace.values.items():
            here = value.made_by in level
            maker = owner[value.made_by] if here else held.get(id, ALL)
            readers = [event for event in value.used_by if event in level and event not in self.guards]
            if maker != ALL and (id in outputs or any(owner[event] != maker for event in readers)):
                made = [e for e in changed.get(storage_of(self.trace, id), ()) if e in level and owner[e] == maker]
                made += [value.made_by] if here else []
                joins[max((level[event] for event in made), default=0)][maker].append(id)
            entering = [level[event] for event in readers if owner[event] not in (ALL, maker)]
            if entering:
                enters[min(entering)].append(id)
        return enters, joins

    def _holders(
        self, owner: Sequence[int], events: range, held: Mapping[int, int], phases: Iterable[Phase], cut: StageCut
    ) -> dict[int, int]:
        """Of what crosses ``cut``, what one rank alone has: it is handed on to the same rank of the next stage."""
        joined = {id for phase in phases for ids in phase.joins for id in ids}
        changed, found = self.changes(), {}
        for id in (id for id in cut.crossing if id not in joined):
            made = self.trace.values[id].made_by
            changers = {owner[e] for e in changed.get(storage_of(self.trace, id), ()) if e in events} - {ALL}
            rank = changers.pop() if changers else owner[made] if made in events else held.get(id, ALL)
            if rank != ALL:
                found[id] = rank
        return found

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
            lost = ALL not in rest and self._given_out(storage)  # all would be handed what it was before
            if (first != ALL and storage in given) or (late and (several or lost)):
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
