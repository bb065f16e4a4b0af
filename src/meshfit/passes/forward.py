"""Forwards without a backward, of a model under any plan: evaluation and prediction."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshfit.axes.place import Placed
from meshfit.axes.precision import Precision
from meshfit.axes.spec import whole_output
from meshfit.passes.pipeline import LocalStages, StageForward


class PlacedForward:
    """``step(model, content)`` as a function of the content; None where the result is another rank's. All ranks that
    work on the same samples call it together."""

    def __init__(
        self, placed: Placed, step: Callable[[nn.Module, Any], Any], precision: Precision, device: torch.device
    ):
        self._placed, self._step, self._precision, self._device = placed, step, precision, device
        self._stages: StageForward | None = None
        if placed.staged is not None:
            self._stages = StageForward(LocalStages.of(placed, step, precision))
        elif placed.branched is not None:
            self._step = placed.branched.objective(step, precision, device)

    def __call__(self, content: Any) -> Any:
        if self._stages is not None:
            return whole_output(self._stages(content))
        with self._precision.arithmetic(self._device), self._placed.inside():
            return whole_output(self._step(self._placed.model, content))

    def finish(self) -> None:
        """Wait until all that was handed on to other stages has arrived: what is dropped before is lost to them."""
        if self._stages is not None:
            self._stages.flush()
