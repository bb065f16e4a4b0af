"""Recomputation: a block keeps its inputs, and backward computes again what forward threw away.

    full        all of the block: at most a third more arithmetic
    selective   what is cheap: norms, activations, softmax, dropout. Products, convolutions and attention kernels are
                kept, so that hardly any arithmetic is done twice

    memory   full: the inputs of every block; selective: those and the results of its products. Beside either, in
             backward, what one block keeps by itself
    traffic  that of the block's own forward, once more: global BatchNorm's

Gradients are those of a plain forward (on CPUs to the last bit). A block computed again sees what it saw at first
(random numbers, autocast, buffers, attributes, whether its samples count), and leaves the model as it found it: a
running statistic counts a batch once. What a block changes is learnt from its first call, for each mix of modules in
training and not. A block must not change its inputs in place: torch then refuses the backward.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshfit.anatomy.operations import Operation, part_of
from meshfit.anatomy.recompute import after_recompute, recomputed_blocks
from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import EventCost, Trace
from meshfit.axes.axis import Axis
from meshfit.axes.forward import wrap
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.recompute.call import Call, Changes, is_empty_cache
from meshfit.cost import Cost
from meshfit.data import tree
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Compute ``blocks`` again in backward."""

    word: str
    """ "selective" or "full"."""

    blocks: tuple[str, ...]
    """Paths of the modules computed again, none inside another: ("layers.0", ...)."""

    def apply(self, model: nn.Module) -> None:
        """In place, around each block's forward. Only where a gradient will be asked for: in training, with grad."""
        for path in self.blocks:
            module = model.get_submodule(path)
            wrap(module, lambda forward, module=module: _recomputed(module, forward, self.word == "selective"))

    def cost(self, trace: Trace) -> tuple[Trace, Cost]:
        """What is kept then, by the event that first keeps it, and the arithmetic done again, in its backward."""
        kept, again = after_recompute(trace, self.blocks, self.word)
        inside = {*again}
        events = tuple(
            replace(
                e,
                cost=replace(
                    e.cost,
                    kept=kept[e.index],
                    flops_backward=e.cost.flops_backward + again[e.index],
                    again=_again(e.cost, again[e.index]) if e.index in inside else (),
                ),
            )
            for e in trace.events
        )
        return replace(trace, events=events), Cost(flops=sum(again.values()))


def _again(cost: EventCost, flops: int) -> tuple[Operation, ...]:
    """Of its forward, what backward computes again."""
    return (
        cost.forward
        if flops == cost.flops
        else part_of(cost.forward, sum(op.flops for op in cost.forward) * flops / cost.flops)
    )


class RecomputeAxis(Axis):
    word = "recompute"

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        return plan.recomputed_blocks != "none"

    def find(self, study: "Study") -> tuple[str, ...]:
        if isinstance(study.trace, TraceError):
            study.notes.append(f"recompute: none, because the model cannot be traced ({study.trace.headline})")
            return ()
        blocks, experts = recomputed_blocks(study.trace), study.found("expert")
        if experts is not None:  # what an expert is given comes from other ranks: whole mixtures are computed again
            blocks = tuple(path for path in blocks if not experts.holds(path))
        return blocks

    def closed(self, finding: tuple[str, ...]) -> Iterable[str]:
        return finding

    def apply(self, placed: "Placed", finding: tuple[str, ...]) -> None:
        model, shards = placed.model, placed.shards
        blocks = [path for path in finding if not isinstance(model.get_submodule(path), Shell)]
        if shards is not None:  # in backward nothing else holds the whole model's own unit open
            for path in blocks:
                wrap(model.get_submodule(path), shards.around(shards.units[0]))
        Recompute(word=placed.plan.recomputed_blocks, blocks=tuple(blocks)).apply(model)

    def cost(self, costing: "Costing", finding: Any) -> None:
        def again() -> None:
            strategy = Recompute(word=costing.plan.recomputed_blocks, blocks=recomputed_blocks(costing.unsharded))
            costing.add(strategy.cost(costing.trace))

        costing.after.append(again)


def _recomputed(module: nn.Module, forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    changes: Changes = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        args = tuple(None if is_empty_cache(arg) else arg for arg in args)
        kwargs = {name: None if is_empty_cache(arg) else arg for name, arg in kwargs.items()}
        call = Call(module, forward, args, kwargs, changes, selective)
        # All tensors by place: torch looks there for devices whose random numbers to restore, and for changes in place.
        return checkpoint(call, *tree.tensors((args, kwargs)), use_reentrant=False)

    return run
