"""How the ranks of a run work together around a step: who hands out batches, evaluates, reports and saves.

Coordination               all ranks in step; every rank knows what is next, the first reports
LocalSteps                 every rank steps for itself; weights are averaged now and then (exchange/local.py)
server/coordination.py     workers of model servers
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist

from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.mesh import Mesh
from meshfit.axes.precision import LossScale
from meshfit.data.loader import Batch
from meshfit.errors import JobError, NonFiniteError
from meshfit.exchange.local import Local, Outer
from meshfit.exchange.protocol import Exchange
from meshfit.job import Job
from meshfit.run.phase_parts import make_exchange, make_update
from meshfit.step import Step

if TYPE_CHECKING:
    from meshfit.run.run import Run

Metrics = dict[str, float]


class Coordination:
    """All ranks in step. ``run`` asks it in this order: ``mesh``, ``last_step``, ``before_sharding``, ``assemble``,
    ``ready``; then, step by step, ``batches``, ``count`` and ``evaluate``; then ``finish``."""

    worker = 0
    """Which worker of model servers the ranks of this world are."""
    peers: dist.ProcessGroup | None = None
    """The ranks at this one's place in all workers, where gradients are not summed in this world alone."""
    may_stop = False
    """Whether a stop may come from another rank unasked."""
    missed: dict[int, Metrics] | None = None
    """By step: evaluations made for a leader that was lost. None: the leader stays the same."""

    def __init__(self, run: "Run"):
        self.run = run

    @property
    def leads(self) -> bool:
        """Whether the ranks of this world evaluate, report, and raise what all have met."""
        return True

    @property
    def saves(self) -> bool:
        """Whether this rank takes part in saving."""
        return True

    @property
    def reports(self) -> bool:
        """Whether this rank reports results to the caller."""
        return self.leads and self.run.world.rank == 0

    @property
    def alone(self) -> bool:
        """Whether a stop concerns this rank alone."""
        return self.run.world.size == 1

    def mesh(self, mesh: Mesh) -> Mesh:
        return mesh

    def last_step(self) -> int | None:
        """None: until a stream has ended ``epochs`` times."""
        return last_step(self.run.job, self.run.loader.batches_until)

    def before_sharding(self) -> None:
        """The model's parameters are still in their own shapes."""

    def assemble(self, scale: LossScale | None) -> None:
        """Give each phase of the run its update and its exchange."""
        shared: Exchange | None = None
        for phase in self.run.phases:
            phase.update = make_update(self.run, scale, phase)
            with phase.alone():
                phase.exchange = shared or make_exchange(self.run, phase)
            if self.run.placed.shards is not None:  # their gradients come to one exchange
                shared = phase.exchange

    def ready(self) -> None:
        """The run is assembled."""

    def batches(self) -> Iterator[Batch]:
        return self.run.epochs()

    def count(self, batch: Batch) -> None:
        """A step was taken."""
        self.run.step, self.run.samples = self.run.step + 1, self.run.samples + batch.size

    def evaluate(self, measure: Callable[[], Metrics]) -> Metrics:
        return measure()

    def whole(self) -> AbstractContextManager[None]:
        """Around what reads the state of a checkpoint: within it, this world holds all of it."""
        return nullcontext()

    def unreported(self) -> list[Step]:
        """Steps in what ``whole`` gave last that other ranks took, and may not come to report."""
        return []

    def resumed(self) -> None:
        """A checkpoint was loaded."""

    def met(self, error: NonFiniteError) -> None:
        """A loss or gradient was not finite, on all ranks in the same step."""
        raise error

    def agree(self) -> None:
        """After the last step: raise on all ranks what some have met."""

    def finish(self) -> None:
        """The last step has been made."""


class LocalSteps(Coordination):
    """Ranks have other weights between two averagings. Evaluations, checkpoints and the outcome are of the mean of all;
    a stop, also for a NaN on one rank, is agreed when they average. Losses are those of the first rank's share."""

    may_stop = True

    def __init__(self, run: "Run"):
        super().__init__(run)
        self._error: NonFiniteError | None = None

    def assemble(self, scale: LossScale | None) -> None:
        run, plan = self.run, self.run.plan
        (phase,) = run.phases
        outer = Outer() if plan.exchange == "diloco" else None
        self.local = Local(
            run.model, run.mesh.over("data"), run.world.device, every=plan.every, outer=outer, overlap=plan.overlap
        )
        phase.update, phase.exchange = make_update(run, scale, phase), self.local

    def ready(self) -> None:
        if batch_norms(self.run.model) and self.run.plan.batchnorm == "global":
            self.run.notes.append(f"batchnorm: over each rank's own samples, with exchange={self.run.plan.exchange}")

    def evaluate(self, measure: Callable[[], Metrics]) -> Metrics:
        with self.whole():
            return measure()

    def whole(self) -> AbstractContextManager[None]:
        self.run.streams.settle()
        return self.local.agreed()

    def resumed(self) -> None:
        """The saved weights are common to all ranks; the outer optimizer's momentum begins anew."""
        self.local.begin()
        self.local.step = self.run.step

    def met(self, error: NonFiniteError) -> None:
        """Other ranks hear of it at the next averaging."""
        self._error = self._error or error
        self.local.halt()

    def agree(self) -> None:
        self.run.streams.settle()
        self.local.agree(self._error)

    def finish(self) -> None:
        self.local.settle()


def last_step(job: Job, batches_until: Callable[[float], float | None]) -> int | None:
    """``batches_until``: of so many epochs; None: not known."""
    limits = [] if job.steps is None else [int(job.steps)]
    if job.epochs is not None and (batches := batches_until(job.epochs)) is not None:
        limits.append(max(1, math.ceil(round(batches, 9))))
    elif job.epochs is not None and job.epochs % 1:
        raise JobError(f"epochs={job.epochs} of a stream, whose length is not known", "steps=, or whole epochs")
    return min(limits) if limits else None
