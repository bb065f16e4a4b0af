"""Pipeline parallelism: the model is cut into stages, each on its own rank, and microbatches flow through them.

A stage is a range of what one recorded step of training does: forward and loss. Its rank keeps the modules that it
runs, under their own names, and is sent the tensors that cross the cut before it. The batch, targets and all, goes to
every rank; the loss is computed on the last. In what order the ranks work: see schedule/orders.py.

    memory    a rank's own parameters, and its activations for as many microbatches as its schedule keeps
    traffic   what crosses a cut, for each microbatch: forward, and its gradient back
    bubble    about (p - 1) / (m + p - 1) of the time, by the schedule
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from meshfit.axes.axis import Axis, Splits
from meshfit.axes.expert import balance
from meshfit.axes.pipeline.program import Replayed
from meshfit.axes.pipeline.staged import Staged
from meshfit.axes.pipeline.stages import FoundStages, pipeline_of
from meshfit.comm.transport import Transport
from meshfit.plan import Plan
from meshfit.schedule.issue import pairs
from meshfit.schedule.orders import schedule

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing


class PipelineAxis(Axis):
    word = "pipeline"
    splits = frozenset({Splits.MODULES})

    def refuse(self, plan: Plan, model: nn.Module) -> None:
        schedule(plan.schedule, plan.pipeline, plan.microbatches, plan.chunks or None)  # refuses what it cannot take

    def find(self, study: "Study") -> FoundStages:
        strategy = replace(pipeline_of(study.plan), atoms=study.closed())
        with balance.recorded(study.model):
            found = strategy.find(study.model, study.objective, study.batch, device=study.device, deal=study.deal)
        study.prove(Replayed(study.objective, share=found.share, atoms=found.atoms))
        study.notes += found.notes
        return found

    def apply(self, placed: "Placed", finding: FoundStages) -> Staged:
        group = placed.mesh.over("pipeline")
        assert group is not None
        strategy = replace(pipeline_of(placed.plan), atoms=finding.atoms)
        staged = Staged.of(strategy, placed.model, finding, placed.mesh.stage, group)
        staged.transport = Transport(group, placed.device, pairs(strategy.schedule))
        return staged

    def cost(self, costing: "Costing", finding: FoundStages | None) -> None:
        strategy, whole, stage = pipeline_of(costing.plan), costing.trace, costing.place.get("pipeline", 0)
        stages, plan, inner = costing.stages, costing.plan, costing.found.get("branch")
        if stages is None and (plan.tensor > 1 or plan.context > 1) and not costing.estimates:
            raise ValueError(f"{plan}: its cost depends on what is split inside stages: stage_traffic says so")
        if inner is None:
            known = None if finding is None or finding.trace is not whole else finding.cut
            within, cut = whole, known or strategy.cut_of(whole)
        else:
            within, cut = inner.part_in_stages(costing.place.get("branch", 0))
        sent = None if stages is None else stages.sent
        trace, added, costing.alive = strategy.cost(within, stage, cut, sent=sent)
        costing.add((trace, added))
        if stages is not None:
            costing.total += stages.cost(strategy.stages_of(stage), whole, microbatches=plan.microbatches)
        costing.tied.update(strategy.tied(whole, cut if inner is None else inner.stages))
        before = (number for other in range(stage) for number in strategy.stages_of(other))
        costing.earlier |= {name for number in before for name in cut.parameters[number]}
