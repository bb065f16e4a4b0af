"""Tensor plans that were found before: a second start of the same model plans nothing.

A plan is kept in the user's cache folder, under a digest of all that it was found from: the modules with their plain
attributes, parameters and buffers, the operations of a step (program.py), the degree, torch and the planner's own code.
What cannot be read is planned again; the folder may be deleted at any time.
"""

import contextlib
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.record_build import tied
from meshfit.axes.tensor.plan import plan_tensor
from meshfit.axes.tensor.program import Program, contents_of, program_of, shorter
from meshfit.axes.tensor.region import Region, TensorPlan, joined
from meshfit.axes.tensor.twin import is_constant
from meshfit.comm.group import Traffic
from meshfit.errors import MeshfitError
from meshfit.launch.folders import cache_folder
from meshfit.torch_private.modules import own_buffers, own_parameters

MOST = 256
"""Plans that are kept; the oldest go first."""


def planned(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any, degree: int, *, by_rows: bool
) -> TensorPlan:
    """The plan of ``plan_tensor`` for ``loss(model, batch)``: one that was found before, or from the shortest sequences
    for which the model does the same."""
    program = program_of(model, loss, batch)
    path = None if program is None else _path(model, program, degree, by_rows)
    known = _read(path)
    if known is not None:
        return known
    found = _from_short(model, loss, batch, degree, by_rows, program)
    if found is None:
        found = plan_tensor(model, lambda twin: loss(twin, batch), degree, by_rows=by_rows)
    _write(path, found)
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


# Files


def _path(model: nn.Module, program: Program, degree: int, by_rows: bool) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(f"{torch.__version__} {_own_code()} {degree} {by_rows} {program.shaped}".encode())
    for said in _structure(model):
        digest.update(said)
    return folder / "tensor-plans" / f"{digest.hexdigest()[:40]}.pickle"


def _structure(model: nn.Module) -> Iterator[bytes]:
    """All that a plan could depend on beside what is computed."""
    for path, module in model.named_modules():
        kind = type(module)
        yield f"{path} {kind.__module__}.{kind.__qualname__} {_plain(module)}".encode()
        for value in vars(module).values():
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type):
                yield _plain(value).encode()
        for name, p in own_parameters(module).items():
            yield f"{name} {None if p is None else (tuple(p.shape), p.dtype, p.requires_grad)}".encode()
        for name, buffer in own_buffers(module).items():
            yield f"{name} {None if buffer is None else (tuple(buffer.shape), buffer.dtype)}".encode()
            yield b"" if buffer is None or buffer.is_meta else contents_of(buffer)
    yield str(sorted(tied(model).items())).encode()


def _plain(thing: Any) -> str:
    return str(sorted((name, str(value)) for name, value in vars(thing).items() if is_constant(value)))


@cache
def _own_code() -> str:
    """A digest of the planner: what another one found may not be what this one would."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in ("anatomy", "axes", "comm"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path | None) -> TensorPlan | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            found = _PlanReader(file).load()
        return found if isinstance(found, TensorPlan) else None
    except Exception:  # not there, cut off, of another time: whatever it is, it can be found again
        return None


class _PlanReader(pickle.Unpickler):
    """Reads plans, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("meshfit.axes.tensor.region", "meshfit.comm.group") or (module, name) == ("torch", "Size"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a plan")


def _write(path: Path | None, plan: TensorPlan) -> None:
    """Whole or not at all. A cache that cannot be written is no reason to stop."""
    if path is None:
        return
    with contextlib.suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                pickle.dump(plan, file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        kept = sorted(path.parent.glob("*.pickle"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in kept[MOST:]:
            old.unlink(missing_ok=True)
