"""Expert parallelism: the experts of a mixture over several devices, each with samples of its own.

A device holds count/n of the experts of each mixture, and all else. The rows that its router sends to an expert
elsewhere travel there and back: see ``experts``. An expert's gradient is complete on the device that holds it, for the
samples of all n; what is not an expert is summed over them as under ``data``.

    memory    1/n of the experts: weights, gradients, optimizer state
    traffic   of R rows to experts, a mixture and a microbatch: all_to_all of R rows there and R back, and the same for
              gradients; one small all_gather of counts. How many rows a device takes is the router's choice: R is what
              it sends, and on average what it takes
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.trace import Trace
from meshfit.axes.data.axis import check_ties, tied
from meshfit.axes.expert.load import Load
from meshfit.axes.expert.mixture import ExpertPlan
from meshfit.axes.expert.spread import bounds, spread
from meshfit.axes.expert.travel import HEADER, OverRanks, Travel
from meshfit.axes.forward import unwrap
from meshfit.axes.tensor.cut import Undo
from meshfit.axes.tensor.region import Cut
from meshfit.cost import Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Expert:
    """Spread the experts of a model over the ``expert`` axis."""

    degree: int
    plan: ExpertPlan

    def apply(self, model: nn.Module, group: dist.ProcessGroup, *, copies: int = 1, tells: bool = True) -> "Owned":
        """Cut ``model`` in place. ``copies``: ranks that hold the same experts beside those of other copies of the
        model; ``tells``: whether this copy's load goes to the events."""
        ties, ranks = tied(model), OverRanks(group)
        if ranks.size != self.degree or self.plan.degree != self.degree:
            raise ValueError(f"a plan for {self.plan.degree} ranks, expert={self.degree} and a group of {ranks.size}")
        plan = self.plan.fitted({name: len(p) for name, p in model.named_parameters() if p.dim()})
        load = Load([mixture.module for mixture in plan.mixtures], tells and ranks.rank == 0)
        undo = [
            step
            for number, mixture in enumerate(plan.mixtures)
            for step in spread(model, mixture, Travel(ranks, number, mixture.count, load))
        ]
        check_ties(model, ties)
        return Owned(model, plan, ranks, load, undo, copies)

    def cost(self, trace: Trace, *, microbatches: int = 1, again: Collection[str] = ()) -> tuple[Trace, Cost]:
        """Of a step on one rank, if as many rows come as are sent: over all ranks that is exact, whatever the router
        does. ``again``: blocks that are computed again in backward. Auxiliary losses are not in it."""
        cuts = self.plan.fitted({name: p.shape[0] for name, p in trace.parameters.items() if p.shape}).cuts
        parameters = {}
        for name, p in trace.parameters.items():
            if name in cuts:
                start, stop = bounds(cuts[name].ranges[0])
                shape = (stop - start, *p.shape[1:])
                p = replace(p, shape=shape, bytes=p.bytes * prod(shape) // max(1, prod(p.shape)))
            parameters[name] = p
        wide = 8 if any(p.dtype == "float64" for p in trace.parameters.values()) else 4
        samples = max((trace.values[v].shape[0] for v in trace.inputs if trace.values[v].shape), default=1)
        grown = samples / (self.plan.samples or samples)
        calls: dict[str, int] = defaultdict(int)
        moved: dict[str, float] = defaultdict(float)
        for mixture in self.plan.mixtures:
            inside = any(f"{mixture.module}.".startswith(f"{path}.") for path in again)
            times, forwards = mixture.calls * microbatches, 2 if inside else 1
            calls["all_gather"] += times * forwards
            moved["all_gather"] += times * forwards * 8 * self.degree * (HEADER + 2 * mixture.count)
            calls["all_to_all"] += times * 2 * (forwards + 1)
            moved["all_to_all"] += times * (forwards + 1) * mixture.rows * (mixture.width + mixture.made) * wide * grown
        return replace(trace, parameters=parameters), Cost(
            calls=dict(calls), moved={op: round(size) for op, size in moved.items()}
        )


class Owned:
    """A model whose experts are spread, as the exchange, checkpoints and whoever compares weights see it."""

    def __init__(self, model: nn.Module, plan: ExpertPlan, ranks: OverRanks, load: Load, undo: list[Undo], copies: int):
        self.model, self.plan, self.ranks, self.load, self.copies = model, plan, ranks, load, copies
        named = dict(model.named_parameters())
        self.cuts: dict[Tensor, Cut] = {named[name]: each for name, each in plan.cuts.items()}
        """Of the parameters of experts, whether they are here or not."""
        self.shapes = {parameter: parameter.shape for parameter in self.cuts}
        self._undo = undo

    def is_cut(self, tensor: Tensor) -> bool:
        return tensor in self.cuts

    def weight(self, parameter: Tensor) -> float:
        """How much this rank's part counts in a sum over the ranks of one copy that is to count each element once."""
        return 1 / self.copies if parameter in self.cuts else 1 / self.ranks.size

    def sum_partial(self) -> None:
        """Nothing: what comes to an expert comes to the rank that holds it."""

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """``tensor``, which belongs to ``parameter``, of all ranks. All ranks call it together."""
        each = self.cuts.get(parameter)
        if each is None or tensor.shape != self.shapes[parameter]:
            return tensor
        start, stop = bounds(each.ranges[self.ranks.rank])
        whole = tensor.new_zeros(each.size, *tensor.shape[1:])
        whole[start:stop] = tensor
        dist.all_reduce(whole, group=self.ranks.group)
        return whole

    def share(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """This rank's share of ``tensor``, as large as ``parameter`` was: what ``whole`` undoes."""
        each = self.cuts.get(parameter)
        if each is None or tensor.dim() != len(self.shapes[parameter]):
            return tensor
        start, stop = bounds(each.ranges[self.ranks.rank])
        return tensor[start:stop].clone()

    def undo(self) -> None:
        """Give the model its whole weights and its own forwards back."""
        with torch.no_grad():
            for parameter in self.cuts:
                parameter.data = self.whole(parameter, parameter.data)
                parameter.grad = None
        for step in reversed(self._undo):
            step()
        unwrap(self.model)
        self.cuts, self._undo = {}, []
