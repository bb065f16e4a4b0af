"""How a worker of model servers works together with the others: through the servers, and through nothing else.

A worker is a world of its own: one rank that holds the model whole, or a worker group whose ranks hold it by a layout
(worker_group.py). The servers hand out its batches. So no worker waits for another but through them, and one that is
killed is missed by nobody. BatchNorm over the whole batch goes through the servers too (workers.py); only worker groups
use collectives for it. What one worker does for all is the leader's.

    server=s data=w               a step is a batch, shared by the workers that are there: the step of one device
    server=s data=w staleness=k   a step is one worker's gradient over batch_size/w samples, applied as it comes.
                                  Schedules and epochs count samples; steps= counts these steps
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from meshfit.axes.mesh import Mesh
from meshfit.axes.precision import LossScale
from meshfit.comm.group import RankGroup
from meshfit.data.loader import Batch, Loader
from meshfit.data.order import stream_seed
from meshfit.errors import PlanError
from meshfit.exchange.protocol import RepeatBatch
from meshfit.exchange.server_cost import Payload
from meshfit.generators import seed
from meshfit.job import Job, plan_of
from meshfit.launch.system import cores
from meshfit.launch.world import World
from meshfit.live import LIVE
from meshfit.run import Run
from meshfit.run.coordination import Coordination, Metrics
from meshfit.run.phase_parts import make_exchange
from meshfit.server.fingerprint import facts_of
from meshfit.server.join import addresses, ask
from meshfit.server.process import LONGER, last_ticket, own_batch
from meshfit.server.server_state import ServerState
from meshfit.server.shared_model import stand_in
from meshfit.server.snapshot import newest, write
from meshfit.server.worker import ServerUpdate, Worker
from meshfit.server.worker_group import WorkerGroup, own_world
from meshfit.server.workers import Workers
from meshfit.step import Reading, Step


def worker_run(job: Job, world: World, secret: bytes, *, folder: Path | None) -> Run:
    """The run of a worker that is started with its servers. All ranks call it together."""
    plan = plan_of(job)
    own, peers, batch = own_world(plan, world, timeout=job.timeout + 2 * LONGER)
    addresses = [f"unix:{world.folder}/server{i}" for i in range(plan.server)]
    worker = world.rank // plan.worker_size
    return Run(
        job,
        own,
        folder=folder,
        coordinate=lambda run: ServerCoordination(run, addresses, secret, worker=worker, peers=peers, batch=batch),
    )


def joined_run(job: Job, world: World, key: bytes) -> Run:
    """The run of worker ``world.rank`` of those on this host."""
    if world.device.type == "cpu":
        torch.set_num_threads(max(1, cores() // world.size))
    at, servers = job.join, plan_of(job).server
    assert at is not None

    def register(run: Run) -> int:
        return ask(at, key, facts_of(job, run.model, run.loader.source))["worker"]

    return Run(
        job,
        World(0, 1, world.device, world.folder),
        coordinate=lambda run: ServerCoordination(
            run, addresses(at, servers), key, worker=world.rank, register=register
        ),
    )


class ServerCoordination(Coordination):
    """Of worker ``worker``, with the servers at ``addresses``.

    ``batch``, for worker groups: ranks of all workers that share a batch with this one. ``register``, for a worker that
    joins from another host, the ``worker``-th there: gets its number among all workers. The run that it joins
    evaluates, saves, and goes on without it.
    """

    def __init__(
        self,
        run: Run,
        addresses: list[str],
        secret: bytes,
        *,
        worker: int,
        peers: ProcessGroup | None = None,
        batch: ProcessGroup | None = None,
        register: Callable[[Run], int] | None = None,
    ):
        super().__init__(run)
        self._register, self._index = register, worker
        self.joined = self.may_stop = register is not None
        self.addresses, self.secret, self.worker, self.peers = addresses, secret, worker, peers
        self.leader = Leader(run, Path(run.world.folder) / "leader")
        self.missed = self.leader.missed
        self._workers, self._batch = Workers(), batch
        self._loaders: dict[tuple[int, int], Loader] = {}
        self._last: Batch | None = None
        self._reported = 0
        """The last step of those that ``unreported`` gave."""

    @property
    def alone(self) -> bool:
        return self.joined

    def mesh(self, mesh: Mesh) -> Mesh:
        if self.run.plan.worker_size == 1:
            return replace(mesh, batch=self._workers if self.run.plan.in_step else None)
        return mesh if self._batch is None else replace(mesh, batch=RankGroup(self._batch))

    def last_step(self) -> int | None:
        if not self.run.plan.staleness:
            return super().last_step()
        return last_ticket(self.run.job, self.run.loader)

    def before_sharding(self) -> None:
        run = self.run
        if run.world.size > 1:
            self._whole = Payload.of(run.model, servers=run.plan.server, compress=run.plan.compress)
            self._stand_in = stand_in(run.model) if run.world.rank == 0 else None

    def assemble(self, scale: LossScale | None) -> None:
        run = self.run
        (phase,) = run.phases
        if self._register is not None:
            self.worker = self._register(run)
        if run.world.size == 1:
            self.exchange = self._workers.worker = self._reach(run.model, run.world.device)
        else:
            self.exchange = self._group()
        update = ServerUpdate(self.exchange, ema=run.job.ema is not None)
        update.scheduler = run.job.make_scheduler(phase.optimizers, run.last_step)
        if update.scheduler is not None and update.scheduler.following:
            raise PlanError(
                f"{run.plan}: {update.scheduler.name} follows a metric of evaluations",
                "the schedule is the servers', and workers evaluate",
                f"{run.plan.without('server')} works",
            )
        self._state = ServerState(run, self.exchange, update)
        phase.update, phase.exchange = update, self.exchange

    def _reach(self, model: nn.Module, device: torch.device) -> Worker:
        worker = Worker(
            model,
            self.addresses,
            self.secret,
            id=self.worker,
            device=device,
            staleness=self.run.plan.staleness,
            compress=self.run.plan.compress,
            timeout=self.run.job.timeout + LONGER,
        )
        LIVE.alive = worker.progress
        return worker

    def _group(self) -> WorkerGroup:
        model, self._stand_in = self._stand_in, None
        return WorkerGroup(
            make_exchange(self.run, self.run.phases[0]),
            self.run.placed,
            self._whole,
            workers=self.run.plan.data,
            shares=self.run.world_plan.shares,
            model=model,
            reach=lambda model: self._reach(model, torch.device("cpu")),
            address=f"{self.run.world.folder}/group{self.worker}",
        )

    def ready(self) -> None:
        self.run.step, self.run.samples = self.exchange.version, int(self.exchange.seen)
        if self.run.plan.staleness:
            self.run.notes.append(
                f"server: a step is one worker's gradient over {own_batch(self.run.job)} samples; "
                "schedule and epochs count samples"
            )

    # Batches

    def loader(self, share: tuple[int, int]) -> Loader:
        """Of the i-th of n workers that share each batch, or, asynchronous, of a worker with batches of its own."""
        if share not in self._loaders:
            run, shares = self.run, self.run.world_plan.shares
            how = {"batch_size": own_batch(run.job), "workers": 0 if run.plan.staleness else run.loader.workers}
            at, of = share[0] * shares + run.mesh.share, share[1] * shares
            self._loaders[share] = replace(run.loader, rank=at, ranks=of, **how)
        return self._loaders[share]

    def batches(self) -> Iterator[Batch]:
        """Those of the worker's tickets, prefetched as long as one follows the other."""
        coming: Iterator[Batch] = iter(())
        due: tuple[Any, ...] = ()
        while (ticket := self._ticket()) is not None:
            if self._one_is_alone and isinstance(self.exchange, WorkerGroup):
                try:
                    self.exchange.begin()
                except RepeatBatch:
                    continue
            loader = self.loader(self.exchange.share)
            epoch, index = divmod(ticket, loader.batches_per_epoch or 1)
            if due != (self.exchange.share, epoch, index):
                coming = loader.epoch(epoch, index)
            batch = next(coming)
            due = (self.exchange.share, epoch, index + 1)
            self.exchange.samples = sum(part.samples for part in batch.microbatches)
            self.exchange.epoch, self.exchange.last = batch.epoch, batch.last
            self.run.position.hand_out(batch, self.run.step)
            self._seed(stream_seed(loader.rank, ticket, self.run.job.seed))
            if isinstance(self.exchange, Worker):
                self.exchange.at_work = True
            yield batch

    @property
    def _one_is_alone(self) -> bool:
        """Whether one worker evaluates, or saves, while others wait for it in collectives."""
        job = self.run.job
        return self._batch is not None and (job.valid is not None or job.checkpoint is not None)

    def _seed(self, number: int) -> None:
        """What a batch draws follows from its number and share alone, on whichever worker, however often: one worker
        saves, and need not know where the others' generators stand. Not where a loss of the whole batch draws: all take
        the first worker's numbers for it, and these go on as one device's do."""
        if any(phase.over.kind == "batch" and phase.over.draws for phase in self.run.phases):
            return
        seed(number, self.run.world.device)
        random.seed(number)
        np.random.seed(number % 2**32)

    def _ticket(self) -> int | None:
        """The next batch. Before that, what the leader does, if this worker has become it."""
        if self.joined or isinstance(self.exchange, WorkerGroup):
            return self.exchange.ticket
        while True:
            if self.is_leader and not self.leader.taken:
                self.leader.take()
                evaluations = self.run.evaluations
                if not self.run.plan.staleness and self._last is not None and evaluations.due(self._last):
                    self.leader.missed[self.run.step] = evaluations.make()
            if self.exchange.ticket is not None or self.is_leader:
                return self.exchange.ticket
            try:
                if self.exchange.wait_for_earlier():
                    return None
                self.exchange.leader = self.worker
            except RepeatBatch:  # a server was started again, and is not at the end
                continue

    def count(self, batch: Batch) -> None:
        self._last = batch
        self.run.step, self.run.samples = self.exchange.taken, int(self.exchange.seen)
        if self.run.plan.staleness:
            self.run.staleness = self.exchange.staleness
            self.run.events.scalar("staleness", self.exchange.staleness)

    # What the leader does

    @property
    def is_leader(self) -> bool:
        """Whether this is the first of the connected workers; of worker groups, the first of all."""
        if self.joined:
            return False
        return self.worker == 0 if isinstance(self.exchange, WorkerGroup) else self.exchange.leader == self.worker

    @property
    def leads(self) -> bool:
        """In step, the first worker of those that share a batch; asynchronous, each reports its own steps."""
        if self.run.plan.staleness or self.joined:
            return True
        return self.exchange.rank == 0 if isinstance(self.exchange, WorkerGroup) else self.is_leader

    @property
    def reports(self) -> bool:
        return self._index == 0 if self.joined else super().reports

    @property
    def saves(self) -> bool:
        return self.is_leader

    def evaluate(self, measure: Callable[[], Metrics]) -> Metrics:
        if self.run.plan.staleness or self.run.plan.worker_size > 1:
            return measure()
        return self.leader.evaluate(measure)

    # What the servers hold

    def whole(self) -> AbstractContextManager[None]:
        return self._state.fetched(self.loader((0, 1)))

    def unreported(self) -> list[Step]:
        logged, known = self.run.phases[0].schedule.loss.logged, self._reported
        said = [each for each in self._state.recent_steps if each["step"] > known]
        self._reported = max((each["step"] for each in said), default=known)
        return [
            Step(
                **{key: each[key] for key in ("step", "epoch", "last", "lr", "staleness")},
                samples=int(each["seen"]),
                seconds=each["at"] - self.run.started,
                reading=Reading(each["loss"], each["norm"], each["taken"], named=logged(each["values"])),
            )
            for each in said
        ]

    def resumed(self) -> None:
        """The servers have loaded it too, and theirs counts."""
        self.run.optimizer.state.clear()
        self.exchange.pull()
        self.run.step = self.exchange.version

    def finish(self) -> None:
        if not self.joined:
            self.exchange.stop()
        elif self.run.plan.staleness:
            self.exchange.pull()


class Leader:
    """The first connected worker: it evaluates, keeps the best weights, saves.

    What must outlive it is in the folder where the workers meet: the last evaluation, and the best weights so far. The
    next worker takes over from there; an evaluation that was not finished is made again, with the same weights, as no
    step was taken meanwhile.
    """

    def __init__(self, run: Run, folder: Path):
        self.run, self.folder = run, folder
        self.taken = False
        """Whether this worker is the leader."""
        self.missed: dict[int, dict[str, float]] = {}
        """By step: an evaluation that the leader before may not have reported."""
        self._found: dict[str, Any] = {}

    def take(self) -> None:
        """Be the leader from now on."""
        self.taken, found, best = True, newest(self.folder), self.run.best
        if found is None:
            return
        tensors, self._found = found
        if best is not None:
            best.restore_facts(self._found["best"])
            best.weights = {name: tensor.to(self.run.world.device) for name, tensor in tensors.items()}

    def evaluate(self, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What ``make`` measures, kept; or what the leader before has measured already."""
        if not self.taken:
            self.take()
        if self._found.get("step") == self.run.step:
            return self._found["measured"]
        measured = make()
        if self.run.plan.data > 1:
            self._keep(measured)
        return measured

    def _keep(self, measured: dict[str, float]) -> None:
        best = self.run.best
        kept = {} if best is None else {name: tensor.cpu() for name, tensor in best.weights.items()}
        facts = {"step": self.run.step, "measured": measured, "best": None if best is None else best.facts()}
        write(self.folder, self.run.step, kept, facts)
