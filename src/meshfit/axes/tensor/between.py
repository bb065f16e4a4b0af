"""What lies between regions by rows: which modules, found by trying; see ``rows``.

A module is computed by rows if it takes and returns one tensor of rows and, in double precision, gives for some of them
what it gives for these among all. Code around such modules adds and scales rows as it is; whatever else it does with
them puts them together first. All of it is accepted only if it passes ``check``: on the whole model, or on one of each
kind of block where that is too large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.anatomy.copies import converted, sharing
from meshfit.axes.prove import NoDraws, Refused
from meshfit.axes.tensor.check import Reference, check, reference
from meshfit.axes.tensor.cut import cut
from meshfit.axes.tensor.region import SEQUENCE, Region, joined
from meshfit.axes.tensor.watch import Observed
from meshfit.axes.tensors import shared_names
from meshfit.comm.draws import Stream
from meshfit.comm.group import CountingGroup, Traffic


@dataclass(frozen=True)
class Between:
    """A model whose regions are known."""

    model: nn.Module
    seen: Observed
    regions: Sequence[Region]
    degree: int

    def by_rows(self, *, whole: bool) -> list[Region]:
        """The regions, with rows cut between them; raises ``Refused``. ``whole``: the model is small enough to be
        checked at once."""
        widths = self._widths()
        if not widths:
            raise Refused("nothing between regions has rows")
        modules = self._modules(widths)
        outside = {path: draws for path, draws in modules.items() if not self._in_region(path)}
        refused: Refused | None = None
        for some in (modules, outside):
            tried = self._with(some)
            try:
                self._check(tried, whole)
                return tried
            except Refused as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _widths(self) -> set[int]:
        """Of the rows that leave regions."""
        outs = [self._output(joined(r.module, leave.module)) for r in self.regions for leave in r.leaves]
        return {out.shape[-1] for out in outs if _has_rows(out)}

    def _with(self, modules: dict[str, bool]) -> list[Region]:
        regions = []
        for region in self.regions:
            outs = {each: self._output(joined(region.module, each.module)) for each in region.leaves}
            leaves = tuple(replace(each, rows=_has_rows(outs[each])) for each in region.leaves)
            biases = [each.bias for each in leaves if each.rows and each.bias]
            regions.append(replace(region, leaves=leaves, partial=tuple(dict.fromkeys((*region.partial, *biases)))))
        for draws in (False, True):
            paths = tuple(path for path, drawn in modules.items() if drawn == draws)
            names = [
                joined(path, name) for path in paths for name, _ in self.model.get_submodule(path).named_parameters()
            ]
            if paths:
                regions.append(Region(module="", kind="rows", cuts=(), rows=paths, partial=tuple(names), draws=draws))
        return regions

    # Modules that are computed by rows

    def _modules(self, widths: set[int]) -> dict[str, bool]:
        """Their paths, and whether they draw random numbers."""
        shared, held = shared_names(self.model), self._held()
        found: dict[str, bool] = {}
        known: dict[Any, bool | None] = {}
        for path, module in self.model.named_modules():
            if not path or not self.seen.called(path) or any(path.startswith(f"{outer}.") for outer in found):
                continue
            names = [joined(path, name) for name, _ in module.named_parameters()]
            alone = all(name not in shared and path in self.seen.readers.get(name, (path,)) for name in names)
            if not alone or any(place == path or place.startswith(f"{path}.") for place in held):
                continue
            key = self.seen.kind(path)
            if key not in known:
                known[key] = self._draws(path, widths)
            draws = known[key]
            if draws is not None:
                found[path] = draws
        return found

    def _draws(self, path: str, widths: set[int]) -> bool | None:
        """Whether a module that can be computed by rows draws random numbers; None if it cannot."""
        like = self._like(path)
        if like is None:
            return None
        (args, kwargs), out = self.seen.calls[like].inputs, self.seen.outputs[like]
        if len(args) != 1 or kwargs or not _has_rows(args[0]) or not _has_rows(out):
            return None
        (given,) = args
        if given.shape[-1] not in widths:
            return None
        if out.shape[:-1] != given.shape[:-1] or given.shape[SEQUENCE] < 2:
            return None
        module, x = converted(self.model.get_submodule(path), torch.float64), given.detach().double()
        half = x.shape[SEQUENCE] // 2
        met: list[Tensor | None] = []
        try:
            with torch.no_grad(), NoDraws(met.append):
                whole, parts = module(x), torch.cat((module(x[..., :half, :]), module(x[..., half:, :])), SEQUENCE)
        except (RuntimeError, TypeError, ValueError):
            return None
        same = parts.shape == whole.shape and torch.allclose(parts, whole, rtol=1e-5, atol=1e-7)
        return bool(met) if same and None not in met else None

    def _held(self) -> set[str]:
        """Modules at which regions act, or whose weights they cut."""
        held = set()
        for r in self.regions:
            inside = [*r.enters, *r.lookups, *r.slices, *r.sources, *r.heads, *(path for path, _ in r.gathers)]
            inside += [each.module for each in (*r.leaves, *r.raw)]
            inside += [each.name.rpartition(".")[0] for each in r.cuts]
            held |= {joined(r.module, path) for path in inside}
        return held

    def _in_region(self, path: str) -> bool:
        homes = [r.module for r in self.regions if r.leaves]
        return any(not home or path.startswith(f"{home}.") for home in homes)

    def _like(self, path: str) -> str | None:
        """A module of the same kind whose call was kept."""
        kept = (other for other in self.seen.calls if other in self.seen.outputs)
        return next((other for other in kept if self.seen.kind(other) == self.seen.kind(path)), None)

    def _output(self, path: str) -> Any:
        like = self._like(path)
        out = None if like is None else self.seen.outputs[like]
        return out[0] if isinstance(out, tuple | list) and out else out

    # The check

    def _check(self, regions: list[Region], whole: bool) -> None:
        if whole:
            return _passes(reference(self.model, self.seen.calls[""]), regions, self.degree)
        for paths in self.seen.blocks():
            home = next(path for path in paths if path in self.seen.calls)
            inside = [part for region in regions if (part := _part(region, home)) is not None]
            if inside:
                _passes(reference(self.model.get_submodule(home), self.seen.calls[home]), inside, self.degree)
        return None


def counted_traffic(
    model: nn.Module, run: Callable[[nn.Module], Any], regions: Sequence[Region], degree: int
) -> tuple[Traffic, ...]:
    """The collectives of a forward and backward, counted on one rank that has all of the weights."""
    twin, group = sharing(model), CountingGroup(counted=degree)
    stream = Stream(group)
    for region in regions:
        cut(twin, replace(region, cuts=(), patches=()), group, stream)
    inside = {joined(r.module, each.name) for r in regions if r.leaves for each in r.cuts}  # whose gradients cost most
    trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        wanted = [p for name, p in trained.items() if name not in inside] or list(trained.values())
        torch.autograd.grad(run(twin), wanted, allow_unused=True)
    return tuple(group.log)


def expected_traffic(regions: Sequence[Region]) -> tuple[Traffic, ...]:
    """The same from the traffic of each region, without running the model: all but a few collectives at the ends of
    chains of regions."""
    found: list[Traffic] = []
    for region in regions:
        if not any(leave.rows for leave in region.leaves):
            found += [each for each in region.traffic for _ in range(region.calls)]
            continue
        for each in region.traffic:
            there, back = ("reduce_scatter", "all_gather") if not each.backward else ("all_gather", "reduce_scatter")
            both = replace(each, op=there, backward=False), replace(each, op=back, backward=True)
            found += both * region.calls
    return tuple(found)


def _passes(whole: Reference, regions: list[Region], degree: int) -> None:
    partial, _ = check(whole, regions, degree)
    for name in (joined(r.module, name) for r in regions for name in r.partial if name not in partial):
        grad = whole.result.parameters.get(name)
        if name not in partial and grad is not None and grad.abs().max() > 0:
            raise Refused(f"the gradient of {name} is whole on every rank")


def _part(region: Region, home: str) -> Region | None:
    """What of it lies in the module ``home``."""
    start = f"{home}."
    if region.rows:
        inside = lambda paths: tuple(path[len(start) :] for path in paths if path.startswith(start))
        part = replace(region, rows=inside(region.rows), partial=inside(region.partial))
        return part if part.rows else None
    if region.module == home or region.module.startswith(start):
        return replace(region, module=region.module[len(start) :])
    return None


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3
