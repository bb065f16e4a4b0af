"""What the strategies of a plan act on in one model: which operations are split, where layers are cut, what is gathered
together, what is computed again. Found once, on one rank, from steps on a few samples, and sent to the others: all must
cut alike.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.again import recomputed_blocks
from meshfit.anatomy.record import TraceError
from meshfit.anatomy.trace import Trace
from meshfit.axes.branch.axis import Branch
from meshfit.axes.branch.axis import Found as FoundBranches
from meshfit.axes.compile import compilable
from meshfit.axes.context.find import ContextPlan
from meshfit.axes.expert.mixture import ExpertPlan
from meshfit.axes.pipeline.axis import Found as FoundStages
from meshfit.axes.pipeline.axis import Pipeline, only, part_of_trace
from meshfit.axes.pipeline.cut import Shell
from meshfit.axes.pipeline.program import Replayed
from meshfit.axes.shard.units import Unit, traced, units
from meshfit.axes.tensor.region import TensorPlan, joined
from meshfit.axes.tensor.twin import Uncopied
from meshfit.data import tree
from meshfit.errors import PlanError
from meshfit.plan import Plan

Objective = Callable[[nn.Module, Any], Any]

TRIED = 13
"""Samples that splits are tried on. A prime: so a dim that is a multiple of it is one of samples."""


@dataclass(frozen=True, kw_only=True)
class Found:
    tensor: TensorPlan | None = None
    context: ContextPlan | None = None
    experts: ExpertPlan | None = None
    pipeline: FoundStages | None = None
    branch: FoundBranches | None = None
    units: tuple[tuple[Unit, ...], ...] = ((),)
    """By the part of the model that a rank holds: its place along the pipeline, or the branches."""
    blocks: tuple[str, ...] = ()
    """To compute again in backward."""
    compiled: tuple[str, ...] = ()
    """Blocks that can be compiled."""
    notes: tuple[str, ...] = ()


def find(
    plan: Plan,
    model: nn.Module,
    objective: Objective,
    batch: Any,
    device: str = "cuda",
    whole: Collection[str] = (),
) -> Found:
    """``model`` stays as it is; costs are those on ``device``. ``whole``: modules that must not be cut over stages."""
    found = Found()
    if plan.tensor > 1:
        found = _split(found, plan, model, objective, batch, device)
    if plan.context > 1:
        found = _cut_sequences(found, plan, model, objective, batch)
    if plan.expert > 1:
        found = _experts(found, plan, model, objective, batch)
    traces = plan.cuts or plan.recompute != "none" or plan.compile == "block" or device != "cpu"
    if traces:
        found = _traced(found, plan, model, objective, batch, device)
    if plan.pipeline > 1:
        found = _staged(found, plan, model, objective, batch, device, whole)
    if plan.branch > 1:
        atoms = (*found.blocks, *wrapped(found.tensor))
        dealt = Branch(degree=plan.branch, atoms=atoms).find(model, objective, batch, device=device)
        found = replace(found, branch=dealt.to_send(), notes=(*found.notes, dealt.note))
        if plan.cuts:
            found = replace(found, units=tuple(units_of_branch(dealt, rank) for rank in range(plan.branch)))
    return found


def _split(found: Found, plan: Plan, model: nn.Module, objective: Objective, batch: Any, device: str) -> Found:
    from meshfit.axes.tensor.plan import plan_tensor  # the first rank alone plans

    batch = _first(batch, TRIED)
    by_rows = plan.sequence == "split" or (
        plan.sequence == "auto" and device == "cuda" and plan.context == 1 and not plan.apart
    )
    try:
        split = plan_tensor(model, lambda twin: as_number(objective(twin, batch)), plan.tensor, by_rows=by_rows)
    except Uncopied as error:
        raise _uncopied(plan, error) from error.__cause__
    if plan.branch > 1:
        split = inside_modules(split)
    if not split.regions:
        raise PlanError(
            f"{plan}: tensor={plan.tensor} splits nothing of this model",
            *(f"{name}: {why}" for name, why in list(split.why.items())[:3]),
            *split.notes[:2],
            f"{replace(plan, tensor=1, data=plan.data * plan.tensor)} works",
        )
    return replace(found, tensor=split, notes=tuple(split.explain()))


def _uncopied(plan: Plan, error: Exception) -> PlanError:
    return PlanError(
        f"{plan}: the model cannot be copied, and what can be split is found by trying",
        str(error),
        "data= and shard= take the model as it is",
    )


def _cut_sequences(found: Found, plan: Plan, model: nn.Module, objective: Objective, batch: Any) -> Found:
    from meshfit.axes.context.axis import plan_context  # the first rank alone plans

    try:
        with _proven(plan):
            sequence = plan_context(model, lambda twin, some: as_number(objective(twin, some)), batch, plan.context)
    except Uncopied as error:
        raise _uncopied(plan, error) from error.__cause__
    if not sequence.beginnings:
        headline, *facts = sequence.refusal()
        raise PlanError(f"{plan}: {headline}", *facts, _without_context(plan))
    return replace(found, context=sequence, notes=(*found.notes, *sequence.explain()))


@contextmanager
def _proven(plan: Plan) -> Iterator[None]:
    """Around the proof of a context plan."""
    from meshfit.axes.context.axis import Differs  # the first rank alone plans

    try:
        yield
    except Differs as differs:
        raise PlanError(
            f"{plan}: cut over {plan.context} devices this model does not compute what it does on one",
            f"on a few samples, in double precision: {differs}",
            _without_context(plan),
        ) from differs


def _without_context(plan: Plan) -> str:
    return f"{replace(plan, context=1, data=plan.data * plan.context)} works"


def _experts(found: Found, plan: Plan, model: nn.Module, objective: Objective, batch: Any) -> Found:
    from meshfit.axes.expert.find import plan_experts  # the first rank alone plans

    batch = _first(batch, TRIED)
    samples = max((len(t) for t in tree.tensors(batch) if t.dim()), default=0)
    try:
        experts = plan_experts(model, lambda twin: objective(twin, batch), plan.expert, samples)
    except Uncopied as error:
        raise _uncopied(plan, error) from error.__cause__
    experts = experts.without(_cut_by_experts(experts, found.tensor)) if found.tensor else experts
    if experts.mixtures:
        return replace(found, experts=experts, notes=(*found.notes, *experts.explain()))
    elsewhere = f"{replace(plan, expert=1, data=plan.data * plan.expert)} works"
    if not experts.why and experts.batched:
        raise PlanError(
            f"{plan}: the model has no experts that could be spread",
            *experts.batched[:2],
            "if these are experts: slices that one batched product multiplies are spread only where their module is"
            " given rows, the experts chosen for each, and their weights",
            elsewhere,
        )
    if not experts.why:
        raise PlanError(
            f"{plan}: the model has no experts to spread",
            "experts are slices of a module's parameters that is given rows, their choices and weights, or modules in"
            " a list",
            elsewhere,
        )
    fitting = [
        n for n in range(2, min(experts.counts, default=0) + 1) if all(count % n == 0 for count in experts.counts)
    ]
    degrees = " or ".join(f"expert={n}" for n in fitting)
    raise PlanError(
        f"{plan}: expert={plan.expert} spreads nothing of this model",
        *(f"{path}: {why}" for path, why in list(experts.why.items())[:3]),
        f"{degrees} divides them" if fitting and plan.expert not in fitting else "",
        elsewhere,
    )


def _cut_by_experts(experts: ExpertPlan, split: TensorPlan) -> dict[str, str]:
    """Mixtures whose parameters the tensor axis cuts along the dim of the experts, and why they stay as they are."""
    cuts = split.cuts
    return {
        mixture.module: f"tensor={split.degree} cuts {each.name} by experts already"
        for mixture in experts.mixtures
        for each in mixture.cuts
        if not mixture.listed and each.name in cuts and cuts[each.name].dim == each.dim
    }


def _first(batch: Any, samples: int) -> Any:
    there = max((len(t) for t in tree.tensors(batch) if t.dim()), default=0)
    return tree.map_tensors(lambda t: t[:samples] if t.dim() and len(t) == there else t, batch)


def as_number(result: Any) -> Tensor:
    """What a step came to, as one number to go backward from."""
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Tensor) and not result[0].dim():
        return result[0]  # a sum, and what it is over
    if isinstance(own := getattr(result, "loss", None), Tensor):  # of Hugging Face's models
        return own
    if isinstance(result, Tensor) and not result.dim():
        return result
    made = [t for t in tree.tensors(result) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in made]).sum() if made else torch.zeros(())


def _traced(found: Found, plan: Plan, model: nn.Module, objective: Objective, batch: Any, device: str) -> Found:
    apart = found.experts.cuts if found.experts else {}
    names = tuple(name for name, _ in model.named_parameters() if name not in apart)
    trace = traced(model, objective, batch, device=device)
    if isinstance(trace, TraceError):
        why = f"the model cannot be traced ({trace.headline})"
        notes = []
        if plan.cuts:
            notes.append(f"shard: all parameters are gathered together, because {why}")
        if plan.recompute != "none":
            notes.append(f"recompute: none, because {why}")
        if plan.compile == "block":
            notes.append(f"compile: none, because {why}")
        return replace(found, units=((Unit(("",), names),),), notes=(*found.notes, *notes))
    _check_changes(plan, trace)
    blocks = () if plan.recompute == "none" else recomputed_blocks(trace)
    if found.experts is not None:  # what an expert is given comes from other ranks: whole mixtures are computed again
        blocks = tuple(path for path in blocks if not found.experts.holds(path))
    compiled = compilable(trace, global_batchnorm=plan.joins_batchnorms)
    return replace(found, units=(units(trace, names),), blocks=blocks, compiled=compiled)


def _check_changes(plan: Plan, trace: Trace) -> None:
    """Weights that a step changes by itself must be the ones at rest, not copies gathered for a call."""
    changed = [(name, event.line) for event in trace.events for name in event.changes if name in trace.parameters]
    if changed and plan.zero == 3 and plan.cuts:
        whole = replace(plan, zero=2) if plan.shard > 1 else replace(plan, offload="optimizer")
        raise PlanError(
            f"{plan}: the model's own code changes {changed[0][0]}",
            f"at {changed[0][1]}: on a device that keeps a slice of it, what is changed is a copy",
            f"{whole} works: every device then holds it whole",
        )


# Layers over the pipeline


def pipeline_of(plan: Plan, atoms: Collection[str] = ()) -> Pipeline:
    return Pipeline(
        degree=plan.pipeline,
        word=plan.schedule,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        cut=tuple(filter(None, plan.cut.split(","))),
        atoms=tuple(atoms),
    )


def _staged(
    found: Found,
    plan: Plan,
    model: nn.Module,
    objective: Objective,
    batch: Any,
    device: str,
    whole: Collection[str],
) -> Found:
    atoms = [*found.blocks, *wrapped(found.tensor), *whole]
    atoms += [each.module for each in found.context.beginnings] if found.context else []
    pipe = pipeline_of(plan, dict.fromkeys(atoms))
    staged = pipe.find(model, objective, batch, device=device)
    if found.context is not None:
        from meshfit.axes.context.axis import prove  # the first rank alone plans

        step = Replayed(objective, share=staged.share, atoms=staged.atoms)
        with _proven(plan):
            prove(model, lambda twin, some: as_number(step(twin, some)), batch, found.context)
    notes = (*found.notes, *staged.notes)
    found = replace(found, pipeline=staged.to_send(), notes=notes)
    if not plan.cuts:
        return found
    assert staged.trace is not None
    stages = [pipe.stages_of(rank) for rank in range(pipe.degree)]
    every = [{name for stage in own for name in staged.split.parameters[stage]} for own in stages]
    cut = pipe.cut_of(staged.trace)
    all_of_them = staged.trace.parameters
    own = [
        replace(part_of_trace(staged.trace, cut, some), parameters={n: p for n, p in all_of_them.items() if n in names})
        for some, names in zip(stages, every, strict=True)
    ]
    tied = {name for name in set().union(*every) if sum(name in names for names in every) > 1}
    return replace(found, units=tuple(units_of_part(trace, tied) for trace in own))


def units_of_part(trace: Trace, tied: Collection[str], trunk: Collection[str] = ()) -> tuple[Unit, ...]:
    """Units of the modules that one rank calls. Parameters that other ranks hold too are cut alike on all of them:
    each of ``tied`` by itself, those of the ``trunk``, which the ranks of a branch group run alike, together.

    What a part of the model runs are recorded steps: modules around them are not called, so they are no entrances."""
    found: dict[tuple[str, ...], Unit] = {}
    for names in ([n for n in trace.parameters if n in trunk], [n for n in trace.parameters if n not in trunk]):
        part = only(trace, (e.index for e in trace.events if not set(names).isdisjoint(e.parameters)))
        events = tuple(replace(event, within=()) for event in part.events)
        held = {name: trace.parameters[name] for name in names}
        for unit in units(replace(part, events=events, parameters=held), tuple(names)):
            rows = [frozenset([name]) for name in unit.parameters if name in tied]
            rows.append(frozenset(unit.parameters).difference(tied))
            other = found.get(unit.entrances, Unit(unit.entrances, ()))
            found[unit.entrances] = Unit(
                unit.entrances, other.parameters + unit.parameters, other.rounded | unit.rounded, (*other.rows, *rows)
            )
    return tuple(found.values())


def units_of_branch(found: FoundBranches, rank: int, trace: Trace | None = None) -> tuple[Unit, ...]:
    """Units of what ``rank`` of a branch group runs, which is ``trace`` as other axes left it."""
    trace, own = trace or found.part(rank), found.dealt.parameters
    tied = [name for name, ranks in own.items() if len(ranks) > 1]
    return units_of_part(trace, tied, trunk=[name for name in trace.parameters if name not in own])


def inside_modules(split: TensorPlan) -> TensorPlan:
    """``split`` without what is in the model's own code, which no rank runs as a whole where modules are spread."""
    return replace(split, regions=tuple(r for r in split.regions if r.module or r.lookups or r.slices or r.rows))


def wrapped(split: TensorPlan | None) -> list[str]:
    """Modules at whose calls something acts: they are not to be cut."""
    paths = []
    for region in split.regions if split else ():
        apart = (*region.lookups, *region.slices, *region.rows)
        paths += [joined(region.module, path) for path in apart] if apart else [region.module]
    return [path for path in paths if path]


def split_of_part(split: TensorPlan, part: nn.Module) -> TensorPlan:
    """What of ``split`` is in one rank's part of the model; all of it, if that is the whole."""
    modules = {path: module for path, module in part.named_modules() if not isinstance(module, Shell)}
    tensors = {name for name, _ in (*part.named_parameters(remove_duplicate=False), *part.named_buffers())}
    regions = []
    for region in split.regions:
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
    return split if regions == list(split.regions) else replace(split, regions=tuple(regions))
