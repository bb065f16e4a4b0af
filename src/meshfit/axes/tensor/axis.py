"""Tensor parallelism: one operation over several devices. Each holds a share of the channels of most weights.

Regions between column and row weights are computed by shares, with one sum over the ranks at their end and one of the
gradients at their beginning; other large layers are cut by output channels, and what they return is gathered. All ranks
see the same samples and, outside regions, compute the same. What is cut, and where, is a value: see ``split``.

    memory    1/n of what is cut: weights, gradients, optimizer state, and the activations inside regions
    traffic   a transformer block: two all-reduces of its activations forward and two backward, a microbatch
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from meshfit.anatomy.record_build import tied
from meshfit.anatomy.trace import Trace
from meshfit.axes.axis import Applied, Axis, Splits
from meshfit.axes.counted import counted_cost
from meshfit.axes.forward import unwrap
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.tensor.cost import shrunk
from meshfit.axes.tensor.cut import Undo, cut
from meshfit.axes.tensor.region import Cut, TensorPlan, joined
from meshfit.axes.tensors import buffers_to, check_ties
from meshfit.comm.draws import Stream
from meshfit.comm.group import RankGroup, destroy
from meshfit.cost import Cost
from meshfit.errors import PlanError
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing

SHORT_CUTS = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
"""What lets torch's modules take them, if it is not 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Spread a model over the ``tensor`` axis."""

    degree: int
    plan: TensorPlan

    def apply(self, model: nn.Module, group: dist.ProcessGroup) -> "Parts":
        """Cut ``model`` in place: the same weights on every rank before, a share of them after. Parameters keep their
        objects, names and ties; what a rank holds is in memory of its own, so the rest is free to go."""
        ties, ranks = tied(model), RankGroup(group)
        if ranks.size != self.degree or self.plan.degree != self.degree:
            raise ValueError(f"a plan for {self.plan.degree} ranks, tensor={self.degree} and a group of {ranks.size}")
        stream = Stream(ranks)
        undo = [step for region in self.plan.regions for step in cut(model, region, ranks, stream)]
        undo += _no_short_cuts(model, self.plan)
        check_ties(model, ties)
        return Parts(model, self.plan, ranks, undo)

    def cost(self, trace: Trace, *, microbatches: int = 1) -> tuple[Trace, Cost]:
        """Of a step on one rank. Collectives are those counted when the plan was checked, for a batch of the size of
        the trace's: exact where activations grow with the batch."""
        cuts = self.plan.cuts
        parameters = {
            name: replace(p, shape=_cut_shape(p.shape, cuts[name]), bytes=p.bytes * cuts[name].own // cuts[name].size)
            if name in cuts
            else p
            for name, p in trace.parameters.items()
        }
        added = counted_cost(self.plan.collectives, trace, samples=self.plan.samples, microbatches=microbatches)
        kinds = defaultdict(int)
        for name in self.plan.shared:
            kinds[parameters[name].dtype, cuts[name].copies if name in cuts else self.degree] += parameters[name].bytes
        if kinds:
            added += Cost(calls={"all_reduce": len(kinds)}, moved={"all_reduce": sum(kinds.values())})
        buffers = {
            name: replace(b, shape=_cut_shape(b.shape, cuts[name])) if name in cuts else b
            for name, b in trace.buffers.items()
        }
        after = replace(shrunk(trace, self.plan), parameters=parameters, buffers=buffers)
        return after, added


class TensorAxis(Axis):
    word = "tensor"
    splits = frozenset({Splits.OPERATIONS})
    cost_needs_finding = True

    def find(self, study: "Study") -> TensorPlan:
        from meshfit.axes.tensor.plan import plan_tensor  # the first rank alone plans

        plan = study.plan
        with study.copying():
            by_rows = splits_sequence(plan, study.device)
            split = plan_tensor(study.model, lambda twin: study.loss(twin, study.few), plan.tensor, by_rows=by_rows)
        if plan.branch > 1:
            split = inside_modules(split)
        if not split.regions:
            raise PlanError(
                f"{plan}: tensor={plan.tensor} splits nothing of this model",
                *(f"{name}: {why}" for name, why in list(split.why.items())[:3]),
                *split.notes[:2],
                f"{replace(plan, tensor=1, data=plan.data * plan.tensor)} works",
            )
        study.notes += split.explain()
        return split

    def closed(self, finding: TensorPlan) -> Iterable[str]:
        for region in finding.regions:
            inner = (*region.lookups, *region.slices, *region.rows)
            yield from filter(None, (joined(region.module, path) for path in inner) if inner else (region.module,))

    def apply(self, placed: "Placed", finding: TensorPlan) -> "Parts":
        buffers_to(placed.model, placed.device)  # moved after they were cut they would not be known as cut
        group = placed.mesh.over("tensor")
        assert group is not None
        part = plan_of_part(finding, placed.model)
        parts = Tensor(degree=placed.plan.tensor, plan=part).apply(placed.model, group)
        parts.partial = finding.shared
        placed.groups["tensor"] = parts.ranks
        return parts

    def cost(self, costing: "Costing", finding: TensorPlan) -> None:
        part = finding.only(costing.trace) if costing.stages is None else finding.only(costing.trace).silent()
        strategy = Tensor(degree=costing.plan.tensor, plan=part)
        costing.add(strategy.cost(costing.trace, microbatches=costing.plan.microbatches))
        costing.partial |= set(finding.shared)


def splits_sequence(plan: Plan, device: str) -> bool:
    """Whether what lies between tensor-parallel operations is split by tokens."""
    by_default = plan.sequence == "auto" and device == "cuda" and plan.context == 1 and not plan.partitions_modules
    return plan.tensor > 1 and (plan.sequence == "split" or by_default)


def inside_modules(plan: TensorPlan) -> TensorPlan:
    """``plan`` without what is in the model's own code, which no rank runs as a whole where modules are spread."""
    return replace(plan, regions=tuple(r for r in plan.regions if r.module or r.lookups or r.slices or r.rows))


def plan_of_part(plan: TensorPlan, part: nn.Module) -> TensorPlan:
    """What of ``plan`` is in one rank's part of the model; all of it, if that is the whole."""
    modules = {path: module for path, module in part.named_modules() if not isinstance(module, Shell)}
    tensors = {name for name, _ in (*part.named_parameters(remove_duplicate=False), *part.named_buffers())}
    regions = []
    for region in plan.regions:
        here = lambda paths, home=region.module: tuple(path for path in paths if joined(home, path) in modules)
        lookups, slices, rows = map(here, (region.lookups, region.slices, region.rows))
        if lookups or slices or rows:
            patches = tuple(each for each in region.patches if joined(region.module, each.module) in modules)
            cuts = tuple(each for each in region.cuts if joined(region.module, each.name) in tensors)
            partial = tuple(name for name in region.partial if joined(region.module, name) in tensors)
            apart = {"lookups": lookups, "slices": slices, "rows": rows, "enters": here(region.enters)}
            region = replace(region, **apart, patches=patches, cuts=cuts, partial=partial)
        elif region.module not in modules or region.lookups or region.slices or region.rows:
            continue
        regions.append(region)
    return plan if regions == list(plan.regions) else replace(plan, regions=tuple(regions))


class Parts(Applied):
    """A model that is cut over the ranks of a tensor group.

    Gradients of parameters that are cut are complete on the ranks that hold them after ``sum_partial``: they are not
    summed over the tensor group again. All others are equal on all ranks then. ``weight`` says how much each counts in
    a sum over all ranks, as that of squares for the norm.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, ranks: RankGroup, undo: list[Undo]):
        self.model, self.plan, self.ranks, self.group, self.rank = model, plan, ranks, ranks.group, ranks.rank
        named = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        self.cuts: Mapping[torch.Tensor, Cut] = {
            named[name] if name in named else buffers[name]: each for name, each in plan.cuts.items()
        }
        """Of parameters and buffers that this rank has a share of."""

        self.shapes = {tensor: tensor.shape for tensor in self.cuts}
        """Of those shares: a parameter may be cut further."""

        everyone = tuple(range(ranks.size))
        self._sums = [(named[name], self._mates(plan.cuts.get(name)) or everyone) for name in plan.shared]
        self._lines = ranks.among(dict.fromkeys(mates for _, mates in self._sums))

        self._undo = undo

    def _mates(self, each: Cut | None) -> tuple[int, ...]:
        """Ranks that hold the same share of it."""
        return (
            ()
            if each is None
            else tuple(r for r, held in enumerate(each.ranges) if held == each.ranges[self.ranks.rank])
        )

    spreads = True

    def weight(self, parameter: torch.Tensor) -> float:
        """How much this rank's part counts in a sum over the tensor group that is to count each element once."""
        each = self.cuts.get(parameter)
        return 1 / self.ranks.size if each is None else 1 / each.copies

    @torch.no_grad()
    def sum_partial(self) -> None:
        """Sum gradients of which several ranks have a part: once a step, before anything reads them; in one collective
        for each dtype and set of ranks."""
        kinds: dict[tuple, list[torch.Tensor]] = defaultdict(list)
        for parameter, mates in self._sums:
            if parameter.grad is not None:
                kinds[mates, parameter.grad.dtype].append(parameter.grad)
        for (mates, _), grads in kinds.items():
            total = self._lines[mates].all_reduce_(torch.cat([grad.flatten() for grad in grads]))
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def whole(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which belongs to ``parameter`` (its weights, gradient, or a moment of the optimizer), of all
        ranks. What is not cut is returned as it is. All ranks call it together."""
        each = self.cuts.get(parameter)
        if each is None or tensor.shape != self.shapes[parameter]:
            return tensor
        return each.joined(list(self.ranks.all_gather(tensor)))

    def part(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``tensor``, as large as ``parameter`` was: what ``whole`` undoes."""
        each = self.cuts.get(parameter)
        if each is None or tensor.dim() != len(self.shapes[parameter]):
            return tensor
        return each.of(tensor, self.ranks.rank)

    def undo(self) -> None:
        """Give the model its whole weights and its own forwards back. All that was put around forwards comes off."""
        with torch.no_grad():
            for tensor in self.cuts:
                tensor.data = self.whole(tensor, tensor.data)
                tensor.grad = None
        for step in reversed(self._undo):
            step()
        unwrap(self.model)
        destroy(line.group for members, line in sorted(self._lines.items()) if len(members) < self.ranks.size)
        self.cuts, self._undo, self._lines = {}, [], {}


def _no_short_cuts(model: nn.Module, plan: TensorPlan) -> list[Undo]:
    """Keep torch's transformer layers from reading cut weights by themselves, as they do where nothing is trained."""
    undo: list[Undo] = []
    for path, module in model.named_modules():
        for kind, name in SHORT_CUTS.items():
            if isinstance(module, kind) and any(cut.startswith(f"{path}." if path else "") for cut in plan.cuts):
                undo.append(partial(setattr, module, name, getattr(module, name)))
                setattr(module, name, 0)
    return undo


def _cut_shape(shape: tuple[int, ...], each: Cut) -> tuple[int, ...]:
    return (*shape[: each.dim], each.own, *shape[each.dim + 1 :])
