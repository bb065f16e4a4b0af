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
from dataclasses import dataclass, field, replace
from itertools import product
from time import perf_counter

from meshfit.errors import PlanError
from meshfit.plan import DEGREES, Plan
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
    needs = {"zero": "shard", "schedule": "pipeline", "chunks": "pipeline", "cut": "pipeline"}
    needs |= {"sequence": "tensor", "attention": "context"}
    words = {word.partition("=")[0] for word in text.split()}
    return " ".join([text, *(f"{axis}=2" for axis in {needs[w] for w in words if w in needs} - words)])


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


def search(predictor: Predictor, batch: int, allowed: Allowed | None = None, devices: int | None = None) -> Found:
    """The best plan for steps of ``batch`` samples on ``devices`` (all of the cluster's, if not said)."""
    began, allowed = perf_counter(), allowed or Allowed()
    count = devices or predictor.cluster.devices
    layouts, odd = _families(predictor, batch, allowed, count)
    if not layouts and not odd:
        return Found(None, (), seconds=perf_counter() - began, refused=_no_layout(predictor, allowed, count))
    fitting: dict[tuple[str, ...], FittingPlans] = {}
    for offload in ("none", *OFFLOADS) if allowed.offload and "offload" not in allowed.fixed else ("",):
        fitting = {axes: _fitting(predictor, batch, allowed, some, offload) for axes, some in layouts.items()}
        if any(found.plans for found in fitting.values()):
            break
    families, priced = [_undivided(axes, shares, batch) for axes, shares in odd.items()], 0
    for axes, found in fitting.items():
        best, exact = _best(predictor, batch, found.plans)
        families.append(Family(axes, best, *(("", "") if best else _why(predictor, batch, found, layouts[axes]))))
        priced += exact
    families.sort(key=lambda family: (family.best is None, family.best.seconds if family.best else len(family.axes)))
    best = next((family.best for family in families if family.best is not None), None)
    looked, fits = sum(f.looked for f in fitting.values()), sum(len(f.plans) for f in fitting.values())
    return Found(best, tuple(families), looked, fits, priced, perf_counter() - began)


def divisors(number: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


Axes = tuple[str, ...]


def _families(
    predictor: Predictor, batch: int, allowed: Allowed, devices: int
) -> tuple[dict[Axes, list[dict[str, int]]], dict[Axes, int]]:
    """Degrees of every layout, by the axes that it uses; and the axes whose layouts all have more shares than divide
    the batch, with the least number of these."""
    found: dict[Axes, list[dict[str, int]]] = {}
    odd: dict[Axes, int] = {}
    for layout in _layouts(predictor, allowed, devices):
        shares = layout["data"] * layout["shard"] * layout["expert"]
        axes = tuple(axis for axis in DEGREES if layout[axis] > 1)
        if batch % shares == 0:
            found.setdefault(axes, []).append(layout)
        else:
            odd[axes] = min(shares, odd.get(axes, shares))
    return found, {axes: shares for axes, shares in odd.items() if axes not in found}


def _undivided(axes: Axes, shares: int, batch: int) -> Family:
    reason = f"{' '.join(axes)}: {batch} samples do not divide over {shares}"
    return Family(axes, None, reason, f"a batch of {-(-batch // shares) * shares} would")


def _no_layout(predictor: Predictor, allowed: Allowed, devices: int) -> str:
    said = {axis: int(allowed.fixed[axis]) for axis in DEGREES if axis in allowed.fixed}
    for axis, degree in said.items():
        if why := predictor.limits.refuses(axis, degree):
            return f"{axis}={degree}: {why}"
    words = " ".join(f"{axis}={degree}" for axis, degree in said.items())
    return f"{words} does not divide {devices} devices"


def _layouts(predictor: Predictor, allowed: Allowed, devices: int) -> Iterator[dict[str, int]]:
    """Degrees whose product is ``devices``."""
    limits, domain = predictor.limits, min(predictor.cluster.domain, devices)
    inner = ("tensor", "branch", "context", "expert", "pipeline")

    def free(axis: str) -> list[int]:
        reach = domain if axis in ("tensor", "branch") else devices
        return [n for n in divisors(devices) if n <= reach and not limits.refuses(axis, n)]

    options = [[int(n) for n in allowed.options(axis, free(axis))] for axis in inner]
    for chosen in product(*options):
        rest, odd = divmod(devices, math.prod(chosen))
        if odd or rest == 0:
            continue
        degrees = dict(zip(inner, chosen, strict=True))
        near = max(1, domain // math.prod(chosen[:4]))
        for shard in allowed.options("shard", [n for n in divisors(rest) if n in (1, rest, near)]):
            data, odd = divmod(rest, int(shard))
            if not odd and allowed.fixed.get("data", data) == data:
                yield degrees | {"shard": int(shard), "data": data}


def _plans(predictor: Predictor, batch: int, allowed: Allowed, layout: dict[str, int]) -> Iterator[Plan]:
    """Plans of one layout, without the words that trade time for memory."""
    samples = batch // (layout["data"] * layout["shard"] * layout["expert"])
    pipeline = layout["pipeline"]
    counts = [n for n in divisors(samples) if samples // n <= LARGEST and (n >= pipeline or n == samples)]
    words = {k: v for k, v in allowed.fixed.items() if k not in (*DEGREES, "zero", "schedule", "chunks", "recompute")}
    for microbatches, precision in product(
        allowed.options("microbatches", counts), allowed.options("precision", allowed.precisions)
    ):
        for schedule_, chunks in _schedules(predictor, allowed, pipeline, int(microbatches)):
            given = layout | {"microbatches": microbatches, "precision": precision}
            given |= words | ({"schedule": schedule_, "chunks": chunks} if pipeline > 1 else {})
            if (plan := _made(given)) is not None:
                yield plan


def _made(given: Mapping[str, int | str]) -> Plan | None:
    try:
        return Plan(**given)  # type: ignore[arg-type]
    except PlanError:  # words that the user fixed and that do not go with this layout
        return None


def _schedules(
    predictor: Predictor, allowed: Allowed, pipeline: int, microbatches: int
) -> Iterator[tuple[int | str, int]]:
    if pipeline == 1:
        yield "", 0
        return
    for word in allowed.options("schedule", SCHEDULES):
        many = allowed.options("chunks", CHUNKS if word == "interleaved" else (0,))
        for chunks in map(int, many):
            each = chunks or (2 if word in ("zbv", "dualpipev") else 1)
            if pipeline * each > predictor.limits.stages or (each > 1 and microbatches < pipeline):
                continue
            if any((predictor.limits.stages + ends) % (pipeline * each) == 0 for ends in (0, 1, 2)) or each == 1:
                if word == "interleaved" and microbatches % max(1, microbatches // pipeline):
                    continue
                if word == "dualpipev" and microbatches < 2 * pipeline:
                    continue
                yield word, chunks


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


def _fitting(
    predictor: Predictor, batch: int, allowed: Allowed, layouts: Sequence[dict[str, int]], offload: str
) -> FittingPlans:
    fits: list[Plan] = []
    least: tuple[float, Plan] | None = None
    looked, refused = 0, ""
    for layout in layouts:
        for plan in _plans(predictor, batch, allowed, layout):
            try:
                found, needs, count = _thrifty(predictor, batch, allowed, plan, offload)
            except PlanError as error:  # the model cannot be spread so
                refused = str(error).splitlines()[0]
                break
            fits, looked = fits + found, looked + count
            least = needs if least is None or needs[0] < least[0] else least
    return FittingPlans(fits, least, looked, refused)


def _thrifty(
    predictor: Predictor, batch: int, allowed: Allowed, plan: Plan, offload: str
) -> tuple[list[Plan], tuple[float, Plan], int]:
    """``plan`` by what it recomputes and shards: of each ZeRO level the least recomputation that fits. Beside them the
    plan that needs least, and how many were looked at."""
    words = {"offload": offload} if offload else {}
    recomputes = [str(word) for word in allowed.options("recompute", RECOMPUTES)]
    if plan.compile == "whole":  # with the loss, and nothing is computed twice
        recomputes = [word for word in recomputes if word == "none"] or recomputes
    if plan.compile == "block":
        recomputes = [word for word in recomputes if "selective" not in word] or recomputes
    if "activations" in (offload or str(allowed.fixed.get("offload", ""))):
        recomputes = [word for word in recomputes if "selective" not in word] or recomputes
    found: list[Plan] = []
    least, looked = (math.inf, plan), 0

    def fits(made: Plan) -> bool:
        nonlocal least, looked
        looked, needs = looked + 1, predictor.used(made, batch)[1]
        least = (needs, made) if needs < least[0] else least
        return needs <= predictor.cluster.accelerator.memory

    for zero in map(int, allowed.options("zero", (1, 2, 3)) if plan.shard > 1 else (3,)):
        made = lambda word, zero=zero: replace(plan, recompute=word, zero=zero, **words)
        if fits(thriftiest := made(recomputes[-1])):  # or none does
            found.append(next(filter(fits, map(made, recomputes[:-1])), thriftiest))
    return found, least, looked


def _best(predictor: Predictor, batch: int, plans: list[Plan]) -> tuple[Prediction | None, int]:
    """The fastest, and how many were predicted whole."""
    bounds = sorted(((predictor.at_least(plan, batch), i) for i, plan in enumerate(plans)))
    best, exact = None, 0
    for bound, i in bounds:
        if best is not None and bound >= best.seconds:
            break
        found, exact = predictor(plans[i], batch), exact + 1
        best = found if best is None or found.seconds < best.seconds else best
    return best, exact


def _why(predictor: Predictor, batch: int, found: FittingPlans, layouts: Sequence[dict[str, int]]) -> tuple[str, str]:
    """Why nothing of a family fits, and what would have to change."""
    if found.refused:
        return found.refused, "another model"
    if found.least is None:
        samples = max(batch // (one["data"] * one["shard"] * one["expert"]) for one in layouts)
        least = min(one["pipeline"] for one in layouts)
        if samples >= least:
            degrees = " ".join(f"{axis}={n}" for axis, n in layouts[0].items() if n > 1) or "data=1"
            return f"{degrees}: the other words of the plan do not go with it", "other words would"
        said = f"{samples} samples a copy are too few microbatches for {least} stages"
        return said, f"a batch of {batch * -(-least // samples)}"
    needs, plan = found.least
    capacity = predictor.cluster.accelerator.memory
    most = max(predictor.memory_of(plan, batch).items(), key=lambda item: item[1])
    return f"{plan}: needs {size(needs)} of {size(capacity)}", f"{size(most[1])} of it are {most[0]}"
