"""Parts of a model that do not wait for each other: towers, heads, the arms of an Inception block.

Events form a graph by what they read. Event J *closes* event E if every way from E to the model's outputs leads
through J, and J is the first such event. What J closes directly, each with what that closes in turn, are the candidates
to run side by side before J: no way leads from the middle of one into another, only from its last event, which is then
a fork. Which of them have nothing in common is found going backwards from J: an event that feeds several groups
which were apart so far is the fork they start from.
O(events x the longest way around a join).
"""

from collections import Counter
from dataclasses import dataclass
from functools import reduce

from meshfit.anatomy.cuts import storage_of, work
from meshfit.anatomy.trace import Trace

WORTH = 0.05
"""Least share of the model's cost that makes a branch worth a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelBranch:
    """Events that may run beside those of the other branches of its group."""

    group: int
    """Branches of one group are independent of each other. Groups are numbered from the costliest on."""

    events: tuple[int, ...]
    cost: float
    share: float
    """Of the cost of the whole model."""

    fork: int
    """The last event that feeds several branches of the group; -1 if nothing but the model's inputs does."""

    join: int
    """The first event that waits for all of them; the number of events if they only meet in the outputs."""

    parameters: tuple[str, ...]
    shared: tuple[str, ...]
    """Parameters that another branch of the group uses too: on two devices their gradients are to be summed."""


def branches(trace: Trace, *, worth: float = WORTH) -> tuple[ParallelBranch, ...]:
    """Groups of two or more independent branches, each with at least ``worth`` of the model's cost.

    A branch may hold groups of its own. The most that running a group side by side can save is its cost
    less that of its largest branch.
    """
    costs = [work(event) for event in trace.events]
    total = sum(costs)
    if not total:
        return ()
    weight = lambda group: sum(costs[event] for part in group[2] for event in part)
    groups = sorted(_groups(trace, costs, worth * total), key=weight, reverse=True)
    found = []
    for number, (fork, join, parts) in enumerate(groups):
        held = [dict.fromkeys(name for event in part for name in trace.events[event].parameters) for part in parts]
        users = Counter(name for names in held for name in names)
        for part, names in zip(parts, held, strict=True):
            spent = sum(costs[event] for event in part)
            found.append(
                ParallelBranch(
                    group=number,
                    events=part,
                    cost=spent,
                    share=spent / total,
                    fork=fork,
                    join=join,
                    parameters=tuple(names),
                    shared=tuple(name for name in names if users[name] > 1),
                )
            )
    return tuple(found)


def _groups(trace: Trace, costs: list[float], least: float) -> list[tuple[int, int, list[tuple[int, ...]]]]:
    """(fork, join, branches) wherever two or more branches cost ``least`` each."""
    tree = _Closing(_successors(trace))
    spent = [0.0] * (tree.end + 1)
    for event in tree.events:  # those before an event come after it in this order
        spent[event] += costs[event]
    for event in reversed(tree.events):
        spent[tree.closed_by[event]] += spent[event]
    found = []
    for join, members in tree.members.items():
        if len(members) > 1 and spent[join] > 2 * least:
            for fork, roots in _forks(tree, join, spent, least):
                found.append((fork, join, [tree.all_under(part) for part in roots]))
    return found


def _forks(tree: "_Closing", join: int, spent: list[float], least: float) -> list[tuple[int, list[list[int]]]]:
    """Forks among what ``join`` closes, each with the branches it feeds (as members of the join); -1: the inputs."""
    members = tree.members[join]  # in the order of the forward
    owner = {member: member for member in members}
    parts = {member: [member] for member in members}
    weight = {member: spent[member] for member in members}

    def find(member: int) -> int:
        while owner[member] != member:
            owner[member] = member = owner[owner[member]]
        return member

    found = []
    for member in reversed(members):
        fed = {find(tree.member_above(after, join)) for after in tree.after[member] if after != join}
        worthy = [part for part in fed if weight[part] > least]
        if len(worthy) > 1:
            found.append((member, [list(parts[part]) for part in sorted(worthy)]))
        for part in fed:
            small, large = sorted((find(member), part), key=lambda root: len(parts[root]))
            if small != large:
                owner[small] = large
                parts[large] += parts.pop(small)
                weight[large] += weight.pop(small)
    worthy = [part for part in parts if weight[part] > least]
    if len(worthy) > 1:
        found.append((-1, [parts[part] for part in worthy]))
    return found


class _Closing:
    """The tree of who closes whom (immediate post-dominators); its root is the end of the model."""

    def __init__(self, after: list[set[int]]):
        self.after, self.end = after, len(after)
        self.closed_by = [self.end] * (self.end + 1)
        self._depth = [0] * (self.end + 1)
        self.events = [event for event in reversed(range(self.end)) if after[event]]
        """Those that lead to an output, last first."""
        for event in self.events:
            closer = reduce(self._meet, after[event])
            self.closed_by[event], self._depth[event] = closer, self._depth[closer] + 1
        self.members: dict[int, list[int]] = {}
        for event in reversed(self.events):
            self.members.setdefault(self.closed_by[event], []).append(event)

    def _meet(self, a: int, b: int) -> int:
        """The first event that both lead to."""
        while a != b:
            if self._depth[a] < self._depth[b]:
                a, b = b, a
            a = self.closed_by[a]
        return a

    def member_above(self, event: int, join: int) -> int:
        """The one that ``join`` closes directly, and that closes ``event``."""
        while self.closed_by[event] != join:
            event = self.closed_by[event]
        return event

    def all_under(self, members: list[int]) -> tuple[int, ...]:
        """``members`` and everything they close, in the order of the forward."""
        found, todo = [], list(members)
        while todo:
            event = todo.pop()
            found.append(event)
            todo += self.members.get(event, ())
        return tuple(sorted(found))


def _successors(trace: Trace) -> list[set[int]]:
    """Events that must wait for each event, of those that lead to an output: the others are left out."""
    after = successors(trace)
    alive = [False] * len(after) + [True]
    for event in reversed(range(len(after))):
        after[event] = {other for other in after[event] if alive[other]}
        alive[event] = bool(after[event])
    return after


def successors(trace: Trace) -> list[set[int]]:
    """Events that must wait for each event; the number of events stands for the outputs.

    Who changes a storage in place waits for all who used it before, and is waited for by all who use it after.
    """
    end = len(trace.events)
    after: list[set[int]] = [set() for _ in range(end)]
    values = trace.values
    changed = {storage_of(trace, value) for event in trace.events for value in event.mutates}
    changer: dict[int, int] = {}  # of such a storage: the last event that changed it, and who read it since
    readers: dict[int, list[int]] = {}
    for event in trace.events:
        for value in event.reads:
            if values[value].made_by not in (-1, -2, event.index):
                after[values[value].made_by].add(event.index)
        written = {storage_of(trace, value) for value in event.mutates}
        touched = {storage_of(trace, value) for value in (*event.reads, *event.writes)} | written if changed else set()
        for storage in touched & changed:
            if storage in changer:
                after[changer[storage]].add(event.index)
            if storage in written:
                for reader in readers.pop(storage, ()):
                    after[reader].add(event.index)
                changer[storage] = event.index
            else:
                readers.setdefault(storage, []).append(event.index)
    for value in trace.outputs:
        for last in (values[value].made_by, changer.get(storage_of(trace, value), -1)):
            if last >= 0:
                after[last].add(end)
    return after
