"""The progress bar of a training, on a terminal or in a notebook. Elsewhere, if asked for: a line every ten seconds."""

import math
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from meshfit.observe.notebook import NotebookBar, kernel_display
from meshfit.step import Step

if TYPE_CHECKING:
    from meshfit.drive import Training

REFRESH_SECONDS = 0.1
NOTEBOOK_SECONDS = 0.3
PLAIN_SECONDS = 10.0


class Progress:
    """``shown`` None: only on a terminal, and in a notebook."""

    def __init__(self, training: "Training", shown: bool | None):
        self.training = training
        display = kernel_display()
        self.notebook = None if display is None else NotebookBar(display)
        self.shown = (self.notebook is not None or sys.stderr.isatty()) if shown is None else shown
        self._bar: Any = None
        self._task: Any = None
        self._next, self._begun = 0.0, False
        self._valid = ""
        self._seen: deque[tuple[float, int]] = deque(maxlen=21)
        self._coming: deque[Step] = deque()
        """Steps whose loss may still be on its way from a GPU."""
        self._loss = math.nan

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: Step) -> None:
        if not self.shown:
            return
        if step.valid:
            self._valid = "  valid: " + "  ".join(f"{name} {value:.4g}" for name, value in step.valid.items())
        if not self._begun and self.notebook is None:
            for note in self.training.notes:
                print(note, file=sys.stderr)
        if not self._begun and step.step == 1:  # of a run that goes on, samples were seen before
            self._seen.append((0.0, 0))
        self._begun = True
        now, last = time.perf_counter(), step.step == self.training.last_step
        self._coming.append(step)
        while self._coming and (last or math.isnan(self._loss) or self._coming[0].reading.ready):
            self._loss = self._coming.popleft().loss  # the first is waited for, and the last
        if now < self._next and not last:
            return
        self._seen.append((step.seconds, step.samples))
        (t0, n0), (t1, n1) = self._seen[0], self._seen[-1]
        rate = (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0
        said = f"loss {self._loss:.4f}  {rate:,.0f} samples/s"
        if self.notebook is not None:
            self._next = now + NOTEBOOK_SECONDS
            notes = self.training.notes
            self.notebook.move(step.step, self.training.last_step, f"epoch {step.epoch + 1}", said + self._valid, notes)
        elif sys.stderr.isatty():
            self._next = now + REFRESH_SECONDS
            self._move(step, said)
        else:
            self._next = now + PLAIN_SECONDS
            of = f"/{self.training.last_step}" if self.training.last_step else ""
            print(f"step {step.step}{of}  {said}{self._valid}", file=sys.stderr, flush=True)

    def _move(self, step: Step, said: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            texts = TextColumn("{task.description}"), TextColumn("{task.fields[said]}")
            columns = texts[0], BarColumn(), MofNCompleteColumn(), texts[1], TimeRemainingColumn()
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self.training.last_step, said="")
        epoch = f"epoch {step.epoch + 1}"
        self._bar.update(self._task, completed=step.step, description=epoch, said=said + self._valid)
