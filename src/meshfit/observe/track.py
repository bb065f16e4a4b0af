"""Steps for an experiment tracker: ``fit(..., callbacks=Track("wandb", project="digits"))``.

The tracker must be installed. It runs in the caller's process, and ranks do not wait for it. If it fails (no network,
no login, a wrong option), there is one warning, and the training goes on without it.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

from meshfit.errors import JobError
from meshfit.step import Step

TRACKERS = ("wandb", "mlflow")


class Track:
    """A callback that sends loss, learning rate, gradient norm, rate and evaluations to ``tracker``.

    ``project`` is wandb's project or MLflow's experiment, ``name`` the run's name; other ``options`` go to wandb.init
    or mlflow.start_run as they are. ``every`` thins the steps; evaluations all go.
    """

    def __init__(
        self, tracker: str, *, every: int = 1, project: str | None = None, name: str | None = None, **options: Any
    ):
        if tracker not in TRACKERS:
            raise JobError(f"there is no tracker {tracker!r}", f"there are {' and '.join(TRACKERS)}")
        try:
            self._module: Any = importlib.import_module(tracker)
        except ImportError:
            raise JobError(f"Track({tracker!r}) needs {tracker}, which is not installed") from None
        if not isinstance(every, int) or every < 1:
            raise JobError(f"Track's every={every!r} is not a whole number of steps above 0")
        self.tracker, self.every, self.project, self.name, self.options = tracker, every, project, name, options
        self._run: Any = None
        self._failed = False
        self._last = (0.0, 0)

    def __call__(self, step: Step) -> None:
        seconds, samples = self._last
        passed = step.seconds - seconds
        self._last = (step.seconds, step.samples)
        if step.step % self.every and not step.valid:
            return
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr, "epoch": step.epoch}
        if passed > 0:
            values["samples_per_second"] = (step.samples - samples) / passed
        values |= {f"valid/{name}": value for name, value in (step.valid or {}).items()}
        self._try(lambda: self._log(values, step.step))

    def _try(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            act()
        except Exception as error:
            self._failed = True
            what = str(error).strip().split("\n")[0][:300]
            warnings.warn(
                f"meshfit: {self.tracker} failed, and training goes on without it: {type(error).__name__}: {what}",
                stacklevel=4,
            )

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._run is None:
            self._run = self._started() or True
        if self.tracker == "wandb":
            self._run.log(values, step=step)
        else:
            self._module.log_metrics(values, step=step)

    def _started(self) -> Any:
        if self.tracker == "wandb":
            return self._module.init(project=self.project, name=self.name, **self.options)
        if self.project is not None:
            self._module.set_experiment(self.project)
        return self._module.start_run(**{"run_name": self.name, **self.options})

    def finish(self) -> None:
        """Close the tracker's run. ``fit`` calls it at the end."""
        if self._run is not None:
            self._try(self._module.finish if self.tracker == "wandb" else self._module.end_run)
            self._run = None
