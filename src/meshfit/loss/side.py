"""One run of a loss in a trial: the way it is run, and what came of it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshfit.axes.precision import Precision


@dataclass(frozen=True)
class TrialWay:
    """One way to run the trial."""

    device: torch.device
    exact: bool = False
    """In double precision, on a copy."""
    precision: Precision = Precision()  # noqa: RUF009
    gradients: bool = True
    """Also through the model, not of a loss alone."""
    training: bool = False
    """As it is trained, for a model that has no loss in eval mode; but with no dropout, and no BatchNorm over the few
    samples: the loss alone is on trial."""


@dataclass
class LossSide:
    """What came of one run."""

    value: float
    count: float | None
    """Of a loss that gives (sum, count)."""
    gradients: list[Tensor | None]
    seen: list[tuple[Tensor, Tensor, int, Tensor | None]] = field(default_factory=list)
    values: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """To be logged: each with its count, if it gives (sum, count)."""
