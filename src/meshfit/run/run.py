"""One rank's training: what it is made of, and how it is put together from a job.

What the loop does with it is in ``loop.py``.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from meshfit.anatomy.probe_optimizer import needs_whole
from meshfit.axes.buffers.step import Statistics
from meshfit.axes.expert.balance import balanced
from meshfit.axes.mesh import Mesh
from meshfit.axes.place import Placed, place
from meshfit.axes.precision import LossScale, Precision
from meshfit.best import Best
from meshfit.checkpoint.initial import InitialWeights
from meshfit.checkpoint.resume import to_resume
from meshfit.comm.first import from_first_rank
from meshfit.comm.sample_streams import SampleStreams
from meshfit.data.datasets import open_source
from meshfit.data.loader import Batch, Loader, Position
from meshfit.data.order import mix
from meshfit.data.packing import Packed
from meshfit.data.reading import Readers
from meshfit.data.seeding import seed_rank
from meshfit.deferred import Deferred, Unfollowable
from meshfit.errors import DataError, PlanError
from meshfit.events import Events
from meshfit.exchange.protocol import Exchange
from meshfit.exchange.update import Average
from meshfit.gradients import Guard, blank_of
from meshfit.hugging_face import give_lengths, uses_flash
from meshfit.job import Job, plan_of
from meshfit.launch.world import World
from meshfit.live import LIVE
from meshfit.loss import batch_loss, packed
from meshfit.loss.gather import gathering
from meshfit.loss.objective import LossDenominator
from meshfit.loss.probe import LARGEST
from meshfit.optimizers import Optimizers, Schedulers
from meshfit.phases import TrainedPhase
from meshfit.plan import Plan
from meshfit.python_state import PythonState
from meshfit.run.compiling import MEASURED_STEPS, Compiling, expected_step
from meshfit.run.coordination import Coordination, LocalSteps
from meshfit.run.denominators import find_denominators
from meshfit.run.evaluations import Evaluations
from meshfit.run.phase_parts import make_phases, make_schedule
from meshfit.run.replicas import ReplicaDigests
from meshfit.whole_step import CUTTING


@final
class Run:
    """A training under way in one rank of ``world``.

    ``same``: all ranks were handed the same weights; under torchrun each built its own, and the first rank's are sent
    to the others. ``deferred``: the model, if it was built on meta already. ``coordinate``: how it works together with
    the other ranks of the training.
    """

    job: Job
    world: World
    plan: Plan
    world_plan: Plan
    """What the ranks of this world do: one worker's part, under model servers."""
    coordination: Coordination
    """Who hands out batches, evaluates, reports and saves."""
    mesh: Mesh
    """This rank's place along each axis, and its groups."""
    loader: Loader
    valid: Loader | None = None
    model: nn.Module
    """With a pipeline or branches, this rank's part of it."""
    placed: Placed
    """The model, laid out over the ranks."""
    optimizer: Optimizers
    """Of all phases."""
    phases: list[TrainedPhase]
    """Of a step: forward and backward, exchange and update of each."""
    events: Events
    """What happens, and when."""
    notes: list[str]
    """What was decided for the user, in words."""

    def __init__(
        self,
        job: Job,
        world: World,
        *,
        folder: Path | None = None,
        same: bool = True,
        deferred: Deferred | None = None,
        coordinate: "Callable[[Run], Coordination] | None" = None,
    ):
        self.job, self.world, self.plan = job, world, plan_of(job)
        self.world_plan = self.plan.worker if self.plan.server else self.plan
        self.precision = Precision(self.plan.precision)
        self.notes, self.phases = [], []
        LIVE.hang = job.hang_seconds
        if coordinate is None:
            coordinate = Coordination if self.plan.exchange == "allreduce" else LocalSteps
        self.coordination = coordinate(self)
        rank = self.coordination.worker * world.size + world.rank  # of all ranks
        self.events = Events(None if folder is None else folder / "events", rank)
        mesh = Mesh.of(self.world_plan, world.rank, world.size, two_sums=world.device.type == "cuda")
        try:
            self.mesh = self.coordination.mesh(mesh)
            self._open_data()
            self._build_model(deferred, folder)
            self._lay_out(same=same and isinstance(job.model, nn.Module))
            self._assemble()
            self._begin()
        except BaseException:
            self._abandon(mesh)
            raise

    # How it is put together, in this order

    def _open_data(self) -> None:
        job = self.job
        self.loader = self.loader_of(job.data, microbatches=self.plan.microbatches, shuffle=bool(job.shuffle))
        self.valid = None if job.valid is None else self.loader_of(job.valid)
        self.last_step = self.coordination.last_step()

    def _build_model(self, deferred: Deferred | None, folder: Path | None) -> None:
        self.deferred = deferred or self._defer()
        self.model = self.job.build() if self.deferred is None else self.deferred.model
        if not self.model.training:  # else as the user left it: parts may be in eval mode on purpose
            self.model.train()
        for module in [m for m in self.model.modules() if m.training and type(m).train is not nn.Module.train]:
            module.train()  # its own, which may keep parts in eval mode: a frozen BatchNorm
        self.initial: InitialWeights | None = None
        if self.deferred is not None:
            resume = to_resume(self.job, folder)
            self.initial = InitialWeights(self.deferred, resume, self.world.rank, self.world.size)
        self._lengths = None
        if isinstance(self.loader.source, Packed) and uses_flash(self.model):
            packed.check_flash(self.plan)
            self._lengths = give_lengths(self.model)

    def _defer(self) -> Deferred | None:
        """The model on meta, where a function builds it for several ranks."""
        if isinstance(self.job.model, torch.nn.Module) or self.world.size == 1 or self.plan.server:
            return None
        try:
            return self.job.defer()
        except Unfollowable:  # the caller has said so
            return None

    def _lay_out(self, *, same: bool) -> None:
        """Place the model on the ranks; before its parameters are cut, see ``_before_cut``."""
        job, plan = self.job, self.plan
        self._overs: list[LossDenominator] = []
        gathers: list[Tensor] = []
        with gathering(lambda tensor: (gathers.append(tensor), tensor)[1]):
            self.placed = place(
                plan,
                self.model,
                self.mesh,
                self.world.device,
                objective=job.objective,
                few=self.loader.source.few,
                same=same,
                deferred=self.deferred,
                read=self.initial or (lambda placed: ()),
                before_cut=self._before_cut,
                drops=job.on_nan == "skip" or plan.precision == "fp16",
                joins=job.listen is not None or job.join is not None,
            )
        if gathers and plan.partitions_modules and self.splits:
            raise PlanError(f"{plan}: the step calls meshfit.gather", *batch_loss.no_gather(plan))
        self.model = self.placed.model
        self.notes += [*self.placed.notes, *self.loader.notes]
        if self.valid is not None:
            self.notes += [note for note in self.valid.notes if note not in self.notes]
        if plan.microbatches > 1 and balanced(self.model):
            self.notes.append("load-balancing loss: of each microbatch by itself, where the model has one")

    def python_state(self) -> PythonState:
        """What model and losses keep in Python."""
        return PythonState(self.model, *self.job.objective.code, *self.job.valid_objective.code)

    def _before_cut(self, tried: Callable[[], nn.Module]) -> None:
        """What needs the parameters in their own shapes; ``tried`` returns the model with values."""
        if self.plan.partitions_modules or sum(p.numel() for p in self.model.parameters()) <= LARGEST:
            self._overs = find_denominators(self, tried)
        if isinstance(self.loader.source, Packed):
            few = self.loader.source.few()
            from_first_rank(lambda: packed.check(self.job.objective, tried(), few), self.mesh.world)
        self._blank = blank_of(self.model) if self._guards and self.mesh.rank == 0 else None
        self.optimizers = self.job.make_optimizers(self.model)
        self.optimizer = Optimizers([one for some in self.optimizers for one in some.each])
        self.optimizer.freeze_others(self.model)
        cuts = self.mesh.over(*CUTTING) is not None and not self.plan.server
        self.whole_steps = [one for one in self.optimizer.each if cuts and needs_whole(one)]
        """Optimizers that must see a parameter whole: see whole_step.py."""
        self._step_seconds = expected_step(self)
        self.coordination.before_sharding()

    def _assemble(self) -> None:
        """Give each phase its forward and backward, exchange, update and guard."""
        scale = LossScale(self.world.device) if self.plan.precision == "fp16" else None
        overs = self._overs or find_denominators(self, lambda: self.model, self.placed.inside)
        self.phases, self.evaluations = make_phases(self, overs), Evaluations(self, overs[-1])
        for phase in self.phases if self.splits else ():
            self.notes += batch_loss.notes(self.plan, phase.over, self.loader.batch_size)
        self.stepped_whole: set[nn.Parameter] = set()
        """Cut parameters that their owners step: see whole_step.py."""
        self.coordination.assemble(scale)
        scheduled = [phase.update.scheduler for phase in self.phases if phase.update.scheduler is not None]
        made = [one for some in scheduled for one in some.each]
        self.scheduler = Schedulers(made) if made else None
        """Of all phases."""
        for phase in self.phases:
            phase.schedule = make_schedule(self, phase, scale)
        first = self.phases[0]
        self.schedule, self.exchange, self.update = first.schedule, first.exchange, first.update
        self.compiling = Compiling(self)
        self.compiling.decide(self._step_seconds, self.last_step)
        for phase in self.phases:
            phase.guard = Guard(self, self._blank, phase) if self._guards else None
        del self._blank

    def _begin(self) -> None:
        self.statistics = Statistics(self.model, self.placed.written.names)
        self.best = None if self.job.best is None else Best(self.job.best, self.job.patience)
        self.may_stop = self.coordination.may_stop
        """Whether a stop must drop the step under way: its flag is then read at once, which on a GPU means waiting.
        Else it is read a step later, with the loss."""
        self.tap: Callable[[Tensor | float], None] = lambda correction: None
        """Called before each update, to look at the gradients; times ``correction`` they are those of the mean."""
        self.at_end: Callable[[], None] = lambda: None
        """Called after the last step."""
        self.captured: dict[str, object] = {}
        self.ended_by = ""
        """What asked it to end after a step, saved: a signal, a notice."""
        self.staleness: int | None = None
        """Of the last gradient, with asynchronous updates: updates that came between."""
        seed_rank(self.stream_seed, (self.model, *self.job.objective.code) if self.share else ())
        self.digests = ReplicaDigests(self, self.job.check_replicas)
        LIVE.model = weakref.ref(self.model)
        LIVE.kind(self.mesh.part)
        self.step = self.samples = 0
        self.position = Position()
        self.streams = SampleStreams(self.mesh.world, 0 if self.plan.in_step else self.plan.every)
        self.coordination.ready()
        self.started = time.perf_counter()

    def _abandon(self, mesh: Mesh) -> None:
        """Building it failed: close what is there by now. The model may stay in parts."""
        made = vars(self)
        for exchange in self._exchanges:
            exchange.remove()
        self._close_data()
        if (initial := made.get("initial")) is not None:
            initial.close()
        if (placed := made.get("placed")) is not None:
            placed.close()
        mesh.close()
        self.events.close()

    # What the plan makes of a batch

    @property
    def splits(self) -> bool:
        """Whether a batch is cut: over ranks, over microbatches, or over workers that may join."""
        cut = self.plan.shares > 1 or self.plan.microbatches > 1
        return cut or self.job.listen is not None or self.job.join is not None

    @property
    def alone(self) -> bool:
        """Whether a whole batch goes through here at once."""
        return self.world.size == 1 and not self.plan.server and self.plan.microbatches == 1

    @property
    def share(self) -> int:
        """Which part of a batch this rank takes, among all ranks of the training."""
        return self.coordination.worker * self.world_plan.shares + self.mesh.share

    @property
    def stream_seed(self) -> int:
        """The seed of the random numbers (dropout) of one share of the batch: another for each, the same each time."""
        mixed = mix(np.array([self.share], np.uint64), np.uint64(self.job.seed % 2**64))
        return int(mixed[0] >> np.uint64(1))

    @property
    def _guards(self) -> bool:
        """Whether anything is done that one device alone would not do."""
        plan, gpu = self.plan, self.world.device.type == "cuda"
        compiles = plan.compile != "none" if gpu else plan.compile in ("block", "whole")
        return self.world.size > 1 or plan.cuts or plan.recompute != "none" or compiles or plan.server > 0

    @cached_property
    def average(self) -> Average | None:
        """Of the weights, over the steps."""
        return None if self.job.ema is None else Average(self.model, self.job.ema)

    # Batches

    def loader_of(self, data: object, *, microbatches: int = 1, shuffle: bool = False) -> Loader:
        assert isinstance(self.job.batch_size, int)
        readers = Readers.of(self.job.workers)
        return Loader(
            source=open_source(data),
            batch_size=self.job.batch_size,
            rank=self.mesh.share,
            ranks=self.world_plan.shares,
            device=self.world.device,
            microbatches=microbatches,
            seed=self.job.seed,
            shuffle=shuffle,
            workers=readers.workers,
            kind=readers.kind,
        )

    def batches(self) -> Iterator[Batch]:
        """Those that this rank computes its share of."""
        return self.coordination.batches()

    def epochs(self) -> Iterator[Batch]:
        """The batches of the run from its position on, epoch after epoch."""
        epoch, start = self.position.now(self.step)
        made = 0  # since the run was started, or resumed
        while self.last_step is None or self.step < self.last_step:
            if self.last_step is None and epoch >= (self.job.epochs or math.inf):
                return
            empty = start == 0
            for batch in self.streams.in_agreement(self.loader, self.loader.epoch(epoch, start)):
                self.position.hand_out(batch, self.step)
                yield batch
                empty, made = False, made + 1
                if made in MEASURED_STEPS:
                    self.compiling.reconsider(made)
                if self.last_step is not None and self.step >= self.last_step:
                    return
            if empty:
                raise DataError(f"data= gave no sample in epoch {epoch}", "it must hold some each time it is read")
            epoch, start = epoch + 1, 0

    # The end

    @property
    def out_of_patience(self) -> bool:
        return self.best is not None and self.best.given_up

    def settle(self) -> None:
        """At the end: have in the model what the training came to, the best, or the averaged, or the last weights."""
        if self.best is not None and self.best.weights:
            self.best.restore(self.model)
        elif self.update.average is not None:
            self.update.average.swap()
        self.placed.changed()

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors an optimizer keeps, whole, on the CPU, by parameter and key. All ranks call it together."""
        offload, held = self.update.offload, {}
        with self.coordination.whole():
            for name, p in self.model.named_parameters():
                state = offload.read(p) if offload is not None else self.optimizer.state.get(p, {})
                held[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            return self.placed.wholes(held, self.stepped_whole)

    def close(self) -> None:
        """Leave the user's model as it was found, but trained; of one that a function built, each rank's part."""
        for phase in self.phases:
            if phase.update.offload is not None and not callable(phase.asked.optimizer):
                phase.update.offload.fetch()  # the user may go on with it
        self._close_data()
        for exchange in self._exchanges:
            exchange.remove()
        if self.deferred is None or self.placed.is_whole:
            self.placed.undo()
        else:
            self.placed.close()
        self.events.close()

    @property
    def _exchanges(self) -> list[Exchange]:
        made = {id(phase.exchange): phase.exchange for phase in self.phases}  # phases may share one
        return [exchange for exchange in made.values() if exchange is not None]

    def _close_data(self) -> None:
        made = vars(self)
        for loader in (made.get("loader"), self.valid):
            if loader is not None:
                loader.close()
        if (lengths := made.get("_lengths")) is not None:
            lengths.remove()
