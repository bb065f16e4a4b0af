"""A training in ranks started for it; this process gets every step, and the weights at the end."""

import secrets
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.arguments import is_url
from meshfit.checkpoint import manifest
from meshfit.checkpoint.files import open_files
from meshfit.checkpoint.graceful_stop import GracefulStop, leave, word_of
from meshfit.checkpoint.resume import checkpoints_of, put_events_aside
from meshfit.drive.elastic import CAME_BACK, Elastic
from meshfit.drive.feed import Begun, Late, ReportedSteps, WholeTensor
from meshfit.drive.out_of_memory import with_memory
from meshfit.drive.restart import Tries, last_right, put_suspects_aside, tries_of
from meshfit.drive.training import Training
from meshfit.drive.untouched import Untouched
from meshfit.drive.work import Outcome, Silent, Tap, Work
from meshfit.errors import JobError, MeshfitError, RankError
from meshfit.job import NO_EVALUATION, Job, plan_of
from meshfit.launch import key as keys
from meshfit.launch.devices import Devices, find
from meshfit.launch.system import check_ranks
from meshfit.observe.folder import folder_of
from meshfit.plan import Plan
from meshfit.run import Run
from meshfit.server import join
from meshfit.server import process as serve
from meshfit.server.coordination import joined_run, worker_run
from meshfit.step import Step
from meshfit.torch_private.compilation import COMPILER
from meshfit.torch_private.tensors import set_data
from meshfit.version import VERSION

RANK_MODULES = (COMPILER, "meshfit.drive")  # torch's optimizers import _dynamo when built
LEAVE_SECONDS = 10.0  # in which workers that joined may leave, at the end
DONE_BY_THE_RUN = {**NO_EVALUATION, "out": None, "checkpoint": None}
"""What workers that join leave to the run that they join."""
DONE_BY_THE_RUN |= {"resume": False, "epochs": None}


class Ranked(Training):
    """Trains in ranks started for it; this process gets every step, and the weights at the end."""

    def __init__(self, job: Job, lockstep: bool, tap: Tap | None, elastic: Elastic | None = None):
        from meshfit.launch.warm import warm

        check_ranks(plan_of(job))
        warm(*RANK_MODULES)  # the template loads torch while the model is built
        super().__init__(job, lockstep, tap)
        if plan_of(job).server and job.join is None:
            serve.check(job)
        self._take_folder(*folder_of(job))
        self.elastic = elastic
        self._began = self._earlier = 0.0
        """When the first ranks began to train, and for how long these or others had by the time that the present ones
        did."""

    def _steps(self, graceful: GracefulStop) -> Generator[Step, None, None]:
        try:
            yield from self._survived(graceful)
        except RankError as error:
            if error.out_of_memory:
                raise with_memory(self.job, self.model, error) from None
            raise
        except KeyboardInterrupt:  # where this process waited for its ranks helps nobody
            raise KeyboardInterrupt from None

    def _survived(self, graceful: GracefulStop) -> Generator[Step, None, None]:
        """The steps, each once, from ranks that are started again when they fail: see restart.py. Those that may have
        been wrong are told again."""
        tries, reported = Tries(tries_of(self.job)), ReportedSteps()
        while True:
            reported.begin()
            try:
                for step in self._received(graceful, reported):
                    yield replace(step, seconds=step.seconds + self._earlier) if self._earlier else step
                assert self.outcome is not None
                self.outcome = replace(self.outcome, seconds=self.outcome.seconds + self._earlier)
                if self.outcome.ended_by != CAME_BACK or graceful.came or self._stop:
                    return
                self._again(tries, None)
            except MeshfitError as error:
                if graceful.asked(but=CAME_BACK) or self._stop:
                    raise
                last = last_right(error, plan_of(self.job))
                self._again(tries, error, last)
                if last is not None and last < reported.furthest:
                    reported.take_back(last)
                    self.taken_back += 1
            graceful.begun = False

    def _again(self, tries: Tries, error: MeshfitError | None, last: int | None = None) -> None:
        """Get ready for other ranks, and say so; raises where there are to be none. Without an error: on more
        devices. ``last``: see ``last_right``."""
        out, folder, before = self.job.out, self.folder, plan_of(self.job)
        if error is not None and (not tries.most or out is None or folder is None):
            raise error
        assert out is not None
        assert folder is not None
        put_suspects_aside(checkpoints_of(self.job, folder), last)
        newest = next(iter(manifest.complete(checkpoints_of(self.job, folder))), None)
        if error is not None:
            tries.failed(error, newest)
        job = self.job if newest is None else replace(self.job, resume=True)
        if self.elastic is not None:
            job = self.elastic.after(tries.failures, job) if error is not None else self.elastic.fitted(job)
            self._check(job)
        self.job = job
        put_events_aside(open_files(folder), open_files(out).names() if is_url(out) else ())
        place = "the beginning" if newest is None else f"step {newest.step}"
        on = "" if plan_of(job) == before else f" as {job.plan}, after {before}"
        if on:
            tries.failures.clear()  # other devices, other luck
        self.said.append(f"restarted from {place}{on}: {error.headline if error is not None else CAME_BACK}")
        told = f"meshfit: {error if error is not None else CAME_BACK}\nmeshfit: started again from {place}{on}"
        print(f"{told}{tries.so_far}", file=sys.stderr, flush=True)

    def _received(self, graceful: GracefulStop, reported: ReportedSteps) -> Generator[Step, None, None]:
        """What ranks report, each step once."""
        weights: dict[str, Tensor] = {}
        code = [each for phase in self.job.phases for each in phase.objective.code]
        untouched = Untouched(self.model, self.job.optimizer, *code, *self.job.data.code)
        with self._ranks() as ranks:
            for rank, message in ranks.messages():
                if isinstance(message, Begun):
                    graceful.begun, now = True, time.perf_counter()
                    self._began = self._began or now
                    self._earlier = now - self._began
                    self.notes, self.last_step = [*self.said, *message.notes], message.last_step
                elif isinstance(message, WholeTensor):
                    weights[message.name] = message.tensor
                elif isinstance(message, Outcome):  # the last words of ranks that will raise
                    load(self.model, message.weights)
                    untouched.weights_came()  # steps of other workers may follow
                else:
                    self._look_for_more()
                    late = isinstance(message, Late)
                    for step in message.steps if late else message:
                        if not (self._stop and self._lockstep) and reported.is_new(step.step, late=late):
                            yield step
                            untouched.check()
                        if self._lockstep:
                            ranks.send(rank, "stop" if self._stop else "go")
                    if self._stop and not self._lockstep:
                        ranks.send(rank, "stop")
            if self.job.listen is not None:
                ranks.beside.finish(within=LEAVE_SECONDS)
            outcome = _joined([found for found in ranks.results if found is not None], ranks.notes)
        load(self.model, outcome.weights or weights)
        self.outcome = outcome

    def _look_for_more(self) -> None:
        """Ask the ranks to save and end, where others could go on with more devices."""
        if self.elastic is None or self.job.checkpoint is None or self.folder is None:
            return
        if self.elastic.grown(self.job) and word_of(self.folder) is None:
            leave(self.folder, CAME_BACK)

    @contextmanager
    def _ranks(self) -> Iterator[Any]:
        """Started, each at its ``Work``; model servers beside them, if the plan has any."""
        job, plan, folder = self.job, plan_of(self.job), self.folder
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
            with Servers(
                serving, count=plan.server, folder=ranks.folder, hang=job.hang_seconds, log=folder
            ) as ranks.beside:
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

    def _ranks(self) -> AbstractContextManager[Any]:
        assert isinstance(self.job.devices, Devices)
        count = self.job.devices.count or 1
        work = Work(self.job, self._lockstep, None, self._tap, partial(joined_run, key=self.key))
        return started(self.job, work, size=count, joined=False, expendable=range(count))


@contextmanager
def started(job: Job, work: Work | Silent, **how: Any) -> Iterator[Any]:
    """LocalRanks at ``work``. Of a function and the model that it builds, the one is sent where the other cannot be."""
    from meshfit.launch.local import LocalRanks

    assert isinstance(job.devices, Devices)
    how = {"size": plan_of(job).devices, "timeout": job.timeout, "hang": job.hang_seconds} | how
    with ExitStack() as stack:
        try:
            ranks = stack.enter_context(LocalRanks(work, devices=job.devices, **how))
        except JobError:
            if isinstance(job.model, nn.Module):
                raise
            other = job.model if isinstance(work.job.model, nn.Module) else job.build()
            work = replace(work, job=replace(work.job, model=other))
            ranks = stack.enter_context(LocalRanks(work, devices=job.devices, **how))
        yield ranks


def _joined(outcomes: list[Outcome], notes: list[str]) -> Outcome:
    """Of ranks that are worlds of their own: the first one's, with how long each was at what."""
    first = next((outcome for outcome in outcomes if outcome.weights), outcomes[0])
    phases = first.phases if len(outcomes) == 1 else [each for outcome in outcomes for each in outcome.phases]
    ended_by = next((outcome.ended_by for outcome in outcomes if outcome.ended_by), "")
    return replace(first, phases=phases, notes=[*first.notes, *notes], ended_by=ended_by)


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put trained weights into the caller's model, where its tensors are."""
    for name, p in model.named_parameters():
        if p.is_meta:
            set_data(p, weights[name])
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.data_ptr() != weights[name].data_ptr():
            tensor.copy_(weights[name])
