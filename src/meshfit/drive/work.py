"""What each rank does in a training: it trains, and the one that reports sends its steps to the caller."""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshfit.checkpoint.graceful_stop import heard_in_rank
from meshfit.checkpoint.parts import Parts
from meshfit.checkpoint.resume import saved
from meshfit.comm.objects import all_gather_object
from meshfit.drive.feed import Begun, Feed, WholeTensor
from meshfit.drive.out_of_memory import accounted
from meshfit.errors import NonFiniteError
from meshfit.job import Job
from meshfit.launch.channel import Channel
from meshfit.launch.world import World
from meshfit.loop import train
from meshfit.observe.rank import observed
from meshfit.run import Run
from meshfit.step import Step


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training came to."""

    notes: list[str]
    seconds: float
    phases: list[dict[str, float]]
    """By rank: seconds in data, forward_backward, exchange, update, evaluate."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Where they are not in the caller's model already."""
    best: dict[str, float] | None = None
    """The evaluation whose weights these are."""
    captured: dict[str, Any] = field(default_factory=dict)
    """What a tap put aside in the first rank."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """What the axes were found to act on."""
    ended_by: str = ""
    """A signal, or a notice, that asked it to end."""


Tap = Callable[[Run], None]
"""Given each rank's run before it starts, to look into it."""


@dataclass(frozen=True)
class Work:
    """What each rank does: it trains, and the one that reports sends its steps to the caller."""

    job: Job
    lockstep: bool
    folder: Path | None
    tap: Tap | None
    make: Callable[[Job, World], Run] = field(repr=False)
    """Holds the secret or key of the run."""

    def __call__(self, world: World, channel: Channel) -> Outcome | None:
        if self.job.checkpoint is not None and self.folder is not None:
            heard_in_rank(self.folder, world.rank)
        run = self.make(self.job, world)
        run.may_stop |= self.lockstep
        feed, coordination = Feed(channel, self.lockstep), run.coordination

        def begun() -> None:
            if coordination.reports:
                channel.send(Begun(run.notes, run.last_step))

        try:
            for _ in driven(run, self.folder, self.tap, begun=begun, stop=feed.stopped, feed=feed):
                pass
        except NonFiniteError:  # raised by all ranks in the same step: the training until then is not lost
            weights = run.placed.tensors(keep=coordination.reports)
            if coordination.reports:
                feed.flush()
                channel.send(Outcome(weights=weights, notes=run.notes, seconds=0.0, phases=[]))
            if run.mesh.world is not None:
                dist.barrier()  # no rank raises before the caller has it
            if not coordination.leads:
                return None
            raise
        feed.late(run)
        feed.flush()
        outcome = outcome_of(run)
        weights = {}
        if run.deferred is None or run.placed.is_whole:
            weights = run.placed.tensors(keep=coordination.leads and run.world.rank == 0)
        else:  # no process need hold all of it beside the caller
            for name, tensor in Parts(run.placed).tensors():
                if run.world.rank == 0:
                    channel.send(WholeTensor(name, tensor))
        run.exchange.remove()
        run.events.close()  # the model goes with this process: nothing else need be put back
        return replace(outcome, weights=weights) if run.mesh.rank == 0 else None


@dataclass(frozen=True)
class Silent:
    """Work on a job that sends the caller nothing until it returns."""

    job: Job
    work: Callable[[Job, World], Any]

    def __call__(self, world: World, channel: Channel) -> Any:
        return self.work(self.job, world)


def driven(
    run: Run,
    folder: Path | None,
    tap: Tap | None,
    *,
    begun: Callable[[], None],
    stop: Callable[[], bool],
    feed: "Feed | None" = None,
) -> Generator[Step, None, None]:
    """Train ``run`` in this rank: restored from ``folder`` and saved there, observed, its steps yielded. ``begun`` is
    called before the first step; ``stop`` says whether the caller has asked to end. ``feed`` gets each step before it
    is saved: ranks that go on from a checkpoint do not report the steps before it again."""
    if tap is not None:
        tap(run)
    alone = run.coordination.alone  # then it is left after the step, and no other rank hears of it
    before = (lambda: None) if feed is None else partial(feed.complete, run)
    with saved(run, folder, before) as save, observed(run), accounted(run):
        begun()
        for step in train(run, (lambda: False) if alone else stop):
            if feed is not None:
                feed.add(step, run)
            asked = save is not None and save(step.valid)
            yield step
            if asked or (alone and stop()):
                break


def outcome_of(run: Run) -> Outcome:
    """All but the weights, which are then in the model. All ranks call it together."""
    run.coordination.finish()
    run.at_end()
    mine = run.events.phases(), run.loader.skipped
    found = [mine] if run.world.size == 1 else all_gather_object(mine)
    phases, skipped = (list(each) for each in zip(*found, strict=True))
    seconds = time.perf_counter() - run.started
    run.settle()
    return Outcome(
        notes=[*run.notes, *_skipped(sorted({why for each in skipped for why in each}))],
        seconds=seconds,
        phases=phases,
        best=None if run.best is None else run.best.measured,
        captured=run.captured,
        found=run.placed.found,
        ended_by=run.ended_by,
    )


def _skipped(bad: list[str]) -> list[str]:
    """Bad samples that were skipped, for the report."""
    if not bad:
        return []
    more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
    said = "; ".join(" ".join(why.split()) for why in bad[:5])
    return [f"data: {len(bad)} bad sample{'s were' if len(bad) > 1 else ' was'} skipped: {said}{more}"]
