"""What a schedule would do if every action took the time it is said to take.

Each rank works through its list; an action starts when what it needs is there. So one gets start and end of each, the
share of time that ranks are idle (the bubble), and how many activations each keeps at its most.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from meshfit.schedule.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule, Step, in_order

UNITS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}
"""The usual: backward takes twice as long as forward, half of that for the gradients of the weights."""

WIDTH = 160
"""Columns of a grid, at most."""


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """When an action ran, in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule in time; measured ones look the same."""

    schedule: Schedule
    spans: tuple[tuple[ActionSpan, ...], ...]
    """By rank, in order."""

    @property
    def start(self) -> float:
        return min((span.start for rank in self.spans for span in rank), default=0.0)

    @property
    def end(self) -> float:
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def idle(self, rank: int) -> float:
        """Share of the time in which ``rank`` has nothing to do."""
        busy = sum(span.end - span.start for span in self.spans[rank])
        return 1 - busy / self.seconds if self.seconds else 0.0

    @property
    def bubble(self) -> float:
        """Share of the time in which ranks have nothing to do, over all of them."""
        return sum(map(self.idle, range(len(self.spans)))) / max(1, len(self.spans))

    @property
    def kept(self) -> tuple[int, ...]:
        """The most activations alive at once, by rank: of one stage for one microbatch each, from its forward to the
        end of its backward."""
        return tuple(
            max(accumulate({FORWARD: 1, BACKWARD: -1, INPUT: 0, WEIGHT: -1}[a.kind] for a in order), default=0)
            for order in self.schedule.orders
        )

    def grid(self) -> str:
        """A row a rank, time to the right; a cell is about as long as the shortest action."""
        shortest = min((span.end - span.start for rank in self.spans for span in rank), default=1.0) or 1.0
        columns = min(WIDTH, max(1, round(self.seconds / shortest)))
        unit = self.seconds / columns or 1.0
        size = max((len(_cell(span.action, self.schedule)) for rank in self.spans for span in rank), default=1) + 1
        lines = []
        for rank, spans in enumerate(self.spans):
            row = [" " * size] * columns
            for span in spans:
                first = min(columns - 1, round((span.start - self.start) / unit))
                last = max(first + 1, round((span.end - self.start) / unit))
                cells = [_cell(span.action, self.schedule)] + ["-" * (size - 1)] * (last - first - 1)
                row[first:last] = [cell.ljust(size) for cell in cells]
            lines.append(f"rank {rank} |" + "".join(row[:columns]).rstrip())
        return "\n".join(lines)


def _cell(action: Action, schedule: Schedule) -> str:
    chunk = "abcdefghijklmnopqrstuvwxyz"[action.stage // schedule.ranks % 26] if schedule.chunks > 1 else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def simulate(
    schedule: Schedule,
    seconds: Callable[[Action], float] | None = None,
    transfer: Callable[[int], float] | float = 0.0,
) -> Simulated:
    """``seconds`` of each action (``UNITS`` over the chunks, if not said); ``transfer`` from a stage to the next, and
    of the gradient back: they delay, and cost no rank its time."""
    spans: list[list[ActionSpan]] = [[] for _ in range(schedule.ranks)]
    for (action, rank, _), start, end in _times(schedule, seconds, transfer):
        spans[rank].append(ActionSpan(action, start, end))
    return Simulated(schedule, tuple(map(tuple, spans)))


def duration(
    schedule: Schedule,
    seconds: Callable[[Action], float] | None = None,
    transfer: Callable[[int], float] | float = 0.0,
) -> float:
    """``simulate(...).seconds``, and nothing else: for a search over many schedules."""
    return max((end for _, _, end in _times(schedule, seconds, transfer)), default=0.0)


def _times(
    schedule: Schedule, seconds: Callable[[Action], float] | None, transfer: Callable[[int], float] | float
) -> Iterator[tuple[Step, float, float]]:
    """Every step with its start and end."""
    takes = seconds or (lambda action: UNITS[action.kind] / schedule.chunks)
    delay = transfer if callable(transfer) else lambda stage: transfer
    free, ends = [0.0] * schedule.ranks, []
    for step in in_order(schedule):
        action, rank, waits = step
        start = free[rank]
        for number, stage in waits:
            arrives = ends[number] + (delay(stage) if stage >= 0 else 0.0)
            if arrives > start:
                start = arrives
        free[rank] = end = start + takes(action)
        ends.append(end)
        yield step, start, end
