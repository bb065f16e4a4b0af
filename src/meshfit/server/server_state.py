"""The state that model servers hold (optimizer, schedule, averaged weights), fetched for a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshfit.data.loader import Loader, Position
from meshfit.run import Run
from meshfit.server.keeper import load_schedule
from meshfit.server.shared_model import mine
from meshfit.server.worker import ServerUpdate, Worker
from meshfit.server.worker_group import WorkerGroup


class ServerState:
    def __init__(self, run: Run, worker: Worker | WorkerGroup, update: ServerUpdate):
        self.run, self.worker, self.update = run, worker, update
        self._scheduled = 0
        """Steps that the scheduler has been taken through."""

    @contextmanager
    def fetched(self, own: Loader) -> Iterator[None]:
        """Within it, optimizer, schedule and average of ``run`` are as the servers hold them. ``own``: what gives a
        worker batches of its own, with asynchronous updates."""
        run = self.run
        now, every = (run.step, run.samples, run.position), self.worker.state()
        named, average = dict(run.model.named_parameters()), self.update.average
        for tensors, facts in every:
            for name, held in facts["keeper"]["state"].items():
                if name in named:
                    run.optimizer.state[named[name]] = dict(held)
            for key, value in tensors.items():
                kind, _, rest = key.partition("/")
                name, _, word = rest.rpartition("/")
                if kind == "state" and name in named:
                    value = value if word == "step" else mine(run.placed, named[name], value)
                    run.optimizer.state[named[name]][word] = value
                elif kind == "average" and average is not None and rest in named:
                    average.held[rest] = mine(run.placed, named[rest], value)
        keeper = every[0][1]["keeper"]
        load_schedule(run.optimizer, self.update.scheduler, keeper, self._scheduled)
        self._scheduled = keeper["steps"]
        if run.plan.staleness:
            self._back_to(every[0][1], own)
            self.worker.pull()  # as new as the state
        try:
            yield
        finally:
            run.step, run.samples, run.position = now
            run.optimizer.state.clear()
            if average is not None:
                average.held.clear()

    def _back_to(self, facts: dict[str, Any], own: Loader) -> None:
        """Set step and position in whole batches, so that any plan can resume: before the batch of the oldest gradient
        that is not applied yet. Some of its samples are then seen twice."""
        tickets, run = facts["coordinator"]["tickets"], self.run
        oldest = min((tickets["next"], *tickets["returned"]))
        epoch, index = divmod(oldest, own.batches_per_epoch or 1)
        at = (epoch, index * own.batch_size // run.loader.batch_size)
        run.step, run.samples = at[0] * (run.loader.batches_per_epoch or 1) + at[1], int(facts["samples"])
        run.position = Position(at, at)
