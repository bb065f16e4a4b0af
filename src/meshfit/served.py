"""A training by model servers: the run of a worker, and what a server process does.

A worker is a world of its own: one rank that has the model whole, or a crew of ranks that hold it by a layout
(exchange/serving/crew.py); and it has batches that its servers give it. So nothing in it waits for another worker but
through them, and one that is killed is missed by nobody. BatchNorm over the whole batch goes through them too
(exchange/serving/meeting.py); only crews talk to each other for it. What one does for all is passed on: duty.py.

    server=s data=w               a step is a batch; the workers at work share it. The step of one device
    server=s data=w staleness=k   a step is one worker's gradient over batch_size/w samples, taken as it comes.
                                  Schedules and epochs count samples; steps= counts these steps
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from meshfit.alike import differences, facts_of
from meshfit.checkpoint.going_on import saved
from meshfit.data.loader import Batch, Loader
from meshfit.data.position import Position
from meshfit.data.source import Stream
from meshfit.duty import Duty
from meshfit.errors import DataError, PlanError
from meshfit.events import Events
from meshfit.exchange.nature import state_bytes
from meshfit.exchange.serving.build import keep
from meshfit.exchange.serving.crew import Crew
from meshfit.exchange.serving.keeper import Keeper
from meshfit.exchange.serving.meeting import Workers
from meshfit.exchange.serving.offer import Offer
from meshfit.exchange.serving.server import Server
from meshfit.exchange.serving.snapshot import common
from meshfit.exchange.serving.terms import Terms
from meshfit.exchange.serving.whole import Whole, mine, stand_in
from meshfit.exchange.serving.worker import Again, Served, Worker
from meshfit.job import Job
from meshfit.launch.channel import Channel
from meshfit.launch.crew import own_world
from meshfit.launch.listen import addresses
from meshfit.launch.world import World
from meshfit.layout.batchnorm import batch_norms
from meshfit.layout.mesh import Mesh
from meshfit.layout.precision import LossScale
from meshfit.plan import Plan
from meshfit.run import Run

PATIENCE = 600.0  # seconds for which a worker or server may be silent
EVALUATING = 24 * 3600.0  # ... where one worker may evaluate, or save, while the others wait for it
SNAPSHOT_STEPS, SNAPSHOT_BYTES = 10, 4 * 2**20  # a snapshot every 10 steps, or, of much, one step for every 4 MiB


def own_batch(job: Job) -> int:
    """Samples of the batches that servers give out: of all workers, or, where they step apart, of one."""
    plan, size = _plan(job), job.batch_size
    assert isinstance(size, int)
    if not plan.staleness:
        return size
    if size % plan.data:
        raise PlanError(
            f"{plan}: {plan.data} workers step apart, each over an equal part of the batch",
            f"a batch of {size} has no {plan.data} equal parts",
            f"batch_size={-(-size // plan.data) * plan.data} would do",
        )
    return size // plan.data


def check(job: Job) -> None:
    """Refuse, in the caller, what servers cannot give out, and what workers that step apart cannot do."""
    plan = _plan(job)
    if isinstance(job.data, IterableDataset):
        raise _no_stream(plan)
    if plan.staleness:
        own_batch(job)
        for name in ("best", "patience"):
            if getattr(job, name) is not None:
                raise PlanError(
                    f"{plan}: {name}= compares evaluations, and workers that step apart evaluate weights of their own",
                    f"{replace(plan, staleness=0, late='none')} works",
                )


def refuse_torchrun(job: Job) -> None:
    """Nobody would start them."""
    if "server=" in str(job.plan):
        raise PlanError(
            f"{job.plan}: servers are processes beside the ranks, and torchrun starts ranks alone",
            "python train.py starts both, on one machine; from others, meshfit join adds workers",
        )


def spare(job: Job) -> range:
    """Workers whose death leaves the others at work: any; of crews, none that others wait for, or that saves."""
    plan = _plan(job)
    if plan.crew == 1:
        return range(plan.data)
    if plan.joins_batchnorms and batch_norms(job.build()):
        return range(0)
    return range(0 if job.best is None and job.checkpoint is None else 1, plan.data)


class ServedRun(Run):
    """A worker's. ``Run`` with servers in place of exchange and update, and batches as they give them out."""

    def __init__(self, job: Job, world: World, secret: bytes, *, folder: Path | None = None):
        self.id, self._number = world.rank // _plan(job).crew, world.rank
        self.meeting, self.secret = world.folder, secret
        self.workers = Workers()
        self.duty = Duty(self, Path(self.meeting) / "duty")
        self._last: Batch | None = None
        own, self.peers, self._sharers = own_world(_plan(job), world, timeout=_patience(job) + 60.0)
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
            timeout=_patience(self.job),
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


def last_ticket(job: Job, loader: Loader) -> int | None:
    """Where workers step apart: how many gradients there are to be."""
    limits = [] if job.steps is None else [int(job.steps)]
    if job.epochs is not None:
        limits.append(max(1, math.ceil(round(job.epochs * -(-_samples(_plan(job), loader) // own_batch(job)), 9))))
    return min(limits) if limits else None


def _samples(plan: Plan, loader: Loader) -> int:
    if isinstance(loader.source, Stream):  # that a function made, in here
        raise _no_stream(plan)
    return len(loader.source)


def _no_stream(plan: Plan) -> DataError:
    return DataError(
        f"{plan}: servers give out batches by number, and a stream has none", f"data={plan.data} works, say"
    )


# A server


@dataclass(frozen=True)
class Serve:
    """What a server process does."""

    job: Job
    secret: bytes
    folder: Path | None
    """Of the run: what it is to go on from may be there."""
    key: bytes | None = field(default=None, repr=False)
    """Of workers that join, where ``job.listen`` lets them."""

    def __call__(self, world: World, channel: Channel) -> None:
        job, plan = self.job, _plan(self.job)
        folders = [Path(world.folder) / f"kept{i}" for i in range(plan.server)]
        steps = job.steps if job.steps is None or not plan.staleness else -(-job.steps // plan.data)
        nothing = {"valid": None, "metrics": {}, "best": None, "patience": None, "checkpoint": None}
        alone = replace(job, plan=Plan(compile="none"), microbatches=None, precision=None, steps=steps, **nothing)
        run = Run(alone, World(0, 1, torch.device("cpu")))
        with saved(run, self.folder):
            pass  # it is restored, if it is to be
        every = _snapshot_steps(run)
        alike = {} if job.listen is None else facts_of(job, run.model, run.loader.source)  # of the whole model
        keeper = _keeper(run, job, world.rank)
        terms = Terms(
            workers=plan.data,
            index=world.rank,
            staleness=plan.staleness,
            lost=plan.lost,
            compress=plan.compress,
            patience=_patience(job),
            folder=folders[world.rank],
            every=every,
            upto=common(folders),
            **_places(run, job),
        )
        address = f"unix:{world.folder}/server{world.rank}"
        events = Events(None if self.folder is None else self.folder / "events", world.rank, of="server")
        server = Server(keeper, terms, address=address, secret=self.secret, tell=channel.send)
        try:
            if job.listen is not None and self.key is not None:
                offer = Offer(
                    terms={"plan": str(plan), "steps": terms.total, "version": alike["version"]},
                    differences=lambda theirs: differences(alike, theirs),
                    first=plan.data,
                    folder=Path(world.folder),
                )
                server.open(addresses(job.listen, plan.server)[world.rank], self.key, None if world.rank else offer)
            server.join()
        finally:
            server.close()
            events.close()


def _places(run: Run, job: Job) -> dict[str, Any]:
    """From which batch to which, in batches of all workers or of one."""
    (epoch, batch), size, own = run.position.now(run.step), run.loader.batch_size, own_batch(job)
    first, step, last = epoch * -(-_samples(run.plan, run.loader) // own) + batch * size // own, run.step, run.last_step
    if _plan(job).staleness:
        step = first  # each batch of one worker's is a step
        last = last_ticket(job, run.loader)
    total = None if last is None else first + max(0, last - step)
    return {"step": step, "samples": run.samples, "first": first, "total": total, "batch_size": size}


def _keeper(run: Run, job: Job, index: int) -> Keeper:
    plan, average = _plan(job), run.update.average
    kept = {} if average is None else dict(zip(dict(run.model.named_parameters()), average.weights, strict=True))
    keeper = keep(
        run.model,
        lambda parameters: run.optimizer,
        None if job.scheduler is None else lambda optimizer: run.update.scheduler,
        index=index,
        servers=plan.server,
        clip=job.clip,
        ema=job.ema,
        damp=plan.late == "damp",
        shorten=plan.late == "shorten",
    )
    if keeper.average is not None:
        for name, mine in zip(keeper.parameters, keeper.average.weights, strict=True):
            mine.copy_(kept[name])
    return keeper


def _snapshot_steps(run: Run) -> int:
    kept = sum(p.numel() * p.element_size() for p in run.model.parameters())
    try:
        state = state_bytes(run.optimizer)
        kept += sum(sum(state.of(tuple(p.shape), str(p.dtype).removeprefix("torch."))) for p in run.model.parameters())
    except RuntimeError:  # nobody can tell before it steps
        kept *= 3
    return max(SNAPSHOT_STEPS, kept // SNAPSHOT_BYTES)


def _patience(job: Job) -> float:
    return PATIENCE if job.valid is None and job.checkpoint is None else EVALUATING


def _plan(job: Job) -> Plan:
    assert isinstance(job.plan, Plan)
    return job.plan
