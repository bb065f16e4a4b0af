"""The training step, in time order: data, forward and backward, exchange, update, yield.

Every rank runs this loop; on one device it is the whole training. Logging, progress and callbacks belong to
whoever iterates.
"""

import time
from collections.abc import Callable, Iterator

from meshfit.data.loader import Batch
from meshfit.errors import JobError
from meshfit.exchange.protocol import RepeatBatch
from meshfit.exchange.update import Evaluated
from meshfit.nonfinite import NonFiniteWatch
from meshfit.observe.rank import tell_batch
from meshfit.phases import PhaseStep, TrainedPhase, combined_reading
from meshfit.run import Run
from meshfit.step import Step


def train(run: Run, stop: Callable[[], bool] = lambda: False) -> Iterator[Step]:
    """Train in this rank, yielding after every optimizer step.

    ``stop`` is asked before each backward. If it says so on any rank, all ranks drop the step under way where
    ``run.may_stop``; else all end after the next step, when on a GPU too the flag has been read without waiting.
    """
    if run.valid is None and run.scheduler is not None and run.scheduler.following:
        raise JobError(f"{run.scheduler.name} follows a metric of evaluations", "give valid=, data to evaluate on")
    events, batches, watch = run.events, run.batches(), NonFiniteWatch(run)
    while not (run.out_of_patience or watch.stopped):
        events.step = run.step + 1
        with events.span("data"):
            batch = next(batches, None)
        if batch is None:
            break
        if run.step == 0:
            tell_batch(events, batch)
        due = [phase for phase in run.phases if phase.due(run.step + 1)]
        done, readings = [], []
        try:
            for phase in due:
                statistics = run.statistics.snapshot()
                with phase.alone():
                    one = advance(run, phase, batch, stop if phase is due[-1] else lambda: False, last=phase is due[-1])
                if one is None:
                    run.statistics.restore(statistics)
                    break
                done.append(one)
                readings.append(one.reading)
                watch.see(readings[-1], batch, statistics, one.name)
        except RepeatBatch:
            run.placed.buffers.drop()
            continue
        if len(done) < len(due):
            break
        run.coordination.count(batch)
        run.digests.after(run.step)
        yield Step(
            step=run.step,
            epoch=batch.epoch,
            last=batch.last,
            lr=done[0].lr,
            samples=run.samples,
            seconds=time.perf_counter() - run.started,
            reading=readings[0] if len(run.phases) == 1 else combined_reading(done),
            valid=run.evaluations.make() if run.evaluations.due_here(batch) else None,
            staleness=run.staleness,
        )
    watch.finish()
    for phase in run.phases:
        phase.update.settle()


def advance(run: Run, phase: TrainedPhase, batch: Batch, stop: Callable[[], bool], *, last: bool) -> PhaseStep | None:
    """One phase of a step: forward and backward, exchange, update. None: all ranks are to stop, and drop it."""
    events, exchange = run.events, phase.exchange
    loss_sum, buffers = phase.schedule.loss, phase.schedule.buffers

    def again() -> Evaluated:
        buffers.commit()
        exchange.clear()
        phase.schedule(batch, lambda: False)
        sums = exchange.finish()
        factor = loss_sum.correction(batch, sums.count)
        return Evaluated(exchange.gradients, sums.loss * factor, factor, exchange.norm)

    with events.span("forward_backward"):
        phase.schedule(batch, stop)
    with events.span("exchange"):
        scalars = exchange.finish()
    if run.may_stop and scalars.stop:
        buffers.drop()
        exchange.clear()
        return None
    phase.check()
    if phase.guard is not None:
        phase.guard(batch)
    with events.span(phase.update.span):
        correction = loss_sum.correction(batch, scalars.count)
        loss, lr = scalars.loss * correction, phase.update.learning_rate
        run.tap(correction)
        values = loss_sum.logged(scalars.values)
        updated = phase.update(exchange.gradients, loss, correction, exchange.norm, last=last, again=again)
        buffers.commit()
        exchange.clear()
    return PhaseStep(
        name=phase.asked.name,
        loss=loss,
        norm=updated.norm,
        taken=updated.taken,
        stop=scalars.stop,
        broken=scalars.broken,
        values=values,
        lr=lr,
    )
