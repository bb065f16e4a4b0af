"""A line that moves while training goes on. Shown on terminals; elsewhere a plain line every few seconds."""

import sys
import time
from typing import TYPE_CHECKING, Any

from meshfit.step import Step

if TYPE_CHECKING:
    from meshfit.drive import Training

REFRESH_SECONDS = 0.1
PLAIN_SECONDS = 10.0


class Progress:
    """``shown=None`` shows it where standard error is a terminal."""

    def __init__(self, training: "Training", shown: bool | None):
        self.training = training
        self.shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Any = None
        self._task: Any = None
        self._next = 0.0
        self._valid = ""
        self._seen: list[tuple[float, int]] = []

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
        if step.step == 1:
            for note in self.training.notes:
                print(note, file=sys.stderr)
        now = time.perf_counter()
        final = step.step == self.training.last_step
        if now < self._next and not final:
            return
        self._seen = [*self._seen[-20:], (step.seconds, step.samples)]
        (t0, n0), (t1, n1) = self._seen[0], self._seen[-1]
        rate = (n1 - n0) / (t1 - t0) if t1 > t0 else step.samples / max(step.seconds, 1e-9)
        said = f"loss {step.loss:.4f}  {rate:,.0f} samples/s"
        if sys.stderr.isatty():
            self._next = now + REFRESH_SECONDS
            self._move(step, said)
        else:
            self._next = now + PLAIN_SECONDS
            total = self.training.last_step
            print(
                f"step {step.step}{f'/{total}' if total else ''}  {said}{self._valid}",
                file=sys.stderr,
                flush=True,
            )

    def _move(self, step: Step, said: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
            self._bar.start()
            total = self.training.last_step
            self._task = self._bar.add_task(f"epoch {step.epoch + 1}", total=total, said="")
        self._bar.update(
            self._task, completed=step.step, description=f"epoch {step.epoch + 1}", said=said + self._valid
        )
