"""A training as the caller sees it: here in this process, or in ranks that are started for it.

Both are iterated for their steps, can be told to stop, and end with an outcome. In lockstep, a stop ends the training
with exactly the weights of the step just seen: ranks may already be at the next one, and drop it together. Without it
ranks go on meanwhile, and end after the same step, some steps later.
"""

import secrets
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.axes.refuse import check, check_optimizer
from meshfit.checkpoint.graceful_stop import GracefulStop, graceful_stop
from meshfit.checkpoint.parts import Parts
from meshfit.checkpoint.resume import folder_to_resume
from meshfit.deferred import Deferred, Unfollowable
from meshfit.errors import JobError, MeshfitError
from meshfit.job import Job
from meshfit.launch import heap, twins
from meshfit.launch import key as keys
from meshfit.launch.channel import Channel
from meshfit.launch.devices import Devices, find
from meshfit.launch.stalls import watched
from meshfit.launch.world import World, connect, from_environment
from meshfit.observe.folder import WEIGHTS, new_folder
from meshfit.plan import Plan, renamed
from meshfit.run import Run
from meshfit.server import join
from meshfit.server import process as serve
from meshfit.server.coordination import joined_run, worker_run
from meshfit.step import Step
from meshfit.torch_private import COMPILER, set_data
from meshfit.turns import Turn, alone, in_one_turn, in_turns
from meshfit.version import VERSION
from meshfit.work import LATE_STEPS, Begun, Late, Outcome, Tap, WholeTensor, Work, driven, outcome_of

RANK_MODULES = (COMPILER, "meshfit.drive")  # torch's optimizers import _dynamo when built
LEAVE_SECONDS = 10.0  # in which workers that joined may leave, at the end
DONE_BY_THE_RUN = {"valid": None, "metrics": {}, "best": None, "patience": None, "out": None, "checkpoint": None}
"""What workers that join leave to the run that they join."""
DONE_BY_THE_RUN |= {"resume": False, "epochs": None}


def begin(job: Job, *, lockstep: bool, tap: Tap | None = None) -> "Training":
    """Check the job, and set up its training. ``lockstep``: ranks wait for the caller after each step."""
    with alone():
        return _begun(job, lockstep, tap)


def _begun(job: Job, lockstep: bool, tap: Tap | None) -> "Training":
    if job.join is not None:
        return Joined(job, lockstep, tap)
    twins.check(independent=job.independent, devices=_named(job.plan))
    given = from_environment(job.devices)
    if given is not None:
        serve.refuse_torchrun(job)
        return Here(job.settled(count=given.size, kind=given.device.type), lockstep, tap, given)
    settled = job.settled()
    join.check(settled.listen, _plan(settled))
    alone = _plan(settled).devices == 1 and not _plan(settled).server
    training = (Here if alone else Ranked)(settled, lockstep, tap)
    training.said += renamed(str(job.plan))
    if isinstance(job.batch_size, str):
        training.said.append(
            f"batch_size: {job.batch_size} is {settled.batch_size} over {_plan(settled).devices} devices"
        )
    return training


def _named(plan: Plan | str) -> int | None:
    """Devices that a plan names; None where it leaves that open."""
    try:
        return (plan if isinstance(plan, Plan) else Plan.parse(plan)).devices
    except MeshfitError:  # "auto", or a plan that is refused with more to say later
        return None


class Training:
    """A training that can be iterated, once, for its steps."""

    def __init__(self, job: Job, lockstep: bool, tap: Tap | None):
        self.said: list[str] = []
        """What was decided before ranks started, in words."""
        self.deferred = self._defer(job)
        self.model = job.build() if self.deferred is None else self.deferred.model
        check(_plan(job), self.model)
        check_optimizer(_plan(job), job.make_optimizer(self.model))
        self.job = job
        self.notes: list[str] = []
        self.last_step: int | None = None
        """How many steps it will be; None while that is not known."""
        self.outcome: Outcome | None = None
        self.parts: Parts | None = None
        """What this rank holds of the trained model, where no process has all of it."""
        self.writes = job.out is not None
        """Whether this process writes the run's folder."""
        self.folder: Path | None = None
        self._lockstep, self._tap = lockstep, tap
        self._stop = False
        self._iterator: Generator[Step, None, None] | None = None

    def _defer(self, job: Job) -> Deferred | None:
        """The model on meta, where a function builds it and ranks can each have their part without the whole."""
        plan = _plan(job)
        if isinstance(job.model, nn.Module) or plan.devices == 1 or plan.server:
            return None
        try:
            return job.defer()
        except Unfollowable as why:
            self.said.append(f"model: built whole in every process, since what its function does is not put off: {why}")
            return None

    def __iter__(self) -> Iterator[Step]:
        self._iterator = self._steps()
        return self._iterator

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

    @abstractmethod
    def _steps(self) -> Generator[Step, None, None]: ...


class Here(Training):
    """Trains in this process: a world of one, or one rank of a world that torchrun made."""

    def __init__(self, job: Job, lockstep: bool, tap: Tap | None, world: World | None = None):
        super().__init__(job, lockstep, tap)
        assert isinstance(job.devices, Devices)
        self.world = world or World(0, 1, job.devices.device(0))
        if self.world.size > 1:
            connect(self.world, timeout=job.timeout)
        else:
            heap.keep()
        self.writes &= self.world.rank == 0
        found = [_folder_of(job) if self.writes else None]
        if self.world.size > 1 and job.out is not None:
            dist.broadcast_object_list(found)
        (self.folder,) = found

    def __iter__(self) -> Iterator[Step]:
        self._iterator = in_turns(Turn(self.world.device, world=self.world.size > 1), self._steps())
        return self._iterator

    def _steps(self) -> Generator[Step, None, None]:
        saves = self.folder if self.job.checkpoint is not None else None
        watching = watched(self.world.rank, self.world.size, self.job.timeout)
        with graceful_stop(saves, first=self.writes) as graceful, ExitStack() as stack:
            stack.enter_context(watching)
            if self.deferred is None:
                stack.enter_context(_as_found(self.model))
            job = self.job if self.deferred is not None else replace(self.job, model=self.model)
            run = Run(job, self.world, folder=self.folder, same=False, deferred=self.deferred)
            run.may_stop |= self._lockstep and self.world.size > 1

            def begun() -> None:
                self.notes, self.last_step = [*self.said, *run.notes], run.last_step
                graceful.begun = True

            try:
                yield from driven(run, self.folder, self._tap, begun=begun, stop=lambda: self._stop)
                self.outcome = outcome_of(run)
                if self.deferred is not None and not run.placed.is_whole:
                    self._keep_parts(run)
            finally:
                run.close()
                if self.deferred is not None and self.parts is None:
                    self.model.to("cpu")  # as it was built

    def _keep_parts(self, run: Run) -> None:
        """Each rank keeps what it holds of the model; its weights are in the run's folder, put together by parts."""
        self.parts = Parts(run.placed)
        if self.folder is not None:
            try:
                self.parts.save(self.folder / WEIGHTS if self.writes else None)
            except OSError as error:
                self.said.append(f"{self.folder / WEIGHTS} could not be written: {error.strerror or error}")

    def gather(self) -> nn.Module:
        assert self.parts is not None
        return self.parts.into(self.job.defer().model)


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is on its device and in its modes, as before."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        model.to(device)
        for module, mode in modes.items():
            module.training = mode


class Ranked(Training):
    """Trains in ranks started for it; this process gets every step, and the weights at the end."""

    def __init__(self, job: Job, lockstep: bool, tap: Tap | None):
        from meshfit.launch.warm import warm

        warm(*RANK_MODULES)  # the template loads torch while the model is built
        super().__init__(job, lockstep, tap)
        if _plan(job).server and job.join is None:
            serve.check(job)
        self.folder = _folder_of(job)

    def _steps(self) -> Generator[Step, None, None]:
        try:
            with graceful_stop(self.folder if self.job.checkpoint is not None else None) as graceful:
                yield from self._received(graceful)
        except KeyboardInterrupt:  # where this process waited for its ranks helps nobody
            raise KeyboardInterrupt from None

    def _received(self, graceful: GracefulStop) -> Generator[Step, None, None]:
        seen: deque[int] = deque(maxlen=10 * LATE_STEPS)
        weights: dict[str, Tensor] = {}
        with self._ranks() as ranks:
            for rank, message in ranks.messages():
                if isinstance(message, Begun):
                    graceful.begun = True
                    self.notes, self.last_step = [*self.said, *message.notes], message.last_step
                elif isinstance(message, WholeTensor):
                    weights[message.name] = message.tensor
                elif isinstance(message, Outcome):  # the last words of ranks that will raise
                    load(self.model, message.weights)
                else:
                    for step in message.steps if isinstance(message, Late) else message:
                        dropped = self._stop and self._lockstep
                        if not dropped and not (isinstance(message, Late) and step.step in seen):
                            seen.append(step.step)
                            yield step
                        if self._lockstep:
                            ranks.send(rank, "stop" if self._stop else "go")
                    if self._stop and not self._lockstep:
                        ranks.send(rank, "stop")
            if self.job.listen is not None:
                ranks.beside.finish(within=LEAVE_SECONDS)
            outcome = _joined([found for found in ranks.results if found is not None], ranks.notes)
        load(self.model, outcome.weights or weights)
        self.outcome = outcome

    @contextmanager
    def _ranks(self) -> Iterator[Any]:
        """Started, each at its ``Work``; model servers beside them, if the plan has any."""
        job, plan, folder = self.job, _plan(self.job), self.folder
        if self.deferred is None:
            job = replace(job, model=self.model)
        work = Work(job, self._lockstep, folder, self._tap, partial(Run, folder=folder))
        if not plan.server:
            with started(self.job, work, log=folder) as ranks:
                yield ranks
            return
        from meshfit.server.launch import Servers

        key = None if job.listen is None else join.announced(job.listen)
        secret = secrets.token_bytes(32)  # by which the processes of this run know each other
        work = replace(work, make=partial(worker_run, secret=secret, folder=folder))
        expendable = [w * plan.worker_size + i for w in serve.expendable(job) for i in range(plan.worker_size)]
        with started(self.job, work, log=folder, expendable=expendable, group=plan.worker_size) as ranks:
            serving = serve.ServerProcess(ranks.work.job, secret, folder, key)
            with Servers(serving, count=plan.server, folder=ranks.folder, log=folder) as ranks.beside:
                yield ranks


class Joined(Ranked):
    """Trains as workers of another host's run, one for each device here."""

    def __init__(self, job: Job, lockstep: bool, tap: Tap | None):
        assert job.join is not None
        self.key = keys.asked(job.join)
        run = join.ask(job.join, self.key)
        if run["version"] != VERSION:
            raise JobError(
                f"the run at {job.join} is of another version", f"meshfit {run['version']} there, {VERSION} here"
            )
        plan, devices = Plan.parse(run["plan"]), job.devices
        devices = devices if isinstance(devices, Devices) else find(devices)
        size = replace(job, plan=plan)._samples_a_batch(plan)
        job = replace(job, plan=plan, devices=devices, batch_size=size, steps=run["steps"], **DONE_BY_THE_RUN)
        super().__init__(job, lockstep, tap)
        self.said.append(f"joined the run at {job.join}: {plan}")

    @contextmanager
    def _ranks(self) -> Iterator[Any]:
        from meshfit.launch.local import LocalRanks

        assert isinstance(self.job.devices, Devices)
        count = self.job.devices.count or 1
        work = Work(self.job, self._lockstep, None, self._tap, partial(joined_run, key=self.key))
        how: dict[str, Any] = {"devices": self.job.devices, "timeout": self.job.timeout}
        with LocalRanks(work, size=count, joined=False, expendable=range(count), **how) as ranks:
            yield ranks


@contextmanager
def started(job: Job, work: "Work | Silent", **how: Any) -> Iterator[Any]:
    """LocalRanks at ``work``. Of a function and the model that it builds, the one is sent where the other cannot be."""
    from meshfit.launch.local import LocalRanks

    assert isinstance(job.devices, Devices)
    how |= {"size": _plan(job).devices, "devices": job.devices, "timeout": job.timeout}
    with ExitStack() as stack:
        try:
            ranks = stack.enter_context(LocalRanks(work, **how))
        except JobError:
            if isinstance(job.model, nn.Module):
                raise
            other = job.model if isinstance(work.job.model, nn.Module) else job.build()
            work = replace(work, job=replace(work.job, model=other))
            ranks = stack.enter_context(LocalRanks(work, **how))
        yield ranks


def _joined(outcomes: list[Outcome], notes: list[str]) -> Outcome:
    """Of ranks that are worlds of their own: the first one's, with how long each was at what."""
    first = next((outcome for outcome in outcomes if outcome.weights), outcomes[0])
    phases = first.phases if len(outcomes) == 1 else [each for outcome in outcomes for each in outcome.phases]
    return replace(first, phases=phases, notes=[*first.notes, *notes])


@dataclass(frozen=True)
class Silent:
    """Work on a job that sends the caller nothing until it returns."""

    job: Job
    work: Callable[[Job, World], Any]

    def __call__(self, world: World, channel: Channel) -> Any:
        return self.work(self.job, world)


def everywhere(job: Job, work: Callable[[Job, World], Any]) -> list[Any]:
    """What ``work`` returns in each rank of the job's plan, by rank; the job must be settled."""
    assert isinstance(job.devices, Devices)
    given = from_environment(job.devices)
    built = replace(job, model=job.build())
    if given is not None and given.size > 1:
        connect(given, timeout=job.timeout)
        results: list[Any] = [None] * given.size
        with _as_found(built.model):
            dist.all_gather_object(results, work(built, given))
        return results
    if _plan(job).devices == 1:
        world = World(0, 1, job.devices.device(0))
        with in_one_turn(world.device), _as_found(built.model):
            return [work(built, world)]
    from meshfit.launch.warm import warm

    warm(*RANK_MODULES)
    with started(job, Silent(built, work)) as ranks:
        return ranks.results


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put trained weights into the caller's model, where its tensors are."""
    for name, p in model.named_parameters():
        if p.is_meta:
            set_data(p, weights[name])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.data_ptr() != weights[name].data_ptr():
            tensor.copy_(weights[name])


def _folder_of(job: Job) -> Path | None:
    if job.out is None:
        return None
    return folder_to_resume(job.out) if job.resume is True else new_folder(job.out)


def _plan(job: Job) -> Plan:
    assert isinstance(job.plan, Plan)
    return job.plan
