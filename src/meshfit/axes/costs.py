"""What a plan costs on one rank: the costs of its strategies, composed in the order in which they are applied.

Each maps the trace of what a rank runs to the trace of what it runs under that strategy, and adds what it costs beside.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.again import recomputed_blocks
from meshfit.anatomy.trace import Parameter, Trace
from meshfit.axes.branch.axis import Branch, Found
from meshfit.axes.context.axis import Context
from meshfit.axes.context.find import ContextPlan, begin
from meshfit.axes.context.ops import Imagined
from meshfit.axes.context.piece import guarded
from meshfit.axes.data import batchnorm
from meshfit.axes.data.axis import Replicate
from meshfit.axes.expert.axis import Expert
from meshfit.axes.expert.mixture import ExpertPlan
from meshfit.axes.find import pipeline_of, units_of_branch
from meshfit.axes.offload import Offload
from meshfit.axes.pipeline.axis import Found as FoundStages
from meshfit.axes.pipeline.traffic import StageTraffic, count
from meshfit.axes.recompute.axis import Recompute
from meshfit.axes.shard.axis import Shard
from meshfit.axes.shard.units import units
from meshfit.axes.tensor.axis import Tensor
from meshfit.axes.tensor.cut import cut
from meshfit.axes.tensor.ops import Stream
from meshfit.axes.tensor.region import TensorPlan
from meshfit.cost import Cost
from meshfit.exchange import across, allreduce, local
from meshfit.exchange.probe_optimizer import state_bytes
from meshfit.plan import Plan
from meshfit.server import cost as serving
from meshfit.server import worker_group as crew
from meshfit.server.cost import Payload


def cost(
    plan: Plan,
    trace: Trace,
    optimizer: torch.optim.Optimizer,
    *,
    split: TensorPlan | None = None,
    sequence: ContextPlan | None = None,
    experts: ExpertPlan | None = None,
    stage: int = 0,
    ahead: bool = False,
    server: int | None = None,
    branch: Found | None = None,
    rank: int = 0,
    stages: StageTraffic | None = None,
) -> Cost:
    """Of a step under ``plan``. ``trace`` is of one microbatch of one rank, as if nothing were split; ``split`` what
    the tensor axis was found to, ``sequence`` what the context axis, ``experts`` what the expert axis; ``stage`` the
    rank's place along the pipeline; ``ahead``: see ``Shard.cost``. ``server``: of that model server, not of a rank.
    ``branch`` who was found to run what of ``trace``, ``rank`` the place along that axis. ``stages``: what is said
    inside and between the stages of a pipeline, of which ranks split more than samples: see ``stage_traffic``.

    ``held`` is what there is at its most, by kind: weights, gradients, optimizer, activations, and what is gathered.
    """
    if server is not None:
        return serving.server(_payload(plan, trace), state_bytes(optimizer), workers=plan.data, index=server)
    joined = plan.shares // plan.data if plan.staleness else plan.shares
    outer, plan = plan, plan.worker if plan.crew > 1 else plan  # what ranks of one worker do among themselves
    total, whole, alive, tied, pipe = Cost(), trace, 1.0, set[str](), pipeline_of(plan)
    partial: set[str] = set()
    earlier: set[str] = set()  # parameters that ranks before this one hold, too
    if plan.pipeline > 1:
        if stages is None and (plan.tensor > 1 or plan.context > 1):
            raise ValueError(f"{plan}: its cost depends on what is split inside stages: stage_traffic says so")
        trace, added, alive = pipe.cost(trace, stage, sent=None if stages is None else stages.sent)
        total += added
    if stages is not None:
        total += stages.cost(pipe.stages_of(stage), microbatches=plan.microbatches, wide=_wide(whole))
        split = None if split is None else split.silent()
        sequence = None if sequence is None else replace(sequence, traffic=())
    if plan.pipeline > 1:
        tied |= pipe.tied(whole)
        earlier |= {name for before in range(stage) for name in pipe.cost(whole, before)[0].parameters}
    if plan.branch > 1:
        if branch is None:
            raise ValueError(f"{plan}: its cost depends on who runs what: Branch.find says so")
        trace, added = Branch(degree=plan.branch).cost(branch, rank, microbatches=plan.microbatches)
        total += added
        tied |= {name for name, ranks in branch.dealt.parameters.items() if len(ranks) > 1}
        earlier |= {name for name, ranks in branch.dealt.parameters.items() if min(ranks) < rank}
    if plan.tensor > 1:
        if split is None:
            raise ValueError(f"{plan}: its cost depends on what is split: plan_tensor says so")
        part = split.only(trace)
        trace, added = Tensor(degree=plan.tensor, plan=part).cost(trace, microbatches=plan.microbatches)
        total += added
        partial = set(split.shared)
    if plan.context > 1:
        if sequence is None:
            raise ValueError(f"{plan}: its cost depends on what is cut: plan_context says so")
        trace, added = Context(degree=plan.context, plan=sequence).cost(trace, microbatches=plan.microbatches)
        total += added
    apart: dict[str, Parameter] = {}
    if plan.expert > 1:
        if experts is None:
            raise ValueError(f"{plan}: its cost depends on what is spread: plan_experts says so")
        again = () if plan.recompute == "none" else recomputed_blocks(trace)
        axis = Expert(degree=plan.expert, plan=experts)
        trace, added = axis.cost(trace, microbatches=plan.microbatches, again=again)
        total += added
        apart = {name: p for name, p in trace.parameters.items() if name in experts.cuts}
        total += allreduce.cost(_trained(apart), plan.data * plan.shard)
        total += Cost(held={"weights": sum(p.bytes for p in apart.values())})
    if plan.apart or plan.tensor > 1 or plan.expert > 1:
        total += across.cost(len(partial | tied), plan.shares * plan.context)
    before = trace
    if plan.cuts:
        names = tuple(name for name in trace.parameters if name not in apart)
        found = units(trace, names) if branch is None else units_of_branch(branch, rank, trace)
        shard = Shard.of(plan, found)
        mixed = plan.pipeline > 1
        copies = plan.data * plan.expert * plan.context
        trace, added = shard.cost(trace, copies=copies, microbatches=plan.microbatches, ahead=ahead, accumulate=mixed)
        total += added
    else:
        rest = {name: p for name, p in trace.parameters.items() if name not in apart}
        own = replace(trace, parameters=rest)
        _, added = Replicate(degree=plan.shares).cost(own)
        total += added + _exchange(plan, own)
    total += _summed([p for name, p in trace.parameters.items() if p.trained and name in tied])
    if outer.joins_batchnorms:
        total += batchnorm.cost(before, joined, plan.microbatches, served=outer.server > 0 and outer.crew == 1)
    if outer.crew > 1:
        total += crew.cost(outer, _payload(outer, whole), trace, earlier)
    if plan.recompute != "none":
        trace, added = Recompute(word=plan.recompute, blocks=recomputed_blocks(before)).cost(trace)
        total += added
    if outer.server:
        return total + Cost(held={"activations": round(trace.cost.kept * alive)})
    state = state_bytes(optimizer)
    if plan.offload == "optimizer":
        trace, added = Offload(state=state).cost(trace)
        total += added
    else:
        kept = sum(sum(state.of(p.shape, p.dtype)) for p in trace.parameters.values() if p.trained and prod(p.shape))
        total += Cost(host={"optimizer": kept}) if plan.offload == "parameters" else Cost(held={"optimizer": kept})
    return total + Cost(held={"activations": round(trace.cost.kept * alive)})


def _summed(parameters: list[Parameter]) -> Cost:
    """Of summing the gradients of parameters that ranks with other modules hold too."""
    if not parameters:
        return Cost()
    return Cost(calls={"all_reduce": len(parameters)}, moved={"all_reduce": sum(p.bytes for p in parameters)})


def stage_traffic(
    found: FoundStages,
    model: nn.Module,
    objective: Callable[[nn.Module, Any], Any],
    content: Any,
    *,
    split: TensorPlan | None = None,
    sequence: ContextPlan | None = None,
    ranks: Mapping[str, int] = MappingProxyType({}),
) -> StageTraffic:
    """What is said inside and between the stages of ``found``, for the microbatch ``content``; ``ranks``: the place
    along the tensor and context axes."""

    @contextmanager
    def laid_out(twin: nn.Module) -> Iterator[dict[str, Imagined]]:
        groups: dict[str, Imagined] = {}
        if split is not None:
            group = groups["tensor"] = Imagined(ranks.get("tensor", 0), split.degree)
            stream = Stream(group)
            for region in split.regions:
                cut(twin, region, group, stream)
        if sequence is not None:
            group = groups["context"] = Imagined(ranks.get("context", 0), sequence.degree)
            begin(twin, sequence.beginnings, group)
        with guarded():
            yield groups

    return count(found, model, objective, content, laid_out)


def _wide(trace: Trace) -> int:
    """Bytes of an element of what is summed or gathered."""
    return 8 if any(p.dtype == "float64" for p in trace.parameters.values()) else 4


def _exchange(plan: Plan, trace: Trace) -> Cost:
    """Of how the gradients of a model that each rank holds whole become weights."""
    trained = _trained(trace.parameters)
    if plan.server:
        found, own = serving.worker(_payload(plan, trace)), sum(p.nbytes for p in trained)
        return found + Cost(held={"weights": -own})  # which are counted already
    if plan.exchange == "allreduce":
        return allreduce.cost(trained, plan.shares * plan.context)
    running = sum(prod(b.shape) for name, b in trace.buffers.items() if name.endswith(("running_mean", "running_var")))
    outer = plan.exchange == "diloco"
    met = local.cost(trained, plan.data, outer=outer, overlap=plan.overlap, running=running)
    each = lambda many: {name: round(count / plan.every) for name, count in many.items()}
    return Cost(held=met.held, calls=each(met.calls), moved=each(met.moved))


def _payload(plan: Plan, trace: Trace) -> Payload:
    trained = {name: _parameter(p.shape, p.dtype) for name, p in trace.parameters.items() if p.trained}
    kept = ("running_mean", "running_var", "num_batches_tracked")
    running = {name: _tensor(b.shape, b.dtype) for name, b in trace.buffers.items() if name.endswith(kept)}
    return Payload(trained, running, plan.server, plan.compress)


def _tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _trained(parameters: Mapping[str, Parameter]) -> list[nn.Parameter]:
    return [_parameter(p.shape, p.dtype) for p in parameters.values() if p.trained]


def _parameter(shape: tuple[int, ...], dtype: str) -> nn.Parameter:
    return nn.Parameter(_tensor(shape, dtype))
