"""Where in the data a run is: the epoch, and the batch of it that comes next.

Order is a pure function of seed and epoch, so this is all there is to say; it means the same on any number of ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshfit.data.loader import Batch
from meshfit.errors import DataError

if TYPE_CHECKING:
    from meshfit.run import Run


@dataclass(slots=True)
class Position:
    """``now(step)`` is (epoch, batch). A batch counts once its step is taken: one that was dropped comes again."""

    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    step: int = -1
    """Steps that were taken when the last batch was handed out."""

    def now(self, step: int) -> tuple[int, int]:
        return self.after if step > self.step else self.before

    def hand_out(self, batch: Batch, step: int) -> None:
        self.before, self.step = (batch.epoch, batch.index), step
        self.after = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)


def follow(run: "Run", at: tuple[int, int] | None = None) -> Position:
    """Let ``run`` take its batches from ``at`` on, and keep what is returned where it is. To be called before it has
    taken any."""
    known = getattr(run, "position", None)
    if isinstance(known, Position) and at is None:
        return known
    position = Position(at or (0, 0), at or (0, 0))
    run.position = position  # type: ignore[attr-defined]
    run.batches = lambda: _batches(run, position)  # type: ignore[method-assign]
    return position


def _batches(run: "Run", position: Position) -> Iterator[Batch]:
    """As ``Run.batches``, from a position on."""
    from meshfit.run import MEASURED_STEPS

    epoch, start = position.now(run.step)
    made = 0  # since the run was started, or resumed
    while run.last_step is None or run.step < run.last_step:
        if run.last_step is None and epoch >= (run.job.epochs or math.inf):
            return
        empty = start == 0
        for batch in run.loader.epoch(epoch, start):
            position.hand_out(batch, run.step)
            yield batch
            empty, made = False, made + 1
            if made in MEASURED_STEPS:
                run._reconsider_compile(made)
            if run.last_step is not None and run.step >= run.last_step:
                return
        if empty:
            raise DataError(f"data= gave no sample in epoch {epoch}", "it must hold some each time it is read")
        epoch, start = epoch + 1, 0
