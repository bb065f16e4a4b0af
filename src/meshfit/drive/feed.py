"""Steps and what else ranks report, on their way to the caller."""

import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor

from meshfit.launch.channel import Channel
from meshfit.run import Run
from meshfit.step import Step

LATE_STEPS = 200  # that may be missing when the rank that reports is killed
FEED_SECONDS = 0.1  # how often ranks report steps, and look for a stop, when nobody is waited for after each step


@dataclass(frozen=True)
class Begun:
    """What a rank says before its first step."""

    notes: list[str]
    last_step: int | None


@dataclass(frozen=True)
class WholeTensor:
    """A trained parameter or buffer."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Late:
    """The last steps of others, which they may not have come to report; most were reported before."""

    steps: list[Step]


class Feed:
    """Reports steps to the caller, and hears whether it asks to stop. In lockstep each step is sent at once and
    answered; else a few are sent at a time, and none waits for an answer."""

    def __init__(self, channel: Channel, lockstep: bool):
        self.channel, self.lockstep = channel, lockstep
        self.held: list[Step] = []
        self.aside: deque[Step] = deque(maxlen=LATE_STEPS)
        """Steps that the leader is to report, and may not have."""
        self.sent = self._looked = time.perf_counter()
        self._unanswered = 0
        self._stopped = False

    def add(self, step: Step, run: Run) -> None:
        self.late(run)
        if not run.coordination.reports:
            if run.coordination.missed is not None:
                self.aside.append(step)
            return
        self.held.append(step)
        if self.lockstep:
            self.flush()
        elif step.valid or time.perf_counter() - self.sent > FEED_SECONDS:
            self.flush(sum(1 for _ in takewhile(lambda each: each.reading.ready, self.held)))

    def late(self, run: Run) -> None:
        """As the new leader, send the steps that the one before may not have sent."""
        missed = run.coordination.missed
        if run.coordination.reports and missed is not None and self.aside:
            self.flush()
            self._send_late([replace(step, valid=missed.get(step.step, step.valid)) for step in self.aside])
            self.aside.clear()

    def complete(self, run: Run) -> None:
        """Send all steps that a checkpoint is about to hold."""
        self.flush()
        if late := run.coordination.unreported():
            self._send_late(late)

    def _send_late(self, steps: list[Step]) -> None:
        self.channel.send(Late(steps))
        self._unanswered += len(steps)

    def flush(self, count: int | None = None) -> None:
        """Send the first ``count`` of the steps that are held; None: all, also those whose loss must be waited for."""
        if some := self.held[:count]:
            self.channel.send(some)
            self._unanswered += len(some)
            self.held, self.sent = self.held[len(some) :], time.perf_counter()

    def stopped(self) -> bool:
        """Whether the caller has asked to stop. In lockstep this waits for its answers to the steps sent so far."""
        if self.lockstep:
            while self._unanswered:
                self._hear()
                self._unanswered -= 1
        elif (now := time.perf_counter()) - self._looked > FEED_SECONDS:
            self._looked = now
            while not self._stopped and self.channel.poll():
                self._hear()
        return self._stopped

    def _hear(self) -> None:
        self._stopped |= self.channel.recv() == "stop"


class ReportedSteps:
    """Which of the last steps were reported to the caller. Ranks that are started again make steps again, and report
    those that ranks before them did not come to; a rank that saves reports what others may not come to."""

    def __init__(self) -> None:
        self.furthest = 0
        self._steps: deque[int] = deque(maxlen=10 * LATE_STEPS)
        self._before = 0
        """The furthest when the present ranks began."""
        self._for_others: set[int] = set()

    def begin(self) -> None:
        """Other ranks begin."""
        self._before, self._for_others = self.furthest, set()

    def take_back(self, last: int) -> None:
        """Steps after the ``last`` are to be reported again."""
        self.furthest = last
        self._steps = deque((step for step in self._steps if step <= last), self._steps.maxlen)

    def is_new(self, step: int, *, late: bool) -> bool:
        """Whether this is the first report of ``step``. ``late``: from a rank that did not take it."""
        if late or step <= self._before:
            again = step in self._steps or step <= self._before - 10 * LATE_STEPS
        else:  # a server that goes back has its workers take steps again
            again = step in self._for_others
        self._for_others.discard(step)
        if again:
            return False
        if late:
            self._for_others.add(step)
        self._steps.append(step)
        self.furthest = max(self.furthest, step)
        return True
