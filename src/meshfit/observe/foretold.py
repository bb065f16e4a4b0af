"""What a training should take, told from a recording of one step that computes nothing: arithmetic, memory, traffic."""

import io
import warnings
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from meshfit.anatomy.trace import Trace
from meshfit.axes.pipeline.axis import pipeline_of
from meshfit.axes.shard.units import traced
from meshfit.axes.tensor.axis import TensorAxis
from meshfit.cost import size
from meshfit.data import tree
from meshfit.data.datasets import SampleStream, open_source
from meshfit.launch.devices import Devices
from meshfit.observe.reading import Recording
from meshfit.plan import Plan
from meshfit.plan_cost import cost, stage_traffic

if TYPE_CHECKING:
    from meshfit.drive import Training
    from meshfit.job import Job

SAMPLES = 4
COUNTED = ("weights", "gradients", "optimizer")


def foretell(training: "Training") -> dict[str, Any]:
    """``flops_a_sample``, of a forward and backward; ``foretold``, what the plan costs on the first rank. Without what
    cannot be told: a report without a line is better than none."""
    found: dict[str, Any] = {}
    job, model = training.job, training.model
    # what the model says it has said in training
    with suppress(Exception), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = open_source(job.data)
        if isinstance(source, SampleStream):
            return found
        few = source.few(SAMPLES)
        trace = traced(model, job.objective, few, device="cpu")
        if isinstance(trace, Trace):
            samples = max(len(t) for t in tree.tensors(few) if t.dim())
            found["flops_a_sample"] = (trace.cost.flops + trace.cost.flops_backward) / samples
            found["foretold"] = _cost(training, few)
    return found


def _cost(training: "Training", few: Any) -> dict[str, dict[str, int]]:
    job, model = training.job, training.model
    plan, devices, outcome = job.plan, job.devices, training.outcome
    assert isinstance(plan, Plan)
    assert isinstance(devices, Devices)
    assert outcome is not None
    content, device = _microbatch(job, plan, few), devices.device(0).type
    stages = None
    if plan.pipeline > 1:
        split = outcome.found.get("tensor")
        atoms = () if split is None else tuple(TensorAxis().closed(split))
        staged = replace(pipeline_of(plan), atoms=atoms).find(model, job.objective, content, device=device)
        trace = staged.trace
        if split is not None:
            stages = stage_traffic(staged, model, job.objective, content, split=split)
    else:
        trace = traced(model, job.objective, content, device=device)
    assert isinstance(trace, Trace)
    found = cost(plan, trace, job.make_optimizer(model), found=outcome.found, stages=stages)
    return {"held": found.held, "moved": found.moved}


def _microbatch(job: "Job", plan: Plan, few: Any) -> Any:
    """As many samples as a rank takes at once, whichever they are."""
    assert isinstance(job.batch_size, int)
    there = max(len(t) for t in tree.tensors(few) if t.dim())
    taken = torch.arange(-(-job.batch_size // (plan.shares * plan.microbatches))) % there
    return tree.map_tensors(lambda t: t[taken] if t.dim() and len(t) == there else t, few)


def beside(run: Recording) -> dict[str, Any] | None:
    """A table: foretold and measured, of the first rank, where both are known."""
    told = run.about.get("foretold")
    if not told or not run.ranks:
        return None
    first, rows = run.ranks[0], []
    kept = first.facts.get("memory", {})
    for kind in COUNTED:
        if told["held"].get(kind) and kept.get(kind):
            rows.append([kind, size(told["held"][kind]), size(kept[kind])])
    peak = max((value for _, value in first.series("gpu_peak")), default=0.0)
    if peak:
        rows.append(["memory at its most", size(sum(told["held"].values())), size(peak)])
    steps = run.steps[-1]["step"] if run.steps else 0
    moved: dict[str, int] = {}
    for total in (total for total in first.totals if total.last):  # not what came before the first step
        for name, (_, count) in total.moved.items():
            moved[name] = moved.get(name, 0) + count
    for name in moved:
        if told["moved"].get(name) and steps:
            rows.append([f"{name.replace('_', '-')} a step", size(told["moved"][name]), size(moved[name] / steps)])
    return {"title": "Foretold beside measured", "head": ["rank 0", "foretold", "measured"], "rows": rows}
