"""The events of a step in an order in which branches advance side by side, so that a cut of a pipeline parts them all.

A recording has one tower after the other: stages would be towers. Here an event stands where it would end in time if
every rank ran its own branches at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from meshfit.anatomy.record_build import set_frees
from meshfit.anatomy.replay import Recording
from meshfit.axes.branch.flow import Flow, Phase
from meshfit.axes.pipeline.cut import counted


def ends(phases: Iterable[Phase], costs: Sequence[float]) -> list[float]:
    """When each event ends, if ranks do their own work at once, each at the pace at which they finish together."""
    found, now = [0.0] * len(costs), 0.0
    for phase in phases:
        for event in phase.trunk:
            now += costs[event]
            found[event] = now
        loads = [sum(costs[event] for event in own) for own in phase.own]
        for own, load in zip(phase.own, loads, strict=True):
            done = 0.0
            for event in own:
                done += costs[event]
                found[event] = now + max(loads) * min(1.0, done / load if load else 0.0)
        now += max(loads)
    return found


def side_by_side(flow: Flow, when: Mapping[tuple[str, int], float]) -> list[int]:
    """Events in the order of ``when``, each after all that it waits for. What is computed from parameters alone stands
    where it is used first: what crosses a cut is sent, and gets a gradient, whether or not it leads to the loss."""
    place = [when.get(what, 0.0) for what in counted(flow.trace.events)]
    left = [len(waits) for waits in flow.before]
    after: list[list[int]] = [[] for _ in left]
    for event, waits in enumerate(flow.before):
        for other in waits:
            after[other].append(event)
    for event in reversed(range(len(place))):
        if event in flow.of_parameters and after[event]:
            place[event] = min(place[other] for other in after[event])
    ready = [(place[event], event) for event, count in enumerate(left) if not count]
    heapify(ready)
    found = []
    while ready:
        _, event = heappop(ready)
        found.append(event)
        for other in after[event]:
            left[other] -= 1
            if not left[other]:
                heappush(ready, (place[other], other))
    return found


def reordered(recording: Recording, order: Sequence[int]) -> Recording:
    """``recording`` with its events in another order, which must keep what waits for what."""
    trace, place = recording.trace, {old: new for new, old in enumerate(order)}
    events = tuple(replace(trace.events[old], index=new) for new, old in enumerate(order))
    values = {
        id: replace(
            value,
            made_by=place.get(value.made_by, value.made_by),
            used_by=tuple(sorted(place[event] for event in value.used_by)),
        )
        for id, value in trace.values.items()
    }
    steps = [replace(recording.steps[old]) for old in order]
    set_frees(steps, trace.outputs)
    return replace(recording, trace=replace(trace, events=events, values=values), steps=tuple(steps))
