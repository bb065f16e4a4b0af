"""Where a model can be cut into consecutive stages, and where it should be.

A stage is a range of events. What crosses a cut are the *live* values: made before it, used at or after it. Not sent:

    inputs      given to every stage that uses them, unless they were changed in place before the cut
    constants   what depends on neither inputs nor parameters (masks, positions) is computed again by each stage

A cut is illegal where two live values share a storage that is changed at or after it (the stages would hold copies, and
the change would reach one of them only), and where a buffer that the forward writes is used on both sides of it (a
BatchNorm that is called twice: its statistics can live in one stage only), and where the forward itself asks for a
gradient of what lies before the cut. A value that skips over several cuts crosses each of them, and counts at each.

``stages`` is exact: the largest stage is as small as any split allows, up to ``band``; within that band the fewest
bytes cross. O(stages x events).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshfit.anatomy.balanced import cheapest_ends
from meshfit.anatomy.record_known import above
from meshfit.anatomy.trace import Event, Trace
from meshfit.errors import PlanError

FLOPS_PER_BYTE = 100
"""What a device computes while it moves one byte: accelerators of the last years do 100 to 300, less for small work."""

BAND = 0.03
"""How much larger than need be the largest stage may become so that fewer bytes cross the cuts."""


@dataclass(frozen=True, slots=True)
class StageCut:
    """A place between two events where a stage may end."""

    after: int
    """The last event before it."""

    crossing: tuple[int, ...]
    """Ids of the values that are sent over it."""

    bytes: int
    """Of those values, for the batch that was traced. Gradients come back in the same size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """A model split into consecutive ranges of events."""

    ranges: tuple[range, ...]
    costs: tuple[float, ...]
    cuts: tuple[StageCut, ...]
    """Between the stages: one fewer than there are ranges."""

    parameters: tuple[tuple[str, ...], ...]
    """Canonical names of the parameters that each stage uses."""

    parameter_bytes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    """Inputs of the model that each stage is given as they are."""

    recomputed: tuple[tuple[int, ...], ...]
    """Events before each stage that it runs for itself, for the constants they make."""

    ties: dict[str, tuple[int, ...]]
    """Parameters that several stages use, tied or of a module called twice: gradients are to be summed over them."""

    buffers: dict[str, tuple[int, ...]]
    """Buffers that several stages use: each keeps its own, and none of them writes it."""

    unused: tuple[str, ...]
    """Parameters that no event uses."""

    indivisible: tuple[range, ...]
    """Events with no legal cut between them that cost more than an even share: they set the largest stage."""

    @property
    def bytes(self) -> int:
        """Over all cuts."""
        return sum(cut.bytes for cut in self.cuts)

    @property
    def imbalance(self) -> float:
        """How much longer than the mean the largest stage takes: 0 is even."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean - 1 if mean else 0.0


def work(event: Event) -> float:
    """What an event takes, forward and backward, in flops; backward moves about twice what forward does."""
    cost = event.cost
    passes = 3 if cost.flops_backward else 1
    return cost.flops + cost.flops_backward + FLOPS_PER_BYTE * passes * (cost.bytes_read + cost.bytes_written)


def cuts(trace: Trace) -> tuple[StageCut, ...]:
    """Every legal cut. Of cuts with nothing but constants between them, the last."""
    return _Flow(trace).cuts()


def stages(trace: Trace, k: int, cost: Callable[[Event], float] = work, *, band: float = BAND) -> Stages:
    """``trace`` in ``k`` stages of even ``cost``; a ``PlanError`` that says why if there is no such split.

    Of splits with the same bytes, the one that parts the fewest modules; of those, the most even.
    """
    if k < 1:
        raise PlanError(f"{k} stages is not a split", "a model has one stage or more")
    flow = _Flow(trace)
    legal = flow.cuts()
    if len(legal) < k - 1:
        raise PlanError(
            f"the model cannot be cut into {k} stages",
            f"it has {_count(len(legal), 'legal cut')} among {_count(len(trace.events), 'event')}",
            *flow.why_not(),
            f"pipeline={len(legal) + 1} is the most it can take" if legal else "",
        )
    sums = [0.0, *accumulate(map(cost, trace.events))]
    places = [0, *(cut.after + 1 for cut in legal), len(trace.events)]
    at = [sums[place] for place in places]
    price = [0, *((cut.bytes << 20) + flow.depth(cut.after + 1) for cut in legal), 0]
    ends = cheapest_ends(at, price, k, band)
    return _split(flow, [legal[end - 1] for end in ends[:-1]], sums, places, band)


def stages_at(trace: Trace, after: Sequence[int]) -> Stages:
    """``trace`` cut after the events ``after``; a ``PlanError`` where that is not legal. A stage between two equal
    cuts, before the first event (-1) or after the last does nothing, and hands on what it gets."""
    flow = _Flow(trace)
    legal = {cut.after: cut for cut in (StageCut(-1, (), 0), *flow.cuts(), flow.cut_at_end())}
    for event in after:
        if event not in legal:
            near = min(legal, key=lambda place: abs(place - event), default=None)
            where = trace.events[event + 1]
            raise PlanError(
                f"the model cannot be cut before {where.name} (in {where.inside or 'its own code'}, {where.line})",
                *flow.why_not(),
                "" if near is None else f"the nearest place is before {trace.events[near + 1].name}",
            )
    sums = [0.0, *accumulate(map(work, trace.events))]
    places = [place + 1 for place in legal]
    return _split(flow, [legal[event] for event in after], sums, places, BAND)


def _split(flow: "_Flow", chosen: list[StageCut], sums: list[float], places: list[int], band: float) -> Stages:
    """``flow`` cut at ``chosen``; ``sums`` are running costs by event, ``places`` all legal ones."""
    trace, k = flow.trace, len(chosen) + 1
    bounds = [0, *(cut.after + 1 for cut in chosen), len(trace.events)]
    ranges = tuple(range(a, b) for a, b in pairwise(bounds))
    even = sums[-1] / k * (1 + band)
    lumps = (range(a, b) for a, b in pairwise(places) if sums[b] - sums[a] > even)
    users, readers = _users(trace, ranges, "parameters"), _users(trace, ranges, "buffers")
    held = tuple(tuple(name for name, who in users.items() if number in who) for number in range(k))
    return Stages(
        ranges=ranges,
        costs=tuple(sums[events.stop] - sums[events.start] for events in ranges),
        cuts=tuple(chosen),
        parameters=held,
        parameter_bytes=tuple(sum(trace.parameters[name].bytes for name in names) for names in held),
        inputs=tuple(flow.inputs(events) for events in ranges),
        recomputed=tuple(flow.recomputed(events) for events in ranges),
        ties={name: tuple(who) for name, who in users.items() if len(who) > 1},
        buffers={name: tuple(who) for name, who in readers.items() if len(who) > 1},
        unused=tuple(name for name in trace.parameters if name not in users),
        indivisible=tuple(lumps),
    )


def _users(trace: Trace, ranges: Sequence[range], what: str) -> dict[str, list[int]]:
    """Stages that use each of the parameters, or buffers."""
    users: dict[str, list[int]] = {}
    for number, events in enumerate(ranges):
        for name in dict.fromkeys(name for i in events for name in getattr(trace.events[i], what)):
            users.setdefault(name, []).append(number)
    return users


def storage_of(trace: Trace, value: int) -> int:
    """The memory a value lies in; a negative number where it shares it with no other."""
    storage = trace.values[value].storage
    return storage if storage >= 0 else -2 - value


class _Flow:
    """How values flow through a trace: who lives where, and what must not be parted."""

    def __init__(self, trace: Trace):
        self.trace, self.end = trace, len(trace.events)
        changed: dict[int, list[int]] = {}  # events that change a storage in place, by storage
        for event in trace.events:
            for value in event.mutates:
                changed.setdefault(self._storage(value), []).append(event.index)
        self.changed, self.given = changed, set(trace.inputs)
        self.last = {value.id: max(value.used_by, default=-1) for value in trace.values.values()}
        self.last |= dict.fromkeys(trace.outputs, self.end)
        self.constants = self._constants()
        self.idle = [self._idle(event) for event in trace.events]

    def _storage(self, value: int) -> int:
        return storage_of(self.trace, value)

    def _constants(self) -> set[int]:
        """Values that any stage can compute for itself: constants that nothing else is ever written into."""
        found = {value.id for value in self.trace.values.values() if value.constant}
        spoilt: set[int] = set()  # storages
        while True:
            for event in self.trace.events:
                foreign = event.parameters or any(value not in found for value in event.reads)
                spoilt.update(self._storage(value) for value in event.mutates if foreign)
            kept = {value for value in found if self._storage(value) not in spoilt}
            for event in self.trace.events:  # what is made from a spoilt one is no constant either
                if any(value not in kept for value in event.reads):
                    kept.difference_update(event.writes)
            if kept == found:
                return found
            found = kept

    def _idle(self, event: Event) -> bool:
        """Whether an event only makes constants, or nothing (it looks at a value)."""
        made = {*event.writes, *event.mutates}
        return not event.changes and (not made or (not event.parameters and made <= self.constants))

    def _changed_before(self, value: int, place: int) -> bool:
        return any(event < place for event in self.changed.get(self._storage(value), ())[:1])

    def places(self) -> list[int]:
        """Where a cut leaves something to do on both sides: before each event that is not idle, but for the first."""
        return [i for i in range(self.end) if not self.idle[i]][1:]

    def cuts(self) -> tuple[StageCut, ...]:
        barred = self._barred()
        born: dict[int, list[int]] = {}
        for value in self.trace.values.values():
            if value.id not in self.constants and self.last[value.id] > value.made_by:
                born.setdefault(max(value.made_by, -1), []).append(value.id)
        live = dict.fromkeys(born.get(-1, ()))
        found, upto = [], 0
        for place in self.places():
            for event in range(upto, place):
                live.update(dict.fromkeys(born.get(event, ())))
            upto = place
            live = {value: None for value in live if self.last[value] >= place}
            if place in barred or self._parts_aliases(live, place):
                continue
            found.append(self._cut(live, place))
        return tuple(found)

    def cut_at_end(self) -> StageCut:
        """After all events: the outputs cross."""
        return self._cut(dict.fromkeys(v for v in self.trace.outputs if v not in self.constants), self.end)

    def _cut(self, live: Iterable[int], place: int) -> StageCut:
        sent = tuple(v for v in live if v not in self.given or self._changed_before(v, place))
        return StageCut(place - 1, sent, sum(self.trace.values[v].bytes for v in sent))

    def _parts_aliases(self, live: Iterable[int], place: int) -> bool:
        later = {storage for storage, events in self.changed.items() if events[-1] >= place}
        written = [storage for storage in map(self._storage, live if later else ()) if storage in later]
        return len(set(written)) < len(written)

    def _barred(self) -> set[int]:
        """Places between two uses of a buffer that is written in the forward, or within what autograd is asked for."""
        found: set[int] = set()
        for calls in self._stateful().values():
            found.update(range(calls[0] + 1, calls[-1] + 1))
        for event in self._gradients():
            first = min(self.trace.values[value].used_by[0] for value in event.reads)
            found.update(range(first + 1, event.index + 1))
        return found

    def _gradients(self) -> list[Event]:
        """Events that ask autograd for a gradient."""
        return [e for e in self.trace.events if e.kind == "glue" and e.name in ("grad", "backward") and e.reads]

    def _stateful(self) -> dict[str, list[int]]:
        """Events that use a buffer which one of them writes, where there are several; by buffer."""
        written = {name for event in self.trace.events for name in event.changes}
        calls: dict[str, list[int]] = {}
        for event in self.trace.events if written else ():
            for name in written.intersection((*event.changes, *event.buffers, *event.parameters)):
                calls.setdefault(name, []).append(event.index)
        return {name: where for name, where in calls.items() if len(where) > 1}

    def why_not(self) -> list[str]:
        """Facts on what cannot be cut, the largest first."""
        facts = []
        busy = self.end - sum(self.idle)
        if busy < 2:
            names = [event.name for event in self.trace.events if not self.idle[event.index]]
            facts.append(f"all of it is one event: {', '.join(names) or 'none'}")
        for name, calls in list(self._stateful().items())[:3]:
            line = self.trace.events[calls[-1]].line
            facts.append(f"{name} is written in the forward and used {len(calls)} times, last at {line or 'its end'}")
        for event in self._gradients()[:3]:
            facts.append(f"{event.name} at {event.line or event.inside or 'the top'} needs all that it looks back on")
        if self.changed:
            lines = dict.fromkeys(
                f"{event.name} at {event.line or event.inside or 'the top'}"
                for event in self.trace.events
                if event.mutates and not self.idle[event.index]
            )
            facts += [f"{line} changes in place what others still read" for line in list(lines)[:3]]
        return facts

    def depth(self, place: int) -> int:
        """Modules that a cut at ``place`` would part."""
        before, after = (self.trace.events[i].inside for i in (place - 1, place))
        return len({*above(before)} & {*above(after)}) - 1

    def inputs(self, events: range) -> tuple[int, ...]:
        """Inputs of the model that a stage takes as they are."""
        used = self._used(events)
        return tuple(v for v in self.trace.inputs if v in used and not self._changed_before(v, events.start))

    def _used(self, events: range) -> set[int]:
        """Values that a stage reads, or that the model returns after it."""
        used = {value for i in events for value in self.trace.events[i].reads}
        return used | {*self.trace.outputs} if events.stop == self.end else used

    def recomputed(self, events: range) -> tuple[int, ...]:
        """Idle events before a stage that make, or shape in place, constants it uses."""
        needed = self._used(events) & self.constants
        memory = {self._storage(value) for value in needed}
        found = []
        for i in reversed(range(events.start)):
            event = self.trace.events[i]
            if self.idle[i] and (
                needed.intersection(event.writes) or memory.intersection(map(self._storage, event.mutates))
            ):
                found.append(i)
                needed.update(event.reads)
                memory.update(map(self._storage, event.reads))
        return tuple(reversed(found))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
