"""Steps on their way to an experiment tracker: ``fit(..., callbacks=Track("wandb", project="digits"))``.

The tracker must be installed. Ranks do not wait for it: it hears of steps a moment later, in the caller's process.
"""

import importlib
from typing import Any

from meshfit.errors import JobError
from meshfit.step import Step

TRACKERS = ("wandb", "mlflow")


class Track:
    """A callback that sends loss, learning rate, gradient norm, rate and evaluations to ``tracker``.

    ``options`` go to wandb.init or mlflow.start_run as they are. ``every`` thins the steps; evaluations all go.
    """

    passive = True
    """It answers nothing: no rank need wait for it."""

    def __init__(self, tracker: str, *, every: int = 1, **options: Any):
        if tracker not in TRACKERS:
            raise JobError(f"there is no tracker {tracker!r}", f"there are {' and '.join(TRACKERS)}")
        try:
            self._module: Any = importlib.import_module(tracker)
        except ImportError:
            raise JobError(f"Track({tracker!r}) needs {tracker}, which is not installed") from None
        self.tracker, self.every, self.options = tracker, every, options
        self._run: Any = None
        self._last = (0.0, 0)

    def __call__(self, step: Step) -> None:
        if self._run is None:
            start = self._module.init if self.tracker == "wandb" else self._module.start_run
            self._run = start(**self.options) or True
        seconds, samples = self._last
        passed = step.seconds - seconds
        self._last = (step.seconds, step.samples)
        if step.step % self.every and not step.valid:
            return
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr, "epoch": step.epoch}
        if passed > 0:
            values["samples_per_second"] = (step.samples - samples) / passed
        values |= {f"valid/{name}": value for name, value in (step.valid or {}).items()}
        if self.tracker == "wandb":
            self._run.log(values, step=step.step)
        else:
            self._module.log_metrics(values, step=step.step)

    def finish(self) -> None:
        """Close the tracker's run. ``fit`` calls it at the end."""
        if self._run is not None:
            self._module.finish() if self.tracker == "wandb" else self._module.end_run()
            self._run = None
