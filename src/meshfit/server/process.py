"""A model server's process, and the job in batches that it hands out.

A ticket is the number of a batch: one that the connected workers share, or, asynchronous, one worker's own.
coordination.py has the worker's side.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from meshfit.anatomy.probe_optimizer import state_bytes
from meshfit.axes.data.batchnorm import batch_norms
from meshfit.checkpoint.resume import saved
from meshfit.data.datasets import Recipe, SampleStream
from meshfit.data.loader import Loader
from meshfit.errors import DataError, PlanError
from meshfit.events import Events
from meshfit.job import NO_EVALUATION, Job, plan_of
from meshfit.launch.channel import Channel
from meshfit.launch.world import World
from meshfit.plan import Plan
from meshfit.run import Run
from meshfit.run.coordination import last_step
from meshfit.server.fingerprint import facts_of
from meshfit.server.join import Invitation, addresses
from meshfit.server.keeper import Keeper
from meshfit.server.server import Server
from meshfit.server.settings import ServerSettings
from meshfit.server.snapshot import common
from meshfit.version import VERSION

LONGER = 60.0  # seconds for which workers are more patient with servers than these are with workers, and ranks of one
# worker with each other: else all would give up together with the one that hangs
SNAPSHOT_STEPS, SNAPSHOT_BYTES = 10, 4 * 2**20  # a snapshot every 10 steps, or, of much, one step for every 4 MiB


def own_batch(job: Job) -> int:
    """Samples of the batches that servers hand out: of all workers, or, asynchronous, of one."""
    plan, size = plan_of(job), job.batch_size
    assert isinstance(size, int)
    if not plan.staleness:
        return size
    if size % plan.data:
        raise PlanError(
            f"{plan}: {plan.data} workers update asynchronously, each over an equal part of the batch",
            f"a batch of {size} has no {plan.data} equal parts",
            f"batch_size={-(-size // plan.data) * plan.data} would do",
        )
    return size // plan.data


def check(job: Job) -> None:
    """Refuse, in the caller, what servers cannot hand out, and what asynchronous workers cannot do."""
    plan = plan_of(job)
    recipe: Recipe = job.data
    if isinstance(recipe.data, IterableDataset):
        raise _no_stream(plan)
    if recipe.length is not None or (recipe.loader is not None and recipe.loader.batching is not None):
        raise PlanError(
            f"{plan}: servers hand out batches of one size, in an order of their own",
            "length=, batch_tokens= and samplers make others",
            f"{plan.without('server')} works",
        )
    if plan.staleness:
        own_batch(job)
        for name in ("best", "patience", "keep_best"):
            if getattr(job, name) is not None:
                raise PlanError(
                    f"{plan}: {name}= compares evaluations, and asynchronous workers evaluate weights of their own",
                    f"{replace(plan, staleness=0, late='none')} works",
                )


def refuse_torchrun(job: Job) -> None:
    """Nobody would start them."""
    if "server=" in str(job.plan):
        raise PlanError(
            f"{job.plan}: servers are processes beside the ranks, and torchrun starts ranks alone",
            "python train.py starts both, on one machine; from others, meshfit join adds workers",
        )


def expendable(job: Job) -> range:
    """Workers whose death leaves the others at work: any; of worker groups, none that others wait for or that saves."""
    plan = plan_of(job)
    if plan.worker_size == 1:
        return range(plan.data)
    if plan.joins_batchnorms and batch_norms(job.build()):
        return range(0)
    return range(0 if job.best is None and job.checkpoint is None else 1, plan.data)


def last_ticket(job: Job, loader: Loader) -> int | None:
    """Of asynchronous workers: how many gradients there are to be."""
    each = -(-_samples(plan_of(job), loader) // own_batch(job))
    return last_step(job, lambda epochs: epochs * each)


def _samples(plan: Plan, loader: Loader) -> int:
    if isinstance(loader.source, SampleStream):  # that a function made, in here
        raise _no_stream(plan)
    return len(loader.source)


def _no_stream(plan: Plan) -> DataError:
    return DataError(
        f"{plan}: servers hand out batches by number, and a stream has none", f"data={plan.data} works, say"
    )


@dataclass(frozen=True)
class ServerProcess:
    """What a server process does."""

    job: Job
    secret: bytes
    folder: Path | None
    """Of the run: what it is to go on from may be there."""
    key: bytes | None = field(default=None, repr=False)
    """Of workers that join, where ``job.listen`` lets them."""

    def __call__(self, world: World, channel: Channel) -> None:
        job, plan = self.job, plan_of(self.job)
        folders = [Path(world.folder) / f"kept{i}" for i in range(plan.server)]
        steps = job.steps if job.steps is None or not plan.staleness else -(-job.steps // plan.data)
        nothing = {**NO_EVALUATION, "checkpoint": None}
        alone = replace(job, plan=Plan(compile="none"), steps=steps, **nothing)
        run = Run(alone, World(0, 1, torch.device("cpu")))
        with saved(run, self.folder):
            pass  # it is restored, if it is to be
        every = _snapshot_steps(run)
        fingerprint = {} if job.listen is None else facts_of(job, run.model, run.loader.source)  # of the whole model
        keeper = _keeper(run, job, world.rank)
        settings = ServerSettings(
            workers=plan.data,
            index=world.rank,
            staleness=plan.staleness,
            lost=plan.lost,
            compress=plan.compress,
            patience=job.timeout,
            folder=folders[world.rank],
            meeting=Path(world.folder),
            every=every,
            upto=common(folders),
            **_places(run, job),
        )
        address = f"unix:{world.folder}/server{world.rank}"
        events = Events(None if self.folder is None else self.folder / "events", world.rank, of="server")
        server = Server(keeper, settings, address=address, secret=self.secret, report=channel.send)
        try:
            if job.listen is not None and self.key is not None:
                told = {"plan": str(plan), "steps": settings.total, "version": VERSION}
                invitation = Invitation(told, fingerprint, first=plan.data, folder=Path(world.folder))
                at = addresses(job.listen, plan.server)[world.rank]
                server.open(at, self.key, None if world.rank else invitation)
            server.join()
        finally:
            server.close()
            events.close()


def _places(run: Run, job: Job) -> dict[str, Any]:
    """From which batch to which, in batches of all workers or of one."""
    (epoch, batch), size, own = run.position.now(run.step), run.loader.batch_size, own_batch(job)
    first, step, last = epoch * -(-_samples(run.plan, run.loader) // own) + batch * size // own, run.step, run.last_step
    applied: tuple[int, ...] = ()
    if plan_of(job).staleness:
        if run.position.ahead[:1] == (own,):
            applied = tuple(ticket for ticket in run.position.ahead[1:] if ticket >= first)
        step = first  # each batch of one worker's is a step
        last = last_ticket(job, run.loader)
    total = None if last is None else first + max(0, last - step)
    place = {"step": step + len(applied), "samples": run.samples, "first": first, "total": total}
    return {**place, "applied": applied, "batch_size": size}


def _keeper(run: Run, job: Job, index: int) -> Keeper:
    plan, average = plan_of(job), run.update.average
    kept = {} if average is None else dict(zip(dict(run.model.named_parameters()), average.weights, strict=True))
    keeper = Keeper(
        run.model,
        run.optimizer,
        run.update.scheduler,
        index=index,
        servers=plan.server,
        clip=job.clip,
        ema=job.ema,
        late=plan.late,
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
