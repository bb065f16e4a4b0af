"""A training as the caller sees it: here in this process, or in ranks that are started for it.

Both are iterated for their steps, can be told to stop, and end with an outcome. Told to stop after a step,
both end with exactly the weights of that step: ranks may already be at the next one, and drop it together.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit import layout
from meshfit.job import Job
from meshfit.launch import heap
from meshfit.launch.channel import Channel
from meshfit.launch.devices import Devices
from meshfit.launch.world import World, connect, from_environment
from meshfit.plan import Plan
from meshfit.run import Run
from meshfit.step import Step

RANK_MODULES = ("torch._dynamo", "meshfit.loop", "meshfit.drive")  # torch's optimizers import _dynamo when built
FEED_SECONDS = 0.1  # how often ranks tell of their steps when nobody waits for each


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training came to, on the CPU."""

    weights: dict[str, Tensor]
    notes: list[str]
    seconds: float
    phases: list[dict[str, float]]
    """By rank: seconds in data, forward_backward, exchange, update, evaluate."""
    best: float | None = None
    captured: dict[str, Any] = field(default_factory=dict)
    """What a tap put aside in the first rank."""


Tap = Callable[[Run], None]
"""Given each rank's run before it starts, to look into it."""


def begin(job: Job, *, lockstep: bool, folder: Path | None = None, tap: Tap | None = None) -> "Here | Ranked":
    """Check the job, and set up its training. ``lockstep``: ranks wait for the caller after each step."""
    given = from_environment()
    if given is not None:
        return Here(job.settled(count=given.size, kind=given.device.type), given, lockstep, folder, tap)
    job = job.settled()
    assert isinstance(job.plan, Plan)
    assert isinstance(job.devices, Devices)
    if job.plan.devices == 1:
        return Here(job, World(0, 1, job.devices.device(0)), lockstep, folder, tap)
    return Ranked(job, lockstep, folder, tap)


class Here:
    """Trains in this process: a world of one, or one rank of a world that torchrun made."""

    def __init__(self, job: Job, world: World, lockstep: bool, folder: Path | None, tap: Tap | None = None):
        self.job, self.world = job, world
        self.notes: list[str] = []
        self.outcome: Outcome | None = None
        self._lockstep, self._folder, self._tap = lockstep, folder, tap
        self._stop = False
        self.model = _checked(job)
        self.last_step: int | None = None
        self.iterator: Iterator[Step] | None = None

    def __iter__(self) -> Iterator[Step]:
        self.iterator = self._steps()
        return self.iterator

    def _steps(self) -> Iterator[Step]:
        from meshfit.loop import train

        was_on = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self.world.size > 1:
            connect(self.world)
        elif self.world.device.type == "cpu":
            heap.keep()
        run = Run(replace(self.job, model=self.model), self.world, folder=self._folder, same=False)
        self.notes = run.notes
        self.last_step = run.last_step
        run.may_stop = self._lockstep and self.world.size > 1
        if self._tap is not None:
            self._tap(run)
        try:
            for step in train(run, stop=lambda: self._stop):
                yield step
                if self._stop and self.world.size == 1:
                    break
            self.outcome = outcome_of(run)
        finally:
            run.close()
            self.model.to(was_on)
        load(self.model, self.outcome.weights)

    def stop(self) -> None:
        self._stop = True

    def finish(self) -> None:
        """Stop, and take the weights."""
        _finish(self)


class Ranked:
    """Trains in ranks started for it; this process hears of every step and gets the weights at the end."""

    def __init__(self, job: Job, lockstep: bool, folder: Path | None, tap: Tap | None = None):
        from meshfit.launch.warm import warm

        warm(
            "torch._dynamo", "meshfit.loop", "meshfit.drive"
        )  # the ranks' template loads torch while the model is built
        self.job = job
        self.model = _checked(job)
        self.outcome: Outcome | None = None
        self.notes: list[str] = []
        self.last_step: int | None = None
        self._stop = False
        self._lockstep = lockstep
        self._work = Work(replace(job, model=self.model), lockstep, folder, tap)
        self.iterator: Iterator[Step] | None = None

    def __iter__(self) -> Iterator[Step]:
        self.iterator = self._steps()
        return self.iterator

    def _steps(self) -> Iterator[Step]:
        from meshfit.launch.local import Ranks

        assert isinstance(self.job.plan, Plan)
        assert isinstance(self.job.devices, Devices)
        with Ranks(self._work, size=self.job.plan.devices, devices=self.job.devices) as ranks:
            for _, message in ranks.messages():
                if isinstance(message, Begun):
                    self.notes, self.last_step = message.notes, message.last_step
                    continue
                for step in message:
                    if not self._stop:
                        yield step
                    if self._lockstep:
                        ranks.send(0, "stop" if self._stop else "go")
            self.outcome = ranks.results[0]
            assert self.outcome is not None
            load(self.model, self.outcome.weights)

    def stop(self) -> None:
        self._stop = True

    def finish(self) -> None:
        """Stop, wait for the ranks, and take their weights."""
        _finish(self)


def _checked(job: Job) -> nn.Module:
    """The job's model, if it can take the plan."""
    assert isinstance(job.plan, Plan)
    model = job.build()
    layout.check(job.plan, model)
    return model


def _finish(training: "Here | Ranked") -> None:
    training.stop()
    if training.iterator is not None:
        for _ in training.iterator:
            pass


@dataclass(frozen=True)
class Begun:
    """What a rank says before its first step."""

    notes: list[str]
    last_step: int | None


@dataclass(frozen=True)
class Work:
    """What each rank does: the loop, with its steps fed to the caller by the first rank."""

    job: Job
    lockstep: bool
    folder: Path | None
    tap: Tap | None

    def __call__(self, world: World, channel: Channel) -> Outcome | None:
        from meshfit.loop import train

        run = Run(self.job, world, folder=self.folder)
        run.may_stop = self.lockstep
        if self.tap is not None:
            self.tap(run)
        feed = Feed(channel, self.lockstep) if world.rank == 0 else None
        if feed is not None:
            channel.send(Begun(run.notes, run.last_step))
        try:
            for step in train(run, stop=feed.stopped if feed is not None else lambda: False):
                if feed is not None:
                    feed.add(step)
        finally:
            if feed is not None:
                feed.flush()
        outcome = outcome_of(run)
        run.close()
        return outcome if world.rank == 0 else None


class Feed:
    """Tells the caller of steps: each at once in lockstep, else a few at a time."""

    def __init__(self, channel: Channel, lockstep: bool):
        self.channel, self.lockstep = channel, lockstep
        self.held: list[Step] = []
        self.sent = time.perf_counter()
        self._unanswered = 0

    def add(self, step: Step) -> None:
        self.held.append(step)
        if self.lockstep or step.valid or time.perf_counter() - self.sent > FEED_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.held:
            self.channel.send(self.held)
            self._unanswered += len(self.held)
            self.held, self.sent = [], time.perf_counter()

    def stopped(self) -> bool:
        """What the caller said to the steps it was told of; waits for its answer."""
        asked = False
        while self.lockstep and self._unanswered:
            asked = self.channel.recv() == "stop"
            self._unanswered -= 1
        return asked


def everywhere(job: Job, work: Callable[[World], Any]) -> list[Any]:
    """What ``work`` returns in each rank of the job's plan, by rank; the job must be settled."""
    assert isinstance(job.plan, Plan)
    assert isinstance(job.devices, Devices)
    given = from_environment()
    if given is not None and given.size > 1:
        connect(given)
        results: list[Any] = [None] * given.size
        dist.all_gather_object(results, work(given))
        return results
    if job.plan.devices == 1:
        return [work(World(0, 1, job.devices.device(0)))]
    from meshfit.launch.local import Ranks
    from meshfit.launch.warm import warm

    warm(*RANK_MODULES)
    with Ranks(_Silent(work), size=job.plan.devices, devices=job.devices) as ranks:
        return ranks.results


@dataclass(frozen=True)
class _Silent:
    """Work that tells the caller nothing until it returns."""

    work: Callable[[World], Any]

    def __call__(self, world: World, channel: Channel) -> Any:
        return self.work(world)


def outcome_of(run: Run) -> Outcome:
    run.at_end()
    mine = dict(run.events.seconds)
    phases: list = [mine]
    if run.world.size > 1:
        phases = [None] * run.world.size
        dist.all_gather_object(phases, mine)
    return Outcome(
        weights={name: tensor.cpu() for name, tensor in run.final_weights().items()},
        notes=run.notes,
        seconds=time.perf_counter() - run.started,
        phases=phases,
        best=None if run.best is None else run.best.value,
        captured=run.captured,
    )


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put trained weights into the caller's model, where its tensors are."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensor.copy_(weights[name])
