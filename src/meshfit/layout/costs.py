"""What a plan costs on one rank: the costs of its strategies, composed in the order in which they are applied.

Each maps the trace of what a rank runs to the trace of what it runs under that strategy, and adds what it costs beside.
"""

from math import prod

import torch
from torch import nn

from meshfit.anatomy.again import recomputed_blocks
from meshfit.anatomy.trace import Trace
from meshfit.cost import Cost
from meshfit.exchange import across, allreduce
from meshfit.exchange.nature import state_bytes
from meshfit.layout import batchnorm
from meshfit.layout.context import Context
from meshfit.layout.find import pipeline_of
from meshfit.layout.offload import Offload
from meshfit.layout.recompute import Recompute
from meshfit.layout.replicate import Replicate
from meshfit.layout.sequence.find import ContextPlan
from meshfit.layout.shard import Shard
from meshfit.layout.split.region import TensorPlan
from meshfit.layout.tensor import Tensor
from meshfit.layout.units import units
from meshfit.plan import Plan


def cost(
    plan: Plan,
    trace: Trace,
    optimizer: torch.optim.Optimizer,
    *,
    split: TensorPlan | None = None,
    sequence: ContextPlan | None = None,
    stage: int = 0,
    ahead: bool = False,
) -> Cost:
    """Of a step under ``plan``. ``trace`` is of one microbatch of one rank, as if nothing were split; ``split`` what
    the tensor axis was found to, ``sequence`` the context axis; ``stage`` the rank's place along the pipeline;
    ``ahead``: see ``Shard.cost``.

    ``held`` is what there is at its most, by kind: weights, gradients, optimizer, activations, and what is gathered.
    """
    total, whole, alive, shared, pipe = Cost(), trace, 1.0, set[str](), pipeline_of(plan)
    if plan.pipeline > 1:
        trace, added, alive = pipe.cost(trace, stage)
        total += added
        shared |= pipe.tied(whole)
    if plan.tensor > 1:
        if split is None:
            raise ValueError(f"{plan}: its cost depends on what is split: plan_tensor says so")
        part = split.only(trace.parameters)
        trace, added = Tensor(degree=plan.tensor, plan=part).cost(trace, microbatches=plan.microbatches)
        total += added
        shared |= set(split.shared)
    if plan.context > 1:
        if sequence is None:
            raise ValueError(f"{plan}: its cost depends on what is cut: plan_context says so")
        trace, added = Context(degree=plan.context, plan=sequence).cost(trace, microbatches=plan.microbatches)
        total += added
    copies = plan.data * plan.context
    if plan.pipeline > 1 or plan.tensor > 1:
        total += across.cost(len(shared), plan.shares)
    before = trace
    if plan.cuts:
        shard = Shard.of(plan, units(trace, tuple(trace.parameters)))
        mixed = plan.pipeline > 1
        trace, added = shard.cost(trace, copies=copies, microbatches=plan.microbatches, ahead=ahead, accumulate=mixed)
        total += added
    else:
        trace, added = Replicate(degree=plan.data).cost(trace)
        trained = [_parameter(p.shape, p.dtype) for p in trace.parameters.values() if p.trained]
        total += added + allreduce.cost(trained, copies)
    if plan.pipeline > 1:
        total += pipe.tied_cost(whole, trace)
    if plan.joins_batchnorms:
        total += batchnorm.cost(before, plan.shares, plan.microbatches)
    if plan.recompute != "none":
        trace, added = Recompute(word=plan.recompute, blocks=recomputed_blocks(before)).cost(trace)
        total += added
    state = state_bytes(optimizer)
    if plan.offload == "optimizer":
        trace, added = Offload(state=state).cost(trace)
        total += added
    else:
        kept = sum(sum(state.of(p.shape, p.dtype)) for p in trace.parameters.values() if p.trained and prod(p.shape))
        total += Cost(host={"optimizer": kept}) if plan.offload == "parameters" else Cost(held={"optimizer": kept})
    return total + Cost(held={"activations": round(trace.cost.kept * alive)})


def _parameter(shape: tuple[int, ...], dtype: str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
