"""What loop and schedules ask of an exchange: all-reduce, scatter, local steps, or a worker of model servers."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from meshfit.exchange.update import StepScalars


class Exchange(Protocol):
    """One rank's end of it. Per step: ``arm``, the last backward, ``finish``, the update, ``clear``."""

    summed: bool
    """Whether what ``finish`` returns, and the gradients, are summed over all ranks."""
    norm: Tensor | None
    """Of the summed gradients, where a rank does not hold all of them."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...

    @property
    def degree(self) -> int:
        """Ranks that share a batch."""
        ...

    @property
    def gradients(self) -> Sequence[Tensor]:
        """What the update scales: none where it is not made here."""
        ...

    def arm(self, own: StepScalars) -> None:
        """Give this rank's scalars of the step, with one flag ``broken``; the next backward is its last."""

    def finish(self) -> StepScalars:
        """Wait until the gradients are exchanged."""
        ...

    def clear(self) -> None:
        """Forget the gradients."""

    def remove(self) -> None:
        """Leave the parameters as they were found."""


class RepeatBatch(Exception):
    """The batch under way is void, and is computed again: a model server, or a worker, was lost in it."""
