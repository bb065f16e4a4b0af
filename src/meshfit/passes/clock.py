"""When each action of a step ran on this rank, and the picture of all ranks together.

On CPUs by the clock; on GPUs by events in the stream, so that nobody waits for it. A rank that waits for a tensor is
idle: an action starts when what it needs is there.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshfit.comm.objects import all_gather_object
from meshfit.events import current
from meshfit.schedule.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from meshfit.schedule.simulate import ActionSpan, Simulated

SPANS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward", WEIGHT: "weight"}


class Clock:
    """Keeps the times of the last step; on a GPU, where each costs some microseconds, if ``kept`` is set."""

    def __init__(self, device: torch.device):
        self.device, self.plan = device, None
        self.kept = device.type != "cuda"
        self._spans: list[tuple[Action, Any, Any]] = []

    def begin(self, plan: Schedule) -> None:
        self.plan, self._spans = plan, []
        if self.kept and self.device.type == "cuda":
            torch.cuda.synchronize(self.device) if not hasattr(self, "_zero") else None
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero_at = time.time_ns()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        events, start = current(), self._now() if self.kept else None
        began = events.mark()
        yield
        if self.kept:
            self._spans.append((action, start, self._now()))
        name = SPANS[action.kind]
        events.between(name, began, events.mark(), microbatch=action.microbatch, stage=action.stage)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def spans(self) -> tuple[ActionSpan, ...]:
        """Of the last step, in seconds on a clock that ranks of one machine share."""
        if self.device.type != "cuda":
            ahead = _ahead()
            return tuple(ActionSpan(a, (start + ahead) / 1e9, (end + ahead) / 1e9) for a, start, end in self._spans)
        torch.cuda.synchronize(self.device)
        at = lambda event: self._zero_at / 1e9 + self._zero.elapsed_time(event) / 1e3
        return tuple(ActionSpan(action, at(start), at(end)) for action, start, end in self._spans)

    def together(self, group: dist.ProcessGroup | None) -> Simulated:
        """The last step on all ranks of ``group``, from 0 on. They call it together."""
        assert self.plan is not None
        every = [self.spans] if group is None else all_gather_object(self.spans, group)
        zero = min(spans[0].start for spans in every)
        moved = tuple(tuple(ActionSpan(s.action, s.start - zero, s.end - zero) for s in spans) for spans in every)
        return Simulated(self.plan, moved)


def _ahead() -> float:
    """How far the time of day is ahead of the counter, by the reading that was disturbed least."""
    readings = []
    for _ in range(9):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) / 2))
    return min(readings)[1]
