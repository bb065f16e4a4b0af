"""One rank's training, assembled from a job: model, batches, schedule, exchange, update.

The parts are put together in the order that ``axes/__init__.py`` gives. What the loop then does with them
is in ``fit.py``.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import final

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshfit.axes.compile.axis import Compile, expected_step_seconds
from meshfit.axes.compile.pieces import InPieces
from meshfit.axes.data import batchnorm
from meshfit.axes.expert.balance import balanced, is_apart
from meshfit.axes.mesh import Mesh
from meshfit.axes.offload import Offloaded
from meshfit.axes.place import place
from meshfit.axes.precision import LossScale, Precision
from meshfit.best import Best
from meshfit.comm.first import from_first_rank
from meshfit.coordination import Coordination, LocalSteps
from meshfit.data import tree
from meshfit.data.datasets import SampleStream, open_source
from meshfit.data.loader import Batch, Loader, Position
from meshfit.data.order import mix
from meshfit.data.reading import Readers
from meshfit.deferred import Deferred, Unfollowable
from meshfit.errors import DataError, JobError, PlanError
from meshfit.evaluation import measure
from meshfit.events import Events
from meshfit.exchange.across import Across
from meshfit.exchange.allreduce import BUCKET_BYTES, FIRST_BUCKET_BYTES, AllReduce
from meshfit.exchange.assemble import cut_state, exchange_of
from meshfit.exchange.scatter import Scatter
from meshfit.exchange.update import Average, Update
from meshfit.gradients import Guard, blank_of
from meshfit.job import Job
from meshfit.launch.world import World
from meshfit.loss import batch_loss
from meshfit.loss.batch_loss import BatchLoss, Outputs
from meshfit.loss.gather import gathering, refusing
from meshfit.loss.gather import over as rows_over
from meshfit.loss.objective import LossDenominator
from meshfit.loss.probe import LARGEST, find_denominator
from meshfit.passes.loss_sum import LossSum
from meshfit.passes.pipeline import Pipelined
from meshfit.passes.whole import Passes
from meshfit.plan import Plan

MEASURED_STEPS = (10, 25)  # between them, whether compiling would pay is measured


@final
class Run:
    """A training under way in one rank of ``world``.

    ``same``: all ranks were handed the same weights; under torchrun each built its own, and the first rank's are sent
    to the others. ``deferred``: the model, if it was built on meta already. ``coordinate``: how it works together with
    the other ranks of the training.
    """

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
        assert isinstance(job.plan, Plan)
        self.job, self.world, self.plan = job, world, job.plan
        self.world_plan = self.plan.worker if self.plan.server else self.plan
        """What the ranks of this world do: one worker's part, under model servers."""
        self.notes: list[str] = []
        """What was decided for the user, in words."""
        if coordinate is None:
            coordinate = Coordination if self.plan.exchange == "allreduce" else LocalSteps
        self.coordination = coordinate(self)
        rank = self.coordination.worker * world.size + world.rank  # of all ranks
        self.events = Events(None if folder is None else folder / "events", rank)
        self.mesh = self.coordination.mesh(Mesh.of(self.world_plan, world.rank, world.size))
        self.loader = self.loader_of(job.data, microbatches=self.plan.microbatches, shuffle=job.shuffle)
        self.valid = None if job.valid is None else self.loader_of(job.valid)
        self.last_step = self.coordination.last_step()

        self.precision = Precision(self.plan.precision)
        self.deferred, same = deferred or self._defer(), same and isinstance(job.model, torch.nn.Module)
        self.model = job.build() if self.deferred is None else self.deferred.model
        if not self.model.training:  # else as the user left it: parts may be in eval mode on purpose
            self.model.train()
        self.over: LossDenominator | None = None
        gathers: list[Tensor] = []
        with gathering(lambda tensor: (gathers.append(tensor), tensor)[1]):
            self.placed = place(
                self.plan,
                self.model,
                self.mesh,
                world.device,
                objective=job.objective,
                few=self.loader.source.few,
                same=same,
                deferred=self.deferred,
                before_cut=self._before_cut,
                drops=job.on_nan == "skip" or self.plan.precision == "fp16",
                joins=job.listen is not None or job.join is not None,
            )
        if gathers and self.plan.partitions_modules and self._splits:
            raise PlanError(f"{self.plan}: the step calls meshfit.gather", *batch_loss.no_gather(self.plan))
        self.model = self.placed.model  # with a pipeline, this rank's part of it
        self.notes += self.placed.notes
        self.notes += self.loader.notes
        if self.valid is not None:
            self.notes += [note for note in self.valid.notes if note not in self.notes]
        scale = LossScale(world.device) if self.plan.precision == "fp16" else None
        if self.plan.microbatches > 1 and balanced(self.model):
            self.notes.append("load-balancing loss: of each microbatch by itself, where the model has one")
        self.over = self.over or self._find_over(lambda: self.model, self.placed.inside)
        self.notes += batch_loss.notes(self.plan, self.over, self.loader.batch_size) if self._splits else []

        self.update, self.exchange = self.coordination.assemble(scale)
        self.schedule = self._make_schedule(scale)
        self._compile_if(self._step_seconds, self.last_step)

        self.guard: Callable[[Batch], None] | None = Guard(self, self._blank) if self._guards else None
        """Called before each update, until no gradient is missing: see gradients.py."""
        self._blank = None
        self.statistics = batchnorm.Statistics(self.model, self.placed.written.names)
        self.best = None if job.best is None else Best(job.best, job.patience)
        self.may_stop = self.coordination.may_stop
        """Whether a stop must drop the step under way: its flag is then read at once, which on a GPU means waiting.
        Else it is read a step later, with the loss."""
        self.tap: Callable[[Tensor | float], None] = lambda correction: None
        """Called before each update, to look at the gradients; times ``correction`` they are those of the mean."""
        self.at_end: Callable[[], None] = lambda: None
        """Called after the last step."""
        self.captured: dict[str, object] = {}
        self.staleness: int | None = None
        """Of the last gradient, with asynchronous updates: updates that came between."""
        torch.manual_seed(self._stream)
        random.seed(self._stream)  # a model may draw from these too: ranks that share samples must draw the same
        np.random.seed(self._stream % 2**32)
        self.step = self.samples = 0
        self.position = Position()
        self.coordination.ready()
        self.started = time.perf_counter()

    def _defer(self) -> Deferred | None:
        """The model on meta, where a function builds it for several ranks."""
        if isinstance(self.job.model, torch.nn.Module) or self.world.size == 1 or self.plan.server:
            return None
        try:
            return self.job.defer()
        except Unfollowable:  # the caller has said so
            return None

    def make_update(self, scale: LossScale | None) -> Update:
        job, placed = self.job, self.placed
        cut_state(self.optimizer, placed)
        theirs = isinstance(job.optimizer, torch.optim.Optimizer)  # an optimizer of the user's own is left as it is
        sparse = any(getattr(module, "sparse", False) for module in self.model.modules())  # no fused kernel takes it
        return Update(
            self.optimizer,
            job.make_scheduler(self.optimizer, self.last_step),
            clip=job.clip,
            scale=scale,
            average=None if job.ema is None else Average(self.model, job.ema),
            may_fuse=not (theirs or sparse),
            offload=Offloaded(self.optimizer, self.world.device) if self.plan.offload == "optimizer" else None,
        )

    def make_exchange(self) -> AllReduce | Scatter | Across:
        return exchange_of(self.placed)

    def _make_schedule(self, scale: LossScale | None) -> Passes | Pipelined:
        placed, objective, device = self.placed, self.job.objective, self.world.device
        assert self.over is not None
        whole = BatchLoss.of(objective, self.over, self.mesh.batch, device) if self._splits else None
        if whole is not None:
            objective = Outputs()
        loss_sum = LossSum(self.over, self.exchange, scale, loss_replicas=self.plan.context)
        if placed.staged is not None:
            whole_backward = not placed.layers.keys().isdisjoint(("shard", "branch", "expert"))
            return Pipelined(
                placed.staged,
                objective,
                loss=loss_sum,
                precision=self.precision,
                device=device,
                transport=placed.staged.transport,
                seed=self._stream,
                inside=placed.inside,
                split_backward=not whole_backward and self.plan.recompute == "none",
                batch_loss=whole,
                buffers=placed.buffers,
                groups=placed.groups,
            )
        if placed.branched is not None:
            objective = placed.branched.objective(objective, self.precision, device)
        return Passes(
            self.model,
            objective,
            loss_sum,
            self.precision,
            device,
            placed.inside,
            batch_loss=whole,
            gather=self._gather,
            buffers=placed.buffers,
        )

    def _before_cut(self, tried: Callable[[], torch.nn.Module]) -> None:
        """What needs the parameters in their own shapes; ``tried`` returns the model with values."""
        if self.plan.partitions_modules or sum(p.numel() for p in self.model.parameters()) <= LARGEST:
            self.over = self._find_over(tried)
        self._blank = blank_of(self.model) if self._guards and self.mesh.rank == 0 else None
        self.optimizer = self.job.make_optimizer(self.model)
        self._step_seconds = self._expected_step()
        self.coordination.before_sharding()

    @property
    def _guards(self) -> bool:
        """Whether anything is done that one device alone would not do."""
        plan, gpu = self.plan, self.world.device.type == "cuda"
        compiles = plan.compile != "none" if gpu else plan.compile in ("block", "whole")
        return self.world.size > 1 or plan.cuts or plan.recompute != "none" or compiles or plan.server > 0

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
            for batch in self.loader.epoch(epoch, start):
                self.position.hand_out(batch, self.step)
                yield batch
                empty, made = False, made + 1
                if made in MEASURED_STEPS:
                    self._reconsider_compile(made)
                if self.last_step is not None and self.step >= self.last_step:
                    return
            if empty:
                raise DataError(f"data= gave no sample in epoch {epoch}", "it must hold some each time it is read")
            epoch, start = epoch + 1, 0

    def evaluation_is_due(self, batch: Batch) -> bool:
        """Whether this rank evaluates after it."""
        return self.coordination.leads and self.evaluates_after(batch)

    def evaluates_after(self, batch: Batch) -> bool:
        """Whether some rank does."""
        if self.valid is None:
            return False
        every = self.job.valid_every
        return self.step == self.last_step or (batch.last if every is None else self.step % every == 0)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on the validation data, the same on every rank; of the averaged weights if there are."""
        return self.coordination.evaluate(self._measure)

    def _measure(self) -> dict[str, float]:
        assert self.valid is not None
        assert self.over is not None
        with self.events.span("evaluate"), self.events.aside(), self._averaged():
            measured = measure(
                self.placed,
                self.valid,
                objective=self.job.objective,
                over=self.over,
                metrics=self.job.metrics,
                precision=self.precision,
            )
            if self.best is not None:
                self.best.consider(measured, self.model)
        return measured

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
            return self.placed.wholes(held)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        average = self.update.average
        if average is None:
            yield
            return
        average.swap()
        self.placed.changed()
        try:
            yield
        finally:
            average.swap()
            self.placed.changed()

    def close(self) -> None:
        """Leave the user's model as it was found, but trained; of one that a function built, each rank's part."""
        if self.update.offload is not None and self.optimizer is self.job.optimizer:
            self.update.offload.fetch()  # the user may go on with it
        for loader in (self.loader, self.valid):
            if loader is not None:
                loader.close()
        self.exchange.remove()
        if self.deferred is None or self.placed.is_whole:
            self.placed.undo()
        else:
            self.placed.close()
        self.events.close()

    @property
    def _stream(self) -> int:
        """The seed of the random numbers (dropout) of one share of the batch: another for each, the same each time."""
        return self._seed_of(self.share)

    @property
    def share(self) -> int:
        """Which part of a batch this rank takes, among all ranks of the training."""
        return self.coordination.worker * self.world_plan.shares + self.mesh.share

    def _seed_of(self, share: int) -> int:
        mixed = mix(np.array([share], np.uint64), np.uint64(self.job.seed % 2**64))
        return int(mixed[0] >> np.uint64(1))

    @property
    def _splits(self) -> bool:
        """Whether a batch is cut: over ranks, over microbatches, or over workers that may join."""
        cut = self.plan.shares > 1 or self.plan.microbatches > 1
        return cut or self.job.listen is not None or self.job.join is not None

    @property
    def _gather(self) -> Callable[[Tensor], Tensor] | None:
        """What ``meshfit.gather`` does in a step of this run."""
        if self._splits and (why := batch_loss.no_gather(self.plan)):
            return refusing(*why)
        return rows_over(self.mesh.batch)

    def _find_over(
        self,
        tried: Callable[[], torch.nn.Module],
        inside: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> LossDenominator:
        """What the loss is a mean over; not asked where the whole batch always goes through at once. ``inside`` goes
        around a model that is laid out already; one that is not is still whole, and may be in host memory."""
        if not self._splits and self.valid is None:
            return LossDenominator(kind="samples")
        few, auxiliary = self.loader.source.few(), is_apart(self.plan)

        def found() -> LossDenominator:
            device, model = self.world.device, tried()
            if inside is None:
                device = next((p.device for p in model.parameters()), device)
            return find_denominator(self.job.objective, model, few, device, inside, auxiliary=auxiliary)

        alone = self.deferred is not None and inside is None  # the first rank alone has values
        try:
            over = (
                found()
                if not alone
                else cloudpickle.loads(from_first_rank(lambda: cloudpickle.dumps(found()), self.mesh.world))
            )
        except Exception:
            if self._splits:
                raise
            return LossDenominator(kind="samples")  # whole batches: training will say what is wrong
        if self._splits:
            batch_loss.check(self.plan, over, self.job.objective)
        if self.mesh.world is not None:
            said = [over.kind]
            dist.broadcast_object_list(said)
            if said[0] != over.kind:  # else they would wait for each other in vain
                raise JobError(
                    f"ranks do not agree what the loss is a mean over: {said[0]} on the first, {over.kind} here",
                    "is it the same function of the same numbers on each? (sum, count) as its result says what it is",
                )
        return over

    def _expected_step(self) -> float:
        """A guess of how long a step takes, for ``_compile_if``; see ``_reconsider_compile``."""
        source, device = self.loader.source, self.world.device
        if device.type != "cuda" or isinstance(source, SampleStream):
            return 0.0
        first = next((t for t in tree.tensors(source.fetch(np.arange(1)))), None)
        tokens = first.numel() if first is not None and not first.is_floating_point() else 1
        return expected_step_seconds(self.model, tokens * self.loader.batch_size // self.plan.shares, device)

    def _reconsider_compile(self, made: int) -> None:
        """The same by the clock, after some steps. On one device alone: ranks might differ in what they measure."""
        device = self.world.device
        if device.type != "cuda" or self.world.size > 1 or self._compiled or self.last_step is None:
            return
        torch.cuda.synchronize(device)
        first, last = MEASURED_STEPS
        if made == first:
            self._clock = time.perf_counter()
        else:
            self._compile_if((time.perf_counter() - self._clock) / (last - first), self.last_step - made)

    def _compile_if(self, seconds: float, steps: int | None) -> None:
        assert self.over is not None
        blocks = self.placed.compiled
        whole = self.placed.plain and self.plan.compile != "block" and not self.over.gathers
        means = "whole" if whole else "block" if blocks is not None else "none"
        choice, device = Compile(self.plan.compile), self.world.device
        self._compiled, why = choice.decide(device=device, step_seconds=seconds, steps=steps, means=means)
        if device.type == "cuda" or self._compiled:
            self.notes[:] = [note for note in self.notes if not note.startswith("compile")] + [why]
        if self._compiled and whole and isinstance(self.schedule, Passes):
            sums = isinstance(self.exchange, AllReduce) and self.exchange.degree > 1
            pieces = InPieces(BUCKET_BYTES, FIRST_BUCKET_BYTES) if sums else None
            self.schedule.objective = choice.apply(self.schedule.objective, pieces)
        elif self._compiled and blocks is not None:
            blocks.compile()
            if isinstance(self.schedule, Pipelined):
                self.schedule.split_backward = False  # a compiled block has one backward
