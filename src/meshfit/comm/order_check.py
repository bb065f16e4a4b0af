"""Do all ranks issue their collectives in one order, and does everything complete if each operation blocks its ranks?

NCCL runs what a rank issues on a communicator in the order of issue, and promises nothing about the progress of one
communicator while another waits. So what must hold is what ``check`` asks of the logs of all ranks:

    each communicator sees the same operations, sizes and dtypes on all its ranks, in the same order
    if every operation blocks its rank until all ranks of the operation have come to it, every rank comes to its end

``CollectiveLog`` writes such a log in a rank while it trains; for schedules of pipelines it is made without any rank.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshfit.torch_private.groups import COLLECTIVES, number_among_equals, replaced_methods
from meshfit.torch_private.trees import tree_leaves


@dataclass(frozen=True, slots=True)
class Operation:
    """What one rank issued."""

    communicator: str
    kind: str
    """Of a message, "send": both ends log it alike."""
    ranks: tuple[int, ...]
    """That take part; of a message the sender, then the receiver."""
    elements: int
    dtype: str
    where: str = field(default="", compare=False)
    """The line that issued it."""

    @property
    def what(self) -> str:
        return f"{self.kind} of {self.elements} {self.dtype.removeprefix('torch.')}"

    def __str__(self) -> str:
        return f"{self.what} on {self.communicator} by {self.ranks}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two ranks of a communicator that do not issue the same."""

    communicator: str
    number: int
    """Of the operation, counted from 0."""
    rank: int
    mine: Operation | None
    """What ``rank`` issues; None: nothing any more."""
    first: int
    """The rank that it is compared with."""
    theirs: Operation | None

    def __str__(self) -> str:
        mine, theirs = (op or "nothing" for op in (self.mine, self.theirs))
        return f"{self.communicator}, number {self.number}: rank {self.rank} {mine}; rank {self.first} {theirs}"


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """A rank that never comes to its end, though all ranks issue the same on each communicator."""

    rank: int
    operation: Operation

    def __str__(self) -> str:
        return f"rank {self.rank} waits for ever in {self.operation}"


def check(logs: Sequence[Sequence[Operation]]) -> list[Mismatch] | list[BlockedRank]:
    """What is wrong with the logs of all ranks, by rank; nothing if all is well."""
    return differences(logs) or blocked(logs)


def differences(logs: Sequence[Sequence[Operation]]) -> list[Mismatch]:
    seen: dict[tuple[str, tuple[int, ...]], dict[int, list[Operation]]] = defaultdict(dict)
    for rank, log in enumerate(logs):
        for operation in log:
            # Messages of several pairs may be on one communicator: each pair has an order of its own
            members = tuple(sorted(operation.ranks))
            seen[operation.communicator, members].setdefault(rank, []).append(operation)
    wrong = []
    for (communicator, members), by in seen.items():
        first = min(by)
        for rank in members:
            mine, theirs = by.get(rank, []), by[first]
            for i in range(max(len(mine), len(theirs))):
                one, other = (log[i] if i < len(log) else None for log in (mine, theirs))
                if one != other:
                    wrong.append(Mismatch(communicator, i, rank, one, first, other))
                    break
    return wrong


def blocked(logs: Sequence[Sequence[Operation]]) -> list[BlockedRank]:
    """Every operation blocks each of its ranks until all of them have come to it."""
    at = [0] * len(logs)
    count: list[Mapping[Any, int]] = [defaultdict(int) for _ in logs]

    def stands_at(rank: int) -> tuple[Operation, int] | None:
        if at[rank] == len(logs[rank]):
            return None
        operation = logs[rank][at[rank]]
        return operation, count[rank][operation.communicator, operation.ranks]

    moving = True
    while moving:
        moving = False
        for rank in range(len(logs)):
            while (here := stands_at(rank)) is not None and all(stands_at(r) == here for r in here[0].ranks):
                for r in here[0].ranks:
                    at[r] += 1
                    count[r][here[0].communicator, here[0].ranks] += 1  # type: ignore[index]
                moving = True
    return [BlockedRank(rank, logs[rank][i]) for rank, i in enumerate(at) if i < len(logs[rank])]


Answer = Callable[[str, dist.ProcessGroup, str, tuple[Any, ...]], Any]
"""Does a method of a group, on the named communicator, with its arguments, in place of the group."""


class CollectiveLog:
    """Logs what this rank issues while it is entered. Not a dispatch mode: those change what autograd does.
    ``answer``: does what was issued, where no group of processes does; ``where``: says which line issued it."""

    def __init__(self, answer: Answer | None = None, where: Callable[[], str] = str):
        self.log: list[Operation] = []
        self._answer, self._where = answer, where
        self._names: dict[str, str] = {}
        self._replaced = ExitStack()

    def __enter__(self) -> "CollectiveLog":
        self._replaced.enter_context(replaced_methods(lambda method: partial(self._noted, method)))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.close()

    def communicator(self, group: dist.ProcessGroup) -> str:
        """Its ranks, and which of the groups of just these ranks it is: the same on all of them."""
        if (name := self._names.get(group.group_name)) is None:
            ranks = dist.get_process_group_ranks(group)
            name = self._names[group.group_name] = f"{communicator(ranks, number_among_equals(group))}"
        return name

    def _noted(self, method: str, before: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._note(method, group, args)
            if self._answer is not None:
                return self._answer(method, group, self.communicator(group), (*args, *kwargs.values()))
            return before(group, *args, **kwargs)

        return call

    def _note(self, method: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        kind = "send" if method == "recv" else COLLECTIVES[method][0]
        sides = [[t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args]
        elements = max((sum(t.numel() for t in side) for side in sides), default=0)
        elements *= kind != "all_to_all"  # there each rank says another size, as agreed before
        dtype = str(next((t.dtype for side in sides for t in side), ""))
        if kind == "send":
            peer, own = ranks[args[1]], ranks[group.rank()]
            ranks = (own, peer) if method == "send" else (peer, own)
        self.log.append(Operation(self.communicator(group), kind, ranks, elements, dtype, self._where()))


def communicator(ranks: Sequence[int], number: int) -> str:
    """The name of the group with that number among those of just these ranks."""
    return f"{','.join(map(str, ranks))}#{number}"
