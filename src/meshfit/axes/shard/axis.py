"""Sharded data parallelism (ZeRO): the ranks of the ``shard`` axis keep 1/n each, and gather what they need.

    zero=1   optimizer state cut; weights whole; gradients whole over several microbatches, scattered once a step
    zero=2   gradients cut too: scattered every microbatch
    zero=3   weights cut too: a unit's are gathered for its forward, and again for its backward

    memory   P/n of each kind that is cut, P of the others; zero=3 beside it the whole's own unit and the largest
             other one (on GPUs the two largest that follow each other)
    traffic  gathers: P(n-1)/n a step for zero=1 and 2, twice that a microbatch for zero=3; for scatters see
             exchange/scatter.py

Under bf16 and fp16 the weights that autocast would round anyway (those of Linear and convolutions, where nothing else
uses them) are gathered in that precision: half the bytes, the same numbers. A module that runs with autocast off is
found out at its first call, and its unit gathered as it is from then on. Under bf16-compute all fp32 weights are
gathered in bf16, and computed with as they are. The parts that the optimizer steps stay as they were built.

For readers of FSDP2:

    FSDPParamGroup     a unit: units.py says of which parameters, open_unit.py is one at run time
    unshard, reshard   Shards._unshard, Shards.reshard: gather.py
    pre/post-forward   Shards.open, around the calls that enter the unit: gather.py
    pre-backward       SavedWeights: when backward asks for a weight that a node saved: open_unit.py
    post-backward      Gather.backward: open_unit.py; then Scatter.returned: exchange/scatter.py
    prefetch           Lockstep.following: what all ranks gathered next in the last pass: lockstep.py

Not torch's FSDP2, for what it cannot do (docs/LOG.md): units that are there for several calls but not between them,
scalars, several dtypes in a block, ranks that differ in which parameters they reach, outputs that are views, parts
equal to the element, an optimizer that was made before.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Trace, only
from meshfit.axes import bf16_compute
from meshfit.axes.axis import Axis, Splits
from meshfit.axes.branch.axis import BranchPlan
from meshfit.axes.forward import wrap
from meshfit.axes.mesh import SCATTER_SHARD
from meshfit.axes.pipeline.cut import Split
from meshfit.axes.pipeline.stages import Pipeline, part_of_trace, pipeline_of
from meshfit.axes.precision import DTYPES
from meshfit.axes.shard.cost import FlatCost, rows_of, shard_cost
from meshfit.axes.shard.gather import Shards
from meshfit.axes.shard.open_unit import OpenUnit, Place, places_of
from meshfit.axes.shard.units import ROUNDED, Unit, units
from meshfit.axes.tensors import buffers_to, parameters_to
from meshfit.comm.flat import Flat
from meshfit.cost import Cost
from meshfit.errors import PlanError
from meshfit.plan import Plan
from meshfit.schedule.actions import stages_of
from meshfit.torch_private.modules import has_forward_hooks

if TYPE_CHECKING:
    from meshfit.axes.find import Study
    from meshfit.axes.place import Placed
    from meshfit.plan_cost import Costing


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Cut a model's parameters over the ``shard`` axis."""

    degree: int
    zero: int = 3
    units: tuple[Unit, ...]
    gathered: torch.dtype | None = None
    """What weights are gathered as where that changes nothing; None: as they are."""

    computes: bool = False
    """The model computes with what is gathered, without autocast (``precision=bf16-compute``)."""

    home: str = "device"
    """Where the parts live: "device", or "host" (and come to the device when gathered)."""

    @classmethod
    def of(cls, plan: Plan, units: tuple[Unit, ...]) -> "Shard":
        """What a plan says of it, for the units of one model."""
        return cls(
            degree=plan.shard,
            zero=plan.zero,
            units=units,
            gathered=DTYPES.get(plan.precision),
            computes=plan.precision == bf16_compute.WORD,
            home="host" if plan.offloads("parameters") else "device",
        )

    def apply(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        peers: dist.ProcessGroup | None = None,
        scatter: dist.ProcessGroup | None = None,
    ) -> Shards:
        """Cut ``model`` in place. It may lie in host memory: only parts of it go to the device. ``peers``: the ranks
        that run the same modules on other samples, in ``group`` and in others; ``scatter``: see ``Shards``."""
        rank = 0 if group is None else dist.get_rank(group)
        named, places, opened = dict(model.named_parameters()), places_of(model), []
        ordered_units = sorted(self.units, key=lambda unit: unit.entrances != ("",))
        for index, unit in enumerate(ordered_units):
            kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
            for name in unit.parameters:
                if (p := named[name]).is_floating_point() or p.is_complex():
                    gathered = self._gathered_as(p, places[p]) if name in unit.rounded else p.dtype
                    kinds[p.dtype, p.requires_grad, gathered, unit.row(name)].append(p)
            flats = [self._flat(alike, rank, gathered, device) for (_, _, gathered, _), alike in kinds.items()]
            ordered = [places[p] for flat in flats for p in flat.parameters]
            by_autocast = not self.computes and any(flat.gathered != flat.dtype for flat in flats)
            low = self.gathered if by_autocast else None
            opened.append(OpenUnit(index, flats, ordered, stays=unit.stays, gather_dtype=low))
        shards = Shards(opened, zero=self.zero, group=group, device=device, peers=peers, scatter=scatter)
        for unit, open_unit in zip(ordered_units, opened, strict=True):
            entrances = [model.get_submodule(path) for path in unit.entrances if path]
            # Modules that hold a parameter of the unit open it too: where they are called without the entrance, as when
            # part of a block is computed again in backward.
            holders = [module for places in open_unit.places for module, _ in places]
            for module in dict.fromkeys((*entrances, *holders)) if open_unit.flats else ():
                rounds = open_unit.gather_dtype is not None and isinstance(module, ROUNDED)
                if self.computes and bf16_compute.is_layer(module):
                    wrap(module, partial(bf16_compute.casting, module))
                wrap(module, shards.around(open_unit, rounds=rounds))
                if has_forward_hooks(module):
                    shards.around_hooks(module, open_unit)
        buffers_to(model, device)
        parameters_to(model, device, shards.place)  # those that are not cut
        return shards

    def cost(
        self,
        trace: Trace,
        *,
        copies: int = 1,
        microbatches: int = 1,
        ahead: bool = False,
        accumulate: bool = False,
    ) -> tuple[Trace, Cost]:
        """On the first rank, a step. ``ahead``: units are gathered ahead of their use, as on GPUs. ``accumulate``:
        whole gradients are summed over microbatches, as in a pipeline. In the trace that is returned, parameters are
        what the optimizer steps."""
        return shard_cost(self, trace, copies=copies, microbatches=microbatches, ahead=ahead, accumulate=accumulate)

    def rows(self, trace: Trace, unit: Unit) -> list[FlatCost]:
        """What ``unit`` is gathered and scattered as."""
        return rows_of(trace, unit, self.degree, None if self.gathered is None else self.gathered.itemsize)

    def gathered_bytes(self, trace: Trace) -> dict[str, tuple[int, int]]:
        """By parameter: the number of its unit, and bytes of that, gathered. Not of units that stay."""
        return {
            name: (number, sum(row.whole for row in self.rows(trace, unit)))
            for number, unit in enumerate(self.units)
            for name in (unit.parameters if unit.entrances != ("",) and not unit.stays else ())
        }

    def slices(self, trace: Trace) -> dict[str, list[tuple[int, int]]]:
        """By parameter: the elements, in memory order, that each rank owns."""
        rows = [row for unit in self.units for row in self.rows(trace, unit)]
        by_rank = [{name: each for row in rows for name, each in row.slices(r).items()} for r in range(self.degree)]
        return {name: [one[name] for one in by_rank] for name in by_rank[0]}

    def _gathered_as(self, p: nn.Parameter, places: list[Place]) -> torch.dtype:
        rounded = self.computes or all(
            any(type(module).forward is kind.forward for kind in ROUNDED) for module, _ in places
        )
        return self.gathered if self.gathered and rounded and p.dtype == torch.float32 else p.dtype

    def _flat(self, parameters: list[nn.Parameter], rank: int, gathered: torch.dtype, device: torch.device) -> Flat:
        flat = Flat(parameters, self.degree, rank, gathered)
        if self.zero < 3 and gathered == flat.dtype and self.home == "device":  # the part is in the whole
            flat.whole = torch.empty(flat.padded, dtype=flat.dtype, device=device)
            flat.own(flat.whole[flat.first : flat.first + flat.part])
        elif self.home == "host":
            flat.own(torch.empty(flat.part, dtype=flat.dtype, pin_memory=device.type == "cuda"))
        else:
            flat.own(torch.empty(flat.part, dtype=flat.dtype, device=device))
        return flat


class ShardAxis(Axis):
    """Also for ``offload=parameters``, over one rank: parts then live in host memory."""

    word = "shard"
    splits = frozenset({Splits.SAMPLES, Splits.PARAMETERS})

    def on(self, plan: Plan, model: nn.Module, device: str) -> bool:
        return plan.cuts

    def find(self, study: "Study") -> tuple[tuple[Unit, ...], ...]:
        """Units, by the part of the model that a rank holds: its place along the pipeline, and the branches."""
        if study.plan.pipeline > 1:
            return _units_of_stages(study)
        if study.plan.branch > 1:
            return tuple(_units_of_branch(study.found("branch"), rank) for rank in range(study.plan.branch))
        own = _of_experts(study)
        names = tuple(name for name, _ in study.model.named_parameters() if name not in own)
        if isinstance(study.trace, TraceError):
            why = f"the model cannot be traced ({study.trace.headline})"
            study.notes.append(f"shard: all parameters are gathered together, because {why}")
            computed = bf16_compute.rounded(study.model) if study.plan.precision == bf16_compute.WORD else ()
            return ((Unit(("",), names, frozenset(computed)),),)
        _check_changes(study.plan, study.trace)
        return (units(study.trace, names),)

    def apply(self, placed: "Placed", finding: tuple[tuple[Unit, ...], ...]) -> Shards:
        mesh, strategy = placed.mesh, Shard.of(placed.plan, finding[placed.mesh.part])
        groups = {"peers": mesh.over("data", "shard", "expert", "context"), "scatter": mesh.groups.get(SCATTER_SHARD)}
        return strategy.apply(placed.model, mesh.over("shard"), placed.device, **groups)

    def cost(self, costing: "Costing", finding: Any) -> None:
        plan, trace = costing.plan, costing.trace
        costing.parameters = trace.parameters
        own = tuple(name for name in trace.parameters if name not in costing.separate)
        dealt = costing.found.get("branch")
        trunk = () if dealt is None else [name for name in own if name not in dealt.dealt.parameters]
        cut = units(trace, own) if dealt is None else units_of_part(trace, costing.tied, trunk)
        strategy = Shard.of(plan, cut)
        if plan.zero == 3:
            costing.gathered = strategy.gathered_bytes(trace)
        costing.slices = partial(strategy.slices, trace)
        costing.add(
            strategy.cost(
                trace,
                copies=plan.data * plan.expert * plan.context,
                microbatches=plan.microbatches,
                ahead=costing.ahead,
                accumulate=plan.pipeline > 1,
            )
        )


def _check_changes(plan: Plan, trace: Trace) -> None:
    """Weights that a step changes by itself must be the ones at rest, not copies gathered for a call."""
    changed = [(name, event.line) for event in trace.events for name in event.changes if name in trace.parameters]
    if changed and plan.zero == 3:
        whole = replace(plan, zero=2) if plan.shard > 1 else replace(plan, offload="optimizer")
        raise PlanError(
            f"{plan}: the model's own code changes {changed[0][0]}",
            f"at {changed[0][1]}: on a device that keeps a slice of it, what is changed is a copy",
            f"{whole} works: every device then holds it whole",
        )


def _of_experts(study: "Study") -> set[str]:
    """Parameters that stay on the ranks which hold their experts."""
    experts = study.found("expert")
    return set() if experts is None else set(experts.cuts)


def _units_of_stages(study: "Study") -> tuple[tuple[Unit, ...], ...]:
    staged, pipe = study.found("pipeline"), pipeline_of(study.plan)
    _check_changes(study.plan, staged.trace)
    if (dealt := study.found("branch")) is not None:
        ranks = [(stage, rank) for stage in range(pipe.degree) for rank in range(study.plan.branch)]
        return tuple(_units_in_stage(pipe, staged.split, dealt, *at) for at in ranks)
    stages = [stages_of(pipe.word, pipe.degree, pipe.stages // pipe.degree, rank) for rank in range(pipe.degree)]
    every = [{name for stage in own for name in staged.split.parameters[stage]} - _of_experts(study) for own in stages]
    cut, whole = pipe.cut_of(staged.trace), staged.trace.parameters
    own = [
        replace(part_of_trace(staged.trace, cut, some), parameters={n: p for n, p in whole.items() if n in names})
        for some, names in zip(stages, every, strict=True)
    ]
    tied = {name for name in set().union(*every) if sum(name in names for names in every) > 1}
    return tuple(units_of_part(trace, tied) for trace in own)


def units_of_part(trace: Trace, tied: Collection[str], trunk: Collection[str] = ()) -> tuple[Unit, ...]:
    """Units of the modules that one rank calls. Parameters that other ranks hold too are cut alike on all of them:
    each of ``tied`` by itself, those of the ``trunk``, which the ranks of a branch group run alike, together.

    What a part of the model runs are recorded steps: modules around them are not called, so they are no entrances."""
    found: dict[tuple[str, ...], Unit] = {}
    for names in ([n for n in trace.parameters if n in trunk], [n for n in trace.parameters if n not in trunk]):
        part = only(trace, (e.index for e in trace.events if not set(names).isdisjoint(e.parameters)))
        held = {name: trace.parameters[name] for name in names}
        used = [tuple(name for name in event.parameters if name in held) for event in part.events]
        events = tuple(replace(e, within=(), parameters=own) for e, own in zip(part.events, used, strict=True))
        for unit in units(replace(part, events=events, parameters=held), tuple(names)):
            rows = [frozenset([name]) for name in unit.parameters if name in tied]
            rows.append(frozenset(unit.parameters).difference(tied))
            other = found.get(unit.entrances, Unit(unit.entrances, ()))
            found[unit.entrances] = Unit(
                unit.entrances,
                other.parameters + unit.parameters,
                other.rounded | unit.rounded,
                (*other.rows, *rows),
                other.stays or unit.stays,
            )
    return tuple(found.values())


def _units_of_branch(found: BranchPlan, rank: int) -> tuple[Unit, ...]:
    """Units of what ``rank`` of a branch group runs."""
    part, own = found.part(rank), found.dealt.parameters
    tied = [name for name, ranks in own.items() if len(ranks) > 1]
    return units_of_part(part, tied, trunk=[name for name in part.parameters if name not in own])


def _units_in_stage(pipe: Pipeline, split: Split, found: BranchPlan, stage: int, rank: int) -> tuple[Unit, ...]:
    """Units of what ``rank`` of the branch group runs at place ``stage`` along the pipeline."""
    own, mine = found.dealt.parameters, pipe.stages_of(stage)
    trace, stages = found.part_in_stages(rank)
    names = dict.fromkeys(n for s in mine for n in split.parameters[s] if rank in own.get(n, (rank,)))
    part = replace(part_of_trace(trace, stages, mine), parameters={n: found.trace.parameters[n] for n in names})
    tied = {*pipe.tied(trace, found.stages), *(name for name, ranks in own.items() if len(ranks) > 1)}
    return units_of_part(part, tied, trunk=[name for name in names if name not in own])
