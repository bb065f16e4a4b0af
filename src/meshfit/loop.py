"""The training step, in time order: data, forward and backward, exchange, update, yield.

Every rank runs this loop; on one device it is the whole training. Logging, progress and callbacks belong to
whoever iterates.
"""

import time
from collections.abc import Callable, Iterator

from meshfit.exchange.protocol import RepeatBatch
from meshfit.nonfinite import NonFiniteWatch
from meshfit.observe.rank import tell_batch
from meshfit.run import Run
from meshfit.step import Reading, Step


def train(run: Run, stop: Callable[[], bool] = lambda: False) -> Iterator[Step]:
    """Train in this rank, yielding after every optimizer step.

    ``stop`` is asked before each backward. If it says so on any rank, all ranks drop the step under way where
    ``run.may_stop``; else all end after the next step, when on a GPU too the flag has been read without waiting.
    """
    events, batches, watch = run.events, run.batches(), NonFiniteWatch(run)
    while True:
        events.step = run.step + 1
        with events.span("data"):
            batch = next(batches, None)
        if batch is None:
            break
        if run.step == 0:
            tell_batch(events, batch)
        statistics = run.statistics.snapshot()
        try:
            with events.span("forward_backward"):
                run.schedule(batch, stop)
            with events.span("exchange"):
                scalars = run.exchange.finish()
            if run.may_stop and scalars.stop:
                run.placed.buffers.drop()
                run.statistics.restore(statistics)
                run.exchange.clear()
                break
            if run.guard is not None:
                run.guard(batch)
            with events.span(run.update.span):
                correction = run.schedule.loss.correction(batch, scalars.count)
                loss, lr = scalars.loss * correction, run.update.learning_rate
                run.tap(correction)
                updated = run.update(run.exchange.gradients, loss, correction, run.exchange.norm)
                run.placed.buffers.commit()
                reading = Reading(loss, updated.norm, updated.taken, scalars.stop, *scalars.broken)
                run.exchange.clear()
        except RepeatBatch:
            run.placed.buffers.drop()
            continue
        run.coordination.count(batch)
        watch.see(reading, batch, statistics)
        yield Step(
            step=run.step,
            epoch=batch.epoch,
            last=batch.last,
            lr=lr,
            samples=run.samples,
            seconds=time.perf_counter() - run.started,
            reading=reading,
            valid=run.evaluate() if run.evaluation_is_due(batch) else None,
            staleness=run.staleness,
        )
        if run.out_of_patience or watch.stopped:
            break
    watch.finish()
    run.update.settle()
