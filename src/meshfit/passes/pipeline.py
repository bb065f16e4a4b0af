"""Microbatches through the stages of a pipeline: one rank works through its list of actions.

It takes the place of ``Passes``: ``schedule(batch)`` leaves in the exchange the gradients of this rank's parameters.
Loss and counts are known on the rank of the last stage; the exchange tells the others (see exchange/across.py).

Random numbers (dropout) come from a stream for each step, microbatch and stage: the same in every run and under every
schedule. Another cut draws others.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from meshfit import generators
from meshfit.axes.buffers.step import Buffers
from meshfit.axes.buffers.watch import buffers_kept
from meshfit.axes.data.batchnorm import counting
from meshfit.axes.pipeline.program import Ran, StageProgram
from meshfit.axes.pipeline.staged import Staged
from meshfit.axes.place import Placed
from meshfit.axes.precision import Precision
from meshfit.axes.spec import whole_output
from meshfit.comm.group import Group
from meshfit.comm.transport import Layout, Pending, Transport, packed, packed_size, unpacked
from meshfit.data.loader import Batch
from meshfit.data.order import mix
from meshfit.events import current
from meshfit.loss.batch_loss import BatchLoss, backward_from, leaves_of
from meshfit.loss.objective import LossDenominator
from meshfit.passes.backward import WeightBackward, input_backward
from meshfit.passes.loss_sum import LossSum
from meshfit.schedule.actions import BACKWARD, FORWARD, INPUT, SPANS, Action, Message, Schedule
from meshfit.schedule.issue import Entry, Transfer, issued
from meshfit.schedule.orders import short


@dataclass(eq=False, slots=True)
class StageActivations:
    """What a stage keeps of a microbatch from its forward to its backward."""

    fed: list[Tensor]
    """Leaves that need a gradient."""
    made: list[Tensor]
    """What it handed on and wants a gradient for; on the last stage the loss, or of a loss of the whole batch the
    outputs."""
    gradients: list[Tensor] | None = None
    """Of those outputs."""
    weight_backward: WeightBackward | None = None


class Pipelined:
    """Runs batches through this rank's stages. All ranks of the pipeline run the same batches."""

    def __init__(
        self,
        stages: "LocalStages",
        loss: LossSum,
        *,
        seed: int = 0,
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
        split_backward: bool = True,
        batch_loss: BatchLoss | None = None,
        buffers: Buffers | None = None,
    ):
        """``split_backward=False`` does the whole of a backward where its first half is due: where activations are
        computed again in backward, the second half would do so once more for every weight.

        ``batch_loss``: of a loss of the whole batch; the objective then gives the model's outputs, and all microbatches
        go forward once more before the step, without a graph."""
        self.stages, self.staged, self.plan = stages, stages.staged, stages.staged.pipeline.schedule
        self.device, self.seed, self.loss = stages.device, seed, loss
        self.split_backward, self.batch_loss, self.during = split_backward, batch_loss, during
        self.buffers = buffers or Buffers()
        self.steps = 0
        """Taken so far: random numbers follow it, so a resumed run sets it."""
        self._without_graph: WeakKeyDictionary[StageProgram, StageProgram] = WeakKeyDictionary()
        self._orders: dict[int, tuple[Schedule, tuple[Entry, ...], Action]] = {}

    def __call__(self, batch: Batch, stop: Callable[[], bool] = lambda: False) -> None:
        with self.during():
            self._run(batch, stop)

    def _run(self, batch: Batch, stop: Callable[[], bool]) -> None:
        self.loss.begin()
        plan, entries, final = self._order(len(batch.microbatches))
        held = None if self.batch_loss is None else self._whole_loss(self.batch_loss, plan, batch.copied())
        step = _BatchOfStages(self, plan, batch, held)
        if self.batch_loss is None and step.programs[0].gives_pair and self.loss.over.kind != "pair":
            self.loss.over = LossDenominator(kind="pair")
        changes = any(program.changes_parameters for program in step.programs)
        with nullcontext() if changes else self.stages.precision.rounded_once():
            for entry in entries:
                if isinstance(entry, Transfer):
                    step.move(entry)
                    continue
                if entry == final:  # the gradients that it completes may go
                    self.buffers.combine()
                    self.loss.arm(stop)
                step.run(entry)
        self.stages.transport.flush()
        self.steps += 1

    def _order(self, count: int) -> tuple[Schedule, tuple[Entry, ...], Action]:
        """For ``count`` microbatches: the schedule, what this rank issues, and its last backward."""
        if count not in self._orders:
            plan = self.plan if count == self.plan.microbatches else short(self.plan, count)
            final = [action for action in plan.orders[self.staged.rank] if action.kind != FORWARD][-1]
            self._orders[count] = plan, issued(plan, self.staged.rank), final
        return self._orders[count]

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """As a span in this rank's events. It begins when what the action needs is there: waiting is no part of it."""
        events = current()
        began = events.mark()
        yield
        events.between(SPANS[action.kind], began, events.mark(), microbatch=action.microbatch, stage=action.stage)

    def program(self, content: Any) -> StageProgram:
        """For a microbatch. Without a graph what crosses a cut needs no gradient: that is another one."""
        program = self.stages.program(content, training=True)
        if torch.is_grad_enabled():
            return program
        if program not in self._without_graph:
            self._without_graph[program] = twin = copy.copy(program)
            twin.layouts, twin.announced = {}, set()
        return self._without_graph[program]

    def _whole_loss(self, batch_loss: BatchLoss, plan: Schedule, batch: Batch) -> "_Held":
        """The loss of the whole batch, from a forward of all microbatches, and its gradients with respect to what the
        last stage gives for each."""
        ahead = _forwards(plan)
        with torch.no_grad(), buffers_kept(self.staged.model):
            step = _BatchOfStages(self, ahead, batch, _Held())
            for entry in issued(ahead, self.staged.rank):
                step.move(entry) if isinstance(entry, Transfer) else step.run(entry)
            self.stages.transport.flush()
        self.buffers.drop()
        held = step.held
        assert held is not None
        if not self.staged.last:
            return held
        parts = batch.microbatches
        leaves = [leaves_of(held.outputs[at]) for at in range(len(parts))]
        with self.stages.precision.arithmetic(self.device):
            given = [(made, part.content, part.samples > 0) for (made, _), part in zip(leaves, parts, strict=True)]
            _seed(self.device, self.seed, self.steps, len(parts), plan.stages)
            share = self.loss.add_whole(batch_loss(given), batch)
        share.backward()
        held.gradients = [some for _, some in leaves]
        return held


class StageForward:
    """Predictions through the stages: ``forward(content)`` gives on the last rank what ``objective(model, content)``
    would, and None on the others. The part should be in eval mode. All ranks call it together, with the same content.

    A rank goes on to the next call as soon as it has handed one on: call after call fills the pipeline.
    """

    def __init__(self, stages: "LocalStages"):
        self.stages = stages

    def __call__(self, content: Any) -> Any:
        stages, result = self.stages, None
        program = stages.program(content, training=False)
        given = program.bind(content)
        plan = stages.staged.pipeline.schedule
        handed: list[Tensor] = []
        with torch.no_grad():
            for stage in stages.staged.stages:
                before = plan.rank_of(stage - 1) if stage else None
                if before is not None and before != stages.staged.rank:
                    handed = stages.take(*stages.post(program, (FORWARD, stage - 1, 0), before))
                with stages.precision.arithmetic(stages.device), stages.inside():
                    ran = stages.run(program, stage, given, handed)
                handed, result = ran.made, ran.result
                if stage < len(program.stages.ranges) - 1 and plan.rank_of(stage + 1) != stages.staged.rank:
                    stages.send_forward(program, stage, handed, plan.rank_of(stage + 1))
        return result if stages.staged.last else None

    def flush(self) -> None:
        """Wait until all that was handed on has arrived."""
        self.stages.transport.flush()


@dataclass(eq=False)
class LocalStages:
    """This rank's stages, as they run for one objective, and its lines to the other ranks."""

    staged: Staged
    objective: Callable[..., Any]
    precision: Precision
    device: torch.device
    transport: Transport
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around what runs the model: see ``Placed``."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    """By axis, the ranks over which activations may be split."""

    def __post_init__(self) -> None:
        self.programs, self.root = self.staged.programs(self.objective), self.staged.root(self.objective)

    @classmethod
    def of(cls, placed: Placed, objective: Callable[..., Any], precision: Precision) -> "LocalStages":
        assert placed.staged is not None
        line = placed.staged.transport
        return cls(placed.staged, objective, precision, placed.device, line, placed.inside, placed.groups)

    def program(self, content: Any, *, training: bool) -> StageProgram:
        with self.precision.arithmetic(self.device):
            return self.programs.of(content, self.root, self.device, training=training)

    def run(self, program: StageProgram, stage: int, given: dict[int, Tensor], received: list[Tensor]) -> Ran:
        return program.run(stage, self.root, given, received, self.device, self.groups)

    def send_forward(self, program: StageProgram, stage: int, tensors: list[Tensor], target: int) -> None:
        if tensors and stage not in program.announced:
            self.transport.announce(program.layouts[stage], target)
        program.announced.add(stage)
        self.transport.send(packed(tensors), target)

    def post(self, program: StageProgram, message: Message, source: int) -> tuple[Pending, tuple[Layout, ...]]:
        """Post the receive of ``message``. Where its header comes first, that is waited for."""
        layouts = self._layouts(program, message, source)
        return self.transport.receive(packed_size(layouts), source), layouts

    def take(self, pending: Pending, layouts: tuple[Layout, ...]) -> list[Tensor]:
        return unpacked(self.transport.take(pending), layouts)

    def _layouts(self, program: StageProgram, message: Message, source: int) -> tuple[Layout, ...]:
        """What ``message`` holds."""
        kind, stage, _ = message
        if kind == BACKWARD:  # gradients of what the stage before handed on
            return tuple(layout for layout in program.layouts[stage - 1] if layout.needs_grad)
        if stage not in program.layouts:
            program.layouts[stage] = self.transport.receive_layouts(source) if program.crossing(stage) else ()
        return program.layouts[stage]


@dataclass
class _Held:
    """Of a loss of the whole batch, on the rank of the last stage."""

    outputs: dict[int, Any] = field(default_factory=dict)
    """By microbatch."""
    gradients: list[list[Tensor]] | None = None
    """By microbatch: leaves with the gradients of the outputs. None: they are not known yet."""


class _BatchOfStages:
    """One batch under way on this rank."""

    def __init__(self, run: Pipelined, plan: Schedule, batch: Batch, held: _Held | None = None):
        self.pipelined, self.batch, self.held = run, batch, held
        self.stages, self.rank, self.here, self.last = run.stages, run.staged.rank, run.staged.stages, plan.stages - 1
        self.programs = [run.program(part.content) for part in batch.microbatches]
        self.given = [program.bind(p.content) for program, p in zip(self.programs, batch.microbatches, strict=True)]
        self.kept: dict[tuple[int, int], StageActivations] = {}
        self.handed: dict[Message, list[Tensor]] = {}
        """From one stage of this rank to another."""
        self.made: dict[Message, list[Tensor]] = {}
        """To be sent."""
        self.coming: dict[Message, tuple[Pending, tuple[Layout, ...]]] = {}
        """Receives that are posted."""

    def move(self, transfer: Transfer) -> None:
        """Send it, or post its receive."""
        kind, stage, at = message = transfer.message
        if transfer.target == self.rank:
            self.coming[message] = self.stages.post(self.programs[at], message, transfer.source)
        elif kind == FORWARD:
            self.stages.send_forward(self.programs[at], stage, self.made.pop(message), transfer.target)
        else:
            self.stages.transport.send(packed(self.made.pop(message)), transfer.target)

    def run(self, action: Action) -> None:
        match action.kind:
            case "F":
                self._forward(action)
            case "W":
                kept = self.kept.pop((action.stage, action.microbatch))
                with self.pipelined.timed(action):
                    if kept.weight_backward is not None:
                        kept.weight_backward.run()
            case _:
                self._backward(action)

    def _forward(self, action: Action) -> None:
        stage, at = action.stage, action.microbatch
        program, part = self.programs[at], self.batch.microbatches[at]
        received = self._take((FORWARD, stage - 1, at)) if stage else []
        run = self.pipelined
        with run.timed(action):
            fed = [t.detach().requires_grad_(needs) for t, needs in zip(received, self._needs(stage, at), strict=True)]
            _seed(run.device, run.seed, run.steps, at, stage)
            with (
                nullcontext() if part.samples else counting(False),
                run.buffers.forward(at, part.samples if torch.is_grad_enabled() else None),
                run.stages.precision.arithmetic(run.device),
                run.stages.inside(),
            ):
                ran = self.stages.run(program, stage, self.given[at], fed)
            made, result, gradients = ran.made, ran.result, None
            wanting = [*(t for t in made if t.requires_grad), *ran.roots]
            if stage == self.last and self.held is None:
                wanting = [run.loss.add(result, part, self.batch)]
            elif stage == self.last and self.held is not None:
                result = whole_output(result)
                if self.held.gradients is None:
                    self.held.outputs[at] = result
                else:
                    wanting, gradients = backward_from(result, self.held.gradients[at])
            if torch.is_grad_enabled():
                self.kept[stage, at] = StageActivations([t for t in fed if t.requires_grad], wanting, gradients)
        if stage < self.last:
            (self.handed if stage + 1 in self.here else self.made)[FORWARD, stage, at] = made

    def _needs(self, stage: int, at: int) -> list[bool]:
        return [layout.needs_grad for layout in self.programs[at].layouts[stage - 1]] if stage else []

    def _backward(self, action: Action) -> None:
        stage, at = action.stage, action.microbatch
        kept = self.kept[stage, at]
        arrived: list[Any] = (kept.gradients or [None]) if stage == self.last else self._take((BACKWARD, stage + 1, at))
        arrived = [*arrived, *map(torch.zeros_like, kept.made[len(arrived) :])]
        with self.pipelined.timed(action):
            if action.kind == INPUT and self.pipelined.split_backward and not self.programs[at].recomputes:
                kept.weight_backward = input_backward(kept.made, arrived, kept.fed) if kept.made else None
            elif any(t.requires_grad for t in kept.made):
                torch.autograd.backward(kept.made, arrived)
            back = [torch.zeros_like(t) if t.grad is None else t.grad for t in kept.fed]
        if stage:
            (self.handed if stage - 1 in self.here else self.made)[BACKWARD, stage, at] = back
        kept.fed, kept.made = [], []
        if action.kind == BACKWARD:
            del self.kept[stage, at]

    def _take(self, message: Message) -> list[Tensor]:
        return self.handed.pop(message) if message[1] in self.here else self.stages.take(*self.coming.pop(message))


@cache
def _forwards(plan: Schedule) -> Schedule:
    """The forwards of a schedule alone."""
    return replace(plan, orders=tuple(tuple(a for a in order if a.kind == FORWARD) for order in plan.orders))


def _seed(device: torch.device, seed: int, step: int, microbatch: int, stage: int) -> None:
    """A stream of random numbers of its own for each step, microbatch and stage."""
    mixed = np.uint64(seed % 2**64)
    for number in (step, microbatch, stage):
        mixed = mix(np.array([number], np.uint64), mixed)[0]
    generators.seed(int(mixed >> np.uint64(1)), device)
