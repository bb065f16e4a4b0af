"""Mixtures of experts in a model, and how they lie over ranks, as values."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from meshfit.axes.tensor.region import Cut


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Experts that get rows by a router's choice: ``count`` of them, each rank has as many."""

    module: str
    """Path of the module whose forward meets the other ranks: the experts as one, or what calls them one by one."""

    count: int
    listed: tuple[str, ...] = ()
    """Paths of the experts, where each is a module; else they are slices of ``module``'s own parameters."""

    grouped: str = ""
    """Whether those of a rank may run as one, by grouped products (grouped.py): "fast" where that pays, "always" for a
    trial; "" they may not."""

    numbers: tuple[str, ...] = ()
    """Attributes of ``module`` that say how many there are."""

    cuts: tuple[Cut, ...] = ()
    """By the names that the whole model knows. Of experts that are modules a rank has all, or nothing."""

    rows: int = 0
    """Sent to experts in the call that it was found by."""
    width: int = 0
    made: int = 0
    """Elements of a row, and of what an expert makes of it."""
    calls: int = 1
    """In one forward of the model."""

    block: str = ""
    beside: str = ""
    """Paths of the module that calls the experts, and of one that it calls after them with what it was given itself: a
    shared expert. Empty where there is none."""

    def relative(self) -> "Mixture":
        """The same, as ``module`` itself knows it."""
        prefix = f"{self.module}." if self.module else ""
        cuts = tuple(replace(cut, name=cut.name.removeprefix(prefix)) for cut in self.cuts)
        listed = tuple(path.removeprefix(prefix) for path in self.listed)
        return replace(self, module="", listed=listed, cuts=cuts, block="", beside="")


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    degree: int
    mixtures: tuple[Mixture, ...] = ()
    samples: int = 0
    """Of the batch that they were found by."""
    why: dict[str, str] = field(default_factory=dict)
    """Mixtures that are left whole, and why."""

    counts: tuple[int, ...] = ()
    """Of experts, in all mixtures that there are."""

    batched: tuple[str, ...] = ()
    """Parameters of which one batched product uses all slices: those may be experts, which cannot be spread."""

    def holds(self, path: str) -> bool:
        """Whether a module lies inside one that meets other ranks."""
        return any(path != each.module and f"{path}.".startswith(f"{each.module}.") for each in self.mixtures)

    @property
    def cuts(self) -> dict[str, Cut]:
        return {cut.name: cut for mixture in self.mixtures for cut in mixture.cuts}

    def without(self, why: dict[str, str]) -> "ExpertPlan":
        """The plan with the mixtures in ``why`` left whole, for the reasons there."""
        mixtures = tuple(mixture for mixture in self.mixtures if mixture.module not in why)
        return replace(self, mixtures=mixtures, why={**self.why, **why})

    def only(self, names: Collection[str]) -> "ExpertPlan":
        """What it says of some parameters: those of one rank of a pipeline."""
        return replace(self, mixtures=tuple(m for m in self.mixtures if any(cut.name in names for cut in m.cuts)))

    def fitted(self, lengths: Mapping[str, int]) -> "ExpertPlan":
        """The plan for parameters of which another axis has cut some: ``lengths`` of their first dims now. An expert
        that is a module is on one rank, however long its parameters are."""

        def fit(cut: Cut) -> Cut:
            length = lengths.get(cut.name, cut.size)
            return replace(cut, ranges=tuple(((0, length),) if held else () for held in cut.ranges))

        mixtures = [replace(m, cuts=tuple(map(fit, m.cuts))) if m.listed else m for m in self.mixtures]
        return replace(self, mixtures=tuple(mixtures))

    def explain(self) -> list[str]:
        """What was found, in words."""
        counts = sorted({mixture.count for mixture in self.mixtures})
        of = " or ".join(map(str, counts))
        count = len(self.mixtures)
        found = [f"expert: {count} mixture{'s' * (count != 1)} of {of} experts, each over {self.degree} devices"]
        return found + [f"expert: {path} is left whole: {why}" for path, why in self.why.items()]
