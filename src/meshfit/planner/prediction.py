"""What a step of a plan would take on a cluster: what every predictor returns, and what the search asks of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from meshfit.cost import CollectiveCall
from meshfit.plan import Plan
from meshfit.planner.cluster import Cluster
from meshfit.planner.step import StepModel, StepWork

CONTEXT = 1.6 * 2**30
"""Bytes of CUDA's context and libraries: 1.57 GB on an A100 in the logs of BLOOM's preparation."""

SLACK = (0.02, 0.08)
"""Reserved beyond allocated: 2 to 8 % in SimuMax's rows."""


@dataclass(frozen=True)
class StepMemory:
    """At its most in a step, on a device of one stage of a pipeline and one branch."""

    held: Mapping[str, float]
    """Bytes of tensors, by kind."""

    stage: int = 0
    branch: int = 0
    context: float = CONTEXT

    @property
    def allocated(self) -> float:
        """Bytes of tensors."""
        return sum(self.held.values())

    @property
    def reserved(self) -> tuple[float, float]:
        """What the allocator may hold: from, to."""
        return self.allocated * (1 + SLACK[0]), self.allocated * (1 + SLACK[1])

    @property
    def device(self) -> tuple[float, float]:
        """What the device has in use: from, to."""
        low, high = self.reserved
        return low + self.context, high + self.context


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

    memory: StepMemory
    """Of the device that has most."""

    capacity: float
    """Bytes that it has."""

    kinds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By phase (start, first step, steady, evaluation, save, load) bytes by kind, on that device."""

    collectives: tuple[CollectiveCall, ...] = ()
    """Of a step, one by one, on the rank that says most. Of a model that was traced."""

    work: StepWork = field(repr=False)
    """What it was made of."""

    @property
    def phases(self) -> dict[str, float]:
        """Bytes of tensors in each phase."""
        return {phase: sum(kind.values()) for phase, kind in self.kinds.items()}

    @property
    def fits(self) -> bool:
        """Even if the allocator holds as much as it may."""
        return self.memory.device[1] <= self.capacity

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

    def memory(self, plan: Plan, batch: int) -> StepMemory:
        """What is asked first, of all plans."""
        ...

    def at_least(self, plan: Plan, batch: int) -> float:
        """Seconds that ``__call__`` will not go below: what is asked of all plans that fit."""
        ...
