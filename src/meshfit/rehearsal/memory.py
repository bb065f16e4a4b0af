"""What each stage of a plan keeps on a device, and when it works: by the costs of the axes, without any device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.cuts import Stages
from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Event, Trace
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.axes.shard.units import traced
from meshfit.axes.tensor.axis import TensorAxis
from meshfit.cost import Cost
from meshfit.data import tree
from meshfit.data.datasets import open_source
from meshfit.errors import PlanError
from meshfit.job import Job, plan_of
from meshfit.observe.reading import RecordedSpan
from meshfit.observe.svg import document, lane, legend, names_between
from meshfit.plan_cost import cost, stage_traffic
from meshfit.planner.cluster import Cluster
from meshfit.planner.memory import CONTEXT, SLACK
from meshfit.schedule.actions import BACKWARD, FORWARD, SPANS, WEIGHT, Action
from meshfit.schedule.simulate import simulate
from meshfit.units import size

SAMPLES = 4
WIDTH, LEFT, TOP, LANE, GAP = 1100, 110, 40, 30, 8


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of the ranks of one stage of a pipeline and one branch: what they hold at their most."""

    stage: int
    branch: int
    held: dict[str, int]
    """Bytes by kind."""

    @property
    def bytes(self) -> float:
        """With what a process and the allocator have beside: at the least."""
        return sum(self.held.values()) * (1 + SLACK[0]) + CONTEXT


@dataclass(frozen=True)
class Foretold:
    """What is known of a plan without running it."""

    memory: list[StageMemory]
    cut: Stages | None = None
    trace: Trace | None = None

    def events(self, stage: int) -> Sequence[Event]:
        """Of a stage."""
        assert self.trace is not None
        return self.trace.events if self.cut is None else [self.trace.events[i] for i in self.cut.ranges[stage]]


def foretold(job: Job, model: nn.Module, found: Mapping[str, Any], tried: Callable[[], nn.Module]) -> Foretold:
    """By ``plan_cost``; ``found``: what the axes act on; ``tried``: returns the model with values. A ``PlanError`` says
    why it is not known."""
    plan, content = plan_of(job), microbatch(job)
    stages, cut, trace = None, None, None
    if plan.pipeline > 1:
        split = found.get("tensor")
        atoms = () if split is None else tuple(TensorAxis().closed(split))
        staged = replace(pipeline_of(plan), atoms=atoms).find(model, job.objective, content, device="cuda")
        trace, cut = staged.trace, staged.cut
        if split is not None:
            stages = stage_traffic(staged, tried(), job.objective, content, split=split)
    else:
        trace = traced(model, job.objective, content, device="cuda", plan=plan)
    if isinstance(trace, TraceError) or trace is None:
        raise PlanError("one step of the model cannot be traced", *([] if trace is None else [trace.headline]))
    optimizer, memory = job.make_optimizer(model), []
    for stage in range(plan.pipeline):
        for branch in range(plan.branch):
            place = {"pipeline": stage, "branch": branch}
            each: Cost = cost(plan, trace, optimizer, found=found, place=place, ahead=True, stages=stages)
            held = {kind: count for kind, count in (*each.held.items(), ("passing", each.passed)) if count}
            memory.append(StageMemory(stage, branch, held))
    return Foretold(memory, cut, trace)


def microbatch(job: Job) -> Any:
    """As many samples as a rank takes at once."""
    plan, few = plan_of(job), open_source(job.data).few(SAMPLES)
    assert isinstance(job.batch_size, int)
    if tree.by_sample(few) is not None:
        raise PlanError("samples have sizes of their own")
    samples = max(len(t) for t in tree.tensors(few) if t.dim())
    taken = torch.arange(-(-job.batch_size // (plan.shares * plan.microbatches))) % samples
    return tree.map_tensors(lambda t: t[taken] if t.dim() and len(t) == samples else t, few)


def too_large(each: StageMemory, cluster: Cluster) -> str:
    """Why a stage does not fit; empty if it does."""
    if each.bytes <= cluster.accelerator.memory:
        return ""
    most = sorted(each.held.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in most[:4])
    return (
        f"it needs {size(each.bytes)} of the {size(cluster.accelerator.memory)} of {cluster.accelerator.name}: {kinds}"
    )


def timeline(job: Job, known: Foretold, cluster: Cluster) -> str:
    """An SVG of a step: when each rank of one pipeline works, by the arithmetic of its stages; without a pipeline, one
    rank's forward and backward. Communication takes no time here."""
    plan = plan_of(job)
    precision = plan.precision.removesuffix("-true")
    device = cluster.accelerator
    rate = device.rates.get(precision, max(device.rates.values())) * device.reached.get(precision, 0.75)
    share = plan.tensor * plan.context * plan.expert

    def takes(action: Action) -> float:
        assert known.trace is not None
        events = (
            known.trace.events if known.cut is None else [known.trace.events[i] for i in known.cut.ranges[action.stage]]
        )
        forward, backward = (sum(getattr(e.cost, name) for e in events) for name in ("flops", "flops_backward"))
        work = {FORWARD: forward, BACKWARD: backward}.get(action.kind, backward / 2)
        return max(work, 1) / rate / share

    if plan.pipeline > 1:
        spans = simulate(pipeline_of(plan).schedule, takes).spans
        rows = [[(timed.action, timed.start, timed.end) for timed in rank] for rank in spans]
    else:
        row, at = [], 0.0
        for microbatch in range(plan.microbatches):
            for kind in (FORWARD, BACKWARD):
                action = Action(kind, 0, microbatch)
                row.append((action, at, at := at + takes(action)))
        rows = [row]
    lanes = [[_span(action, start, end) for action, start, end in row] for row in rows]
    labels = [f"pipeline {i}" if len(lanes) > 1 else "every rank" for i in range(len(lanes))]
    return _drawn(f"{plan} on {cluster.name}: one step", labels, lanes)


def _span(action: Action, start: float, end: float) -> RecordedSpan:
    name = "weight" if action.kind == WEIGHT else SPANS[action.kind]
    return RecordedSpan(name, 1, start, end - start, {"microbatch": action.microbatch, "stage": action.stage})


def _drawn(title: str, labels: list[str], lanes: list[list[RecordedSpan]]) -> str:
    end = max(span.end for spans in lanes for span in spans)
    right = WIDTH - 12
    body = [f'<text class="head" x="{LEFT}" y="22">{title}</text>']
    for i, (label, spans) in enumerate(zip(labels, lanes, strict=True)):
        top = TOP + i * (LANE + GAP)
        body.append(f'<text x="{LEFT - 10}" y="{top + LANE / 2 + 4}" text-anchor="end">{label}</text>')
        body.append(lane(spans, 0.0, end, left=LEFT, top=top, height=LANE, scale=(right - LEFT) / end))
    names = dict.fromkeys(name for spans in lanes for name in names_between(spans, 0.0, end))
    colours, height = legend(names, TOP + len(lanes) * (LANE + GAP) + 24, left=LEFT, right=right)
    return document("".join([*body, colours]), names, WIDTH, height)
