"""What each stage runs for a microbatch: a recording of its very shape, cut like the split.

A recording holds for inputs of one shape, in one mode, and where Python looked at values of the inputs for those
values. So each new kind of microbatch is recorded again, on a model without weights: a tenth of a second, once.
All ranks record alike, since they are given the same microbatches; nothing about shapes has to be sent.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from meshfit.anatomy.cuts import Stages, storage_of
from meshfit.anatomy.record import Recording, record
from meshfit.anatomy.record_program import decode
from meshfit.anatomy.replay import Environment, bind, fact, replay_steps, run
from meshfit.anatomy.trace import Trace
from meshfit.axes.pipeline.cut import Split, decided, stages_like
from meshfit.axes.shard.units import Whole, _relative
from meshfit.axes.spec import from_local, locals_of
from meshfit.comm.group import Group
from meshfit.comm.transport import Layout
from meshfit.data import tree
from meshfit.errors import JobError
from meshfit.step import parted
from meshfit.torch_private.modules import batches_of_one

REMEMBERED = 64
"""Kinds of microbatches."""


def layout_of(trace: Trace, id: int) -> Layout:
    """Of a recorded value, as it is without autocast."""
    value = trace.values[id]
    return Layout(value.shape, getattr(torch, value.dtype), value.needs_grad)


@dataclass(slots=True)
class Ran:
    """What a stage made of a microbatch."""

    made: list[Tensor]
    """To hand on."""
    result: Any = None
    """Of the last stage: what the objective returns."""
    roots: list[Tensor] = field(default_factory=list)
    """Where else backward must begin, with a gradient of zero."""


@dataclass(eq=False)
class Recorded:
    """A recording, and whether it holds for a microbatch."""

    recording: Recording

    def bind(self, content: Any) -> dict[int, Tensor]:
        """The tensors of a microbatch by the ids they have here."""
        return bind(self.recording, (content,))

    @property
    def gives_pair(self) -> bool:
        """Whether the objective returns (sum, count)."""
        return isinstance(parted(self.recording.outputs)[0], tuple | list)

    @cached_property
    def changes_parameters(self) -> bool:
        """Whether a forward writes into a parameter."""
        trace = self.recording.trace
        return any(name in trace.parameters for event in trace.events for name in event.changes)

    @cached_property
    def recomputes(self) -> bool:
        """Whether the model computes some of its activations again in backward."""
        return any(step.checkpoint is not None for step in self.recording.steps)

    @cached_property
    def _looks(self) -> tuple[int, ...]:
        """Steps that look at values of the inputs, and those that compute what they look at."""
        return decided(self.recording.trace)

    def fits(self, content: Any, root: nn.Module, device: torch.device) -> bool:
        """Whether the forward would go this way for ``content``: every rank can tell, from the inputs alone."""
        if not self._looks:
            return True
        env = Environment(root, {id: t.clone() for id, t in self.bind(content).items()}, device)
        with torch.no_grad():
            for i in self._looks:
                step = self.recording.steps[i]
                if step.kind == "guard":
                    args, kwargs = decode(step.args, env.resolve), decode(step.kwargs, env.resolve)
                    if step.target(*args, **kwargs) != step.expected:
                        return False
                else:
                    kept = dict(env.values)
                    run([step], env)
                    env.values = {**kept, **env.values}  # a look later on may need what the step let go
        return True


@dataclass(eq=False)
class StageProgram(Recorded):
    """A recording, cut into stages."""

    stages: Stages
    layouts: dict[int, tuple[Layout, ...]] = field(default_factory=dict)
    """What crosses after each stage, once that is known: what autocast makes of it shows only when it runs."""
    announced: set[int] = field(default_factory=set)
    """Stages whose layouts the next rank has been sent."""

    @classmethod
    def like(cls, split: Split, recording: Recording) -> "StageProgram":
        """``recording`` cut as ``split`` is."""
        return cls(recording, stages_like(split, recording.trace))

    def crossing(self, stage: int) -> tuple[int, ...]:
        """Values that this rank hands on after ``stage``."""
        return self.stages.cuts[stage].crossing

    def fed(self, stage: int, given: dict[int, Tensor], received: list[Tensor]) -> dict[int, Tensor]:
        """What ``stage`` begins with, by the ids of the recording: copies of what it changes in place."""
        fed = {id: given[id] for id in self.stages.inputs[stage]}
        if stage:
            fed |= dict(zip(self.crossing(stage - 1), received, strict=True))
        return {id: t.clone() if id in self._changed[stage] else t for id, t in fed.items()}

    def run(
        self,
        stage: int,
        root: nn.Module,
        given: dict[int, Tensor],
        received: list[Tensor],
        device: torch.device,
        groups: Mapping[str, Group] | None = None,
    ) -> Ran:
        """What ``stage`` hands on, as plain tensors; of the last, also what the objective returns. Of tensors that are
        split over ranks of ``groups`` it is given this rank's part, and hands on this rank's part."""
        split = [layout.specs for layout in self.layouts[stage - 1]] if stage else []
        fed = [from_local(local, specs, groups or {}) for local, specs in zip(received, split, strict=True)]
        ran = self._run(stage, root, given, fed, device)
        made, layouts = locals_of(ran.made)
        said = self.layouts.setdefault(stage, layouts)
        if said != layouts:
            i = next(i for i, (a, b) in enumerate(zip(said, layouts, strict=True)) if a != b)
            raise JobError(
                f"what crosses from stage {stage} to the next has another size than before: {layouts[i].shape}",
                f"it was {said[i].shape}, for a microbatch of the same shape: it depends on the values",
                "name other modules to cut at (cut=), so that it does not cross",
            )
        return replace(ran, made=made)

    def _run(
        self, stage: int, root: nn.Module, given: dict[int, Tensor], received: list[Tensor], device: torch.device
    ) -> Ran:
        stages, env = self.stages, Environment(root, self.fed(stage, given, received), device)
        run([self.recording.steps[i] for i in stages.recomputed[stage]], env)
        events = stages.ranges[stage]
        replay_steps(self.recording.steps[events.start : events.stop], env)
        if stage < len(stages.ranges) - 1:
            return Ran([env.values[id] for id in self.crossing(stage)])
        return Ran([], decode(self.recording.outputs, env.resolve))

    @cached_property
    def _changed(self) -> list[set[int]]:
        """Values that each stage is fed and whose memory it changes in place."""
        trace, found = self.recording.trace, []
        for stage, events in enumerate(self.stages.ranges):
            memory = {storage_of(trace, value) for i in events for value in trace.events[i].mutates}
            fed = (*self.stages.inputs[stage], *(self.crossing(stage - 1) if stage else ()))
            found.append({value for value in fed if storage_of(trace, value) in memory})
        return found


P = TypeVar("P", bound=Recorded)


class Programs(Generic[P]):
    """Programs of one objective, by the kind of microbatch. ``cut`` makes one of a recording."""

    def __init__(
        self,
        skeleton: nn.Module,
        objective: Callable[[nn.Module, Any], Any],
        cut: Callable[[Recording], P],
        *,
        share: float,
        atoms: Iterable[str] = (),
        recording: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """``recording`` goes around every recording."""
        self.recording = recording
        self.whole = Whole(skeleton, objective)
        self.cut, self.share = cut, share
        self.atoms = tuple(f"model.{path}" if path else "model" for path in atoms)
        self._found: OrderedDict[Any, list[P]] = OrderedDict()

    def of(self, content: Any, root: nn.Module, device: torch.device, *, training: bool) -> P:
        """The program for ``content``; recorded now, if there is none. ``root`` holds this rank's part."""
        facts = tuple(map(fact, tree.leaves(content)))
        key = (training, tuple(module.training for module in self.whole.modules()), str(facts))
        known = self._found.setdefault(key, [])
        self._found.move_to_end(key)
        for program in known:
            if program.fits(content, root, device):
                return program
        program = self.record(content, training=training)
        known.append(program)
        while len(self._found) > REMEMBERED:
            self._found.popitem(last=False)
        return program

    def record(self, content: Any, *, training: bool) -> P:
        with (
            self.recording(),
            batches_of_one(),
        ):  # a global BatchNorm has more samples; any other will say so when it runs
            recording = record(self.whole, (content,), training=training, share=self.share, atoms=self.atoms)
        return self.cut(replace(recording, trace=_relative(recording.trace)))


class Replayed:
    """``objective(model, content)`` by its recording, as stages run it. What the recorded functions do to tensors that
    are split is proven on this: they need not be those that the model's own forward calls."""

    def __init__(self, objective: Callable[[nn.Module, Any], Any], *, share: float, atoms: Iterable[str]):
        self.objective, self.share, self.atoms = objective, share, tuple(atoms)
        self._programs: dict[torch.dtype | None, Programs[Recorded]] = {}

    def __call__(self, model: nn.Module, content: Any) -> Any:
        """The first ``model`` of each dtype is the one that is recorded."""
        whole, first = Whole(model, self.objective), next(model.parameters(), None)
        dtype, device = (None, torch.device("cpu")) if first is None else (first.dtype, first.device)
        if dtype not in self._programs:
            self._programs[dtype] = Programs(model, self.objective, Recorded, share=self.share, atoms=self.atoms)
        find = partial(self._programs[dtype].of, content, whole, device, training=model.training)
        with ThreadPoolExecutor(1) as outside:  # of the modes of torch that the caller is in
            recording = outside.submit(find).result().recording
        env = Environment(whole, bind(recording, (content,)), device)
        replay_steps(recording.steps, env)
        return decode(recording.outputs, env.resolve)
