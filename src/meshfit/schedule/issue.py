"""In what order each rank issues its work and its messages: one order for all ranks, of which each issues its part.

All actions and messages of a step stand in one line: actions by the time at which they would start if each took its
usual time (``simulate``), every message right after the action that makes it. A rank issues what it takes part in, in
that order: its own actions, what it sends, what it receives.

    sender     sends as soon as the message is made
    receiver   posts the receive when its sender has begun to make it: mostly one action before it is needed, so that it
               travels while the rank still works, and never so early that it waits for an action of later on

So no order of blocking can stop it. Let every send and receive block both its ranks until both have come to it, and let
one queue serve a rank, messages and kernels alike (``CUDA_DEVICE_MAX_CONNECTIONS=1``): the first entry of the line that
is not done has all its ranks waiting at it, and needs nothing that comes after it. In 1f1b, where a rank sends forward
while its neighbour sends backward to it, both ends take the two messages in the same turn, and need not be one batch.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from meshfit.schedule.actions import BACKWARD, FORWARD, WEIGHT, Action, Message, Schedule
from meshfit.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message on its way from rank to rank."""

    message: Message
    source: int
    target: int

    def __str__(self) -> str:
        kind, stage, microbatch = self.message
        return f"{stage}{kind}{microbatch}:{self.source}>{self.target}"


Entry = Action | Transfer


@cache
def line(schedule: Schedule) -> tuple[Entry, ...]:
    """Every action and message of a step."""
    spans = simulate(schedule).spans
    started = [(span.start, rank, i) for rank, own in enumerate(spans) for i, span in enumerate(own)]
    found: list[Entry] = []
    for _, rank, i in sorted(started):
        action = schedule.orders[rank][i]
        found.append(action)
        if (transfer := sent_by(schedule, action)) is not None:
            found.append(transfer)
    return tuple(found)


@cache
def issued(schedule: Schedule, rank: int) -> tuple[Entry, ...]:
    """What ``rank`` issues, in order."""
    own = lambda entry: schedule.rank_of(entry.stage) == rank
    return tuple(
        entry
        for entry in line(schedule)
        if (rank in (entry.source, entry.target) if isinstance(entry, Transfer) else own(entry))
    )


def sent_by(schedule: Schedule, action: Action) -> Transfer | None:
    """The message that ``action`` makes for another rank."""
    forward = action.kind == FORWARD
    to = action.stage + (1 if forward else -1)
    if action.kind == WEIGHT or not 0 <= to < schedule.stages:
        return None
    source, target = schedule.rank_of(action.stage), schedule.rank_of(to)
    message = (FORWARD if forward else BACKWARD, action.stage, action.microbatch)
    return Transfer(message, source, target) if source != target else None


@cache
def pairs(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Ranks that hold neighbouring stages, the lower first, in order."""
    held = [schedule.rank_of(stage) for stage in range(schedule.stages)]
    return tuple(sorted({(min(a, b), max(a, b)) for a, b in pairwise(held) if a != b}))
