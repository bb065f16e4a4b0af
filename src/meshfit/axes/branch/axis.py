"""Branch parallelism: parts of the model that do not need each other, each on its own rank, at once.

Two towers, the arms of an Inception block, heads, the members of an ensemble. They are found in one recorded step of
training, loss included, and dealt out so that the ranks finish together. What is in no branch, the trunk, is computed
by all ranks alike, on the same samples; so whatever they compute from what they have all been handed, they agree.

    memory    the trunk's parameters and the rank's own branches', with their activations
    traffic   what branches hand to the trunk, to all ranks; gradients of what they take from it, summed over them;
              for each microbatch. Gradients of parameters that branches of several ranks use, once a step
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from meshfit.anatomy.branches import branches
from meshfit.anatomy.copies import twin
from meshfit.anatomy.cuts import StageCut, Stages
from meshfit.anatomy.record import Recording, TraceError
from meshfit.anatomy.trace import Event, Trace, only
from meshfit.axes import bf16_compute
from meshfit.axes.axis import Axis, Splits
from meshfit.axes.branch.assign import Dealt, deal
from meshfit.axes.branch.flow import ALL, Flow, StagePhases, detached
from meshfit.axes.branch.ops import Line
from meshfit.axes.branch.order import reordered, side_by_side
from meshfit.axes.branch.program import BranchProgram
from meshfit.axes.partition import Partition
from meshfit.axes.pipeline.audit import faithful
from meshfit.axes.pipeline.cut import Split, hollow, part_of
from meshfit.axes.pipeline.program import Programs, Replayed, layout_of
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.axes.precision import Precision
from meshfit.axes.shard.units import Whole, _relative
from meshfit.comm.draws import Stream
from meshfit.comm.transport import Layout, packed_size
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.errors import PlanError
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing

SHARES = (0.05, 0.0)
"""Of all parameters, what a module may hold and still be taken as a whole: finer only if that helps."""

WORTH = 0.95
"""Most time of a step, over that on one device, that makes branches worth a device."""

Objective = Callable[[nn.Module, Any], Any]


def find_branches(
    model: nn.Module,
    objective: Objective,
    batch: Any,
    degree: int,
    *,
    atoms: tuple[str, ...] = (),
    precision: str = "fp32",
    device: str = "cuda",
) -> "BranchPlan":
    """Who runs what of ``degree`` ranks, from one step recorded on ``batch``: on one rank, for all of them. ``atoms``:
    modules that must not be opened, since something acts where they are called."""
    found, trace = [], None
    for share in SHARES:
        how = {"share": share, "atoms": atoms, "refusal": partial(_refusal, degree), "precision": precision}
        opened, recording = faithful(model, objective, batch, device=device, **how)
        trace = _relative(recording.trace)
        _check(trace, degree)
        flow = Flow(replace(recording, trace=trace))
        if (dealt := deal(flow, degree)) is not None:
            found.append(BranchPlan(dealt, share, opened, flow))
            if dealt.time < 1.1 / degree:
                break
    assert trace is not None
    return _worth(min(found, key=lambda each: each.dealt.time, default=None), trace, degree)


def deal_stages(recording: Recording, degree: int) -> "BranchPlan":
    """Who runs what of a recording that is to be cut into stages: its events stand with branches side by side."""
    trace = recording.trace
    _check(trace, degree)
    flow = Flow(recording)
    dealt = deal(flow, degree)
    found = _worth(None if dealt is None else BranchPlan(dealt, 0.0, (), flow), trace, degree)
    order = side_by_side(flow, found.dealt.when)
    return replace(found, flow=Flow(reordered(recording, order)), order=tuple(order))


def _check(trace: Trace, degree: int) -> None:
    asks = [e for e in trace.events if e.kind == "glue" and e.name in ("grad", "backward") and e.reads]
    if asks:
        error = TraceError(f"{asks[0].name} at {asks[0].line} asks for gradients in the middle of the forward")
        raise _refusal(degree, "no rank has all that it looks back on", error)


def _refusal(degree: int, what: str, error: TraceError) -> PlanError:
    return PlanError(
        f"branch={degree}: {what}", error.headline, *error.facts, f"data={degree} takes the model as it is"
    )


def _worth(best: "BranchPlan | None", trace: Trace, degree: int) -> "BranchPlan":
    """``best``; a ``PlanError`` where the model has no branches that are worth a device each."""
    if best is not None and best.dealt.time <= WORTH and all(best.dealt.loads):
        return best
    groups = [[b for b in branches(trace) if b.group == number] for number in range(3)]
    facts = [
        f"found: {len(group)} parts of {' and '.join(f'{b.share:.0%}' for b in group[:4])} of the cost, "
        f"before {trace.events[group[0].join].name if group[0].join < len(trace.events) else 'its end'}"
        for group in groups
        if group
    ]
    if best is not None and all(best.dealt.loads):
        facts.append(f"side by side, traffic included, a step would take {best.dealt.time:.0%} of the time")
    elif best is not None:
        most = sum(load > 0 for load in best.dealt.loads)
        facts.append(f"at most {most} of them can run at once: branch={most} would use all of its devices")
    raise PlanError(
        f"branch={degree}: this model has no parts that are worth {degree} devices",
        *(facts or ["each of its larger parts needs what another one makes"]),
        f"data={degree} shares the samples out; pipeline={degree} cuts it into layers",
    )


def branch_cost(
    found: "BranchPlan", rank: int, *, microbatches: int = 1, stages: Iterable[int] = (0,)
) -> tuple[Trace, Cost]:
    """What ``rank`` runs of the trace (of one microbatch), and what it says to others in forward and backward; of
    a pipeline, in ``stages``."""
    trace, calls, how = found.trace, [], {"degree": len(found.dealt.loads), "count": microbatches, "axis": "branch"}
    for phases in (found.phases.phases[stage] for stage in stages):
        own = {event for phase in phases for some in phase.own for event in some}
        for phase in phases:
            for ids in phase.joins:
                if size := packed_size(layout_of(trace, id) for id in ids):
                    calls.append(CollectiveCall("broadcast", size, phase="forward", **how))
            back = [id for id in phase.enters if trace.values[id].needs_grad and not detached(trace, id, own)]
            entered = [layout_of(trace, id) for id in back]
            for dtype in {layout.dtype for layout in entered}:
                size = sum((_count(layout) + 1) * dtype.itemsize for layout in entered if layout.dtype == dtype)
                named = str(dtype).removeprefix("torch.")
                calls.append(CollectiveCall("all_reduce", size, phase="backward", dtype=named, **how))
    return found.part(rank), Cost(collectives=tallied(calls))


def _count(layout: Layout) -> int:
    return torch.Size(layout.shape).numel()


@dataclass(frozen=True)
class BranchPlan:
    """Who runs what; ``dealt``, ``share`` and ``atoms`` are what other ranks need of it."""

    dealt: Dealt
    share: float
    """How finely it was recorded."""
    atoms: tuple[str, ...] = ()
    """Modules that had to be taken as a whole."""
    flow: Flow | None = None
    order: tuple[int, ...] | None = None
    """Of the recorded events, those of ``flow`` in turn; None: as recorded."""
    cut: Stages | None = None
    """The stages of a pipeline."""

    def to_send(self) -> "BranchPlan":
        return replace(self, flow=None, order=None, cut=None)

    @property
    def trace(self) -> Trace:
        assert self.flow is not None
        return self.flow.trace

    def _in_order(self, recorded: Iterable[Any]) -> list[Any]:
        found = list(recorded)
        return found if self.order is None else [found[event] for event in self.order]

    @cached_property
    def owner(self) -> list[int]:
        return self._in_order(self.dealt.owners.values())

    @property
    def stages(self) -> Stages:
        assert self.flow is not None
        return self.cut or self.flow.whole

    @cached_property
    def phases(self) -> StagePhases:
        assert self.flow is not None
        return self.flow.phases(self.owner, len(self.dealt.loads), self.stages, late=self.dealt.late)

    def work(self, event: Event) -> float:
        """What an event adds to the time of its stage, with branches side by side."""
        return self._times[event.index]

    @cached_property
    def _times(self) -> list[float]:
        reached = [0.0, *accumulate(self._in_order(self.dealt.when.values()), max)]
        return [b - a for a, b in pairwise(reached)]

    def part(self, rank: int) -> Trace:
        """What ``rank`` runs."""
        trace = self.trace
        mine = only(trace, (e for phases in self.phases.phases for p in phases for e in (*p.trunk, *p.own[rank])))
        idle = {name for name in trace.parameters if not any(name in e.parameters for e in trace.events)}
        held = {n: p for n, p in trace.parameters.items() if n in mine.parameters or n in idle}
        return replace(mine, parameters=held)

    def part_in_stages(self, rank: int) -> tuple[Trace, Stages]:
        """What ``rank`` runs, and its part of the stages."""
        stages, held, trace = self.stages, self.phases.held, self.trace
        again = {event for events in stages.recomputed for event in events}
        kept = sorted(again | {event for event, who in enumerate(self.owner) if who in (ALL, rank)})
        place, before = {old: new for new, old in enumerate(kept)}, lambda event: bisect_left(kept, event)
        cuts = []
        for cut, alone in zip(stages.cuts, held[1:], strict=True):
            crossing = tuple(id for id in cut.crossing if alone.get(id, rank) == rank)
            cuts.append(StageCut(before(cut.after + 1) - 1, crossing, sum(trace.values[id].bytes for id in crossing)))
        own = self.dealt.parameters
        mine = replace(
            stages,
            ranges=tuple(range(before(events.start), before(events.stop)) for events in stages.ranges),
            recomputed=tuple(tuple(place[event] for event in events) for events in stages.recomputed),
            cuts=tuple(cuts),
            parameters=tuple(tuple(n for n in names if rank in own.get(n, (rank,))) for names in stages.parameters),
        )
        return replace(only(trace, kept), values=trace.values | only(trace, kept).values), mine

    @property
    def note(self) -> str:
        loads = " and ".join(f"{load:.0%}" for load in self.dealt.loads)
        return (
            f"branch: ranks run {loads} of the model's cost on their own and {self.dealt.trunk:.0%} alike; "
            f"a step should take {self.dealt.time:.0%} of one device's"
        )


class BranchAxis(Axis):
    word = "branch"
    splits = frozenset({Splits.MODULES})
    cost_needs_finding = True

    def find(self, study: "Study") -> BranchPlan:
        if study.plan.pipeline > 1:
            staged = study.found("pipeline")
            found = replace(staged.inner, cut=staged.cut)
        else:
            how = {"atoms": study.closed(), "precision": study.plan.precision, "device": study.device}
            found = find_branches(study.model, study.objective, study.batch, study.plan.branch, **how)
            study.prove(Replayed(study.objective, share=found.share, atoms=found.atoms))
        study.notes.append(found.note)
        return found

    def deal(self, plan: Plan, recording: Recording) -> BranchPlan:
        return deal_stages(recording, plan.branch)

    def apply(self, placed: "Placed", finding: BranchPlan) -> "Branched":
        """Keep this rank's part of the model, and let go of the rest: those parameters have no elements any more."""
        group, staged = placed.mesh.over("branch"), placed.staged
        assert group is not None
        rank, dealt, model = dist.get_rank(group), finding.dealt, placed.model
        skeleton = twin(model, meta=True) if staged is None else staged.skeleton
        parameters = [name for name, _ in model.named_parameters() if rank in dealt.parameters.get(name, (rank,))]
        buffers = [name for name, _ in model.named_buffers() if dealt.buffers.get(name, rank) == rank]
        part = part_of(model, parameters, buffers)
        hollow(model, part)
        branched = Branched(finding, Line(group, placed.device, placed.groups), part, skeleton, model)
        if staged is not None:
            staged.model, staged.make = branched.model, partial(branched.program, split=staged.found.split)
        return branched

    def cost(self, costing: "Costing", finding: BranchPlan) -> None:
        plan, rank, dealt = costing.plan, costing.place.get("branch", 0), finding.dealt.parameters
        split = costing.found.get("tensor")
        if plan.context > 1 or (split is not None and (plan.pipeline > 1 or split.traffic)):
            raise ValueError(f"{plan}: how tensors that cross between branches are split is known only when it runs")
        mine = pipeline_of(plan).stages_of(costing.place.get("pipeline", 0))
        part, added = branch_cost(finding, rank, microbatches=plan.microbatches, stages=mine)
        if plan.pipeline > 1:  # what several branches use is held by all of them, in every stage that uses it
            held = {name for stage in mine for name in finding.part_in_stages(rank)[1].parameters[stage]}
            whole = finding.trace.parameters
            part = replace(costing.trace, parameters={name: p for name, p in whole.items() if name in held})
        costing.add((part, added))
        costing.tied.update(name for name, ranks in dealt.items() if len(ranks) > 1)
        costing.earlier |= {name for name, ranks in dealt.items() if min(ranks) < rank}


class Branched(Partition):
    """The branches of one rank."""

    def __init__(self, found: BranchPlan, line: Line, part: nn.Module, skeleton: nn.Module, whole: nn.Module):
        super().__init__(part, skeleton, whole)
        self.found, self.line = found, line
        self.group, self.rank, self.stream = line.ranks.group, line.ranks.rank, Stream(line.ranks)

    def program(self, recording: Recording, split: Split | None = None) -> BranchProgram:
        """What this rank runs of a recording; ``split``: of a pipeline."""
        return BranchProgram.dealt(self.found.dealt, split, self.line, self.stream, recording)

    @property
    def owners(self) -> dict[str, int]:
        """The rank whose word counts, for every parameter and buffer of the model."""
        dealt = self.found.dealt
        found = {name: dealt.parameters.get(name, (0,))[0] for name, _ in self.skeleton.named_parameters()}
        return found | {name: dealt.buffers.get(name, 0) for name, _ in self.skeleton.named_buffers()}

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that branches of several ranks use, and those ranks: each has a part of their gradients."""
        trained = {name for name, p in self.skeleton.named_parameters() if p.requires_grad}
        return {
            name: ranks for name, ranks in self.found.dealt.parameters.items() if len(ranks) > 1 and name in trained
        }

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """All ranks hold what the trunk uses, with the same gradient."""
        own, every = self.found.dealt.parameters, tuple(range(self.line.ranks.size))
        return {name: own.get(name, every) for name, _ in self.skeleton.named_parameters()}

    def objective(self, objective: Objective, precision: Precision, device: torch.device) -> Objective:
        """``objective(model, content)`` by the branches of all ranks, which call it together: the result is on all."""
        return _Objective(self, objective, precision, device)


class _Objective:
    def __init__(self, branched: Branched, objective: Objective, precision: Precision, device: torch.device):
        found = branched.found
        self.branched, self.precision, self.device = branched, precision, device
        self.root = Whole(branched.model, objective)
        computes, skeleton = precision.word == bf16_compute.WORD, branched.skeleton
        self.skeleton = bf16_compute.as_computed(skeleton) if computes else skeleton
        self.programs = Programs(self.skeleton, objective, branched.program, share=found.share, atoms=found.atoms)

    def __call__(self, model: nn.Module, content: Any) -> Any:
        _same_modes(self.skeleton, model)
        self.programs.whole.training = model.training
        with self.precision.arithmetic(self.device):
            program = self.programs.of(content, self.root, self.device, training=model.training)
        return program.run(0, self.root, program.bind(content), [], self.device).result


def _same_modes(skeleton: nn.Module, part: nn.Module) -> None:
    """Recordings are made in the modes that the modules are in."""
    for module, other in zip(_modules(skeleton), _modules(part), strict=True):
        module.training = other.training


def _modules(model: nn.Module) -> Iterable[nn.Module]:
    return (module for _, module in model.named_modules(remove_duplicate=False))
