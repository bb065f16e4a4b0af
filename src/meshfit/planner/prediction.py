"""What a step of a plan would take on a cluster: what every predictor returns, and what the search asks of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from meshfit.cost import CollectiveCall
from meshfit.plan import Plan
from meshfit.planner.cluster import Cluster
from meshfit.planner.step import StepModel
from meshfit.planner.work import StepWork


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one step under ``plan``."""

    plan: Plan
    batch: int
    """Samples, over all devices."""

    seconds: float
    items: Mapping[str, float]
    """computing, collectives (those that are waited for), bubble, update, slack, offload: they add up to
    ``seconds``."""

    held: Mapping[str, float]
    """Bytes of tensors on the device that has most, by kind."""

    used: tuple[float, float]
    """Bytes in use on that device, with context and allocator: from, to."""

    capacity: float
    """Bytes that it has."""

    kinds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By phase (start, first step, steady, evaluation, save, load) bytes by kind, on that device."""

    collectives: tuple[CollectiveCall, ...] = ()
    """Of a step, one by one, on the rank that says most. Of a model that was traced."""

    tokens: float = 0.0
    """A step; 0 where samples are not sequences."""

    model_flops: float = 0.0
    """Of all devices together, without what is computed again."""

    work: StepWork | None = field(default=None, repr=False)
    """What it was made of, for a picture."""

    @property
    def phases(self) -> dict[str, float]:
        """Bytes of tensors in each phase."""
        return {phase: sum(kind.values()) for phase, kind in self.kinds.items()}

    @property
    def fits(self) -> bool:
        """Even if the allocator holds as much as it may."""
        return self.used[1] <= self.capacity

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.seconds


def phases(most: Mapping[str, float], passed: float) -> dict[str, dict[str, float]]:
    """Bytes of tensors by kind: before the first step; in it, without optimizer state until its end; in later ones; in
    evaluation; while a checkpoint is written or read, in which whole buckets pass through host memory. ``most``, when
    there are most, but for those ``passed``: see ``Cost.passed``."""
    held = {kind: float(size) for kind, size in most.items() if size}
    rest = {kind: held.get(kind, 0.0) for kind in ("weights", "gradients", "averaging")}
    state = {**rest, "optimizer": held.get("optimizer", 0.0)}
    there = held.get("gradients", 0.0) + min(0, passed)  # when there is most
    steady = {**held, "gradients": max(0.0, there), "passing": float(max(0, passed))}
    first = {kind: size for kind, size in steady.items() if kind != "optimizer"}
    inside = {kind: held[kind] for kind in ("gathered", "rounded", "logits") if kind in held}
    found = {
        "start": rest,
        "first step": max(first, state, key=lambda kind: sum(kind.values())),
        "steady": steady,
        "evaluation": {**state, **inside, "passing": float(max(0, passed))},
        "save": state,
        "load": state,
    }
    return {phase: {kind: size for kind, size in kinds.items() if size} for phase, kinds in found.items()}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model lets the axes be."""

    divided: Mapping[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    """By axis: numbers that its degree must divide, and what they count."""

    most: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """By axis: the largest degree, and what there are so many of. Axes that are in neither cannot be used."""

    stages: int = 1
    """Layers that a pipeline may be cut between."""

    def refuses(self, axis: str, degree: int) -> str:
        """Why ``degree`` does not go; nothing if it does."""
        if degree == 1 or axis in ("data", "shard"):
            return ""
        if axis not in self.divided and axis not in self.most:
            return f"nothing in this model can be spread along {axis}="
        for number, what in self.divided.get(axis, ()):
            if number % degree:
                return f"{number} {what} do not divide by {degree}"
        number, what = self.most.get(axis, (degree, ""))
        return f"there are {number} {what}" if degree > number else ""


class Predictor(Protocol):
    """Seconds and bytes of any plan, for one model on one cluster."""

    cluster: Cluster
    steps: StepModel

    @property
    def limits(self) -> Limits: ...

    def __call__(self, plan: Plan, batch: int) -> Prediction:
        """All of it."""
        ...

    def used(self, plan: Plan, batch: int) -> tuple[float, float]:
        """Bytes in use on the device that has most: what is asked first, of all plans."""
        ...

    def memory_of(self, plan: Plan, batch: int) -> Mapping[str, float]:
        """Bytes of tensors on it, by kind."""
        ...

    def at_least(self, plan: Plan, batch: int) -> float:
        """Seconds that ``__call__`` will not go below: what is asked of all plans that fit."""
        ...
