"""How to spread a model over the ranks of a tensor group: found, checked, and written down as a value.

Pairs of column and row weights come from ``anatomy.pairs``, as claims. Each is made into a region (where gradients are
summed on the way in, outputs on the way out) and accepted only if it passes ``check``. Code that counts heads or
channels is given its rank's number by a search over the integers its modules hold: none first, then one, then more,
each tried by the same check. Weights that no pair holds are cut by output channels, and the output gathered. What is
left, every rank holds whole.

    cost   twice a forward and backward of a copy, the search for pairs, and for each distinct block some runs of it:
           blocks of one class, with parameters of the same shapes, are checked once
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshfit.anatomy.copies import study
from meshfit.axes.prove import Refused, forgotten
from meshfit.axes.tensor.between import Between, counted_traffic, expected_traffic
from meshfit.axes.tensor.check import check, reference
from meshfit.axes.tensor.claim import NORMS, Claims, around, is_layer, merged
from meshfit.axes.tensor.find import find
from meshfit.axes.tensor.kinds import is_number, kinds_of
from meshfit.axes.tensor.region import VOCABULARY, Patch, Region, TensorPlan, joined
from meshfit.axes.tensor.vocabulary_claim import candidates, of_vocabulary, verify
from meshfit.axes.tensor.watch import watch
from meshfit.axes.tensors import shared_names
from meshfit.comm.group import Traffic
from meshfit.launch import heap
from meshfit.torch_private.trees import tree_leaves

WORTH_GATHERING = 0.01
"""Layers of one kind that hold less than this share of a model stay whole: gathering costs more than it saves."""

MOST_TRIES = 60
"""Sets of attributes that are tried for one region."""

LARGE = 2**22
"""Parameters of a module whose check takes so much memory that it is given back each time."""

CHECKED_WHOLE = 2**26
"""Parameters, over all ranks, up to which more than a block is checked at once: the finished plan on the whole model,
and blocks that were refused one by one."""


def plan_tensor(model: nn.Module, run: Callable[[nn.Module], Any], degree: int, *, by_rows: bool = False) -> TensorPlan:
    """Find how to split ``model`` over ``degree`` ranks: on one rank, on the CPU; ``model`` is not changed.
    ``by_rows``: what lies between regions is shared out too, where that is possible.

    ``run(model)`` runs a small forward, through ``model.__call__``, and returns the loss. The same model and batch give
    the same plan.
    """
    with torch.random.fork_rng(devices=[]):
        return _Planner(model, run, degree).plan(by_rows)


class _Planner:
    def __init__(self, model: nn.Module, run: Callable[[nn.Module], Any], degree: int):
        self.model, self.run, self.degree = study(model), run, degree
        self.modules = dict(self.model.named_modules())
        self.parameters = dict(self.model.named_parameters())
        self.tied = shared_names(self.model)
        self.notes: list[str] = []
        self.first: dict[Any, Region] = {}
        """Of each kind, the one that is checked."""

        self.winners: list[frozenset[str]] = []
        """Names of attributes that solved an earlier search: tried first."""

    def plan(self, by_rows: bool) -> TensorPlan:
        total = sum(p.numel() for p in self.parameters.values())
        kinds = kinds_of(self.model)
        found = candidates(self.model, kinds, WORTH_GATHERING * total)
        self.seen = seen = watch(
            self.model, self.run, found.paths, kinds=kinds, heads=found.heads, counted=found.tensors
        )
        vocabulary, why = of_vocabulary(self.model, found, seen, self.degree)
        apart = [path for region in vocabulary for path in region.inner]
        split, notes = find(self.model, seen, self.degree, apart)
        self.notes += notes
        made = Claims(self.model, seen, self.degree)
        pairs, layers = [], [layer for layer in made.of_layers(split) if not self._read_elsewhere(layer)]
        for pair in split.pairs:
            try:
                pairs.append(self._read_inside(made.of_pair(pair)))
            except Refused as refused:
                self.notes.append(f"{pair.module or 'the model'}: {pair.kind or 'pair'} refused: {refused}")
        self._choose_first(pairs + layers)
        regions, refused = self._accepted(pairs)
        regions += self._together(refused)
        regions += self._vocabulary(vocabulary, _held(regions))
        held = _held(regions)
        layers = [layer for layer in layers if joined(layer.module, "weight") not in held]
        regions += self._accepted(self._worth(layers))[0]
        regions = self._whole(regions)
        cut = {joined(r.module, c.name) for r in regions for c in r.cuts}
        self.notes += [f"{name}: not cut along the vocabulary: {reason}" for name, reason in why.items()]
        why = {**split.why, **why}
        why = {name: why.get(name, "its pair was refused") for name in self.parameters if name not in cut}
        regions = [replace(r, calls=1 if r.kind in VOCABULARY else seen.times[r.module]) for r in regions]
        inputs = [x for x in tree_leaves(seen.inputs) if isinstance(x, torch.Tensor)]
        traffic = ()
        if by_rows:
            regions, traffic = self._by_rows(regions)
        return TensorPlan(
            degree=self.degree,
            traffic=traffic,
            regions=tuple(regions),
            notes=tuple(dict.fromkeys(self.notes)),
            why=why,
            samples=max((len(x) for x in inputs if x.dim()), default=1),
            elements={name: p.numel() for name, p in self.parameters.items()},
        )

    def _read_elsewhere(self, claim: Region) -> str:
        """A parameter that is cut and that code outside of the region's module reads too: it would see a share."""
        names = [joined(claim.module, each.name) for each in claim.cuts]
        return next((name for name in names if claim.module not in self.seen.readers.get(name, (claim.module,))), "")

    def _read_inside(self, claim: Region) -> Region:
        if name := self._read_elsewhere(claim):
            raise Refused(f"{name} is read outside of {claim.module or 'the model'} too")
        return claim

    def _choose_first(self, claims: list[Region]) -> None:
        """One claim of each kind, on a module whose call was kept."""
        for claim in claims:
            key = self._likeness(claim)
            if key not in self.first or self.first[key].module not in self.seen.calls:
                self.first[key] = claim
        missing = {claim.module for claim in self.first.values()} - set(self.seen.calls)
        if missing:
            self.seen.calls |= watch(self.model, self.run, missing).calls

    def _vocabulary(self, claims: list[Region], held: set[str]) -> list[Region]:
        """Those of the embeddings and heads that pass the check."""
        accepted = []
        for claim in claims:
            if held & {joined(claim.module, cut.name) for cut in claim.cuts}:
                continue
            try:
                verify(self.model, claim, self.seen, self.degree)
                accepted.append(claim)
            except Refused as refused:
                self.notes.append(f"{', '.join((*claim.lookups, *claim.slices))}: {claim.kind} refused: {refused}")
        return accepted

    # Layers whose output is gathered

    def _worth(self, layers: list[Region]) -> list[Region]:
        """Those of a kind that together hold enough of the model."""
        total = sum(p.numel() for p in self.parameters.values())
        size: dict[Any, int] = {}
        for layer in layers:
            key = self._likeness(layer)
            size[key] = size.get(key, 0) + self._held(layer)
        return [layer for layer in layers if size[self._likeness(layer)] >= WORTH_GATHERING * total]

    # The check

    def _accepted(self, claims: list[Region]) -> tuple[list[Region], list[Region]]:
        """The claims that pass, as they passed, and those that do not; each kind is checked once."""
        verdicts: dict[Any, Region | Refused] = {}
        accepted, refused = [], []
        for claim in claims:
            key = self._likeness(claim)
            if key not in verdicts:
                try:
                    verdicts[key] = self._checked(self.first[key])
                except Refused as error:
                    verdicts[key] = error
            verdict = verdicts[key]
            if isinstance(verdict, Region):
                accepted.append(replace(verdict, module=claim.module))
            else:
                refused.append(claim)
                names = ", ".join(c.name for c in claim.cuts[:3])
                self.notes.append(
                    f"{claim.module or 'the model'}: {claim.kind or 'pair'} of {names} refused: {verdict}"
                )
        return accepted, refused

    def _together(self, refused: list[Region]) -> list[Region]:
        """Refused claims on modules of one class, as one region of the module around them: what is shared out may go
        from one to the next (a bias by head that the first of them makes)."""
        kinds: dict[tuple, list[Region]] = {}
        for claim in refused:
            kinds.setdefault((type(self.modules[claim.module]), claim.kind), []).append(claim)
        accepted = []
        for claims in kinds.values():
            home = self.seen.nearest(around([claim.module for claim in claims]))
            if len(claims) < 2 or home == claims[0].module or self._too_large(home):
                continue
            if home not in self.seen.calls:
                self.seen.calls |= watch(self.model, self.run, {home}).calls
            try:
                region = self._checked(merged(home, claims))
            except Refused as error:
                self.notes.append(f"{home or 'the model'}: {claims[0].kind or 'pair'} together refused: {error}")
                continue
            accepted.append(region)
            self.notes.append(f"{home or 'the model'}: {claims[0].kind or 'pair'} accepted together")
        return accepted

    def _checked(self, claim: Region) -> Region:
        large = sum(p.numel() for p in self.modules[claim.module].parameters()) > LARGE
        try:
            return self._passed(claim, heap.give_back if large else lambda: None)
        except Refused as refused:
            raise forgotten(refused) from None
        finally:
            if large:
                heap.give_back()

    def _passed(self, claim: Region, tidied: Callable[[], None]) -> Region:
        """The first variant that passes. ``tidied`` is called after each that does not."""
        whole = reference(self.modules[claim.module], self.seen.calls[claim.module])
        first: Refused | None = None
        for variant, patches in self._variants(claim):
            tried = replace(variant, module="", patches=claim.patches + patches, draws=whole.draws)
            try:
                partial, traffic = check(whole, (tried,), self.degree)
                self._only_here(claim.module, partial)
            except Refused as refused:
                first = first or forgotten(refused)
                tidied()
                continue
            if patches:
                self.winners.insert(0, frozenset(patch.attribute for patch in patches))
            return replace(tried, module=claim.module, partial=partial, traffic=traffic)
        assert first is not None
        raise first

    def _only_here(self, home: str, partial: tuple[str, ...]) -> None:
        """Gradients that are summed have no part from elsewhere: that would be summed along."""
        for name in (joined(home, name) for name in partial):
            path = name.rpartition(".")[0]
            if name in self.tied or home not in self.seen.within.get(path, frozenset((home,))):
                raise Refused(f"{name}, of whose gradient each rank has a part, is used elsewhere too")

    def _variants(self, claim: Region) -> Iterator[tuple[Region, tuple[Patch, ...]]]:
        """What to try: the claim; the same entered and left at the very products; entered as a whole, at the border of
        the module, where all that stays whole inside has part of its gradient. Each with sets of attributes."""
        inner = [raw.module for raw in claim.raw]
        cut = {each.name for each in claim.cuts}
        stays = [name for name, _ in self.modules[claim.module].named_parameters() if name not in cut]
        variants = [replace(claim, raw=())]
        if claim.raw:
            enters = tuple(path for path in claim.enters if path not in inner)
            leaves = tuple(each for each in claim.leaves if each.module not in inner)
            variants.append(replace(claim, enters=enters, leaves=leaves))
        if not claim.gathers and sum(self._size(claim.module, name) for name in stays) < self._held(claim):
            raw = tuple(replace(raw, columns=()) for raw in claim.raw)
            variants += [replace(v, enters=("",), raw=raw if v.raw else (), partial=tuple(stays)) for v in variants]
        tries = ((variant, patches) for patches in self._patches(claim) for variant in variants)
        yield from itertools.islice(tries, MOST_TRIES)

    def _size(self, module: str, name: str) -> int:
        return self.parameters[joined(module, name)].numel() if joined(module, name) in self.parameters else 0

    def _held(self, region: Region) -> int:
        return sum(self._size(region.module, each.name) for each in region.cuts)

    def _patches(self, claim: Region) -> Iterator[tuple[Patch, ...]]:
        """Sets of attributes to try: none, those that helped before, then by number."""
        yield ()
        if claim.gathers:
            return
        found: dict[tuple, list[Patch]] = {}
        known = {(patch.module, patch.attribute) for patch in claim.patches}
        copies = [each.copies for each in claim.cuts if each.copies > 1]
        parts = tuple(dict.fromkeys((self.degree, *copies, *(self.degree // n for n in copies))))
        holders = [f"{each.name.rpartition('.')[0]}." for each in claim.cuts]
        for path, module in self.modules[claim.module].named_modules():
            if is_layer(module) or isinstance(module, (*NORMS, nn.MultiheadAttention)):
                continue
            above = not path or any(holder.startswith(f"{path}.") for holder in holders)
            if not above and next(module.parameters(), None) is not None:
                continue  # another region may hold its weights
            for name, value in vars(module).items():
                if (path, name) in known or name.startswith("_") or is_number(name):
                    continue
                for by, (own, number) in itertools.product(parts, (("", value), *_settings(value))):
                    for place, less in _divided(number, by):
                        patch = Patch(path, f"{name}.{own}" if own else name, less)
                        found.setdefault((type(module), patch.attribute, str(number), place, by), []).append(patch)
        sets = [tuple(patches) for _, patches in sorted(found.items(), key=lambda item: "head" not in item[0][1])]
        tries = [chosen for size in (1, 2, 3) for chosen in itertools.combinations(sets[:MOST_TRIES], size)]
        tries = [t for t in tries if len({(p[0].module, p[0].attribute) for p in t}) == len(t)]  # one value each
        tries.sort(key=lambda chosen: frozenset(p.attribute for each in chosen for p in each) not in self.winners)
        yield from (tuple(itertools.chain(*chosen)) for chosen in tries[:MOST_TRIES])

    def _whole(self, regions: list[Region]) -> list[Region]:
        """The regions, after a check of all of them together where the model is small enough."""
        if not regions or self._too_large(""):
            self.notes += ["too large to be checked as a whole: each block was"] if regions else []
            return regions
        for some in (regions, [region for region in regions if region.kind != "gather"]):
            try:
                if some:
                    check(reference(self.model, self.seen.calls[""]), some, self.degree)
                return some
            except Refused as refused:
                self.notes.append(f"the model as a whole: refused: {refused}")
        return []

    def _by_rows(self, regions: list[Region]) -> tuple[list[Region], tuple[Traffic, ...]]:
        """The regions with rows cut between them, and the collectives of a step; as they are, where that is refused."""
        between, large = Between(self.model, self.seen, regions, self.degree), self._too_large("")
        try:
            cut = between.by_rows(whole=not large)
        except Refused as refused:
            self.notes.append(f"rows between regions are whole on every rank: {refused}")
            return regions, ()
        return cut, expected_traffic(cut) if large else counted_traffic(self.model, self.run, cut, self.degree)

    def _too_large(self, path: str) -> bool:
        return sum(p.numel() for p in self.modules[path].parameters()) * self.degree > CHECKED_WHOLE

    def _likeness(self, claim: Region) -> tuple:
        """Equal for claims of which one check is enough."""
        return self.seen.kind(claim.module), replace(claim, module="")


def _held(regions: list[Region]) -> set[str]:
    """Parameters that regions cut, or need whole."""
    held = {joined(r.module, name) for r in regions for name in (*r.partial, *(cut.name for cut in r.cuts))}
    return held | {joined(r.module, f"{path}.weight") for r in regions for path in r.sources}


def _settings(value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers of heads and groups in an object of settings."""
    if isinstance(value, (nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return
    yield from ((name, v) for name, v in vars(value).items() if "head" in name or "group" in name)


def _divided(value: Any, degree: int) -> Iterator[tuple[int, Any]]:
    """``value`` with an integer in it divided by ``degree``, for each that can be; in a tuple, all at once too."""

    def fits(number: Any) -> bool:
        return type(number) is int and number >= degree and number % degree == 0

    if fits(value):
        yield 0, value // degree
    elif type(value) in (tuple, list, torch.Size):
        places = [i for i, number in enumerate(value) if fits(number)]
        sets = [[i] for i in places] + ([places] if len(places) > 1 else [])
        for count, chosen in enumerate(sets):
            less = [number // degree if i in chosen else number for i, number in enumerate(value)]
            yield count, type(value)(less)
