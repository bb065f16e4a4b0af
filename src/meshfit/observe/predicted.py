"""What a training should need, predicted from a trace of one step that computes nothing: flops, memory, traffic."""

import io
import warnings
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshfit.anatomy.trace import Trace
from meshfit.axes.pipeline.stages import pipeline_of
from meshfit.axes.shard.units import traced
from meshfit.axes.tensor.axis import TensorAxis
from meshfit.data import tree
from meshfit.data.datasets import SampleStream, open_source
from meshfit.launch.devices import Devices
from meshfit.observe.reading import RecordedRun
from meshfit.plan import Plan
from meshfit.plan_cost import cost, stage_traffic
from meshfit.units import size

if TYPE_CHECKING:
    from meshfit.drive import Training

SAMPLES = 4


def predict(training: "Training") -> dict[str, Any]:
    """``flops_a_sample``, of a forward and backward; ``predicted``, the plan's cost on the first rank. Without those
    that cannot be predicted: the report leaves them out."""
    found: dict[str, Any] = {}
    job, model = training.job, training.shape()
    # the model has printed and warned in training already
    with suppress(Exception), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = open_source(job.data)
        if isinstance(source, SampleStream):
            return found
        few = source.few(SAMPLES)
        if tree.by_sample(few) is not None:  # samples of sizes of their own
            return found
        samples = max(len(t) for t in tree.tensors(few) if t.dim())
        try:
            found["predicted"], trace, samples = _cost(training, model, few, samples)
        except Exception:  # say, BatchNorm over the one sample that a rank takes
            trace = traced(model, job.objective, few, device="cpu")
        if isinstance(trace, Trace):
            found["flops_a_sample"] = (trace.cost.flops + trace.cost.flops_backward) / samples
    return found


def _cost(training: "Training", model: nn.Module, few: Any, samples: int) -> tuple[dict[str, Any], Trace, int]:
    """What the first rank holds and moves; the trace of its batch, and how many samples that has."""
    job, outcome = training.job, training.outcome
    plan, devices = job.plan, job.devices
    assert isinstance(plan, Plan)
    assert isinstance(devices, Devices)
    assert isinstance(job.batch_size, int)
    assert outcome is not None
    taken = torch.arange(-(-job.batch_size // (plan.shares * plan.microbatches))) % samples
    content = tree.map_tensors(lambda t: t[taken] if t.dim() and len(t) == samples else t, few)
    device, stages = devices.device(0).type, None
    if plan.pipeline > 1:
        split = outcome.found.get("tensor")
        atoms = () if split is None else tuple(TensorAxis().closed(split))
        staged = replace(pipeline_of(plan), atoms=atoms).find(model, job.objective, content, device=device)
        trace = staged.trace
        if split is not None:
            stages = stage_traffic(staged, model, job.objective, content, split=split)
    else:
        trace = traced(model, job.objective, content, device=device, plan=plan)
    assert isinstance(trace, Trace)
    found = cost(plan, trace, job.make_optimizer(model), found=outcome.found, stages=stages)
    return {"held": found.held, "moved": found.moved, "most": found.most}, trace, len(taken)


def predicted_table(run: RecordedRun) -> dict[str, Any] | None:
    """Predicted beside measured, of the first rank, where both are known."""
    predicted = run.about.get("predicted")
    if not predicted or not run.ranks:
        return None
    first, rows = run.ranks[0], []
    kept = first.facts.get("memory", {})
    for kind in ("weights", "gradients", "optimizer"):
        rows.append([kind, predicted["held"].get(kind), kept.get(kind)])
    rows.append(["peak memory", predicted["most"], first.most("gpu_peak")])
    for name, count in first.moved.items():
        measured = count / run.last_step if run.last_step else 0
        rows.append([f"{name.replace('_', '-')} a step", predicted["moved"].get(name), measured])
    shown = [[name, size(told), size(got)] for name, told, got in rows if told and got]
    return {"title": "Predicted and measured", "head": ["rank 0", "predicted", "measured"], "rows": shown}
