"""What a plan costs on one rank: the costs of its axes, in the order in which they are applied.

Each maps the trace of what a rank runs to the trace of what it runs along that axis, and adds what it costs beside.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.probe_optimizer import state_bytes
from meshfit.anatomy.trace import Parameter, Trace
from meshfit.axes.context.find import ContextPlan, begin
from meshfit.axes.context.piece import guarded
from meshfit.axes.data import batchnorm
from meshfit.axes.offload import offload_cost
from meshfit.axes.order import ORDER
from meshfit.axes.pipeline.axis import FoundStages
from meshfit.axes.pipeline.traffic import StageTraffic, count
from meshfit.axes.tensor.cut import cut
from meshfit.axes.tensor.region import TensorPlan
from meshfit.comm.draws import Stream
from meshfit.comm.group import CountingGroup
from meshfit.cost import Cost
from meshfit.exchange import across, allreduce, local, server_cost
from meshfit.plan import Plan


@dataclass
class Costing:
    """The costs of a plan while they are added up, axis by axis."""

    plan: Plan
    trace: Trace
    """What the rank runs, as far as the axes have been gone through."""
    place: Mapping[str, int]
    """The rank's index along axes whose ranks differ."""
    ahead: bool
    total: Cost = field(default_factory=Cost)
    found: Mapping[str, Any] = field(default_factory=dict)
    """What the axes act on."""
    stages: StageTraffic | None = None
    """Collectives inside the stages of a pipeline, and what is sent between them, where axes split those."""
    partial: set[str] = field(default_factory=set)
    """Parameters of whose gradient several ranks of one operation hold a term."""
    tied: Counter[str] = field(default_factory=Counter)
    """Parameters of whose gradient ranks with other modules hold a term, and along how many axes they do."""
    earlier: set[str] = field(default_factory=set)
    """Parameters that ranks before this one hold, too."""
    separate: dict[str, Parameter] = field(default_factory=dict)
    """Parameters whose gradients are summed over fewer ranks than the others', and which are not sharded."""
    alive: float = 1.0
    """Activations that are kept at their most, over those of one microbatch."""
    after: list[Callable[[], None]] = field(default_factory=list)
    """What can be added only when all axes have been gone through."""
    parameters: Mapping[str, Parameter] | None = None
    """What a rank computes with, where the trace has what it keeps of them."""

    def add(self, found: tuple[Trace, Cost]) -> None:
        self.trace, added = found
        self.total += added

    @property
    def unsharded(self) -> Trace:
        """The trace with the parameters that a rank computes with."""
        return self.trace if self.parameters is None else replace(self.trace, parameters=dict(self.parameters))

    @staticmethod
    def trained(parameters: Mapping[str, Parameter]) -> list[nn.Parameter]:
        return [_parameter(p.shape, p.dtype) for p in parameters.values() if p.trained]


def cost(
    plan: Plan,
    trace: Trace,
    optimizer: torch.optim.Optimizer,
    *,
    found: Mapping[str, Any] | None = None,
    place: Mapping[str, int] | None = None,
    ahead: bool = False,
    server: int | None = None,
    stages: StageTraffic | None = None,
) -> Cost:
    """Of a step under ``plan``. ``trace`` is of one microbatch of one rank, as if nothing were split; ``found`` what
    the axes were found to act on (``axes.find``), ``place`` the rank's index along the pipeline or branch axis;
    ``ahead``: see ``Shard.cost``. ``server``: of that model server, not of a rank.
    ``stages``: collectives inside and sends between the stages of a pipeline whose ranks split more than samples: see
    ``stage_traffic``.

    ``held`` is what there is at its most, by kind: weights, gradients, optimizer, activations, and what is gathered.
    """
    if server is not None:
        return server_cost.server(_payload(plan, trace), state_bytes(optimizer), workers=plan.data, index=server)
    joined = plan.shares // plan.data if plan.staleness else plan.shares
    outer, plan = plan, plan.worker if plan.worker_size > 1 else plan  # what ranks of one worker do among themselves
    costing = Costing(plan, trace, place or {}, ahead, found=found or {}, stages=stages)
    for axis in (axis for axis in ORDER if axis.on(plan, nn.Module(), "cpu")):
        finding = costing.found.get(axis.word)
        if finding is None and axis.cost_needs_finding:
            raise ValueError(f"{plan}: its cost depends on what {axis.word}= acts on, which axes.find finds")
        axis.cost(costing, finding)
    if plan.partitions_modules or plan.tensor > 1 or plan.expert > 1:
        costing.total += across.cost(len(costing.partial | costing.tied.keys()), plan.shares * plan.context)
    if costing.separate:
        own = costing.separate.values()
        costing.total += allreduce.cost(costing.trained(costing.separate), plan.data * plan.shard * plan.context)
        costing.total += Cost(held={"weights": sum(p.bytes for p in own)})
    if not plan.cuts:
        rest = {name: p for name, p in costing.trace.parameters.items() if name not in costing.separate}
        own = replace(costing.trace, parameters=rest)
        costing.total += Cost(held={"weights": own.parameter_bytes}) + _exchange(plan, own)
    tied = [p for name, p in costing.trace.parameters.items() if p.trained for _ in range(costing.tied[name])]
    if tied:
        summed = sum(p.bytes for p in tied)
        costing.total += Cost(calls={"all_reduce": len(tied)}, moved={"all_reduce": summed})
    for step in costing.after:
        step()
    if outer.joins_batchnorms:
        served = outer.server > 0 and outer.worker_size == 1
        costing.total += batchnorm.cost(costing.unsharded, joined, plan.microbatches, served=served)
    if outer.worker_size > 1:
        costing.total += _worker_group(outer, _payload(outer, trace), costing)
    if not outer.server:
        costing.total += _optimizer(plan, costing.trace, optimizer)
    return costing.total + Cost(held={"activations": round(costing.trace.cost.kept * costing.alive)})


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
    def laid_out(twin: nn.Module) -> Iterator[dict[str, CountingGroup]]:
        groups: dict[str, CountingGroup] = {}
        if split is not None:
            group = groups["tensor"] = CountingGroup(ranks.get("tensor", 0), split.degree)
            stream = Stream(group)
            for region in split.regions:
                cut(twin, region, group, stream)
        if sequence is not None:
            group = groups["context"] = CountingGroup(ranks.get("context", 0), sequence.degree)
            begin(twin, sequence, group)
        with guarded():
            yield groups

    return count(found, model, objective, content, laid_out)


def _optimizer(plan: Plan, trace: Trace, optimizer: torch.optim.Optimizer) -> Cost:
    state = state_bytes(optimizer)
    if plan.offload == "optimizer":
        return offload_cost(trace, state)
    kept = sum(sum(state.of(p.shape, p.dtype)) for p in trace.parameters.values() if p.trained and prod(p.shape))
    return Cost(host={"optimizer": kept}) if plan.offload == "parameters" else Cost(held={"optimizer": kept})


def _exchange(plan: Plan, trace: Trace) -> Cost:
    """Of how the gradients of a model that each rank holds whole become weights."""
    trained = Costing.trained(trace.parameters)
    if plan.server:
        found, own = server_cost.worker(_payload(plan, trace)), sum(p.nbytes for p in trained)
        return found + Cost(held={"weights": -own})  # which are counted already
    if plan.exchange == "allreduce":
        return allreduce.cost(trained, plan.shares * plan.context)
    running = [prod(b.shape) for name, b in trace.buffers.items() if name.endswith(("running_mean", "running_var"))]
    outer = plan.exchange == "diloco"
    met = local.cost(trained, plan.data, outer=outer, overlap=plan.overlap, running=running)
    each = lambda many: {name: round(count / plan.every) for name, count in many.items()}
    return Cost(held=met.held, calls=each(met.calls), moved=each(met.moved))


def _worker_group(plan: Plan, payload: server_cost.Payload, costing: Costing) -> Cost:
    """Of the memory through which the ranks of a worker send gradients and get weights. What ranks before this one hold
    too, those send."""
    held, running = costing.trace, set(payload.running.names)
    tensors = {name: p.bytes for name, p in held.parameters.items() if p.trained}
    tensors |= {name: _tensor(b.shape, b.dtype).nbytes for name, b in held.buffers.items() if name in running}
    up, down = sum(size for name, size in tensors.items() if name not in costing.earlier), sum(tensors.values())
    return server_cost.worker_group(payload, up, down, workers=plan.data, ranks=plan.worker_size)


def _payload(plan: Plan, trace: Trace) -> server_cost.Payload:
    trained = {name: _parameter(p.shape, p.dtype) for name, p in trace.parameters.items() if p.trained}
    kept = ("running_mean", "running_var", "num_batches_tracked")
    running = {name: _tensor(b.shape, b.dtype) for name, b in trace.buffers.items() if name.endswith(kept)}
    return server_cost.Payload.holding(trained, running, servers=plan.server, compress=plan.compress)


def _tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _parameter(shape: tuple[int, ...], dtype: str) -> nn.Parameter:
    return nn.Parameter(_tensor(shape, dtype))
