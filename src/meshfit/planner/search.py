"""The best plan for a model on a cluster, and the best of each family of plans.

Every combination that the user allows is written down, and is dropped as soon as it is known to lose:

    divisibility   heads, layers, experts, samples; tensor= and context= stay where the fast link reaches
    memory         of each layout the least recomputation that fits, and nothing is offloaded unless nothing fits
    a lower bound  of its seconds, without simulating its schedule
    all of it      in the order of that bound, until no other of its family can be faster

So the best of each family is the best by the cost model, not by a guess. A family is the set of axes that a plan uses.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from time import perf_counter
from typing import Any

from meshfit.anatomy.shares import divisors
from meshfit.errors import PlanError
from meshfit.plan import DEGREES, NEEDS, Plan
from meshfit.plan_words import words_of
from meshfit.planner.prediction import Prediction, Predictor
from meshfit.units import size

RECOMPUTES = ("none", "loss", "selective", "selective+loss", "full", "full+loss")
"""From the least time to the least memory."""

OFFLOADS = ("optimizer", "optimizer+activations")
SCHEDULES = ("1f1b", "interleaved", "zbv", "dualpipev")
CHUNKS = (2, 3, 4, 5, 6)
LARGEST = 64
"""Samples of a microbatch: more do not make products faster."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What the user leaves to the search."""

    fixed: Mapping[str, int | str] = field(default_factory=dict)
    """Words of the plan that are said."""

    precisions: tuple[str, ...] = ("bf16",)
    offload: bool = True
    """Whether state may go to host memory where nothing else fits."""

    @classmethod
    def of(cls, text: str, precisions: Sequence[str] = ("bf16",)) -> "Allowed":
        """A partial plan: "tensor=2 recompute=full" says two words, "auto" none."""
        said = [own for _, own in words_of(text) if own != "auto"]
        words = [word.partition("=")[0] for word in said]
        plan = Plan.parse(_standing(" ".join(said)))
        for word in precisions:
            Plan(precision=word)  # refuses what there is not
        fixed = {word: getattr(plan, word) for word in words}
        return cls(fixed=fixed, precisions=(str(fixed["precision"]),) if "precision" in fixed else tuple(precisions))

    def options(self, word: str, free: Sequence[int | str]) -> list[int | str]:
        return [self.fixed[word]] if word in self.fixed else list(free)


def _standing(text: str) -> str:
    """With what a word needs beside it, so that a partial plan can be read: "schedule=zbv" goes with a pipeline."""
    words = {word.partition("=")[0] for word in text.split()}
    needed = {NEEDS[word] for word in words if NEEDS.get(word) in DEGREES}
    return " ".join([text, *(f"{axis}=2" for axis in needed - words)])


@dataclass(frozen=True)
class Family:
    """Plans that use the same axes."""

    axes: tuple[str, ...]
    best: Prediction | None
    reason: str = ""
    """Why there is none."""
    remedy: str = ""
    """What would have to change."""

    @property
    def name(self) -> str:
        return " ".join(self.axes) or "one device"


@dataclass(frozen=True)
class Found:
    """What a search found, and how much it looked at."""

    best: Prediction | None
    families: tuple[Family, ...]
    """The fastest first; those in which nothing fits come last."""
    written: int = 0
    fitting: int = 0
    priced: int = 0
    seconds: float = 0.0
    refused: str = ""
    """Why what was said of the plan goes with no layout of these devices."""

    @property
    def rejected(self) -> tuple[Family, ...]:
        return tuple(family for family in self.families if family.best is None)


Axes = tuple[str, ...]
Layout = dict[str, int]
"""Degrees along all axes."""


def search(predictor: Predictor, batch: int, allowed: Allowed | None = None, devices: int | None = None) -> Found:
    """The best plan for steps of ``batch`` samples on ``devices`` (all of the cluster's, if not said)."""
    return _PlanSearch(predictor, batch, allowed or Allowed(), devices or predictor.cluster.devices).found()


@dataclass(frozen=True)
class FittingPlans:
    """Of one family."""

    plans: list[Plan]
    """That fit."""
    least: tuple[float, Plan] | None
    """Bytes, and the plan that needs so little."""
    looked: int
    refused: str = ""
    """Why a plan of it cannot be."""


@dataclass(frozen=True)
class _PlanSearch:
    predictor: Predictor
    batch: int
    allowed: Allowed
    devices: int

    def found(self) -> Found:
        began, allowed = perf_counter(), self.allowed
        layouts, odd = self._families()
        if not layouts and not odd:
            return Found(None, (), seconds=perf_counter() - began, refused=self._no_layout())
        fitting: dict[Axes, FittingPlans] = {}
        for offload in ("none", *OFFLOADS) if allowed.offload and "offload" not in allowed.fixed else ("",):
            fitting = {axes: self._fitting(some, offload) for axes, some in layouts.items()}
            if any(found.plans for found in fitting.values()):
                break
        families, priced = [self._undivided(axes, shares) for axes, shares in odd.items()], 0
        for axes, found in fitting.items():
            best, exact = self._best(found.plans)
            families.append(Family(axes, best, *(("", "") if best else self._why(found, layouts[axes]))))
            priced += exact
        families.sort(key=lambda f: (f.best is None, f.best.seconds if f.best else len(f.axes)))
        best = next((family.best for family in families if family.best is not None), None)
        looked, fits = sum(f.looked for f in fitting.values()), sum(len(f.plans) for f in fitting.values())
        return Found(best, tuple(families), looked, fits, priced, perf_counter() - began)

    # Degrees

    def _families(self) -> tuple[dict[Axes, list[Layout]], dict[Axes, int]]:
        """Layouts by the axes that they use; and the axes whose layouts all have more shares than divide the batch,
        with the least number of these."""
        found: dict[Axes, list[Layout]] = {}
        odd: dict[Axes, int] = {}
        for layout in self._layouts():
            axes = tuple(axis for axis in DEGREES if layout[axis] > 1)
            if self.batch % (shares := _shares(layout)) == 0:
                found.setdefault(axes, []).append(layout)
            else:
                odd[axes] = min(shares, odd.get(axes, shares))
        return found, {axes: shares for axes, shares in odd.items() if axes not in found}

    def _undivided(self, axes: Axes, shares: int) -> Family:
        reason = f"{' '.join(axes)}: {self.batch} samples do not divide over {shares}"
        return Family(axes, None, reason, f"a batch of {-(-self.batch // shares) * shares} would")

    def _no_layout(self) -> str:
        said = {axis: int(self.allowed.fixed[axis]) for axis in DEGREES if axis in self.allowed.fixed}
        for axis, degree in said.items():
            if why := self.predictor.limits.refuses(axis, degree):
                return f"{axis}={degree}: {why}"
        words = " ".join(f"{axis}={degree}" for axis, degree in said.items())
        return f"{words} does not divide {self.devices} devices"

    def _layouts(self) -> Iterator[Layout]:
        """Those whose product is ``devices``."""
        limits, domain = self.predictor.limits, min(self.predictor.cluster.domain, self.devices)
        inner = ("tensor", "branch", "context", "expert", "pipeline")

        def free(axis: str) -> list[int]:
            reach = domain if axis in ("tensor", "branch") else self.devices
            return [n for n in divisors(self.devices) if n <= reach and not limits.refuses(axis, n)]

        options = [[int(n) for n in self.allowed.options(axis, free(axis))] for axis in inner]
        for chosen in product(*options):
            rest, odd = divmod(self.devices, math.prod(chosen))
            if odd or rest == 0:
                continue
            degrees = dict(zip(inner, chosen, strict=True))
            near = max(1, domain // math.prod(chosen[:4]))
            for shard in self.allowed.options("shard", [n for n in divisors(rest) if n in (1, rest, near)]):
                data, odd = divmod(rest, int(shard))
                if not odd and self.allowed.fixed.get("data", data) == data:
                    yield degrees | {"shard": int(shard), "data": data}

    # Plans

    def _plans(self, layout: Layout) -> Iterator[Plan]:
        """Plans of one layout, without the words that trade time for memory."""
        fixed, pipeline, samples = self.allowed.fixed, layout["pipeline"], self.batch // _shares(layout)
        counts = [n for n in divisors(samples) if samples // n <= LARGEST and (n >= pipeline or n == samples)]
        words = {k: v for k, v in fixed.items() if k not in (*DEGREES, "zero", "schedule", "chunks", "recompute")}
        precisions = self.allowed.options("precision", self.allowed.precisions)
        for microbatches, precision in product(self.allowed.options("microbatches", counts), precisions):
            for schedule, chunks in self._schedules(pipeline, int(microbatches)):
                given: dict[str, Any] = layout | {"microbatches": microbatches, "precision": precision} | words
                given |= {"schedule": schedule, "chunks": chunks} if pipeline > 1 else {}
                with suppress(PlanError):  # words that the user fixed and that do not go with this layout
                    yield Plan(**given)

    def _schedules(self, pipeline: int, microbatches: int) -> Iterator[tuple[int | str, int]]:
        if pipeline == 1:
            yield "", 0
            return
        stages = self.predictor.limits.stages
        for word in self.allowed.options("schedule", SCHEDULES):
            for chunks in map(int, self.allowed.options("chunks", CHUNKS if word == "interleaved" else (0,))):
                each = chunks or (2 if word in ("zbv", "dualpipev") else 1)
                if pipeline * each > stages or (each > 1 and microbatches < pipeline):
                    continue
                if each > 1 and all((stages + ends) % (pipeline * each) for ends in (0, 1, 2)):
                    continue
                if word == "interleaved" and microbatches % max(1, microbatches // pipeline):
                    continue
                if word == "dualpipev" and microbatches < 2 * pipeline:
                    continue
                yield word, chunks

    def _fitting(self, layouts: Sequence[Layout], offload: str) -> FittingPlans:
        fits: list[Plan] = []
        least: tuple[float, Plan] | None = None
        looked, refused = 0, ""
        for layout in layouts:
            for plan in self._plans(layout):
                try:
                    found, needs, count = self._thrifty(plan, offload)
                except PlanError as error:  # the model cannot be spread so
                    refused = str(error).splitlines()[0]
                    break
                fits, looked = fits + found, looked + count
                least = needs if least is None or needs[0] < least[0] else least
        return FittingPlans(fits, least, looked, refused)

    def _thrifty(self, plan: Plan, offload: str) -> tuple[list[Plan], tuple[float, Plan], int]:
        """``plan`` by what it recomputes and shards: of each ZeRO level the least recomputation that fits. Beside them
        the plan that needs least, and how many were looked at."""
        words = {"offload": offload} if offload else {}
        recomputes = [str(word) for word in self.allowed.options("recompute", RECOMPUTES)]
        if plan.compile == "whole":  # with the loss, and nothing is computed twice
            recomputes = [word for word in recomputes if word == "none"] or recomputes
        if plan.compile == "block" or "activations" in (offload or str(self.allowed.fixed.get("offload", ""))):
            recomputes = [word for word in recomputes if "selective" not in word] or recomputes
        found: list[Plan] = []
        least, looked = (math.inf, plan), 0

        def fits(made: Plan) -> bool:
            nonlocal least, looked
            looked, needs = looked + 1, self.predictor.memory(made, self.batch).device[1]
            least = (needs, made) if needs < least[0] else least
            return needs <= self.predictor.cluster.accelerator.memory

        for zero in map(int, self.allowed.options("zero", (1, 2, 3)) if plan.shard > 1 else (3,)):
            made = lambda word, zero=zero: replace(plan, recompute=word, zero=zero, **words)
            if fits(thriftiest := made(recomputes[-1])):  # or none does
                found.append(next(filter(fits, map(made, recomputes[:-1])), thriftiest))
        return found, least, looked

    def _best(self, plans: list[Plan]) -> tuple[Prediction | None, int]:
        """The fastest, and how many were predicted whole."""
        bounds = sorted((self.predictor.at_least(plan, self.batch), i) for i, plan in enumerate(plans))
        best, exact = None, 0
        for bound, i in bounds:
            if best is not None and bound >= best.seconds:
                break
            found, exact = self.predictor(plans[i], self.batch), exact + 1
            best = found if best is None or found.seconds < best.seconds else best
        return best, exact

    def _why(self, found: FittingPlans, layouts: Sequence[Layout]) -> tuple[str, str]:
        """Why nothing of a family fits, and what would have to change."""
        if found.refused:
            return found.refused, "another model"
        if found.least is None:
            samples = max(self.batch // _shares(layout) for layout in layouts)
            least = min(layout["pipeline"] for layout in layouts)
            if samples >= least:
                degrees = " ".join(f"{axis}={n}" for axis, n in layouts[0].items() if n > 1) or "data=1"
                return f"{degrees}: the other words of the plan do not go with it", "other words would"
            said = f"{samples} samples a copy are too few microbatches for {least} stages"
            return said, f"a batch of {self.batch * -(-least // samples)}"
        needs, plan = found.least
        held = self.predictor.memory(plan, self.batch).held
        most = max(held, key=lambda kind: held[kind])
        return (
            f"{plan}: needs {size(needs)} of {size(self.predictor.cluster.accelerator.memory)}",
            f"{size(held[most])} of it are {most}",
        )


def _shares(layout: Layout) -> int:
    return layout["data"] * layout["shard"] * layout["expert"]
