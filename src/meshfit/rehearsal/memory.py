"""What each stage of a plan keeps on a device, and when it works: by the costs of the axes, without any device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.record import TraceError
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.axes.shard.units import traced
from meshfit.axes.tensor.axis import TensorAxis
from meshfit.cost import Cost
from meshfit.data import tree
from meshfit.data.datasets import open_source
from meshfit.errors import PlanError
from meshfit.job import Job, plan_of
from meshfit.observe.predicted import predicted_picture
from meshfit.plan_cost import cost, stage_traffic
from meshfit.planner.cluster import Cluster
from meshfit.planner.memory import CONTEXT, SLACK
from meshfit.planner.plan_work import work_of
from meshfit.planner.software import MESHFIT
from meshfit.planner.step import StepModel
from meshfit.units import size

SAMPLES = 4


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


def foretold(job: Job, model: nn.Module, found: Mapping[str, Any], tried: Callable[[], nn.Module]) -> list[StageMemory]:
    """Of each stage and branch, by ``plan_cost``; ``found``: what the axes act on; ``tried``: returns the model with
    values. A ``PlanError`` says why it is not known."""
    plan, content = plan_of(job), microbatch(job)
    stages = None
    if plan.pipeline > 1:
        split = found.get("tensor")
        atoms = () if split is None else tuple(TensorAxis().closed(split))
        staged = replace(pipeline_of(plan), atoms=atoms).find(model, job.objective, content, device="cuda")
        trace = staged.trace
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
    return memory


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


def timeline(job: Job, model: nn.Module, found: Mapping[str, Any], cluster: Cluster) -> str:
    """An SVG of a step, as the planner predicts it: nothing is measured."""
    plan = plan_of(job)
    trace = traced(model, job.objective, microbatch(job), device="cuda", plan=plan, operations=True)
    if isinstance(trace, TraceError):
        raise PlanError("one step of the model cannot be traced", trace.headline)
    if plan.exchange != "allreduce":
        raise PlanError("seconds of local steps are not predicted")
    assert isinstance(job.batch_size, int)
    work, _ = work_of(plan, trace, job.make_optimizer(model), found, job.batch_size)
    steps = StepModel(cluster, MESHFIT)
    return predicted_picture(plan, work, steps(work).items, steps)
