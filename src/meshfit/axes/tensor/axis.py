"""Tensor parallelism: one operation over several devices. Each holds a share of the channels of most weights.

Regions between column and row weights are computed by shares, with one sum over the ranks at their end and one of the
gradients at their beginning; other large layers are cut by output channels, and what they return is gathered. All ranks
see the same samples and, outside regions, compute the same. What is cut, and where, is a value: ``region.TensorPlan``.

    memory    1/n of what is cut: weights, gradients, optimizer state, and the activations inside regions
    traffic   a transformer block: two all-reduces of its activations forward and two backward, a microbatch
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from meshfit.axes.axis import Axis, Splits
from meshfit.axes.counted import HALVES
from meshfit.axes.cut_parameters import CutParameters
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.tensor.cost import tensor_cost
from meshfit.axes.tensor.cut import split_model
from meshfit.axes.tensor.region import TensorPlan
from meshfit.axes.tensors import buffers_to
from meshfit.errors import PlanError
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing


class TensorAxis(Axis):
    word = "tensor"
    splits = frozenset({Splits.OPERATIONS})
    cost_needs_finding = True

    def find(self, study: "Study") -> TensorPlan:
        from meshfit.axes.tensor.cache import planned  # the first rank alone plans

        plan = study.plan
        with study.copying():
            by_rows = splits_sequence(plan, study.device)
            split = planned(study.model, study.loss, study.few, plan.tensor, by_rows=by_rows)
        if plan.branch > 1:
            split = split.inside_modules()
        if not split.regions:
            raise PlanError(
                f"{plan}: tensor={plan.tensor} splits nothing of this model",
                *(f"{name}: {why}" for name, why in list(split.why.items())[:3]),
                *split.notes[:2],
                f"{plan.without('tensor')} works",
            )
        study.notes += split.explain()
        return split

    def closed(self, finding: TensorPlan) -> Iterable[str]:
        for region in finding.regions:
            yield from filter(None, region.inner or (region.module,))

    def apply(self, placed: "Placed", finding: TensorPlan) -> CutParameters:
        buffers_to(placed.model, placed.device)  # moved after they were cut they would not be known as cut
        group = placed.mesh.over("tensor")
        assert group is not None
        model = placed.model
        modules = {path for path, module in model.named_modules() if not isinstance(module, Shell)}
        tensors = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
        parts = split_model(model, finding.part(modules, tensors), group)
        parts.partial = finding.shared
        placed.groups["tensor"] = parts.ranks
        return parts

    def cost(self, costing: "Costing", finding: TensorPlan) -> None:
        part = finding.only(costing.trace)
        if costing.stages is not None:
            part = replace(part, regions=tuple(replace(region, traffic=()) for region in part.regions), traffic=())
        half = HALVES.get(costing.plan.precision, "")
        costing.add(tensor_cost(costing.trace, part, microbatches=costing.plan.microbatches, half=half))
        costing.partial |= set(finding.shared)


def splits_sequence(plan: Plan, device: str) -> bool:
    """Whether what lies between tensor-parallel operations is split by tokens."""
    by_default = plan.sequence == "auto" and device == "cuda" and not plan.partitions_modules
    return plan.tensor > 1 and (plan.sequence == "split" or by_default)
