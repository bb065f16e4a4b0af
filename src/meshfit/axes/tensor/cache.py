"""Tensor plans that were found before (``axes/kept.py``): a second start of the same model plans nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from meshfit.axes.kept import kept_path, read_kept, write_kept
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.program import Program, program_of, shorter
from meshfit.axes.tensor.region import Region, TensorPlan, joined
from meshfit.comm.group import Traffic
from meshfit.errors import MeshfitError


def planned(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any, degree: int, *, by_rows: bool
) -> TensorPlan:
    """The plan of ``plan_tensor`` for ``loss(model, batch)``: one that was found before, or from the shortest sequences
    for which the model does the same."""
    program = program_of(model, loss, batch)
    path = kept_path("tensor-plans", model, program, degree, by_rows)
    known = read_kept(path, TensorPlan)
    if known is not None:
        return known
    found = _from_short(model, loss, batch, degree, by_rows, program)
    if found is None:
        found = plan_tensor(model, lambda twin: loss(twin, batch), degree, by_rows=by_rows)
    write_kept(path, found)
    return found


# Short sequences


def _from_short(
    model: nn.Module, loss: Callable[..., Any], batch: Any, degree: int, by_rows: bool, program: Program | None
) -> TensorPlan | None:
    short = None if program is None else shorter(batch)
    there = None if short is None else program_of(model, loss, short)
    if program is None or there is None or there.shapeless != program.shapeless:
        return None
    try:
        found = plan_tensor(model, lambda twin: loss(twin, short), degree, by_rows=by_rows)
    except MeshfitError:
        raise
    except Exception:  # the values of the batch need the whole of it, as places in it do
        return None
    return _at_length(found, there.sizes, program.sizes)


def _at_length(plan: TensorPlan, short: dict[str, int], whole: dict[str, int]) -> TensorPlan:
    """``plan``, with the traffic of whole sequences."""

    def times(region: Region) -> float:
        path = next(_places(region), region.module)
        return whole[path] / short[path] if short.get(path) and whole.get(path) else 1.0

    def longer(traffic: tuple[Traffic, ...], by: float) -> tuple[Traffic, ...]:
        return tuple(replace(each, elements=round(each.elements * by)) for each in traffic)

    regions = tuple(replace(region, traffic=longer(region.traffic, times(region))) for region in plan.regions)
    most = max((times(region) for region in plan.regions), default=1.0)
    return replace(plan, regions=regions, traffic=longer(plan.traffic, most))


def _places(region: Region) -> Iterator[str]:
    """Modules whose output it sums or gathers."""
    gathers, leaves = (path for path, _ in region.gathers), (each.module for each in region.leaves)
    for path in (*region.lookups, *region.slices, *gathers, *leaves):
        yield joined(region.module, path)
