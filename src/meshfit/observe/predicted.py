"""What a training should need, predicted from a trace of one step that computes nothing: flops, memory, traffic,
seconds on the machine at hand. ``beside.py`` shows it beside what was measured."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from meshfit.anatomy.trace import Trace
from meshfit.axes.shard.units import traced
from meshfit.data import tree
from meshfit.data.datasets import SampleStream, open_source
from meshfit.errors import PlanError
from meshfit.launch.devices import Devices
from meshfit.observe.reading import RecordedSpan
from meshfit.observe.svg import lanes_picture
from meshfit.optimizers import Optimizers
from meshfit.patches import unprinted
from meshfit.plan import Plan
from meshfit.plan_cost import cost, microbatch, traced_stages
from meshfit.planner.cluster import Cluster
from meshfit.planner.plan_work import work_of
from meshfit.planner.software import MESHFIT
from meshfit.planner.step import StepModel, StepWork
from meshfit.schedule.actions import SPANS
from meshfit.units import seconds

if TYPE_CHECKING:
    from meshfit.drive import Training

SAMPLES = 4
DRAWN = 48
"""Microbatches of a step that are drawn, or three a rank if that is more."""


def predict(training: "Training") -> dict[str, Any]:
    """``flops_a_sample``, of a forward and backward; ``predicted``, the plan's cost on the first rank and the seconds
    of a step. Without those that cannot be predicted: the report leaves them out."""
    found: dict[str, Any] = {}
    job, model = training.job, training.shape()
    # the model has printed and warned in training already
    with suppress(Exception), unprinted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = open_source(job.data)
        if isinstance(source, SampleStream):
            return found
        few = source.few(SAMPLES)
        if tree.by_sample(few) is not None:  # samples of sizes of their own
            return found
        try:
            found["predicted"], trace, samples = _predicted(training, model, few)
        except Exception:  # say, BatchNorm over the one sample that a rank takes
            trace, samples = traced(model, job.objective, few, device="cpu"), tree.size(few)
        if isinstance(trace, Trace):
            found["flops_a_sample"] = (trace.cost.flops + trace.cost.flops_backward) / samples
    return found


def _predicted(training: "Training", model: nn.Module, few: Any) -> tuple[dict[str, Any], Trace, int]:
    """What the first rank holds and moves, and how long a step takes; the trace of its microbatch, and how many samples
    that has."""
    job, outcome = training.job, training.outcome
    plan, devices = job.plan, job.devices
    assert isinstance(plan, Plan)
    assert isinstance(devices, Devices)
    assert isinstance(job.batch_size, int)
    assert outcome is not None
    device, optimizer, stages = devices.device(0).type, job.make_optimizer(model), None
    content = microbatch(few, plan, job.batch_size)
    trace = traced(model, job.objective, content, device=device, plan=plan, operations=True)
    assert isinstance(trace, Trace)
    held = trace
    if plan.pipeline > 1:
        held, stages = traced_stages(plan, model, job.objective, content, outcome.found, device, lambda: model)
    first = cost(plan, held, optimizer, found=outcome.found, stages=stages)
    found: dict[str, Any] = {"held": first.held, "moved": first.moved, "most": first.most}
    if not plan.server and plan.exchange == "allreduce":
        cluster = Cluster.detect(plan.devices, devices.kind)
        with suppress(PlanError):
            found |= _seconds(plan, trace, optimizer, outcome.found, job.batch_size, cluster)
    return found, trace, tree.size(content)


def _seconds(
    plan: Plan, trace: Trace, optimizer: Optimizers, known: Mapping[str, Any], batch: int, cluster: Cluster
) -> dict[str, Any]:
    """Of a step, item by item, and the machine that they are predicted for."""
    work, ranks = work_of(plan, trace, optimizer, known, batch)
    steps = StepModel(cluster, MESHFIT)
    time = steps(work)
    said = (costing.total.collectives for costing in ranks)
    loudest = max(said, key=lambda calls: sum(call.bytes * call.count for call in calls))
    waited = steps.waited_by_axis(loudest, time.items["collectives"])
    return {"seconds": time.seconds, "items": time.items, "waited": waited, "cluster": cluster.to_dict()}


def predicted_picture(plan: Plan, work: StepWork, items: Mapping[str, float], steps: StepModel) -> str:
    """An SVG of a step: a lane a rank of the pipeline; forward and backward, then what is waited for, and the update.
    ``items``: seconds of the step, see ``StepTime``."""
    drawn = min(work.microbatches, max(DRAWN, 3 * work.ranks))
    timed = steps.timeline(work, drawn)
    waits, update = items.get("collectives", 0.0), items.get("update", 0.0)
    inside = sum(e[1] + e[3] for e in steps.stages(work)) / work.ranks * work.microbatches
    after = max(0.0, waits - inside)
    end = timed.end + after + update
    rows = []
    for rank, actions in enumerate(timed.spans):
        spans = [
            RecordedSpan(SPANS[t.action.kind], 1, t.start, t.end - t.start, {"microbatch": t.action.microbatch})
            for t in actions
        ]
        spans += [RecordedSpan("exchange", 1, timed.end, after), RecordedSpan("update", 1, timed.end + after, update)]
        label = f"pipeline {rank}" if work.ranks > 1 else "every rank"
        rows.append((label, [span for span in spans if span.seconds]))
    part = f", {drawn} of its {work.microbatches} microbatches" if drawn < work.microbatches else ""
    heading = f"{plan} · predicted: {seconds(sum(items.values()))} a step{part}"
    return lanes_picture(heading, rows, 0.0, end, ruler=steps.software.slack)  # slack is over everything
