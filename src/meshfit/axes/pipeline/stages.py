"""Where a model is cut into the stages of a pipeline, and what they cost."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from torch import nn

from meshfit.anatomy.cuts import Stages, stages, work
from meshfit.anatomy.record import Recording, TraceError
from meshfit.anatomy.trace import Event, Trace, only
from meshfit.axes import bf16_compute
from meshfit.axes.pipeline.audit import faithful
from meshfit.axes.pipeline.cut import Split, split_of, stages_before
from meshfit.axes.pipeline.program import layout_of
from meshfit.axes.shard.units import _relative
from meshfit.comm.transport import packed_size
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.errors import PlanError
from meshfit.plan import Plan
from meshfit.schedule.actions import BACKWARD, FORWARD, Schedule, stages_of, usual_chunks
from meshfit.schedule.orders import schedule

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

    precision: str = "fp32"

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
        for share in (min(SHARE, 1 / (4 * self.stages)), 0.0):  # finer only if need be: see record
            atoms, recording = faithful(
                model,
                objective,
                batch,
                device=device,
                precision=self.precision,
                share=share,
                atoms=self.atoms,
                refusal=self._refusal,
            )
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
            computes = self.precision == bf16_compute.WORD
            made = FoundStages(split, share, atoms, computes, trace, _notes(trace, cut), cut, inner)
            found.append((cut.imbalance, made))
            if cut.imbalance <= EVEN or self.cut:
                break
        if not found:
            assert refused is not None
            raise refused
        return min(found, key=lambda each: each[0])[1]

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
        away = [(step, (sent or crossing)(*step)) for step in steps if self.schedule.rank_of(step[1]) != rank]
        sends = (
            CollectiveCall(
                *("send", size, 2),
                count=self.microbatches,
                axis="pipeline",
                phase="forward" if to > stage else "backward",
                hidden="other microbatches",
            )
            for (stage, to), size in away
            if size
        )
        added = Cost(collectives=tallied(sends))
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


def _notes(trace: Trace, found: Stages) -> tuple[str, ...]:
    """Of stages so uneven that most ranks wait for one."""
    if found.imbalance < UNEVEN:
        return ()
    longest = max(range(len(found.costs)), key=found.costs.__getitem__)
    largest = max((trace.events[i] for i in found.ranges[longest]), key=work)
    because = f", because {largest.name or 'the model itself'} cannot be cut" if found.indivisible else ""
    slow = f"pipeline: stage {longest} takes {1 + found.imbalance:.1f} times as long as the mean of all stages"
    return (slow + because,)


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
    computes: bool = False
    """Whether that was recorded with weights in bf16: see bf16_compute.py."""
    trace: Trace | None = None
    notes: tuple[str, ...] = ()
    """What the user should know of it."""
    cut: Stages | None = None
    inner: Inner | None = None
    """Who runs what within the stages, where several ranks share one."""

    def to_send(self) -> "FoundStages":
        return replace(self, trace=None, cut=None, inner=None)


def pipeline_of(plan: Plan) -> Pipeline:
    return Pipeline(
        degree=plan.pipeline,
        word=plan.schedule,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        cut=tuple(filter(None, plan.cut.split(","))),
        precision=plan.precision,
    )


def part_of_trace(trace: Trace, found: Stages, own: Iterable[int]) -> Trace:
    """What the stages ``own`` run of ``trace``, as a trace of its own."""
    return only(trace, {i for stage in own for i in (*found.recomputed[stage], *found.ranges[stage])})
