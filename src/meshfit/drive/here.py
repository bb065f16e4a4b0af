"""A training in this process: a world of one, or one rank of a world that torchrun made."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshfit.axes.buffers.watch import modes_kept
from meshfit.checkpoint.graceful_stop import GracefulStop
from meshfit.checkpoint.parts import Parts
from meshfit.checkpoint.pretrained import write_weights
from meshfit.checkpoint.resume import checkpoints_of
from meshfit.comm.objects import broadcast_object
from meshfit.drive.out_of_memory import note_memory
from meshfit.drive.restart import last_right, put_suspects_aside
from meshfit.drive.training import Training
from meshfit.drive.untouched import TrainedParameters
from meshfit.drive.work import Tap, driven, outcome_of
from meshfit.errors import MeshfitError, out_of_memory
from meshfit.job import Job, plan_of
from meshfit.launch import heap
from meshfit.launch.devices import Devices
from meshfit.launch.torchrun_watch import watched
from meshfit.launch.world import World, connect
from meshfit.observe.folder import WEIGHTS, folder_of
from meshfit.observe.mirror import events_copied
from meshfit.run import Run
from meshfit.step import Step
from meshfit.turns import Turn, in_turns


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
        self.first = self.world.rank == 0
        self.writes &= self.first
        found = folder_of(job) if self.writes else (None, None)
        if self.world.size > 1 and job.out is not None:
            found = broadcast_object(found)
        self._take_folder(*found)

    def __iter__(self) -> Iterator[Step]:
        self._iterator = in_turns(Turn(self.world.device, world=self.world.size > 1), self._all_steps())
        return self._iterator

    def _steps(self, graceful: GracefulStop) -> Generator[Step, None, None]:
        with ExitStack() as stack:
            stack.enter_context(self._without_suspects())
            stack.enter_context(watched(self.world.rank, self.world.size, self.job.timeout, self.job.hang_seconds))
            stack.enter_context(events_copied(self.job.out, self.folder, self.world.rank, self.world.size))
            if self.deferred is None:
                stack.enter_context(as_found(self.model))
            job = self.job if self.deferred is not None else replace(self.job, model=self.model)
            run = Run(job, self.world, folder=self.folder, same=False, deferred=self.deferred)
            run.may_stop |= self._lockstep and self.world.size > 1

            def begun() -> None:
                self.notes, self.last_step = [*self.said, *run.notes], run.last_step
                graceful.begun = True

            try:
                trained = TrainedParameters(self.model)
                for step in driven(run, self.folder, self._tap, begun=begun, stop=lambda: self._stop):
                    trained.take()  # the run freezes those in no optimizer, and a forward may change it
                    yield step
                    if self.world.size > 1:
                        trained.check()
                self.outcome = outcome_of(run)
                if self.deferred is not None and not run.placed.is_whole:
                    self._keep_parts(run)
            except Exception as error:
                if out_of_memory(error):
                    note_memory(self.job, self.model, error)
                raise
            finally:
                run.close()
                if self.deferred is not None and self.parts is None:
                    self.model.to("cpu")  # as it was built

    @contextmanager
    def _without_suspects(self) -> Iterator[None]:
        """Whoever starts these ranks again goes on from a checkpoint that is right."""
        try:
            yield
        except MeshfitError as error:
            if self.job.checkpoint is not None and self.folder is not None:
                put_suspects_aside(checkpoints_of(self.job, self.folder), last_right(error, plan_of(self.job)))
            raise

    def _keep_parts(self, run: Run) -> None:
        """Each rank keeps what it holds of the model; its weights are in the run's folder, put together by parts."""
        self.parts = Parts(run.placed)
        if self.folder is not None:
            try:
                write_weights(self.parts, self.file(WEIGHTS), here=self.writes)
            except OSError as error:
                self.said.append(f"{WEIGHTS} could not be written: {error.strerror or error}")

    def gather(self) -> nn.Module:
        assert self.parts is not None
        return self.parts.into(self.job.defer().model)

    def save(self, target: Path | str, **how: Any) -> list[Path | str]:
        if self.parts is None:
            return super().save(target, **how) if self.first else []
        try:
            written: Any = super().save(target, **how)
        except (MeshfitError, OSError) as error:
            written = error
        written = broadcast_object(written)  # nobody goes on before it is there
        if isinstance(written, Exception):
            raise written
        return written


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is on its device, in its modes, and its parameters train, as before."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    trains = {p: p.requires_grad for p in model.parameters()}
    try:
        with modes_kept(model):
            yield
    finally:
        model.to(device)
        for p, does in trains.items():
            p.requires_grad_(does)
