"""The parts of a phase in a run: forward and backward over its microbatches, exchange, update."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshfit.axes.offload.optimizer import Offloaded, Offloads, as_it_is
from meshfit.axes.precision import LossScale
from meshfit.checkpoint.pieces import whole_of
from meshfit.checkpoint.state import canonical
from meshfit.exchange.across import Across
from meshfit.exchange.allreduce import AllReduce
from meshfit.exchange.assemble import cut_state, exchange_of
from meshfit.exchange.scatter import Scatter
from meshfit.exchange.update import Update
from meshfit.loss import batch_loss
from meshfit.loss.batch_loss import BatchLoss, Outputs
from meshfit.loss.gather import over as rows_over
from meshfit.loss.gather import refusing
from meshfit.loss.objective import LossDenominator
from meshfit.passes.loss_sum import LossSum
from meshfit.passes.pipeline import LocalStages, Pipelined
from meshfit.passes.whole import Passes
from meshfit.phases import TrainedPhase
from meshfit.rounded_step import RoundedStep
from meshfit.whole_step import WholeStep

if TYPE_CHECKING:
    from meshfit.run.run import Run


def make_phases(run: "Run", overs: list[LossDenominator]) -> list[TrainedPhase]:
    """The phases of a step, without what they do."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    agreed = run.world.size > 1 or run.plan.cuts or run.plan.server
    frozen = {name: p for name, p in run.model.named_parameters() if agreed and not p.requires_grad}
    made = []
    for asked, optimizers, over in zip(run.job.phases, run.optimizers, overs, strict=False):
        own = set(optimizers.parameters)
        others = [p for p in trained if p not in own] if len(run.optimizers) > 1 else []
        still = {name: p for name, p in frozen.items() if p in own}
        made.append(TrainedPhase(asked, optimizers, over, others, still))
    return made


def make_update(run: "Run", scale: LossScale | None, phase: TrainedPhase) -> Update:
    job, optimizers = run.job, phase.optimizers
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    parameters = [p for one in optimizers.each if one in run.whole_steps for g in one.param_groups for p in g["params"]]
    if parameters:
        around = step = WholeStep(run.placed, parameters)
        step.restrict(optimizers)
        run.stepped_whole |= step.boxes.keys()
    cut_state(optimizers, run.placed, run.stepped_whole)
    theirs = not callable(phase.asked.optimizer)  # an optimizer of the user's own is left as it is
    sparse = any(getattr(module, "sparse", False) for module in run.model.modules())  # no fused kernel takes it
    offload = None
    if run.plan.offloads("optimizer") or run.plan.rounds:
        moves = None if run.plan.offloads("optimizer") else False
        rounding = _rounding(run) if run.plan.rounds else as_it_is
        offload = Offloads(Offloaded(one, run.world.device, move=moves, around=rounding) for one in optimizers.each)
    return Update(
        optimizers,
        job.make_scheduler(optimizers, run.last_step, run.phases.index(phase)),
        clip=job.clip,
        scale=scale,
        average=run.average,
        may_fuse=not (theirs or sparse),
        around=around,
        offload=offload,
    )


def _rounding(run: "Run") -> RoundedStep:
    """How weights or states that are held in bf16 are stepped."""
    parameters, layouts = canonical(run)
    held = {
        p: whole_of(layouts[name].shape) if p in run.stepped_whole else layouts[name] for name, p in parameters.items()
    }
    names = {p: name for name, p in parameters.items()}
    states = torch.bfloat16 if run.plan.states == "bf16" else None
    return RoundedStep(held, names, states=states, seed=run.job.seed, step=lambda: run.step)


def make_exchange(run: "Run", phase: TrainedPhase) -> AllReduce | Scatter | Across:
    return exchange_of(run.placed, 2 * len(_names(run, phase.over) or ()))


def make_schedule(run: "Run", phase: TrainedPhase, scale: LossScale | None) -> Passes | Pipelined:
    placed, objective, device, over = run.placed, phase.asked.objective, run.world.device, phase.over
    whole = BatchLoss.of(objective, over, run.mesh.batch, device) if run.splits else None
    if whole is not None:
        objective = Outputs()
    loss_sum = LossSum(over, phase.exchange, scale, loss_replicas=run.plan.context, names=_names(run, over))
    if placed.staged is not None:
        whole_backward = not placed.layers.keys().isdisjoint(("shard", "branch", "expert"))
        return Pipelined(
            LocalStages.of(placed, objective, run.precision),
            loss_sum,
            seed=run.stream_seed,
            during=placed.during,
            split_backward=not whole_backward and run.plan.recomputed_blocks == "none",
            batch_loss=whole,
            buffers=placed.buffers,
        )
    if placed.branched is not None:
        objective = placed.branched.objective(objective, run.precision, device)
    counters = run.python_state().only(over.counters) if over.counters and run.plan.microbatches > 1 else None
    return Passes(
        run.model,
        objective,
        loss_sum,
        run.precision,
        device,
        placed.inside,
        placed.during,
        batch_loss=whole,
        gather=_gather(run),
        buffers=placed.buffers,
        counters=counters,
        gathered=str(run.plan) if run.plan.shard > 1 or run.plan.offloads("parameters") else "",
    )


def _names(run: "Run", over: LossDenominator) -> tuple[str, ...] | None:
    """Of the values that a step logs; None: it is alone, and any will do."""
    return None if run.alone else tuple(name for name, _ in over.logged)


def _gather(run: "Run") -> Callable[[Tensor], Tensor] | None:
    """What ``meshfit.gather`` does in a step."""
    if run.splits and (why := batch_loss.no_gather(run.plan)):
        return refusing(*why)
    return rows_over(run.mesh.batch)
