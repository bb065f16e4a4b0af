"""Expert parallelism: the experts of a mixture over several devices, each with samples of its own.

A device holds count/n of the experts of each mixture, and all else. The rows that its router sends to an expert
elsewhere travel there and back: see ``experts``. An expert's gradient is complete on the device that holds it, for the
samples of all n; what is not an expert is summed over them as under ``data``.

    memory    1/n of the experts: weights, gradients, optimizer state
    traffic   of R rows to experts, a mixture and a microbatch: all_to_all of R rows there and R back, and the same for
              gradients; one small all_gather of counts. How many rows a device takes is the router's choice: R is what
              it sends, and on average what it takes
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from meshfit.anatomy.operations import MatrixProduct, Operation
from meshfit.anatomy.recompute import recomputed_blocks
from meshfit.anatomy.record_build import tied
from meshfit.anatomy.trace import EventCost, Trace
from meshfit.axes.axis import Axis, Splits
from meshfit.axes.counted import float_bytes, growth
from meshfit.axes.cut_parameters import CutParameters, Undo
from meshfit.axes.expert.mixture import ExpertPlan
from meshfit.axes.expert.spread import spread
from meshfit.axes.expert.travel import HEADER, Load, Travel
from meshfit.axes.mesh import OWN_EXPERT
from meshfit.axes.tensor.region import TensorPlan
from meshfit.axes.tensors import check_ties
from meshfit.comm.group import RankGroup
from meshfit.cost import CollectiveCall, Cost, tallied
from meshfit.data import tree
from meshfit.errors import PlanError
from meshfit.events import current
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing


def spread_experts(
    model: nn.Module, plan: ExpertPlan, group: dist.ProcessGroup, *, reports: bool = True
) -> "ExpertSplit":
    """Cut ``model`` in place. ``reports``: whether this copy's load goes to the events."""
    ties, ranks = tied(model), RankGroup(group)
    lengths = {name: len(p) for name, p in model.named_parameters() if p.dim()}
    plan = plan.only(lengths).fitted(lengths)
    load = Load([mixture.module for mixture in plan.mixtures], reports and ranks.rank == 0)
    undo = [
        step
        for number, mixture in enumerate(plan.mixtures)
        for step in spread(model, mixture, Travel(ranks, number, mixture.count, load))
    ]
    check_ties(model, ties)
    return ExpertSplit(model, plan, ranks, load, undo)


def expert_cost(
    trace: Trace, plan: ExpertPlan, *, microbatches: int = 1, again: Collection[str] = ()
) -> tuple[Trace, Cost]:
    """Of a step on one rank, if as many rows come as are sent: over all ranks that is exact, whatever the router does.
    ``again``: blocks that are computed again in backward. Auxiliary losses are not in it."""
    plan = plan.only(trace.parameters)
    cuts = plan.fitted({name: p.shape[0] for name, p in trace.parameters.items() if p.shape}).cuts
    parameters = {}
    for name, p in trace.parameters.items():
        if name in cuts:
            shape = (cuts[name].own, *p.shape[1:])
            p = replace(p, shape=shape, bytes=p.bytes * prod(shape) // max(1, prod(p.shape)))
        parameters[name] = p
    wide, grown = float_bytes(trace), growth(trace, plan.samples)
    calls = []
    for mixture in plan.mixtures:
        inside = any(f"{mixture.module}.".startswith(f"{path}.") for path in again)
        times, forwards = mixture.calls * microbatches, 2 if inside else 1
        numbers = HEADER + (2 if mixture.listed else 1) * mixture.count
        for phase, passes in (
            ("forward", 1),
            ("backward", forwards),
        ):  # again: in backward
            how = {"degree": plan.degree, "axis": "expert", "phase": phase}
            count, size = times * (passes - (phase == "backward")), 8 * plan.degree * numbers
            calls.append(CollectiveCall("all_gather", size, count=count, dtype="int64", **how))
            for width in (mixture.width, mixture.made):
                size = mixture.rows * width * wide * grown
                calls.append(CollectiveCall("all_to_all", size, count=times * passes, dtype="float32", **how))
    added = Cost(collectives=tallied(calls))
    shapes = {name: p.shape for name, p in trace.parameters.items() if name in cuts and len(p.shape) == 3}
    events = tuple(
        replace(event, cost=_of_all_ranks(event.cost, held, plan.degree)) if held else event
        for event in trace.events
        for held in [[shapes[name] for name in event.parameters if name in shapes]]
    )
    return replace(trace, parameters=parameters, events=events), added


def _of_all_ranks(cost: EventCost, shapes: list[tuple[int, ...]], degree: int) -> EventCost:
    """Fewer experts, each with the rows of all ranks: as much arithmetic, in larger products."""

    def own(operation: Operation) -> Operation:
        if not isinstance(operation, MatrixProduct) or not any(operation.batch == shape[0] for shape in shapes):
            return operation
        name = "k" if any({operation.m, operation.n} == {*shape[1:]} for shape in shapes) else "m"
        return replace(operation, batch=max(1, operation.batch // degree), **{name: getattr(operation, name) * degree})

    return replace(cost, forward=tuple(map(own, cost.forward)), backward=tuple(map(own, cost.backward)))


class ExpertAxis(Axis):
    word = "expert"
    splits = frozenset({Splits.SAMPLES, Splits.EXPERTS})
    cost_needs_finding = True

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        if plan.offloads("parameters"):
            raise PlanError(
                f"{plan}: experts that are spread stay on their devices",
                f"{replace(plan, offload='optimizer')} works",
            )

    def find(self, study: "Study") -> ExpertPlan:
        from meshfit.axes.expert.find import plan_experts  # the first rank alone plans

        plan, batch = study.plan, study.few
        samples = max((len(t) for t in tree.tensors(batch) if t.dim()), default=0)
        with study.copying():
            experts = plan_experts(study.model, lambda twin: study.objective(twin, batch), plan.expert, samples)
        if (split := study.found("tensor")) is not None:
            experts = experts.without(_cut_by_experts(experts, split))
        if not experts.mixtures:
            raise _nothing(plan, experts)
        study.notes += experts.explain()
        return experts

    def closed(self, finding: ExpertPlan) -> Iterable[str]:
        return (mixture.module for mixture in finding.mixtures)

    def apply(self, placed: "Placed", finding: ExpertPlan) -> "ExpertSplit":
        group, plan = placed.mesh.groups[OWN_EXPERT], placed.plan
        assert group is not None
        repeats = placed.mesh.place["tensor"] or placed.mesh.place["context"]  # ranks that send the same rows
        first = placed.mesh.share < plan.expert and not repeats
        owned = spread_experts(placed.model, finding, group, reports=first)
        owned.group = placed.mesh.over("expert")
        return owned

    def cost(self, costing: "Costing", finding: ExpertPlan) -> None:
        plan = costing.plan
        again = () if plan.recomputed_blocks == "none" else recomputed_blocks(costing.trace)
        costing.add(expert_cost(costing.trace, finding, microbatches=plan.microbatches, again=again))
        own = {name: p for name, p in costing.trace.parameters.items() if name in finding.cuts}
        costing.separate |= own


def _cut_by_experts(experts: ExpertPlan, split: TensorPlan) -> dict[str, str]:
    """Mixtures whose parameters the tensor axis cuts along the dim of the experts, and why they stay as they are."""
    cuts = split.cuts
    return {
        mixture.module: f"tensor={split.degree} cuts {each.name} by experts already"
        for mixture in experts.mixtures
        for each in mixture.cuts
        if not mixture.listed and each.name in cuts and cuts[each.name].dim == each.dim
    }


def _nothing(plan: Plan, experts: ExpertPlan) -> PlanError:
    """The refusal of a model without experts that could be spread."""
    elsewhere = f"{plan.without('expert')} works"
    if not experts.why and experts.batched:
        return PlanError(
            f"{plan}: the model has no experts that could be spread",
            *experts.batched[:2],
            "if these are experts: slices that one batched product multiplies are spread only where their module is"
            " given rows, the experts chosen for each, and their weights",
            elsewhere,
        )
    if not experts.why:
        return PlanError(
            f"{plan}: the model has no experts to spread",
            "experts are slices of a module's parameters that is given rows, their choices and weights, or modules in"
            " a list",
            elsewhere,
        )
    fitting = [
        n for n in range(2, min(experts.counts, default=0) + 1) if all(count % n == 0 for count in experts.counts)
    ]
    degrees = " or ".join(f"expert={n}" for n in fitting)
    return PlanError(
        f"{plan}: expert={plan.expert} spreads nothing of this model",
        *(f"{path}: {why}" for path, why in list(experts.why.items())[:3]),
        f"{degrees} divides them" if fitting and plan.expert not in fitting else "",
        elsewhere,
    )


class ExpertSplit(CutParameters):
    """A model whose experts are spread over ranks."""

    meets = True

    def __init__(self, model: nn.Module, plan: ExpertPlan, ranks: RankGroup, load: Load, undo: list[Undo]):
        super().__init__(model, plan.cuts, ranks, undo)
        self.load = load

    def after_backward(self) -> None:
        self.load.tell(current())
