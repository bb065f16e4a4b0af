"""Tensor parallelism: one operation over several devices. Each holds a share of the channels of most weights.

Regions between column and row weights are computed by shares, with one sum over the ranks at their end and one of the
gradients at their beginning; other large layers are cut by output channels, and what they return is gathered. All ranks
see the same samples and, outside regions, compute the same. What is cut, and where, is a value: see ``split``.

    memory    1/n of what is cut: weights, gradients, optimizer state, and the activations inside regions
    traffic   a transformer block: two all-reduces of its activations forward and two backward, a microbatch
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.anatomy.trace import Trace
from meshfit.axes.axis import Axis, Splits
from meshfit.axes.counted import HALVES, counted_cost
from meshfit.axes.cut_parameters import CutParameters
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.tensor.cost import shrunk
from meshfit.axes.tensor.cut import Undo, cut
from meshfit.axes.tensor.region import VOCABULARY, Cut, TensorPlan, joined
from meshfit.axes.tensors import buffers_to, check_ties
from meshfit.comm.draws import Stream
from meshfit.comm.group import RankGroup, destroy
from meshfit.cost import CollectiveCall, Cost
from meshfit.errors import PlanError
from meshfit.plan import Plan

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing

SHORT_CUTS = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
"""What lets torch's modules take them, if it is not 0."""


HIDDEN = {(name, "backward"): "products" for name in ("all_reduce", "reduce_scatter")}
"""Sums of gradients of a region's input run beside the products for gradients of its weights: see column.py."""


def split_model(model: nn.Module, plan: TensorPlan, group: dist.ProcessGroup) -> "TensorSplit":
    """Cut ``model`` in place: the same weights on every rank before, a share of them after. Parameters keep their
    objects, names and ties; what a rank holds is in memory of its own, so the rest is free to go."""
    ties, ranks = tied(model), RankGroup(group)
    stream = Stream(ranks)
    undo = [step for region in plan.regions for step in cut(model, region, ranks, stream)]
    undo += _no_short_cuts(model, plan)
    check_ties(model, ties)
    return TensorSplit(model, plan, ranks, undo)


def tensor_cost(trace: Trace, plan: TensorPlan, *, microbatches: int = 1, half: str = "") -> tuple[Trace, Cost]:
    """Of a step on one rank. Collectives are those counted when the plan was checked; ``half``: the dtype of what
    products make under autocast, and of its gradients. Rows of an embedding, and what the loss is made of, are fp32."""
    cuts = plan.cuts
    parameters = {
        name: replace(p, shape=_cut_shape(p.shape, cuts[name]), bytes=p.bytes * cuts[name].own // cuts[name].size)
        if name in cuts
        else p
        for name, p in trace.parameters.items()
    }
    how: dict[str, Any] = {"axis": "tensor", "degree": plan.degree, "hidden": HIDDEN}
    counts = {"samples": plan.samples, "microbatches": microbatches}
    regions = () if plan.traffic else plan.regions
    full = [(r.calls, each) for r in regions if r.kind in VOCABULARY for each in r.traffic if not each.backward]
    rest = [(r.calls, each) for r in regions for each in r.traffic if r.kind not in VOCABULARY or each.backward]
    added = counted_cost(full, trace, **counts, **how)
    added += counted_cost(rest if regions else plan.collectives, trace, **counts, **how, half=half)
    kinds = defaultdict(int)
    for name in plan.shared:
        kinds[parameters[name].dtype, cuts[name].copies if name in cuts else plan.degree] += parameters[name].bytes
    summed = (
        CollectiveCall("all_reduce", size, degree, axis="tensor", dtype=dtype, phase="step", once=True)
        for (dtype, degree), size in kinds.items()
    )
    added += Cost(collectives=tuple(summed))
    buffers = {
        name: replace(b, shape=_cut_shape(b.shape, cuts[name])) if name in cuts else b
        for name, b in trace.buffers.items()
    }
    return replace(shrunk(trace, plan), parameters=parameters, buffers=buffers), added


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
            split = inside_modules(split)
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
            inner = (*region.lookups, *region.slices, *region.rows)
            yield from filter(None, (joined(region.module, path) for path in inner) if inner else (region.module,))

    def apply(self, placed: "Placed", finding: TensorPlan) -> "TensorSplit":
        buffers_to(placed.model, placed.device)  # moved after they were cut they would not be known as cut
        group = placed.mesh.over("tensor")
        assert group is not None
        parts = split_model(placed.model, plan_of_part(finding, placed.model), group)
        parts.partial = finding.shared
        placed.groups["tensor"] = parts.ranks
        return parts

    def cost(self, costing: "Costing", finding: TensorPlan) -> None:
        part = finding.only(costing.trace) if costing.stages is None else finding.only(costing.trace).silent()
        half = HALVES.get(costing.plan.precision, "")
        costing.add(tensor_cost(costing.trace, part, microbatches=costing.plan.microbatches, half=half))
        costing.partial |= set(finding.shared)


def splits_sequence(plan: Plan, device: str) -> bool:
    """Whether what lies between tensor-parallel operations is split by tokens."""
    by_default = plan.sequence == "auto" and device == "cuda" and not plan.partitions_modules
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


class TensorSplit(CutParameters):
    """A model that is cut over the ranks of a tensor group.

    Gradients of parameters that are cut are complete on the ranks that hold them after ``after_backward``: they are not
    summed over the tensor group again. All others are equal on all ranks then.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, ranks: RankGroup, undo: list[Undo]):
        super().__init__(model, plan.cuts, ranks, undo)
        named, cuts, everyone = dict(model.named_parameters()), plan.cuts, (((0, 0),),) * ranks.size
        held = {name: cuts[name].ranges if name in cuts else everyone for name in plan.shared}
        self._sums = [
            (named[name], tuple(rank for rank, each in enumerate(ranges) if each == ranges[ranks.rank]))
            for name, ranges in held.items()
        ]
        """Parameters of whose gradient several ranks hold a part, and those ranks."""
        self._lines = ranks.among(dict.fromkeys(peers for _, peers in self._sums))
        self.plan = plan

    @torch.no_grad()
    def after_backward(self) -> None:
        """In one collective for each dtype and set of ranks."""
        kinds: dict[tuple, list[Tensor]] = defaultdict(list)
        for parameter, peers in self._sums:
            if parameter.grad is not None:
                kinds[peers, parameter.grad.dtype].append(parameter.grad)
        for (peers, _), grads in kinds.items():
            total = self._lines[peers].all_reduce_(torch.cat([grad.flatten() for grad in grads]))
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def close(self) -> None:
        destroy(line.group for members, line in sorted(self._lines.items()) if len(members) < self.ranks.size)
        self._lines = {}


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
