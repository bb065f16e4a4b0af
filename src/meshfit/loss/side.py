"""One run of a loss in a trial: the way it is run, what came of it, and what the code rounds in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfit.axes.precision import Precision
from meshfit.torch_private.operators import TorchDispatchMode


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
    full_mask: bool = False
    """Whether it is over a mask that is all ones for these samples."""


class Rounding(TorchDispatchMode):
    """Tells to what code rounds doubles by itself: ``x.float()`` in a norm, ``x.bfloat16()`` before a product."""

    def __init__(self, tell: Callable[[torch.dtype], None]):
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__ == "_to_copy.default" and args[0].dtype == torch.float64 and made.is_floating_point():
            self.tell(made.dtype)
        return made
