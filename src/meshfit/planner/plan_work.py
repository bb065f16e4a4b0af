"""The work of a step under a plan: what the costs of its axes say that ranks run and say, as ``StepModel`` takes it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from meshfit.anatomy.operations import Operation, Streaming, merged
from meshfit.anatomy.trace import Trace
from meshfit.axes.pipeline.stages import FoundStages, pipeline_of
from meshfit.cost import CollectiveCall
from meshfit.optimizers import Optimizers
from meshfit.plan import Plan
from meshfit.plan_cost import Costing, costed
from meshfit.planner.step import StageWork, StepWork
from meshfit.schedule.actions import stages_of, usual_chunks

ROUNDING = 3
"""Bytes that are read and written for each byte of a copy of weights in half precision: fp32 in, a half out; in
backward the gradient of the copy in, one in fp32 out."""

SUMMING = 3
"""Passes over a gradient that is added to others: of microbatches, or to the buffer that ranks sum."""

KERNELS_OF_UPDATE = 20


def work_of(
    plan: Plan,
    trace: Trace,
    optimizer: torch.optim.Optimizer | Optimizers,
    known: Mapping[str, Any],
    samples: float,
) -> tuple[StepWork, list[Costing]]:
    """Of a step of ``samples`` whose axes act on what is ``known``, and what each rank of the pipeline costs.
    ``trace``: of a microbatch, with its operations."""
    found = dict(known)
    if plan.pipeline > 1:
        found["pipeline"] = FoundStages(None, 0.0, trace=trace, cut=pipeline_of(plan).cut_of(trace))  # type: ignore[arg-type]
    rank = lambda place: costed(plan, trace, optimizer, found=found, place={"pipeline": place}, estimates=True)
    ranks = [rank(place) for place in range(plan.pipeline)]
    return plan_work(plan, ranks, samples=samples, tokens=0, model_flops=0), ranks


def plan_work(plan: Plan, ranks: Sequence[Costing], *, samples: float, tokens: float, model_flops: float) -> StepWork:
    """Of a step. ``ranks``: of the pipeline, by place along it; equal ones may be the same object."""
    chunks = (plan.chunks or usual_chunks(plan.schedule)) if plan.pipeline > 1 else 1
    works = {id(costing): _stage(plan, costing, chunks) for costing in ranks}
    stages: list[StageWork] = [StageWork()] * (plan.pipeline * chunks)
    for rank, costing in enumerate(ranks):
        for stage in stages_of(plan.schedule, plan.pipeline, chunks, rank) if plan.pipeline > 1 else (0,):
            stages[stage] = works[id(costing)]
    sends = [call for costing in ranks for call in costing.total.collectives if call.name == "send"]
    last = max(sends, key=lambda call: call.bytes, default=CollectiveCall("send", 0))
    return StepWork(
        stages=tuple(stages),
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        ranks=plan.pipeline,
        sent=last.bytes,
        stride=last.stride,
        calls=max((_of_step(costing) for costing in ranks), key=_moved),
        update=max((_update(costing) for costing in ranks), key=lambda update: update[0].bytes),
        tokens=tokens,
        samples=samples,
        model_flops=model_flops,
    )


def _stage(plan: Plan, costing: Costing, chunks: int) -> StageWork:
    """One of a rank's stages, one microbatch: they share its work evenly."""
    events = costing.trace.events
    each = lambda name: tuple(
        _share(op, chunks) for op in merged(op for event in events for op in getattr(event.cost, name))
    )
    forward, backward = each("forward"), each("backward")
    if rounded := costing.total.held.get("rounded", 0):
        casts = Streaming(ROUNDING * rounded / chunks, sum(event.cost.rounded > 0 for event in events))
        forward, backward = (*forward, casts), (*backward, casts)
    if plan.microbatches > 1 or plan.devices > 1:
        trained = [p for p in costing.trace.parameters.values() if p.trained]
        backward = (*backward, Streaming(SUMMING * sum(p.grad_bytes for p in trained) / chunks, len(trained) // chunks))
    count = 1 / (plan.microbatches * chunks)
    calls = (
        replace(call, count=call.count * count)
        for call in costing.total.collectives
        if call.name != "send" and not call.once and call.phase != "step"
    )
    return StageWork(forward, backward, each("again"), calls=tuple(calls))


def _share(operation: Operation, chunks: int) -> Operation:
    if chunks == 1:
        return operation
    if isinstance(operation, Streaming):
        return Streaming(operation.bytes / chunks, operation.kernels / chunks)  # type: ignore[arg-type]
    return replace(operation, count=operation.count / chunks)


def _of_step(costing: Costing) -> tuple[CollectiveCall, ...]:
    return tuple(call for call in costing.total.collectives if call.once or call.phase == "step")


def _moved(calls: Iterable[CollectiveCall]) -> float:
    return sum(call.bytes * call.count for call in calls)


def _update(costing: Costing) -> tuple[Streaming, ...]:
    """The norm of the gradients, and the optimizer's step: weights and states are read and written."""
    trained = [p for p in costing.trace.parameters.values() if p.trained]
    weights, gradients = sum(p.bytes for p in trained), sum(p.grad_bytes for p in trained)
    held, host = costing.total.held, costing.total.host
    states = max(held.get("optimizer", 0), host.get("optimizer", 0))
    return (Streaming(2.0 * (weights + states) + 2.0 * gradients, KERNELS_OF_UPDATE),)
