"""A training that the caller iterates for its steps: wherever it runs."""

from abc import abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import nn

from meshfit.axes.data.batchnorm import batch_norms
from meshfit.axes.refuse import check, check_device, check_optimizer, check_phases
from meshfit.checkpoint import pretrained
from meshfit.checkpoint.files import joined
from meshfit.checkpoint.graceful_stop import GracefulStop, graceful_stop
from meshfit.checkpoint.parts import Parts, WholeModel
from meshfit.deferred import Deferred, Unfollowable
from meshfit.drive.work import Outcome, Tap
from meshfit.job import Job, plan_of
from meshfit.step import Step


class Training:
    """A training that can be iterated, once, for its steps."""

    def __init__(self, job: Job, lockstep: bool, tap: Tap | None):
        self.said: list[str] = []
        """What was decided before ranks started, and what was met in this process, in words."""
        self.deferred = self._defer(job)
        self.model = job.build() if self.deferred is None else self.deferred.model
        self.said += [f"weights: skipped: {line}" for line in job.skipped]
        self._check(job)
        self.job = job
        self.notes: list[str] = []
        self.last_step: int | None = None
        """How many steps it will be; None while that is not known."""
        self.outcome: Outcome | None = None
        self.parts: Parts | None = None
        """What this rank holds of the trained model, where no process has all of it."""
        self.first = True
        """Whether this process writes what all of them have."""
        self.writes = job.out is not None
        """Whether this process writes the run's folder."""
        self.folder: Path | None = None
        self.taken_back = 0
        """How often its last steps were found to be wrong: they come again, as they should have been."""
        self._lockstep, self._tap = lockstep, tap
        self._stop = False
        self._iterator: Generator[Step, None, None] | None = None

    def _defer(self, job: Job) -> Deferred | None:
        """The model on meta, where a function builds it and ranks can each have their part without the whole."""
        plan = plan_of(job)
        if isinstance(job.model, nn.Module) or plan.devices == 1 or plan.server:
            return None
        try:
            return job.defer()
        except Unfollowable as why:
            self.said.append(f"model: built whole in every process, since what its function does is not put off: {why}")
            return None

    def _check(self, job: Job) -> None:
        """Refuse a plan that this model cannot be trained under."""
        check(plan_of(job), self.model)
        check_device(plan_of(job), self.model, job.devices)
        check_phases(plan_of(job), [phase.name for phase in job.phases])
        check_optimizer(plan_of(job), job.make_optimizer(self.model))
        if plan_of(job).microbatches > 1 and any(norm.training for norm in batch_norms(self.model)):
            self.said.append(
                "batchnorm: over the samples of each microbatch, not of the whole batch, as where one device"
                " accumulates gradients; microbatches=1 normalises over the batch"
            )

    def __iter__(self) -> Iterator[Step]:
        self._iterator = self._all_steps()
        return self._iterator

    def _all_steps(self) -> Generator[Step, None, None]:
        """The training, which answers signals and notices of preemption."""
        job = self.job
        notice = None if job.preemption is None else str(job.preemption)
        saves = self.folder if job.checkpoint is not None else None
        with graceful_stop(saves, first=self.writes, notice=notice, grace=job.grace_seconds) as graceful:
            yield from self._steps(graceful)
        assert self.outcome is not None
        graceful.end(self.outcome.ended_by)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End it, whatever state it is in: no rank is left."""
        if self._iterator is not None:
            self._iterator.close()

    def stop(self) -> None:
        """End after the step that was last seen (in lockstep), or a little later."""
        self._stop = True

    def finish(self) -> None:
        """Stop, wait for the end, and have the weights in the caller's model."""
        self.stop()
        if self._iterator is not None:
            for _ in self._iterator:
                pass

    def shape(self) -> nn.Module:
        """A model with the names and shapes of the trained one."""
        return self.model if self.parts is None else self.job.defer().model

    def gather(self) -> nn.Module:
        """The whole trained model. All ranks call it together."""
        return self.model

    def save(self, target: Path | str, **how: Any) -> list[Path | str]:
        """Write the trained model where others open it. All ranks call it together; the first writes."""
        weights = self.job.weights
        sources = [] if weights is None else [weights] if isinstance(weights, Path | str) else weights
        held = self.parts or WholeModel(self.model)
        return pretrained.save(self.shape(), held, target, sources=sources, here=self.first, **how)

    def _take_folder(self, out: Path | str | None, folder: Path | None) -> None:
        self.folder, self.job = folder, replace(self.job, out=out)

    def file(self, name: str) -> Path | str:
        """Of the run."""
        assert self.job.out is not None
        return joined(self.job.out, name)

    @abstractmethod
    def _steps(self, graceful: GracefulStop) -> Generator[Step, None, None]: ...
