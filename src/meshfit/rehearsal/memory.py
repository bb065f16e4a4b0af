"""What each stage of a plan keeps on a device, and when it works: by the costs of the axes, without any device."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from torch import nn

from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Trace
from meshfit.axes.shard.units import traced
from meshfit.data import tree
from meshfit.data.datasets import open_source
from meshfit.errors import PlanError
from meshfit.job import Job, plan_of
from meshfit.observe.predicted import predicted_picture
from meshfit.plan_cost import cost, microbatch, traced_stages
from meshfit.planner.cluster import Cluster
from meshfit.planner.plan_work import work_of
from meshfit.planner.prediction import StepMemory
from meshfit.planner.software import MESHFIT
from meshfit.planner.step import StepModel
from meshfit.units import size

SAMPLES = 4


def stage_memory(
    job: Job, model: nn.Module, found: Mapping[str, Any], valued: Callable[[], nn.Module]
) -> list[StepMemory]:
    """Of each stage and branch, by ``plan_cost``; ``found``: what the axes act on; ``valued``: returns the model with
    values. A ``PlanError`` says why it is not known."""
    plan, stages = plan_of(job), None
    if plan.pipeline > 1:
        trace, stages = traced_stages(plan, model, job.objective, _microbatch(job), found, "cuda", valued)
    else:
        trace = _traced(job, model)
    optimizer, memory = job.make_optimizer(model), []
    for stage, branch in product(range(plan.pipeline), range(plan.branch)):
        place = {"pipeline": stage, "branch": branch}
        each = cost(plan, trace, optimizer, found=found, place=place, ahead=True, stages=stages)
        held = {kind: count for kind, count in (*each.held.items(), ("passing", each.passed)) if count}
        memory.append(StepMemory(held, stage, branch))
    return memory


def _microbatch(job: Job) -> Any:
    few = open_source(job.data).few(SAMPLES)
    if tree.by_sample(few) is not None:
        raise PlanError("samples have sizes of their own")
    assert isinstance(job.batch_size, int)
    return microbatch(few, plan_of(job), job.batch_size)


def _traced(job: Job, model: nn.Module, *, operations: bool = False) -> Trace:
    plan, content = plan_of(job), _microbatch(job)
    trace = traced(model, job.objective, content, device="cuda", plan=plan, operations=operations)
    if isinstance(trace, TraceError):
        raise PlanError("one step of the model cannot be traced", trace.headline)
    return trace


def too_large(each: StepMemory, cluster: Cluster) -> str:
    """Why a stage does not fit; empty if it does, as far as is known."""
    least, there = each.device[0], cluster.accelerator.memory
    if least <= there:
        return ""
    most = sorted(each.held.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in most[:4])
    return f"it needs {size(least)} of the {size(there)} of {cluster.accelerator.name}: {kinds}"


def timeline(job: Job, model: nn.Module, found: Mapping[str, Any], cluster: Cluster) -> str:
    """An SVG of a step, as the planner predicts it: nothing is measured."""
    plan = plan_of(job)
    if plan.exchange != "allreduce":
        raise PlanError("seconds of local steps are not predicted")
    assert isinstance(job.batch_size, int)
    trace = _traced(job, model, operations=True)
    work, _ = work_of(plan, trace, job.make_optimizer(model), found, job.batch_size)
    steps = StepModel(cluster, MESHFIT)
    return predicted_picture(plan, work, steps(work).items, steps)
