"""A training by model servers: the run of a worker. What a server process does is in server/process.py.

A worker is a world of its own: one rank that has the model whole, or a crew of ranks that hold it by a layout
(server/worker_group.py); and it has batches that its servers give it. So nothing in it waits for another worker but
through them, and one that is killed is missed by nobody. BatchNorm over the whole batch goes through them too
(server/workers.py); only crews talk to each other for it. What one does for all is passed on: server/leader.py.

    server=s data=w               a step is a batch; the workers at work share it. The step of one device
    server=s data=w staleness=k   a step is one worker's gradient over batch_size/w samples, taken as it comes.
                                  Schedules and epochs count samples; steps= counts these steps
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.axes.mesh import Mesh
from meshfit.axes.precision import LossScale
from meshfit.data.loader import Batch, Loader
from meshfit.data.position import Position
from meshfit.job import Job
from meshfit.launch.worker_groups import own_world
from meshfit.launch.world import World
from meshfit.run import Run
from meshfit.server.leader import Leader
from meshfit.server.process import last_ticket, own_batch, patience_of, plan_of
from meshfit.server.shared_model import Whole, mine, stand_in
from meshfit.server.worker import Again, Served, Worker
from meshfit.server.worker_group import Crew
from meshfit.server.workers import Workers


class ServedRun(Run):
    """A worker's. ``Run`` with servers in place of exchange and update, and batches as they give them out."""

    def __init__(self, job: Job, world: World, secret: bytes, *, folder: Path | None = None):
        self.id, self._number = world.rank // plan_of(job).crew, world.rank
        self.meeting, self.secret = world.folder, secret
        self.workers = Workers()
        self.duty = Leader(self, Path(self.meeting) / "duty")
        self._last: Batch | None = None
        own, self.peers, self._sharers = own_world(plan_of(job), world, timeout=patience_of(job) + 60.0)
        """``peers``: the ranks in this one's place in all workers."""
        super().__init__(job, own, folder=folder)
        self.step, self.samples = self.worker.version, int(self.worker.seen)
        if self.plan.staleness:
            self.notes.append(
                f"server: a step is one worker's gradient over {self._loader((0, 1)).batch_size} samples; "
                "schedule and epochs count samples"
            )

    def _mesh(self) -> Mesh:
        mesh = Mesh.of(self.plan.worker, self.world.rank, self.world.size)
        if self.plan.crew == 1:
            return replace(mesh, batch=self.workers if self.plan.in_step else None)
        return mesh if self._sharers is None else replace(mesh, batch=self._sharers)

    @property
    def number(self) -> int:
        return self._number

    @property
    def copies(self) -> int:
        return 1

    @property
    def shares(self) -> int:
        """Into which a worker cuts what it is given of a batch."""
        return self.plan.worker.shares

    def loader_of(self, data: object, *, microbatches: int = 1, shuffle: bool = False) -> Loader:
        loader = super().loader_of(data, microbatches=microbatches, shuffle=shuffle)
        return replace(loader, rank=self.mesh.share, ranks=self.shares, _kept={})

    @property
    def share(self) -> int:
        return self.id * self.shares + self.mesh.share

    def _before_cut(self) -> None:
        super()._before_cut()
        if self.world.size > 1:
            self._whole = Whole.of(self.model, servers=self.plan.server, compress=self.plan.compress)
            self._stand_in = stand_in(self.model) if self.world.rank == 0 else None

    def _make_update(self, scale: LossScale | None) -> Served:  # type: ignore[override]
        self._loaders: dict[tuple[int, int], Loader] = {}
        self._advanced = 0
        if self.world.size == 1:
            self.worker = self.workers.worker = self._reach(self.model, self.world.device)
        else:
            self.worker = self._crew()
        self.served = Served(self.worker, ema=self.job.ema is not None)
        self.served.scheduler = self.job.make_scheduler(self.optimizer, self.last_step)
        return self.served

    def _addresses(self) -> list[str]:
        """Of the servers."""
        return [f"unix:{self.meeting}/server{i}" for i in range(self.plan.server)]

    def _reach(self, model: nn.Module, device: torch.device) -> Worker:
        return Worker(
            model,
            self._addresses(),
            self.secret,
            id=self.id,
            device=device,
            staleness=self.plan.staleness,
            compress=self.plan.compress,
            timeout=patience_of(self.job),
        )

    def _crew(self) -> Crew:
        model, self._stand_in = self._stand_in, None
        return Crew(
            super()._make_exchange(),
            self.placed,
            self._whole,
            workers=self.plan.data,
            shares=self.shares,
            model=model,
            reach=lambda model: self._reach(model, torch.device("cpu")),
            address=f"{self.meeting}/crew{self.id}",
        )

    def _make_exchange(self) -> Worker | Crew:  # type: ignore[override]
        return self.worker

    # What comes next

    def _loader(self, share: tuple[int, int]) -> Loader:
        """Of the i-th of n workers that share each batch, or of one whose batches are its own."""
        if share not in self._loaders:
            how = {"batch_size": own_batch(self.job), "workers": 0 if self.plan.staleness else self.loader.workers}
            at, of = share[0] * self.shares + self.mesh.share, share[1] * self.shares
            self._loaders[share] = replace(self.loader, rank=at, ranks=of, _kept={}, **how)
        return self._loaders[share]

    def batches(self) -> Iterator[Batch]:
        """Those of the worker's tickets, read ahead as long as one follows the other."""
        coming: Iterator[Batch] = iter(())
        due: tuple[Any, ...] = ()
        while (ticket := self._ticket()) is not None:
            loader = self._loader(self.worker.share)
            epoch, index = divmod(ticket, loader.batches_per_epoch or 1)
            if due != (self.worker.share, epoch, index):
                coming = loader.epoch(epoch, index)
            batch = next(coming)
            due = (self.worker.share, epoch, index + 1)
            self.worker.samples = sum(part.samples for part in batch.microbatches)
            self.position.hand_out(batch, self.step)
            if isinstance(self.worker, Worker):
                self.worker.at_work = True
            yield batch

    def _ticket(self) -> int | None:
        """The batch that is next. Before that, what the first worker does for all, if that is this one by now."""
        if isinstance(self.worker, Crew):
            return self.worker.ticket
        while True:
            if self.first and not self.duty.taken:
                self.duty.take()
                if not self.plan.staleness and self._last is not None and self._due(self._last):
                    self.duty.missed[self.step] = self.evaluate()
            if self.worker.ticket is not None or self.first:
                return self.worker.ticket
            try:
                if self.worker.after_others():
                    return None
                self.worker.first = self.id
            except Again:  # a server was started again, and is not at the end
                continue

    @property
    def first(self) -> bool:
        """Whether this is the first of those at work; of crews, the first of all."""
        return self.id == 0 if isinstance(self.worker, Crew) else self.worker.first == self.id

    def count(self, batch: Batch) -> None:
        self._last = batch
        self.step, self.samples = self.worker.taken, int(self.worker.seen)
        if self.plan.staleness:
            self.staleness = self.worker.staleness
            self.events.scalar("staleness", self.worker.staleness)

    @property
    def leads(self) -> bool:
        """In step the first of those at work tells of what is the same for all; apart each tells of its own steps."""
        return bool(self.plan.staleness) or (self.worker.rank == 0 if isinstance(self.worker, Crew) else self.first)

    @property
    def missed(self) -> dict[int, dict[str, float]]:
        return self.duty.missed

    @property
    def raises(self) -> bool:
        return self.leads

    @property
    def tells(self) -> bool:
        return self.leads and super().tells

    @property
    def saves(self) -> bool:
        return self.first

    def evaluation_is_due(self, batch: Batch) -> bool:
        return self.leads and self._due(batch)

    def _due(self, batch: Batch) -> bool:
        return super().evaluation_is_due(batch)

    def evaluate(self) -> dict[str, float]:
        if self.plan.staleness or self.plan.crew > 1:
            return super().evaluate()
        return self.duty.evaluate(super().evaluate)

    def _last_step(self) -> int | None:
        if not self.plan.staleness:
            return super()._last_step()
        return last_ticket(self.job, self.loader)

    # What the servers keep

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it, the state of optimizer, schedule and average is here, as the servers have it."""
        now, every = (self.step, self.samples, self.position), self.worker.state()
        named, average = dict(self.model.named_parameters()), self.served.average
        for tensors, facts in every:
            for name, held in facts["keeper"]["state"].items():
                if name in named:
                    self.optimizer.state[named[name]] = dict(held)
            for key, value in tensors.items():
                kind, _, rest = key.partition("/")
                name, _, word = rest.rpartition("/")
                if kind == "state" and name in named:
                    value = value if word == "step" else mine(self.placed, named[name], value)
                    self.optimizer.state[named[name]][word] = value
                elif kind == "average" and average is not None and rest in named:
                    average.held[rest] = mine(self.placed, named[rest], value)
        keeper = every[0][1]["keeper"]
        self._advance(keeper)
        for group, kept in zip(self.optimizer.param_groups, keeper["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in kept.items()})
        if self.plan.staleness:
            self._back_to(every[0][1])
            self.worker.pull()  # as new as the state
        try:
            yield
        finally:
            self.step, self.samples, self.position = now
            self.optimizer.state.clear()
            if average is not None:
                average.held.clear()

    def _advance(self, keeper: dict[str, Any]) -> None:
        """Have the schedule where the servers' is; one whose state is no plain fact is gone through."""
        scheduler = self.served.scheduler
        if scheduler is not None and keeper["schedule"] is not None:
            scheduler.load_state_dict(keeper["schedule"])
        elif scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer here never steps
                for _ in range(self._advanced, keeper["steps"]):
                    scheduler.step()
            self._advanced = keeper["steps"]

    def _back_to(self, facts: dict[str, Any]) -> None:
        """How far a checkpoint is, in whole batches, so that any plan can go on from it: up to the one in which the
        oldest gradient not yet applied lies. Some of its samples are then seen twice."""
        tickets, own = facts["conduct"]["tickets"], self._loader((0, 1))
        oldest = min((tickets["next"], *tickets["returned"]))
        epoch, index = divmod(oldest, own.batches_per_epoch or 1)
        at = (epoch, index * own.batch_size // self.loader.batch_size)
        self.step, self.samples = at[0] * (self.loader.batches_per_epoch or 1) + at[1], int(facts["samples"])
        self.position = Position(at, at)

    def resumed(self) -> None:
        """The servers have loaded it too; what they have is what counts."""
        self.optimizer.state.clear()
        self.worker.pull()
        self.step = self.worker.version

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        with self.whole():
            return super().optimizer_state()

    def finish(self) -> None:
        self.worker.stop()
