"""Groups of branches that are worth running side by side.

A branch is worth what running it beside the others of its group saves, less what their ranks then say to each other. Of
groups within each other those are chosen that save most. Branches whose results are used in several places (towers
under a loss of many terms) are not found in the model as a whole; so it is also looked at in *segments*: what comes
before the first events that bring independent work together, then what comes before the next such events, and so on.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from meshfit.anatomy.branches import branches
from meshfit.anatomy.trace import Trace, only
from meshfit.axes.branch.flow import Flow

LEAST = 0.002
"""Share of the model's cost below which a branch is left in the trunk."""

MEETS = 0.02
"""Share of the model's cost that an event must bring together with other work to end a segment."""

LINK = 200
"""What a device computes while one byte goes to another: as ``FLOPS_PER_BYTE``, for links between devices."""

TRIED = 4096
"""Ways to deal out the branches of a group that are all tried; beyond it the largest goes first."""

Groups = list[list[tuple[int, ...]]]
"""Each as the events of its branches."""


def candidates(flow: Flow, degree: int, costs: Sequence[float]) -> list[Groups]:
    """Ways to run branches side by side."""
    whole = _chosen(flow, flow.trace, range(len(costs)), degree, costs)
    parts = [_chosen(flow, *_part(flow.trace, some), degree, costs) for some in segments(flow, costs)]
    return [
        whole,
        sorted((group for part in parts for group in part), key=lambda g: -_gain(flow.trace, g, degree, costs)),
    ]


def _chosen(flow: Flow, part: Trace, place: Sequence[int], degree: int, costs: Sequence[float]) -> Groups:
    """Groups of ``part`` that do not overlap; those that save most first. ``place`` is where its events stand in the
    whole."""
    groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for branch in branches(part, worth=LEAST):
        groups[branch.group].append(tuple(place[event] for event in branch.events))
    parts = {number: _kept_together(flow, group) for number, group in groups.items()}
    gains = {number: _gain(flow.trace, each, degree, costs) for number, each in parts.items()}
    inside: dict[int | None, list[int]] = defaultdict(list)
    for number, group in groups.items():
        own = {event for branch in group for event in branch}
        around = [n for n, g in groups.items() if n != number and any(own <= {*branch} for branch in g)]
        inside[min(around, key=lambda n: sum(map(len, groups[n])), default=None)].append(number)

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
    at = even(loads, degree)
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


def even(loads: Sequence[float], degree: int) -> tuple[int, ...]:
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


def segments(flow: Flow, costs: Sequence[float]) -> list[list[int]]:
    """Events up to where independent work meets, then up to where it meets again, and so on."""
    price, left, found = np.asarray(costs, np.float64), list(range(len(costs))), []
    while left:
        place = {event: i for i, event in enumerate(left)}
        above = np.zeros((len(left), len(left)), bool)  # row: what an event comes after, and itself
        spent, late = np.zeros(len(left)), np.zeros(len(left), bool)
        for i, event in enumerate(left):
            before = [place[b] for b in flow.before[event] if b in place]
            above[i] = above[before].any(0) if before else False
            above[i, i] = True
            spent[i] = price[left][above[i]].sum()
            meets = spent[i] - price[event] - spent[before].max() if before else 0.0
            late[i] = meets > MEETS * price.sum() or (bool(before) and late[before].any())
        if late.all():
            break
        found.append([event for event, after in zip(left, late, strict=True) if not after])
        left = [event for event, after in zip(left, late, strict=True) if after]
    return found


def _part(trace: Trace, some: Iterable[int]) -> tuple[Trace, list[int]]:
    """Those events as a trace that gives out all that others use, and where they stand in the whole."""
    place = sorted(some)
    own = set(place)
    used = {id for id, v in trace.values.items() if v.made_by in own and not own.issuperset(v.used_by)}
    part = only(trace, place)
    return replace(part, outputs=tuple(id for id in part.values if id in used or id in trace.outputs)), place
