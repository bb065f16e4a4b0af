"""Pipeline parallelism: the model is cut into stages, each on its own rank, and microbatches flow through them.

A stage is a range of what one recorded step of training does: forward and loss. Its rank keeps the modules that it
runs, under their own names, and is sent the tensors that cross the cut before it. The batch, targets and all, goes to
every rank; the loss is computed on the last. In what order the ranks work: see schedule/actions.py.

    memory    a rank's own parameters, and its activations for as many microbatches as its schedule keeps
    traffic   what crosses a cut, for each microbatch: forward, and its gradient back
    bubble    about (p - 1) / (m + p - 1) of the time, by the schedule
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import nn

from meshfit.anatomy.copies import twin
from meshfit.anatomy.cuts import Stages, stages, work
from meshfit.anatomy.record import Recording, TraceError
from meshfit.anatomy.trace import Event, Trace
from meshfit.axes.axis import Axis, Splits
from meshfit.axes.expert import balance
from meshfit.axes.partition import Partition
from meshfit.axes.pipeline.audit import faithful
from meshfit.axes.pipeline.cut import Split, hollow, part_of, split_of, stages_before
from meshfit.axes.pipeline.program import Programs, Replayed, StageProgram, layout_of
from meshfit.axes.shard.units import Whole, _relative
from meshfit.comm.transport import Transport, packed_size
from meshfit.cost import Cost
from meshfit.errors import PlanError
from meshfit.plan import Plan
from meshfit.schedule.actions import BACKWARD, FORWARD, Action, Schedule, rank_of, schedule, stages_of, usual_chunks
from meshfit.schedule.issue import pairs
from meshfit.schedule.simulate import Simulated, simulate
from meshfit.torch_private import own_buffers

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing

EVEN = 0.05
"""Imbalance of stages beyond which modules are opened further, for a better cut."""

SHARE = 0.05
"""Of all parameters: what a module may hold and still be taken as a whole, where stages are few."""


UNEVEN = 0.25
"""How much longer than the mean a stage may take before that is worth a word."""


class Inner(Protocol):
    """Who of several ranks in a stage runs what of a trace."""

    @property
    def trace(self) -> Trace: ...

    @property
    def stages(self) -> Stages: ...

    def work(self, event: Event) -> float:
        """What an event adds to the time of its stage."""
        ...

    def part_in_stages(self, rank: int) -> tuple[Trace, Stages]:
        """What ``rank`` runs, and its part of the stages."""
        ...


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Cut the model over the ``pipeline`` axis."""

    degree: int

    word: str = "1f1b"
    """The schedule: see schedule/actions.py."""

    chunks: int = 0
    """Stages a rank holds; 0: as many as the schedule usually has."""

    microbatches: int = 1
    cut: tuple[str, ...] = ()
    """Paths of the modules with which the stages after the first begin; none: where the costs are even."""

    atoms: tuple[str, ...] = ()
    """Paths of modules that must not be cut, since something acts where they are called."""

    @property
    def stages(self) -> int:
        return self.degree * (self.chunks or usual_chunks(self.word))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds."""
        return stages_of(self.word, self.degree, self.stages // self.degree, rank)

    @cached_property
    def schedule(self) -> Schedule:
        """Refuses what the schedule cannot take."""
        return schedule(self.word, self.degree, self.microbatches, self.chunks or None)

    def find(
        self,
        model: nn.Module,
        objective: Callable[[nn.Module, Any], Any],
        batch: Any,
        *,
        device: str = "cuda",
        deal: Callable[[Recording], Inner] | None = None,
    ) -> "FoundStages":
        """Where to cut ``model``, from one step recorded on ``batch``: on one rank, for all of them. ``deal`` says who
        of several ranks in a stage runs what, and in what order the step is then cut."""
        refused: PlanError | None = None
        found: list[tuple[float, FoundStages]] = []
        for share in (min(SHARE, 1 / (4 * self.stages)), 0.0):  # finer only if need be: see record_atoms
            atoms, recording = self._record(model, objective, batch, share, device)
            trace, inner, cost = _relative(recording.trace), None, work
            try:
                if deal is not None:
                    inner = deal(replace(recording, trace=trace))
                    trace, cost = inner.trace, inner.work
                cut = self.cut_of(trace, cost)
                split = split_of(trace, cut, branches=_branches(trace))
            except PlanError as error:
                refused = error
                continue
            found.append((cut.imbalance, FoundStages(split, share, atoms, trace, _notes(trace, cut), cut, inner)))
            if cut.imbalance <= EVEN or self.cut:
                break
        if not found:
            assert refused is not None
            raise refused
        return min(found, key=lambda each: each[0])[1]

    def _record(
        self, model: nn.Module, objective: Any, batch: Any, share: float, device: str
    ) -> tuple[tuple[str, ...], Recording]:
        return faithful(model, objective, batch, device=device, share=share, atoms=self.atoms, refusal=self._refusal)

    def _refusal(self, what: str, error: TraceError) -> PlanError:
        return PlanError(
            f"pipeline={self.degree}: {what}",
            error.headline,
            *error.facts,
            f"data={self.degree} and shard={self.degree} take the model as it is",
        )

    def cut_of(self, trace: Trace, cost: Callable[[Event], float] = work) -> Stages:
        """``trace`` in stages of even ``cost``, or at the modules named."""
        if not self.cut:
            return stages(trace, self.stages, cost)
        if len(self.cut) != self.stages - 1:
            raise PlanError(
                f"cut={','.join(self.cut)} makes {len(self.cut) + 1} stages, but {self.stages} are needed",
                f"pipeline={self.degree} with {self.stages // self.degree} on each rank",
                f"name {self.stages - 1} modules, or leave cut= out",
            )
        return stages_before(trace, self.cut)

    def apply(
        self,
        model: nn.Module,
        found: "FoundStages",
        rank: int,
        group: dist.ProcessGroup | None = None,
        *,
        drop: bool = True,
    ) -> "Staged":
        """Keep this rank's part of ``model``. With ``drop`` the rest of it is let go at once: those parameters have no
        elements any more."""
        split, own = found.split, self.stages_of(rank)
        if split.stages != self.stages:
            raise PlanError(f"the split has {split.stages} stages, the plan {self.stages}")
        skeleton = twin(model, meta=True)
        for name in split.looked_at:  # what the model decides by must have its value there, too
            path, _, attribute = name.rpartition(".")
            own_buffers(skeleton.get_submodule(path))[attribute] = model.get_buffer(name)
        parameters = {name for stage in own for name in split.parameters[stage]}
        buffers = {name for stage in own for name in split.buffers[stage]}
        part = part_of(model, parameters, buffers)
        if drop:
            hollow(model, part)
        staged = Staged(self, found, rank, part, skeleton, model)
        staged.group = group
        return staged

    def cost(
        self,
        trace: Trace,
        rank: int,
        found: Stages | None = None,
        sent: Callable[[int, int], int] | None = None,
    ) -> tuple[Trace, Cost, float]:
        """What ``rank`` runs of ``trace`` (of one microbatch); what it sends; and the activations that it keeps at
        their most, over those of one microbatch. ``sent``: bytes from one stage to another, where that is not what the
        trace says."""
        found = found or self.cut_of(trace)
        own = self.stages_of(rank)
        mine = part_of_trace(trace, found, own)

        def crossing(stage: int, to: int) -> int:
            layouts = [layout_of(trace, value) for value in found.cuts[min(stage, to)].crossing]
            return packed_size(layout for layout in layouts if to > stage or layout.needs_grad)

        steps = [(stage, to) for stage in own for to in (stage + 1, stage - 1) if 0 <= to < self.stages]
        sizes = [(sent or crossing)(*step) for step in steps if self.schedule.rank_of(step[1]) != rank]
        away, times = [size for size in sizes if size], self.microbatches
        added = Cost(
            calls={"send": len(away) * times} if away else {}, moved={"send": sum(away) * times} if away else {}
        )
        return mine, added, self.kept(trace, found)[rank] / max(mine.cost.kept, 1)

    def tied(self, trace: Trace, found: Stages | None = None) -> set[str]:
        """Parameters that several ranks hold."""
        found, users = found or self.cut_of(trace), {}
        for stage, names in enumerate(found.parameters):
            for name in names:
                users.setdefault(name, set()).add(self.schedule.rank_of(stage))
        return {name for name, ranks in users.items() if len(ranks) > 1}

    def kept(self, trace: Trace, found: Stages) -> tuple[int, ...]:
        """Activation bytes at their most, by rank."""
        size = [sum(trace.events[i].cost.kept for i in events) for events in found.ranges]
        most = []
        for order in self.schedule.orders:
            alive = peak = 0
            for action in order:
                alive += size[action.stage] if action.kind == FORWARD else 0
                peak = max(peak, alive)
                alive -= size[action.stage] if action.kind in (BACKWARD, "W") else 0
            most.append(peak)
        return tuple(most)

    def forecast(
        self, trace: Trace, found: Stages | None = None, *, seconds: float = 1.0, transfer: float = 0.0
    ) -> Simulated:
        """A step, if the whole model takes ``seconds`` for a microbatch, forward and backward, and a byte ``transfer``
        seconds to the next rank."""
        found = found or self.cut_of(trace)
        total = sum(found.costs) or 1.0
        forward = [_forward_share(trace, events) for events in found.ranges]

        def takes(action: Action) -> float:
            whole, ahead = seconds * found.costs[action.stage] / total, forward[action.stage]
            part = {"F": ahead, "B": 1 - ahead}.get(action.kind, (1 - ahead) / 2)
            return whole * part

        return simulate(self.schedule, takes, lambda stage: found.cuts[stage].bytes * transfer)


def _forward_share(trace: Trace, events: range) -> float:
    flops = sum(trace.events[i].cost.flops for i in events)
    both = flops + sum(trace.events[i].cost.flops_backward for i in events)
    return flops / both if both else 1 / 3


def _notes(trace: Trace, found: Stages) -> tuple[str, ...]:
    """Of stages so uneven that most ranks wait for one."""
    if found.imbalance < UNEVEN:
        return ()
    longest = max(range(len(found.costs)), key=found.costs.__getitem__)
    events = [trace.events[i] for i in found.ranges[longest]]
    largest = max(events, key=work)
    return (
        f"pipeline: stage {longest} takes {1 + found.imbalance:.1f} times as long as the mean of all stages,"
        f" because {largest.name} cannot be cut"
        if found.indivisible
        else f"pipeline: stage {longest} takes {1 + found.imbalance:.1f} times as long as the mean of all stages",
    )


def _branches(trace: Trace) -> bool:
    """Whether the forward looks at its inputs to decide what to run."""
    return any(event.name.startswith("guard ") for event in trace.events)


@dataclass(frozen=True)
class FoundStages:
    """Where a model is cut; ``split`` and ``share`` are what other ranks need of it."""

    split: Split
    share: float
    """How finely it was recorded."""
    atoms: tuple[str, ...] = ()
    """Modules that had to be taken as a whole."""
    trace: Trace | None = None
    notes: tuple[str, ...] = ()
    """What the user should know of it."""
    cut: Stages | None = None
    inner: Inner | None = None
    """Who runs what within the stages, where several ranks share one."""

    def to_send(self) -> "FoundStages":
        return replace(self, trace=None, cut=None, inner=None)


class PipelineAxis(Axis):
    word = "pipeline"
    splits = frozenset({Splits.MODULES})

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        schedule(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks or None)  # refuses what it cannot take

    def find(self, study: "Study") -> FoundStages:
        strategy = replace(pipeline_of(study.plan), atoms=study.closed())
        with balance.recorded(study.model):
            found = strategy.find(study.model, study.objective, study.batch, device=study.device, deal=study.deal)
        study.prove(Replayed(study.objective, share=found.share, atoms=found.atoms))
        study.notes += found.notes
        return found

    def apply(self, placed: "Placed", finding: FoundStages) -> "Staged":
        group = placed.mesh.over("pipeline")
        assert group is not None
        strategy = replace(pipeline_of(placed.plan), atoms=finding.atoms)
        staged = strategy.apply(placed.model, finding, placed.mesh.stage, group)
        staged.transport = Transport(group, placed.device, pairs(strategy.schedule))
        return staged

    def cost(self, costing: "Costing", finding: FoundStages | None) -> None:
        strategy, whole, stage = pipeline_of(costing.plan), costing.trace, costing.place.get("pipeline", 0)
        stages, plan, inner = costing.stages, costing.plan, costing.found.get("branch")
        if stages is None and (plan.tensor > 1 or plan.context > 1):
            raise ValueError(f"{plan}: its cost depends on what is split inside stages: stage_traffic says so")
        within, cut = (
            (whole, strategy.cut_of(whole)) if inner is None else inner.part_in_stages(costing.place.get("branch", 0))
        )
        sent = None if stages is None else stages.sent
        trace, added, costing.alive = strategy.cost(within, stage, cut, sent=sent)
        costing.add((trace, added))
        if stages is not None:
            wide = 8 if any(p.dtype == "float64" for p in whole.parameters.values()) else 4
            costing.total += stages.cost(strategy.stages_of(stage), microbatches=plan.microbatches, wide=wide)
        costing.tied.update(strategy.tied(whole, cut if inner is None else inner.stages))
        before = (strategy.cost(within, other, cut)[0] for other in range(stage))
        costing.earlier |= {name for trace in before for name in trace.parameters}


def pipeline_of(plan: Plan) -> Pipeline:
    return Pipeline(
        degree=plan.pipeline,
        word=plan.schedule,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        cut=tuple(filter(None, plan.cut.split(","))),
    )


class Staged(Partition):
    """The stages of one rank."""

    transport: Transport
    """To the ranks of other stages."""

    def __init__(
        self, pipeline: Pipeline, found: FoundStages, rank: int, part: nn.Module, skeleton: nn.Module, whole: nn.Module
    ):
        super().__init__(part, skeleton, whole)
        self.pipeline, self.found, self.rank = pipeline, found, rank
        self.make: Callable[[Recording], StageProgram] = partial(StageProgram.like, found.split)
        """A program of a recording."""
        self.stages = pipeline.stages_of(rank)
        self.recording: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around whatever records the model."""

    @property
    def last(self) -> bool:
        """Whether the loss is computed here."""
        return self.pipeline.stages - 1 in self.stages

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several ranks hold, by name, with those ranks: the first is the owner. In the same order
        on every rank. Where one rank holds them in two stages they are one tensor there."""
        trained = {name for names in self.found.split.parameters for name in names}
        return {name: ranks for name, ranks in self.holders.items() if len(ranks) > 1 and name in trained}

    @property
    def owners(self) -> dict[str, int]:
        """The rank whose word counts, for every parameter and buffer of the model: the first that holds it; for a
        buffer that a stage writes there is but one."""
        return {name: ranks[0] for name, ranks in self.holders.items()}

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The ranks that hold each parameter and buffer of the model, in the same order on every rank."""
        found: dict[str, list[int]] = {}
        split = self.found.split
        for stage, names in enumerate(zip(split.parameters, split.buffers, strict=True)):
            rank = rank_of(self.pipeline.word, self.pipeline.degree, stage)
            for name in (*names[0], *names[1]):
                if rank not in found.setdefault(name, []):
                    found[name].append(rank)
        return {name: tuple(ranks) for name, ranks in found.items()}

    def programs(self, objective: Callable[[nn.Module, Any], Any]) -> Programs[StageProgram]:
        """What the stages run for ``objective(model, content)``: a training loss, or a prediction."""
        found = self.found
        how = {"share": found.share, "atoms": found.atoms, "recording": self.recording}
        return Programs(self.skeleton, objective, self.make, **how)

    def root(self, objective: Callable[[nn.Module, Any], Any]) -> nn.Module:
        return Whole(self.model, objective)

    def close(self) -> None:
        self.transport.close()


def part_of_trace(trace: Trace, found: Stages, own: Iterable[int]) -> Trace:
    """What the stages ``own`` run of ``trace``, as a trace of its own."""
    return only(trace, {i for stage in own for i in (*found.recomputed[stage], *found.ranges[stage])})


def only(trace: Trace, some: Iterable[int]) -> Trace:
    """What some events of ``trace`` do, as a trace of its own."""
    kept = sorted(some)
    place = {old: new for new, old in enumerate(kept)}
    events = tuple(replace(trace.events[i], index=place[i]) for i in kept)
    used = {id for event in events for id in (*event.reads, *event.writes, *event.mutates)}
    values = {
        id: replace(
            value,
            made_by=place.get(value.made_by, -1 if value.made_by >= 0 else value.made_by),
            used_by=tuple(place[i] for i in value.used_by if i in place),
        )
        for id, value in trace.values.items()
        if id in used
    }
    named = {name for event in events for name in event.parameters}
    buffers = {name for event in events for name in event.buffers}
    made = {id for event in events for id in event.writes}
    return replace(
        trace,
        events=events,
        values=values,
        inputs=tuple(id for id, value in values.items() if id not in made),
        outputs=tuple(id for id in trace.outputs if id in made),
        parameters={name: p for name, p in trace.parameters.items() if name in named},
        buffers={name: b for name, b in trace.buffers.items() if name in buffers},
        ties={name: first for name, first in trace.ties.items() if first in named},
        blocks=(),
    )
