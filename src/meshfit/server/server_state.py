"""The state that model servers hold (optimizer, schedule, averaged weights), fetched for a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
        self.recent_steps: list[dict[str, Any]] = []
        """The last that workers had taken, when the servers were last asked, and whoever took them may not report."""

    @contextmanager
    def fetched(self, own: Loader) -> Iterator[None]:
        """Within it, optimizer, schedule and average of ``run`` are as the servers hold them. ``own``: what gives a
        worker batches of its own, with asynchronous updates."""
        run = self.run
        now, every = (run.step, run.samples, run.position), self.worker.state()
        named, average = dict(run.model.named_parameters()), self.update.average
        self.recent_steps = every[0][1]["recent_steps"]
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
            self._weigh([tensors["weights"] for tensors, _ in every])
        try:
            yield
        finally:
            if run.plan.staleness:
                self.worker.pull()
            run.step, run.samples, run.position = now
            run.optimizer.state.clear()
            if average is not None:
                average.held.clear()

    @torch.no_grad()
    def _weigh(self, held: list[Tensor]) -> None:
        """Have the weights of the moment in which the state was put down: others may have stepped since."""
        named = dict(self.run.model.named_parameters())
        for parcel, weights in zip(self.worker.parcels, held, strict=True):
            for name, whole in parcel.views(weights).items():
                named[name].copy_(mine(self.run.placed, named[name], whole))
        self.run.placed.changed()

    def _back_to(self, facts: dict[str, Any], own: Loader) -> None:
        """Set step and position in whole batches, so that any plan can resume: before the batch of the oldest gradient
        that is not applied yet. Those after it that are, asynchronous workers of the same number leave out; another
        plan sees their samples twice."""
        tickets, run = facts["coordinator"]["tickets"], self.run
        oldest = min((tickets["next"], *tickets["returned"]))
        epoch, index = divmod(oldest, own.batches_per_epoch or 1)
        at = (epoch, index * own.batch_size // run.loader.batch_size)
        run.step, run.samples = at[0] * (run.loader.batches_per_epoch or 1) + at[1], int(facts["samples"])
        first = epoch * (own.batches_per_epoch or 1) + at[1] * run.loader.batch_size // own.batch_size
        applied = sorted(set(range(first, tickets["next"])) - set(tickets["returned"]))
        run.position = Position(at, at, ahead=(own.batch_size, *applied) if applied else ())
