"""Steps as ranks report them to the caller."""

import time
from collections import deque
from dataclasses import dataclass, replace

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
class Late:
    """The last steps of a leader that was lost, from the next one; most were reported before."""

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
        if self.lockstep or step.valid or time.perf_counter() - self.sent > FEED_SECONDS:
            self.flush()

    def late(self, run: Run) -> None:
        """As the new leader, send the steps that the one before may not have sent."""
        missed = run.coordination.missed
        if run.coordination.reports and missed is not None and self.aside:
            self.flush()
            steps = [replace(step, valid=missed.get(step.step, step.valid)) for step in self.aside]
            self.channel.send(Late(steps))
            self._unanswered += len(steps)
            self.aside.clear()

    def flush(self) -> None:
        if self.held:
            self.channel.send(self.held)
            self._unanswered += len(self.held)
            self.held, self.sent = [], time.perf_counter()

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
