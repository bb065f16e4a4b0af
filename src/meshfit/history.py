"""The steps of a training, in bounded memory."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import overload

from meshfit.step import Step

MOST = 10_000  # steps without an evaluation that are kept


class History(Sequence[Step]):
    """Steps in order: every one of the first 10,000; of a longer training every 2nd, 4th, 8th ... one, so that 5,000 to
    10,000 are kept, evenly. The first, the last and those with an evaluation always are. All of them are in
    ``metrics.jsonl`` of the run's folder, with ``out=``."""

    def __init__(self) -> None:
        self.every = 1
        """Of the steps without an evaluation, those are kept whose number this divides."""
        self.total = 0
        """Steps of the training, kept or not."""
        self._steps: list[Step] = []
        self._evaluated = 0
        self._skipped = 0

    def add(self, step: Step) -> None:
        """Asynchronous ranks report out of order; a step reported again, after a server had to go back, replaces the
        earlier one."""
        steps = self._steps
        at = bisect_left(steps, step.step, key=lambda kept: kept.step)
        self._evaluated += bool(step.valid)
        if at < len(steps) and steps[at].step == step.step:
            self._evaluated -= bool(steps[at].valid)
            steps[at] = step
            return
        steps.insert(at, step)
        self.total += 1
        self._thin(at + 1, at, at - 1)  # a step that was the first or the last no longer is
        if len(steps) - self._evaluated > MOST:
            self.every *= 2
            self._thin(*range(len(steps) - 1, 0, -1))

    def _thin(self, *places: int) -> None:
        """Drop those of the steps at ``places``, from the back, that need not be kept."""
        steps = self._steps
        for i in places:
            if 0 < i < len(steps) - 1 and not steps[i].valid and steps[i].step % self.every:
                self._skipped += not steps.pop(i).taken

    @property
    def skipped(self) -> int:
        """Steps that were not taken, kept or not: loss or gradient was not finite."""
        return self._skipped + sum(not step.taken for step in self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> list[Step]: ...
    def __getitem__(self, at: int | slice) -> Step | list[Step]:
        return self._steps[at]

    def __repr__(self) -> str:
        if not self._steps:
            return "no steps"
        kept = "" if self.total == len(self) else f", {len(self):,} of them kept"
        return f"{self.total:,} steps{kept}, loss {self._steps[0].loss:.4g} to {self._steps[-1].loss:.4g}"
