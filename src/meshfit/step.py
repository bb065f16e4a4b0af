"""What one optimizer step was."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfit.transfer import HostCopy


def parted(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """(loss, values to log) of what a step function returned."""
    if isinstance(result, tuple | list) and len(result) in (2, 3) and isinstance(result[1], Mapping):
        return result[0], result[1]
    return result, {}


def has_outputs(result: Any) -> bool:
    """Whether a step function returned outputs, too, for metrics: (loss, values, outputs)."""
    return isinstance(result, tuple | list) and len(result) == 3 and isinstance(result[1], Mapping)


class Reading:
    """A few numbers on their way from the device, the last of them with names. Asking for them waits until they are
    there, and lets go of the pinned memory and the event: a history of steps keeps numbers alone."""

    __slots__ = ("_coming", "_names", "_places", "_values")

    def __init__(self, *numbers: Tensor | float | bool, named: Mapping[str, Tensor | float] | None = None):
        named = named or {}
        self._names, numbers = tuple(named), (*numbers, *named.values())
        there = [n for n in numbers if isinstance(n, Tensor) and n.is_cuda]
        self._values = [math.nan if isinstance(n, Tensor) and n.is_cuda else float(n) for n in numbers]
        self._places = [i for i, n in enumerate(numbers) if isinstance(n, Tensor) and n.is_cuda]
        """Of those that are on their way."""
        self._coming = HostCopy(torch.stack([n.to(torch.float32) for n in there])) if there else None

    @property
    def ready(self) -> bool:
        return self._coming is None or self._coming.ready

    @property
    def values(self) -> list[float]:
        """Those without a name."""
        return self._all[: len(self._values) - len(self._names)]

    @property
    def named(self) -> dict[str, float]:
        return dict(zip(self._names, self._all[len(self._values) - len(self._names) :], strict=True))

    @property
    def _all(self) -> list[float]:
        if self._coming is not None:
            for place, number in zip(self._places, self._coming.tolist(), strict=True):
                self._values[place] = number
            self._coming = None
        return self._values

    def __reduce__(self):
        return _reading, (self.values, self.named)


def _reading(values: list[float], named: dict[str, float]) -> Reading:
    return Reading(*values, named=named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. On a GPU ``loss`` and ``grad_norm`` are read when they are asked for."""

    step: int
    """Counted from 1."""

    epoch: int
    """Counted from 0."""

    lr: float
    samples: int
    """Seen by all devices since the run began."""

    seconds: float
    """Since the run began."""

    reading: Reading = field(repr=False)

    valid: dict[str, float] | None = None
    """What an evaluation after this step gave."""

    last: bool = False
    """Whether an epoch ends here."""

    staleness: int | None = None
    """Updates between the weights that its gradient was computed with and those it was applied to, of asynchronous
    steps."""

    @property
    def loss(self) -> float:
        """Of the whole batch, before this step's update."""
        return self.reading.values[0]

    @property
    def grad_norm(self) -> float:
        """Of the whole gradient, before clipping."""
        return self.reading.values[1]

    @property
    def values(self) -> dict[str, float]:
        """What the step function logged, of the whole batch."""
        return self.reading.named

    @property
    def taken(self) -> bool:
        """False: the step was skipped, because loss or gradient was not finite."""
        return bool(self.reading.values[2])

    def __repr__(self) -> str:
        valid = "".join(f" valid {name} {value:.4g}" for name, value in (self.valid or {}).items())
        logged = "".join(f" {name} {value:.4g}" for name, value in self.values.items())
        return f"step {self.step} loss {self.loss:.4g}{logged}{valid}"


class Rate:
    """Samples a second, from step to step; None where that is not known, as of the first step after a resume."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def __call__(self, step: Step) -> float | None:
        last, self._last = self._last or ((0.0, 0) if step.step == 1 else None), (step.seconds, step.samples)
        if last is None or step.seconds <= last[0]:
            return None
        return (step.samples - last[1]) / (step.seconds - last[0])
