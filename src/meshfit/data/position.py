"""Where in the data a run is: the epoch, and the batch of it that comes next.

Order is a pure function of seed and epoch, so this is all there is to say; it means the same on any number of ranks.
"""

from dataclasses import dataclass

from meshfit.data.loader import Batch


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
