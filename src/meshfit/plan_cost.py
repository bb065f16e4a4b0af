"""What a plan costs on one rank: the costs of its axes, in the order in which they are applied.

Each maps the trace of what a rank runs to the trace of what it runs along that axis, and adds what it costs beside.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.probe_optimizer import StateBytes, needs_whole, state_bytes
from meshfit.anatomy.trace import Parameter, Trace
from meshfit.axes.context.axis import ContextAxis
from meshfit.axes.context.piece import guarded
from meshfit.axes.context.plan import ContextPlan, begin
from meshfit.axes.data import batchnorm
from meshfit.axes.offload.optimizer import offload_cost
from meshfit.axes.order import ORDER
from meshfit.axes.pipeline.stages import FoundStages, pipeline_of
from meshfit.axes.pipeline.traffic import StageTraffic, count
from meshfit.axes.tensor.axis import TensorAxis
from meshfit.axes.tensor.cut import cut
from meshfit.axes.tensor.region import TensorPlan
from meshfit.checkpoint.pieces import boxes_of
from meshfit.comm.draws import Stream
from meshfit.comm.group import CountingGroup
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.data import tree
from meshfit.exchange import across, allreduce, local, server_cost
from meshfit.optimizers import Optimizers
from meshfit.plan import DEGREES, Plan
from meshfit.torch_private.tensors import set_grad_dtype
from meshfit.whole_step import whole_step_cost

SUMMED_OVER = ("data", "shard", "expert", "context")
"""Axes over which gradients are summed."""


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
    gathered: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By parameter: the number of the unit that it is gathered with, and the bytes of that."""
    slices: Callable[[], dict[str, list[tuple[int, int]]]] = dict
    """By parameter: the elements that each rank of the shard axis owns."""
    alive: float = 1.0
    """Activations that are kept at their most, over those of one microbatch."""
    after: list[Callable[[], None]] = field(default_factory=list)
    """What can be added only when all axes have been gone through."""
    parameters: Mapping[str, Parameter] | None = None
    """What a rank computes with, where the trace has what it keeps of them."""
    estimates: bool = False
    """Where ``stages`` is not given, collectives inside a pipeline's stages are estimated from those of the whole."""

    def __post_init__(self) -> None:
        self.whole = self.trace

    def add(self, found: tuple[Trace, Cost]) -> None:
        self.trace, added = found
        self.total += added

    @property
    def unsharded(self) -> Trace:
        """The trace with the parameters that a rank computes with."""
        return self.trace if self.parameters is None else replace(self.trace, parameters=dict(self.parameters))

    @staticmethod
    def trained(parameters: Mapping[str, Parameter]) -> list[nn.Parameter]:
        return [_parameter(p.shape, p.dtype, p.stepped) for p in parameters.values() if p.trained]


def cost(plan: Plan, trace: Trace, optimizer: torch.optim.Optimizer | Optimizers, **how: Any) -> Cost:
    """Of a step under ``plan``; ``how``: see ``costed``.

    ``held`` is what there is at its most, by kind: weights, gradients, optimizer, activations, what is gathered, and
    copies of weights that autocast has rounded. For those, and for activations, ``trace`` must be of the plan's
    precision (``traced(plan=...)``).
    """
    return costed(plan, trace, optimizer, **how).total


def costed(
    plan: Plan,
    trace: Trace,
    optimizer: torch.optim.Optimizer | Optimizers,
    *,
    found: Mapping[str, Any] | None = None,
    place: Mapping[str, int] | None = None,
    ahead: bool = False,
    stages: StageTraffic | None = None,
    estimates: bool = False,
    state: StateBytes | None = None,
) -> Costing:
    """The cost of a step, and the trace of what the rank runs, its operations among it. ``trace`` is of one microbatch
    of one rank, as if nothing were split.

    found       what the axes were found to act on (``axes.find``)
    place       the rank's index along the pipeline or branch axis
    ahead       see ``Shard.cost``
    stages      collectives inside and sends between the stages of a pipeline whose ranks split more than samples: see
                ``stage_traffic``
    estimates   see ``Costing``
    state       what ``optimizer`` keeps, if that is known
    """
    joined = plan.shares // plan.data if plan.staleness else plan.shares
    outer, plan = plan, plan.worker if plan.worker_size > 1 else plan  # what ranks of one worker do among themselves
    costing = Costing(plan, trace, place or {}, ahead, found=found or {}, stages=stages, estimates=estimates)
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
    how = {"axis": "pipeline" if plan.pipeline > 1 else "branch", "phase": "step", "once": True}
    summed = (CollectiveCall("all_reduce", p.grad_bytes, 2, dtype=p.stepped or p.dtype, **how) for p in tied)
    costing.total += Cost(collectives=tallied(summed))
    for step in costing.after:
        step()
    if outer.joins_batchnorms:
        served = outer.server > 0 and outer.worker_size == 1
        costing.total += batchnorm.cost(costing.unsharded, joined, plan.microbatches, served=served)
    if outer.worker_size > 1:
        costing.total += _worker_group(outer, _payload(outer, trace), costing)
    if not outer.server:
        costing.total += _optimizer(plan, costing.trace, state or state_bytes(optimizer))
        costing.total += _whole_steps(plan, trace, costing, Optimizers.of(optimizer))
    if rounded := _rounded(trace, costing):
        costing.total += Cost(held={"rounded": rounded})
    costing.total += Cost(held={"activations": round(costing.trace.cost.kept * costing.alive)})
    costing.total += Cost(passed=_passed(costing))
    costing.total = replace(
        costing.total, collectives=tuple(_placed(outer, call) for call in costing.total.collectives)
    )
    return costing


def _placed(plan: Plan, call: CollectiveCall) -> CollectiveCall:
    """With the ranks between two of its group: axes lie from outer to inner, see axes/mesh.py."""
    if call.axis == "step":
        return replace(call, degree=plan.devices)
    if call.axis not in DEGREES:
        return call
    used = SUMMED_OVER if call.axis == "data" and call.degree > plan.data else (call.axis,)
    last = max(DEGREES.index(axis) for axis in used if getattr(plan, axis) > 1 or axis == used[0])
    return replace(call, stride=prod(getattr(plan, axis) for axis in DEGREES[last + 1 :]))


def _passed(costing: Costing) -> int:
    """What backward adds where most is held: going back through the events, activations become fewer and gradients of
    weights more; less than nothing, where there are no gradients yet when there are most activations. Those of a model
    that several ranks hold whole lie in buckets that stay; others are made in the backward of the first microbatch.
    Units that are gathered meanwhile may be smaller than the largest."""
    trace, gradients = costing.trace, costing.total.held.get("gradients", 0)
    users = {name: event.index for event in reversed(trace.events) for name in event.parameters}  # the first of each
    sizes = {name: p.grad_bytes for name, p in costing.unsharded.parameters.items() if p.trained}
    total, whole = max(sum(sizes.values()), 1), trace.cost.kept
    first = Counter[int]()  # bytes of gradients, by the event that first uses their weights: -1 for none
    for name, size in sizes.items():
        first[users.get(name, -1)] += size
    due = total
    kept, gathered, found = whole, _gathered(costing), [-whole]  # the end: all gradients, no activations
    plan = costing.plan
    made = (plan.cuts or plan.shares * plan.context == 1) and plan.microbatches == 1
    largest = max(gathered.values(), default=0)
    for event in reversed(trace.events):
        missing = gradients * due / total if made else 0
        missing += largest - gathered[event.index]
        found.append(round(kept + event.cost.passed - whole - missing))
        kept -= event.cost.kept
        due -= first[event.index]
    return max(found)


def _gathered(costing: Costing) -> dict[int, int]:
    """Bytes of the units that are there at each event on the way back: that in use and, fetched ahead, the one before
    it."""
    found, order = {}, [(-1, 0)]
    for event in costing.trace.events:
        used = {costing.gathered[name] for name in event.parameters if name in costing.gathered}
        order += [unit for unit in sorted(used) if unit != order[-1]]
        found[event.index] = order[-1][1] + (order[-2][1] if costing.ahead and len(order) > 2 else 0)
    return found


def _rounded(whole: Trace, costing: Costing) -> int:
    """Bytes of copies of weights in half precision: one of each for a forward and its backward, in a pipeline one for
    all microbatches. Weights that are gathered are rounded before."""
    if (costing.plan.cuts and costing.plan.zero == 3) or costing.plan.precision == "bf16-true":
        return 0
    computed = [p for p in costing.unsharded.parameters.values() if p.computed]
    if computed:
        return 0 if costing.plan.cuts else sum(p.bytes for p in computed) // 2
    found: dict[str, float] = {}
    for event in costing.trace.events:
        size = sum(whole.parameters[name].bytes for name in event.parameters if name in whole.parameters)
        for name in event.parameters if event.cost.rounded and size else ():
            if name in costing.unsharded.parameters:
                copy = costing.unsharded.parameters[name].bytes * event.cost.rounded / size
                found[name] = max(found.get(name, 0.0), copy)
    return round(sum(found.values()))


def microbatch(few: Any, plan: Plan, batch_size: int) -> Any:
    """As many samples as a rank takes at once: some of ``few``, or several times all of them."""
    samples = max(len(t) for t in tree.tensors(few) if t.dim())
    taken = torch.arange(ceil(batch_size / (plan.shares * plan.microbatches))) % samples
    return tree.rows(few, taken, samples)


def traced_stages(
    plan: Plan,
    model: nn.Module,
    objective: Callable[[nn.Module, Any], Any],
    content: Any,
    found: Mapping[str, Any],
    device: str,
    valued: Callable[[], nn.Module],
) -> tuple[Trace, StageTraffic | None]:
    """The trace that a plan with a pipeline is cut by, and the traffic of its stages where ``tensor=`` or ``context=``
    split them, for which ``valued`` returns the model with values."""
    splitting = [axis for axis in (TensorAxis(), ContextAxis()) if found.get(axis.word) is not None]
    atoms = tuple(path for axis in splitting for path in axis.closed(found[axis.word]))
    staged = replace(pipeline_of(plan), atoms=atoms).find(model, objective, content, device=device)
    assert staged.trace is not None
    if not splitting:
        return staged.trace, None
    parts = {"split": found.get("tensor"), "sequence": found.get("context")}
    return staged.trace, stage_traffic(staged, valued(), objective, content, **parts)


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


def _optimizer(plan: Plan, trace: Trace, state: StateBytes) -> Cost:
    if plan.offloads("optimizer"):
        return offload_cost([_states(plan, p, state) for p in trace.parameters.values() if p.trained])
    kept = sum(size for p in trace.parameters.values() if prod(p.shape) for size in _states(plan, p, state))
    return Cost(host={"optimizer": kept}) if plan.offloads("parameters") else Cost(held={"optimizer": kept})


def _whole_steps(plan: Plan, trace: Trace, costing: Costing, optimizers: Optimizers) -> Cost:
    """Of moving parameters that are cut to the ranks that step them whole. ``trace``: with whole shapes."""
    if plan.shard * plan.expert * plan.tensor == 1:
        return Cost()
    wanted = Counter(
        tuple(p.shape)
        for one in optimizers.each
        if needs_whole(one)
        for group in one.param_groups
        for p in group["params"]
    )
    experts, split = ({} if costing.found.get(w) is None else costing.found[w].cuts for w in ("expert", "tensor"))
    if not wanted:
        return Cost()
    boxes, sizes, slices = [], [], costing.slices()
    for name in costing.trace.parameters:
        p = trace.parameters[name]
        if not p.trained or not wanted[p.shape]:
            continue
        wanted[p.shape] -= 1
        held = [
            boxes_of(
                p.shape,
                slices[name][s] if name in slices else None,
                [(experts.get(name), e), (split.get(name), t)],
            )
            for s, e, t in product(range(plan.shard), range(plan.expert), range(plan.tensor))
        ]
        boxes.append(held)
        now = costing.trace.parameters[name]
        sizes.append((getattr(torch, now.dtype).itemsize, getattr(torch, now.stepped or now.dtype).itemsize))
    place = [costing.place.get(word, 0) for word in ("shard", "expert", "tensor")]
    rank = (place[0] * plan.expert + place[1]) * plan.tensor + place[2]
    return whole_step_cost(boxes, sizes, rank)


def _states(plan: Plan, p: Parameter, state: StateBytes) -> list[int]:
    """Bytes of what the optimizer keeps for a parameter; with ``states=bf16`` moments are half as large."""
    moment = 4 * prod(p.shape) if plan.states == "bf16" else -1
    sizes = state.of(p.shape, p.stepped or p.dtype) if p.trained else ()
    return [size // 2 if size == moment and p.shape else size for size in sizes]


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
    return replace(met, collectives=tuple(replace(c, count=c.count / plan.every) for c in met.collectives))


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


def _parameter(shape: tuple[int, ...], dtype: str, stepped: str = "") -> nn.Parameter:
    made = nn.Parameter(_tensor(shape, dtype))
    if stepped:
        set_grad_dtype(made, getattr(torch, stepped))
    return made
