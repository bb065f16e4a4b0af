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
    """By phase (start, first step, steady, evaluation, save, load) bytes by kind, on that device. Of a model that was
    traced, as ``collectives``."""

    collectives: tuple[CollectiveCall, ...] = ()
    """Of a step, one by one, on the rank that says most."""

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
