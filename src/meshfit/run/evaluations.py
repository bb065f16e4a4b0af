"""Evaluations of a run on its validation data: when they are due, and what they come to."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshfit.comm.objects import broadcast_object
from meshfit.data.loader import Batch
from meshfit.evaluation import measure
from meshfit.loss.objective import LossDenominator
from meshfit.optimizers import measure_named

if TYPE_CHECKING:
    from meshfit.run.run import Run


class Evaluations:
    """Those of ``run``; ``over``: what their loss is a mean over."""

    def __init__(self, run: "Run", over: LossDenominator):
        self.run, self.over = run, over

    def due_here(self, batch: Batch) -> bool:
        """Whether this rank evaluates after it."""
        return self.run.coordination.leads and self.due(batch)

    def due(self, batch: Batch) -> bool:
        """Whether some rank does."""
        run, every = self.run, self.run.job.valid_every
        if run.valid is None:
            return False
        ends = run.last_step is None and batch.last and batch.epoch + 1 >= (run.job.epochs or math.inf)  # of a stream
        return ends or run.step == run.last_step or (batch.last if every is None else run.step % every == 0)

    def make(self) -> dict[str, float]:
        """Loss and metrics on the validation data, the same on every rank; of the averaged weights if there are."""
        run = self.run
        measured = run.coordination.evaluate(self._measure)
        if run.scheduler is not None and run.scheduler.following:
            told = measured if run.mesh.world is None else broadcast_object(measured, run.mesh.world)
            run.scheduler.evaluated(told, run.job.followed)
        return measured

    def _measure(self) -> dict[str, float]:
        run, job = self.run, self.run.job
        assert run.valid is not None
        with run.events.span("evaluate"), run.events.aside(), self._averaged():
            measured = measure(
                run.placed,
                run.valid,
                objective=job.valid_objective,
                over=self.over,
                metrics=job.metrics or {},
                precision=run.precision,
            )
            if job.keep_best:
                measure_named(job.keep_best.lstrip("-"), measured)
            if run.best is not None:
                run.best.consider(measured, run.model)
        return measured

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within it the model has the averaged weights, if there are."""
        average = self.run.update.average
        if average is None:
            yield
            return
        average.swap()
        self.run.placed.changed()
        try:
            yield
        finally:
            average.swap()
            self.run.placed.changed()
