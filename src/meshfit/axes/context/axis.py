"""Context parallelism: sequences over several devices. Each has some positions of every sample, and all weights.

What is computed of each position by itself (norms, MLPs, heads, losses) a rank does for its own. In attention its
queries meet the keys and values of all positions, gathered for that. What positions share otherwise is summed or
gathered where it is needed, and computed on the whole where nothing else is known to be right: see ``sequence``.

    memory    activations about 1/n; keys and values of the layer at hand whole; weights, gradients and optimizer whole
    traffic   keys and values of every layer: gathered forward, their gradients scattered backward, a microbatch; and
              gradients are summed over these ranks as over copies
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from meshfit.anatomy.copies import study
from meshfit.anatomy.operations import FusedAttention, MatrixProduct, Operation, divided, fewer_rows
from meshfit.anatomy.trace import Trace
from meshfit.axes.axis import Applied, Axis, Splits
from meshfit.axes.context.check import check
from meshfit.axes.context.few_blocks import with_few_blocks
from meshfit.axes.context.find import Step, find, shortened, some
from meshfit.axes.context.piece import guarded
from meshfit.axes.context.plan import ContextPlan, begin
from meshfit.axes.counted import HALVES, counted_cost
from meshfit.axes.kept import kept_path, read_kept, write_kept
from meshfit.axes.prove import Refused
from meshfit.axes.tensor.program import program_of
from meshfit.comm.group import RankGroup
from meshfit.cost import Cost
from meshfit.errors import PlanError
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing


def plan_context(
    model: nn.Module, step: Step, batch: Any, degree: int, wholes: Collection[str] = (), attention: str = "auto"
) -> ContextPlan:
    """Where to cut ``model``, which stays as it is; proven on samples of the data, or before, of the same model and
    operations. Raises ``Refused`` if not right. ``wholes``: modules that must be given all positions."""
    program = program_of(model, step, batch)
    path = kept_path("context-plans", model, program, degree, sorted(wholes), attention)
    if (known := read_kept(path, ContextPlan)) is not None:
        return known
    twin = study(model)
    found = find(twin, step, batch, degree, wholes, attention)
    if found.beginnings:
        _check(twin, step, batch, found)
        write_kept(path, found)
    return found


def prove(model: nn.Module, step: Step, batch: Any, plan: ContextPlan) -> None:
    """Of another ``step`` than the one that ``plan`` was found with. Raises ``Refused`` if it is not right."""
    _check(study(model), step, batch, plan)


def _check(twin: nn.Module, step: Step, batch: Any, plan: ContextPlan) -> None:
    few = some(shortened(batch, plan.length), plan.samples)
    thin = with_few_blocks(quiet(twin), step, few, [each.module for each in plan.beginnings])
    there = dict(thin.named_modules())
    check(thin, step, batch, replace(plan, wholes=tuple(path for path in plan.wholes if path in there)))


def quiet(model: nn.Module) -> nn.Module:
    """Without dropout: ranks draw other numbers than one device. In place."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
            module.p = 0.0
    return model


HIDDEN = {("all_gather", phase): "attention" for phase in ("forward", "backward")}
"""Keys and values of the others come while a rank attends to its own: see causal.py."""


def context_cost(trace: Trace, plan: ContextPlan, *, microbatches: int = 1, half: str = "") -> tuple[Trace, Cost]:
    """Of a step on one rank, beside the sum of the gradients. Collectives are those counted when the plan was made;
    activations are its share of those of one device."""

    def less(number: int) -> int:
        return round(number * plan.kept)

    rows = {op.m for e in trace.events for op in e.cost.forward if isinstance(op, MatrixProduct) and op.batch == 1}
    ways = dict(plan.attended)
    by_heads = bool(ways.get("ulysses")) and not ways.get("gather")

    def own(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        heads = [by_heads and isinstance(op, FusedAttention) for op in operations]
        return tuple(
            divided(op, plan.degree) if whole else fewer_rows(op, plan.degree, rows)
            for op, whole in zip(operations, heads, strict=True)
        )

    events = tuple(
        replace(
            event,
            cost=replace(
                event.cost,
                forward=own(event.cost.forward),
                backward=own(event.cost.backward),
                again=own(event.cost.again),
                flops=event.cost.flops // plan.degree,
                flops_backward=event.cost.flops_backward // plan.degree,
                kept=less(event.cost.kept),
                passed=event.cost.passed // plan.degree,
                uses=tuple(replace(use, bytes=less(use.bytes)) for use in event.cost.uses),
            ),
        )
        for event in trace.events
    )
    traffic = ((1, each) for each in plan.traffic)
    how: dict[str, Any] = {"axis": "context", "degree": plan.degree, "hidden": HIDDEN}
    added = counted_cost(traffic, trace, samples=plan.samples, microbatches=microbatches, half=half, **how)
    return replace(trace, events=events), added


class ContextAxis(Axis):
    word = "context"
    splits = frozenset({Splits.SEQUENCE})
    cost_needs_finding = True

    def find(self, study: "Study") -> ContextPlan:
        plan, experts = study.plan, study.found("expert")
        wholes = () if experts is None else tuple(mixture.module for mixture in experts.mixtures)
        with study.copying(), _proven(plan):
            found = plan_context(study.model, study.loss, study.batch, plan.context, wholes, plan.attention)
        if not found.beginnings:
            headline, *facts = found.refusal()
            raise PlanError(f"{plan}: {headline}", *facts, _without_context(plan))
        ways = dict(found.attended)
        if plan.attention == "ulysses" and (ways.get("gather") or not ways):
            calls = f"{ways.get('gather', 0)} of {sum(ways.values())} calls of attention"
            raise PlanError(
                f"{plan}: {calls} cannot exchange positions for heads"
                if ways
                else f"{plan}: the model does not call scaled_dot_product_attention on tensors that are cut",
                f"their heads, of queries and of keys, would have to divide by {plan.context}" if ways else "",
                f"{replace(plan, attention='auto')} works",
            )
        study.notes += found.explain()
        return found

    def closed(self, finding: ContextPlan) -> Iterable[str]:
        return (each.module for each in finding.beginnings)

    def prove(self, study: "Study", step: Step, finding: ContextPlan) -> None:
        with _proven(study.plan):
            prove(study.model, step, study.batch, finding)

    def apply(self, placed: "Placed", finding: ContextPlan) -> "ContextSplit":
        group = placed.mesh.over("context")
        assert group is not None
        placed.groups["context"] = ranks = RankGroup(group)
        begin(placed.model, finding, ranks)
        return ContextSplit(placed.model, group)

    def cost(self, costing: "Costing", finding: ContextPlan) -> None:
        plan = finding if costing.stages is None else replace(finding, traffic=())
        half = HALVES.get(costing.plan.precision, "")
        trace, added = context_cost(costing.trace, plan, microbatches=costing.plan.microbatches, half=half)
        if costing.plan.pipeline > 1 and costing.stages is None:  # the part of them that lies in this rank's stages
            share = costing.trace.cost.flops / max(1, costing.whole.cost.flops)
            added = replace(added, collectives=tuple(replace(c, count=c.count * share) for c in added.collectives))
        costing.add((trace, added))


@contextmanager
def _proven(plan: Plan) -> Iterator[None]:
    """Around the proof of a context plan."""
    try:
        yield
    except Refused as refused:
        raise PlanError(
            f"{plan}: cut over {plan.context} devices this model does not compute what it does on one",
            f"on a few samples, in double precision: {refused}",
            _without_context(plan),
        ) from refused


def _without_context(plan: Plan) -> str:
    return f"{plan.without('context')} works"


class ContextSplit(Applied):
    """A model that computes some positions of every sequence on this rank."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup):
        self.model, self.group, self._guard = model, group, ExitStack()
        self._guard.enter_context(guarded())

    def close(self) -> None:
        self._guard.close()
